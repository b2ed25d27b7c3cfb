// Launchers of the small kernels of prepare.cu.
#pragma once

#include "launch.h"

namespace detattn {

cudaError_t launch_scan_mask(const FwdParams& p, KeySpan* spans, uint32_t* bits, int64_t words, cudaStream_t stream);
cudaError_t launch_plan(const FwdArgs& args, int32_t* order, int64_t* tile_begin, uint32_t* ticket,
                        cudaStream_t stream);
cudaError_t launch_copy_rows(const Rows& src, int64_t batches, int64_t heads, int64_t rows, int columns, void* dst,
                             int sms, cudaStream_t stream);

}  // namespace detattn
