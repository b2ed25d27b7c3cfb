// Warpgroup matrix products (PTX ISA 9.7.15, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions").
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace detattn::ptx {

// Matrix descriptor for 128-byte swizzle (PTX ISA 9.7.15.5.1.2.2). Tiles start on 1024 bytes; a start moved by 32, 64
// or 96 bytes inside the swizzle row addresses the next k16 step of a K-major tile. Byte offsets: `leading`, `stride`.
__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (static_cast<uint64_t>(leading >> 4) << 16) |
         (static_cast<uint64_t>(stride >> 4) << 32) | (1ull << 62);
}

// wgmma.fence (9.7.15.7.1): registers and shared memory written before it are seen by the products after it.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma.commit_group (9.7.15.7.2).
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

#define DETATTN_R0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define DETATTN_R1 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define DETATTN_R2 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define DETATTN_R3 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define DETATTN_R4 "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define DETATTN_R5 "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define DETATTN_R6 "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define DETATTN_R7 "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define DETATTN_REGS_4 "%0,%1,%2,%3"
#define DETATTN_REGS_16 DETATTN_R0
#define DETATTN_REGS_32 DETATTN_R0 "," DETATTN_R1
#define DETATTN_REGS_48 DETATTN_R0 "," DETATTN_R1 "," DETATTN_R2
#define DETATTN_REGS_64 DETATTN_R0 "," DETATTN_R1 "," DETATTN_R2 "," DETATTN_R3
#define DETATTN_REGS_96 DETATTN_R0 "," DETATTN_R1 "," DETATTN_R2 "," DETATTN_R3 "," DETATTN_R4 "," DETATTN_R5
#define DETATTN_REGS_128 \
  DETATTN_R0 "," DETATTN_R1 "," DETATTN_R2 "," DETATTN_R3 "," DETATTN_R4 "," DETATTN_R5 "," DETATTN_R6 "," DETATTN_R7
#define DETATTN_ACC_4(d, o) "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3])
#define DETATTN_ACC_16(d, o) \
  DETATTN_ACC_4(d, o), DETATTN_ACC_4(d, o + 4), DETATTN_ACC_4(d, o + 8), DETATTN_ACC_4(d, o + 12)
#define DETATTN_ACC_32(d, o) DETATTN_ACC_16(d, o), DETATTN_ACC_16(d, o + 16)
#define DETATTN_ACC_48(d, o) DETATTN_ACC_32(d, o), DETATTN_ACC_16(d, o + 32)
#define DETATTN_ACC_64(d, o) DETATTN_ACC_32(d, o), DETATTN_ACC_32(d, o + 32)
#define DETATTN_ACC_96(d, o) DETATTN_ACC_64(d, o), DETATTN_ACC_32(d, o + 64)
#define DETATTN_ACC_128(d, o) DETATTN_ACC_64(d, o), DETATTN_ACC_64(d, o + 64)

// wgmma.wait_group (9.7.15.7.3): at most kPending groups stay in flight. The accumulators are tied to the wait so that
// the compiler cannot move their uses above it.
#define DETATTN_WAIT(REGS)                                                                                           \
  template <int kPending>                                                                                            \
  __device__ __forceinline__ void wgmma_wait(float (&d)[REGS]) {                                                     \
    asm volatile("wgmma.wait_group.sync.aligned %" #REGS ";" : DETATTN_ACC_##REGS(d, 0) : "n"(kPending) : "memory"); \
  }
DETATTN_WAIT(4)
DETATTN_WAIT(16)
DETATTN_WAIT(32)
DETATTN_WAIT(48)
DETATTN_WAIT(64)
DETATTN_WAIT(96)
DETATTN_WAIT(128)
#undef DETATTN_WAIT

// wgmma.mma_async (9.7.15.5.2), d[64 x kN] (+)= A * B over k = 16, fp32 accumulators. `accumulate` 0 starts from zero.
// rs: A in registers; ss: A in shared memory. kTransA/kTransB: the operand is M-/N-major in shared memory.
template <typename Element, int kN>
struct Mma;

#define DETATTN_MMA(N, REGS, ELEMENT, TYPE, I0, I1, I2, I3, IB, IACC, ITB)                                          \
  template <>                                                                                                       \
  struct Mma<ELEMENT, N> {                                                                                          \
    template <int kTransB>                                                                                          \
    static __device__ __forceinline__ void rs(float (&d)[REGS], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, \
                                              uint64_t b, int accumulate) {                                         \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #IACC                                                       \
                   ", 0;\n"                                                                                         \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" DETATTN_REGS_##REGS         \
                   "}, {%" #I0 ",%" #I1 ",%" #I2 ",%" #I3 "}, %" #IB ", p, 1, 1, %" #ITB ";\n}\n"                   \
                   : DETATTN_ACC_##REGS(d, 0)                                                                       \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate), "n"(kTransB));                    \
    }                                                                                                               \
    template <int kTransA, int kTransB>                                                                             \
    static __device__ __forceinline__ void ss(float (&d)[REGS], uint64_t a, uint64_t b, int accumulate) {           \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I2                                                         \
                   ", 0;\n"                                                                                         \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" DETATTN_REGS_##REGS         \
                   "}, %" #I0 ", %" #I1 ", p, 1, 1, %" #I3 ", %" #IB ";\n}\n"                                       \
                   : DETATTN_ACC_##REGS(d, 0)                                                                       \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(kTransA), "n"(kTransB));                                  \
    }                                                                                                               \
  };
