// Prefill on sm_90a. A persistent CTA takes tiles of 128 query rows: one warp drives the copy engine, two warpgroups of
// 64 rows each run the products and the softmax. Chunk totals stay in shared memory and are touched once a chunk.
#pragma once

#include "pipeline.cuh"
#include "problem.cuh"
#include "softmax.cuh"
#include "wgmma.cuh"

namespace detattn {

// Everything that the consumers need to know about a tile; the producer writes it.
struct TileInfo {
  Sequence sequence;
  int32_t batch, head;  // batch < 0: no more tiles
  int32_t row;          // first query of the tile
  int32_t q_row, q_batch;
  int32_t first, last;  // blocks [first, last)
  int32_t begin, end;   // relative keys that some row of the tile sees
  int32_t tail;         // memory past `end` exists and may hold anything
  int32_t holes;
};

template <int kHeadDim, bool kSoftcap>
struct FwdLayout {
  static constexpr FwdTile kTile = fwd_tile(kHeadDim, kSoftcap);
  static constexpr int kBlock = block_keys(kHeadDim), kPanels = (kHeadDim + 63) / 64, kStages = kTile.stages;
  static constexpr uint32_t kPanelQ = kRowsPerGroup * 128, kPanelKV = kBlock * 128;  // 64 columns are 128 bytes
  static constexpr uint32_t kQBytes = kPanels * kPanelQ, kKVBytes = kPanels * kPanelKV;
  static constexpr uint32_t kGroupTotals = kTile.shared_total * 128 * 16;
  static constexpr uint32_t kQ = 0, kK = kQ + kConsumerGroups * kQBytes, kV = kK + kStages * kKVBytes;
  static constexpr uint32_t kTotals = kV + kStages * kKVBytes, kBarriers = kTotals + kConsumerGroups * kGroupTotals;
  static constexpr uint32_t kBarrierK = kBarriers, kBarrierV = kBarrierK + RingBarriers<kStages>::kBytes;
  static constexpr uint32_t kBarrierQ = kBarrierV + RingBarriers<kStages>::kBytes;
  static constexpr uint32_t kInfo = kBarrierQ + kConsumerGroups * RingBarriers<1>::kBytes;
  static constexpr uint32_t kInfoBytes = (sizeof(TileInfo) + 15) / 16 * 16;
  static constexpr uint32_t kBytes = kInfo + 2 * kConsumerGroups * kInfoBytes;
  static_assert(kInfo % 16 == 0 && kBytes <= 232448, "shared memory of one CTA");
  static_assert(kTile.staged_panels * kPanelQ <= kGroupTotals && kPanels % kTile.staged_panels == 0);
  static_assert(kTile.shared_total <= kHeadDim / 8);
};

template <bool kValue>
struct Flag {
  static constexpr bool value = kValue;
};
// What a step does with the chunk boundary: nothing; its block starts a chunk; the block before it did, so the output
// registers still hold the finished chunk, which joins the total now, under the product of Q and K.
enum class Step { kPlain, kFresh, kMerge };
template <Step kValue>
struct Kind {
  static constexpr Step value = kValue;
};

// One warp: walks the tiles, loads Q, K and V.
template <int kHeadDim, bool kSoftcap>
struct FwdProducer {
  using L = FwdLayout<kHeadDim, kSoftcap>;
  const FwdArgs& p;
  unsigned char* const shared;
  const uint32_t base = ptx::shared_address(shared);
  const int lane = threadIdx.x & 31;
  const RingBarriers<L::kStages> bar_k{base + L::kBarrierK}, bar_v{base + L::kBarrierV};
  Ring<L::kStages> ring_k, ring_v;
  int rank = -1;  // varlen: the sequence of the last tile, and its tiles
  int64_t rank_begin = 0, rank_end = 0;
  SequenceView view;
  int head_kv = 0;

