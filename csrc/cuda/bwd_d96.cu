#include "bwd_sm90.cuh"

namespace detattn {
const BwdInstance& bwd_instance_d96() { return bwd_instance<96>(); }
}  // namespace detattn
