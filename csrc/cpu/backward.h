// Backward. One function, gradient_tile, adds what one tile of queries (of one head) and one block of keys have in
// common to dq, dk, dv; the sweeps around it visit heads, queries and keys in ascending order, which fixes every chain.
#pragma once

#include "softmax.h"

namespace detattn::DETATTN_ISA {

using cpu::RowStats;

// No reduction is cut at these: they move no bit.
constexpr int kGradQueries = 96, kGradKeys = 128;

template <class E>
struct BackwardScratch {
  using T = Compute<E>;
  int64_t stride, score_stride;
  T *q, *dout, *p, *ds, *k_columns, *v_columns, *k, *dk, *dv, *dq;
  TileSpans query_spans, key_spans;
  const E** rows;
  Int<T>* keep;
  size_t bytes;

  // `dq_rows`: the rows of dq kept at once.
  BackwardScratch(const BwdParams& params, int64_t dq_rows, void* base) {
    Arena arena(base);
    const int columns = round_up_panel<T>(kGradKeys);
    stride = tile_stride<T>(params.head_dim);
    score_stride = tile_stride<T>(kGradKeys);
    q = arena.take<T>(kGradQueries * stride);
    dout = arena.take<T>(kGradQueries * stride);
    p = arena.take<T>(kGradQueries * score_stride);
    ds = arena.take<T>(kGradQueries * score_stride);
    k_columns = arena.take<T>(columns * params.head_dim);
    v_columns = arena.take<T>(columns * params.head_dim);
    k = arena.take<T>(kGradKeys * stride);
    dk = arena.take<T>(kGradKeys * stride);
    dv = arena.take<T>(kGradKeys * stride);
    query_spans = {arena.take<Span>(kGradQueries), arena.take<GroupSpan>(row_groups(kGradQueries))};
    key_spans = {arena.take<Span>(kGradKeys), arena.take<GroupSpan>(row_groups(kGradKeys))};
    rows = arena.take<const E*>(columns);
    keep = arena.take<Int<T>>(columns);
    dq = arena.take<T>(dq_rows * stride);
    bytes = arena.used();
  }
};

template <class E>
size_t backward_scratch(const BwdParams& p, int64_t dq_rows) {
  return BackwardScratch<E>(p, dq_rows < kGradQueries ? kGradQueries : dq_rows, nullptr).bytes;
}

// Sum of a[d] * b[d]: kTreeLanes chains, folded in halves.
template <class E, class T = Compute<E>>
DETATTN_INLINE T dot(const E* a, const E* b, int dim) {
  constexpr int n = kLanes<T>;
  Vec<T> partial[kTreeVectors<T>] = {};
  for (int d = 0; d < dim; d += kTreeLanes) {
    for (int v = 0; v < kTreeVectors<T> && d + v * n < dim; ++v) {
      partial[v] = fma<T>(load_part(a, d + v * n, dim), load_part(b, d + v * n, dim), partial[v]);
    }
  }
  return tree_sum<T>(partial);
}

template <class E, class T = Compute<E>>
DETATTN_INLINE bool all_zero(const E* row, int dim) {
  for (int d = 0; d < dim; d += kLanes<T>) {
    const Vec<T> v = load_part(row, d, dim);
    for (int i = 0; i < kLanes<T>; ++i) {
      if (v[i] != T(0)) return false;
    }
  }
  return true;
}

// A row whose upstream gradients are all zero adds nothing, whatever it holds (a padded query may be NaN, and 0 * NaN
// is NaN): its lse becomes that of a row that sees nothing.
template <class E>
void backward_stats(const BwdParams& p, const SequencePlan& s, int64_t head, const RowStats& stats, void* dsink) {
  using T = Compute<E>;
  const int64_t row = s.query_batch * p.seqlen_q + s.query_row;
  T* lse2 = static_cast<T*>(stats.lse2) + head * stats.rows + row;
  T* shift = static_cast<T*>(stats.shift) + head * stats.rows + row;
  const T sink = p.sinks ? static_cast<const T*>(p.sinks)[head] : -kInfinity<T>;
  T sum = T(0);
  for (int64_t i = 0; i < s.shape.queries; ++i) {
    const T lse = *query_row<T>(s, p.lse, head, i);
    const T dlse = p.dlse.data ? *query_row<T>(s, p.dlse, head, i) : T(0);
    const KeyRange seen = visible_keys(p.mask, s.shape, i);
    if (dlse == T(0) && (!p.dout.data || all_zero(query_row<E>(s, p.dout, head, i), p.head_dim))) {
      lse2[i] = -kInfinity<T>;
      shift[i] = T(0);
      continue;
    }
    T delta = T(0);
    if (p.dout.data && seen.begin < seen.end) {
      delta = dot(query_row<E>(s, p.dout, head, i), query_row<E>(s, p.out, head, i), p.head_dim);
    }
    lse2[i] = lse * kLog2e<T>;
    shift[i] = delta - dlse;
    if (sink != -kInfinity<T>) sum -= exp2_scalar<T>((sink - lse) * kLog2e<T>) * shift[i];
  }
  *static_cast<T*>(dsink) = sum;
}

// Raw scores and dP of one row become P and dS, both rounded to E, zero for the keys the row does not see.
template <class E, class T = Compute<E>>
DETATTN_INLINE void gradient_row(const Scores<T>& scores, Span span, const Int<T>* keep, T lse2, T shift, T* s, T* dp) {
  const Span groups = covering(span);
  const Vec<T> kappa = broadcast(scores.kappa), reference = broadcast(-lse2), delta = broadcast(shift);
  const bool seen = lse2 != -kInfinity<T>;
  for (int j = groups.begin; j < groups.end; j += kLanes<T>) {
    Vec<T> x = load(s + j), slope = broadcast(T(1));
    if (scores.transform != Scores<T>::kNone) x *= broadcast(scores.factor);
    if (scores.transform == Scores<T>::kSoftcap) {
      x = tanh<T>(x);
      slope = fma<T>(-x, x, slope);
      x *= broadcast(scores.cap);
    }
    Vec<T> weight = exp2(fma<T>(x, kappa, reference));
    Vec<T> ds = weight * (load(dp + j) - delta);
    if (scores.transform == Scores<T>::kSoftcap) ds *= slope;
    if (keep != nullptr) {
      const IntVec<T> kept = load_mask<T>(keep + j);
      weight = kept ? weight : Vec<T>{};
      ds = kept ? ds : Vec<T>{};
    }
    store(s + j, seen ? round_to<E>(weight) : Vec<T>{});
    store(dp + j, seen ? round_to<E>(ds) : Vec<T>{});
  }
}

template <class E>
class Backward {
 public:
  using T = Compute<E>;

