// The vector type of one instruction set, and the elementary functions on it. Every operation is defined per lane and
// rounds once, so a value does not depend on the vector width. Compiled once per instruction set, each time in the
// namespace DETATTN_ISA names: nothing here may be shared between two of them.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "../params.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define DETATTN_INLINE [[gnu::always_inline]] inline

namespace detattn::DETATTN_ISA {

// kTileRows x kTileVectors accumulators of a matrix micro-kernel fit the register file with the operands of one step.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kTileRows = 12, kTileVectors = 2;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32, kTileRows = 6, kTileVectors = 2;
#else
constexpr int kVectorBytes = 16, kTileRows = 5, kTileVectors = 4;
#endif

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// The type that elements of type E are computed in.
template <class E>
using Compute = std::conditional_t<std::is_same_v<E, double>, double, float>;

template <class T>
struct VecOf {
  static constexpr int kLanes = kVectorBytes / sizeof(T);
  using Int = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  typedef T V __attribute__((vector_size(kVectorBytes)));
  typedef Int I __attribute__((vector_size(kVectorBytes)));
  typedef T Unaligned __attribute__((vector_size(kVectorBytes), aligned(alignof(T)), may_alias));
  typedef Int UnalignedInt __attribute__((vector_size(kVectorBytes), aligned(alignof(T)), may_alias));
};
template <class T>
using Vec = typename VecOf<T>::V;
template <class T>
using IntVec = typename VecOf<T>::I;
template <class T>
using Int = typename VecOf<T>::Int;
template <class T>
constexpr int kLanes = VecOf<T>::kLanes;

typedef uint32_t UintVec __attribute__((vector_size(kVectorBytes)));
typedef uint16_t HalfVec __attribute__((vector_size(kVectorBytes / 2)));

DETATTN_INLINE Vec<float> load(const float* p) { return *reinterpret_cast<const VecOf<float>::Unaligned*>(p); }
DETATTN_INLINE Vec<double> load(const double* p) { return *reinterpret_cast<const VecOf<double>::Unaligned*>(p); }
DETATTN_INLINE void store(float* p, Vec<float> v) { *reinterpret_cast<VecOf<float>::Unaligned*>(p) = v; }
DETATTN_INLINE void store(double* p, Vec<double> v) { *reinterpret_cast<VecOf<double>::Unaligned*>(p) = v; }
template <class T>
DETATTN_INLINE IntVec<T> load_mask(const Int<T>* p) {
  return *reinterpret_cast<const typename VecOf<T>::UnalignedInt*>(p);
}

template <class T>
DETATTN_INLINE Vec<T> broadcast(T x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_set1_ps(x);
  if constexpr (sizeof(T) == 8) return _mm512_set1_pd(x);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return _mm256_set1_ps(x);
  if constexpr (sizeof(T) == 8) return _mm256_set1_pd(x);
#else
  return x - Vec<T>{};
#endif
}

DETATTN_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DETATTN_INLINE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }

template <class T>
DETATTN_INLINE Vec<T> fma(Vec<T> a, Vec<T> b, Vec<T> c) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_fmadd_ps(a, b, c);
  if constexpr (sizeof(T) == 8) return _mm512_fmadd_pd(a, b, c);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return _mm256_fmadd_ps(a, b, c);
  if constexpr (sizeof(T) == 8) return _mm256_fmadd_pd(a, b, c);
#elif defined(__aarch64__)
  if constexpr (sizeof(T) == 4) return vfmaq_f32(c, a, b);
  if constexpr (sizeof(T) == 8) return vfmaq_f64(c, a, b);
#else
  for (int i = 0; i < kLanes<T>; ++i) c[i] = fma(T(a[i]), T(b[i]), T(c[i]));
  return c;
#endif
}
template <class T>
DETATTN_INLINE Vec<T> fma(Vec<T> a, Vec<T> b, T c) {
  return fma<T>(a, b, broadcast(c));
}

