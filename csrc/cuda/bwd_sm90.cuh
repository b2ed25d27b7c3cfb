// Backward on sm_90a. A CTA owns a block of keys: it keeps dk and dv in registers and walks the tiles of queries that
// see it. Its part of dq leaves through shared memory and is added to an fp32 sum in global memory, key blocks in
// ascending order: a counter a tile says whose turn it is. Scores are computed transposed (keys are M), so that P and
// dS feed the products for dv and dk from registers.
#pragma once

#include "bwd_places.cuh"
#include "pipeline.cuh"
#include "softmax.cuh"
#include "wgmma.cuh"

namespace detattn {

template <int kHeadDim>
struct BwdLayout {
  static constexpr BwdTile kTile = bwd_tile(kHeadDim);
  static constexpr int kKeys = kTile.keys, kStages = kTile.stages, kThreads = 128 * (1 + kBwdGroups);
  static constexpr int kPanels = (kHeadDim + 63) / 64, kColumns = 64 * kPanels;
  static constexpr int kDqWidth = kColumns / kBwdGroups;  // columns of dq of one warpgroup
  static constexpr int kPairBuffers = kStages > 1 ? 2 : 1;
  static constexpr uint32_t kPanelK = kKeys * 128, kPanelQ = kBwdRows * 128;  // 64 columns are 128 bytes
  static constexpr uint32_t kKBytes = kPanels * kPanelK, kQBytes = kPanels * kPanelQ;
  static constexpr uint32_t kPairBytes = kKeys * 128;  // dS (or P) of a block and a tile, keys as rows
  static constexpr uint32_t kDqBytes = kBwdRows * kColumns * 4;
  static constexpr uint32_t kRecordBytes = (sizeof(BwdRecord) + 127) / 128 * 128;
  static constexpr uint32_t kK = 0, kV = kK + kKBytes, kQ = kV + kKBytes, kDo = kQ + kStages * kQBytes;
  static constexpr uint32_t kDs = kDo + kStages * kQBytes, kP = kDs + kPairBuffers * kPairBytes;
  static constexpr uint32_t kDq = kP + (kTile.split_columns ? kPairBytes : 0);
  static constexpr uint32_t kRecords = kDq + kTile.dq_buffers * kDqBytes,
                            kBarrierKV = kRecords + kStages * kRecordBytes;
  static constexpr uint32_t kBarriersDq = kBarrierKV + 8;
  static constexpr uint32_t kBarriersQ = kBarriersDq + RingBarriers<kTile.dq_buffers>::kBytes;
  static constexpr uint32_t kBarriersDo = kBarriersQ + RingBarriers<kStages>::kBytes;
  static constexpr uint32_t kJob = kBarriersDo + RingBarriers<kStages>::kBytes;
  static constexpr uint32_t kBytes = kJob + sizeof(BwdJob);
  static_assert(kJob % 8 == 0);
  static_assert(kBytes <= 232448, "shared memory of one CTA");
  static_assert((kTile.producer_registers + kBwdGroups * kTile.consumer_registers) * 128 <= 65536);
};

// One thread loads the block, then Q, dO and the statistics of tile after tile.
template <int kHeadDim>
DETATTN_DEV void bwd_load(const BwdArgs& p, const BwdJob& x, uint32_t base) {
  using L = BwdLayout<kHeadDim>;
  const RingBarriers<L::kStages> bars_q{base + L::kBarriersQ}, bars_do{base + L::kBarriersDo};
  BwdWalk walk(p, x);
  if (walk.left == 0) return;
  ptx::mbar_expect_tx(base + L::kBarrierKV, 2 * L::kKBytes);
  const int key = x.view.k_row + static_cast<int>(x.view.sequence.valid.begin) + x.key;
#pragma unroll
  for (int i = 0; i < L::kPanels; ++i) {
    ptx::tma_load(base + L::kK + i * L::kPanelK, &p.k.map, base + L::kBarrierKV, 64 * i, key, x.head_kv * p.k.head_step,
                  x.view.k_batch * p.k.batch_step);
    ptx::tma_load(base + L::kV + i * L::kPanelK, &p.v.map, base + L::kBarrierKV, 64 * i, key, x.head_kv * p.v.head_step,
                  x.view.k_batch * p.v.batch_step);
  }
  for (Ring<L::kStages> ring; walk.left > 0; walk.advance(), ring.advance()) {
    const int row = x.view.q_row + x.tiles.first + kBwdRows * walk.tile, head = x.head_kv * p.group + walk.head;
    const uint32_t full_q = bars_q.full(ring.stage()), full_do = bars_do.full(ring.stage());
    bars_q.wait_empty(ring);
    ptx::mbar_expect_tx(full_q, L::kQBytes + sizeof(BwdRecord));
#pragma unroll
    for (int i = 0; i < L::kPanels; ++i) {
      ptx::tma_load(base + L::kQ + ring.stage() * L::kQBytes + i * L::kPanelQ, &p.q.map, full_q, 64 * i, row,
                    head * p.q.head_step, x.view.q_batch * p.q.batch_step);
    }
    ptx::bulk_load(base + L::kRecords + ring.stage() * L::kRecordBytes, p.records + walk.number(p, x),
                   sizeof(BwdRecord), full_q);
    bars_do.wait_empty(ring);
    ptx::mbar_expect_tx(full_do, L::kQBytes);
#pragma unroll
    for (int i = 0; i < L::kPanels; ++i) {
      ptx::tma_load(base + L::kDo + ring.stage() * L::kQBytes + i * L::kPanelQ, &p.dout.map, full_do, 64 * i, row,
                    head * p.dout.head_step, x.view.q_batch * p.dout.batch_step);
    }
  }
}

// Adds the block's part of dq, tile after tile, when all smaller blocks have added theirs. Those have smaller tickets,
// so they are running or done, and none of them waits for us. One thread a buffer; they take tiles in rotation.
template <int kHeadDim>
DETATTN_DEV void bwd_add_dq(const BwdArgs& p, const BwdJob& x, uint32_t base, uint32_t buffer) {
  using L = BwdLayout<kHeadDim>;
  const RingBarriers<L::kTile.dq_buffers> bars{base + L::kBarriersDq};
  const uint32_t dq = base + L::kDq + buffer * L::kDqBytes;
  Ring<L::kTile.dq_buffers> ring;
  for (BwdWalk walk(p, x); walk.left > 0; walk.advance(), ring.advance()) {
    if (ring.stage() != buffer) continue;
    const int64_t number = walk.number(p, x);
    uint32_t* const turn = p.turns + number;
    float* const sum = p.dq_sums + number * (kBwdRows * L::kColumns);
    const uint32_t mine = static_cast<uint32_t>(x.key / L::kKeys - x.tiles.tile_first_key(walk.tile) / L::kKeys);
    while (ptx::load_acquire(turn) != mine) {
    }
    ptx::fence_proxy_async_all();
    bars.wait_full(ring);
    if (mine == 0) {
      ptx::bulk_store(sum, dq, L::kDqBytes);
    } else {
      ptx::bulk_add_in_turn(sum, dq, L::kDqBytes);
    }
    ptx::tma_store_commit();
    ptx::tma_store_wait_read();
    ptx::mbar_arrive(bars.empty(buffer));
    // The whole copy, not only its reads, must be done before the next block may add.
    ptx::tma_store_wait_all();
    ptx::fence_proxy_async_all();
    ptx::store_release(turn, mine + 1);
  }
}

template <typename Element, int kHeadDim, bool kSoftcap>
struct BwdConsumer;

template <typename Element, int kHeadDim, bool kSoftcap>
__global__ void __launch_bounds__(BwdLayout<kHeadDim>::kThreads, 1) bwd_kernel(const __grid_constant__ BwdArgs p) {
  using L = BwdLayout<kHeadDim>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t base = ptx::shared_address(shared);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  const RingBarriers<L::kTile.dq_buffers> bars_dq{base + L::kBarriersDq};
  BwdJob& job = *reinterpret_cast<BwdJob*>(shared + L::kJob);
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
  if (threadIdx.x == 0) {
    ptx::mbar_init(base + L::kBarrierKV, 1);
    // Here the consumers fill and one thread empties.
    for (int i = 0; i < L::kTile.dq_buffers; ++i) {
      ptx::mbar_init(bars_dq.full(i), 4 * kBwdGroups);
      ptx::mbar_init(bars_dq.empty(i), 1);
    }
    RingBarriers<L::kStages>{base + L::kBarriersQ}.init(4 * kBwdGroups);
    RingBarriers<L::kStages>{base + L::kBarriersDo}.init(4 * kBwdGroups);
    ptx::fence_mbar_init();
  }
  if (threadIdx.x < 32) {
    uint32_t ticket = 0;
    if (threadIdx.x == 0) ticket = atomicAdd(p.ticket, 1u);
    find_job<L::kKeys>(p, __shfl_sync(0xffffffff, ticket, 0), job);
  }
  __syncthreads();
  if (job.keys <= 0) return;
  if (warpgroup == 0) {
    ptx::registers_lower<L::kTile.producer_registers>();
    if (threadIdx.x == 0) bwd_load<kHeadDim>(p, job, base);
    const int adder = static_cast<int>(threadIdx.x) / 32 - 1;
    if (adder >= 0 && adder < L::kTile.dq_buffers && threadIdx.x % 32 == 0) bwd_add_dq<kHeadDim>(p, job, base, adder);
  } else {
    ptx::registers_raise<L::kTile.consumer_registers>();
    BwdConsumer<Element, kHeadDim, kSoftcap> consumer{p, job, shared, warpgroup - 1};
    consumer.run();
  }
}

template <typename Element, int kHeadDim, bool kSoftcap>
cudaError_t launch_bwd(const BwdArgs& args, cudaStream_t stream) {
  static std::atomic<bool> raised[kMaxDevices];
  const auto kernel = bwd_kernel<Element, kHeadDim, kSoftcap>;
  using L = BwdLayout<kHeadDim>;
  if (const cudaError_t e = raise_shared_limit(reinterpret_cast<const void*>(kernel), L::kBytes, raised)) return e;
  return launch_kernel(kernel, args.jobs, L::kThreads, L::kBytes, stream, args);
}

template <int kHeadDim>
const BwdInstance& bwd_instance() {
  static const BwdInstance table = {
      {{launch_bwd<__half, kHeadDim, false>, launch_bwd<__half, kHeadDim, true>},
       {launch_bwd<__nv_bfloat16, kHeadDim, false>, launch_bwd<__nv_bfloat16, kHeadDim, true>}}};
  return table;
}

}  // namespace detattn

#include "bwd_consumer.cuh"