  // Longest tiles first inside a section of heads whose keys and values fit in L2.
  DETATTN_DEV void locate(int64_t t, TileInfo& x) {
    int64_t in_sequence = t, heads = static_cast<int64_t>(p.batch) * p.heads_q, section_heads = p.heads_per_section;
    int per_head = p.tiles_per_head, sequence = 0;
    if (p.cu_seqlens_q) {
      if (t >= rank_end) {
        rank = warp_search(p.tile_begin, p.sequences, t);
        rank_begin = p.tile_begin[rank];
        rank_end = p.tile_begin[rank + 1];
        view = view_sequence(p, p.order[rank]);
      }
      in_sequence = t - rank_begin;
      heads = p.heads_q;
      sequence = p.order[rank];
      per_head = static_cast<int>((view.sequence.queries + kTileRows - 1) / kTileRows);
      const int64_t fit = kSectionBytes / ((view.sequence.keys + 1) * kHeadDim * 4);
      section_heads = clamp64(fit, 1, p.heads_kv) * p.group;
    }
    const int64_t per_section = section_heads * per_head, section = in_sequence / per_section;
    const int64_t r = in_sequence - section * per_section, section_first = section * section_heads;
    const int64_t here = section_heads < heads - section_first ? section_heads : heads - section_first;
    const int m = static_cast<int>(r / here);
    const int64_t head = section_first + (r - m * here);
    if (!p.cu_seqlens_q) {
      sequence = static_cast<int>(head / p.heads_q);
      view = view_sequence(p, sequence);
    }
    x.sequence = view.sequence;
    x.batch = sequence;
    x.head = static_cast<int>(p.cu_seqlens_q ? head : head - static_cast<int64_t>(sequence) * p.heads_q);
    x.row = (per_head - 1 - m) * kTileRows;
    x.q_row = view.q_row;
    x.q_batch = view.q_batch;
    x.holes = view.holes;
    const int64_t last_row = x.row + kTileRows < view.sequence.queries ? x.row + kTileRows : view.sequence.queries;
    const KeyRange seen = visible_keys(p.mask, view.sequence, x.row, last_row - 1);
    const int64_t anchor = view.sequence.valid.begin;
    x.begin = x.end = x.first = x.last = 0;
    if (seen.end > seen.begin) {
      x.begin = static_cast<int>(seen.begin - anchor);
      x.end = static_cast<int>(seen.end - anchor);
      x.first = x.begin / L::kBlock;
      x.last = (x.end + L::kBlock - 1) / L::kBlock;
    }
    // The copy engine reads zeros past the end of a dense tensor.
    x.tail = p.cu_seqlens_q || p.cu_seqlens_k || p.block_table || seen.end < p.seqlen_k;
    head_kv = x.head / p.group;
  }

  DETATTN_DEV void load_block(const TensorView& t, const RingBarriers<L::kStages>& bars, Ring<L::kStages>& ring,
                              uint32_t buffers, const TileInfo& x, int block) {
    bars.wait_empty(ring);
    const uint32_t bar = bars.full(ring.stage()), dst = buffers + ring.stage() * L::kKVBytes;
    const int key = block * L::kBlock, head = head_kv * t.head_step;
    if (!p.block_table) {
      if (lane == 0) {
        const int row = view.k_row + static_cast<int>(x.sequence.valid.begin) + key;
        ptx::mbar_expect_tx(bar, L::kKVBytes);
#pragma unroll
        for (int i = 0; i < L::kPanels; ++i) {
          ptx::tma_load(dst + i * L::kPanelKV, &t.map, bar, 64 * i, row, head, view.k_batch * t.batch_step);
        }
      }
    } else {
      // A lane a copy; boxes that hold no visible key are not looked up.
      const int from = max(x.begin - key, 0) / p.box_keys;
      const int to = (min(x.end - key, L::kBlock) + p.box_keys - 1) / p.box_keys;
      if (lane == 0) ptx::mbar_expect_tx(bar, (to - from) * L::kPanels * p.box_keys * 128);
      __syncwarp();
      for (int i = from * L::kPanels + lane; i < to * L::kPanels; i += 32) {
        const int box = i / L::kPanels, panel = i - box * L::kPanels, at = key + box * p.box_keys;
        const int page = p.block_table[x.batch * p.table_batch + at / p.page_size];
        ptx::tma_load(dst + panel * L::kPanelKV + box * p.box_keys * 128, &t.map, bar, 64 * panel, at % p.page_size,
                      head, page * t.batch_step);
      }
    }
    ring.advance();
  }