  Backward(const BwdParams& params, const SequencePlan& sequence, int64_t head_kv, const RowStats& stats,
           int64_t dq_rows, void* scratch)
      : p_(params),
        s_(sequence),
        stats_(stats),
        scores_(make_scores<T>(params)),
        head_kv_(head_kv),
        group_(params.heads_q / params.heads_kv),
        dim_(params.head_dim),
        width_(round_up_panel<T>(params.head_dim)),
        w_(params, dq_rows, scratch) {}

  void fused() {
    const int64_t queries = s_.shape.queries;
    std::memset(w_.dq, 0, group_ * queries * w_.stride * sizeof(T));
    for (int64_t key = 0; key < s_.shape.keys; key += kGradKeys) {
      keys(key, [&](int64_t head, int64_t query) { return w_.dq + (head * queries + query) * w_.stride; });
    }
    for (int64_t h = 0; h < group_; ++h) {
      store_queries(head_kv_ * group_ + h, 0, queries, w_.dq + h * queries * w_.stride);
    }
  }

  // dk and dv of one block; `dq_tile` names where the dq of a tile is kept, or null where nobody wants it.
  template <class DqTile>
  void keys(int64_t first, DqTile dq_tile) {
    const int64_t count = s_.shape.keys - first < kGradKeys ? s_.shape.keys - first : kGradKeys;
    const Span valid = load_keys(first, count);
    std::memset(w_.dk, 0, count * w_.stride * sizeof(T));
    std::memset(w_.dv, 0, count * w_.stride * sizeof(T));
    if (valid.begin < valid.end) {
      const KeyRange seeing = seeing_queries(p_.mask, s_.shape, first + valid.begin, first + valid.end - 1);
      for (int64_t h = 0; h < group_; ++h) {
        for (int64_t q = seeing.begin; q < seeing.end; q += kGradQueries) {
          const int64_t n = seeing.end - q < kGradQueries ? seeing.end - q : kGradQueries;
          load_queries(head_kv_ * group_ + h, q, n);
          gradient_tile(head_kv_ * group_ + h, q, n, first, valid, true, dq_tile(h, q));
        }
      }
    }
    for (int64_t j = 0; j < count; ++j) {
      const bool kept = j >= valid.begin && j < valid.end && (!s_.holes || w_.keep[j]);
      store_row<E>(kept ? w_.dk + j * w_.stride : nullptr, T(p_.scale), dim_,
                   key_row<E>(s_, p_.dk, head_kv_, first + j));
      store_row<E>(kept ? w_.dv + j * w_.stride : nullptr, T(1), dim_, key_row<E>(s_, p_.dv, head_kv_, first + j));
    }
  }

