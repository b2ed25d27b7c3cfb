// Launchers of one head dim.
#pragma once

#include "decode_sm90.cuh"
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
  return launch_clusters(kernel, args.cluster, ctas, kDecodeThreads, decode_shared_bytes<kHeadDim>(args), stream, args);
}

template <int kHeadDim>
const Instance& instance() {
  static const Instance table = {
      {{launch_fwd<__half, kHeadDim, false>, launch_fwd<__half, kHeadDim, true>},
       {launch_fwd<__nv_bfloat16, kHeadDim, false>, launch_fwd<__nv_bfloat16, kHeadDim, true>}},
      {{launch_decode<__half, kHeadDim, false>, launch_decode<__half, kHeadDim, true>},
       {launch_decode<__nv_bfloat16, kHeadDim, false>, launch_decode<__nv_bfloat16, kHeadDim, true>}},
      {DecodeLayout<kHeadDim>::kKVBytes, DecodeLayout<kHeadDim>::kP, DecodeLayout<kHeadDim>::kBlockBytes}};
  return table;
}

}  // namespace detattn
