// One function per PTX instruction (PTX ISA 9.0 section numbers in the comments). Matrix products are in wgmma.cuh.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#define DETATTN_DEV __device__ __forceinline__

namespace detattn::ptx {

DETATTN_DEV uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// mbarrier.init (9.7.13.15.9).
DETATTN_DEV void mbar_init(uint32_t bar, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

// mbarrier.arrive.expect_tx (9.7.13.15.13): one arrival, and the phase also waits for `bytes` of copies.
DETATTN_DEV void mbar_expect_tx(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

// mbarrier.arrive (9.7.13.15.13).
DETATTN_DEV void mbar_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// mbarrier.try_wait.parity (9.7.13.15.16) until the phase of this parity is complete. On a fresh barrier parity 1 is.
DETATTN_DEV void mbar_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\nbra WAIT;\nDONE:\n}\n" ::"r"(bar),
      "r"(parity)
      : "memory");
}

// fence.mbarrier_init (9.7.13.4): initialised barriers become visible to the copy engine.
DETATTN_DEV void fence_mbar_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// fence.proxy.async (9.7.13.4): this thread's ordinary shared-memory writes become visible to wgmma and the copy
// engine.
DETATTN_DEV void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// barrier.sync, barrier.arrive (9.7.13.1).
DETATTN_DEV void bar_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DETATTN_DEV void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// setmaxnreg (9.7.19.5).
template <int kRegisters>
DETATTN_DEV void registers_raise() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
DETATTN_DEV void registers_lower() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// griddepcontrol (9.7.13.13): wait for the writes of the kernel before; let the kernel after start.
DETATTN_DEV void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DETATTN_DEV void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Clusters: rank (10.2), barrier.cluster (9.7.13.3), mapa (9.7.9.23), ld.shared::cluster (9.7.9.8).
DETATTN_DEV uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
DETATTN_DEV void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DETATTN_DEV void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DETATTN_DEV uint32_t map_to_rank(uint32_t address, uint32_t rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
DETATTN_DEV float4 load_remote4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
DETATTN_DEV float2 load_remote2(uint32_t address) {
  float2 v;
  asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

// st.shared::cluster (9.7.9.12).
DETATTN_DEV void store_remote(uint32_t address, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
DETATTN_DEV void store_remote(uint32_t address, float2 v) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
}

// st.async (9.7.9.12): a store to a CTA of the cluster that counts its bytes on a barrier of that CTA.
DETATTN_DEV void send(uint32_t address, uint32_t bar, float v) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address), "f"(v),
               "r"(bar)
               : "memory");
}
DETATTN_DEV void send(uint32_t address, uint32_t bar, float2 v) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(address),
               "f"(v.x), "f"(v.y), "r"(bar)
               : "memory");
}
DETATTN_DEV void send(uint32_t address, uint32_t bar, uint4 v) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(address),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(bar)
               : "memory");
}

// prefetch.tensormap (9.7.9.15).
DETATTN_DEV void tma_prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

// cp.async.bulk.tensor (9.7.9.27.1.2), global to shared. Coordinates outside the tensor read as zero.
DETATTN_DEV void tma_load(uint32_t dst, const CUtensorMap* map, uint32_t bar, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6}], "
      "[%2];" ::"r"(dst),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
DETATTN_DEV void tma_load(uint32_t dst, const CUtensorMap* map, uint32_t bar, int c0, int c1, int c2, int c3,
                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%3,%4,%5,%6}], [%2], %7;" ::"r"(dst),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
      : "memory");
}

// createpolicy (9.7.9.16): data that will not be read again.
DETATTN_DEV uint64_t policy_evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// cp.async.bulk.tensor (9.7.9.27.1.2), shared to global; rows and columns outside the tensor are not written.
DETATTN_DEV void tma_store(const CUtensorMap* map, uint32_t src, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2,%3,%4,%5}], [%1];" ::"l"(
                   reinterpret_cast<uint64_t>(map)),
               "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

