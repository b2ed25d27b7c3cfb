// Decode of few chunks on sm_90a: a cluster of CTAs shares each chunk without moving a bit. Scores and probabilities
// are split by keys, O by columns, since its chain over the keys of a chunk is sequential for every element. Block
// maxima, block sums and probabilities travel through distributed shared memory; every CTA replays the chain of
// references. One item a cluster, and nothing to hide behind: what counts here is latency.
#pragma once

#include "decode_sm90.cuh"

namespace detattn {

constexpr int kSplitThreads = 256;  // warps 0-3: scores of my blocks; 4-7: products with my columns of V; 4: loads
constexpr int kSplitChunkKeys = kChunks.step[0].keys;

// Keys of my blocks; my columns of V for all keys of the chunk, the second half in the memory of the keys where both do
// not fit; Q as in DecodeLayout; what the CTAs exchange.
template <int kHeadDim, int kSplit>
struct SplitLayout {
  using L = DecodeLayout<kHeadDim>;
  static constexpr int kOwn = kSplitChunkKeys / L::kBlock / kSplit, kColumns = kHeadDim / kSplit;  // of one CTA
  static constexpr int kMaxBlocks = kSplitChunkKeys / L::kBlock, kHalfBlocks = kMaxBlocks / 2;
  static constexpr int kPitchP = 2 * kSplitChunkKeys + 16;  // bytes of a row of P; its rows start in different banks
  static constexpr uint32_t kQBytes = L::kPanels * L::kPanelRows;
  // Barriers: keys of my block b; V of a block; my first two blocks are done with; the maxima, then the probabilities
  // and
  // sums of all blocks have come.
  static constexpr uint32_t kKeysReady = L::kQ + kQBytes, kValuesReady = kKeysReady + 8 * kSplitMaxOwn;
  static constexpr uint32_t kKeysDone = kValuesReady + 8 * kMaxBlocks, kMaximaReady = kKeysDone + 8;
  static constexpr uint32_t kProbabilitiesReady = kMaximaReady + 8;
  static constexpr uint32_t kMaxima = kProbabilitiesReady + 16;  // [block][row], the whole chunk
  static constexpr uint32_t kFactors = kMaxima + kMaxBlocks * kDecodeRows * 4;
  static constexpr uint32_t kSums = kFactors + kMaxBlocks * kDecodeRows * 4;    // [block][slice][row]
  static constexpr uint32_t kFinal = kSums + kMaxBlocks * 4 * kDecodeRows * 4;  // [row] (factor of the sink, 1 / sum)
  static constexpr uint32_t kReference = kFinal + kDecodeRows * 8;              // [row]
  static constexpr uint32_t kMoves = kReference + kDecodeRows * 4;              // bit b: block b moves some reference
  static constexpr uint32_t kP = kMoves + 16;                                   // [row][key]
  // Of my blocks: [block][warp][row] and [block][warp][key mod 8][row].
  static constexpr uint32_t kOwnMaxima = kP + kDecodeRows * kPitchP;
  static constexpr uint32_t kOwnSums = kOwnMaxima + kOwn * L::kMaxBytes;
  // Partial results of the chunks of the cluster, in the CTAs that merge them. Nothing else may lie here: the chunks
  // are not in step.
  static constexpr int kMostChunks = kDecodeMaxCluster / kSplit;
  static constexpr uint32_t kPartialState = kOwnSums + kOwn * L::kSumBytes;               // [chunk][row]
  static constexpr uint32_t kPartialOut = kPartialState + kMostChunks * kDecodeRows * 8;  // [chunk][row][column]
  static constexpr uint32_t kTail =
      kMostChunks > 1 ? kPartialOut + kMostChunks * kDecodeRows * kColumns * 4 : kPartialState;
  static_assert(kKeysReady % 8 == 0 && kMaxima % 16 == 0 && kP % 16 == 0 && kPartialOut % 16 == 0 &&
                kDecodeRows * 8 <= kOwn * L::kMaxBytes);

