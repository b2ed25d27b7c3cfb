#include "instance.cuh"

namespace detattn {
const Instance& instance_d192() { return instance<192>(); }
}  // namespace detattn
