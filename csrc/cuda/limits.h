// Which keys and chunks a tile of rows sees, in 32 bits: for the kernels, and for the host where all sequences are
// alike.
#pragma once

#include "../mask.h"

namespace detattn {

DETATTN_HD int64_t clamp64(int64_t x, int64_t lo, int64_t hi) { return x < lo ? lo : (x > hi ? hi : x); }

// visible_keys of mask.h for the rows of one tile, in 32 bits and counted from the first valid key: row i of the tile
// sees the relative keys [first(i), past(i)), none if that is empty. `past` may be negative.
struct RowLimits {
  int32_t low, high, end;
  DETATTN_HD int first(int i) const { return low + i > 0 ? low + i : 0; }
  DETATTN_HD int past(int i) const { return high + i < end ? high + i : end; }
};
DETATTN_HD RowLimits row_limits(const Mask& mask, const Sequence& s, int row) {
  constexpr int64_t kFar = (int64_t{1} << 31) - 1024;  // room for the rows of a tile
  const int64_t aligned = row + s.keys - s.queries - s.valid.begin;
  return {static_cast<int32_t>(mask.left < 0 ? -kFar : clamp64(aligned - mask.left, -kFar, kFar)),
          static_cast<int32_t>(mask.right < 0 ? kFar : clamp64(aligned + mask.right + 1, -kFar, kFar)),
          static_cast<int32_t>(s.valid.end > s.valid.begin ? s.valid.end - s.valid.begin : 0)};
}

// The chunk schedule of contract.h for 32-bit relative keys, unrolled so that the divisions have constant divisors.
DETATTN_HD int chunk_of(int key) {
  constexpr ChunkSchedule chunks = kChunks;
  int begin = 0, index = 0, result = 0;
  bool found = false;
#pragma unroll
  for (int i = 0; i < kChunkSteps; ++i) {
    const bool last = i == kChunkSteps - 1;
    if (!found && (last || key < chunks.step[i].end)) {
      result =
          index + static_cast<int>(static_cast<unsigned>(key - begin) / static_cast<unsigned>(chunks.step[i].keys));
      found = true;
    }
    if (!last) {
      index += (static_cast<int>(chunks.step[i].end) - begin) / chunks.step[i].keys;
      begin = static_cast<int>(chunks.step[i].end);
    }
  }
  return result;
}
// First relative key of a chunk.
DETATTN_HD int chunk_start(int chunk) {
  constexpr ChunkSchedule chunks = kChunks;
  int begin = 0, index = 0, result = 0;
  bool found = false;
#pragma unroll
  for (int i = 0; i < kChunkSteps; ++i) {
    const bool last = i == kChunkSteps - 1;
    const int count = last ? 0 : (static_cast<int>(chunks.step[i].end) - begin) / chunks.step[i].keys;
    if (!found && (last || chunk < index + count)) {
      result = begin + (chunk - index) * chunks.step[i].keys;
      found = true;
    }
    if (!last) {
      index += count;
      begin = static_cast<int>(chunks.step[i].end);
    }
  }
  return result;
}

// The chunks that hold a key some query of the sequence sees; at least one, so that every row has a writer.
struct ChunkRange {
  int32_t first, count;
};
DETATTN_HD ChunkRange sequence_chunks(const Mask& mask, const Sequence& s) {
  const RowLimits limits = row_limits(mask, s, 0);
  const int begin = limits.first(0), end = limits.past(static_cast<int>(s.queries) - 1);
  if (end <= begin) return {0, 1};
  const int first = chunk_of(begin);
  return {first, chunk_of(end - 1) - first + 1};
}

}  // namespace detattn