  static_assert(kOwn * kSplit == kMaxBlocks && kOwn <= kSplitMaxOwn && kColumns % 16 == 0 && kColumns <= 64);
  static constexpr uint32_t kBlockV = L::kBlock * kColumns * 2, kHalf = kHalfBlocks * kBlockV;  // bytes of values
  static constexpr bool kApart = kOwn * L::kKVBytes + 2 * kHalf + kTail > 232448;
  static DETATTN_HD constexpr uint32_t values(int h) {
    return h == 0 ? kOwn * L::kKVBytes : (kApart ? 0 : kOwn * L::kKVBytes + kHalf);
  }
  static constexpr uint32_t kTailAt = kOwn * L::kKVBytes + (kApart ? 1 : 2) * kHalf, kBytes = kTailAt + kTail;
  static_assert(kBytes <= 232448 && (!kApart || (kHalf <= 2 * L::kKVBytes && kOwn >= 2)));
};

template <int kHeadDim, int kSplit>
DETATTN_DEV bool locate_split(const FwdArgs& p, DecodeItem& x) {
  if (p.cu_seqlens_q) return locate_item<kHeadDim>(p, blockIdx.x / kSplit, x);
  x.batch = blockIdx.z;
  const int chunk = blockIdx.x / kSplit;
  x.slot = static_cast<int64_t>(blockIdx.z * gridDim.y + blockIdx.y) * p.max_chunks + chunk;
  if (p.same.chunks.count > 0) {
    Sequence& s = x.view.sequence;
    s.queries = p.seqlen_q;
    s.keys = s.valid.end = p.seqlen_k;
    x.view.q_batch = x.view.k_batch = x.batch;
    x.limits = p.same.limits;
    return place_in_tile<kHeadDim>(p, p.same.chunks, chunk, blockIdx.y, 0, x);
  }
  x.view = view_sequence(p, x.batch);
  return place_item<kHeadDim>(p, sequence_chunks(p.mask, x.view.sequence), blockIdx.y, chunk, x);
}

template <typename Element, int kHeadDim, int kSplit>
struct SplitDecode {
  using L = DecodeLayout<kHeadDim>;
  using S = SplitLayout<kHeadDim, kSplit>;
  static constexpr int kTiles = L::kKeyTiles, kSteps = L::kBlock / 16;

  const FwdArgs& p;
  unsigned char* const shared;
  const DecodeItem& x;
  unsigned char* const tail = shared + S::kTailAt;
  const uint32_t keys = ptx::shared_address(shared), base = ptx::shared_address(tail);
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
  const int q0 = 2 * (lane & 3);  // my rows q0, q0 + 1
  const int rank = static_cast<int>(ptx::cluster_rank());
  const int part = rank & (kSplit - 1), chunk_rank = rank - part;
  const int blocks = x.last - x.first, per_cta = (blocks + kSplit - 1) / kSplit;
  const int own = min(part * per_cta, blocks), own_count = min(per_cta, blocks - own);
  const num::Scaling scaling{p.kappa, p.scale, p.cap};

  DETATTN_DEV int chunk() const { return chunk_rank / kSplit; }
  DETATTN_DEV float* floats(uint32_t at) const { return reinterpret_cast<float*>(tail + at); }
  DETATTN_DEV float2* pairs(uint32_t at) const { return reinterpret_cast<float2*>(tail + at); }
  DETATTN_DEV uint32_t remote(uint32_t at, int to) const { return ptx::map_to_rank(base + at, chunk_rank + to); }

  DETATTN_DEV float2 maximum(int block) const { return pairs(S::kMaxima)[block * 4 + (lane & 3)]; }
  DETATTN_DEV void move(float (&m)[2], float2 top) const {
    m[0] = num::next_reference(m[0], top.x, scaling.kappa);
    m[1] = num::next_reference(m[1], top.y, scaling.kappa);
  }

  // One warp: the chain of references of the whole chunk, and the factors that come of it.
  DETATTN_DEV void replay_references() const {
    float m[2] = {num::neg_inf(), num::neg_inf()};
    unsigned moves = 0;
    if (blocks > 0) ptx::mbar_wait(base + S::kMaximaReady, 0);
#pragma unroll 1
    for (int b = 0; b < blocks; ++b) {
      const float before[2] = {m[0], m[1]};
      move(m, maximum(b));
      const float alpha[2] = {num::weight(before[0], num::finite_reference(m[0]), scaling.kappa),
                              num::weight(before[1], num::finite_reference(m[1]), scaling.kappa)};
      if (lane < 4) pairs(S::kFactors)[b * 4 + lane] = make_float2(alpha[0], alpha[1]);
      if (__any_sync(0xffffffff, alpha[0] != 1.f || alpha[1] != 1.f)) moves |= 1u << b;
    }
    if (lane < 4) pairs(S::kReference)[lane] = make_float2(m[0], m[1]);
    if (lane == 0) *reinterpret_cast<unsigned*>(tail + S::kMoves) = moves;
  }

