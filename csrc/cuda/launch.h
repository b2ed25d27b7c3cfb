// What the host launcher hands to the kernels.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>

#include "../params.h"
#include "limits.h"
#include "tiles.h"

namespace detattn {

// Valid keys of one dense sequence, from its padding mask.
struct KeySpan {
  int32_t begin, end;
  int32_t holes;  // 1: some key inside is masked, read key_bits
};

// A tensor map covers (d, row, head, batch). A dimension whose stride is 0 has extent 1 in the map; its coordinate is
// then multiplied by 0.
struct TensorView {
  CUtensorMap map;
  int32_t head_step, batch_step;
};

// What every kernel knows of the call.
struct ProblemArgs {
  int32_t batch, heads_q, heads_kv, group, head_dim;
  int64_t seqlen_q, seqlen_k;
  Mask mask;
  const int32_t *cu_seqlens_q, *cu_seqlens_k, *seqused_k, *block_table;
  int64_t table_batch;
  int32_t page_size, box_keys;  // box_keys: keys of one copy, a power of two that divides the page size
  const float* sinks;

  float kappa, scale, cap;  // num::Scaling

  // Workspace.
  const KeySpan* spans;      // [batch]; null: every key is valid
  const uint32_t* key_bits;  // [batch, key_words], bit k of word w: relative key 32w + k is valid
  int64_t key_words;
};

struct FwdArgs : ProblemArgs {
  TensorView q, k, v, out;
  TensorView v_slice;  // of the columns of a CTA where CTAs share a chunk
  MutableRows out_rows, lse;
  Rows q_rows;
  int32_t out_map_ok;  // 0: `out` cannot be described by a tensor map

  // Workspace.
  uint32_t* ticket;  // next tile of the prefill; null: there are no more tiles than CTAs
  float4* totals;    // [CTA, total float4 of a thread that are not in shared memory, threads]

  // Prefill. Dense: `tiles` tiles. Varlen: the plan below.
  int64_t tiles;
  int32_t tile_rows, tiles_per_head, heads_per_section;

  // Decode. Dense: `decode_items` items, max_chunks for each of the row_tiles of a key head. Varlen: the plan.
  int64_t decode_items;
  int32_t row_tiles, max_chunks;
  int32_t decode_buffers, decode_step;  // of the ring; blocks of a step
  int32_t cluster;                      // CTAs of a cluster that hold all chunks of a row tile; 0: no clusters
  int32_t split;                        // CTAs that share a chunk; 0: a CTA a chunk
  // Dense without a padding mask and with one row tile a key head: the same for all sequences. No chunks: not so.
  struct {
    RowLimits limits;
    ChunkRange chunks;
  } same;
  int32_t one_wave;                 // all CTAs run at once
  int64_t decode_most_rows;         // varlen: a sequence with more packed rows is prefilled
  float *partial_out, *partial_ml;  // [item, 8, instance dim], [item, 8, 2 (reference, sum)]

  int32_t sequences;  // varlen: batch + 1; the last one owns the rows past cu_seqlens_q[batch]
  // The varlen plan, in the order of `order`, longest keys first. Null: few sequences, decode alone, no plan.
  const int32_t* order;              // [sequences]
  const int64_t* tile_begin;         // [sequences + 1], prefill tiles
  const int64_t* decode_begin;       // [sequences + 1], decode items
  const int64_t* decode_rows_begin;  // [sequences + 1], row tiles of decode
};

using FwdLauncher = cudaError_t (*)(const FwdArgs& args, int ctas, cudaStream_t stream);

// One a head dim; the instance files define them.
struct Instance {
  FwdLauncher forward[2][2];  // [bf16][softcap]
  FwdLauncher decode[2][2];
  FwdLauncher decode_split[2][3];  // [bf16][place in split_ways]
  struct {
    int buffer, fixed, step_block;  // bytes of shared memory: a buffer of the ring, the fixed part, a block of a step
  } decode_shared;
};
const Instance& instance_d64();
const Instance& instance_d96();
const Instance& instance_d128();
const Instance& instance_d192();
const Instance& instance_d256();

// Key heads of a section: what fits in L2 at once, evened out so that no small section is left for the end.
DETATTN_HD uint32_t section_size(uint32_t heads_kv, int64_t keys, int instance_dim) {
  const uint32_t head_keys = static_cast<uint32_t>(kSectionBytes / (4 * instance_dim));
  const uint32_t fit = keys > 0 ? head_keys / static_cast<uint32_t>(keys) : heads_kv;
  const uint32_t most = fit < 1 ? 1 : (fit < heads_kv ? fit : heads_kv), sections = (heads_kv + most - 1) / most;
  return (heads_kv + sections - 1) / sections;
}

// Launches so that the kernel may start while the one before it ends; every kernel waits for that one's writes before
// it reads or writes global memory.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_clusters(void (*kernel)(Parameters...), int cluster, dim3 grid, int threads, size_t shared,
                            cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), int64_t ctas, int threads, size_t shared, cudaStream_t stream,
                          const Arguments&... arguments) {
  return launch_clusters(kernel, 1, dim3(static_cast<unsigned>(ctas)), threads, shared, stream, arguments...);
}

constexpr int kMaxDevices = 64;

// The shared-memory limit of a kernel is raised once a device.
inline cudaError_t raise_shared_limit(const void* kernel, uint32_t bytes, std::atomic<bool> (&done)[kMaxDevices]) {
  int device = 0;
  if (const cudaError_t e = cudaGetDevice(&device)) return e;
  const bool known = device < kMaxDevices;
  if (known && done[device].load(std::memory_order_relaxed)) return cudaSuccess;
  const cudaError_t e =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (e == cudaSuccess && known) done[device].store(true, std::memory_order_relaxed);
  return e;
}

}  // namespace detattn
