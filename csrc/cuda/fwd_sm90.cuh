// Prefill on sm_90a. A persistent CTA takes tiles of query rows: one warp drives the copy engine, warpgroups of 64 rows
// each run the products and the softmax. Chunk totals stay in shared memory and are touched once a chunk.
#pragma once

#include "pipeline.cuh"
#include "problem.cuh"
#include "softmax.cuh"
#include "wgmma.cuh"

namespace detattn {

// A tile, written by the producer. Three slots: while the consumers finish a tile, the next one may be loading and the
// one after it located.
constexpr int kTileSlots = 3;
struct TileInfo {
  RowLimits limits;
  int32_t k_row, k_batch, head_kv;
  int32_t batch, head;  // batch < 0: no more tiles
  int32_t queries;      // of the sequence
  int32_t row;          // first query of the tile
  int32_t q_row, q_batch;
  int32_t first, last;  // blocks [first, last)
  int32_t begin, end;   // relative keys that some row of the tile sees
  int32_t tail;         // memory past `end` exists and may hold anything
  int32_t holes;
  // By group: the block after the last that it sees, and the blocks that need no mask.
  int32_t group_last[3], plain_first[3], plain_last[3];
};

template <int kHeadDim, bool kSoftcap>
struct FwdLayout {
  static constexpr FwdTile kTile = fwd_tile(kHeadDim, kSoftcap);
  static constexpr int kGroups = kTile.groups, kRows = kTile.rows(), kThreads = 128 * (1 + kGroups);
  static constexpr int kBlock = block_keys(kHeadDim), kPanels = (kHeadDim + 63) / 64, kBuffers = kTile.buffers;
  static constexpr uint32_t kPanelQ = kRowsPerGroup * 128, kPanelKV = kBlock * 128;  // 64 columns are 128 bytes
  static constexpr uint32_t kQBytes = kPanels * kPanelQ, kKVBytes = kPanels * kPanelKV;
  static constexpr uint32_t kGroupTotals = kTile.shared_total * 128 * 16;
  static constexpr uint32_t kQ = 0, kKV = kQ + kGroups * kQBytes, kTotals = kKV + kBuffers * kKVBytes;
  static constexpr uint32_t kBarriers = kTotals + kGroups * kGroupTotals;
  static constexpr uint32_t kBarrierQ = kBarriers + RingBarriers<kBuffers>::kBytes;
  static constexpr uint32_t kInfo = kBarrierQ + kGroups * RingBarriers<1>::kBytes;
  static constexpr uint32_t kInfoBytes = (sizeof(TileInfo) + 15) / 16 * 16;
  static constexpr uint32_t kBytes = kInfo + kTileSlots * kInfoBytes;
  static_assert(kInfo % 16 == 0 && kBytes <= 232448, "shared memory of one CTA");
  static_assert(kTile.staged_panels * kPanelQ <= kGroupTotals && kPanels % kTile.staged_panels == 0);
  static_assert(kTile.shared_total <= kHeadDim / 8);
  static_assert((kTile.producer_registers + kGroups * kTile.consumer_registers) * 128 <= 65536);
};

// One warp: walks the tiles, loads Q, K and V.
template <int kHeadDim, bool kSoftcap>
struct FwdProducer {
  using L = FwdLayout<kHeadDim, kSoftcap>;
  const FwdArgs& p;
  unsigned char* const shared;
  const uint32_t base = ptx::shared_address(shared);
  const int lane = threadIdx.x & 31;
  const RingBarriers<L::kBuffers> bars{base + L::kBarriers};
  Ring<L::kBuffers> ring;
  int rank = -1;  // varlen: the sequence of the last tile, and its tiles
  uint32_t rank_begin = 0, rank_end = 0;

