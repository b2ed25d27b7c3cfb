#include "instance.cuh"

namespace detattn {
const Instance& instance_d64() { return instance<64>(); }
}  // namespace detattn
