// Handshakes between the copy engine, its producer and the consumer warpgroups.
#pragma once

#include "ptx.cuh"

namespace detattn {

// Place in a ring of kStages buffers.
template <int kStages>
struct Ring {
  uint32_t count = 0;
  DETATTN_DEV void advance() { ++count; }
  DETATTN_DEV uint32_t stage() const { return count % kStages; }
  DETATTN_DEV uint32_t phase() const { return (count / kStages) & 1; }
};

// A ring's barriers in shared memory: kStages "full" ones, then kStages "empty" ones.
template <int kStages>
struct RingBarriers {
  uint32_t base;
  DETATTN_DEV uint32_t full(uint32_t stage) const { return base + 8 * stage; }
  DETATTN_DEV uint32_t empty(uint32_t stage) const { return base + 8 * (kStages + stage); }
  static constexpr uint32_t kBytes = 16 * kStages;
  DETATTN_DEV void init(int consumer_warps) const {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbar_init(full(i), 1);
      ptx::mbar_init(empty(i), consumer_warps);
    }
  }
  DETATTN_DEV void wait_full(const Ring<kStages>& r) const { ptx::mbar_wait(full(r.stage()), r.phase()); }
  // On a fresh ring every buffer is free: the phase before the first counts as complete.
  DETATTN_DEV void wait_empty(const Ring<kStages>& r) const { ptx::mbar_wait(empty(r.stage()), r.phase() ^ 1); }
};

// Named barriers. 0 is __syncthreads.
enum NamedBarrier : int {
  kOrder = 1,    // + group: the warpgroups take turns on the tensor cores
  kGroup = 4,    // + group: the threads of one warpgroup
  kSums = 7,     // decode: the sums of a chunk are ready
  kFactors = 8,  // decode: the factors of its blocks are ready
};

}  // namespace detattn
