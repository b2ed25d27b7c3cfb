// The kernels around the backward: statistics of the rows before it; after it dq from its fp32 sums, the gradient of
// the sinks, and zeros in rows that belong to nobody.
#include "bwd_places.cuh"
#include "softmax.cuh"

namespace detattn {
namespace {

constexpr int kThreads = 256;
constexpr float kLog2E = 1.4426950408889634f;

// One CTA a tile of queries; kLanes threads a row, 8 columns each.
template <typename Element, int kLanes>
__global__ void __launch_bounds__(kThreads) row_statistics(const __grid_constant__ BwdArgs p) {
  __shared__ float dsinks[kBwdRows];
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.ticket = 0;
  TilePlace x;
  if (!find_tile(p, blockIdx.x, x)) return;
  const int lane = threadIdx.x % kLanes;
  const auto load = [&](const Rows& t, int query, float (&to)[8]) {
    const auto* const at = static_cast<const Element*>(t.data) + x.view.q_batch * t.batch + x.head * t.head +
                           (static_cast<int64_t>(x.view.q_row) + query) * t.row + 8 * lane;
    const uint4 raw = *reinterpret_cast<const uint4*>(at);
    const auto* const e = reinterpret_cast<const Element*>(&raw);
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = static_cast<float>(e[i]);
  };
  bool any_dead = false;
#pragma unroll
  for (int pass = 0; pass < kBwdRows * kLanes / kThreads; ++pass) {
    const int row = pass * (kThreads / kLanes) + threadIdx.x / kLanes, tile_row = kBwdRows * x.tile + row;
    const int query = x.tiles.first + tile_row;
    const bool exists = query >= 0 && tile_row < x.tiles.rows;
    float delta = 0.f;
    bool zero = true;
    if (exists && 8 * lane < p.head_dim) {
      float a[8], b[8];
      load(p.dout_rows, query, a);
      load(p.out_rows, query, b);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        zero = zero && a[i] == 0.f;
        delta = __fmaf_rn(a[i], b[i], delta);
      }
    }
#pragma unroll
    for (int d = kLanes / 2; d > 0; d /= 2) {
      delta = __fadd_rn(delta, __shfl_xor_sync(0xffffffff, delta, d));
      zero &= static_cast<bool>(__shfl_xor_sync(0xffffffff, zero, d));
    }
    if (lane != 0) continue;
    const auto value = [&](const Rows& t) {
      return static_cast<const float*>(
          t.data)[x.view.q_batch * t.batch + x.head * t.head + (static_cast<int64_t>(x.view.q_row) + query) * t.row];
    };
    const float dlse = exists && p.dlse.data ? value(p.dlse) : 0.f, lse = exists ? value(p.lse) : num::neg_inf();
    // A row without an upstream gradient adds nothing, whatever it holds.
    const bool used = exists && (dlse != 0.f || !zero);
    const bool sees = max(x.tiles.low + tile_row, 0) < min(x.tiles.high + tile_row, x.tiles.end);
    const float shift = used ? __fsub_rn(sees ? delta : 0.f, dlse) : 0.f;
    const float sink = p.sinks ? p.sinks[x.head] : num::neg_inf();
    dsinks[row] = used && sink != num::neg_inf()
                      ? -__fmul_rn(ptx::exp2_approx(__fmul_rn(__fsub_rn(sink, lse), kLog2E)), shift)
                      : 0.f;
    const bool dead = !used || !sees || lse == num::neg_inf();
    p.records[blockIdx.x].lse2[row] = dead ? __int_as_float(0x7f800000) : __fmul_rn(lse, kLog2E);
    p.records[blockIdx.x].shift[row] = dead ? 0.f : shift;
    any_dead |= dead;
  }
  any_dead = __syncthreads_or(any_dead);
  if (threadIdx.x == 0) {
    p.records[blockIdx.x].dead = any_dead;
    p.turns[blockIdx.x] = 0;
    float sum = 0.f;
    if (p.sinks) {
      for (int row = 0; row < kBwdRows; ++row) sum = __fadd_rn(sum, dsinks[row]);
    }
    p.records[blockIdx.x].dsink = sum;
  }
}

// One CTA a tile: thread for thread what the registers of the product held.
template <typename Element, int kColumns>
__global__ void __launch_bounds__(kThreads) finish_dq(const __grid_constant__ BwdArgs p) {
  static_assert(kThreads == 128 * kBwdGroups);
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
  TilePlace x;
  if (!find_tile(p, blockIdx.x, x)) return;
  constexpr int kWidth = kColumns / kBwdGroups, kQuads = kWidth / 8;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread & 31, quad_lane = lane & 3;
  const bool seen = x.tiles.tile_first_key(x.tile) < x.tiles.tile_past_key(x.tile);
  const float4* const sums = reinterpret_cast<const float4*>(p.dq_sums + int64_t{blockIdx.x} * (kBwdRows * kColumns)) +
                             group * (kQuads * 128) + thread;
  const int row = kBwdRows * x.tile + (thread >> 5) * 16 + (lane >> 2), query = x.tiles.first + row;
  Element* const out = static_cast<Element*>(p.dq.data) + x.view.q_batch * p.dq.batch + x.head * p.dq.head +
                       (static_cast<int64_t>(x.view.q_row) + query) * p.dq.row;
#pragma unroll
  for (int i = 0; i < kQuads; i += 4) {
    // Words of the two rows: [k] holds columns 8 (i + k) + 2 quad_lane.
    uint32_t words[2][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float4 v = seen ? sums[(i + k) * 128] : make_float4(0.f, 0.f, 0.f, 0.f);
      words[0][k] = ptx::pack<Element>(num::finish(v.x, p.dq_scale), num::finish(v.y, p.dq_scale));
      words[1][k] = ptx::pack<Element>(num::finish(v.z, p.dq_scale), num::finish(v.w, p.dq_scale));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Transpose inside the quad: lane k gets the 8 columns of word k.
      uint32_t (&w)[4] = words[r];
#pragma unroll
      for (int d = 1; d < 4; d *= 2) {
        const bool upper = quad_lane & d;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (k & d) continue;
          const uint32_t got = __shfl_xor_sync(0xffffffff, upper ? w[k] : w[k + d], d);
          if (upper) {
            w[k] = got;
          } else {
            w[k + d] = got;
          }
        }
      }
      const int column = group * kWidth + 8 * (i + quad_lane);
      if (query + 8 * r >= 0 && row + 8 * r < x.tiles.rows && column < p.head_dim) {
        *reinterpret_cast<uint4*>(out + 8 * r * p.dq.row + column) = make_uint4(w[0], w[1], w[2], w[3]);
      }
    }
  }
}

