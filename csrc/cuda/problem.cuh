// A sequence's place and lengths, read on the device.
#pragma once

#include "launch.h"
#include "ptx.cuh"

namespace detattn {

struct SequenceView {
  Sequence sequence;
  int32_t q_row, k_row;    // first row in the packed tensors (0 when dense)
  int32_t q_batch, k_batch;  // batch coordinates (0 when packed)
  int32_t holes;
};

DETATTN_DEV int64_t clamp64(int64_t x, int64_t lo, int64_t hi) { return x < lo ? lo : (x > hi ? hi : x); }

// Lengths are clamped to the tensors, so that no content of the length tensors can lead outside them.
DETATTN_DEV SequenceView view_sequence(const FwdArgs& p, int b) {
  SequenceView view = {};
  Sequence& s = view.sequence;
  if (p.cu_seqlens_q) {
    const int64_t begin = clamp64(p.cu_seqlens_q[b], 0, p.seqlen_q);
    const int64_t end = b < p.batch ? clamp64(p.cu_seqlens_q[b + 1], begin, p.seqlen_q) : p.seqlen_q;
    view.q_row = static_cast<int32_t>(begin);
    s.queries = end - begin;
    if (b == p.batch) return view;
  } else {
    s.queries = p.seqlen_q;
    view.q_batch = b;
  }
  s.keys = p.seqlen_k;
  if (p.cu_seqlens_k) {
    const int64_t begin = clamp64(p.cu_seqlens_k[b], 0, p.seqlen_k);
    s.keys = clamp64(p.cu_seqlens_k[b + 1], begin, p.seqlen_k) - begin;
    view.k_row = static_cast<int32_t>(begin);
  } else if (!p.block_table) {
    view.k_batch = b;
  }
  if (p.seqused_k) s.keys = clamp64(p.seqused_k[b], 0, s.keys);
  s.valid = {0, s.keys};
  if (p.spans) {
    const KeySpan span = p.spans[b];
    s.valid = {span.begin, span.end < s.keys ? span.end : s.keys};
    view.holes = span.holes;
  }
  return view;
}

// visible_keys of mask.h for every row of a sequence, counted from the first valid key: query i sees the relative keys
// [max(i + low, 0), min(i + high, end)).
struct RowLimits {
  int64_t low, high;
  int32_t end;
  DETATTN_DEV int first(int i) const { return static_cast<int>(i + low > 0 ? i + low : 0); }
  DETATTN_DEV int past(int i) const { return static_cast<int>(clamp64(i + high, 0, end)); }
};
DETATTN_DEV RowLimits row_limits(const Mask& mask, const Sequence& s) {
  constexpr int64_t kFar = int64_t{1} << 42;
  const int64_t shift = s.keys - s.queries - s.valid.begin;
  return {mask.left < 0 ? -kFar : shift - mask.left, mask.right < 0 ? kFar : shift + mask.right + 1,
          static_cast<int32_t>(s.valid.end > s.valid.begin ? s.valid.end - s.valid.begin : 0)};
}

// First relative key of the chunk after the one that holds `key`.
DETATTN_DEV int chunk_end(int key) {
  constexpr ChunkSchedule chunks = kChunks;
  int64_t begin = 0;
#pragma unroll
  for (int i = 0; i < kChunkSteps - 1; ++i) {
    if (key < chunks.step[i].end) {
      return static_cast<int>(begin) + ((key - static_cast<int>(begin)) / chunks.step[i].keys + 1) * chunks.step[i].keys;
    }
    begin = chunks.step[i].end;
  }
  const int keys = chunks.step[kChunkSteps - 1].keys;
  return static_cast<int>(begin) + ((key - static_cast<int>(begin)) / keys + 1) * keys;
}

// Largest i in [0, n) with begin[i] <= x; begin[0] <= x. All lanes of a warp call it and get the same answer.
DETATTN_DEV int warp_search(const int64_t* begin, int n, int64_t x) {
  const int lane = threadIdx.x & 31;
  int lo = 0;
  while (n > 1) {
    const int step = (n + 31) / 32, i = lane * step;
    const unsigned below = __ballot_sync(0xffffffff, i < n && begin[lo + (i < n ? i : 0)] <= x);
    const int hit = 31 - __clz(below);
    lo += hit * step;
    n = min(step, n - hit * step);
  }
  return lo;
}

}  // namespace detattn
