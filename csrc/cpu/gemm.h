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

// The spans of a tile's rows, and for every group of kTileRows of them the union and the intersection.
struct GroupSpan {
  Span any, all;
};
struct TileSpans {
  Span* row;
  GroupSpan* group;
};
constexpr int64_t row_groups(int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }

DETATTN_INLINE void fold_groups(const TileSpans& spans, int rows) {
  for (int r = 0; r < rows; r += kTileRows) {
    GroupSpan group = {{INT32_MAX, 0}, {0, INT32_MAX}};
    for (int i = r; i < rows && i < r + kTileRows; ++i) {
      const Span s = spans.row[i];
      if (s.begin > group.all.begin) group.all.begin = s.begin;
      if (s.end < group.all.end) group.all.end = s.end;
      if (s.begin >= s.end) continue;
      if (s.begin < group.any.begin) group.any.begin = s.begin;
      if (s.end > group.any.end) group.any.end = s.end;
    }
    spans.group[r / kTileRows] = group;
  }
}

// c = a * b, where b is packed as panels of [depth][panel]; only the panels that hold a column of some row's span.
template <class T>
void products(const T* a, int64_t lda, int rows, int depth, const T* b, const TileSpans& spans, int columns, T* c,
              int64_t ldc) {
  for (int column = 0; column < columns; column += kPanel<T>) {
    const T* panel = b + static_cast<int64_t>(column) * depth;
    for (int r = 0; r < rows; r += kTileRows) {
      const Span any = spans.group[r / kTileRows].any;
      if (any.end <= column || any.begin >= column + kPanel<T>) continue;
      micro_kernel<T, false, true>(rows - r, a + r * lda, lda, panel, kPanel<T>, c + r * ldc + column, ldc, depth);
    }
  }
}

// c[r] += sum over k in the row's span of a(r, k) * b[k][0..width), k ascending: what all rows of a group share in one
// go, what only some of them have row by row. No row touches a b[k] outside its span, which may hold NaN.
template <class T, bool kTransposed>
void accumulate(const T* a, int64_t lda, int rows, const TileSpans& spans, const T* b, int64_t ldb, int width, T* c,
                int64_t ldc) {
  const auto add = [&](int r, int count, int begin, int end, int column) {
    if (begin >= end) return;
    const T* from = kTransposed ? a + begin * lda + r : a + r * lda + begin;
    micro_kernel<T, kTransposed, false>(count, from, lda, b + begin * ldb + column, ldb, c + r * ldc + column, ldc,
                                        end - begin);
  };
  for (int column = 0; column < width; column += kPanel<T>) {
    for (int r = 0; r < rows; r += kTileRows) {
      const int count = rows - r < kTileRows ? rows - r : kTileRows;
      const auto [any, all] = spans.group[r / kTileRows];
      if (all.begin == any.begin && all.end == any.end) {
        add(r, count, all.begin, all.end, column);
      } else if (all.begin < all.end) {
        for (int i = r; i < r + count; ++i) add(i, 1, spans.row[i].begin, all.begin, column);
        add(r, count, all.begin, all.end, column);
        for (int i = r; i < r + count; ++i) add(i, 1, all.end, spans.row[i].end, column);
      } else {
        for (int i = r; i < r + count; ++i) add(i, 1, spans.row[i].begin, spans.row[i].end, column);
      }
    }
  }
}

}  // namespace detattn::DETATTN_ISA