// One CTA a head: sequences ascending, each sequence's tiles in one fixed order.
__global__ void __launch_bounds__(kThreads) sum_dsinks(const __grid_constant__ BwdArgs p) {
  __shared__ float partial[kThreads];
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
  float total = 0.f;
  for (int b = 0; b < p.batch; ++b) {
    const QueryTiles t = query_tiles(p.mask, view_sequence(p, b).sequence);
    const BwdRecord* const records = p.records + first_tile(p, b) + int64_t{blockIdx.x} * tiles_per_head(p, t);
    float sum = 0.f;
    for (int i = threadIdx.x; i < t.tiles; i += kThreads) sum = __fadd_rn(sum, records[i].dsink);
    partial[threadIdx.x] = sum;
    __syncthreads();
    for (int d = kThreads / 2; d > 0; d /= 2) {
      if (threadIdx.x < d) partial[threadIdx.x] = __fadd_rn(partial[threadIdx.x], partial[threadIdx.x + d]);
      __syncthreads();
    }
    total = __fadd_rn(total, partial[0]);
    __syncthreads();
  }
  if (threadIdx.x == 0) p.dsinks[blockIdx.x] = __fadd_rn(total, 0.f);
}

// Rows of packed tensors that belong to no sequence, and keys outside the valid range of theirs.
DETATTN_DEV bool owned(const BwdArgs& p, bool keys, int64_t batch, int64_t row) {
  const int32_t* const cu = keys ? p.cu_seqlens_k : p.cu_seqlens_q;
  int b = static_cast<int>(batch);
  if (cu) {
    if (row < cu[0] || row >= cu[p.batch]) return false;
    int end = p.batch;
    while (end - b > 1) {
      const int middle = (b + end) / 2;
      (cu[middle] <= row ? b : end) = middle;
    }
  }
  if (!keys) return true;
  const SequenceView view = view_sequence(p, b);
  const int64_t key = row - view.k_row;
  return key >= view.sequence.valid.begin && key < view.sequence.valid.end;
}

