#include "instance.cuh"

namespace detattn {
const Instance& instance_d256() { return instance<256>(); }
}  // namespace detattn
