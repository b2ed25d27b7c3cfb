// Decode on sm_90a: few queries against many keys, split over CTAs by the contract's chunks. A work item is one chunk
// for 8 packed rows (queries x heads of a group) of one key head. The products are operand-swapped, S^T = K Q^T and O^T
// = V^T P^T with the 8 rows as N, so that one warpgroup keeps up with the memory; scores, probabilities and sums of
// several blocks are exchanged between the four warps at once.
#pragma once

#include "decode_items.cuh"
#include "wgmma.cuh"

namespace detattn {

constexpr int kDecodeThreads = 128 + 32;  // one consumer warpgroup, one producer warp
constexpr int kDecodeMaxBuffers = 12;

template <int kHeadDim>
struct DecodeLayout {
  static constexpr int kBlock = block_keys(kHeadDim), kPanels = (kHeadDim + 63) / 64;
  static constexpr int kKeyTiles = kBlock / 64;
  static constexpr uint32_t kPanelKV = kBlock * 128, kKVBytes = kPanels * kPanelKV, kPanelRows = kDecodeRows * 128;
  // After the ring of K and V buffers come Q, the barriers and, for each block of a step, what the warps exchange (P,
  // maxima [warp][row], sums [warp][key mod 8][row]) and what a thread keeps (scores, float4 [key tile][thread];
  // factors [warp][row]). The launcher chooses the length of the ring and of a step.
  static constexpr uint32_t kQ = 0, kBarriers = kQ + kPanels * kPanelRows, kBarrierBytes = 16 * kDecodeMaxBuffers;
  static constexpr uint32_t kP = (kBarriers + kBarrierBytes + 1023) / 1024 * 1024;
  static constexpr uint32_t kPBytes = kKeyTiles * kPanelRows, kScoreBytes = kKeyTiles * 128 * 16;
  static constexpr uint32_t kSumBytes = 4 * 8 * kDecodeRows * 4, kMaxBytes = 4 * kDecodeRows * 4,
                            kFactorBytes = kMaxBytes;
  static constexpr uint32_t kBlockBytes = kPBytes + kScoreBytes + kSumBytes + kMaxBytes + kFactorBytes;
};

struct DecodeRing {
  int size, stage = 0;
  uint32_t phase = 0;
  DETATTN_DEV void advance() {
    if (++stage == size) {
      stage = 0;
      phase ^= 1;
    }
  }
};

template <typename Element, int kHeadDim, bool kSoftcap>
struct DecodeConsumer {
  using L = DecodeLayout<kHeadDim>;
  using Mma = ptx::Mma<Element, kDecodeRows>;
  static constexpr int kTiles = L::kKeyTiles, kOutTiles = L::kPanels;

  const FwdArgs& p;
  unsigned char* const tail;
  const uint32_t kv;
  const RingBarriers<kDecodeMaxBuffers> bars;
  DecodeRing ring;
  const uint32_t base = ptx::shared_address(tail);
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int key0 = 16 * warp + (lane >> 2), q0 = 2 * (lane & 3);  // my keys key0 + 8i (+ 64), my rows q0, q0 + 1
  const num::Scaling scaling{p.kappa, p.scale, p.cap};
  const uint64_t desc_q = ptx::descriptor(base + L::kQ, 16, 1024), desc_p = ptx::descriptor(base + L::kP, 16, 1024);
  const uint64_t desc_k = ptx::descriptor(kv, 16, 1024), desc_v = ptx::descriptor(kv, L::kPanelKV, 1024);

  float o[kOutTiles][4];  // [..][2a + r]: column key0 + 8a, row q0 + r
  float m[2], l[2];

  DETATTN_DEV void sync() { ptx::bar_sync(kGroup, 128); }

