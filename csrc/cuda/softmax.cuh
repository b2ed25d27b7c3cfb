// The arithmetic of the contract: every kernel of this backend calls these functions, so that their bits agree by
// construction. Each operation is written with its rounding; nothing here may be contracted or reordered.
#pragma once

#include "../contract.h"
#include "ptx.cuh"

namespace detattn::num {

// Scores are kept unscaled (s), or, with a softcap, as tanh of the scaled score. `kappa` turns them into exponents of
// two, `scale` into logits.
struct Scaling {
  float kappa, scale;
  float cap;  // 2 log2(e) * (caller's scale) / softcap
};

DETATTN_DEV float neg_inf() { return __int_as_float(0xff800000); }

// tanh from one exp2 and one reciprocal: absolute error near 1e-7, where tanh.approx has 5e-4 of its value.
DETATTN_DEV float cap_score(float s, const Scaling& c) {
  const float e = ptx::exp2_approx(__fmul_rn(s, c.cap));
  return __fmaf_rn(-2.f, ptx::rcp_approx(__fadd_rn(1.f, e)), 1.f);
}

// The exponent reference after a block whose largest visible score is x: it moves only when x passes it by more than
// the threshold. m = -inf: the difference is +inf (x is the first score seen) or NaN (nothing seen, stays -inf).
DETATTN_DEV float next_reference(float m, float x, float kappa) {
  return __fmul_rn(__fsub_rn(x, m), kappa) > kLazyThreshold ? x : m;
}

// 0 stands in for a reference of -inf, so that no exponent is -inf minus -inf.
DETATTN_DEV float finite_reference(float m) { return m == neg_inf() ? 0.f : m; }

// 2^((m - reference) kappa): 1 exactly when the reference stays.
DETATTN_DEV float weight(float m, float reference, float kappa) {
  return ptx::exp2_approx(__fmul_rn(__fsub_rn(m, reference), kappa));
}

// 2^(s kappa - reference kappa); `shift` is the rounded product reference * kappa.
DETATTN_DEV float probability(float s, float kappa, float shift) {
  return ptx::exp2_approx(__fmaf_rn(s, kappa, -shift));
}

// The sum of a block's probabilities. Key k of a block belongs to slice (k >> 1) & 3; a row keeps one running sum a
// slice, joined when its chunk ends. Inside a slice: first the keys 16w + {0, 8} (and + 64 in a block of 128), then the
// four w, then the two keys of a pair.
DETATTN_DEV float sum2(float a, float b) { return __fadd_rn(a, b); }
DETATTN_DEV float sum4(float a, float b, float c, float d) { return __fadd_rn(__fadd_rn(a, b), __fadd_rn(c, d)); }

// Row r (0, 1) of a 64-row accumulator tile: score 4i + 2r + e is key 8i + 2 (lane & 3) + e.
template <int kScores>
DETATTN_DEV float slice_sum(const float (&s)[kScores], int r) {
  static_assert(kScores == 64 || kScores == 32);
  float pair[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float t[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int i = 8 * w + 2 * r + e;
      if constexpr (kScores == 64) {
        t[w] = sum4(s[i], s[i + 4], s[i + 32], s[i + 36]);
      } else {
        t[w] = sum2(s[i], s[i + 4]);
      }
    }
    pair[e] = sum4(t[0], t[1], t[2], t[3]);
  }
  return sum2(pair[0], pair[1]);
}

// l' = l a + sum
DETATTN_DEV float next_sum(float l, float a, float sum) { return __fmaf_rn(l, a, sum); }

// O' = O a + o b, for every element of a row and for its sum.
DETATTN_DEV float merge(float total, float a, float chunk, float b) { return __fmaf_rn(chunk, b, __fmul_rn(total, a)); }

// Weights of a row's total and of the next chunk when the chunk joins the total; moves the total's reference.
struct MergeWeights {
  float total, chunk;
};
DETATTN_DEV MergeWeights merge_weights(float& total_m, float chunk_m, float kappa) {
  const float m = fmaxf(total_m, chunk_m), reference = finite_reference(m);
  const MergeWeights w = {weight(total_m, reference, kappa), weight(chunk_m, reference, kappa)};
  total_m = m;
  return w;
}

// A sink is one more chunk: reference sink / scale, sum 1, output 0. Returns the factor for the row's output.
DETATTN_DEV float add_sink(float& m, float& l, float sink, const Scaling& c) {
  const MergeWeights w = merge_weights(m, __fdiv_rn(sink, c.scale), c.kappa);
  l = merge(l, w.total, 1.f, w.chunk);
  return w.total;
}

DETATTN_DEV float inverse(float l) { return l > 0.f || l != l ? __frcp_rn(l) : 0.f; }

// + 0.f: a zero is always +0, whatever sign masked blocks left.
DETATTN_DEV float finish(float o, float inv) { return __fadd_rn(__fmul_rn(o, inv), 0.f); }

DETATTN_DEV float lse(float m, float l, const Scaling& c) {
  return l > 0.f || l != l ? __fmaf_rn(m, c.scale, logf(l)) : neg_inf();
}

}  // namespace detattn::num
