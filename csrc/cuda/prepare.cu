// Small kernels that prepare a call: padding masks, the varlen plan, copies of tensors the copy engine cannot address.
#include "bwd_places.cuh"
#include "prepare.h"

namespace detattn {
namespace {

constexpr int kThreads = 256;

DETATTN_DEV int block_reduce(int x, int* scratch, bool largest) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  x = largest ? __reduce_max_sync(0xffffffff, x) : __reduce_min_sync(0xffffffff, x);
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  for (int w = 0; w < kThreads / 32; ++w) x = largest ? max(x, scratch[w]) : min(x, scratch[w]);
  __syncthreads();
  return x;
}

// One CTA a sequence: the first and the last valid key, and, where keys between them are masked, one bit a key.
__global__ void __launch_bounds__(kThreads) scan_mask(const uint8_t* mask, int64_t mask_batch, int64_t mask_key,
                                                      int keys, KeySpan* spans, uint32_t* bits, int64_t words) {
  __shared__ int scratch[kThreads / 32];
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
  const int b = blockIdx.x;
  const uint8_t* const row = mask + b * mask_batch;
  int first = keys, last = -1, count = 0;
  for (int k = threadIdx.x; k < keys; k += kThreads) {
    if (row[k * mask_key]) {
      first = min(first, k);
      last = max(last, k);
      ++count;
    }
  }
  first = block_reduce(first, scratch, false);
  last = block_reduce(last, scratch, true);
  for (int offset = 16; offset > 0; offset /= 2) count += __shfl_xor_sync(0xffffffff, count, offset);
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = count;
  __syncthreads();
  count = 0;
  for (int w = 0; w < kThreads / 32; ++w) count += scratch[w];
  const bool none = last < 0, holes = !none && count != last - first + 1;
  if (threadIdx.x == 0) spans[b] = {none ? 0 : first, none ? 0 : last + 1, holes};
  if (!holes) return;
  for (int64_t w = threadIdx.x; w < words; w += kThreads) {
    uint32_t word = 0;
    for (int k = 0; k < 32; ++k) {
      const int64_t key = first + 32 * w + k;
      if (key <= last && row[key * mask_key]) word |= 1u << k;
    }
    bits[b * words + w] = word;
  }
}

// Tiles and decode items of every sequence, longest sequence first (that order decides when work runs, not what it
// computes). One CTA: a counting sort by the key count to two binary digits, then a prefix sum.
constexpr int kPlanThreads = 1024, kBuckets = 128;

DETATTN_DEV int length_bucket(int64_t keys) {
  if (keys < 4) return kBuckets - 1 - static_cast<int>(keys);
  const int exponent = 63 - __clzll(keys);
  return kBuckets - 1 - (4 * (exponent - 1) + static_cast<int>((keys >> (exponent - 2)) & 3));
}

template <typename T>
DETATTN_DEV T exclusive_scan(T x, T* warp_sums, T& total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  T inclusive = x;
  for (int d = 1; d < 32; d *= 2) {
    const T y = __shfl_up_sync(0xffffffff, inclusive, d);
    if (lane >= d) inclusive += y;
  }
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  T before = 0;
  total = 0;
  for (int w = 0; w < kPlanThreads / 32; ++w) {
    if (w < warp) before += warp_sums[w];
    total += warp_sums[w];
  }
  __syncthreads();
  return before + inclusive - x;
}

// order: the sequences, those with the most keys first. All threads of the CTA call it.
DETATTN_DEV void sort_by_keys(const ProblemArgs& p, int sequences, int32_t* order) {
  __shared__ int bucket[kBuckets];
  const int t = threadIdx.x;
  if (t < kBuckets) bucket[t] = 0;
  __syncthreads();
  for (int b = t; b < sequences; b += kPlanThreads) {
    atomicAdd(&bucket[length_bucket(view_sequence(p, b).sequence.keys)], 1);
  }
  __syncthreads();
  if (t == 0) {
    int sum = 0;
    for (int i = 0; i < kBuckets; ++i) {
      const int n = bucket[i];
      bucket[i] = sum;
      sum += n;
    }
  }
  __syncthreads();
  for (int b = t; b < sequences; b += kPlanThreads) {
    order[atomicAdd(&bucket[length_bucket(view_sequence(p, b).sequence.keys)], 1)] = b;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kPlanThreads) plan_varlen(const __grid_constant__ FwdArgs p, PlanArrays plan) {
  int32_t* const order = plan.order;
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
  __shared__ int64_t warp_sums[kPlanThreads / 32];
  const int t = threadIdx.x;
  if (t == 0) *plan.ticket = 0;
  sort_by_keys(p, p.sequences, order);
  int64_t before[3] = {};
  int64_t* const begins[3] = {plan.tile_begin, plan.decode_begin, plan.decode_rows_begin};
  for (int first = 0; first < p.sequences; first += kPlanThreads) {
    const int i = first + t;
    int64_t counts[3] = {};  // prefill tiles, decode items, decode row tiles
    if (i < p.sequences) {
      const Sequence s = view_sequence(p, order[i]).sequence;
      counts[2] = decode_row_tiles(p, s);
      if (counts[2]) {
        counts[1] = counts[2] * sequence_chunks(p.mask, s).count;
      } else {
        counts[0] = (s.queries + p.tile_rows - 1) / p.tile_rows * p.heads_q;
      }
    }
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      int64_t total;
      const int64_t at = before[k] + exclusive_scan(counts[k], warp_sums, total);
      if (i < p.sequences) begins[k][i] = at;
      before[k] += total;
    }
  }
  if (t == 0) {
    for (int k = 0; k < 3; ++k) begins[k][p.sequences] = before[k];
  }
}

// The same for the backward: tiles of queries in the order of the sequences, blocks of keys longest sequence first.
__global__ void __launch_bounds__(kPlanThreads)
    plan_backward(const __grid_constant__ BwdArgs p, BwdPlan plan, int keys) {
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
  __shared__ int64_t warp_sums[kPlanThreads / 32];
  sort_by_keys(p, p.batch, plan.order);
  int64_t tiles_before = 0, jobs_before = 0;
  for (int first = 0; first < p.batch; first += kPlanThreads) {
    const int i = first + threadIdx.x;
    int64_t tiles = 0, jobs = 0, total;
    if (i < p.batch) {
      tiles = int64_t{query_tiles(p.mask, view_sequence(p, i).sequence).tiles} * p.heads_q;
      const Sequence s = view_sequence(p, plan.order[i]).sequence;
      jobs = (s.keys + keys - 1) / keys * p.heads_kv;
    }
    const int64_t tile = tiles_before + exclusive_scan(tiles, warp_sums, total);
    tiles_before += total;
    const int64_t job = jobs_before + exclusive_scan(jobs, warp_sums, total);
    jobs_before += total;
    if (i < p.batch) {
      plan.tile_begin[i] = tile;
      plan.job_begin[i] = job;
    }
  }
  if (threadIdx.x == 0) {
    plan.tile_begin[p.batch] = tiles_before;
    plan.job_begin[p.batch] = jobs_before;
  }
}

// dst: dense rows of `columns` (a multiple of 8) elements in the order of (batch, head, row).
__global__ void __launch_bounds__(kThreads)
    copy_rows(const uint16_t* src, int64_t batch, int64_t head, int64_t row, int64_t heads, int64_t rows, int64_t total,
              int columns, uint16_t* dst) {
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t r = i / columns, c = i - r * columns, bh = r / rows, b = bh / heads;
    dst[i] = src[b * batch + (bh - b * heads) * head + (r - bh * rows) * row + c];
  }
}

}  // namespace