// a > b ? a : b and a < b ? a : b, so a NaN in `b` wins; x86's own instructions are defined that way.
template <class T>
DETATTN_INLINE Vec<T> max(Vec<T> a, Vec<T> b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_max_ps(a, b);
  if constexpr (sizeof(T) == 8) return _mm512_max_pd(a, b);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return _mm256_max_ps(a, b);
  if constexpr (sizeof(T) == 8) return _mm256_max_pd(a, b);
#else
  return a > b ? a : b;
#endif
}
template <class T>
DETATTN_INLINE Vec<T> min(Vec<T> a, Vec<T> b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_min_ps(a, b);
  if constexpr (sizeof(T) == 8) return _mm512_min_pd(a, b);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return _mm256_min_ps(a, b);
  if constexpr (sizeof(T) == 8) return _mm256_min_pd(a, b);
#else
  return a < b ? a : b;
#endif
}
DETATTN_INLINE float max(float a, float b) { return a > b ? a : b; }
DETATTN_INLINE double max(double a, double b) { return a > b ? a : b; }

// 2^x: 1 at 0, 0 below -126.5 (-1022.5), infinity from 127.5 (1023.5) up, NaN at NaN.
// Adding `magic` rounds x to the integer n and leaves the biased exponent of 2^n in the low bits.
DETATTN_INLINE Vec<float> exp2(Vec<float> x) {
  const Vec<float> magic = broadcast(0x1.8p23f + 127.0f);
  x = min<float>(broadcast(128.0f), max<float>(broadcast(-127.0f), x));
  const Vec<float> t = x + magic;
  const Vec<float> f = x - (t - magic);
  Vec<float> y = broadcast(0x1.41fbbap-13f);
  y = fma<float>(y, f, 0x1.5f3e54p-10f);
  y = fma<float>(y, f, 0x1.3b2d4cp-7f);
  y = fma<float>(y, f, 0x1.c6aee8p-5f);
  y = fma<float>(y, f, 0x1.ebfbdcp-3f);
  y = fma<float>(y, f, 0x1.62e43p-1f);
  y = fma<float>(y, f, 1.0f);
  return y * (Vec<float>)((IntVec<float>)t << 23);
}
DETATTN_INLINE Vec<double> exp2(Vec<double> x) {
  // ln(2)^k / k!, k = 13 .. 1: the first term left out is below 2^-57 on |f| <= 1/2.
  constexpr double kTerms[] = {1.3691488853904128e-12, 2.5678435993488206e-11, 4.4455382718708116e-10,
                               7.054911620801123e-09,  1.01780860092397e-07,   1.321548679014431e-06,
                               1.525273380405984e-05,  0.0001540353039338161,  0.0013333558146428443,
                               0.009618129107628477,   0.05550410866482158,    0.24022650695910072,
                               0.6931471805599453};
  const Vec<double> magic = broadcast(0x1.8p52 + 1023.0);
  x = min<double>(broadcast(1024.0), max<double>(broadcast(-1023.0), x));
  const Vec<double> t = x + magic;
  const Vec<double> f = x - (t - magic);
  Vec<double> y = broadcast(kTerms[0]);
  for (int k = 1; k < 13; ++k) y = fma<double>(y, f, kTerms[k]);
  y = fma<double>(y, f, 1.0);
  return y * (Vec<double>)((IntVec<double>)t << 52);
}
template <class T>
DETATTN_INLINE T exp2_scalar(T x) {
  return exp2(broadcast(x))[0];
}

// Natural logarithm of L >= 0; double inside whatever T, it runs once a row.
DETATTN_INLINE double log_scalar(double x) {
  if (!(x > 0.0) || x > std::numeric_limits<double>::max()) {
    return x == 0.0 ? -std::numeric_limits<double>::infinity() : x;
  }
  int exponent = 0;
  if (x < std::numeric_limits<double>::min()) {
    x *= 0x1p64;
    exponent = -64;
  }
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  exponent += static_cast<int>(bits >> 52) - 1023;
  bits = (bits & 0x000fffffffffffffu) | 0x3ff0000000000000u;
  double mantissa;
  std::memcpy(&mantissa, &bits, sizeof(bits));
  if (mantissa > 0x1.6a09e667f3bcdp+0) {
    mantissa *= 0.5;
    ++exponent;
  }
  // ln(m) = 2 artanh((m - 1) / (m + 1)) as its odd series, |z| < 0.172.
  const double z = (mantissa - 1.0) / (mantissa + 1.0), z2 = z * z;
  double series = 1.0 / 23.0;
  for (int odd = 21; odd >= 3; odd -= 2) series = fma(series, z2, 1.0 / odd);
  const double tail = 2.0 * z * z2 * series;
  return fma(static_cast<double>(exponent), 0x1.62e42fefa39efp-1, 2.0 * z + tail);
}

