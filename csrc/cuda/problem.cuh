// A sequence's place and lengths, read on the device.
#pragma once

#include "launch.h"
#include "ptx.cuh"

namespace detattn {

struct SequenceView {
  Sequence sequence;
  int32_t q_row, k_row;      // first row in the packed tensors (0 when dense)
  int32_t q_batch, k_batch;  // batch coordinates (0 when packed)
  int32_t holes;
};

// Lengths are clamped to the tensors, so that no content of the length tensors can lead outside them.
DETATTN_DEV SequenceView view_sequence(const ProblemArgs& p, int b) {
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

// First relative key of the chunk after the one that holds `key`.
DETATTN_DEV int chunk_end(int key) {
  constexpr ChunkSchedule chunks = kChunks;
  int begin = 0;
#pragma unroll
  for (int i = 0; i < kChunkSteps - 1; ++i) {
    if (key < chunks.step[i].end) return begin + ((key - begin) / chunks.step[i].keys + 1) * chunks.step[i].keys;
    begin = static_cast<int>(chunks.step[i].end);
  }
  const int keys = chunks.step[kChunkSteps - 1].keys;
  return begin + ((key - begin) / keys + 1) * keys;
}

// Does a sequence take the decode tiling?
DETATTN_DEV bool is_decode(const FwdArgs& p, const Sequence& s) {
  return s.queries > 0 && s.queries * p.group <= p.decode_most_rows;
}
DETATTN_DEV int64_t decode_row_tiles(const FwdArgs& p, const Sequence& s) {
  return is_decode(p, s) ? (s.queries * p.group + kDecodeRows - 1) / kDecodeRows * p.heads_kv : 0;
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

// Where work unit `x` of a varlen call stands, without a plan: the units of 32 sequences at a time are counted by the
// lanes of a warp. False past the last unit. All lanes get the same answer.
struct Place {
  int32_t sequence;
  int64_t begin;        // units of the sequences before
  int64_t items_begin;  // decode items of the sequences before
};
template <bool kItems>
DETATTN_DEV bool scan_sequences(const FwdArgs& p, int64_t x, Place& place) {
  const int lane = threadIdx.x & 31;
  int32_t units_before = 0, items_before = 0;
  for (int first = 0; first < p.sequences; first += 32) {
    int32_t tiles = 0, items = 0;
    if (first + lane < p.sequences) {
      const Sequence s = view_sequence(p, first + lane).sequence;
      tiles = static_cast<int32_t>(decode_row_tiles(p, s));
      if (tiles) items = tiles * sequence_chunks(p.mask, s).count;
    }
    int32_t units_to = kItems ? items : tiles, items_to = items;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int32_t a = __shfl_up_sync(0xffffffff, units_to, d), b = __shfl_up_sync(0xffffffff, items_to, d);
      if (lane >= d) {
        units_to += a;
        items_to += b;
      }
    }
    const unsigned past = __ballot_sync(0xffffffff, x < units_before + units_to);
    if (past) {
      const int hit = __ffs(past) - 1;
      place.sequence = first + hit;
      place.begin = units_before + __shfl_sync(0xffffffff, units_to - (kItems ? items : tiles), hit);
      place.items_begin = items_before + __shfl_sync(0xffffffff, items_to - items, hit);
      return true;
    }
    units_before += __shfl_sync(0xffffffff, units_to, 31);
    items_before += __shfl_sync(0xffffffff, items_to, 31);
  }
  return false;
}

// The same from the plan where there is one.
template <bool kItems>
DETATTN_DEV bool find_sequence(const FwdArgs& p, int64_t x, Place& place) {
  if (!p.order) return scan_sequences<kItems>(p, x, place);
  const int64_t* const begin = kItems ? p.decode_begin : p.decode_rows_begin;
  if (x >= begin[p.sequences]) return false;
  const int rank = warp_search(begin, p.sequences, x);
  place = {p.order[rank], begin[rank], p.decode_begin[rank]};
  return true;
}

}  // namespace detattn
