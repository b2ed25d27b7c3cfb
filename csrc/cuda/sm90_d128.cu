#include "instance.cuh"

namespace detattn {
const Instance& instance_d128() { return instance<128>(); }
}  // namespace detattn