// tanh: Cephes' approximation near zero, 1 - 2 / (e^2x + 1) elsewhere.
template <class T>
DETATTN_INLINE Vec<T> tanh(Vec<T> x) {
  const IntVec<T> sign = (IntVec<T>)x & (IntVec<T>)broadcast(T(-0.0));
  const Vec<T> a = (Vec<T>)((IntVec<T>)x ^ sign);
  const Vec<T> z = a * a;
  Vec<T> near;
  if constexpr (sizeof(T) == 4) {
    near = broadcast(T(-5.70498872745e-3));
    near = fma<T>(near, z, T(2.06390887954e-2));
    near = fma<T>(near, z, T(-5.37397155531e-2));
    near = fma<T>(near, z, T(1.33314422036e-1));
    near = fma<T>(near, z, T(-3.33332819422e-1));
  } else {
    Vec<T> top = broadcast(T(-9.64399179425052238628e-1));
    top = fma<T>(top, z, T(-9.92877231001918586564e1));
    top = fma<T>(top, z, T(-1.61468768441708447952e3));
    Vec<T> bottom = z + broadcast(T(1.12811678491632931402e2));
    bottom = fma<T>(bottom, z, T(2.23548839060100448583e3));
    bottom = fma<T>(bottom, z, T(4.84406305325125486048e3));
    near = top / bottom;
  }
  near = fma<T>(a * z, near, a);
  const Vec<T> e = exp2(a * broadcast(T(2.8853900817779268)));
  const Vec<T> far = broadcast(T(1)) - broadcast(T(2)) / (e + broadcast(T(1)));
  const Vec<T> r = a < broadcast(T(0.625)) ? near : far;
  return (Vec<T>)((IntVec<T>)r | sign);
}

// One NaN for all: the payload a chain of operations leaves depends on operand order, which no two loops share.
template <class T>
DETATTN_INLINE Vec<T> canonical(Vec<T> v) {
  return v == v ? v : broadcast(std::numeric_limits<T>::quiet_NaN());
}

// The nearest bfloat16, ties to even, in the upper half of each lane.
DETATTN_INLINE Vec<float> round_bfloat16(Vec<float> v) {
  const UintVec u = (UintVec)v;
  const UintVec r = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
  return v == v ? (Vec<float>)r : broadcast(std::numeric_limits<float>::quiet_NaN());
}

DETATTN_INLINE UintVec widen(HalfVec h) {
#if defined(__AVX512F__)
  return (UintVec)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(__AVX2__)
  return (UintVec)_mm256_cvtepu16_epi32((__m128i)h);
#else
  return __builtin_convertvector(h, UintVec);
#endif
}

DETATTN_INLINE Vec<float> from_half(HalfVec h) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps((__m256i)h);
#elif defined(__AVX2__)
  return _mm256_cvtph_ps((__m128i)h);
#else
  const UintVec u = widen(h);
  const UintVec magnitude = (u & 0x7fffu) << 13;
  const UintVec finite = (UintVec)((Vec<float>)magnitude * broadcast(0x1p112f));
  const UintVec r = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite;
  return (Vec<float>)(r | ((u & 0x8000u) << 16));