DETATTN_MMA(8, 4, __nv_bfloat16, "bf16", 4, 5, 6, 7, 8, 9, 10)
DETATTN_MMA(8, 4, __half, "f16", 4, 5, 6, 7, 8, 9, 10)
DETATTN_MMA(32, 16, __nv_bfloat16, "bf16", 16, 17, 18, 19, 20, 21, 22)
DETATTN_MMA(32, 16, __half, "f16", 16, 17, 18, 19, 20, 21, 22)
DETATTN_MMA(64, 32, __nv_bfloat16, "bf16", 32, 33, 34, 35, 36, 37, 38)
DETATTN_MMA(64, 32, __half, "f16", 32, 33, 34, 35, 36, 37, 38)
DETATTN_MMA(96, 48, __nv_bfloat16, "bf16", 48, 49, 50, 51, 52, 53, 54)
DETATTN_MMA(96, 48, __half, "f16", 48, 49, 50, 51, 52, 53, 54)
DETATTN_MMA(128, 64, __nv_bfloat16, "bf16", 64, 65, 66, 67, 68, 69, 70)
DETATTN_MMA(128, 64, __half, "f16", 64, 65, 66, 67, 68, 69, 70)
DETATTN_MMA(192, 96, __nv_bfloat16, "bf16", 96, 97, 98, 99, 100, 101, 102)
DETATTN_MMA(192, 96, __half, "f16", 96, 97, 98, 99, 100, 101, 102)
DETATTN_MMA(256, 128, __nv_bfloat16, "bf16", 128, 129, 130, 131, 132, 133, 134)
DETATTN_MMA(256, 128, __half, "f16", 128, 129, 130, 131, 132, 133, 134)
#undef DETATTN_MMA

// mma (9.7.14.5.14), d[16 x 8] += A * B over k = 16: the step of a warp. The same chain of steps has the same bits as
// wgmma's.
template <typename Element>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
#define DETATTN_WARP_MMA(ELEMENT, TYPE)                                                                     \
  template <>                                                                                               \
  __device__ __forceinline__ void mma_m16n8k16<ELEMENT>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, \
                                                        uint32_t b1) {                                      \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                     \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                               \
                 : DETATTN_ACC_4(d, 0)                                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                           \
  }
DETATTN_WARP_MMA(__nv_bfloat16, "bf16")
DETATTN_WARP_MMA(__half, "f16")
#undef DETATTN_WARP_MMA
#undef DETATTN_R0
#undef DETATTN_R1
#undef DETATTN_R2
#undef DETATTN_R3
#undef DETATTN_R4
#undef DETATTN_R5
#undef DETATTN_R6
#undef DETATTN_R7
#undef DETATTN_REGS_4
#undef DETATTN_REGS_32
#undef DETATTN_REGS_48
#undef DETATTN_REGS_64
#undef DETATTN_REGS_96
#undef DETATTN_REGS_128
#undef DETATTN_ACC_4
#undef DETATTN_ACC_16
#undef DETATTN_ACC_32
#undef DETATTN_ACC_48
#undef DETATTN_ACC_64
#undef DETATTN_ACC_96
#undef DETATTN_ACC_128

}  // namespace detattn::ptx
