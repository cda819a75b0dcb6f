__global__ void sum(const float* one, const float* other, float* to) {
  to[threadIdx.x] = one[threadIdx.x] + other[threadIdx.x];
}
