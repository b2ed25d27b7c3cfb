// Decode of few chunks on sm_90a: a cluster of CTAs shares each chunk without moving a bit. Scores and probabilities
// are split by keys, O by columns, since its chain over the keys of a chunk is sequential for every element. Block
// maxima, block sums and probabilities travel through distributed shared memory; every CTA replays the chain of
// references.
#pragma once

#include "decode_sm90.cuh"

namespace detattn {

constexpr int kSplitThreads = 256;  // warps 0-3: scores of my blocks; 4-7: loads, then products with my columns of V
constexpr int kSplitChunkKeys = kChunks.step[0].keys;

// The keys' ring, my columns of V for all keys of the chunk, then Q and the barriers as in DecodeLayout, then what the
// CTAs exchange.
template <int kHeadDim>
struct SplitLayout {
  using L = DecodeLayout<kHeadDim>;
  static constexpr int kMaxBlocks = kSplitChunkKeys / L::kBlock;
  static constexpr int kPitchP = 2 * kSplitChunkKeys + 16;  // bytes of a row of P; its rows start in different banks
  static constexpr uint32_t kMaxima = L::kP;                // [block][row], the whole chunk
  static constexpr uint32_t kFactors = kMaxima + kMaxBlocks * kDecodeRows * 4;
  static constexpr uint32_t kSums = kFactors + kMaxBlocks * kDecodeRows * 4;  // [block][slice][row]
  static constexpr uint32_t kReference = kSums + kMaxBlocks * 4 * kDecodeRows * 4;
  static constexpr uint32_t kP = kReference + kDecodeRows * 4;  // [row][key]
  // Of my blocks [block][warp][row] and [block][warp][key mod 8][row]; later the partial results of other chunks.
  static constexpr uint32_t kOwnMaxima = kP + kDecodeRows * kPitchP;
  static constexpr uint32_t kOwnSums = kOwnMaxima + kSplitMaxOwn * L::kMaxBytes;
  static constexpr uint32_t kPartialState = kOwnMaxima;                         // [chunk][row] (reference, sum)
  static constexpr uint32_t kPartialOut = kPartialState + 4 * kDecodeRows * 8;  // [chunk][row][column]
  static constexpr int kFewest = fewest_ways(kHeadDim),
                       kMostPartial = kDecodeMaxCluster / kFewest * (kHeadDim / kFewest);
  static constexpr uint32_t kEndOwn = kOwnSums + kSplitMaxOwn * L::kSumBytes;
  static constexpr uint32_t kEndPartial = kPartialOut + kDecodeRows * kMostPartial * 4;
  static constexpr uint32_t kTail = kEndOwn > kEndPartial ? kEndOwn : kEndPartial;
  static_assert(kP % 16 == 0 && kPartialOut % 16 == 0);

  int split, buffers;
  DETATTN_HD uint32_t columns() const { return kHeadDim / split; }
  DETATTN_HD uint32_t v() const { return buffers * L::kKVBytes; }
  DETATTN_HD uint32_t tail() const { return v() + kSplitChunkKeys * columns() * 2; }
  DETATTN_HD uint32_t bytes() const { return tail() + kTail; }
};

template <typename Element, int kHeadDim, bool kSoftcap>
struct SplitConsumer {
  using L = DecodeLayout<kHeadDim>;
  using S = SplitLayout<kHeadDim>;
  static constexpr int kTiles = L::kKeyTiles, kSteps = L::kBlock / 16;

  const FwdArgs& p;
  const S layout;
  unsigned char* const shared;
  const DecodeItem& x;
  unsigned char* const tail = shared + layout.tail();
  const uint32_t base = ptx::shared_address(tail), values = ptx::shared_address(shared) + layout.v();
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
  const int q0 = 2 * (lane & 3);  // my rows q0, q0 + 1
  const int rank = static_cast<int>(ptx::cluster_rank());
  const int part = rank % layout.split, chunk = rank / layout.split;
  const int blocks = x.last - x.first, per_cta = (blocks + layout.split - 1) / layout.split;
  const int own = min(part * per_cta, blocks), own_count = min(per_cta, blocks - own);
  const num::Scaling scaling{p.kappa, p.scale, p.cap};

  DETATTN_DEV float* floats(uint32_t at) const { return reinterpret_cast<float*>(tail + at); }
  DETATTN_DEV uint32_t remote(uint32_t at, int to) const {
    return ptx::map_to_rank(base + at, chunk * layout.split + to);
  }