  // Scores of my blocks; their maxima to all CTAs of the chunk.
  DETATTN_DEV void scores(DecodeConsumer<Element, kHeadDim, false>& rows, float (&s)[S::kOwn][kTiles][4]) {
    const int last_query = x.query(p, min(kDecodeRows, x.rows - x.row) - 1) - x.first_query;
    const int plain_from = x.limits.first(last_query), plain_to = x.view.holes ? 0 : x.limits.past(0);
#pragma unroll
    for (int b = 0; b < S::kOwn; ++b) {
      if (b >= own_count) break;
      ptx::mbar_wait(base + S::kKeysReady + 8 * b, 0);
      ptx::wgmma_fence();
      rows.ring.stage = b;
      rows.issue_qk(s[b]);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) ptx::wgmma_wait<0>(s[b][i]);
      if (b == min(2, own_count) - 1 && lane == 0) ptx::mbar_arrive(base + S::kKeysDone);
      if (p.cap != 0.f) {
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
      if (lane < 4) pairs(S::kOwnMaxima)[(b * 4 + warp) * 4 + lane] = make_float2(top[0], top[1]);
    }
    rows.sync();
    // A thread a row of a block and a CTA.
    const int at = thread & (kDecodeRows - 1), to = thread / kDecodeRows & (kSplit - 1);
    for (int b = thread / (kDecodeRows * kSplit); b < own_count; b += 128 / (kDecodeRows * kSplit)) {
      const float* const t = floats(S::kOwnMaxima) + b * 4 * kDecodeRows + at;
      ptx::send(remote(S::kMaxima + ((own + b) * kDecodeRows + at) * 4, to), remote(S::kMaximaReady, to),
                fmaxf(fmaxf(t[0], t[kDecodeRows]), fmaxf(t[2 * kDecodeRows], t[3 * kDecodeRows])));
    }
  }

  // Probabilities and sums of my blocks, to all CTAs of the chunk.
  DETATTN_DEV void probabilities(DecodeConsumer<Element, kHeadDim, false>& rows, float (&s)[S::kOwn][kTiles][4]) {
    float m[2] = {num::neg_inf(), num::neg_inf()};
    ptx::mbar_wait(base + S::kMaximaReady, 0);
#pragma unroll 4
    for (int b = 0; b < own; ++b) move(m, maximum(b));
#pragma unroll
    for (int b = 0; b < S::kOwn; ++b) {
      if (b >= own_count) break;
      move(m, maximum(own + b));
      float sum[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float shift = __fmul_rn(num::finite_reference(m[r]), scaling.kappa);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          s[b][i][r] = num::probability(s[b][i][r], scaling.kappa, shift);
          s[b][i][2 + r] = num::probability(s[b][i][2 + r], scaling.kappa, shift);
        }
        if constexpr (kTiles == 2) {
          sum[r] = num::sum4(s[b][0][r], s[b][0][2 + r], s[b][1][r], s[b][1][2 + r]);
        } else {
          sum[r] = num::sum2(s[b][0][r], s[b][0][2 + r]);
        }
      }
      pairs(S::kOwnSums)[((b * 4 + warp) * 8 + (lane >> 2)) * 4 + (lane & 3)] = make_float2(sum[0], sum[1]);
      // Matrix i holds the keys 16 warp + 8 (i & 1) + 64 (i >> 1) of the block, transposed: a row a query.
      const int i = lane >> 3, q = lane & 7;
      const int key = (own + b) * L::kBlock + 16 * warp + 8 * (i & 1) + (kTiles == 2 ? 64 * (i >> 1) : 0);
      const uint32_t at = base + S::kP + q * S::kPitchP + 2 * key;
      const uint32_t low = ptx::pack<Element>(s[b][0][0], s[b][0][1]),
                     high = ptx::pack<Element>(s[b][0][2], s[b][0][3]);
      if constexpr (kTiles == 2) {
        ptx::stmatrix_x4_trans(at, low, high, ptx::pack<Element>(s[b][1][0], s[b][1][1]),
                               ptx::pack<Element>(s[b][1][2], s[b][1][3]));
      } else {
        ptx::stmatrix_x2_trans(at, low, high);
      }
    }
    __syncwarp();
    if (lane == 0) ptx::mbar_arrive(base + S::kProbabilitiesReady);
    rows.sync();
    constexpr int kPieces = L::kBlock / 8;  // of 16 bytes, of a row of a block
    const int q = thread / kPieces & (kDecodeRows - 1), piece = thread & (kPieces - 1);
    for (int b = thread / (kDecodeRows * kPieces); b < own_count; b += 128 / (kDecodeRows * kPieces)) {
      const uint32_t at = S::kP + q * S::kPitchP + 2 * (own + b) * L::kBlock + 16 * piece;
      const uint4 data = *reinterpret_cast<const uint4*>(tail + at);
#pragma unroll 4
      for (int i = 1; i < kSplit; ++i) {
        const int to = (part + i) & (kSplit - 1);
        ptx::send(remote(at, to), remote(S::kProbabilitiesReady, to), data);
      }
    }
    if (warp < own_count) {
      float2 t[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) t[w] = pairs(S::kOwnSums)[((warp * 4 + w) * 8 + (lane >> 2)) * 4 + (lane & 3)];
      float pair[2] = {num::sum4(t[0].x, t[1].x, t[2].x, t[3].x), num::sum4(t[0].y, t[1].y, t[2].y, t[3].y)};
#pragma unroll
      for (int r = 0; r < 2; ++r) pair[r] = num::sum2(pair[r], __shfl_xor_sync(0xffffffff, pair[r], 4));
      // The lanes of a pair of keys hold the same: they share the CTAs between them.
      const uint32_t at = S::kSums + (((own + warp) * 4 + (lane >> 3)) * kDecodeRows + q0) * 4;
#pragma unroll 2
      for (int to = (lane >> 2) & 1; to < kSplit; to += 2) {
        ptx::send(remote(at, to), remote(S::kProbabilitiesReady, to), make_float2(pair[0], pair[1]));
      }
    }
  }

