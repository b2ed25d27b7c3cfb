// Launchers of one head dim.
#pragma once

#include "decode_sm90.cuh"
#include "decode_split_sm90.cuh"
#include "fwd_sm90.cuh"

namespace detattn {

template <typename Element, int kHeadDim, bool kSoftcap>
cudaError_t launch_fwd(const FwdArgs& args, int ctas, cudaStream_t stream) {
  static std::atomic<bool> raised[kMaxDevices];
  const auto kernel = fwd_kernel<Element, kHeadDim, kSoftcap>;
  using L = FwdLayout<kHeadDim, kSoftcap>;
  if (const cudaError_t e = raise_shared_limit(reinterpret_cast<const void*>(kernel), L::kBytes, raised)) return e;
  return launch_kernel(kernel, ctas, L::kThreads, L::kBytes, stream, args);
}

template <int kHeadDim>
uint32_t decode_shared_bytes(const FwdArgs& args) {
  using L = DecodeLayout<kHeadDim>;
  return args.decode_buffers * L::kKVBytes + L::kP + args.decode_step * L::kBlockBytes;
}

template <typename Element, int kHeadDim, bool kSoftcap>
cudaError_t launch_decode(const FwdArgs& args, int ctas, cudaStream_t stream) {
  static std::atomic<bool> raised[kMaxDevices];
  const auto kernel = decode_kernel<Element, kHeadDim, kSoftcap>;
  constexpr uint32_t kMost = 232448;
  if (const cudaError_t e = raise_shared_limit(reinterpret_cast<const void*>(kernel), kMost, raised)) return e;
  return launch_clusters(kernel, args.cluster, dim3(ctas), kDecodeThreads, decode_shared_bytes<kHeadDim>(args), stream,
                         args);
}

template <typename Element, int kHeadDim, int kSplit>
cudaError_t launch_decode_split(const FwdArgs& args, int ctas, cudaStream_t stream) {
  static std::atomic<bool> raised[kMaxDevices];
  const auto kernel = decode_split_kernel<Element, kHeadDim, kSplit>;
  constexpr uint32_t kBytes = SplitLayout<kHeadDim, kSplit>::kBytes;
  if (const cudaError_t e = raise_shared_limit(reinterpret_cast<const void*>(kernel), kBytes, raised)) return e;
  const dim3 grid =
      args.cu_seqlens_q ? dim3(ctas) : dim3(kSplit * args.max_chunks, args.row_tiles * args.heads_kv, args.batch);
  return launch_clusters(kernel, args.cluster, grid, kSplitThreads, kBytes, stream, args);
}

template <typename Element, int kHeadDim, int kWay>
constexpr FwdLauncher decode_split() {
  constexpr int kSplit = split_ways(kHeadDim).ways[kWay];
  if constexpr (kSplit > 0) {
    return launch_decode_split<Element, kHeadDim, kSplit>;
  } else {
    return nullptr;
  }
}

template <int kHeadDim>
const Instance& instance() {
  static const Instance table = {
      {{launch_fwd<__half, kHeadDim, false>, launch_fwd<__half, kHeadDim, true>},
       {launch_fwd<__nv_bfloat16, kHeadDim, false>, launch_fwd<__nv_bfloat16, kHeadDim, true>}},
      {{launch_decode<__half, kHeadDim, false>, launch_decode<__half, kHeadDim, true>},
       {launch_decode<__nv_bfloat16, kHeadDim, false>, launch_decode<__nv_bfloat16, kHeadDim, true>}},
      {{decode_split<__half, kHeadDim, 0>(), decode_split<__half, kHeadDim, 1>(), decode_split<__half, kHeadDim, 2>()},
       {decode_split<__nv_bfloat16, kHeadDim, 0>(), decode_split<__nv_bfloat16, kHeadDim, 1>(),
        decode_split<__nv_bfloat16, kHeadDim, 2>()}},
      {DecodeLayout<kHeadDim>::kKVBytes, DecodeLayout<kHeadDim>::kP, DecodeLayout<kHeadDim>::kBlockBytes}};
  return table;
}

}  // namespace detattn
