// The consumer warpgroup of the backward. Included by bwd_sm90.cuh.
#pragma once

namespace detattn {

template <typename Element, int kHeadDim, bool kSoftcap>
struct BwdConsumer {
  using L = BwdLayout<kHeadDim>;
  static constexpr bool kSplit = L::kTile.split_columns;
  static constexpr int kQueries = kSplit ? kBwdRows / kBwdGroups : kBwdRows;  // of this group's scores
  static constexpr int kScores = kQueries / 2, kDq = L::kDqWidth / 2, kOutWidth = kSplit ? L::kDqWidth : kHeadDim;
  static constexpr int kOut = kOutWidth / 2;
  using MmaScores = ptx::Mma<Element, kQueries>;
  using MmaOut = ptx::Mma<Element, kOutWidth>;
  using MmaDq = ptx::Mma<Element, L::kDqWidth>;
  // Two sets, one a buffer of dS: a group may be a tile ahead of the other.
  static constexpr int kPairs = kOrder + 1;       // + 2 * buffer + group: the group's part of dS is stored
  static constexpr bool kAhead = L::kStages > 1;  // the scores of the next tile are computed under this one's products

  const BwdArgs& p;
  const BwdJob& x;
  unsigned char* const shared;
  const int group;
  const uint32_t base = ptx::shared_address(shared);
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
  const int row0 = (kSplit ? 0 : 64 * group) + warp * 16 + (lane >> 2);  // this thread's keys: row0, row0 + 8
  const int column0 = (kSplit ? kQueries * group : 0) + 2 * (lane & 3);  // its queries: column0 + 8n + {0, 1}
  const num::Scaling scaling{p.kappa, p.scale, p.cap};
  const RingBarriers<L::kStages> bars_q{base + L::kBarriersQ}, bars_do{base + L::kBarriersDo};
  const RingBarriers<L::kTile.dq_buffers> bars_dq{base + L::kBarriersDq};
  Ring<L::kStages> ring;

  float dk[kOut], dv[kOut], s[kScores], dp[kScores], dq[kDq];
  float w[kScores];
  uint32_t pr[kScores / 2], ds[kScores / 2];  // P and dS, rounded

  DETATTN_DEV void sync_all() { ptx::bar_sync(kOrder, 128 * kBwdGroups); }
  DETATTN_DEV void release(uint32_t bar) {
    if (lane == 0) ptx::mbar_arrive(bar);
  }
  DETATTN_DEV const BwdRecord& record() const {
    return *reinterpret_cast<const BwdRecord*>(shared + L::kRecords + ring.stage() * L::kRecordBytes);
  }
  DETATTN_DEV float2 pair(const float* row_values, int n) const {
    return *reinterpret_cast<const float2*>(row_values + column0 + 8 * n);
  }

  // S^T = K Q^T or dP^T = V dO^T.
  DETATTN_DEV void issue_scores(float (&d)[kScores], uint32_t keys, uint32_t queries, const Ring<L::kStages>& r) {
    const uint64_t a = ptx::descriptor(base + keys + (kSplit ? 0 : group * 8192), 16, 1024);
    const uint64_t b = ptx::descriptor(base + queries + r.stage() * L::kQBytes + (kSplit ? group * 4096 : 0), 16, 1024);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      MmaScores::template ss<0, 0>(d, a + (k >> 2) * (L::kPanelK >> 4) + (k & 3) * 2,
                                   b + (k >> 2) * (L::kPanelQ >> 4) + (k & 3) * 2, k != 0);
    }
    ptx::wgmma_commit();
  }