  // One step of the chain of references. All threads of a CTA, and all CTAs of a chunk, run the same chain.
  DETATTN_DEV void next(int block, float (&m)[2], float (&alpha)[2]) const {
    const float2 top = *reinterpret_cast<const float2*>(floats(S::kMaxima) + block * kDecodeRows + q0);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float moved = num::next_reference(m[r], r ? top.y : top.x, scaling.kappa);
      alpha[r] = num::weight(m[r], num::finite_reference(moved), scaling.kappa);
      m[r] = moved;
    }
    if (warp == 0 && lane < 4) {
      *reinterpret_cast<float2*>(floats(S::kFactors) + block * kDecodeRows + q0) = make_float2(alpha[0], alpha[1]);
    }
  }

  // Scores of my blocks; their maxima to all CTAs of the chunk.
  DETATTN_DEV void scores(DecodeConsumer<Element, kHeadDim, kSoftcap>& rows, float (&s)[kSplitMaxOwn][kTiles][4]) {
    const int last_query = (min(x.row + kDecodeRows, x.rows) - 1) / p.group - x.first_query;
    const int plain_from = x.limits.first(last_query), plain_to = x.view.holes ? 0 : x.limits.past(0);
#pragma unroll
    for (int b = 0; b < kSplitMaxOwn; ++b) {
      if (b >= own_count) break;
      ptx::mbar_wait(rows.bars.full(rows.ring.stage), rows.ring.phase);
      ptx::wgmma_fence();
      rows.issue_qk(s[b]);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) ptx::wgmma_wait<0>(s[b][i]);
      rows.free_buffer();
      if constexpr (kSoftcap) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[b][i][e] = num::cap_score(s[b][i][e], scaling);
        }
      }
      const int block = x.first + own + b, key = block * L::kBlock;
      if (key < plain_from || key + L::kBlock > plain_to) rows.mask(s[b], x, block);
      float top[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[r] = fmaxf(s[b][0][r], s[b][0][2 + r]);
        if constexpr (kTiles == 2) top[r] = fmaxf(top[r], fmaxf(s[b][1][r], s[b][1][2 + r]));
#pragma unroll
        for (int d = 4; d < 32; d *= 2) top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffff, top[r], d));
      }
      if (lane < 4) {
        *reinterpret_cast<float2*>(floats(S::kOwnMaxima) + (b * 4 + warp) * kDecodeRows + q0) =
            make_float2(top[0], top[1]);
      }
    }
    rows.sync();
    for (int i = thread; i < own_count * kDecodeRows * layout.split; i += 128) {
      const int to = i / (own_count * kDecodeRows), at = i - to * (own_count * kDecodeRows);
      const float* const t = floats(S::kOwnMaxima) + (at / kDecodeRows) * 4 * kDecodeRows + at % kDecodeRows;
      ptx::store_remote(remote(S::kMaxima + (own * kDecodeRows + at) * 4, to),
                        fmaxf(fmaxf(t[0], t[kDecodeRows]), fmaxf(t[2 * kDecodeRows], t[3 * kDecodeRows])));
    }
  }

  // Probabilities and sums of my blocks, to all CTAs of the chunk.
  DETATTN_DEV void probabilities(DecodeConsumer<Element, kHeadDim, kSoftcap>& rows,
                                 float (&s)[kSplitMaxOwn][kTiles][4]) {
    float m[2] = {num::neg_inf(), num::neg_inf()}, alpha[2];
#pragma unroll 1
    for (int b = 0; b < own; ++b) next(b, m, alpha);
#pragma unroll
    for (int b = 0; b < kSplitMaxOwn; ++b) {
      if (b >= own_count) break;
      next(own + b, m, alpha);
      float part_sum[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float shift = __fmul_rn(num::finite_reference(m[r]), scaling.kappa);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          s[b][i][r] = num::probability(s[b][i][r], scaling.kappa, shift);
          s[b][i][2 + r] = num::probability(s[b][i][2 + r], scaling.kappa, shift);
        }
        if constexpr (kTiles == 2) {
          part_sum[r] = num::sum4(s[b][0][r], s[b][0][2 + r], s[b][1][r], s[b][1][2 + r]);
        } else {
          part_sum[r] = num::sum2(s[b][0][r], s[b][0][2 + r]);
        }
      }
      *reinterpret_cast<float2*>(floats(S::kOwnSums) + ((b * 4 + warp) * 8 + (lane >> 2)) * kDecodeRows + q0) =
          make_float2(part_sum[0], part_sum[1]);
      // Matrix i holds the keys 16 warp + 8 (i & 1) + 64 (i >> 1) of the block, transposed: a row a query.
      const int i = lane >> 3, q = lane & 7;
      const int key = (own + b) * L::kBlock + 16 * warp + 8 * (i & 1) + (kTiles == 2 ? 64 * (i >> 1) : 0);
      const uint32_t at = base + S::kP + q * S::kPitchP + 2 * key;
      if constexpr (kTiles == 2) {
        ptx::stmatrix_x4_trans(at, ptx::pack<Element>(s[b][0][0], s[b][0][1]),
                               ptx::pack<Element>(s[b][0][2], s[b][0][3]), ptx::pack<Element>(s[b][1][0], s[b][1][1]),
                               ptx::pack<Element>(s[b][1][2], s[b][1][3]));
      } else {
        ptx::stmatrix_x2_trans(at, ptx::pack<Element>(s[b][0][0], s[b][0][1]),
                               ptx::pack<Element>(s[b][0][2], s[b][0][3]));
      }
    }