#endif
}
DETATTN_INLINE HalfVec to_half(Vec<float> v) {
#if defined(__AVX512F__)
  return (HalfVec)_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (HalfVec)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const UintVec u = (UintVec)v, magnitude = u & 0x7fffffffu;
  const UintVec normal = (magnitude - 0x37fff001u + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 1/2 lets the adder do the rounding of a subnormal result.
  const UintVec subnormal = (UintVec)((Vec<float>)magnitude + broadcast(0.5f)) - 0x3f000000u;
  UintVec r = magnitude < 0x38800000u ? subnormal : normal;
  r = magnitude >= 0x477ff000u ? UintVec{} + 0x7c00u : r;
  r = magnitude > 0x7f800000u ? UintVec{} + 0x7e00u : r;
  return __builtin_convertvector(r | ((u >> 16) & 0x8000u), HalfVec);
#endif
}

// Elements to the type they are computed in, and back with round-to-nearest-even.
DETATTN_INLINE HalfVec load_bits(const void* p) {
  HalfVec h;
  std::memcpy(&h, p, sizeof(h));
  return h;
}
DETATTN_INLINE Vec<float> load(const BFloat16* p) { return (Vec<float>)(widen(load_bits(p)) << 16); }
DETATTN_INLINE Vec<float> load(const Half* p) { return from_half(load_bits(p)); }

DETATTN_INLINE void store(BFloat16* p, Vec<float> v) {
  const HalfVec h = __builtin_convertvector((UintVec)round_bfloat16(v) >> 16, HalfVec);
  std::memcpy(p, &h, sizeof(h));
}
DETATTN_INLINE void store(Half* p, Vec<float> v) {
  const HalfVec h = to_half(v);
  std::memcpy(p, &h, sizeof(h));
}

// v rounded to E, still in the type it is computed in.
template <class E>
DETATTN_INLINE Vec<Compute<E>> round_to(Vec<Compute<E>> v) {
  if constexpr (std::is_same_v<E, BFloat16>) return round_bfloat16(v);
  if constexpr (std::is_same_v<E, Half>) return from_half(to_half(v));
  if constexpr (std::is_same_v<E, Compute<E>>) return v;
}

// The sum and the maximum of a row run in kTreeLanes partial results, whatever the vector width, folded in halves.
constexpr int kTreeLanes = 16;
template <class T>
constexpr int kTreeVectors = kTreeLanes / kLanes<T>;

// Lane i of the first half of the lanes joined with lane i + half, until one is left.
template <class T, int kHalf, class Join, int... kLane>
DETATTN_INLINE T fold_lanes(Vec<T> v, const Join& join, std::integer_sequence<int, kLane...> lanes) {
  v = join(v, __builtin_shufflevector(v, v, ((kLane + kHalf) % kLanes<T>)...));
  if constexpr (kHalf > 1) return fold_lanes<T, kHalf / 2>(v, join, lanes);
  return v[0];
}
template <class T, class Join>
DETATTN_INLINE T fold_tree(Vec<T> (&partial)[kTreeVectors<T>], const Join& join) {
#pragma GCC unroll 4
  for (int half = kTreeVectors<T> / 2; half > 0; half /= 2) {
#pragma GCC unroll 4
    for (int i = 0; i < half; ++i) partial[i] = join(partial[i], partial[i + half]);
  }
  return fold_lanes<T, kLanes<T> / 2>(partial[0], join, std::make_integer_sequence<int, kLanes<T>>());
}
template <class T>
DETATTN_INLINE T tree_sum(Vec<T> (&partial)[kTreeVectors<T>]) {
  return fold_tree<T>(partial, [](Vec<T> a, Vec<T> b) { return a + b; });
}
template <class T>
DETATTN_INLINE T tree_max(Vec<T> (&partial)[kTreeVectors<T>]) {
  return fold_tree<T>(partial, [](Vec<T> a, Vec<T> b) { return max<T>(a, b); });
}

// Square transpose by exchange of ever smaller off-diagonal blocks; each exchange stays inside 128 bits where it can.
template <class T, int kHalf, int... kLane>
DETATTN_INLINE void exchange(Vec<T>& a, Vec<T>& b, std::integer_sequence<int, kLane...>) {
  constexpr int n = kLanes<T>;
  const Vec<T> low = __builtin_shufflevector(a, b, ((kLane & kHalf) ? n + kLane - kHalf : kLane)...);
  b = __builtin_shufflevector(a, b, ((kLane & kHalf) ? n + kLane : kLane + kHalf)...);
  a = low;
}
template <class T, int kHalf = kLanes<T> / 2>
DETATTN_INLINE void transpose(Vec<T> (&m)[kLanes<T>]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes<T>; ++i) {
    if (!(i & kHalf)) exchange<T, kHalf>(m[i], m[i + kHalf], std::make_integer_sequence<int, kLanes<T>>());
  }
  if constexpr (kHalf > 1) transpose<T, kHalf / 2>(m);
}

}  // namespace detattn::DETATTN_ISA
