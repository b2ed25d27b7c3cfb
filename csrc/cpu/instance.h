// The kernels of one instruction set, as the table that attention.cpp picks from. Each isa_*.cpp includes this once,
// with DETATTN_ISA set to the namespace that keeps its code apart from the others'.
#pragma once

#include "backward.h"
#include "forward.h"

namespace detattn::DETATTN_ISA {

template <class E>
cpu::Kernels kernels_of() {
  return {forward_scratch<E>,  forward_tile<E>,  forward_unowned<E>,  zero_rows<E>,
          backward_scratch<E>, kGradQueries,     kGradKeys,           backward_stats<E>,
          backward_fused<E>,   backward_keys<E>, backward_queries<E>, sum_dsinks<E>};
}

cpu::Kernels kernels(DType dtype) {
  switch (dtype) {
    case DType::kHalf:
      return kernels_of<Half>();
    case DType::kBFloat16:
      return kernels_of<BFloat16>();
    case DType::kFloat:
      return kernels_of<float>();
    case DType::kDouble:
      return kernels_of<double>();
  }
  __builtin_unreachable();
}

}  // namespace detattn::DETATTN_ISA