#pragma unroll 1
    for (int b = own + own_count; b < blocks; ++b) next(b, m, alpha);
    if (warp == 0 && lane < 4) *reinterpret_cast<float2*>(floats(S::kReference) + q0) = make_float2(m[0], m[1]);
    rows.sync();
    constexpr int kPieces = kDecodeRows * L::kBlock / 8;  // of 16 bytes, a block
    for (int i = thread; i < own_count * kPieces; i += 128) {
      const int b = i / kPieces, q = (i - b * kPieces) / (L::kBlock / 8), piece = i % (L::kBlock / 8);
      const uint32_t at = S::kP + q * S::kPitchP + 2 * (own + b) * L::kBlock + 16 * piece;
      const uint4 data = *reinterpret_cast<const uint4*>(tail + at);
      for (int to = 0; to < layout.split; ++to) {
        if (to != part) ptx::store_remote4(remote(at, to), data);
      }
    }
    for (int b = warp; b < own_count; b += 4) {
      float2 t[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        t[w] =
            *reinterpret_cast<const float2*>(floats(S::kOwnSums) + ((b * 4 + w) * 8 + (lane >> 2)) * kDecodeRows + q0);
      }
      float pair[2] = {num::sum4(t[0].x, t[1].x, t[2].x, t[3].x), num::sum4(t[0].y, t[1].y, t[2].y, t[3].y)};
#pragma unroll
      for (int r = 0; r < 2; ++r) pair[r] = num::sum2(pair[r], __shfl_xor_sync(0xffffffff, pair[r], 4));
      // The lanes of a pair of keys hold the same: they share the CTAs between them.
      const uint32_t at = S::kSums + (((own + b) * 4 + (lane >> 3)) * kDecodeRows + q0) * 4;
      for (int to = (lane >> 2) & 1; to < layout.split; to += 2) {
        ptx::store_remote2(remote(at, to), make_float2(pair[0], pair[1]));
      }
    }
  }

  // My columns of V: 16-byte pieces, in an order of pieces that keeps ldmatrix free of bank conflicts.
  DETATTN_DEV uint32_t piece_at(int key, int piece) const {
    const int pieces = layout.columns() / 8, shift = pieces == 2 ? 2 : (pieces == 4 ? 1 : 0);
    const int turned = pieces & (pieces - 1) ? piece : piece ^ ((key >> shift) & (pieces - 1));
    return values + (key * pieces + turned) * 16;
  }
  // Keys that no row of the tile sees, masked ones and those of pages that do not exist read as zeros.
  DETATTN_DEV void load_values() const {
    const int pieces = layout.columns() / 8, from = x.first * L::kBlock;
    const Element* const v = static_cast<const Element*>(p.v_rows.data) + x.head_kv * p.v_rows.head;
#pragma unroll 4
    for (int i = thread; i < blocks * L::kBlock * pieces; i += 128) {
      const int key = i / pieces, piece = i - key * pieces, relative = from + key;
      const int column = part * layout.columns() + 8 * piece;
      bool live = relative >= x.begin && relative < x.end && column < p.head_dim;
      if (live && x.view.holes) live = (p.key_bits[x.batch * p.key_words + relative / 32] >> (relative & 31)) & 1;
      int64_t row = 0;
      if (live) {
        if (p.block_table) {
          const int page = p.block_table[x.batch * p.table_batch + relative / p.page_size];
          live = page >= 0 && page < p.num_pages;
          row = page * p.v_rows.batch + relative % p.page_size * p.v_rows.row;
        } else {
          row =
              x.view.k_batch * p.v_rows.batch + (x.view.k_row + x.view.sequence.valid.begin + relative) * p.v_rows.row;
        }
      }
      ptx::copy_16_bytes(piece_at(key, piece), v + (live ? row + column : 0), live ? 16 : 0);
    }
  }

  struct Fragments {
    uint32_t v[kSteps][4], p[kSteps / 2][4];
  };
  DETATTN_DEV void load_fragments(Fragments& f, int block) const {
    const int i = lane >> 3;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      ptx::ldmatrix_x4_trans(piece_at(block * L::kBlock + 16 * k + 8 * (i >> 1) + (lane & 7), 2 * warp + (i & 1)),
                             f.v[k]);
    }
