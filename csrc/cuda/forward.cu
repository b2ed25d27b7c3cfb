// The host side of the forward: picks the instance, describes the tensors, lays out the workspace, launches.
#include "host.h"
#include "prepare.h"

namespace detattn {
namespace {

const Instance& instance_of(int head_dim) {
  switch (instance_dim(head_dim)) {
    case 64:
      return instance_d64();
    case 96:
      return instance_d96();
    case 128:
      return instance_d128();
    case 192:
      return instance_d192();
    default:
      return instance_d256();
  }
}

// Keys of one copy: at most `most`, a power of two that divides the page size.
int copied_keys(const FwdParams& p, int most) {
  if (p.block_table) {
    while (p.page_size % most != 0) most /= 2;
  }
  return most;
}

// Up to this many sequences every warp counts the work itself instead of waiting for a plan.
constexpr int kMostScanned = 96;

// Clusters of `size` CTAs, one a multiprocessor, that run at once. A cluster lies in one processing cluster, and those
// have different numbers of multiprocessors: an H200 with 132 takes 66 clusters of 2, 30 of 4, 15 of 8.
int64_t clusters_at_once(int64_t size, int sms) { return size <= 2 ? sms / size : sms / size * 15 / 16; }

// Which kernels a call may need, and bounds for them. A sequence goes to decode when it has few packed rows.
struct Work {
  bool prefill, decode, plan;
  bool cluster;          // the chunks of decoded rows are merged inside clusters, not through the workspace
  int split, split_way;  // CTAs that share a chunk (0: a CTA a chunk), their place in split_ways
  int64_t most_rows;     // packed rows of a sequence in decode
  int64_t max_chunks;    // of a sequence in decode
  int64_t row_tiles;     // decode tiles of 8 rows, all sequences and key heads
  int64_t decode_items;  // row tiles x chunks
};
// Chunks that `span` consecutive keys among the first `keys` can touch: the first chunks are the shortest.
int64_t most_chunks(int64_t keys, int64_t span) { return std::min(chunk_count(keys), span / kChunks.step[0].keys + 2); }
Work plan_work(const FwdParams& p, int sms) {
  Work w = {};
  const int64_t group = p.heads_q / p.heads_kv, few = kDecodeMaxRows / group;  // queries of a decoded sequence
  w.decode = few > 0 && (p.cu_seqlens_q || p.seqlen_q <= few);
  // Two queries a sequence on average: decode alone, even if one of the sequences has many.
  const bool all_few = p.cu_seqlens_q && few > 0 && p.seqlen_q <= std::max(few, int64_t{2} * p.batch);
  w.prefill = p.cu_seqlens_q ? !all_few : !w.decode;
  w.most_rows = all_few ? INT64_MAX : kDecodeMaxRows;
  w.plan = p.cu_seqlens_q && (w.prefill || p.batch >= kMostScanned);
  if (!w.decode) return w;
  const int64_t queries = all_few ? p.seqlen_q : std::min(few, p.seqlen_q);
  const bool bounded = p.mask.left >= 0 && p.mask.right >= 0;
  const int64_t span =
      bounded ? std::min(p.mask.left, p.seqlen_k) + std::min(p.mask.right, p.seqlen_k) + queries : p.seqlen_k;
  w.max_chunks = std::max<int64_t>(1, most_chunks(p.seqlen_k, span));
  if (p.cu_seqlens_q) {
    // A sequence has at most 1 + rows / 8 tiles.
    const int64_t sequences = std::min<int64_t>(int64_t{p.batch} + 1, p.seqlen_q);
    const int64_t most_tiles = all_few ? ceil_div(p.seqlen_q * group, kDecodeRows) : kDecodeMaxRows / kDecodeRows;
    w.row_tiles = p.heads_kv * std::min(sequences * most_tiles, sequences + p.seqlen_q * group / kDecodeRows);
    w.decode_items = w.row_tiles * w.max_chunks;
    // Packed keys: the sequences share them.
    if (p.cu_seqlens_k) {
      const int64_t chunks = p.seqlen_k / kChunks.step[0].keys + sequences;
      w.decode_items = std::min(w.decode_items, p.heads_kv * most_tiles * chunks);
    }
  } else {
    w.row_tiles = int64_t{p.batch} * p.heads_kv * ceil_div(p.seqlen_q * group, kDecodeRows);
    w.decode_items = w.row_tiles * w.max_chunks;
  }
  // Few chunks are shared by several CTAs each, and merged in the same cluster where that has room for all chunks of a
  // row tile. Clusters are used only where all run at once.
  const bool first_step = p.seqlen_k <= kChunks.step[0].end;
  const int dim = instance_dim(p.head_dim);
  const SplitWays options = split_ways(dim);
  const int64_t tiles = w.decode_items / w.max_chunks;
  // With as many chunks as a cluster has CTAs, a CTA a chunk is as fast as sharing them through the workspace.
  const bool one_cta_chunks = !p.cu_seqlens_q && w.max_chunks > kDecodeMaxCluster / 2 &&
                              w.max_chunks <= kDecodeMaxCluster && tiles <= clusters_at_once(w.max_chunks, sms);
  for (int way = 0; way < 3; ++way) {
    const int ways = options.ways[way];
    // A copy lands on 128 bytes.
    if (ways == 0 || !first_step || copied_keys(p, block_keys(dim)) * (dim / ways) % 64 != 0) continue;
    const int64_t all = ways * w.max_chunks;
    const bool merged = !p.cu_seqlens_q && all <= kDecodeMaxCluster && tiles <= clusters_at_once(all, sms);
    if (!merged && (w.decode_items > clusters_at_once(ways, sms) || one_cta_chunks)) continue;
    if (w.split == 0 || (merged && !w.cluster)) {
      w.split = ways;
      w.split_way = way;
      w.cluster = merged;
    }
  }
  if (w.split == 0) {
    w.cluster = !p.cu_seqlens_q && w.max_chunks > 1 && w.max_chunks <= kDecodeMaxCluster &&
                tiles <= clusters_at_once(w.max_chunks, sms);
  }
  return w;
}

// Byte offsets of the parts of the workspace.
struct Workspace {
  size_t ticket, spans, key_bits, totals, order, tile_begin, decode_begin, decode_rows_begin, partial_out, partial_ml,
      q, k, v;
  size_t bytes;
  int64_t key_words;
};
Workspace lay_out(const FwdParams& p, int sms) {
  Workspace w = {};
  const auto take = [&w](size_t bytes) {
    const size_t at = w.bytes;
    w.bytes += (bytes + 255) / 256 * 256;
    return at;
  };
  w.ticket = take(sizeof(uint32_t));
  if (p.key_padding_mask) {
    w.key_words = round_up(ceil_div(p.seqlen_k, 32), 4);
    w.spans = take(p.batch * sizeof(KeySpan));
    w.key_bits = take(p.batch * w.key_words * sizeof(uint32_t));
  }
  const int dim = instance_dim(p.head_dim);
  const FwdTile tile = fwd_tile(dim, p.softcap > 0);
  const size_t rest = dim / 8 - tile.shared_total;
  if (rest > 0) w.totals = take(sms * rest * 128 * tile.groups * sizeof(float4));
  const Work work = plan_work(p, sms);
  if (work.plan) {
    const size_t sequences = static_cast<size_t>(p.batch) + 1;
    w.order = take(sequences * sizeof(int32_t));
    w.tile_begin = take((sequences + 1) * sizeof(int64_t));
    w.decode_begin = take((sequences + 1) * sizeof(int64_t));
    w.decode_rows_begin = take((sequences + 1) * sizeof(int64_t));
  }
  if (work.decode && work.max_chunks > 1 && !work.cluster) {
    w.partial_out = take(work.decode_items * kDecodeRows * dim * sizeof(float));
    w.partial_ml = take(work.decode_items * kDecodeRows * 2 * sizeof(float));
  }
  if (!addressable(p.q, query_extents(p))) w.q = take(query_extents(p).elements(p.head_dim) * 2);
  if (!addressable(p.k, key_extents(p))) w.k = take(key_extents(p).elements(p.head_dim) * 2);
  if (!addressable(p.v, key_extents(p))) w.v = take(key_extents(p).elements(p.head_dim) * 2);
  return w;
}

}  // namespace

size_t cuda_forward_workspace(const FwdParams& p, int sms) { return check(p) ? 0 : lay_out(p, sms).bytes; }

int cuda_forward(const FwdParams& p, void* workspace, void* stream_handle, int device, int sms) {
  if (const int e = check(p)) return e;
  const Extents nq = query_extents(p), nk = key_extents(p);
  if (nq.elements(1) == 0) return 0;
  // A thread that has made no call yet, such as autograd's, has no current context, and tensor maps need one.
  if (const cudaError_t e = cudaSetDevice(device)) return e;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const Workspace w = lay_out(p, sms);
  char* const scratch = static_cast<char*>(workspace);
  const int dim = instance_dim(p.head_dim);

  FwdArgs args = {};
  fill_args(args, p);
  args.out_rows = p.out;
  args.lse = p.lse;

  // Tensors that the copy engine cannot address are copied to the workspace first.
  Rows q = p.q, k = p.k, v = p.v;
  const auto to_scratch = [&](Rows& r, const Extents& n, size_t at) -> cudaError_t {
    if (addressable(r, n)) return cudaSuccess;
    const cudaError_t e = launch_copy_rows(r, n.batch, n.heads, n.rows, p.head_dim, scratch + at, sms, stream);
    r = {scratch + at, n.heads * n.rows * p.head_dim, n.rows * p.head_dim, p.head_dim};
    return e;
  };
  const bool keys = nk.elements(1) > 0;
  if (const cudaError_t e = to_scratch(q, nq, w.q)) return e;
  if (keys) {
    if (const cudaError_t e = to_scratch(k, nk, w.k)) return e;
    if (const cudaError_t e = to_scratch(v, nk, w.v)) return e;
  }
  args.q_rows = q;
  const Rows out = {p.out.data, p.out.batch, p.out.head, p.out.row};
  args.out_map_ok = addressable(out, nq);
  if (const int e = describe(args.q, q, nq, p, kRowsPerGroup)) return e;
  if (args.out_map_ok) {
    if (const int e = describe(args.out, out, nq, p, kRowsPerGroup)) return e;
  }
  // Without keys nothing is loaded, but a map needs memory to describe.
  const auto describe_keys = [&](int box_keys) -> int {
    args.box_keys = box_keys;
    if (const int e = describe(args.k, keys ? k : q, keys ? nk : nq, p, box_keys)) return e;
    return describe(args.v, keys ? v : q, keys ? nk : nq, p, box_keys);
  };

  auto* const ticket = reinterpret_cast<uint32_t*>(scratch + w.ticket);
  args.totals = reinterpret_cast<float4*>(scratch + w.totals);
  if (p.key_padding_mask) {
    auto* const spans = reinterpret_cast<KeySpan*>(scratch + w.spans);
    auto* const bits = reinterpret_cast<uint32_t*>(scratch + w.key_bits);
    args.spans = spans;
    args.key_bits = bits;
    args.key_words = w.key_words;
    if (const cudaError_t e = launch_scan_mask(p, spans, bits, w.key_words, stream)) return e;
  }
  const Work work = plan_work(p, sms);
  constexpr int64_t kMostWork = (int64_t{1} << 31) - 1;
  if (work.decode_items > kMostWork || work.row_tiles * kDecodeRows * 2 > kMostWork) return kWork;
  args.tile_rows = fwd_tile(dim, p.softcap > 0).rows();
  args.partial_out = reinterpret_cast<float*>(scratch + w.partial_out);
  args.partial_ml = reinterpret_cast<float*>(scratch + w.partial_ml);
  int64_t ctas = 0;
  args.decode_most_rows = work.most_rows;
  if (p.cu_seqlens_q) args.sequences = p.batch + 1;
  if (work.plan) {
    const PlanArrays plan = {reinterpret_cast<int32_t*>(scratch + w.order),
                             reinterpret_cast<int64_t*>(scratch + w.tile_begin),
                             reinterpret_cast<int64_t*>(scratch + w.decode_begin),
                             reinterpret_cast<int64_t*>(scratch + w.decode_rows_begin), ticket};
    args.order = plan.order;
    args.tile_begin = plan.tile_begin;
    args.decode_begin = plan.decode_begin;
    args.decode_rows_begin = plan.decode_rows_begin;
    args.ticket = ticket;
    if (const cudaError_t e = launch_plan(args, plan, stream)) return e;
    const int64_t most_tiles = (p.seqlen_q / args.tile_rows + args.sequences) * p.heads_q;
    if (most_tiles > kMostWork) return kWork;
    ctas = std::min<int64_t>(sms, most_tiles);
  } else if (work.prefill) {
    args.tiles_per_head = static_cast<int32_t>(ceil_div(p.seqlen_q, args.tile_rows));
    args.tiles = int64_t{args.tiles_per_head} * p.batch * p.heads_q;
    if (args.tiles > kMostWork) return kWork;
    args.heads_per_section = static_cast<int32_t>(section_size(p.batch * p.heads_kv, p.seqlen_k, dim) * args.group);
    ctas = std::min<int64_t>(sms, args.tiles);
    if (args.tiles > ctas) {
      args.ticket = ticket;
      if (const cudaError_t e = cudaMemsetAsync(ticket, 0, sizeof(uint32_t), stream)) return e;
    }
  }
  const Instance& instance = instance_of(p.head_dim);
  const int bf16 = p.dtype == DType::kBFloat16, softcap = p.softcap > 0;
  if (work.prefill) {
    if (const int e = describe_keys(copied_keys(p, block_keys(dim)))) return e;
    if (const cudaError_t e = instance.forward[bf16][softcap](args, static_cast<int>(ctas), stream)) return e;
  }
  if (work.decode) {
    args.row_tiles = static_cast<int32_t>(work.row_tiles / p.heads_kv / (p.cu_seqlens_q ? 1 : p.batch));
    args.max_chunks = static_cast<int32_t>(work.max_chunks);
    args.decode_items = work.decode_items;
    // Two CTAs share a multiprocessor where there is work for both, with steps of 128 keys; otherwise one takes a
    // longer ring and steps of 512 keys.
    if (const int e = describe_keys(copied_keys(p, work.split || work.cluster ? block_keys(dim) : kDecodeBoxKeys)))
      return e;
    if (work.split) {
      const int columns = dim / work.split;
      if (const int e = describe(args.v_slice, keys ? v : q, keys ? nk : nq, p, args.box_keys, columns)) return e;
      if (!p.cu_seqlens_q && !p.key_padding_mask && args.row_tiles == 1) {
        const Sequence all = {p.seqlen_q, p.seqlen_k, {0, p.seqlen_k}};
        args.same = {row_limits(args.mask, all, 0), sequence_chunks(args.mask, all)};
      }
      args.split = work.split;
      args.cluster = work.split * (work.cluster ? args.max_chunks : 1);
      const int ctas = static_cast<int>(work.decode_items * work.split);
      if (const cudaError_t e = instance.decode_split[bf16][work.split_way](args, ctas, stream)) return e;
      return work.max_chunks > 1 && !work.cluster ? launch_combine(args, p.dtype, dim, work.row_tiles, sms, stream)
                                                  : cudaSuccess;
    }
    constexpr int kShared = 232448, kSharedOfTwo = 115712;
    const auto& shared = instance.decode_shared;
    const int block = block_keys(dim);
    const auto buffers = [&](int bytes, int keys) {
      return std::min((bytes - shared.fixed - keys / block * shared.step_block) / shared.buffer, 12);
    };
    const bool two = work.decode_items > 4 * sms && buffers(kSharedOfTwo, 128) >= 3;
    args.decode_step = (two ? 128 : 512) / block;
    args.decode_buffers = two ? buffers(kSharedOfTwo, 128) : buffers(kShared, 512);
    const int64_t at_once = int64_t{sms} * (two ? 2 : 1);
    args.cluster = work.cluster ? args.max_chunks : 0;
    args.one_wave = work.decode_items <= at_once;
    const int64_t decode_ctas = work.cluster ? work.decode_items : std::min(work.decode_items, at_once);
    if (const cudaError_t e = instance.decode[bf16][softcap](args, static_cast<int>(decode_ctas), stream)) return e;
    if (work.max_chunks > 1 && !work.cluster) {
      if (const cudaError_t e = launch_combine(args, p.dtype, dim, work.row_tiles, sms, stream)) return e;
    }
  }
  return 0;
}

const char* cuda_error_text(int code) {
  switch (code) {
    case 0:
      return "no error";
    case kDtype:
      return "the CUDA kernels take float16 and bfloat16";
    case kHeadDim:
      return "the head dim must be a multiple of 8 up to 256";
    case kScale:
      return "the scale must be positive and finite";
    case kGroup:
      return "the query heads must be a multiple of the key heads";
    case kLength:
      return "a tensor holds more than 2^31 rows";
    case kWork:
      return "the call needs more than 2^31 work items";
    case kNoDriverEntry:
      return "the driver has no cuTensorMapEncodeTiled (CUDA 12 or later is needed)";
    default:
      if (code == kDriverErrors + CUDA_ERROR_INVALID_CONTEXT) return "no CUDA context is current in this thread";
      if (code >= kDriverErrors) return "cuTensorMapEncodeTiled refused a tensor";
      return cudaGetErrorString(static_cast<cudaError_t>(code));
  }
}

}  // namespace detattn