  DETATTN_DEV void load_q(const DecodeItem& x) {
#pragma unroll 1
    for (int i = thread; i < kDecodeRows * L::kPanels * 8; i += 128) {
      const int r = i / (L::kPanels * 8), piece = i - r * (L::kPanels * 8), row = x.row + r, column = 8 * piece;
      uint4 value = {0, 0, 0, 0};
      if (row < x.rows && column < p.head_dim) {
        const int query = x.query(p, r), head = x.head(p, r);
        const Element* const q = static_cast<const Element*>(p.q_rows.data) + x.view.q_batch * p.q_rows.batch +
                                 head * p.q_rows.head + static_cast<int64_t>(x.view.q_row + query) * p.q_rows.row;
        value = *reinterpret_cast<const uint4*>(q + column);
      }
      *reinterpret_cast<uint4*>(tail + L::kQ + (piece >> 3) * L::kPanelRows + r * 128 + (((piece & 7) ^ r) << 4)) =
          value;
    }
    ptx::fence_proxy_async();
    sync();
  }

  DETATTN_DEV void mask(float (&t)[kTiles][4], const DecodeItem& x, int block) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = x.query(p, q0 + r) - x.first_query;
      const int low = x.limits.first(query) - block * L::kBlock, high = x.limits.past(query) - block * L::kBlock;
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        const int key = key0 + 8 * (i & 1) + 64 * (i >> 1);
        bool seen = key >= low && key < high;
        if (seen && x.view.holes) {
          const uint32_t word = p.key_bits[x.batch * p.key_words + (block * L::kBlock + key) / 32];
          seen = (word >> (key & 31)) & 1;
        }
        if (!seen) t[i >> 1][2 * (i & 1) + r] = num::neg_inf();
      }
    }
  }

  // S^T of the block at the ring.
  DETATTN_DEV void issue_qk(float (&t)[kTiles][4]) {
    const uint64_t a = desc_k + static_cast<uint64_t>(ring.stage * (L::kKVBytes >> 4));
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        Mma::template ss<0, 0>(t[i], a + (k >> 2) * (L::kPanelKV >> 4) + i * (8192 >> 4) + (k & 3) * 2,
                               desc_q + (k >> 2) * (L::kPanelRows >> 4) + (k & 3) * 2, k != 0);
      }
    }
    ptx::wgmma_commit();
  }

  DETATTN_DEV void free_buffer() {
    if (lane == 0) ptx::mbar_arrive(bars.empty(ring.stage));
    ring.advance();
  }

  DETATTN_DEV void clean_v(const DecodeItem& x, int block) {
    const int key = block * L::kBlock, from = max(x.begin - key, 0), to = min(x.end - key, L::kBlock);
    if (from == 0 && to == L::kBlock) return;
    const int dirty = from + L::kBlock - to;
#pragma unroll 1
    for (int i = thread; i < dirty * L::kPanels * 8; i += 128) {
      const int row = i / (L::kPanels * 8), piece = i - row * (L::kPanels * 8);
      const int r = row < from ? row : row - from + to;
      ptx::zero_16_bytes(kv + ring.stage * L::kKVBytes + (piece >> 3) * L::kPanelKV + r * 128 + (piece & 7) * 16);
    }
    ptx::fence_proxy_async();
    sync();
  }

  // A few blocks, in three phases with a barrier between them: scores; probabilities; products with V. The loops are
  // not unrolled: a CTA runs them once or a few times, and fetching instructions would cost more than they do.
  DETATTN_DEV void step(const DecodeItem& x, int block0, int blocks) {
    unsigned char* const after_p = tail + L::kP + p.decode_step * L::kPBytes;
    unsigned char* const after_scores = after_p + p.decode_step * L::kScoreBytes;
    float4* const scores = reinterpret_cast<float4*>(after_p) + thread;
    float* const sums = reinterpret_cast<float*>(after_scores);
    float* const maxima = reinterpret_cast<float*>(after_scores + p.decode_step * L::kSumBytes);
    float* const factors = maxima + p.decode_step * (L::kMaxBytes / 4) + warp * kDecodeRows + q0;
    const int last_query = x.query(p, min(kDecodeRows, x.rows - x.row) - 1) - x.first_query;
    const int plain_from = x.limits.first(last_query), plain_to = x.view.holes ? 0 : x.limits.past(0);
#pragma unroll 1
    for (int b = 0; b < blocks; ++b) {
      float s[kTiles][4];  // [..][2a + r]: key key0 + 8a, row q0 + r
      ptx::mbar_wait(bars.full(ring.stage), ring.phase);
      ptx::wgmma_fence();
      issue_qk(s);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) ptx::wgmma_wait<0>(s[i]);
      free_buffer();
      if constexpr (kSoftcap) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[i][e] = num::cap_score(s[i][e], scaling);
        }
      }
      const int key = (block0 + b) * L::kBlock;
      if (key < plain_from || key + L::kBlock > plain_to) mask(s, x, block0 + b);
      float top[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[r] = fmaxf(s[0][r], s[0][2 + r]);
        if constexpr (kTiles == 2) top[r] = fmaxf(top[r], fmaxf(s[1][r], s[1][2 + r]));
#pragma unroll
        for (int d = 4; d < 32; d *= 2) top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffff, top[r], d));
      }
      if (lane < 4)
        *reinterpret_cast<float2*>(maxima + (b * 4 + warp) * kDecodeRows + q0) = make_float2(top[0], top[1]);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) scores[(b * kTiles + i) * 128] = make_float4(s[i][0], s[i][1], s[i][2], s[i][3]);
    }
    sync();
