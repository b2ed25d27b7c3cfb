// Launchers of one head dim.
#pragma once

#include <atomic>

#include "fwd_sm90.cuh"

namespace detattn {

constexpr int kMaxDevices = 64;

// The shared-memory limit of a kernel is raised once a device.
inline cudaError_t raise_shared_limit(const void* kernel, uint32_t bytes, std::atomic<bool> (&done)[kMaxDevices]) {
  int device = 0;
  if (const cudaError_t e = cudaGetDevice(&device)) return e;
  const bool known = device < kMaxDevices;
  if (known && done[device].load(std::memory_order_relaxed)) return cudaSuccess;
  const cudaError_t e =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (e == cudaSuccess && known) done[device].store(true, std::memory_order_relaxed);
  return e;
}

template <typename Element, int kHeadDim, bool kSoftcap>
cudaError_t launch_fwd(const FwdArgs& args, int ctas, cudaStream_t stream) {
  static std::atomic<bool> raised[kMaxDevices];
  const auto kernel = fwd_kernel<Element, kHeadDim, kSoftcap>;
  constexpr uint32_t kShared = FwdLayout<kHeadDim, kSoftcap>::kBytes;
  if (const cudaError_t e = raise_shared_limit(reinterpret_cast<const void*>(kernel), kShared, raised)) return e;
  kernel<<<ctas, kFwdThreads, kShared, stream>>>(args);
  return cudaGetLastError();
}

template <int kHeadDim>
const Instance& instance() {
  static const Instance table = {{{launch_fwd<__half, kHeadDim, false>, launch_fwd<__half, kHeadDim, true>},
                                  {launch_fwd<__nv_bfloat16, kHeadDim, false>, launch_fwd<__nv_bfloat16, kHeadDim, true>}}};
  return table;
}

}  // namespace detattn
