// Writing merged rows: the same few lines for every kernel that ends a merge.
#pragma once

#include "problem.cuh"
#include "softmax.cuh"

namespace detattn {

// Four columns of one row, from its merged output and sum.
template <typename Element>
DETATTN_DEV void write_columns(const FwdArgs& p, const SequenceView& view, int head, int query, int column, float4 o,
                               float inv) {
  if (column >= p.head_dim) return;
  const uint32_t words[2] = {ptx::pack<Element>(num::finish(o.x, inv), num::finish(o.y, inv)),
                             ptx::pack<Element>(num::finish(o.z, inv), num::finish(o.w, inv))};
  Element* const at = static_cast<Element*>(p.out_rows.data) + view.q_batch * p.out_rows.batch +
                      head * p.out_rows.head + (static_cast<int64_t>(view.q_row) + query) * p.out_rows.row + column;
  if (p.out_map_ok) {
    *reinterpret_cast<uint2*>(at) = make_uint2(words[0], words[1]);
  } else {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      reinterpret_cast<uint16_t*>(at)[k] = static_cast<uint16_t>(words[k >> 1] >> (16 * (k & 1)));
    }
  }
}

DETATTN_DEV void write_lse(const FwdArgs& p, const SequenceView& view, int head, int query, float m, float l) {
  const num::Scaling scaling{p.kappa, p.scale, p.cap};
  static_cast<float*>(p.lse.data)[view.q_batch * p.lse.batch + head * p.lse.head +
                                  (static_cast<int64_t>(view.q_row) + query) * p.lse.row] = num::lse(m, l, scaling);
}

}  // namespace detattn