  // One warp: the sums of the chunk, while others multiply. Its result, or its partial state for the merge.
  DETATTN_DEV void finish_sums(bool in_cluster) const {
    float l[2] = {0.f, 0.f};
    ptx::bar_sync(kFactors, 32 + 32);
    if (blocks > 0) ptx::mbar_wait(base + S::kProbabilitiesReady, 0);
#pragma unroll 8
    for (int b = 0; b < blocks; ++b) {
      const float2 alpha = pairs(S::kFactors)[b * 4 + (lane & 3)];
      const float2 sum = pairs(S::kSums)[(b * 4 + (lane >> 3)) * 4 + (lane & 3)];
      l[0] = num::next_sum(l[0], alpha.x, sum.x);
      l[1] = num::next_sum(l[1], alpha.y, sum.y);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      l[r] = num::sum2(l[r], __shfl_xor_sync(0xffffffff, l[r], 8));
      l[r] = num::sum2(l[r], __shfl_xor_sync(0xffffffff, l[r], 16));
    }
    if (lane >= 8) return;
    // A lane a row.
    const int row = 2 * (lane & 3) + (lane >> 2);
    if (x.row + row >= x.rows) return;
    float m = blocks > 0 ? floats(S::kReference)[row] : num::neg_inf(), sum = lane >> 2 ? l[1] : l[0];
    if (x.chunks > 1) {
      if (in_cluster) {
        ptx::store_remote(ptx::map_to_rank(base + S::kPartialState + (chunk() * kDecodeRows + row) * 8, part),
                          make_float2(m, sum));
      } else if (part == 0) {
        *reinterpret_cast<float2*>(p.partial_ml + (x.slot * kDecodeRows + row) * 2) = make_float2(m, sum);
      }
      return;
    }
    const int head = x.head(p, row);
    float factor = 1.f;
    if (p.sinks) factor = num::add_sink(m, sum, p.sinks[head], scaling);
    pairs(S::kFinal)[row] = make_float2(factor, num::inverse(sum));
    if (part == 0) write_lse(p, x.view, head, x.query(p, row), m, sum);
  }

