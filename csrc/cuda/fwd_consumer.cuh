// The consumer warpgroup of the prefill: 64 query rows against the blocks of a tile. Included by fwd_sm90.cuh.
#pragma once

namespace detattn {

template <typename Element, int kHeadDim, bool kSoftcap>
struct FwdConsumer {
  using L = FwdLayout<kHeadDim, kSoftcap>;
  static constexpr int kBlock = L::kBlock, kScores = kBlock / 2, kOut = kHeadDim / 2;
  static constexpr int kStepsQK = kHeadDim / 16, kStepsPV = kBlock / 16;
  using MmaQK = ptx::Mma<Element, kBlock>;
  using MmaPV = ptx::Mma<Element, kHeadDim>;

  const FwdArgs& p;
  unsigned char* const shared;
  const int group;
  const uint32_t base = ptx::shared_address(shared);
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
  const int row0 = warp * 16 + (lane >> 2);  // this thread's rows in the group: row0, row0 + 8
  const num::Scaling scaling{p.kappa, p.scale, p.cap};
  const RingBarriers<L::kBuffers> bars{base + L::kBarriers};
  const RingBarriers<1> bar_q{base + L::kBarrierQ + group * RingBarriers<1>::kBytes};
  const uint32_t q_tile = base + L::kQ + group * L::kQBytes, staging = base + L::kTotals + group * L::kGroupTotals;
  const uint64_t desc_q = ptx::descriptor(q_tile, 16, 1024);
  const uint64_t desc_k = ptx::descriptor(base + L::kKV, 16, 1024);           // K-major
  const uint64_t desc_v = ptx::descriptor(base + L::kKV, L::kPanelKV, 1024);  // N-major
  float4* const totals = reinterpret_cast<float4*>(shared + L::kTotals + group * L::kGroupTotals) + thread;
  float4* const totals_rest =
      p.totals + static_cast<int64_t>(blockIdx.x) * (kHeadDim / 8 - L::kTile.shared_total) * (128 * L::kGroups) +
      group * 128 + thread;

  float o[kOut], s[kScores];
  uint32_t pr[kScores / 2];  // P, rounded
  uint32_t qr[L::kTile.q_in_registers ? 4 * kStepsQK : 1];
  float m[2], l[2];              // the running chunk: reference, slice sum
  float chunk_m[2], chunk_l[2];  // a finished chunk that waits for its merge
  float total_m[2], total_l[2];
  float shift[2], alpha[2];  // reference * kappa; weight of the state before the last block
  int merged;                // chunks in the total
  Ring<L::kBuffers> ring;    // the next block of K or V, in the order K0 K1 V0 K2 V1 ...

  // The tile.
  int slot = 0;  // its info
  int last;      // the block after the last one
  int next;      // first block of the next chunk
  int fresh;     // first block of this chunk
  DETATTN_DEV const TileInfo& info() const {
    return *reinterpret_cast<const TileInfo*>(shared + L::kInfo + slot * L::kInfoBytes);
  }

  DETATTN_DEV void sync_group() { ptx::bar_sync(kGroup + group, 128); }
  DETATTN_DEV void wait_turn() { ptx::bar_sync(kOrder + group, 256); }
  DETATTN_DEV void pass_turn() { ptx::bar_arrive(kOrder + (group + 1 < L::kGroups ? group + 1 : 0), 256); }
  DETATTN_DEV void free_buffer(const Ring<L::kBuffers>& r) {
    if (lane == 0) ptx::mbar_arrive(bars.empty(r.stage()));
  }

  // S = Q K^T of the block at `ring`.
  DETATTN_DEV void issue_qk() {
    const uint64_t b = desc_k + static_cast<uint64_t>(ring.stage() * (L::kKVBytes >> 4));
#pragma unroll
    for (int k = 0; k < kStepsQK; ++k) {
      const uint64_t bk = b + (k >> 2) * (L::kPanelKV >> 4) + (k & 3) * 2;
      if constexpr (L::kTile.q_in_registers) {
        MmaQK::template rs<0>(s, qr[4 * k], qr[4 * k + 1], qr[4 * k + 2], qr[4 * k + 3], bk, k != 0);
      } else {
        MmaQK::template ss<0, 0>(s, desc_q + (k >> 2) * (L::kPanelQ >> 4) + (k & 3) * 2, bk, k != 0);
      }
    }
    ptx::wgmma_commit();
  }

