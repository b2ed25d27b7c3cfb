// Compiled with -mavx2 -mfma -mf16c.
#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "isa_avx2.cpp needs -mavx2 -mfma -mf16c"
#endif
#define DETATTN_ISA avx2
#include "instance.h"