  // Blocks [first, past) of V, and before them the keys of my blocks.
  DETATTN_DEV void load(bool with_keys, int first, int past) const {
    past = min(past, blocks);
    DecodeProducer<kHeadDim> producer{p, keys, RingBarriers<kDecodeMaxBuffers>{}, DecodeRing{1}};
    if (p.block_table) {
      for (int b = 0; with_keys && b < own_count; ++b) {
        const int block = x.first + own + b;
        producer.template load<L::kPanels>(p.k, x, block, keys + b * L::kKVBytes, base + S::kKeysReady + 8 * b, 0, 64);
      }
      for (int b = first; b < past; ++b) {
        producer.template load<1>(p.v_slice, x, x.first + b, value_block(b), base + S::kValuesReady + 8 * b,
                                  part * S::kColumns, S::kColumns);
      }
      return;
    }
    // A lane a block.
    const int row = x.view.k_row + static_cast<int>(x.view.sequence.valid.begin) + x.first * L::kBlock;
    if (with_keys && lane < own_count) {
      const uint32_t bar = base + S::kKeysReady + 8 * lane;
      ptx::mbar_expect_tx(bar, L::kKVBytes);
#pragma unroll
      for (int i = 0; i < L::kPanels; ++i) {
        ptx::tma_load(keys + lane * L::kKVBytes + i * L::kPanelKV, &p.k.map, bar, 64 * i,
                      row + (own + lane) * L::kBlock, x.head_kv * p.k.head_step, x.view.k_batch * p.k.batch_step,
                      producer.policy);
      }
    }
    __syncwarp();
    const int block = first + lane;
    if (block < past) {
      const uint32_t bar = base + S::kValuesReady + 8 * block;
      ptx::mbar_expect_tx(bar, S::kBlockV);
      ptx::tma_load(value_block(block), &p.v_slice.map, bar, part * S::kColumns, row + block * L::kBlock,
                    x.head_kv * p.v_slice.head_step, x.view.k_batch * p.v_slice.batch_step, producer.policy);
    }
  }
  DETATTN_DEV void load_early() const {
    if (lane == 0 && blocks > 0) {
      // From every CTA of the chunk the maxima and sums of its blocks, from the others their probabilities.
      ptx::mbar_expect_tx(base + S::kMaximaReady, blocks * kDecodeRows * 4);
      ptx::mbar_expect_tx(base + S::kProbabilitiesReady,
                          blocks * 4 * kDecodeRows * 4 + (blocks - own_count) * kDecodeRows * L::kBlock * 2);
    }
    load(true, 0, S::kApart ? S::kHalfBlocks : S::kMaxBlocks);
  }
  DETATTN_DEV void load_late() const {
    if (!S::kApart) return;
    if (own_count > 0) ptx::mbar_wait(base + S::kKeysDone, 0);
    load(false, S::kHalfBlocks, S::kMaxBlocks);
  }

  DETATTN_DEV uint32_t value_block(int block) const {
    const int h = block / S::kHalfBlocks;
    return keys + S::values(h) + (block - h * S::kHalfBlocks) * S::kBlockV;
  }
  // V of a block has come. Keys that no row of the tile sees, and masked ones, become zeros.
  DETATTN_DEV void await_values(int block) const {
    ptx::mbar_wait(base + S::kValuesReady + 8 * block, 0);
    const int first = (x.first + block) * L::kBlock;
    if (x.begin <= first && x.end >= first + L::kBlock && !x.view.holes) return;
    constexpr int kPieces = S::kColumns / 8;
    for (int i = thread; i < L::kBlock * kPieces; i += 128) {
      const int relative = first + i / kPieces;
      bool live = relative >= x.begin && relative < x.end;
      if (live && x.view.holes) live = (p.key_bits[x.batch * p.key_words + relative / 32] >> (relative & 31)) & 1;
      if (!live) ptx::zero_16_bytes(value_block(block) + i * 16);
    }
    ptx::bar_sync(kGroup + 1, 128);
  }

