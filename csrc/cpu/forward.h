// Forward of one tile: some queries of some query heads that share a key head, as rows that share the packed keys and
// values. Row r is query first + r / heads of head `head` + r % heads.
#pragma once

#include "softmax.h"

namespace detattn::DETATTN_ISA {

using cpu::Tile;

template <class E>
struct ForwardScratch {
  using T = Compute<E>;
  int64_t stride, score_stride;
  T *q, *s, *k, *v;
  T *o, *total_o;  // accumulators of the chunk at hand, and of those before it
  RowState<T>*chunk, *total;
  KeyRange* seen;
  TileSpans spans;
  const E** rows;
  Int<T>* keep;
  size_t bytes;

  ForwardScratch(const FwdParams& p, int64_t tile_rows, void* base) {
    Arena arena(base);
    const int block = block_keys(p.head_dim), columns = round_up_panel<T>(block);
    stride = tile_stride<T>(p.head_dim);
    score_stride = tile_stride<T>(block);
    q = arena.take<T>(tile_rows * stride);
    s = arena.take<T>(tile_rows * score_stride);
    k = arena.take<T>(static_cast<int64_t>(columns) * p.head_dim);
    v = arena.take<T>(block * stride);
    o = arena.take<T>(tile_rows * stride);
    total_o = arena.take<T>(tile_rows * stride);
    chunk = arena.take<RowState<T>>(tile_rows);
    total = arena.take<RowState<T>>(tile_rows);
    seen = arena.take<KeyRange>(tile_rows);
    spans = {arena.take<Span>(tile_rows), arena.take<GroupSpan>(row_groups(tile_rows))};
    rows = arena.take<const E*>(columns);
    keep = arena.take<Int<T>>(columns);
    bytes = arena.used();
  }
};

template <class E>
class Forward {
 public:
  using T = Compute<E>;

  Forward(const FwdParams& params, const SequencePlan& sequence, const Tile& tile, void* scratch)
      : p_(params),
        s_(sequence),
        tile_(tile),
        scores_(make_scores<T>(params)),
        head_kv_(tile.head / (params.heads_q / params.heads_kv)),
        rows_(static_cast<int>(tile.queries * tile.heads)),
        dim_(params.head_dim),
        width_(round_up_panel<T>(params.head_dim)),
        w_(params, rows_, scratch) {}

  void run() {
    const KeyRange keys = load_queries();
    if (keys.begin < keys.end) {
      for (int64_t c = chunk_index(keys.begin); c <= chunk_index(keys.end - 1); ++c) add_chunk(c, keys);
    }
    store();
  }

 private:
  int64_t head(int row) const { return tile_.head + row % tile_.heads; }
  int64_t query(int row) const { return tile_.first + row / tile_.heads; }

  void clear(T* o, RowState<T>* state) {
    std::memset(o, 0, rows_ * w_.stride * sizeof(T));
    for (int r = 0; r < rows_; ++r) state[r] = {-kInfinity<T>, T(0)};
  }

  // Returns the keys that some row sees. From here on keys are counted from the first valid one.
  KeyRange load_queries() {
    for (int r = 0; r < rows_; ++r) {
      load_row(query_row<E>(s_, p_.q, head(r), query(r)), dim_, w_.q + r * w_.stride, width_);
      const KeyRange seen = visible_keys(p_.mask, s_.shape, query(r));
      w_.seen[r] = {seen.begin - s_.shape.valid.begin, seen.end - s_.shape.valid.begin};
    }
    clear(w_.total_o, w_.total);
    return {w_.seen[0].begin, w_.seen[rows_ - 1].end};
  }

  void add_chunk(int64_t chunk, KeyRange keys) {
    const int block = block_keys(dim_);
    clear(w_.o, w_.chunk);
    for (int64_t key = chunk_begin(chunk); key < chunk_begin(chunk + 1) && key < keys.end; key += block) {
      const Span span = clip(keys, key, block);
      if (span.begin >= span.end) continue;
      for (int r = 0; r < rows_; ++r) w_.spans.row[r] = clip(w_.seen[r], key, block);
      fold_groups(w_.spans, rows_);
      add_block(s_.shape.valid.begin + key, span);
    }
    for (int r = 0; r < rows_; ++r) {
      merge(scores_.kappa, w_.chunk[r], w_.o + r * w_.stride, w_.total[r], w_.total_o + r * w_.stride, width_);
    }
  }

  // The keys `first` + span of one block; nothing outside them is read.
  void add_block(int64_t first, Span span) {
    const int columns = round_up_panel<T>(span.end);
    key_rows<E>(p_, s_, p_.k, head_kv_, first, span, columns, w_.rows);
    pack_transposed(w_.rows, columns, dim_, w_.k);
    products(w_.q, w_.stride, rows_, dim_, w_.k, w_.spans, columns, w_.s, w_.score_stride);

    if (s_.holes) load_keep<T>(p_, s_, first, span.end, w_.keep);
    const Int<T>* keep = s_.holes ? w_.keep : nullptr;
    for (int r = 0; r < rows_; ++r) {
      if (w_.spans.row[r].begin >= w_.spans.row[r].end) continue;
      softmax_block<E>(scores_, w_.spans.row[r], keep, w_.s + r * w_.score_stride, w_.chunk[r], w_.o + r * w_.stride,
                       width_);
    }

    key_rows<E>(p_, s_, p_.v, head_kv_, first, span, columns, w_.rows);
    for (int j = span.begin; j < span.end; ++j) {
      if (j + 8 < span.end) prefetch_row(w_.rows[j + 8], dim_);
      load_row(keep && !keep[j] ? kZeroRow<E> : w_.rows[j], dim_, w_.v + j * w_.stride, width_);
    }
    accumulate<T, false>(w_.s, w_.score_stride, rows_, w_.spans, w_.v, w_.stride, width_, w_.o, w_.stride);
  }

  void store() {
    const T* sinks = static_cast<const T*>(p_.sinks);
    for (int r = 0; r < rows_; ++r) {
      const Finish<T> row = finish(w_.total[r], scores_.unit, sinks ? sinks[head(r)] : -kInfinity<T>);
      store_row(w_.total_o + r * w_.stride, row.factor, dim_, query_row<E>(s_, p_.out, head(r), query(r)));
      *query_row<T>(s_, p_.lse, head(r), query(r)) = row.lse;
    }
  }

  const FwdParams& p_;
  const SequencePlan& s_;
  const Tile& tile_;
  const Scores<T> scores_;
  const int64_t head_kv_;
  const int rows_, dim_, width_;
  const ForwardScratch<E> w_;
};

template <class E>
size_t forward_scratch(const FwdParams& p, int64_t rows) {
  return ForwardScratch<E>(p, rows, nullptr).bytes;
}

template <class E>
void forward_tile(const FwdParams& p, const SequencePlan& s, const Tile& tile, void* scratch) {
  Forward<E>(p, s, tile, scratch).run();
}

template <class E>
void forward_unowned(const FwdParams& p, int64_t head, int64_t begin, int64_t end) {
  using T = Compute<E>;
  zero_rows<E>(p.out, p.head_dim, 0, head, begin, end);
  T* lse = static_cast<T*>(p.lse.data) + head * p.lse.head;
  for (int64_t i = begin; i < end; ++i) lse[i * p.lse.row] = -kInfinity<T>;
}

}  // namespace detattn::DETATTN_ISA
