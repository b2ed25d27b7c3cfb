// Forward of one tile: the queries [first, first + count) of all query heads that share one key head, as rows that
// share the packed keys and values. Row r is query first + r / group of head head_kv * group + r % group.
#pragma once

#include "softmax.h"

namespace detattn::DETATTN_ISA {

template <class E>
struct ForwardScratch {
  using T = Compute<E>;
  int64_t stride, score_stride;
  T *q, *o, *total_o, *s, *k, *v;
  RowState<T>*chunk, *total;
  KeyRange* seen;
  TileSpans spans;
  const E** rows;
  Int<T>* keep;
  size_t bytes;

  ForwardScratch(const FwdParams& p, int64_t count, void* base) {
    Arena arena(base);
    const int block = block_keys(p.head_dim), columns = round_up_panel<T>(block);
    const int64_t n = count * (p.heads_q / p.heads_kv);
    stride = tile_stride<T>(p.head_dim);
    score_stride = tile_stride<T>(block);
    q = arena.take<T>(n * stride);
    o = arena.take<T>(n * stride);
    total_o = arena.take<T>(n * stride);
    s = arena.take<T>(n * score_stride);
    k = arena.take<T>(static_cast<int64_t>(columns) * p.head_dim);
    v = arena.take<T>(block * stride);
    chunk = arena.take<RowState<T>>(n);
    total = arena.take<RowState<T>>(n);
    seen = arena.take<KeyRange>(n);
    spans = {arena.take<Span>(n), arena.take<GroupSpan>(row_groups(n))};
    rows = arena.take<const E*>(columns);
    keep = arena.take<Int<T>>(columns);
    bytes = arena.used();
  }
};

template <class E>
size_t forward_scratch(const FwdParams& p, int64_t count) {
  return ForwardScratch<E>(p, count, nullptr).bytes;
}

template <class E>
void forward_tile(const FwdParams& p, const SequencePlan& s, int64_t head_kv, int64_t first, int64_t count,
                  void* scratch) {
  using T = Compute<E>;
  ForwardScratch<E> tile(p, count, scratch);
  const Scores<T> scores = make_scores<T>(p);
  const int64_t group = p.heads_q / p.heads_kv, anchor = s.shape.valid.begin;
  const int rows = static_cast<int>(count * group), dim = p.head_dim, block = block_keys(dim);
  const int width = round_up_panel<T>(dim);

  // Keys are counted from the first valid one from here on.
  for (int r = 0; r < rows; ++r) {
    load_row(query_row<E>(s, p.q, head_kv * group + r % group, first + r / group), dim, tile.q + r * tile.stride,
             width);
    const KeyRange seen = visible_keys(p.mask, s.shape, first + r / group);
    tile.seen[r] = {seen.begin - anchor, seen.end - anchor};
    tile.total[r] = {-kInfinity<T>, T(0)};
  }
  const KeyRange keys = {tile.seen[0].begin, tile.seen[rows - 1].end};
  std::memset(tile.total_o, 0, rows * tile.stride * sizeof(T));

  const int64_t chunks = keys.begin < keys.end ? chunk_count(keys.end) : 0;
  for (int64_t c = keys.begin < keys.end ? chunk_index(keys.begin) : 0; c < chunks; ++c) {
    const int64_t chunk_end = chunk_begin(c + 1) < keys.end ? chunk_begin(c + 1) : keys.end;
    for (int r = 0; r < rows; ++r) tile.chunk[r] = {-kInfinity<T>, T(0)};
    std::memset(tile.o, 0, rows * tile.stride * sizeof(T));

    for (int64_t key = chunk_begin(c); key < chunk_end; key += block) {
      const auto local = [&](KeyRange range) {
        const int64_t begin = range.begin - key, end = range.end - key;
        return Span{static_cast<int32_t>(begin < 0       ? 0
                                         : begin < block ? begin
                                                         : block),
                    static_cast<int32_t>(end < 0       ? 0
                                         : end < block ? end
                                                       : block)};
      };
      const Span span = local(keys);
      if (span.begin >= span.end) continue;
      for (int r = 0; r < rows; ++r) tile.spans.row[r] = local(tile.seen[r]);
      fold_groups(tile.spans, rows);
      const int columns = round_up_panel<T>(span.end);

      key_rows<E>(p, s, p.k, head_kv, anchor + key, span, columns, tile.rows);
      pack_transposed(tile.rows, columns, dim, tile.k);
      products(tile.q, tile.stride, rows, dim, tile.k, tile.spans, columns, tile.s, tile.score_stride);

      if (s.holes) load_keep<T>(p, s, anchor + key, span.end, tile.keep);
      const Int<T>* keep = s.holes ? tile.keep : nullptr;
      for (int r = 0; r < rows; ++r) {
        if (tile.spans.row[r].begin >= tile.spans.row[r].end) continue;
        softmax_block<E>(scores, tile.spans.row[r], keep, tile.s + r * tile.score_stride, tile.chunk[r],
                         tile.o + r * tile.stride, width);
      }

      key_rows<E>(p, s, p.v, head_kv, anchor + key, span, columns, tile.rows);
      for (int j = span.begin; j < span.end; ++j) {
        if (j + 8 < span.end) prefetch_row(tile.rows[j + 8], dim);
        load_row(keep && !keep[j] ? kZeroRow<E> : tile.rows[j], dim, tile.v + j * tile.stride, width);
      }
      accumulate<T, false>(tile.s, tile.score_stride, rows, tile.spans, tile.v, tile.stride, width, tile.o,
                           tile.stride);
    }
    for (int r = 0; r < rows; ++r) {
      merge(scores.kappa, tile.chunk[r], tile.o + r * tile.stride, tile.total[r], tile.total_o + r * tile.stride,
            width);
    }
  }

  const T* sinks = static_cast<const T*>(p.sinks);
  for (int r = 0; r < rows; ++r) {
    const int64_t head = head_kv * group + r % group, query = first + r / group;
    const Finish<T> row = finish(tile.total[r], scores.unit, sinks ? sinks[head] : -kInfinity<T>);
    store_row(tile.total_o + r * tile.stride, row.factor, dim, query_row<E>(s, p.out, head, query));
    *query_row<T>(s, p.lse, head, query) = row.lse;
  }
}

template <class E>
void forward_unowned(const FwdParams& p, int64_t head, int64_t begin, int64_t end) {
  using T = Compute<E>;
  zero_rows<E>(p.out, p.head_dim, 0, head, begin, end);
  T* lse = static_cast<T*>(p.lse.data) + head * p.lse.head;
  for (int64_t i = begin; i < end; ++i) lse[i * p.lse.row] = -kInfinity<T>;
}

}  // namespace detattn::DETATTN_ISA
