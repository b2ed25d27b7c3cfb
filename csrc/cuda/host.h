// Host helpers of the launchers: error codes, tensor maps, the arguments that every kernel gets.
#pragma once

#include <cudaTypedefs.h>

#include <algorithm>
#include <cmath>

#include "launch.h"

namespace detattn {

constexpr int kDriverErrors = 10000;  // + CUresult
enum Error : int { kDtype = 20001, kHeadDim, kScale, kGroup, kLength, kWork, kNoDriverEntry };

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Extents of q, out and of k, v in the order (batch or page, head, row).
struct Extents {
  int64_t batch, heads, rows;
  int64_t elements(int64_t columns) const { return batch * heads * rows * columns; }
};
inline Extents query_extents(const Problem& p) { return {p.cu_seqlens_q ? 1 : p.batch, p.heads_q, p.seqlen_q}; }
inline Extents key_extents(const Problem& p) {
  if (p.block_table) return {p.num_pages, p.heads_kv, p.page_size};
  return {p.cu_seqlens_k ? 1 : p.batch, p.heads_kv, p.seqlen_k};
}

// Can the copy engine address these rows? Addresses and strides are multiples of 16 bytes, strides below 2^40. Heads
// and batches may be expanded (stride 0), rows may not.
inline bool addressable(const Rows& r, const Extents& n) {
  const auto stride_ok = [](int64_t stride, int64_t extent, bool expanded_ok) {
    if (extent <= 1 || (expanded_ok && stride == 0)) return true;
    return stride > 0 && stride % 8 == 0 && stride < (int64_t{1} << 39);
  };
  return reinterpret_cast<uintptr_t>(r.data) % 16 == 0 && stride_ok(r.row, n.rows, false) &&
         stride_ok(r.head, n.heads, true) && stride_ok(r.batch, n.batch, true);
}

inline PFN_cuTensorMapEncodeTiled_v12000 encode_function() {
  static const auto function = [] {
    cudaDriverEntryPointQueryResult found;
    void* f = nullptr;
    const cudaError_t e =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found);
    return e == cudaSuccess ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(f) : nullptr;
  }();
  return function;
}

// Panels of `columns` columns and box_rows rows, swizzled over the bytes of a row; columns past the head dim and rows
// past the end read as 0.
inline int describe(TensorView& view, const Rows& r, const Extents& n, const Problem& p, int box_rows,
                    int columns = 64) {
  const auto encode = encode_function();
  if (!encode) return kNoDriverEntry;
  view.head_step = n.heads > 1 && r.head == 0 ? 0 : 1;
  view.batch_step = n.batch > 1 && r.batch == 0 ? 0 : 1;
  const auto extent = [](int64_t count, int step) { return static_cast<cuuint64_t>(step && count > 1 ? count : 1); };
  const auto bytes = [](int64_t stride, cuuint64_t count) {
    return static_cast<cuuint64_t>(count > 1 ? 2 * stride : 16);
  };
  const cuuint64_t extents[4] = {static_cast<cuuint64_t>(p.head_dim), extent(n.rows, 1),
                                 extent(n.heads, view.head_step), extent(n.batch, view.batch_step)};
  const cuuint64_t strides[3] = {bytes(r.row, extents[1]), bytes(r.head, extents[2]), bytes(r.batch, extents[3])};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(columns), static_cast<cuuint32_t>(box_rows), 1, 1},
                   steps[4] = {1, 1, 1, 1};
  const auto type = p.dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  // Promotion to 128 bytes, a row of the box: 256 cost 6 % of the memory bandwidth.
  const auto swizzle = columns == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                       : columns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                       : columns == 16 ? CU_TENSOR_MAP_SWIZZLE_32B
                                       : CU_TENSOR_MAP_SWIZZLE_NONE;
  const CUresult e =
      encode(&view.map, type, 4, const_cast<void*>(r.data), extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return e == CUDA_SUCCESS ? 0 : kDriverErrors + static_cast<int>(e);
}

inline int check(const Problem& p) {
  if (p.dtype != DType::kHalf && p.dtype != DType::kBFloat16) return kDtype;
  if (p.head_dim <= 0 || p.head_dim % 8 != 0 || p.head_dim > kMaxHeadDim) return kHeadDim;
  if (!(p.scale > 0) || !std::isfinite(p.scale)) return kScale;
  if (p.heads_kv <= 0 || p.heads_q % p.heads_kv != 0) return kGroup;
  constexpr int64_t kLongest = (int64_t{1} << 31) - 4096;  // rows are 32-bit coordinates of the copy engine
  if (p.seqlen_q > kLongest || p.seqlen_k > kLongest) return kLength;
  return 0;
}

inline void set_scaling(ProblemArgs& args, const Problem& p) {
  constexpr double kLog2E = 1.4426950408889634;
  const bool capped = p.softcap > 0;
  args.scale = static_cast<float>(capped ? p.softcap : p.scale);
  args.kappa = static_cast<float>((capped ? p.softcap : p.scale) * kLog2E);
  args.cap = capped ? static_cast<float>(2 * kLog2E * p.scale / p.softcap) : 0.f;
}

// The part of the arguments that forward and backward share, without the padding mask's scan.
inline void fill_args(ProblemArgs& args, const Problem& p) {
  args.batch = p.batch;
  args.heads_q = p.heads_q;
  args.heads_kv = p.heads_kv;
  args.group = p.heads_q / p.heads_kv;
  args.head_dim = p.head_dim;
  args.seqlen_q = p.seqlen_q;
  args.seqlen_k = p.seqlen_k;
  args.mask = {std::min(p.mask.left, int64_t{1} << 40), std::min(p.mask.right, int64_t{1} << 40)};
  args.cu_seqlens_q = p.cu_seqlens_q;
  args.cu_seqlens_k = p.cu_seqlens_k;
  args.seqused_k = p.seqused_k;
  args.block_table = p.block_table;
  args.table_batch = p.table_batch;
  args.page_size = p.page_size;
  args.sinks = static_cast<const float*>(p.sinks);
  set_scaling(args, p);
}

}  // namespace detattn
