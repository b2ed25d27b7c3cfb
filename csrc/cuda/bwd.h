// The backward: its tile shapes, what the host launcher hands to its kernels, the launchers of those kernels.
#pragma once

#include "launch.h"

namespace detattn {

// The instance of the backward that serves a head dim.
constexpr int bwd_instance_dim(int head_dim) { return instance_dim(head_dim) == 192 ? 256 : instance_dim(head_dim); }

// A CTA owns one block of keys and meets the tiles of 64 queries one after the other. Two warpgroups share the work:
// by keys (64 each), or, where dk and dv of 64 keys do not fit into the registers of one, by columns of dk and dv.
struct BwdTile {
  int keys;
  bool split_columns;
  int stages;      // buffers of Q and of dO
  int dq_buffers;  // each with a thread that adds it to the sum: waiting for a turn and adding take longer than a tile
  int producer_registers, consumer_registers;
};
constexpr BwdTile bwd_tile(int instance) {
  if (instance > 128) return {64, true, 1, 1, 40, 232};     // 209 KB
  if (instance == 128) return {128, false, 2, 2, 24, 240};  // 226 KB; products in flight leave 8 registers over
  return {128, false, 2, 2, 40, 232};
}
constexpr int kBwdRows = 64, kBwdGroups = 2;
constexpr int bwd_columns(int instance) { return (instance + 63) / 64 * 64; }

// Statistics of a tile of queries, written by the row kernel.
struct BwdRecord {
  float lse2[kBwdRows];   // lse in powers of two; +inf: the row adds nothing
  float shift[kBwdRows];  // delta - dlse
  uint32_t dead;          // some row adds nothing
  float dsink;            // the tile's part of the gradient of the head's sink
  float unused[2];
};
static_assert(sizeof(BwdRecord) % 16 == 0);

struct BwdArgs : ProblemArgs {
  TensorView q, k, v, dout;
  Rows dout_rows, out_rows, lse, dlse;  // dlse.data may be null
  MutableRows dq, dk, dv;
  float* dsinks;
  float dq_scale;  // the caller's scale

  // Workspace. Tiles of queries are numbered by sequence, head, tile.
  BwdRecord* records;
  float* dq_sums;    // [tile][64 x columns], in the order of the registers of a product
  uint32_t* turns;   // [tile]: how many key blocks have added their part of dq
  uint32_t* ticket;  // the next job

  int32_t tiles_per_head;     // dense: room for the tiles of one head
  int32_t blocks_per_head;    // dense
  int32_t heads_per_section;  // dense: key heads (of all sequences) that are worked on together
  int64_t tiles, jobs;        // CTAs: upper bounds
  const int32_t* order;       // varlen: sequences, the longest first
  const int64_t* tile_begin;  // varlen: [batch + 1], tiles of the sequences before
  const int64_t* job_begin;   // varlen: [batch + 1], jobs of the sequences before in `order`
};

using BwdLauncher = cudaError_t (*)(const BwdArgs& args, cudaStream_t stream);
struct BwdInstance {
  BwdLauncher backward[2][2];  // [bf16][softcap]
};
const BwdInstance& bwd_instance_d64();
const BwdInstance& bwd_instance_d96();
const BwdInstance& bwd_instance_d128();
const BwdInstance& bwd_instance_d256();

// The kernels around the main one (bwd_rows.cu) and the varlen plan (prepare.cu).
cudaError_t launch_bwd_rows(const BwdArgs& args, DType dtype, int instance, cudaStream_t stream);
cudaError_t launch_bwd_finish(const BwdArgs& args, DType dtype, int instance, cudaStream_t stream);
cudaError_t launch_bwd_dsinks(const BwdArgs& args, cudaStream_t stream);
cudaError_t launch_bwd_zero(const BwdArgs& args, int sms, cudaStream_t stream);

struct BwdPlan {
  int32_t* order;
  int64_t *tile_begin, *job_begin;
};
cudaError_t launch_bwd_plan(const BwdArgs& args, const BwdPlan& plan, int keys, cudaStream_t stream);

}  // namespace detattn
