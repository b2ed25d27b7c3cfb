// The numeric core: what happens to a score, the online softmax of a row over a block, the merge of chunks, the finish.
// Forward and backward use the same definitions.
#pragma once

#include <limits>

#include "gather.h"

namespace detattn::DETATTN_ISA {

template <class T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();
template <class T>
constexpr T kLog2e = T(1.4426950408889634074);

// How raw scores become exponents. `unit` is what one unit of a score weighs in natural logarithms after `transform`.
// A scale that is not positive (or vanishes in T) is multiplied in early: the largest score must be the largest weight,
// and -inf * 0 must not appear.
template <class T>
struct Scores {
  enum Transform { kNone, kSoftcap, kPremultiply } transform;
  T factor, cap, unit, kappa;
};
template <class T>
DETATTN_INLINE Scores<T> make_scores(const Problem& p) {
  Scores<T> s = {Scores<T>::kNone, T(p.scale), T(p.softcap), T(p.scale), T(p.scale * 1.4426950408889634074)};
  if (p.softcap != 0.0) {
    s.transform = Scores<T>::kSoftcap;
    s.factor = T(p.scale / p.softcap);
  } else if (!(s.kappa > T(0))) {
    s.transform = Scores<T>::kPremultiply;
  }
  if (s.transform != Scores<T>::kNone) {
    s.unit = T(1);
    s.kappa = kLog2e<T>;
  }
  return s;
}

// The whole lane groups of kTreeLanes that hold a span.
DETATTN_INLINE Span covering(Span span) {
  return {span.begin / kTreeLanes * kTreeLanes, (span.end + kTreeLanes - 1) / kTreeLanes * kTreeLanes};
}

// What a row carries over the blocks of a chunk, and over the chunks: reference exponent, weight sum.
template <class T>
struct RowState {
  T m, l;
};

// One row over one block. `s` holds raw scores and leaves as weights rounded to E, zero in the covering groups outside
// the span; `keep` masks holes (null: none). `o` is brought to the new reference.
template <class E, class T = Compute<E>>
DETATTN_INLINE void softmax_block(const Scores<T>& scores, Span span, const Int<T>* keep, T* s, RowState<T>& row, T* o,
                                  int width) {
  constexpr int n = kLanes<T>, vectors = kTreeVectors<T>;
  const Span groups = covering(span);
  if (scores.transform != Scores<T>::kNone) {
    for (int j = groups.begin; j < groups.end; j += n) {
      Vec<T> x = load(s + j) * broadcast(scores.factor);
      if (scores.transform == Scores<T>::kSoftcap) x = tanh<T>(x) * broadcast(scores.cap);
      store(s + j, x);
    }
  }
  if (keep != nullptr) {
    for (int j = groups.begin; j < groups.end; j += n) {
      store(s + j, load_mask<T>(keep + j) ? load(s + j) : broadcast(-kInfinity<T>));
    }
  }
  for (int j = groups.begin; j < span.begin; ++j) s[j] = -kInfinity<T>;
  for (int j = span.end; j < groups.end; ++j) s[j] = -kInfinity<T>;

  Vec<T> partial[vectors];
  for (int v = 0; v < vectors; ++v) partial[v] = broadcast(-kInfinity<T>);
  for (int j = groups.begin; j < groups.end; j += kTreeLanes) {
    for (int v = 0; v < vectors; ++v) partial[v] = max<T>(partial[v], load(s + j + v * n));
  }
  const T top = max(row.m, tree_max<T>(partial));
  if (row.m == -kInfinity<T>) {
    row.m = top;
  } else if ((top - row.m) * scores.kappa > T(kLazyThreshold)) {
    const T a = exp2_scalar<T>((row.m - top) * scores.kappa);
    row.m = top;
    row.l *= a;
    for (int d = 0; d < width; d += n) store(o + d, load(o + d) * broadcast(a));
  }
  // Nothing but -inf so far: any finite reference gives the weights zero, and lets a NaN through.
  const Vec<T> reference = broadcast(row.m == -kInfinity<T> ? T(0) : -row.m * scores.kappa);
  const Vec<T> kappa = broadcast(scores.kappa);
  for (int v = 0; v < vectors; ++v) partial[v] = Vec<T>{};
  for (int j = groups.begin; j < groups.end; j += kTreeLanes) {
    for (int v = 0; v < vectors; ++v) {
      const Vec<T> weight = exp2(fma<T>(load(s + j + v * n), kappa, reference));
      partial[v] += weight;
      store(s + j + v * n, round_to<E>(weight));
    }
  }
  row.l += tree_sum<T>(partial);
}

// Merges a chunk into what the chunks before it left. A chunk of which the row saw nothing changes no bit.
template <class T>
DETATTN_INLINE void merge(T kappa, const RowState<T>& chunk, const T* o, RowState<T>& total, T* out, int width) {
  if (chunk.l == T(0)) return;
  const T m = max(total.m, chunk.m);
  const auto weight = [&](T reference) {
    return reference == m ? T(1) : reference == -kInfinity<T> ? T(0) : exp2_scalar<T>((reference - m) * kappa);
  };
  const T a = weight(total.m), b = weight(chunk.m);
  total = {m, fma(chunk.l, b, total.l * a)};
  for (int d = 0; d < width; d += kLanes<T>) {
    store(out + d, fma<T>(load(o + d), broadcast(b), load(out + d) * broadcast(a)));
  }
}

// What is left of a row's state at the end: the factor that turns its accumulator into `out`, and its lse. The sink, a
// logit in natural units, is one more term of the sum; a sink of -inf is no sink.
template <class T>
struct Finish {
  T factor, lse;
};
template <class T>
DETATTN_INLINE Finish<T> finish(const RowState<T>& total, T unit, T sink) {
  const bool seen = total.l != T(0);
  const T logit = seen ? total.m * unit : -kInfinity<T>;
  if (!seen && sink == -kInfinity<T>) return {T(0), -kInfinity<T>};
  const T m = max(logit, sink);
  const auto weight = [&](T x) {
    return x == m ? T(1) : x == -kInfinity<T> ? T(0) : exp2_scalar<T>((x - m) * kLog2e<T>);
  };
  const T a = weight(logit);
  const T l = fma(total.l, a, sink == -kInfinity<T> ? T(0) : weight(sink));
  const T lse = m + T(log_scalar(l));
  return {a * (T(1) / l), lse == lse ? lse : std::numeric_limits<T>::quiet_NaN()};
}

}  // namespace detattn::DETATTN_ISA
