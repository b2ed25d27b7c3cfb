// Launchers of the small kernels around the main ones: prepare.cu and combine.cu.
#pragma once

#include "launch.h"

namespace detattn {

cudaError_t launch_scan_mask(const Problem& p, KeySpan* spans, uint32_t* bits, int64_t words, cudaStream_t stream);
// The varlen plan; every array has room for p.sequences + 1 entries.
struct PlanArrays {
  int32_t* order;
  int64_t *tile_begin, *decode_begin, *decode_rows_begin;
  uint32_t* ticket;
};
cudaError_t launch_plan(const FwdArgs& args, const PlanArrays& plan, cudaStream_t stream);
cudaError_t launch_copy_rows(const Rows& src, int64_t batches, int64_t heads, int64_t rows, int columns, void* dst,
                             int sms, cudaStream_t stream);
// combine.cu. most_tiles: at least as many as there are tiles of 8 decoded rows.
cudaError_t launch_combine(const FwdArgs& args, DType dtype, int instance_dim, int64_t most_tiles, int sms,
                           cudaStream_t stream);

}  // namespace detattn