#pragma unroll 1
    for (int b = 0; b < blocks; ++b) {
      float top[2] = {num::neg_inf(), num::neg_inf()}, alpha[2], part[2], s[kTiles][4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 t = *reinterpret_cast<const float2*>(maxima + (b * 4 + w) * kDecodeRows + q0);
        top[0] = fmaxf(top[0], t.x);
        top[1] = fmaxf(top[1], t.y);
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const float4 t = scores[(b * kTiles + i) * 128];
        s[i][0] = t.x;
        s[i][1] = t.y;
        s[i][2] = t.z;
        s[i][3] = t.w;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float next = num::next_reference(m[r], top[r], scaling.kappa);
        const float reference = num::finite_reference(next), shift = __fmul_rn(reference, scaling.kappa);
        alpha[r] = num::weight(m[r], reference, scaling.kappa);
        m[r] = next;
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          s[i][r] = num::probability(s[i][r], scaling.kappa, shift);
          s[i][2 + r] = num::probability(s[i][2 + r], scaling.kappa, shift);
        }
        if constexpr (kTiles == 2) {
          part[r] = num::sum4(s[0][r], s[0][2 + r], s[1][r], s[1][2 + r]);
        } else {
          part[r] = num::sum2(s[0][r], s[0][2 + r]);
        }
      }
      if (lane < 4) *reinterpret_cast<float2*>(factors + b * 4 * kDecodeRows) = make_float2(alpha[0], alpha[1]);
      *reinterpret_cast<float2*>(sums + ((b * 4 + warp) * 8 + (lane >> 2)) * kDecodeRows + q0) =
          make_float2(part[0], part[1]);
      // P, K-major: row q, panels of 64 keys. Matrix i holds the keys 16 warp + 8 (i & 1) + 64 (i >> 1).
      const int i = lane >> 3, q = lane & 7, piece = 2 * warp + (i & 1);
      const uint32_t at =
          base + L::kP + (b * kTiles + (kTiles == 2 ? i >> 1 : 0)) * L::kPanelRows + q * 128 + ((piece ^ q) << 4);
      if constexpr (kTiles == 2) {
        ptx::stmatrix_x4_trans(at, ptx::pack<Element>(s[0][0], s[0][1]), ptx::pack<Element>(s[0][2], s[0][3]),
                               ptx::pack<Element>(s[1][0], s[1][1]), ptx::pack<Element>(s[1][2], s[1][3]));
      } else {
        ptx::stmatrix_x2_trans(at, ptx::pack<Element>(s[0][0], s[0][1]), ptx::pack<Element>(s[0][2], s[0][3]));
      }
    }
    ptx::fence_proxy_async();
    sync();