  // What a lane holds of a block of V (transposed) and of P.
  struct Fragments {
    uint32_t v[kSteps][4], p[kSteps / 2][4];
  };
  // V lies as the copy engine swizzles it, 16-byte pieces of a key turned by bits of the key's number, which are the
  // same for keys 8 apart: ldmatrix meets no bank conflicts, and the address moves in even steps.
  DETATTN_DEV uint32_t first_piece() const {
    constexpr int kPieces = S::kColumns / 8, kShift = kPieces == 2 ? 2 : (kPieces == 4 ? 1 : 0);
    const int i = lane >> 3, key = lane & 7, piece = 2 * warp + (i & 1);
    const int turned = kPieces & (kPieces - 1) ? piece : piece ^ (key >> kShift & (kPieces - 1));
    return ((8 * (i >> 1) + key) * kPieces + turned) * 16;
  }
  DETATTN_DEV void load_step(Fragments& f, uint32_t v, uint32_t probabilities, int k) const {
    ptx::ldmatrix_x4_trans(v + k * (16 * 2 * S::kColumns), f.v[k]);
    if (k % 2 == 0) {
      uint32_t (&b)[4] = f.p[k / 2];
      ptx::ldmatrix_x4(probabilities + 32 * k, b[0], b[1], b[2], b[3]);
    }
  }
  // O (+)= V^T P^T of a block, while the next block's operands come into registers.
  DETATTN_DEV void multiply(float (&o)[4], const Fragments& f, int block, unsigned moves, Fragments& next) const {
    // A factor of exactly 1 changes nothing; before the first block there is nothing to scale.
    if (block > 0 && (moves >> block & 1)) {
      const float2 alpha = pairs(S::kFactors)[block * 4 + (lane & 3)];
#pragma unroll
      for (int e = 0; e < 4; ++e) o[e] = __fmul_rn(o[e], e & 1 ? alpha.y : alpha.x);
    }
    const int ahead = min(block + 1, blocks - 1);  // after the last block nobody uses what comes
    const uint32_t v = value_block(ahead) + first_piece(), probabilities = probability_block(ahead);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      ptx::mma_m16n8k16<Element>(o, f.v[k], f.p[k >> 1][2 * (k & 1)], f.p[k >> 1][2 * (k & 1) + 1]);
      load_step(next, v, probabilities, k);
    }
  }
  DETATTN_DEV uint32_t probability_block(int block) const {
    return base + S::kP + (lane & 7) * S::kPitchP + 2 * (block * L::kBlock + 8 * (lane >> 3));
  }

  // All four warps come here; those without columns of their own only help to clean.
  DETATTN_DEV void products(float (&o)[4]) const {
    if (blocks == 0) return;
    ptx::mbar_wait(base + S::kProbabilitiesReady, 0);
    const auto await_pair = [&](int b) {
      if (b < blocks) await_values(b);
      if (b + 1 < blocks) await_values(b + 1);
    };
    await_pair(0);
    const bool busy = 16 * warp < S::kColumns;
    const unsigned moves = *reinterpret_cast<const unsigned*>(tail + S::kMoves);
    Fragments even, odd;
    if (busy) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) load_step(even, value_block(0) + first_piece(), probability_block(0), k);
    }
#pragma unroll 1
    for (int b = 0; b < blocks; b += 2) {
      if (busy) multiply(o, even, b, moves, odd);
      await_pair(b + 2);
      if (busy && b + 1 < blocks) multiply(o, odd, b + 1, moves, even);
    }
  }

  DETATTN_DEV uint16_t* out_row(int row) const {
    return static_cast<uint16_t*>(p.out_rows.data) + x.view.q_batch * p.out_rows.batch +
           x.head(p, row) * p.out_rows.head + static_cast<int64_t>(x.view.q_row + x.query(p, row)) * p.out_rows.row;
  }
  DETATTN_DEV static uint16_t rounded(float o, float inv) {
    return static_cast<uint16_t>(ptx::pack<Element>(num::finish(o, inv), 0.f));
  }

  // The result of the only chunk; or a partial result, to the workspace or to the CTA that merges my columns.
  DETATTN_DEV void hand_over(const float (&o)[4], uint16_t* const (&out)[2], bool in_cluster) const {
    const int column = 16 * warp + (lane >> 2);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = q0 + r;
      if (x.row + row >= x.rows) continue;
      const float2 last = pairs(S::kFinal)[row];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int mine = column + 8 * i, all = part * S::kColumns + mine;
        float value = o[2 * i + r];
        if (x.chunks == 1) {
          if (p.sinks) value = __fmul_rn(value, last.x);
          if (all < p.head_dim) out[r][all] = rounded(value, last.y);
        } else if (in_cluster) {
          ptx::store_remote(
              ptx::map_to_rank(base + S::kPartialOut + ((chunk() * kDecodeRows + row) * S::kColumns + mine) * 4, part),
              value);
        } else {
          p.partial_out[(x.slot * kDecodeRows + row) * kHeadDim + all] = value;
        }
      }
    }
  }

  // The first chunk's CTAs merge their columns of all chunks, left to right.
  DETATTN_DEV void merge() const {
    const int rows = min(kDecodeRows, x.rows - x.row);
    for (int i = threadIdx.x; i < rows * S::kColumns; i += kSplitThreads) {
      const int row = i / S::kColumns, all = part * S::kColumns + i - row * S::kColumns;
      float total_m = num::neg_inf(), total_l = 0.f, total = 0.f;
#pragma unroll
      for (int c = 0; c < S::kMostChunks; ++c) {
        if (c >= x.chunks) break;
        const float2 state = pairs(S::kPartialState)[c * kDecodeRows + row];
        const num::MergeWeights w = num::merge_weights(total_m, state.x, scaling.kappa);
        total_l = num::merge(total_l, w.total, state.y, w.chunk);
        total = num::merge(total, w.total, floats(S::kPartialOut)[c * (kDecodeRows * S::kColumns) + i], w.chunk);
      }
      const int head = x.head(p, row);
      if (p.sinks) total = __fmul_rn(total, num::add_sink(total_m, total_l, p.sinks[head], scaling));
      if (all < p.head_dim) out_row(row)[all] = rounded(total, num::inverse(total_l));
      if (all == 0) write_lse(p, x.view, head, x.query(p, row), total_m, total_l);
    }
  }
};

