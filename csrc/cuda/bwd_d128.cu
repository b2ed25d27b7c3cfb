#include "bwd_sm90.cuh"

namespace detattn {
const BwdInstance& bwd_instance_d128() { return bwd_instance<128>(); }
}  // namespace detattn