#pragma unroll 1
    for (int b = 0; b < blocks; ++b) {
      ptx::mbar_wait(bars.full(ring.stage), ring.phase);
      clean_v(x, block0 + b);
      const bool fresh = block0 + b == x.first;
      const float2 alpha = *reinterpret_cast<const float2*>(factors + b * 4 * kDecodeRows);
      // All warps hold the same rows, so they agree. A factor of exactly 1 changes nothing.
      if (!fresh && __any_sync(0xffffffff, alpha.x != 1.f || alpha.y != 1.f)) {
#pragma unroll
        for (int i = 0; i < kOutTiles; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) o[i][e] = __fmul_rn(o[i][e], e & 1 ? alpha.y : alpha.x);
        }
      }
      ptx::wgmma_fence();
      const uint64_t a = desc_v + static_cast<uint64_t>(ring.stage * (L::kKVBytes >> 4));
#pragma unroll
      for (int k = 0; k < L::kBlock / 16; ++k) {
        const uint64_t bp = desc_p + (b * kTiles + (k >> 2)) * (L::kPanelRows >> 4) + (k & 3) * 2;
#pragma unroll
        for (int i = 0; i < kOutTiles; ++i) {
          Mma::template ss<1, 0>(o[i], a + i * (L::kPanelKV >> 4) + k * 128, bp, !fresh || k != 0);
        }
      }
      ptx::wgmma_commit();
      // The sums, while the tensor cores run.
      float2 t[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        t[w] = *reinterpret_cast<const float2*>(sums + ((b * 4 + w) * 8 + (lane >> 2)) * kDecodeRows + q0);
      }
      float pair[2] = {num::sum4(t[0].x, t[1].x, t[2].x, t[3].x), num::sum4(t[0].y, t[1].y, t[2].y, t[3].y)};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        pair[r] = num::sum2(pair[r], __shfl_xor_sync(0xffffffff, pair[r], 4));
        l[r] = num::next_sum(l[r], r ? alpha.y : alpha.x, pair[r]);
      }
#pragma unroll
      for (int i = 0; i < kOutTiles; ++i) ptx::wgmma_wait<0>(o[i]);
      free_buffer();
    }
  }

  DETATTN_DEV void run(const DecodeItem& x) {
    load_q(x);
#pragma unroll
    for (int i = 0; i < kOutTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i][e] = 0.f;
    }
    m[0] = m[1] = num::neg_inf();
    l[0] = l[1] = 0.f;
