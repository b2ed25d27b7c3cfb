// Where the rows of a sequence live, and how a tile or block of them is brought into scratch memory in the type it is
// computed in.
#pragma once

#include "gemm.h"
#include "plan.h"

namespace detattn::DETATTN_ISA {

using cpu::SequencePlan;

// Hands out pieces of scratch memory, 64-byte aligned; with no base it only counts bytes.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(int64_t count) {
    T* piece = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return piece;
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

// Row stride of a tile: whole panels, and one cache line more so that a column of panels spreads over all cache sets.
template <class T>
int64_t tile_stride(int columns) {
  return round_up_panel<T>(columns) + 64 / sizeof(T);
}

template <class E>
DETATTN_INLINE const E* query_row(const SequencePlan& s, const Rows& r, int64_t head, int64_t i) {
  return static_cast<const E*>(r.data) + s.query_batch * r.batch + head * r.head + (s.query_row + i) * r.row;
}
template <class E>
DETATTN_INLINE E* query_row(const SequencePlan& s, const MutableRows& r, int64_t head, int64_t i) {
  return static_cast<E*>(r.data) + s.query_batch * r.batch + head * r.head + (s.query_row + i) * r.row;
}
template <class E>
DETATTN_INLINE E* key_row(const SequencePlan& s, const MutableRows& r, int64_t head, int64_t j) {
  return static_cast<E*>(r.data) + s.key_batch * r.batch + head * r.head + (s.key_row + j) * r.row;
}

// The part of a range that lies in [first, first + count), counted from `first`.
DETATTN_INLINE Span clip(KeyRange range, int64_t first, int64_t count) {
  const auto local = [&](int64_t i) {
    return static_cast<int32_t>(i < first ? 0 : i - first < count ? i - first : count);
  };
  return {local(range.begin), local(range.end)};
}

template <class E>
inline constexpr E kZeroRow[kMaxHeadDim] = {};

// Addresses of the keys [first + begin, first + end) at rows[begin..end); the rest of the `columns` rows read as zero.
template <class E>
void key_rows(const Problem& p, const SequencePlan& s, const Rows& r, int64_t head, int64_t first, Span span,
              int columns, const E** rows) {
  const E* base = static_cast<const E*>(r.data) + head * r.head;
  for (int j = 0; j < span.begin; ++j) rows[j] = kZeroRow<E>;
  if (p.block_table == nullptr) {
    base += s.key_batch * r.batch + (s.key_row + first) * r.row;
    for (int j = span.begin; j < span.end; ++j) rows[j] = base + j * r.row;
  } else {
    const int32_t* table = p.block_table + s.index * p.table_batch;
    int64_t entry = (first + span.begin) / p.page_size, slot = (first + span.begin) % p.page_size;
    for (int j = span.begin; j < span.end; ++j) {
      rows[j] = base + static_cast<int64_t>(table[entry]) * r.batch + slot * r.row;
      if (++slot == p.page_size) {
        slot = 0;
        ++entry;
      }
    }
  }
  for (int j = span.end; j < columns; ++j) rows[j] = kZeroRow<E>;
}

// Rows of a cache may lie pages apart, where no hardware prefetcher follows.
template <class E>
DETATTN_INLINE void prefetch_row(const E* row, int dim) {
  for (int d = 0; d < dim; d += 64 / static_cast<int>(sizeof(E))) __builtin_prefetch(row + d);
}

// Elements [d, min(d + lanes, dim)) of a row, zeros behind.
template <class E>
DETATTN_INLINE Vec<Compute<E>> load_part(const E* row, int d, int dim) {
  constexpr int n = kLanes<Compute<E>>;
  if (d + n <= dim) return load(row + d);
  E part[n] = {};
  for (int i = d; i < dim; ++i) part[i - d] = row[i];
  return load(part);
}

template <class E, class T = Compute<E>>
DETATTN_INLINE void load_row(const E* row, int dim, T* to, int width) {
  int d = 0;
  for (; d < dim; d += kLanes<T>) store(to + d, load_part(row, d, dim));
  for (; d < width; d += kLanes<T>) store(to + d, Vec<T>{});
}

// from[0..dim) * factor + 0, which makes zeros positive, one NaN for all, rounded to E. A null `from` means zeros.
template <class E, class T = Compute<E>>
DETATTN_INLINE void store_row(const T* from, T factor, int dim, E* row) {
  for (int d = 0; d < dim; d += kLanes<T>) {
    const Vec<T> v = from ? canonical<T>(load(from + d) * broadcast(factor) + broadcast(T(0))) : Vec<T>{};
    if (d + kLanes<T> <= dim) {
      store(row + d, v);
    } else {
      E part[kLanes<T>];
      store(part, v);
      for (int i = d; i < dim; ++i) row[i] = part[i - d];
    }
  }
}

// Zeros in rows [begin, end) of one head.
template <class E>
void zero_rows(const MutableRows& r, int32_t dim, int64_t batch, int64_t head, int64_t begin, int64_t end) {
  using T = Compute<E>;
  E* base = static_cast<E*>(r.data) + batch * r.batch + head * r.head;
  for (int64_t i = begin; i < end; ++i) store_row(static_cast<const T*>(nullptr), T(0), dim, base + i * r.row);
}

// Rows as the columns of panels: to[panel][d][column]. `columns` is a whole number of panels.
template <class E, class T = Compute<E>>
void pack_transposed(const E* const* rows, int columns, int dim, T* to) {
  constexpr int n = kLanes<T>;
  for (int j = 0; j < columns; j += n) {
    T* column = to + static_cast<int64_t>(j / kPanel<T>) * dim * kPanel<T> + j % kPanel<T>;
    for (int i = j + n; i < j + 2 * n && i < columns; ++i) prefetch_row(rows[i], dim);
    int d = 0;
    for (; d + n <= dim; d += n) {
      Vec<T> m[n];
#pragma GCC unroll 16
      for (int i = 0; i < n; ++i) m[i] = load(rows[j + i] + d);
      transpose<T>(m);
#pragma GCC unroll 16
      for (int i = 0; i < n; ++i) store(column + (d + i) * kPanel<T>, m[i]);
    }
    if (d == dim) continue;
    Vec<T> m[n];
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) m[i] = load_part(rows[j + i], d, dim);
    transpose<T>(m);
    for (int i = 0; d + i < dim; ++i) store(column + (d + i) * kPanel<T>, m[i]);
  }
}

// Which keys [first, first + count) the padding mask keeps, as lane masks. Keys outside the valid range are not asked.
template <class T>
void load_keep(const Problem& p, const SequencePlan& s, int64_t first, int count, Int<T>* keep) {
  const uint8_t* mask = p.key_padding_mask + s.index * p.mask_batch;
  for (int j = 0; j < count; ++j) keep[j] = mask[(first + j) * p.mask_key] ? -1 : 0;
}

}  // namespace detattn::DETATTN_ISA
