// The numeric contract's constants for C++ and CUDA. `src/detattn/contract.py` is the source: the build compiles
// its values in and `static_assert`s them against these, and the package compares them again when it loads.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define DETATTN_HD __host__ __device__ __forceinline__
#else
// Always inlined: a copy left out of line by a unit built for AVX could be the one that the linker keeps for all.
#define DETATTN_HD [[gnu::always_inline]] inline
#endif

namespace detattn {

constexpr int kContractVersion = 2;
constexpr int kMaxHeadDim = 256;

// The exponent reference of a row moves only when the block maximum passes it by more than this many powers of two.
constexpr float kLazyThreshold = 8.0f;

// Keys of one step of the online softmax.
constexpr int kBlockKeys = 128;
constexpr int kBlockKeysWide = 64;  // head dims above kBlockWideAbove
constexpr int kBlockWideAbove = 128;
DETATTN_HD constexpr int block_keys(int head_dim) { return head_dim > kBlockWideAbove ? kBlockKeysWide : kBlockKeys; }

// The chunk schedule: below `end` (a relative key position, counted from the first valid key) chunks hold `keys` keys.
struct ChunkStep {
  int64_t end;
  int32_t keys;
};
constexpr int64_t kUnbounded = INT64_MAX;
constexpr int kChunkSteps = 2;
struct ChunkSchedule {
  ChunkStep step[kChunkSteps];
};
constexpr ChunkSchedule kChunks = {{{32768, 1024}, {kUnbounded, 2048}}};

// Index of the chunk that holds relative key `key`.
DETATTN_HD constexpr int64_t chunk_index(int64_t key) {
  constexpr ChunkSchedule chunks = kChunks;
  int64_t begin = 0, index = 0;
  for (int i = 0; i < kChunkSteps - 1; ++i) {
    if (key < chunks.step[i].end) return index + (key - begin) / chunks.step[i].keys;
    index += (chunks.step[i].end - begin) / chunks.step[i].keys;
    begin = chunks.step[i].end;
  }
  return index + (key - begin) / chunks.step[kChunkSteps - 1].keys;
}

// First relative key of chunk `index`.
DETATTN_HD constexpr int64_t chunk_begin(int64_t index) {
  constexpr ChunkSchedule chunks = kChunks;
  int64_t begin = 0;
  for (int i = 0; i < kChunkSteps - 1; ++i) {
    const int64_t count = (chunks.step[i].end - begin) / chunks.step[i].keys;
    if (index < count) return begin + index * chunks.step[i].keys;
    index -= count;
    begin = chunks.step[i].end;
  }
  return begin + index * chunks.step[kChunkSteps - 1].keys;
}

// Chunks that `keys` relative keys touch.
DETATTN_HD constexpr int64_t chunk_count(int64_t keys) { return keys <= 0 ? 0 : chunk_index(keys - 1) + 1; }

}  // namespace detattn