#pragma unroll
    for (int k = 0; k < kSteps / 2; ++k) {
      ptx::ldmatrix_x4(base + S::kP + (lane & 7) * S::kPitchP + 2 * (block * L::kBlock + 32 * k + 8 * i), f.p[k][0],
                       f.p[k][1], f.p[k][2], f.p[k][3]);
    }
  }
  DETATTN_DEV void multiply(float (&o)[4], float (&l)[2], const Fragments& f, int block) const {
    const float2 alpha = *reinterpret_cast<const float2*>(floats(S::kFactors) + block * kDecodeRows + q0);
    const float2 sum =
        *reinterpret_cast<const float2*>(floats(S::kSums) + (block * 4 + (lane >> 3)) * kDecodeRows + q0);
    l[0] = num::next_sum(l[0], alpha.x, sum.x);
    l[1] = num::next_sum(l[1], alpha.y, sum.y);
    // A factor of exactly 1 changes nothing; before the first block there is nothing to scale.
    if (block > 0 && __any_sync(0xffffffff, alpha.x != 1.f || alpha.y != 1.f)) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[e] = __fmul_rn(o[e], e & 1 ? alpha.y : alpha.x);
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      ptx::mma_m16n8k16<Element>(o, f.v[k], f.p[k >> 1][2 * (k & 1)], f.p[k >> 1][2 * (k & 1) + 1]);
    }
  }

  DETATTN_DEV void products(float (&o)[4], float (&m)[2], float (&l)[2]) const {
    Fragments even, odd;
    if (blocks > 0) load_fragments(even, 0);
#pragma unroll 1
    for (int b = 0; b < blocks; b += 2) {
      if (b + 1 < blocks) load_fragments(odd, b + 1);
      multiply(o, l, even, b);
      if (b + 1 >= blocks) break;
      if (b + 2 < blocks) load_fragments(even, b + 2);
      multiply(o, l, odd, b + 1);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      m[r] = blocks > 0 ? floats(S::kReference)[q0 + r] : num::neg_inf();
      l[r] = num::sum2(l[r], __shfl_xor_sync(0xffffffff, l[r], 8));
      l[r] = num::sum2(l[r], __shfl_xor_sync(0xffffffff, l[r], 16));
    }
  }

  DETATTN_DEV void finish(int row, int column, float m, float l, float o) const {
    const int packed = x.row + row, query = packed / p.group, head = x.head_kv * p.group + packed - query * p.group;
    if (p.sinks) o = __fmul_rn(o, num::add_sink(m, l, p.sinks[head], scaling));
    if (column < p.head_dim) {
      Element* const out = static_cast<Element*>(p.out_rows.data) + x.view.q_batch * p.out_rows.batch +
                           head * p.out_rows.head + static_cast<int64_t>(x.view.q_row + query) * p.out_rows.row;
      const uint32_t word = ptx::pack<Element>(num::finish(o, num::inverse(l)), 0.f);
      reinterpret_cast<uint16_t*>(out)[column] = static_cast<uint16_t>(word);
    }
    if (column == 0) write_lse(p, x.view, head, query, m, l);
  }

  // The result of the only chunk; or a partial result, to the workspace or to the cluster's first chunk.
  DETATTN_DEV void hand_over(const float (&o)[4], const float (&m)[2], const float (&l)[2], bool in_cluster) const {
    const int columns = layout.columns(), first = part * columns;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = q0 + r;
      if (x.row + row >= x.rows) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = 16 * warp + (lane >> 2) + 8 * i;
        const float value = o[2 * i + r];
        if (x.chunks == 1) {
          finish(row, first + column, m[r], l[r], value);
        } else if (in_cluster) {
          ptx::store_remote(
              ptx::map_to_rank(base + S::kPartialOut + ((chunk * kDecodeRows + row) * columns + column) * 4, part),
              value);
        } else {
          p.partial_out[(x.slot * kDecodeRows + row) * kHeadDim + first + column] = value;
        }
      }
      if (x.chunks == 1 || warp != 0 || lane >= 4) continue;
      const float2 state = make_float2(m[r], l[r]);
      if (in_cluster) {
        ptx::store_remote2(ptx::map_to_rank(base + S::kPartialState + (chunk * kDecodeRows + row) * 8, part), state);
      } else if (part == 0) {
        *reinterpret_cast<float2*>(p.partial_ml + (x.slot * kDecodeRows + row) * 2) = state;
      }
    }
  }

  // The first chunk's CTAs merge their columns of all chunks, left to right.
  DETATTN_DEV void merge() const {
    const int columns = layout.columns(), rows = min(kDecodeRows, x.rows - x.row);
    for (int i = thread; i < rows * columns; i += 128) {
      const int row = i / columns, column = i - row * columns;
      float total_m = num::neg_inf(), total_l = 0.f, total = 0.f;
      for (int c = 0; c < x.chunks; ++c) {
        const float2 state = reinterpret_cast<const float2*>(floats(S::kPartialState))[c * kDecodeRows + row];
        const num::MergeWeights w = num::merge_weights(total_m, state.x, scaling.kappa);
        total_l = num::merge(total_l, w.total, state.y, w.chunk);
        total = num::merge(total, w.total, floats(S::kPartialOut)[(c * kDecodeRows + row) * columns + column], w.chunk);
      }
      finish(row, part * columns + column, total_m, total_l, total);
    }
  }
};

