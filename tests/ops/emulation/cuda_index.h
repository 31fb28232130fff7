// Where a thread is, as CUDA names it.
#pragma once

struct Index3 {
  unsigned x, y, z;
};
extern Index3 threadIdx, blockIdx, blockDim, gridDim;