  // dv += P^T dO or dk += dS^T Q.
  DETATTN_DEV void issue_out(float (&d)[kOut], const uint32_t (&a)[kScores / 2], uint32_t a_shared, uint32_t queries) {
    const uint32_t first_panel = kSplit ? group * (L::kPanels / kBwdGroups) : 0;
    const uint64_t b =
        ptx::descriptor(base + queries + ring.stage() * L::kQBytes + first_panel * L::kPanelQ, L::kPanelQ, 1024);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBwdRows / 16; ++k) {
      if constexpr (kSplit) {
        MmaOut::template ss<0, 1>(d, ptx::descriptor(base + a_shared, 16, 1024) + k * 2, b + k * 128, 1);
      } else {
        MmaOut::template rs<1>(d, a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3], b + k * 128, 1);
      }
    }
    ptx::wgmma_commit();
  }

  // The block's part of dq, this group's columns: dS K.
  DETATTN_DEV void issue_dq(uint32_t ds_shared) {
    constexpr uint32_t kOffset = L::kDqWidth < 64 ? L::kDqWidth * 2 : L::kDqWidth / 64 * L::kPanelK;
    const uint64_t a = ptx::descriptor(base + ds_shared, L::kPairBytes, 1024);
    const uint64_t b = ptx::descriptor(base + L::kK + group * kOffset, L::kPanelK, 1024);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < L::kKeys / 16; ++k) MmaDq::template ss<1, 1>(dq, a + k * 128, b + k * 128, k != 0);
    ptx::wgmma_commit();
  }

  // A tile as rows of keys, 128 bytes of queries each.
  DETATTN_DEV void store_pair(const uint32_t (&from)[kScores / 2], uint32_t to) {
    const int row = (kSplit ? 0 : 64 * group) + warp * 16 + (lane & 15);
#pragma unroll
    for (int k = 0; k < kScores / 8; ++k) {
      const int piece = (kSplit ? group * (kQueries / 8) : 0) + 2 * k + (lane >> 4);
      ptx::stmatrix_x4(base + to + row * 128 + ((piece ^ (row & 7)) << 4), from[4 * k], from[4 * k + 1],
                       from[4 * k + 2], from[4 * k + 3]);
    }
  }

  DETATTN_DEV bool key_valid(int row) const {
    return row < x.keys && (!x.view.holes || key_bit(p, x.sequence, x.key + row));
  }
  DETATTN_DEV void zero_row(uint32_t tile, uint32_t panel, int row, int thread_in_row) {
    for (int piece = thread_in_row; piece < L::kPanels * 8; piece += 8) {
      ptx::zero_16_bytes(base + tile + (piece >> 3) * panel + row * 128 + (piece & 7) * 16);
    }
  }
  // Masked keys may hold anything, and dq multiplies them by 0.
  DETATTN_DEV void clean_keys() {
    for (int row = group * 16 + (thread >> 3); row < L::kKeys; row += 16 * kBwdGroups) {
      if (!key_valid(row)) zero_row(L::kK, L::kPanelK, row, thread & 7);
    }
    ptx::fence_proxy_async();
    sync_all();
  }
  // Rows that add nothing may hold anything, and dk and dv multiply them by 0.
  DETATTN_DEV void clean_queries() {
    for (int row = group * 16 + (thread >> 3); row < kBwdRows; row += 16 * kBwdGroups) {
      if (record().lse2[row] != __int_as_float(0x7f800000)) continue;
      zero_row(L::kQ + ring.stage() * L::kQBytes, L::kPanelQ, row, thread & 7);
      zero_row(L::kDo + ring.stage() * L::kQBytes, L::kPanelQ, row, thread & 7);
    }
    ptx::fence_proxy_async();
    sync_all();
  }

  // w: P (with a softcap the tanh, so that its slope can be had later); pr: P rounded. Not in the place of s: registers
  // that ordinary instructions write between products in flight would make the assembler serialise those.
  template <bool kMasked>
  DETATTN_DEV void probabilities(int tile) {
    int from[2], count[2];
    if constexpr (kMasked) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int key = x.key + row0 + 8 * r - kBwdRows * tile;
        from[r] = min(max(key - x.tiles.high + 1, 0), kBwdRows);
        const int past = min(max(key - x.tiles.low + 1, 0), kBwdRows);
        count[r] = key_valid(row0 + 8 * r) ? max(past - from[r], 0) : 0;
        from[r] = column0 - from[r];
      }
    }
