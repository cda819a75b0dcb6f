// Keeps more values at once than it has registers.
constexpr int kValues = 96;

__global__ void __launch_bounds__(1024, 2) many_live_values(const float* from, float* to) {
  float values[kValues];
  for (int i = 0; i < kValues; ++i) values[i] = from[i * blockDim.x + threadIdx.x];
  for (int i = 0; i < kValues; ++i) {
    to[i * blockDim.x + threadIdx.x] = values[kValues - 1 - i] * values[i];
  }
}