  // O (+)= P V of the block at `ring`.
  DETATTN_DEV void issue_pv(int accumulate) {
    const uint64_t b = desc_v + static_cast<uint64_t>(ring.stage() * (L::kKVBytes >> 4));
#pragma unroll
    for (int k = 0; k < kStepsPV; ++k) {
      MmaPV::template rs<1>(o, pr[4 * k], pr[4 * k + 1], pr[4 * k + 2], pr[4 * k + 3], b + k * 128,
                            k == 0 ? accumulate : 1);
    }
    ptx::wgmma_commit();
  }

  // Keys of V that no row of the tile sees may hold anything, and 0 * NaN is NaN: they become zeros.
  DETATTN_DEV void clean_v(const Ring<L::kBuffers>& v, int block) {
    const int key = block * kBlock, from = max(info().begin - key, 0), to = min(info().end - key, kBlock);
    const uint32_t tile = base + L::kKV + v.stage() * L::kKVBytes;
    const int dirty = from + kBlock - to;
    for (int i = thread; i < dirty * L::kPanels * 8; i += 128) {
      const int row = i / (L::kPanels * 8), piece = i - row * (L::kPanels * 8);
      const int r = row < from ? row : row - from + to;
      ptx::zero_16_bytes(tile + (piece >> 3) * L::kPanelKV + r * 128 + (piece & 7) * 16);
    }
    ptx::fence_proxy_async();
    sync_group();
  }

  // One bit a key, a word at a time: the keys that a row sees.
  DETATTN_DEV void mask(int block) {
    const TileInfo& x = info();
    const int row = group * kRowsPerGroup + row0;
    uint32_t valid[kBlock / 32];
#pragma unroll
    for (int w = 0; w < kBlock / 32; ++w) valid[w] = 0xffffffff;
    if (x.holes) {
#pragma unroll
      for (int w = 0; w < kBlock / 32; ++w) valid[w] = p.key_bits[x.batch * p.key_words + block * (kBlock / 32) + w];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int low = x.limits.first(row + 8 * r) - block * kBlock, high = x.limits.past(row + 8 * r) - block * kBlock;
#pragma unroll
      for (int w = 0; w < kBlock / 32; ++w) {
        const int from = max(low - 32 * w, 0), count = max(high - 32 * w - from, 0);
        const uint32_t seen = (ptx::bit_mask(from, count) & valid[w]) >> (2 * (lane & 3));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (!((seen >> (8 * i + e)) & 1)) s[4 * (4 * w + i) + 2 * r + e] = num::neg_inf();
          }
        }
      }
    }
  }

  DETATTN_DEV float row_max(int r) {
    float x0 = s[2 * r], x1 = s[2 * r + 1];
#pragma unroll
    for (int i = 1; i < kScores / 4; ++i) {
      x0 = fmaxf(x0, s[4 * i + 2 * r]);
      x1 = fmaxf(x1, s[4 * i + 2 * r + 1]);
    }
    x0 = fmaxf(x0, x1);
    x0 = fmaxf(x0, __shfl_xor_sync(0xffffffff, x0, 1));
    return fmaxf(x0, __shfl_xor_sync(0xffffffff, x0, 2));
  }

  DETATTN_DEV void softmax() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float next = num::next_reference(m[r], row_max(r), scaling.kappa);
      const float reference = num::finite_reference(next);
      shift[r] = __fmul_rn(reference, scaling.kappa);
      alpha[r] = num::weight(m[r], reference, scaling.kappa);
      m[r] = next;
