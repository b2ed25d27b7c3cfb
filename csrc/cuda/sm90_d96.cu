#include "instance.cuh"

namespace detattn {
const Instance& instance_d96() { return instance<96>(); }
}  // namespace detattn