// Eight columns a thread.
__global__ void __launch_bounds__(kThreads) zero_rows(const __grid_constant__ BwdArgs p) {
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
  const int pieces = p.head_dim / 8;
  const auto sweep = [&](bool keys, int64_t batches, int64_t rows, int heads, const MutableRows& t) {
    if (t.data == nullptr) return;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < batches * rows;
         i += static_cast<int64_t>(gridDim.x) * kThreads) {
      const int64_t batch = i / rows, row = i - batch * rows;
      if (owned(p, keys, batch, row)) continue;
      for (int h = 0; h < heads; ++h) {
        auto* const at = static_cast<uint16_t*>(t.data) + batch * t.batch + h * t.head + row * t.row;
        for (int k = 0; k < pieces; ++k) reinterpret_cast<uint4*>(at)[k] = make_uint4(0, 0, 0, 0);
      }
    }
  };
  if (p.cu_seqlens_q) sweep(false, 1, p.seqlen_q, p.heads_q, p.dq);
  sweep(true, p.cu_seqlens_k ? 1 : p.batch, p.seqlen_k, p.heads_kv, p.dk);
  sweep(true, p.cu_seqlens_k ? 1 : p.batch, p.seqlen_k, p.heads_kv, p.dv);
}

template <typename Element>
cudaError_t statistics(const BwdArgs& args, int instance, cudaStream_t stream) {
  const auto kernel = instance <= 64    ? row_statistics<Element, 8>
                      : instance <= 128 ? row_statistics<Element, 16>
                                        : row_statistics<Element, 32>;
  return launch_kernel(kernel, args.tiles, kThreads, 0, stream, args);
}
template <typename Element>
cudaError_t finish(const BwdArgs& args, int instance, cudaStream_t stream) {
  const auto kernel = instance <= 64    ? finish_dq<Element, 64>
                      : instance <= 128 ? finish_dq<Element, 128>
                                        : finish_dq<Element, 256>;
  return launch_kernel(kernel, args.tiles, kThreads, 0, stream, args);
}

}  // namespace

cudaError_t launch_bwd_rows(const BwdArgs& args, DType dtype, int instance, cudaStream_t stream) {
  return dtype == DType::kBFloat16 ? statistics<__nv_bfloat16>(args, instance, stream)
                                   : statistics<__half>(args, instance, stream);
}
cudaError_t launch_bwd_finish(const BwdArgs& args, DType dtype, int instance, cudaStream_t stream) {
  return dtype == DType::kBFloat16 ? finish<__nv_bfloat16>(args, instance, stream)
                                   : finish<__half>(args, instance, stream);
}
cudaError_t launch_bwd_dsinks(const BwdArgs& args, cudaStream_t stream) {
  return launch_kernel(sum_dsinks, args.heads_q, kThreads, 0, stream, args);
}
cudaError_t launch_bwd_zero(const BwdArgs& args, int sms, cudaStream_t stream) {
  return launch_kernel(zero_rows, 4 * sms, kThreads, 0, stream, args);
}

}  // namespace detattn