#pragma unroll
      for (int i = 0; i < kScores / 4; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * i + 2 * r + e];
          x = num::probability(x, scaling.kappa, shift[r]);
        }
      }
      l[r] = num::next_sum(l[r], alpha[r], num::slice_sum(s, r));
    }
  }

  DETATTN_DEV void round_p() {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) pr[i] = ptx::pack<Element>(s[2 * i], s[2 * i + 1]);
  }

  // A factor of exactly 1 changes nothing, so skipping it keeps the bits.
  DETATTN_DEV void rescale() {
    if (__any_sync(0xffffffff, alpha[0] != 1.f || alpha[1] != 1.f)) [[unlikely]] {
#pragma unroll
      for (int i = 0; i < kOut / 4; ++i) {
        o[4 * i] = __fmul_rn(o[4 * i], alpha[0]);
        o[4 * i + 1] = __fmul_rn(o[4 * i + 1], alpha[0]);
        o[4 * i + 2] = __fmul_rn(o[4 * i + 2], alpha[1]);
        o[4 * i + 3] = __fmul_rn(o[4 * i + 3], alpha[1]);
      }
    }
  }

  DETATTN_DEV void fresh_state() {
    m[0] = m[1] = num::neg_inf();
    l[0] = l[1] = 0.f;
  }
  DETATTN_DEV void finish_chunk() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      chunk_m[r] = m[r];
      chunk_l[r] = l[r];
    }
  }

  DETATTN_DEV static float join_slices(float x) {
    x = num::sum2(x, __shfl_xor_sync(0xffffffff, x, 1));
    return num::sum2(x, __shfl_xor_sync(0xffffffff, x, 2));
  }
  DETATTN_DEV float4* total(int i) {
    if (i < L::kTile.shared_total) return totals + i * 128;
    return totals_rest + (i - L::kTile.shared_total) * (128 * L::kGroups);
  }

  // The finished chunk (o, chunk_m, chunk_l) joins the total; after the last one the total is left in o.
  DETATTN_DEV void merge(bool last_chunk) {
    if (merged == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        total_m[r] = chunk_m[r];
        total_l[r] = join_slices(chunk_l[r]);
      }
      if (!last_chunk) {
#pragma unroll
        for (int i = 0; i < kOut / 4; ++i) *total(i) = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
      }
    } else {
      num::MergeWeights w[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        w[r] = num::merge_weights(total_m[r], chunk_m[r], scaling.kappa);
        total_l[r] = num::merge(total_l[r], w[r].total, join_slices(chunk_l[r]), w[r].chunk);
      }
      // Wide heads leave few registers: a few elements at a time, and in that order.
      constexpr int kAtOnce = kHeadDim > 192 ? 2 : (kHeadDim > 128 ? 4 : kOut / 4);
#pragma unroll
      for (int i0 = 0; i0 < kOut / 4; i0 += kAtOnce) {
        float4 t[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          if constexpr (kHeadDim > 128) {
            t[k] = ptx::load_in_order(total(i0 + k));
          } else {
            t[k] = *total(i0 + k);
          }
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int i = 4 * (i0 + k);
          t[k].x = num::merge(t[k].x, w[0].total, o[i], w[0].chunk);
          t[k].y = num::merge(t[k].y, w[0].total, o[i + 1], w[0].chunk);
          t[k].z = num::merge(t[k].z, w[1].total, o[i + 2], w[1].chunk);
          t[k].w = num::merge(t[k].w, w[1].total, o[i + 3], w[1].chunk);
          // The ordered store is what keeps the next loads behind this element, after the last chunk too.
          if constexpr (kHeadDim > 128) ptx::store_in_order(total(i0 + k), t[k]);
          if (last_chunk) {
            o[i] = t[k].x;
            o[i + 1] = t[k].y;
            o[i + 2] = t[k].z;
            o[i + 3] = t[k].w;
          } else if constexpr (kHeadDim <= 128) {
            *total(i0 + k) = t[k];
          }
        }
      }
    }
    ++merged;
  }

  // Before O takes P V of a block: a chunk that starts there needs O for itself, so the finished one joins the total.
  DETATTN_DEV void bring_up(int block) {
    if (block == fresh) [[unlikely]] {
      if (block != info().first) merge(false);
    } else {
      rescale();
    }
  }

  // Issues S = Q K of block j; under it brings O up to date and issues O += P V of block j - 1; under that runs the
  // softmax of block j.
  template <bool kMasked>
  DETATTN_DEV void step(int j) {
    bars.wait_full(ring);
    wait_turn();
    ptx::wgmma_fence();
    issue_qk();
    const Ring<L::kBuffers> k = ring;
    ring.advance();
    bring_up(j - 1);
    bars.wait_full(ring);
    ptx::wgmma_fence();
    issue_pv(j - 1 != fresh);
    pass_turn();
    ptx::wgmma_wait<1>(s);
    free_buffer(k);
    if constexpr (kSoftcap) cap_scores();
    if constexpr (kMasked) mask(j);
    if (j == next) [[unlikely]] {
      fresh = j;
      finish_chunk();
      fresh_state();
      next = chunk_end(j * kBlock) / kBlock;
    }
    softmax();
    ptx::hold_until_ready(l[0] + l[1]);
    ptx::wgmma_wait<0>(o);
    free_buffer(ring);
    ring.advance();
    round_p();
  }

  DETATTN_DEV void cap_scores() {
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] = num::cap_score(s[i], scaling);
  }

  DETATTN_DEV void load_q() {
#pragma unroll
    for (int k = 0; k < kStepsQK; ++k) {
      const int row = warp * 16 + (lane & 15), piece = 2 * k + (lane >> 4);
      ptx::ldmatrix_x4(q_tile + (piece >> 3) * L::kPanelQ + row * 128 + (((piece & 7) ^ (row & 7)) << 4), qr[4 * k],
                       qr[4 * k + 1], qr[4 * k + 2], qr[4 * k + 3]);
    }
  }
  DETATTN_DEV void free_q() {
    if (lane == 0) ptx::mbar_arrive(bar_q.empty(0));
  }

  // A group that does not see a block takes its turn and hands the buffers back unread, at the pace of the others: they
  // wait for both. Only a full buffer goes back: before that the barrier may still count for the round before.
  DETATTN_DEV void drain(int buffers) {
    for (int i = 0; i < buffers; ++i) {
      bars.wait_full(ring);
      free_buffer(ring);
      ring.advance();
    }
  }
  DETATTN_DEV void take_no_turn() {
    wait_turn();
    pass_turn();
  }

  // All blocks of the tile; leaves the merged row in o, total_m, total_l.
  DETATTN_DEV void attend() {
    const int first = info().first;
    bars.wait_full(ring);
    wait_turn();
    ptx::wgmma_fence();
    issue_qk();
    pass_turn();
    // The output of the tile before must have left the staging memory before totals overwrite it.
    if (thread == 0) ptx::tma_store_wait_read();
    sync_group();
    ptx::wgmma_wait<0>(s);
    free_buffer(ring);
    ring.advance();
    if constexpr (L::kTile.q_in_registers) free_q();
    if constexpr (kSoftcap) cap_scores();
    if (first < info().plain_first[group] || first >= info().plain_last[group]) mask(first);
    fresh_state();
    softmax();
    round_p();
    alpha[0] = alpha[1] = 1.f;
    merged = 0;

    next = chunk_end(first * kBlock) / kBlock;
    fresh = first;
    if (info().begin > first * kBlock) {
      Ring<L::kBuffers> v = ring;
      if (first + 1 < info().last) v.advance();
      bars.wait_full(v);
      clean_v(v, first);
    }

    for (int j = first + 1; j < last;) {
      const int end = min(info().plain_last[group], last);
      if (j >= info().plain_first[group] && j < end) {
        do step<false>(j);
        while (++j < end);
      } else {
        step<true>(j);
        ++j;
      }
    }
    if constexpr (!L::kTile.q_in_registers) free_q();
    // Blocks that other groups see, but not this one.
    const int rest = info().last - last;
    if (rest > 0) {
      take_no_turn();
      drain(1);
    }

    bring_up(last - 1);
    bars.wait_full(ring);
    if (last == info().last && info().tail && info().end < last * kBlock) clean_v(ring, last - 1);
    ptx::wgmma_fence();
    issue_pv(last - 1 != fresh);
    ptx::wgmma_wait<0>(o);
    free_buffer(ring);
    ring.advance();
    if (rest > 0) {
      for (int i = 1; i < rest; ++i) {
        take_no_turn();
        drain(2);
      }
      drain(1);
    }
    finish_chunk();
    merge(true);
  }

  // out and lse of the tile's rows.
  DETATTN_DEV void store(const TileInfo& x) {
    const int first_row = x.row + group * kRowsPerGroup;
    const int rows = static_cast<int>(clamp64(x.queries - first_row, 0, kRowsPerGroup));
    if (p.sinks) {
      const float sink = p.sinks[x.head];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float a = num::add_sink(total_m[r], total_l[r], sink, scaling);
#pragma unroll
        for (int i = 0; i < kOut / 4; ++i) {
          o[4 * i + 2 * r] = __fmul_rn(o[4 * i + 2 * r], a);
          o[4 * i + 2 * r + 1] = __fmul_rn(o[4 * i + 2 * r + 1], a);
        }
      }
    }
    const float inv[2] = {num::inverse(total_l[0]), num::inverse(total_l[1])};
    if ((lane & 3) == 0) {
      float* const lse = static_cast<float*>(p.lse.data) + x.q_batch * p.lse.batch + x.head * p.lse.head +
                         static_cast<int64_t>(x.q_row + first_row) * p.lse.row;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (row0 + 8 * r < rows) lse[(row0 + 8 * r) * p.lse.row] = num::lse(total_m[r], total_l[r], scaling);
      }
    }
    // A copy clips at the end of a dense tensor, not at the end of a packed sequence.
    const bool copy = p.out_map_ok && rows > 0 && (rows == kRowsPerGroup || !p.cu_seqlens_q);
