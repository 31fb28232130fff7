// CUDA's variables for the position of a thread.
#pragma once

struct Index3 {
  unsigned x, y, z;
};
extern Index3 threadIdx, blockIdx, blockDim, gridDim;
