// An array that is indexed by a variable has no place in registers.
__global__ void indexed_array(const float* from, float* to, const int* at) {
  float values[64];
  for (int i = 0; i < 64; ++i) values[i] = from[i];
  for (int i = 0; i < 64; ++i) values[at[i]] += from[64 + i];
  to[threadIdx.x] = values[at[threadIdx.x]];
}
