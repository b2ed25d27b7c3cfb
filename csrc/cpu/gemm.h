// Register-blocked matrix micro-kernels. Every element of a product is one chain of fused multiply-adds in ascending
// order of the summed index, so neither the shape of a tile nor the number of its rows can move a bit.
#pragma once

#include "vec.h"

namespace detattn::DETATTN_ISA {

// Columns of one micro-kernel: a panel.
template <class T>
constexpr int kPanel = kTileVectors * kLanes<T>;
template <class T>
constexpr int round_up_panel(int n) {
  return (n + kPanel<T> - 1) / kPanel<T> * kPanel<T>;
}

// Local positions [begin, end) inside a tile or block; empty when end <= begin.
struct Span {
  int32_t begin, end;
};

// c[r][0..panel) (+)= sum over k of a(r, k) * b[k][0..panel), where a(r, k) is a[r * lda + k], or a[k * lda + r] when
// kTransposed.
template <class T, int kRows, bool kTransposed, bool kFresh>
[[gnu::noinline]] void micro_kernel(const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc,
                                    int64_t depth) {
  Vec<T> acc[kRows][kTileVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) acc[r][v] = kFresh ? Vec<T>{} : load(c + r * ldc + v * kLanes<T>);
  }
#pragma GCC unroll 2
  for (int64_t k = 0; k < depth; ++k) {
    Vec<T> column[kTileVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) column[v] = load(b + k * ldb + v * kLanes<T>);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec<T> row = broadcast(kTransposed ? a[k * lda + r] : a[r * lda + k]);
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v) acc[r][v] = fma<T>(row, column[v], acc[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) store(c + r * ldc + v * kLanes<T>, acc[r][v]);
  }
}

template <class T, bool kTransposed, bool kFresh, int kRows = kTileRows>
DETATTN_INLINE void micro_kernel(int rows, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc,
                                 int64_t depth) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return micro_kernel<T, kTransposed, kFresh, kRows - 1>(rows, a, lda, b, ldb, c, ldc, depth);
  }
  micro_kernel<T, kRows, kTransposed, kFresh>(a, lda, b, ldb, c, ldc, depth);
}

// The union and the intersection of the spans of one micro-kernel's rows.
struct Spans {
  Span any, all;
};
DETATTN_INLINE Spans fold(const Span* span, int rows) {
  Span any = {INT32_MAX, 0}, all = {0, INT32_MAX};
  for (int r = 0; r < rows; ++r) {
    if (span[r].begin > all.begin) all.begin = span[r].begin;
    if (span[r].end < all.end) all.end = span[r].end;
    if (span[r].begin >= span[r].end) continue;
    if (span[r].begin < any.begin) any.begin = span[r].begin;
    if (span[r].end > any.end) any.end = span[r].end;
  }
  return {any, all};
}

// c = a * b, where b is packed as panels of [depth][panel]; only the panels that hold a column of some row's span.
template <class T>
void products(const T* a, int64_t lda, int rows, int depth, const T* b, const Span* span, int columns, T* c,
              int64_t ldc) {
  for (int column = 0; column < columns; column += kPanel<T>) {
    const T* panel = b + static_cast<int64_t>(column) * depth;
    for (int r = 0; r < rows; r += kTileRows) {
      const int n = rows - r < kTileRows ? rows - r : kTileRows;
      const Span any = fold(span + r, n).any;
      if (any.end <= column || any.begin >= column + kPanel<T>) continue;
      micro_kernel<T, false, true>(n, a + r * lda, lda, panel, kPanel<T>, c + r * ldc + column, ldc, depth);
    }
  }
}

// c[r] += sum over k in span[r] of a(r, k) * b[k][0..width), k ascending: the part that all rows of a micro-kernel share
// in one go, what only some of them have row by row. No row touches a b[k] outside its span, which may hold NaN.
template <class T, bool kTransposed>
void accumulate(const T* a, int64_t lda, int rows, const Span* span, const T* b, int64_t ldb, int width, T* c,
                int64_t ldc) {
  const auto at = [&](int r, int k) { return kTransposed ? a + k * lda + r : a + r * lda + k; };
  for (int column = 0; column < width; column += kPanel<T>) {
    const auto single = [&](int r, int begin, int end) {
      if (begin >= end) return;
      micro_kernel<T, 1, kTransposed, false>(at(r, begin), lda, b + begin * ldb + column, ldb, c + r * ldc + column,
                                             ldc, end - begin);
    };
    for (int r = 0; r < rows; r += kTileRows) {
      const int n = rows - r < kTileRows ? rows - r : kTileRows;
      const Spans group = fold(span + r, n);
      if (group.any.begin >= group.any.end) continue;
      if (group.all.begin >= group.all.end) {
        for (int i = r; i < r + n; ++i) single(i, span[i].begin, span[i].end);
        continue;
      }
      for (int i = r; i < r + n; ++i) single(i, span[i].begin, group.all.begin);
      micro_kernel<T, kTransposed, false>(n, at(r, group.all.begin), lda, b + group.all.begin * ldb + column, ldb,
                                          c + r * ldc + column, ldc, group.all.end - group.all.begin);
      for (int i = r; i < r + n; ++i) single(i, group.all.end, span[i].end);
    }
  }
}

}  // namespace detattn::DETATTN_ISA