  // All lanes write the same. Longest tiles first inside a section of heads whose keys and values fit in L2.
  DETATTN_DEV void locate(uint32_t t, TileInfo& x) {
    SequenceView view;
    uint32_t in_sequence = t, heads = p.batch * p.heads_q;
    uint32_t section_heads = p.heads_per_section, per_head = p.tiles_per_head, sequence = 0;
    if (p.cu_seqlens_q) {
      if (t >= rank_end) {
        rank = warp_search(p.tile_begin, p.sequences, t);
        rank_begin = static_cast<uint32_t>(p.tile_begin[rank]);
        rank_end = static_cast<uint32_t>(p.tile_begin[rank + 1]);
      }
      in_sequence = t - rank_begin;
      heads = p.heads_q;
      sequence = p.order[rank];
      view = view_sequence(p, sequence);
      per_head = static_cast<uint32_t>((view.sequence.queries + L::kRows - 1) / L::kRows);
      section_heads = section_size(p.heads_kv, view.sequence.keys, kHeadDim) * p.group;
    }
    const uint32_t per_section = section_heads * per_head, section = in_sequence / per_section;
    const uint32_t r = in_sequence - section * per_section, section_first = section * section_heads;
    const uint32_t here = min(section_heads, heads - section_first), m = r / here;
    uint32_t head = section_first + (r - m * here);
    if (!p.cu_seqlens_q) {
      sequence = head / p.heads_q;
      head -= sequence * p.heads_q;
      view = view_sequence(p, sequence);
    }
    x.k_row = view.k_row + static_cast<int>(view.sequence.valid.begin);
    x.k_batch = view.k_batch;
    x.head_kv = head / p.group;
    x.batch = sequence;
    x.head = head;
    x.queries = static_cast<int>(view.sequence.queries);
    x.row = (per_head - 1 - m) * L::kRows;
    x.q_row = view.q_row;
    x.q_batch = view.q_batch;
    x.holes = view.holes;
    x.limits = row_limits(p.mask, view.sequence, x.row);
    const RowLimits limits = x.limits;
    const int live_rows = static_cast<int>(view.sequence.queries) - x.row;
    int begin = limits.first(0), end = limits.past(min(L::kRows, live_rows) - 1);
    if (end <= begin) begin = end = 0;
    const int first = begin / L::kBlock;
    x.begin = begin;
    x.end = end;
    x.first = first;
    x.last = (end + L::kBlock - 1) / L::kBlock;
    // The copy engine reads zeros past the end of a dense tensor.
    x.tail = p.cu_seqlens_k || p.block_table || view.sequence.valid.begin + end < p.seqlen_k;
#pragma unroll
    for (int g = 0; g < L::kGroups; ++g) {
      const int row = g * kRowsPerGroup, last_row = max(row, min(row + kRowsPerGroup, live_rows) - 1);
      const int seen = limits.past(last_row);
      x.group_last[g] = row < live_rows && end > begin && seen > begin ? (seen + L::kBlock - 1) / L::kBlock : first;
      x.plain_first[g] = (limits.first(last_row) + L::kBlock - 1) / L::kBlock;
      x.plain_last[g] = view.holes ? 0 : max(limits.past(row), 0) / L::kBlock;
    }
    __syncwarp();
  }

  DETATTN_DEV void load_block(const TensorView& t, const TileInfo& x, int block) {
    const uint32_t bar = bars.full(ring.stage()), dst = base + L::kKV + ring.stage() * L::kKVBytes;
    const int key = block * L::kBlock, head = x.head_kv * t.head_step;
    if (!p.block_table) {
      bars.wait_empty(ring);
      if (lane == 0) {
        ptx::mbar_expect_tx(bar, L::kKVBytes);
#pragma unroll
        for (int i = 0; i < L::kPanels; ++i) {
          ptx::tma_load(dst + i * L::kPanelKV, &t.map, bar, 64 * i, x.k_row + key, head, x.k_batch * t.batch_step);
        }
      }
    } else {
      // A lane a copy; boxes that hold no visible key are not looked up. The first pages are looked up before the wait.
      const int from = max(x.begin - key, 0) / p.box_keys * L::kPanels;
      const int to = (min(x.end - key, L::kBlock) + p.box_keys - 1) / p.box_keys * L::kPanels;
      const auto page_of = [&](int i) {
        return i < to ? p.block_table[x.batch * p.table_batch + (key + i / L::kPanels * p.box_keys) / p.page_size] : 0;
      };
      int i = from + lane, page = page_of(i);
      bars.wait_empty(ring);
      if (lane == 0) ptx::mbar_expect_tx(bar, (to - from) * p.box_keys * 128);
      __syncwarp();
#pragma unroll 1
      while (i < to) {
        const int box = i / L::kPanels, panel = i - box * L::kPanels;
        ptx::tma_load(dst + panel * L::kPanelKV + box * p.box_keys * 128, &t.map, bar, 64 * panel,
                      (key + box * p.box_keys) % p.page_size, head, page * t.batch_step);
        i += 32;
        page = page_of(i);
      }
    }
    ring.advance();
  }