  DETATTN_DEV void run() {
    const int64_t tiles = p.cu_seqlens_q ? p.tile_begin[p.sequences] : p.tiles;
    Ring<1> ring_q;
    TileInfo x;
    for (int64_t t = blockIdx.x; t < tiles;) {
      unsigned ticket = 0;
      if (p.ticket && lane == 0) ticket = atomicAdd(p.ticket, 1u);
      locate(t, x);
      if (x.first < x.last) load_block(p.k, bar_k, ring_k, base + L::kK, x, x.first);
      for (int g = 0; g < kConsumerGroups; ++g) {
        const RingBarriers<1> bar_q{base + L::kBarrierQ + g * RingBarriers<1>::kBytes};
        bar_q.wait_empty(ring_q);
        if (lane == 0) {
          *info(g) = x;
          const uint32_t bar = bar_q.full(0), dst = base + L::kQ + g * L::kQBytes;
          ptx::mbar_expect_tx(bar, L::kQBytes);
#pragma unroll
          for (int i = 0; i < L::kPanels; ++i) {
            ptx::tma_load(dst + i * L::kPanelQ, &p.q.map, bar, 64 * i, x.q_row + x.row + kRowsPerGroup * g,
                          x.head * p.q.head_step, x.q_batch * p.q.batch_step);
          }
        }
      }
      ring_q.advance();
      info_slot ^= 1;
      // The order of consumption.
      for (int j = x.first + 1; j < x.last; ++j) {
        load_block(p.k, bar_k, ring_k, base + L::kK, x, j);
        load_block(p.v, bar_v, ring_v, base + L::kV, x, j - 1);
      }
      if (x.first < x.last) load_block(p.v, bar_v, ring_v, base + L::kV, x, x.last - 1);
      t = p.ticket ? static_cast<int64_t>(gridDim.x) + __shfl_sync(0xffffffff, ticket, 0) : t + gridDim.x;
    }
    for (int g = 0; g < kConsumerGroups; ++g) {
      const RingBarriers<1> bar_q{base + L::kBarrierQ + g * RingBarriers<1>::kBytes};
      bar_q.wait_empty(ring_q);
      if (lane == 0) {
        info(g)->batch = -1;
        ptx::mbar_arrive(bar_q.full(0));
      }
    }
  }

  // Two slots a group: the consumers read a tile's info until its output is stored, and free Q earlier.
  int info_slot = 0;
  DETATTN_DEV TileInfo* info(int g) {
    return reinterpret_cast<TileInfo*>(shared + L::kInfo + (2 * g + info_slot) * L::kInfoBytes);
  }
};

template <typename Element, int kHeadDim, bool kSoftcap>
struct FwdConsumer;

template <typename Element, int kHeadDim, bool kSoftcap>
__global__ void __launch_bounds__(kFwdThreads, 1) fwd_kernel(const __grid_constant__ FwdArgs p) {
  using L = FwdLayout<kHeadDim, kSoftcap>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t base = ptx::shared_address(shared);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    RingBarriers<L::kStages>{base + L::kBarrierK}.init(4 * kConsumerGroups);
    RingBarriers<L::kStages>{base + L::kBarrierV}.init(4 * kConsumerGroups);
    for (int g = 0; g < kConsumerGroups; ++g) {
      RingBarriers<1>{base + L::kBarrierQ + g * RingBarriers<1>::kBytes}.init(4);
    }
    ptx::fence_mbar_init();
    ptx::tma_prefetch(&p.q.map);
    ptx::tma_prefetch(&p.k.map);
    ptx::tma_prefetch(&p.v.map);
    ptx::tma_prefetch(&p.out.map);
  }
  __syncthreads();
  if (warpgroup == 0) {
    ptx::registers_lower<kProducerRegisters>();
    if (threadIdx.x < 32) {
      FwdProducer<kHeadDim, kSoftcap> producer{p, shared};
      producer.run();
    }
  } else {
    ptx::registers_raise<kConsumerRegisters>();
    FwdConsumer<Element, kHeadDim, kSoftcap> consumer{p, shared, warpgroup - 1};
    consumer.run();
  }
}

}  // namespace detattn

#include "fwd_consumer.cuh"
