// The host side of the backward: picks the instance, describes the tensors, lays out the workspace, launches.
#include "bwd.h"
#include "host.h"
#include "prepare.h"

namespace detattn {
namespace {

const BwdInstance& instance_of(int instance) {
  switch (instance) {
    case 64:
      return bwd_instance_d64();
    case 96:
      return bwd_instance_d96();
    case 128:
      return bwd_instance_d128();
    default:
      return bwd_instance_d256();
  }
}

int check_backward(const BwdParams& p) {
  if (const int e = check(p)) return e;
  constexpr int64_t kLongest = (int64_t{1} << 30) - 4096;  // a position plus a window fits 32 bits
  return p.seqlen_q > kLongest || p.seqlen_k > kLongest ? kLength : 0;
}

// Upper bounds of the work.
struct Work {
  int64_t tiles_per_head, tiles, blocks_per_head, jobs;
};
Work plan_work(const BwdParams& p) {
  const int keys = bwd_tile(bwd_instance_dim(p.head_dim)).keys;
  Work w = {};
  // Tiles are anchored at the first query that sees a key, so the first of a sequence may be a partial one too.
  const bool anchored = p.mask.right >= 0 && (p.cu_seqlens_q || p.key_padding_mask || p.seqlen_q > p.seqlen_k);
  if (p.cu_seqlens_q) {
    w.tiles = (p.seqlen_q / kBwdRows + std::min<int64_t>(p.batch, p.seqlen_q) * (anchored ? 2 : 1)) * p.heads_q;
    w.jobs = (p.seqlen_k / keys + std::min<int64_t>(p.batch, p.seqlen_k)) * p.heads_kv;
  } else {
    w.tiles_per_head = ceil_div(p.seqlen_q, kBwdRows) + (anchored ? 1 : 0);
    w.tiles = w.tiles_per_head * p.batch * p.heads_q;
    w.blocks_per_head = ceil_div(p.seqlen_k, keys);
    w.jobs = w.blocks_per_head * p.batch * p.heads_kv;
  }
  w.tiles = std::max<int64_t>(w.tiles, 1);
  w.jobs = std::max<int64_t>(w.jobs, 1);
  return w;
}

// Key heads that are worked on together, longest blocks first. Blocks of one head walk side by side and share what they
// read in L2, so about eight of each should run at once; more heads than that even out the end of a section.
constexpr int kBlocksAtOnce = 8;
int64_t heads_per_section(const BwdParams& p, const Work& w, int sms) {
  const int64_t heads = int64_t{p.batch} * p.heads_kv;
  const int64_t fit = std::max(ceil_div(sms, kBlocksAtOnce), ceil_div(sms, w.blocks_per_head));
  return ceil_div(heads, ceil_div(heads, std::min(fit, heads)));
}

// Byte offsets of the parts of the workspace.
struct Workspace {
  size_t ticket, spans, key_bits, records, turns, dq_sums, order, tile_begin, job_begin, q, k, v, out, dout;
  size_t bytes;
  int64_t key_words;
};
Workspace lay_out(const BwdParams& p) {
  Workspace w = {};
  const auto take = [&w](size_t bytes) {
    const size_t at = w.bytes;
    w.bytes += (bytes + 255) / 256 * 256;
    return at;
  };
  const Work work = plan_work(p);
  const Extents nq = query_extents(p), nk = key_extents(p);
  w.ticket = take(sizeof(uint32_t));
  w.records = take(work.tiles * sizeof(BwdRecord));
  w.turns = take(work.tiles * sizeof(uint32_t));
  w.dq_sums = take(work.tiles * kBwdRows * bwd_columns(bwd_instance_dim(p.head_dim)) * sizeof(float));
  if (p.key_padding_mask) {
    w.key_words = round_up(ceil_div(p.seqlen_k, 32), 4);
    w.spans = take(p.batch * sizeof(KeySpan));
    w.key_bits = take(p.batch * w.key_words * sizeof(uint32_t));
  }
  if (p.cu_seqlens_q) {
    w.order = take(p.batch * sizeof(int32_t));
    w.tile_begin = take((p.batch + size_t{1}) * sizeof(int64_t));
    w.job_begin = take((p.batch + size_t{1}) * sizeof(int64_t));
  }
  if (!addressable(p.q, nq)) w.q = take(nq.elements(p.head_dim) * 2);
  if (!addressable(p.k, nk)) w.k = take(nk.elements(p.head_dim) * 2);
  if (!addressable(p.v, nk)) w.v = take(nk.elements(p.head_dim) * 2);
  if (!addressable(p.out, nq)) w.out = take(nq.elements(p.head_dim) * 2);
  if (!p.dout.data || !addressable(p.dout, nq)) w.dout = take(nq.elements(p.head_dim) * 2);
  return w;
}

}  // namespace

size_t cuda_backward_workspace(const BwdParams& p, int) { return check_backward(p) ? 0 : lay_out(p).bytes; }

int cuda_backward(const BwdParams& p, void* workspace, void* stream_handle, int device, int sms) {
  if (const int e = check_backward(p)) return e;
  // A thread that has made no call yet, such as autograd's, has no current context, and tensor maps need one.
  if (const cudaError_t e = cudaSetDevice(device)) return e;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const Extents nq = query_extents(p), nk = key_extents(p);
  const bool queries = nq.elements(1) > 0, keys = nk.elements(1) > 0;
  if (!queries || !keys) {
    if (keys) {
      if (const cudaError_t e = cudaMemsetAsync(p.dk.data, 0, nk.elements(p.head_dim) * 2, stream)) return e;
      if (const cudaError_t e = cudaMemsetAsync(p.dv.data, 0, nk.elements(p.head_dim) * 2, stream)) return e;
    }
    if (queries) {
      if (const cudaError_t e = cudaMemsetAsync(p.dq.data, 0, nq.elements(p.head_dim) * 2, stream)) return e;
    } else if (p.dsinks) {
      return cudaMemsetAsync(p.dsinks, 0, p.heads_q * sizeof(float), stream);
    }
    if (!queries || !p.dsinks) return 0;
  }
  const Workspace w = lay_out(p);
  const Work work = plan_work(p);
  constexpr int64_t kMostWork = (int64_t{1} << 31) - 1;
  if (work.tiles > kMostWork || work.jobs > kMostWork) return kWork;
  char* const scratch = static_cast<char*>(workspace);
  const int instance = bwd_instance_dim(p.head_dim);
  const BwdTile tile = bwd_tile(instance);

  BwdArgs args = {};
  fill_args(args, p);
  args.dq_scale = static_cast<float>(p.scale);
  args.lse = p.lse;
  args.dlse = p.dlse;
  args.dq = p.dq;
  args.dk = p.dk;
  args.dv = p.dv;
  args.dsinks = static_cast<float*>(p.dsinks);
  args.records = reinterpret_cast<BwdRecord*>(scratch + w.records);
  args.turns = reinterpret_cast<uint32_t*>(scratch + w.turns);
  args.ticket = reinterpret_cast<uint32_t*>(scratch + w.ticket);
  args.dq_sums = reinterpret_cast<float*>(scratch + w.dq_sums);
  args.tiles = work.tiles;
  args.jobs = work.jobs;
  if (p.key_padding_mask) {
    auto* const spans = reinterpret_cast<KeySpan*>(scratch + w.spans);
    auto* const bits = reinterpret_cast<uint32_t*>(scratch + w.key_bits);
    if (const cudaError_t e = launch_scan_mask(p, spans, bits, w.key_words, stream)) return e;
    args.spans = spans;
    args.key_bits = bits;
    args.key_words = w.key_words;
  }
  if (p.cu_seqlens_q) {
    const BwdPlan plan = {reinterpret_cast<int32_t*>(scratch + w.order),
                          reinterpret_cast<int64_t*>(scratch + w.tile_begin),
                          reinterpret_cast<int64_t*>(scratch + w.job_begin)};
    args.order = plan.order;
    args.tile_begin = plan.tile_begin;
    args.job_begin = plan.job_begin;
    if (const cudaError_t e = launch_bwd_plan(args, plan, tile.keys, stream)) return e;
  } else {
    args.tiles_per_head = static_cast<int32_t>(work.tiles_per_head);
    args.blocks_per_head = static_cast<int32_t>(work.blocks_per_head);
    if (keys) {
      args.heads_per_section = static_cast<int32_t>(heads_per_section(p, work, sms));
    }
  }

  // Tensors that the copy engine cannot address are copied to the workspace first.
  const auto to_scratch = [&](Rows r, const Extents& n, size_t at, Rows& result) -> cudaError_t {
    result = r;
    if (r.data && addressable(r, n)) return cudaSuccess;
    result = {scratch + at, n.heads * n.rows * p.head_dim, n.rows * p.head_dim, p.head_dim};
    if (!r.data) return cudaMemsetAsync(scratch + at, 0, n.elements(p.head_dim) * 2, stream);
    return launch_copy_rows(r, n.batch, n.heads, n.rows, p.head_dim, scratch + at, sms, stream);
  };
  Rows q, k, v;
  if (const cudaError_t e = to_scratch(p.out, nq, w.out, args.out_rows)) return e;
  if (const cudaError_t e = to_scratch(p.dout, nq, w.dout, args.dout_rows)) return e;
  if (keys) {
    if (const cudaError_t e = to_scratch(p.q, nq, w.q, q)) return e;
    if (const cudaError_t e = to_scratch(p.k, nk, w.k, k)) return e;
    if (const cudaError_t e = to_scratch(p.v, nk, w.v, v)) return e;
    if (const int e = describe(args.q, q, nq, p, kBwdRows)) return e;
    if (const int e = describe(args.dout, args.dout_rows, nq, p, kBwdRows)) return e;
    if (const int e = describe(args.k, k, nk, p, tile.keys)) return e;
    if (const int e = describe(args.v, v, nk, p, tile.keys)) return e;
  }
  if (const cudaError_t e = launch_bwd_rows(args, p.dtype, instance, stream)) return e;
  if (keys) {
    const int bf16 = p.dtype == DType::kBFloat16, softcap = p.softcap > 0;
    if (p.cu_seqlens_q || p.key_padding_mask) {
      if (const cudaError_t e = launch_bwd_zero(args, sms, stream)) return e;
    }
    if (const cudaError_t e = instance_of(instance).backward[bf16][softcap](args, stream)) return e;
    if (const cudaError_t e = launch_bwd_finish(args, p.dtype, instance, stream)) return e;
  }
  if (p.dsinks) return launch_bwd_dsinks(args, stream);
  return 0;
}

}  // namespace detattn