  void queries(int64_t head, int64_t first) {
    const int64_t count = s_.shape.queries - first < kGradQueries ? s_.shape.queries - first : kGradQueries;
    std::memset(w_.dq, 0, count * w_.stride * sizeof(T));
    const KeyRange seen = visible_keys(p_.mask, s_.shape, first, first + count - 1);
    if (seen.begin < seen.end) load_queries(head, first, count);
    for (int64_t key = seen.begin / kGradKeys * kGradKeys; key < seen.end; key += kGradKeys) {
      const int64_t n = s_.shape.keys - key < kGradKeys ? s_.shape.keys - key : kGradKeys;
      gradient_tile(head, first, count, key, load_keys(key, n), false, w_.dq);
    }
    store_queries(head, first, count, w_.dq);
  }

 private:
  int64_t stat_row(int64_t head, int64_t query) const {
    return head * stats_.rows + s_.query_batch * p_.seqlen_q + s_.query_row + query;
  }

  void load_queries(int64_t head, int64_t first, int64_t count) {
    const T* lse2 = static_cast<const T*>(stats_.lse2) + stat_row(head, first);
    for (int64_t i = 0; i < count; ++i) {
      const E* q = lse2[i] == -kInfinity<T> ? kZeroRow<E> : query_row<E>(s_, p_.q, head, first + i);
      load_row(q, dim_, w_.q + i * w_.stride, width_);
      if (p_.dout.data) {
        load_row(query_row<E>(s_, p_.dout, head, first + i), dim_, w_.dout + i * w_.stride, width_);
      }
    }
    if (!p_.dout.data) std::memset(w_.dout, 0, count * w_.stride * sizeof(T));
  }

  // Packs the valid keys of a block; returns which of the block they are.
  Span load_keys(int64_t first, int64_t count) {
    const Span valid = clip(s_.shape.valid, first, count);
    if (valid.begin >= valid.end) return valid;
    const int columns = round_up_panel<T>(valid.end);
    if (s_.holes) load_keep<T>(p_, s_, first, static_cast<int>(count), w_.keep);
    key_rows<E>(p_, s_, p_.k, head_kv_, first, valid, columns, w_.rows);
    pack_transposed(w_.rows, columns, dim_, w_.k_columns);
    for (int j = valid.begin; j < valid.end; ++j) {
      load_row(s_.holes && !w_.keep[j] ? kZeroRow<E> : w_.rows[j], dim_, w_.k + j * w_.stride, width_);
    }
    key_rows<E>(p_, s_, p_.v, head_kv_, first, valid, columns, w_.rows);
    pack_transposed(w_.rows, columns, dim_, w_.v_columns);
    return valid;
  }