#pragma unroll 1
    for (int b = x.first; b < x.last; b += p.decode_step) step(x, b, min(p.decode_step, x.last - b));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      l[r] = num::sum2(l[r], __shfl_xor_sync(0xffffffff, l[r], 8));
      l[r] = num::sum2(l[r], __shfl_xor_sync(0xffffffff, l[r], 16));
    }
    if (p.cluster) {
      keep(x);
    } else {
      store(x);
    }
  }

  // Cluster: the partial result stays in shared memory, where the scores and the maxima were.
  DETATTN_DEV uint32_t kept_out() const { return base + L::kP + p.decode_step * L::kPBytes; }
  DETATTN_DEV uint32_t kept_state() const { return kept_out() + p.decode_step * (L::kScoreBytes + L::kSumBytes); }
  DETATTN_DEV void keep(const DecodeItem& x) {
    float* const out = reinterpret_cast<float*>(tail + (kept_out() - base));
    float2* const state = reinterpret_cast<float2*>(tail + (kept_state() - base));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 2 * kOutTiles; ++i) {
        out[(q0 + r) * (64 * kOutTiles) + key0 + 8 * (i & 1) + 64 * (i >> 1)] = o[i >> 1][2 * (i & 1) + r];
      }
      if (warp == 0 && lane < 4) state[q0 + r] = make_float2(m[r], l[r]);
    }
  }

  // The CTAs of a cluster hold the chunks of the same rows; each merges a share of the columns, left to right.
  DETATTN_DEV void merge_cluster(const DecodeItem& x, int rank) {
    constexpr int kPieces = kHeadDim / 4;
    const int rows = min(kDecodeRows, x.rows - x.row);
    for (int i = rank * 128 + thread; i < rows * kPieces; i += x.chunks * 128) {
      const int r = i / kPieces, column = 4 * (i - r * kPieces);
      float total_m = num::neg_inf(), total_l = 0.f;
      float4 total = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int c = 0; c < kDecodeMaxCluster; ++c) {
        if (c >= x.chunks) break;
        const float2 state = ptx::load_remote2(ptx::map_to_rank(kept_state() + 8 * r, c));
        const float4 t = ptx::load_remote4(ptx::map_to_rank(kept_out() + 4 * (r * (64 * kOutTiles) + column), c));
        const num::MergeWeights w = num::merge_weights(total_m, state.x, scaling.kappa);
        total_l = num::merge(total_l, w.total, state.y, w.chunk);
        total.x = num::merge(total.x, w.total, t.x, w.chunk);
        total.y = num::merge(total.y, w.total, t.y, w.chunk);
        total.z = num::merge(total.z, w.total, t.z, w.chunk);
        total.w = num::merge(total.w, w.total, t.w, w.chunk);
      }
      const int query = x.query(p, r), head = x.head(p, r);
      if (p.sinks) {
        const float a = num::add_sink(total_m, total_l, p.sinks[head], scaling);
        total = {__fmul_rn(total.x, a), __fmul_rn(total.y, a), __fmul_rn(total.z, a), __fmul_rn(total.w, a)};
      }
      write_columns<Element>(p, x.view, head, query, column, total, num::inverse(total_l));
      if (column == 0) write_lse(p, x.view, head, query, total_m, total_l);
    }
  }

  // One chunk: the result. Several: a partial result for the merge.
  DETATTN_DEV void store(const DecodeItem& x) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = x.row + q0 + r;
      if (row >= x.rows) continue;
      if (x.chunks > 1) {
        float* const out = p.partial_out + (x.slot * kDecodeRows + q0 + r) * kHeadDim;
#pragma unroll
        for (int i = 0; i < 2 * kOutTiles; ++i) {
          const int column = key0 + 8 * (i & 1) + 64 * (i >> 1);
          if (kHeadDim % 64 == 0 || column < kHeadDim) out[column] = o[i >> 1][2 * (i & 1) + r];
        }
        if (warp == 0 && lane < 4) {
          *reinterpret_cast<float2*>(p.partial_ml + (x.slot * kDecodeRows + q0 + r) * 2) = make_float2(m[r], l[r]);
        }
        continue;
      }
      const int query = x.query(p, q0 + r), head = x.head(p, q0 + r);
      float factor = 1.f;
      if (p.sinks) factor = num::add_sink(m[r], l[r], p.sinks[head], scaling);
      const float inv = num::inverse(l[r]);
      Element* const out = static_cast<Element*>(p.out_rows.data) + x.view.q_batch * p.out_rows.batch +
                           head * p.out_rows.head + static_cast<int64_t>(x.view.q_row + query) * p.out_rows.row;
#pragma unroll
      for (int i = 0; i < 2 * kOutTiles; ++i) {
        const int column = key0 + 8 * (i & 1) + 64 * (i >> 1);
        float value = o[i >> 1][2 * (i & 1) + r];
        if (p.sinks) value = __fmul_rn(value, factor);
        if (column < p.head_dim) {
          const uint32_t word = ptx::pack<Element>(num::finish(value, inv), 0.f);
          reinterpret_cast<uint16_t*>(out)[column] = static_cast<uint16_t>(word);
        }
      }
      if (warp == 0 && lane < 4) write_lse(p, x.view, head, query, m[r], l[r]);
    }
  }
};

template <int kHeadDim>
struct DecodeProducer {
  using L = DecodeLayout<kHeadDim>;
  const FwdArgs& p;
  const uint32_t kv;
  const RingBarriers<kDecodeMaxBuffers> bars;
  DecodeRing ring;
  const int lane = threadIdx.x & 31;
  const uint64_t policy = ptx::policy_evict_first();  // keys and values are read once

