// The parts of kernels_on_device.cpp that lie in files of their own.
#pragma once

#include "random_cases.hpp"

namespace pydist {

void convolution(testing::Random& random);  // layers_on_device.cpp
void tensor_cores(testing::Random& random);
void pooling(testing::Random& random);
void norms(testing::Random& random);

void empties(testing::Random& random);  // empty_on_device.cpp

}  // namespace pydist
