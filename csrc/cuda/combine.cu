// The left-to-right merge of the chunks of decoded rows.
#include "prepare.h"
#include "rows.cuh"

namespace detattn {
namespace {

constexpr int kWarps = 4, kColumns = 128;  // of a warp's task: one row, 4 columns a lane

struct Task {
  SequenceView view;
  int64_t slot;  // of the first chunk; the next chunk is `step` rows of partial results further
  int chunks, head, query, column, row;
};

enum class Found { kRow, kNothing, kPastTheEnd };
// kNothing: the row does not exist, or its only chunk is already the result.
DETATTN_DEV Found locate_task(const FwdArgs& p, int64_t task, int instance_dim, Task& x) {
  const int parts = (instance_dim + kColumns - 1) / kColumns;
  const uint32_t per_tile = kDecodeRows * parts, tile = static_cast<uint32_t>(task) / per_tile;
  const int in_tile = static_cast<int>(static_cast<uint32_t>(task) - tile * per_tile), r = in_tile / parts;
  x.column = (in_tile - r * parts) * kColumns;
  int64_t first_slot, in_sequence = tile;
  int b;
  if (p.cu_seqlens_q) {
    Place place;
    if (!find_sequence<false>(p, tile, place)) return Found::kPastTheEnd;
    b = place.sequence;
    in_sequence -= place.begin;
    first_slot = place.items_begin;
  } else {
    const uint32_t per_sequence = p.heads_kv * p.row_tiles;
    b = static_cast<uint32_t>(tile) / per_sequence;
    in_sequence -= static_cast<int64_t>(b) * per_sequence;
    first_slot = static_cast<int64_t>(b) * per_sequence * p.max_chunks;
  }
  x.view = view_sequence(p, b);
  x.chunks = sequence_chunks(p.mask, x.view.sequence).count;
  if (x.chunks == 1) return Found::kNothing;
  const int rows = static_cast<int>(x.view.sequence.queries) * p.group, tiles = (rows + kDecodeRows - 1) / kDecodeRows;
  const int head_kv = static_cast<int>(in_sequence) / tiles;
  const int row = (static_cast<int>(in_sequence) - head_kv * tiles) * kDecodeRows + r;
  if (row >= rows) return Found::kNothing;
  x.query = row / p.group;
  x.head = head_kv * p.group + row - x.query * p.group;
  x.row = r;
  x.slot = first_slot + in_sequence * (p.cu_seqlens_q ? x.chunks : p.max_chunks);
  return x.slot + x.chunks <= p.decode_items ? Found::kRow : Found::kNothing;
}

// A warp a row. The weights of 32 chunks are found by the 32 lanes at once, from a prefix maximum; what remains serial
// is one multiplication and one multiply-add a chunk.
template <typename Element>
DETATTN_DEV void merge_row(const FwdArgs& p, const Task& x, int instance_dim) {
  constexpr int kAhead = 16;
  const num::Scaling scaling{p.kappa, p.scale, p.cap};
  const int lane = threadIdx.x & 31, column = x.column + 4 * lane;
  const bool live = column < instance_dim;
  const float* const out = p.partial_out + (x.slot * kDecodeRows + x.row) * instance_dim + (live ? column : 0);
  const float2* const state = reinterpret_cast<const float2*>(p.partial_ml) + x.slot * kDecodeRows + x.row;
  const int64_t step = static_cast<int64_t>(kDecodeRows) * instance_dim;
  float m = num::neg_inf(), l = 0.f;
  float4 o = {0.f, 0.f, 0.f, 0.f};
  for (int c0 = 0; c0 < x.chunks; c0 += 32) {
    const float2 ml = c0 + lane < x.chunks ? __ldcg(state + static_cast<int64_t>(c0 + lane) * kDecodeRows)
                                           : make_float2(num::neg_inf(), 0.f);
    num::MergeWeights w;
#pragma unroll
    for (int half = 0; half < 32; half += kAhead) {
      if (c0 + half >= x.chunks) break;
      float4 t[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (c0 + half + i < x.chunks) t[i] = __ldcg(reinterpret_cast<const float4*>(out + (c0 + half + i) * step));
      }
      if (half == 0) {
        float top = ml.x;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
          const float y = __shfl_up_sync(0xffffffff, top, d);
          if (lane >= d) top = fmaxf(top, y);
        }
        top = fmaxf(top, m);
        float before = __shfl_up_sync(0xffffffff, top, 1);
        if (lane == 0) before = m;
        w = num::merge_weights(before, ml.x, scaling.kappa);
        m = __shfl_sync(0xffffffff, top, 31);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (c0 + half + i < x.chunks) {
          const float a = __shfl_sync(0xffffffff, w.total, half + i), b = __shfl_sync(0xffffffff, w.chunk, half + i);
          l = num::merge(l, a, __shfl_sync(0xffffffff, ml.y, half + i), b);
          o.x = num::merge(o.x, a, t[i].x, b);
          o.y = num::merge(o.y, a, t[i].y, b);
          o.z = num::merge(o.z, a, t[i].z, b);
          o.w = num::merge(o.w, a, t[i].w, b);
        }
      }
    }
  }
  if (p.sinks) {
    const float a = num::add_sink(m, l, p.sinks[x.head], scaling);
    o = {__fmul_rn(o.x, a), __fmul_rn(o.y, a), __fmul_rn(o.z, a), __fmul_rn(o.w, a)};
  }
  const float inv = num::inverse(l);
  write_columns<Element>(p, x.view, x.head, x.query, column, o, inv);
  if (x.column == 0 && lane == 0) write_lse(p, x.view, x.head, x.query, m, l);
}

template <typename Element>
__global__ void __launch_bounds__(32 * kWarps)
    combine_kernel(const __grid_constant__ FwdArgs p, int instance_dim, int64_t most_tiles) {
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
  const int parts = (instance_dim + kColumns - 1) / kColumns;
  const int64_t tiles = p.cu_seqlens_q && p.order ? p.decode_rows_begin[p.sequences] : most_tiles;
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  for (int64_t task = static_cast<int64_t>(blockIdx.x) * kWarps + warp; task < tiles * kDecodeRows * parts;
       task += static_cast<int64_t>(gridDim.x) * kWarps) {
    Task x;
    const Found found = locate_task(p, task, instance_dim, x);
    if (found == Found::kPastTheEnd) break;
    if (found == Found::kRow) merge_row<Element>(p, x, instance_dim);
  }
}

}  // namespace

cudaError_t launch_combine(const FwdArgs& args, DType dtype, int instance_dim, int64_t most_tiles, int sms,
                           cudaStream_t stream) {
  const int64_t tasks = most_tiles * kDecodeRows * ((instance_dim + kColumns - 1) / kColumns);
  const int64_t most = int64_t{16} * sms, wanted = (tasks + kWarps - 1) / kWarps;
  const int ctas = static_cast<int>(wanted < most ? wanted : most);
  const auto kernel = dtype == DType::kBFloat16 ? combine_kernel<__nv_bfloat16> : combine_kernel<__half>;
  return launch_kernel(kernel, ctas, 32 * kWarps, 0, stream, args, instance_dim, most_tiles);
}

}  // namespace detattn
