#include "bwd_sm90.cuh"

namespace detattn {
const BwdInstance& bwd_instance_d64() { return bwd_instance<64>(); }
}  // namespace detattn