template <typename Element, int kHeadDim, int kSplit>
__global__ void __launch_bounds__(kSplitThreads) decode_split_kernel(const __grid_constant__ FwdArgs p) {
  using S = SplitLayout<kHeadDim, kSplit>;
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* const tail = shared + S::kTailAt;
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  // The loading warp's first lane makes the barriers, and needs no other thread to start the copies.
  if (threadIdx.x == 0) {
    ptx::tma_prefetch(&p.k.map);
    ptx::tma_prefetch(&p.v_slice.map);
  }
  if (threadIdx.x == 128) {
    const uint32_t base = ptx::shared_address(tail);
    for (int b = 0; b < S::kOwn; ++b) ptx::mbar_init(base + S::kKeysReady + 8 * b, 1);
    for (int b = 0; b < S::kMaxBlocks; ++b) ptx::mbar_init(base + S::kValuesReady + 8 * b, 1);
    ptx::mbar_init(base + S::kKeysDone, 4);
    ptx::mbar_init(base + S::kMaximaReady, 1);
    ptx::mbar_init(base + S::kProbabilitiesReady, 1 + 4);  // and the warps that write my own
    ptx::fence_mbar_init();
  }
  __syncwarp();
  ptx::cluster_arrive();
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
  DecodeItem x = {};
  const bool found = locate_split<kHeadDim, kSplit>(p, x);
  if (!found) x.first = x.last = x.chunks = 0;
  SplitDecode<Element, kHeadDim, kSplit> me{p, shared, x};
  const bool in_cluster = p.cluster > kSplit;
  if (warp < 4) {
    DecodeConsumer<Element, kHeadDim, false> rows{p, tail, me.keys, RingBarriers<kDecodeMaxBuffers>{}, DecodeRing{1}};
    float s[S::kOwn][S::L::kKeyTiles][4];
    if (found) rows.load_q(x);
    ptx::cluster_wait();  // all have started and made their barriers
    if (found && me.blocks > 0) {
      me.scores(rows, s);
      me.probabilities(rows, s);
    }
    if (warp == 0) {
      if (found) me.finish_sums(in_cluster);
      __syncwarp();
      ptx::bar_arrive(kSums, 128 + 32);
    }
  } else {
    if (found && warp == 4) me.load_early();
    __syncwarp();
    ptx::cluster_wait();
    float o[4] = {0.f, 0.f, 0.f, 0.f};
    uint16_t* out[2] = {};
    if (found) {
      out[0] = me.out_row(me.q0);
      out[1] = me.out_row(me.q0 + 1);
      if (warp == 4) me.load_late();
      if (warp == 5) {
        me.replay_references();
        __syncwarp();
        ptx::bar_arrive(kFactors, 32 + 32);
      }
      ptx::bar_sync(kGroup + 1, 128);
      me.products(o);
    }
    ptx::bar_sync(kSums, 128 + 32);
    if (found && 16 * (warp - 4) < S::kColumns) me.hand_over(o, out, in_cluster);
    __syncwarp();
  }
  if (in_cluster) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
    if (found && me.chunk_rank == 0 && x.chunks > 1) me.merge();
  }
}

}  // namespace detattn