#pragma unroll
    for (int n = 0; n < kScores / 4; ++n) {
      const float2 lse2 = pair(record().lse2, n);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float weight[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float score = s[4 * n + 2 * r + e];
          const float reference = e ? lse2.y : lse2.x;
          if constexpr (kSoftcap) score = num::cap_score(score, scaling);
          if constexpr (kMasked) {
            const bool seen = static_cast<unsigned>(from[r] + 8 * n + e) < static_cast<unsigned>(count[r]);
            if (!seen || reference == __int_as_float(0x7f800000)) score = num::neg_inf();
          }
          weight[e] = num::probability(score, scaling.kappa, reference);
          w[4 * n + 2 * r + e] = kSoftcap ? score : weight[e];
        }
        pr[2 * n + r] = ptx::pack<Element>(weight[0], weight[1]);
      }
    }
  }

  // ds = P (dP - shift), rounded.
  template <bool kMasked>
  DETATTN_DEV void gradients() {
#pragma unroll
    for (int n = 0; n < kScores / 4; ++n) {
      const float2 shift = pair(record().shift, n);
      float2 lse2;
      if constexpr (kSoftcap) lse2 = pair(record().lse2, n);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float g[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float t = w[4 * n + 2 * r + e];
          const float weight = kSoftcap ? num::probability(t, scaling.kappa, e ? lse2.y : lse2.x) : t;
          g[e] = __fmul_rn(weight, __fsub_rn(dp[4 * n + 2 * r + e], e ? shift.y : shift.x));
          if constexpr (kSoftcap) g[e] = __fmul_rn(g[e], __fmaf_rn(-t, t, 1.f));
          if (kMasked && weight == 0.f) g[e] = 0.f;
        }
        ds[2 * n + r] = ptx::pack<Element>(g[0], g[1]);
      }
    }
  }

  DETATTN_DEV void walk_tiles() {
    BwdWalk walk(p, x);
    uint32_t buffer = 0;
    Ring<L::kTile.dq_buffers> ring_dq;
    // No product is in flight where the loop closes: the compiler could not keep its registers apart there.
    if constexpr (kAhead) {
      bars_q.wait_full(ring);
      issue_scores(s, L::kK, L::kQ, ring);
      ptx::wgmma_wait<0>(s);
    }
    do {
      if constexpr (!kAhead) {
        bars_q.wait_full(ring);
        issue_scores(s, L::kK, L::kQ, ring);
      }
      const int tile = walk.tile, row = kBwdRows * tile;
      const bool dead = record().dead;
      const bool masked = dead || x.view.holes || x.keys < L::kKeys || x.tiles.low + row + kBwdRows - 1 > x.key ||
                          x.tiles.high + row < x.key + L::kKeys;
      bars_do.wait_full(ring);
      if (dead) [[unlikely]]
        clean_queries();
      issue_scores(dp, L::kV, L::kDo, ring);
      if constexpr (!kAhead) ptx::wgmma_wait<1>(s);
      if (masked) {
        probabilities<true>(tile);
      } else {
        probabilities<false>(tile);
      }
      const uint32_t ds_shared = L::kDs + buffer * L::kPairBytes;
      if constexpr (kSplit) store_pair(pr, L::kP);
      ptx::wgmma_wait<0>(dp);
      if (masked) {
        gradients<true>();
      } else {
        gradients<false>();
      }
      store_pair(ds, ds_shared);
      ptx::fence_proxy_async();
      // Where P and dS stay in registers, dv and dk need no other group; dq does, and waits for it under their
      // products.
      if constexpr (kSplit) {
        sync_all();
      } else {
        ptx::bar_arrive(kPairs + 2 * buffer + group, 128 * kBwdGroups);
      }
      issue_out(dv, pr, L::kP, L::kDo);
      issue_out(dk, ds, ds_shared, L::kQ);
      ptx::wgmma_wait<1>(dv);
      release(bars_do.empty(ring.stage()));
      const uint32_t empty_q = bars_q.empty(ring.stage());
      walk.advance();
      ring.advance();
      if constexpr (kAhead) {
        // After the last tile whatever the buffer holds is multiplied, and nobody looks at it.
        if (walk.left > 0) bars_q.wait_full(ring);
        issue_scores(s, L::kK, L::kQ, ring);
      }
      if constexpr (!kSplit) ptx::bar_sync(kPairs + 2 * buffer + 1 - group, 128 * kBwdGroups);
      issue_dq(ds_shared);
      buffer = buffer + 1 < L::kPairBuffers ? buffer + 1 : 0;
      ptx::wgmma_wait<0>(dq);
      release(empty_q);
      bars_dq.wait_empty(ring_dq);
      float4* const staged =
          reinterpret_cast<float4*>(shared + L::kDq + ring_dq.stage() * L::kDqBytes) + group * (kDq / 4 * 128) + thread;
#pragma unroll
      for (int i = 0; i < kDq / 4; ++i) {
        staged[i * 128] = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
      }
      ptx::fence_proxy_async();
      __syncwarp();
      release(bars_dq.full(ring_dq.stage()));
      ring_dq.advance();
    } while (walk.left > 0);
    ptx::wgmma_wait<0>(dk);
    ptx::wgmma_wait<0>(dv);
  }

  // This group's part of dk or dv to shared memory, in the layout of K.
  DETATTN_DEV void stage(const float (&from)[kOut], uint32_t to, float factor) {
    const int row = (kSplit ? 0 : 64 * group) + warp * 16 + (lane & 15);
#pragma unroll
    for (int i = 0; i < kOut / 8; ++i) {
      const int piece = (kSplit ? group * (kOutWidth / 8) : 0) + 2 * i + (lane >> 4);
      ptx::stmatrix_x4(base + to + (piece >> 3) * L::kPanelK + row * 128 + (((piece & 7) ^ (row & 7)) << 4),
                       ptx::pack<Element>(num::finish(from[8 * i], factor), num::finish(from[8 * i + 1], factor)),
                       ptx::pack<Element>(num::finish(from[8 * i + 2], factor), num::finish(from[8 * i + 3], factor)),
                       ptx::pack<Element>(num::finish(from[8 * i + 4], factor), num::finish(from[8 * i + 5], factor)),
                       ptx::pack<Element>(num::finish(from[8 * i + 6], factor), num::finish(from[8 * i + 7], factor)));
    }
  }
  DETATTN_DEV void store(const MutableRows& to, uint32_t from) {
    const int pieces = p.head_dim / 8;
    Element* const out = static_cast<Element*>(to.data) + x.view.k_batch * to.batch + x.head_kv * to.head +
                         (x.view.k_row + x.view.sequence.valid.begin + x.key) * to.row;
    for (int i = group * 128 + thread; i < x.keys * pieces; i += 128 * kBwdGroups) {
      const int row = i / pieces, piece = i - row * pieces;
      uint4 v = *reinterpret_cast<const uint4*>(shared + from + (piece >> 3) * L::kPanelK + row * 128 +
                                                (((piece & 7) ^ (row & 7)) << 4));
      if (x.view.holes && !key_valid(row)) v = make_uint4(0, 0, 0, 0);
      *reinterpret_cast<uint4*>(out + row * to.row + 8 * piece) = v;
    }
  }

  DETATTN_DEV void run() {
#pragma unroll
    for (int i = 0; i < kOut; ++i) dk[i] = dv[i] = 0.f;
    if (x.tile_begin < x.tile_end) {
      ptx::mbar_wait(base + L::kBarrierKV, 0);
      if (x.view.holes || x.keys < L::kKeys) clean_keys();
      walk_tiles();
      sync_all();  // nobody reads K or V any more
    }
    stage(dk, L::kK, p.dq_scale);
    stage(dv, L::kV, 1.f);
    sync_all();
    store(p.dk, L::kK);
    store(p.dv, L::kV);
  }
};

}  // namespace detattn