template <typename Element, int kHeadDim, bool kSoftcap>
__global__ void __launch_bounds__(kSplitThreads) decode_split_kernel(const __grid_constant__ FwdArgs p) {
  using L = DecodeLayout<kHeadDim>;
  using S = SplitLayout<kHeadDim>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const S layout{p.split, p.decode_buffers};
  unsigned char* const tail = shared + layout.tail();
  const uint32_t kv = ptx::shared_address(shared);
  const RingBarriers<kDecodeMaxBuffers> bars{ptx::shared_address(tail) + L::kBarriers};
  if (threadIdx.x == 0) {
    bars.init(4);
    ptx::fence_mbar_init();
    ptx::tma_prefetch(&p.k.map);
  }
  __syncthreads();
  ptx::cluster_arrive();
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  DecodeItem x = {};
  const bool found = locate_item<kHeadDim>(p, blockIdx.x / p.split, x);
  if (!found) x.first = x.last = x.chunks = 0;
  SplitConsumer<Element, kHeadDim, kSoftcap> me{p, layout, shared, x};
  const bool in_cluster = p.cluster > p.split;
  // The barriers of the cluster: all have started; maxima; probabilities and sums; partial results.
  if (warp < 4) {
    DecodeConsumer<Element, kHeadDim, kSoftcap> rows{p, tail, kv, bars, DecodeRing{p.decode_buffers}};
    float s[kSplitMaxOwn][L::kKeyTiles][4];
    if (found) rows.load_q(x);
    ptx::cluster_wait();
    if (found) me.scores(rows, s);
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
    if (found) me.probabilities(rows, s);
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    DecodeProducer<kHeadDim> producer{p, kv, bars, DecodeRing{p.decode_buffers}};
    const int first = x.first + me.own, count = me.own_count;
    if (found && warp == 4) {
      for (int b = 0; b < min(count, p.decode_buffers); ++b) producer.load_block(p.k, x, first + b);
    }
    if (found) me.load_values();
    if (found && warp == 4) {
      for (int b = p.decode_buffers; b < count; ++b) producer.load_block(p.k, x, first + b);
    }
    __syncwarp();
    ptx::cluster_wait();
    ptx::cluster_arrive();
    ptx::cluster_wait();
    ptx::cluster_arrive();
    ptx::copies_wait_all();
    ptx::bar_sync(kGroup + 1, 128);
    ptx::cluster_wait();
    if (found && 16 * (warp - 4) < static_cast<int>(layout.columns())) {
      float o[4] = {0.f, 0.f, 0.f, 0.f}, m[2], l[2] = {0.f, 0.f};
      me.products(o, m, l);
      me.hand_over(o, m, l, in_cluster);
    }
    __syncwarp();
  }
  if (in_cluster) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
    if (found && warp >= 4 && me.chunk == 0 && x.chunks > 1) me.merge();
  }
}

}  // namespace detattn