  // A block, in copies of box_keys keys and at most 64 columns, a lane a copy. The panels of the same keys go out side
  // by side, so that memory is read in order; copies that hold no visible key are left out.
  template <int kPanels>
  DETATTN_DEV void load(const TensorView& t, const DecodeItem& x, int block, uint32_t dst, uint32_t bar, int column,
                        int columns, uint32_t empty = 0, uint32_t parity = 0) {
    const int key = block * L::kBlock, head = x.head_kv * t.head_step;
    const int row = x.view.k_row + static_cast<int>(x.view.sequence.valid.begin) + key;
    const int from = max(x.begin - key, 0) / p.box_keys * kPanels;
    const int to = (min(x.end - key, L::kBlock) + p.box_keys - 1) / p.box_keys * kPanels;
    const auto page_of = [&](int i) {
      if (!p.block_table) return x.view.k_batch;
      return i < to ? p.block_table[x.batch * p.table_batch + (key + i / kPanels * p.box_keys) / p.page_size] : 0;
    };
    // The first pages are looked up before the wait.
    int i = from + lane, page = page_of(i);
    if (empty) ptx::mbar_wait(empty, parity);
    const uint32_t bytes = p.box_keys * columns * 2;
    if (lane == 0) ptx::mbar_expect_tx(bar, (to - from) * bytes);
    __syncwarp();
#pragma unroll 1
    while (i < to) {
      const int box = i / kPanels, panel = i - box * kPanels;
      const int slot = p.block_table ? (key + box * p.box_keys) % p.page_size : row + box * p.box_keys;
      ptx::tma_load(dst + panel * L::kPanelKV + box * bytes, &t.map, bar, column + 64 * panel, slot, head,
                    page * t.batch_step, policy);
      i += 32;
      page = page_of(i);
    }
  }
  DETATTN_DEV void load_block(const TensorView& t, const DecodeItem& x, int block) {
    load<L::kPanels>(t, x, block, kv + ring.stage * L::kKVBytes, bars.full(ring.stage), 0, 64, bars.empty(ring.stage),
                     ring.phase ^ 1);
    ring.advance();
  }

  // The order of consumption: the keys of a step, then its values.
  DETATTN_DEV void run(const DecodeItem& x) {
#pragma unroll 1
    for (int b = x.first; b < x.last; b += p.decode_step) {
      const int n = min(p.decode_step, x.last - b);
#pragma unroll 1
      for (int i = 0; i < 2 * n; ++i) load_block(i < n ? p.k : p.v, x, i < n ? b + i : b + i - n);
    }
  }
};

template <typename Element, int kHeadDim, bool kSoftcap>
__global__ void __launch_bounds__(kDecodeThreads) decode_kernel(const __grid_constant__ FwdArgs p) {
  using L = DecodeLayout<kHeadDim>;
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* const tail = shared + p.decode_buffers * L::kKVBytes;
  const uint32_t kv = ptx::shared_address(shared);
  const RingBarriers<kDecodeMaxBuffers> bars{ptx::shared_address(tail) + L::kBarriers};
  if (threadIdx.x == 0) {
    bars.init(4);
    ptx::fence_mbar_init();
    ptx::tma_prefetch(&p.k.map);
    ptx::tma_prefetch(&p.v.map);
  }
  __syncthreads();
  ptx::wait_for_previous_kernel();
  // CTAs of the next kernel that wait here early are in the way of those of this one that have not started.
  if (p.one_wave) ptx::allow_next_kernel();
  const int64_t items = p.cu_seqlens_q && p.order ? p.decode_begin[p.sequences] : p.decode_items;
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  DecodeProducer<kHeadDim> producer{p, kv, bars, DecodeRing{p.decode_buffers}};
  DecodeConsumer<Element, kHeadDim, kSoftcap> consumer{p, tail, kv, bars, DecodeRing{p.decode_buffers}};
  for (int64_t i = blockIdx.x; i < items; i += gridDim.x) {
    DecodeItem x;
    const bool found = locate_item<kHeadDim>(p, i, x);
    if (!found && p.cu_seqlens_q) break;
    if (found && warp == 4) producer.run(x);
    if (found && warp < 4) consumer.run(x);
    if (p.cluster) {
      __syncwarp();
      ptx::cluster_arrive();
      ptx::cluster_wait();
      if (found && warp < 4) consumer.merge_cluster(x, ptx::cluster_rank());
      __syncwarp();
      ptx::cluster_arrive();
      ptx::cluster_wait();
    }
  }
  if (!p.one_wave) ptx::allow_next_kernel();
}

}  // namespace detattn