  DETATTN_DEV RingBarriers<1> bar_q(int g) const {
    return RingBarriers<1>{base + L::kBarrierQ + g * RingBarriers<1>::kBytes};
  }

  DETATTN_DEV void load_q(const TileInfo& x, Ring<1>& ring_q) {
    for (int g = 0; g < L::kGroups; ++g) {
      bar_q(g).wait_empty(ring_q);
      if (lane == 0) {
        const uint32_t bar = bar_q(g).full(0), dst = base + L::kQ + g * L::kQBytes;
        ptx::mbar_expect_tx(bar, L::kQBytes);
#pragma unroll
        for (int i = 0; i < L::kPanels; ++i) {
          ptx::tma_load(dst + i * L::kPanelQ, &p.q.map, bar, 64 * i, x.q_row + x.row + kRowsPerGroup * g,
                        x.head * p.q.head_step, x.q_batch * p.q.batch_step);
        }
      }
    }
    ring_q.advance();
  }

  DETATTN_DEV void run() {
    const uint32_t tiles = static_cast<uint32_t>(p.cu_seqlens_q ? p.tile_begin[p.sequences] : p.tiles);
    Ring<1> ring_q;
    int slot = kTileSlots - 1;
    unsigned ticket = 0;
    const auto info = [&](int i) -> TileInfo& {
      return *reinterpret_cast<TileInfo*>(shared + L::kInfo + i * L::kInfoBytes);
    };
    // Before the first tile stands an empty one. The next tile is found while the first blocks of this one are on their
    // way. Loads go out in the order of consumption: K0 Q K1 V0 K2 V1 ...
    uint32_t t = blockIdx.x;
    bool live = false;
    info(slot).first = info(slot).last = 0;
    for (;;) {
      const TileInfo& x = info(slot);
      for (int j = x.first; j <= x.last; ++j) {
        if (j < x.last) load_block(p.k, x, j);
        if (live && j == x.first) load_q(x, ring_q);
        if (j > x.first) load_block(p.v, x, j - 1);
        if (j == min(x.first + 1, x.last)) {
          slot = slot + 1 < kTileSlots ? slot + 1 : 0;
          if (live) t = gridDim.x + (p.ticket ? __shfl_sync(0xffffffff, ticket, 0) : t);
          if (t < tiles) locate(t, info(slot));
          if (p.ticket && lane == 0) ticket = atomicAdd(p.ticket, 1u);
        }
      }
      if (t >= tiles) break;
      live = true;
    }
    for (int g = 0; g < L::kGroups; ++g) {
      bar_q(g).wait_empty(ring_q);
      if (lane == 0) {
        info(slot).batch = -1;
        ptx::mbar_arrive(bar_q(g).full(0));
      }
    }
  }
};

template <typename Element, int kHeadDim, bool kSoftcap>
struct FwdConsumer;

template <typename Element, int kHeadDim, bool kSoftcap>
__global__ void __launch_bounds__(FwdLayout<kHeadDim, kSoftcap>::kThreads, 1)
    fwd_kernel(const __grid_constant__ FwdArgs p) {
  using L = FwdLayout<kHeadDim, kSoftcap>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t base = ptx::shared_address(shared);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    RingBarriers<L::kBuffers>{base + L::kBarriers}.init(4 * L::kGroups);
    for (int g = 0; g < L::kGroups; ++g) {
      RingBarriers<1>{base + L::kBarrierQ + g * RingBarriers<1>::kBytes}.init(4);
    }
    ptx::fence_mbar_init();
    ptx::tma_prefetch(&p.q.map);
    ptx::tma_prefetch(&p.k.map);
    ptx::tma_prefetch(&p.v.map);
    ptx::tma_prefetch(&p.out.map);
  }
  __syncthreads();
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
  if (warpgroup == 0) {
    ptx::registers_lower<L::kTile.producer_registers>();
    if (threadIdx.x < 32) {
      FwdProducer<kHeadDim, kSoftcap> producer{p, shared};
      producer.run();
    }
  } else {
    ptx::registers_raise<L::kTile.consumer_registers>();
    FwdConsumer<Element, kHeadDim, kSoftcap> consumer{p, shared, warpgroup - 1};
    consumer.run();
  }
}

}  // namespace detattn

#include "fwd_consumer.cuh"