  void gradient_tile(int64_t head, int64_t first, int64_t count, int64_t key, Span valid, bool key_side, T* dq) {
    const int rows = static_cast<int>(count), columns = round_up_panel<T>(valid.end);
    for (int i = 0; i < rows; ++i) {
      w_.query_spans.row[i] = clip(visible_keys(p_.mask, s_.shape, first + i), key, valid.end);
    }
    fold_groups(w_.query_spans, rows);
    products(w_.q, w_.stride, rows, dim_, w_.k_columns, w_.query_spans, columns, w_.p, w_.score_stride);
    products(w_.dout, w_.stride, rows, dim_, w_.v_columns, w_.query_spans, columns, w_.ds, w_.score_stride);

    const int64_t row = stat_row(head, first);
    const T* lse2 = static_cast<const T*>(stats_.lse2) + row;
    const T* shift = static_cast<const T*>(stats_.shift) + row;
    for (int i = 0; i < rows; ++i) {
      if (w_.query_spans.row[i].begin >= w_.query_spans.row[i].end) continue;
      gradient_row<E>(scores_, w_.query_spans.row[i], s_.holes ? w_.keep : nullptr, lse2[i], shift[i],
                      w_.p + i * w_.score_stride, w_.ds + i * w_.score_stride);
    }
    if (key_side) {
      for (int j = 0; j < valid.end; ++j) {
        w_.key_spans.row[j] = clip(seeing_queries(p_.mask, s_.shape, key + j, key + j), first, count);
        if (j < valid.begin) w_.key_spans.row[j] = {0, 0};
      }
      fold_groups(w_.key_spans, valid.end);
      accumulate<T, true>(w_.p, w_.score_stride, valid.end, w_.key_spans, w_.dout, w_.stride, width_, w_.dv, w_.stride);
      accumulate<T, true>(w_.ds, w_.score_stride, valid.end, w_.key_spans, w_.q, w_.stride, width_, w_.dk, w_.stride);
    }
    if (dq != nullptr) {
      accumulate<T, false>(w_.ds, w_.score_stride, rows, w_.query_spans, w_.k, w_.stride, width_, dq, w_.stride);
    }
  }

  void store_queries(int64_t head, int64_t first, int64_t count, const T* dq) {
    for (int64_t i = 0; i < count; ++i) {
      store_row(dq + i * w_.stride, T(p_.scale), dim_, query_row<E>(s_, p_.dq, head, first + i));
    }
  }

  const BwdParams& p_;
  const SequencePlan& s_;
  const RowStats& stats_;
  const Scores<T> scores_;
  const int64_t head_kv_, group_;
  const int dim_, width_;
  const BackwardScratch<E> w_;
};

template <class E>
void backward_fused(const BwdParams& p, const SequencePlan& s, int64_t head_kv, const RowStats& stats, void* scratch) {
  const int64_t dq_rows = p.heads_q / p.heads_kv * s.shape.queries;
  Backward<E>(p, s, head_kv, stats, dq_rows, scratch).fused();
}

template <class E>
void backward_keys(const BwdParams& p, const SequencePlan& s, int64_t head_kv, int64_t block, const RowStats& stats,
                   void* scratch) {
  const auto no_dq = [](int64_t, int64_t) { return static_cast<Compute<E>*>(nullptr); };
  Backward<E>(p, s, head_kv, stats, 0, scratch).keys(block * kGradKeys, no_dq);
}

template <class E>
void backward_queries(const BwdParams& p, const SequencePlan& s, int64_t head, int64_t tile, const RowStats& stats,
                      void* scratch) {
  const int64_t head_kv = head / (p.heads_q / p.heads_kv);
  Backward<E>(p, s, head_kv, stats, kGradQueries, scratch).queries(head, tile * kGradQueries);
}

// dsinks of all heads from their parts [sequences][heads_q], sequences ascending.
template <class E>
void sum_dsinks(const BwdParams& p, const void* parts, int64_t sequences) {
  using T = Compute<E>;
  const T* part = static_cast<const T*>(parts);
  for (int64_t h = 0; h < p.heads_q; ++h) {
    T sum = T(0);
    for (int64_t b = 0; b < sequences; ++b) sum += part[b * p.heads_q + h];
    static_cast<T*>(p.dsinks)[h] = sum + T(0);
  }
}

}  // namespace detattn::DETATTN_ISA
