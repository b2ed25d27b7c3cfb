#include "bwd_sm90.cuh"

namespace detattn {
const BwdInstance& bwd_instance_d256() { return bwd_instance<256>(); }
}  // namespace detattn
