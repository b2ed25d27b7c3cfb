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

// Prefill: a tile is 2 warpgroups of 64 rows; a producer warpgroup feeds them.
struct FwdTile {
  bool q_in_registers;   // read from shared memory once a tile instead of once a block
  int stages;            // of K, and of V
  int shared_total;      // how many float4 of a thread's chunk total live in shared memory; the rest is in the workspace
  int staged_panels;     // 64-column panels of the output that are staged at a time, in the memory of the totals
};
constexpr FwdTile fwd_tile(int instance, bool softcap) {
  switch (instance) {
    case 64:
      return {true, 2, 8, 1};  // 113 KB
    case 96:
      return {true, 2, 12, 2};  // 209 KB: a 128-wide layout whose last 32 columns are never multiplied
    case 128:
      return {!softcap, 2, 16, 2};  // 225 KB; the softcap needs the registers of Q
    case 192:
      return {!softcap, 2, 20, 3};  // 225 KB: 4 of the 24 float4 do not fit
    default:
      return {false, 2, 8, 2};  // 225 KB: output 128 + scores 32 + P 16 registers leave no room for Q
  }
}

// 40 and 232 registers: (40 + 2 * 232) * 128 threads fill the register file.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kRowsPerGroup = 64, kConsumerGroups = 2, kTileRows = kRowsPerGroup * kConsumerGroups;
constexpr int kFwdThreads = 128 * (1 + kConsumerGroups);

// K and V of the heads in flight should stay in L2: a section of heads holds at most this many bytes.
constexpr int64_t kSectionBytes = int64_t{24} << 20;

// Decode: 8 packed rows (queries x heads of a group) against the keys of one chunk.
constexpr int kDecodeRows = 8;
// A sequence with at most this many packed rows takes the decode tiling.
constexpr int kDecodeMaxRows = 64;

}  // namespace detattn
