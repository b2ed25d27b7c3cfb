// Tile shapes: functions of the head dim alone. Nothing here moves a bit; block sizes come from the contract.
#pragma once

#include "../contract.h"

namespace detattn {

constexpr int kInstanceDims[] = {64, 96, 128, 192, 256};

// The instance that serves a head dim: copies fill the columns above it with zeros.
constexpr int instance_dim(int head_dim) {
  for (const int d : kInstanceDims) {
    if (head_dim <= d) return d;
  }
  return 0;
}

// Prefill: a tile is `groups` warpgroups of 64 rows; a producer warpgroup feeds them.
struct FwdTile {
  int groups;
  bool q_in_registers;  // read from shared memory once a tile instead of once a block
  int buffers;          // of a block of K or of V
  int shared_total;     // how many float4 of a thread's chunk total live in shared memory; the rest is in the workspace
  int staged_panels;    // 64-column panels of the output that are staged at a time, in the memory of the totals
  int producer_registers, consumer_registers;
  constexpr int rows() const { return 64 * groups; }
};
constexpr FwdTile fwd_tile(int instance, bool softcap) {
  switch (instance) {
    case 64:
      // 137 KB. Exponentials and products take equally long: a third warpgroup fills the gaps.
      if (!softcap) return {3, false, 4, 8, 1, 24, 160};
      return {2, true, 4, 8, 1, 40, 232};
    case 96:
      return {2, true, 4, 12, 2, 40, 232};  // 209 KB: a 128-wide layout whose last 32 columns are never multiplied
    case 128:
      return {2, !softcap, 4, 16, 2, 40, 232};  // 225 KB; the softcap needs the registers of Q
    case 192:
      return {2, !softcap, 4, 20, 3, 24, 240};  // 225 KB: 4 of the 24 float4 do not fit
    default:
      return {2, false, 3, 16, 4, 24, 240};  // 225 KB: output 128 + scores 32 + P 16 registers leave no room for Q
  }
}
constexpr int kRowsPerGroup = 64;

// K and V of the heads in flight should stay in L2: a section of heads holds at most this many bytes.
constexpr int64_t kSectionBytes = int64_t{24} << 20;

// Decode: 8 packed rows (queries x heads of a group) against the keys of one chunk.
constexpr int kDecodeRows = 8;
// Keys of one copy. Few, so that the two copies of the same keys stand close together: the memory is 1 to 3 % faster.
constexpr int kDecodeBoxKeys = 32;
// CTAs of a cluster that holds all chunks of a row tile; more chunks are merged through the workspace.
constexpr int kDecodeMaxCluster = 8;
// CTAs that can share a chunk of the first step of the schedule, most first: each takes a slice of the head dim in
// multiples of 16 columns, whose values for all keys of the chunk (at most 128 KB) lie in shared memory.
struct SplitWays {
  int ways[3];
};
constexpr SplitWays split_ways(int instance) {
  switch (instance) {
    case 64:
      return {4, 2, 0};
    case 96:
      return {2, 0, 0};
    case 128:
      return {8, 4, 2};
    case 192:
      return {4, 0, 0};
    default:
      return {8, 4, 0};
  }
}
constexpr int kSplitMaxOwn = 4;  // blocks of a chunk for one CTA
// A sequence with at most this many packed rows takes the decode tiling.
constexpr int kDecodeMaxRows = 64;

}  // namespace detattn