#pragma unroll
    for (int panel = 0; panel < L::kPanels; panel += L::kTile.staged_panels) {
      if (thread == 0) ptx::tma_store_wait_read();
      sync_group();  // every thread has read its totals, and the staging memory is free
      const int row = warp * 16 + (lane & 15);
#pragma unroll
      for (int i = 4 * panel; i < 4 * (panel + L::kTile.staged_panels) && i < kHeadDim / 16; ++i) {
        const int piece = 2 * i + (lane >> 4) - 8 * panel;
        const uint32_t at = staging + (piece >> 3) * L::kPanelQ + row * 128 + (((piece & 7) ^ (row & 7)) << 4);
        ptx::stmatrix_x4(at, ptx::pack<Element>(num::finish(o[8 * i], inv[0]), num::finish(o[8 * i + 1], inv[0])),
                         ptx::pack<Element>(num::finish(o[8 * i + 2], inv[1]), num::finish(o[8 * i + 3], inv[1])),
                         ptx::pack<Element>(num::finish(o[8 * i + 4], inv[0]), num::finish(o[8 * i + 5], inv[0])),
                         ptx::pack<Element>(num::finish(o[8 * i + 6], inv[1]), num::finish(o[8 * i + 7], inv[1])));
      }
      ptx::fence_proxy_async();
      sync_group();
      if (copy) {
        if (thread == 0) {
#pragma unroll
          for (int i = 0; i < L::kTile.staged_panels; ++i) {
            ptx::tma_store(&p.out.map, staging + i * L::kPanelQ, 64 * (panel + i), x.q_row + first_row,
                           x.head * p.out.head_step, x.q_batch * p.out.batch_step);
          }
          ptx::tma_store_commit();
        }
      } else {
        store_rows(x, first_row, rows, panel);
      }
    }
  }

  DETATTN_DEV void store_rows(const TileInfo& x, int first_row, int rows, int panel) {
    constexpr int kPieces = 8 * L::kTile.staged_panels;
    Element* const out = static_cast<Element*>(p.out_rows.data) + x.q_batch * p.out_rows.batch +
                         x.head * p.out_rows.head + static_cast<int64_t>(x.q_row + first_row) * p.out_rows.row;
    const unsigned char* const stage = shared + L::kTotals + group * L::kGroupTotals;
    for (int i = thread; i < rows * kPieces; i += 128) {
      const int row = i / kPieces, piece = i - row * kPieces, column = 64 * panel + 8 * piece;
      if (column >= p.head_dim) continue;
      const uint4 v = *reinterpret_cast<const uint4*>(stage + (piece >> 3) * L::kPanelQ + row * 128 +
                                                      (((piece & 7) ^ (row & 7)) << 4));
      Element* const at = out + row * p.out_rows.row + column;
      if (p.out_map_ok) {
        *reinterpret_cast<uint4*>(at) = v;
      } else {
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          reinterpret_cast<uint16_t*>(at)[k] = static_cast<uint16_t>(words[k >> 1] >> (16 * (k & 1)));
        }
      }
    }
  }

  DETATTN_DEV void run() {
    uint32_t phase = 0;
    if (group == L::kGroups - 1) pass_turn();
    for (;; slot = slot + 1 < kTileSlots ? slot + 1 : 0, phase ^= 1) {
      ptx::mbar_wait(bar_q.full(0), phase);
      if (info().batch < 0) break;
      last = info().group_last[group];
      if constexpr (L::kTile.q_in_registers) load_q();
      if (info().first < last) {
        attend();
      } else {
        free_q();
        if (thread == 0) ptx::tma_store_wait_read();
        const int blocks = info().last - info().first;
        for (int i = 0; i < blocks; ++i) {
          take_no_turn();
          drain(i == 0 ? 1 : 2);
        }
        if (blocks > 0) drain(1);
#pragma unroll
        for (int i = 0; i < kOut; ++i) o[i] = 0.f;
        total_m[0] = total_m[1] = num::neg_inf();
        total_l[0] = total_l[1] = 0.f;
      }
      store(info());
    }
    if (thread == 0) ptx::tma_store_wait_all();
  }
};

}  // namespace detattn