cudaError_t launch_scan_mask(const Problem& p, KeySpan* spans, uint32_t* bits, int64_t words, cudaStream_t stream) {
  return launch_kernel(scan_mask, p.batch, kThreads, 0, stream, p.key_padding_mask, p.mask_batch, p.mask_key,
                       static_cast<int>(p.seqlen_k), spans, bits, words);
}

cudaError_t launch_plan(const FwdArgs& args, const PlanArrays& plan, cudaStream_t stream) {
  return launch_kernel(plan_varlen, 1, kPlanThreads, 0, stream, args, plan);
}

cudaError_t launch_bwd_plan(const BwdArgs& args, const BwdPlan& plan, int keys, cudaStream_t stream) {
  return launch_kernel(plan_backward, 1, kPlanThreads, 0, stream, args, plan, keys);
}

cudaError_t launch_copy_rows(const Rows& src, int64_t batches, int64_t heads, int64_t rows, int columns, void* dst,
                             int sms, cudaStream_t stream) {
  const int64_t total = batches * heads * rows * columns;
  return launch_kernel(copy_rows, 8 * sms, kThreads, 0, stream, static_cast<const uint16_t*>(src.data), src.batch,
                       src.head, src.row, heads, rows, total, columns, static_cast<uint16_t*>(dst));
}

}  // namespace detattn
