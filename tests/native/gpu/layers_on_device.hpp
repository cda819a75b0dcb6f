// The kernels of layers on a device against those of the CPU; for kernels_on_device.cpp.
#pragma once

#include "random_cases.hpp"

namespace pydist {

void convolution(testing::Random& random);
void tensor_cores(testing::Random& random);
void pooling(testing::Random& random);
void norms(testing::Random& random);

}  // namespace pydist
