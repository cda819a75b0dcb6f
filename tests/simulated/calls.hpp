// torch's calls on tensors of the simulated device.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace simulated {

// Runs a call on CPU tensors of the same memory. What it returns lies on the device again.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace simulated
