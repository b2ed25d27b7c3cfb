// Compiled with -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c.
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) || !defined(__AVX512DQ__) || \
    !defined(__FMA__) || !defined(__F16C__)
#error "isa_avx512.cpp needs -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c"
#endif
// g++ 12 warns of its own _mm512_undefined_ps (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#define DETATTN_ISA avx512
#include "instance.h"