// cp.async.bulk (9.7.9.25.3) of consecutive bytes, both addresses and the size multiples of 16.
DETATTN_DEV void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
               "l"(src), "r"(bytes), "r"(bar)
               : "memory");
}
DETATTN_DEV void bulk_store(void* dst, uint32_t src, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes)
               : "memory");
}

// cp.reduce.async.bulk (9.7.9.25.5), fp32 adds. Only for memory whose writers follow each other in a fixed order (an
// add is complete and visible before the next writer starts): the sum is then a chain, not a race.
DETATTN_DEV void bulk_add_in_turn(float* dst, uint32_t src, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst), "r"(src),
               "r"(bytes)
               : "memory");
}

// fence.proxy.async (9.7.13.4) for all state spaces: orders this thread's bulk copies with its ordinary accesses.
DETATTN_DEV void fence_proxy_async_all() { asm volatile("fence.proxy.async;" ::: "memory"); }

// ld.acquire, st.release (9.7.9.8, 9.7.9.12) at the scope of the device.
DETATTN_DEV uint32_t load_acquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DETATTN_DEV void store_release(uint32_t* p, uint32_t v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// cp.async.bulk.commit_group, cp.async.bulk.wait_group (9.7.9.25.4).
DETATTN_DEV void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DETATTN_DEV void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DETATTN_DEV void tma_store_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// bmsk.clamp (9.7.1.27): `count` ones from bit `from` on; none past bit 31.
DETATTN_DEV uint32_t bit_mask(uint32_t from, uint32_t count) {
  uint32_t d;
  asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(d) : "r"(from), "r"(count));
  return d;
}

// ex2.approx.ftz (9.7.3.22): exact at 0 (1) and at -inf (0).
DETATTN_DEV float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// rcp.approx.ftz (9.7.3.13).
DETATTN_DEV float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// cvt.rn to a packed pair (9.7.9.21); `lo` lands in bits 0..15.
template <typename Element>
DETATTN_DEV uint32_t pack(float lo, float hi);
template <>
DETATTN_DEV uint32_t pack<__nv_bfloat16>(float lo, float hi) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
template <>
DETATTN_DEV uint32_t pack<__half>(float lo, float hi) {
  uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}

// ldmatrix (9.7.14.5.15), stmatrix (9.7.14.5.16).
DETATTN_DEV void ldmatrix_x4(uint32_t address, uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(address)
               : "memory");
}
DETATTN_DEV void ldmatrix_x4_trans(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
DETATTN_DEV void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}
DETATTN_DEV void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}
DETATTN_DEV void stmatrix_x2_trans(uint32_t address, uint32_t r0, uint32_t r1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(address), "r"(r0), "r"(r1)
               : "memory");
}

// st.shared.v4 (9.7.9.12) of zeros.
DETATTN_DEV void zero_16_bytes(uint32_t address) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(address), "r"(0) : "memory");
}

// ld.volatile, st.volatile (9.7.9.8, 9.7.9.12): stay in program order, so that the assembler cannot gather many loads
// at the front and run out of registers.
DETATTN_DEV float4 load_in_order(const float4* p) {
  float4 v;
  asm volatile("ld.volatile.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
DETATTN_DEV void store_in_order(float4* p, float4 v) {
  asm volatile("st.volatile.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// A branch on the sign of a value that is never negative (vote, 9.7.13.9): it is never taken, but the assembler cannot
// move the wait for a product above the arithmetic that the value depends on.
DETATTN_DEV void hold_until_ready(float never_negative) {
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.lt.f32 p, %0, 0f00000000;\nvote.sync.any.pred q, p, 0xffffffff;\n"
      "AGAIN:\n@!q bra GO;\nnanosleep.u32 20;\nbra AGAIN;\nGO:\n}" ::"f"(never_negative));
}

}  // namespace detattn::ptx
