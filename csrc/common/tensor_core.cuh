// Tensor cores: products of 16 x 16 and 16 x 8 matrices of 16-bit floats, distributed over a warp and
// accumulated in float.
//
// Lane 4 g + c holds rows g and g + 8, columns 2c, 2c + 1, 2c + 8 and 2c + 9 of A (16 x 16); rows 2c, 2c + 1,
// 2c + 8 and 2c + 9 of column g of B (16 x 8); rows g and g + 8, columns 2c and 2c + 1 of the sum (16 x 8).
#pragma once

#include "launch.cuh"
#include "ptx.cuh"

namespace attn_plugins {

#ifdef __CUDACC__

// Returns true if the code that the current device runs supports multiply_add. The device alone does not
// decide it: a new device also runs old PTX, which lacks the instruction.
inline bool has_tensor_cores() {
  return code_architecture() >= 80;
}

// sum += A B, called by all threads of a warp together. a0 and a1 are the pairs of A in rows g and g + 8; a2
// and a3 are the same rows 8 columns on.
template <class T>
__device__ __forceinline__ void multiply_add(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2,
                                             unsigned a3, unsigned b0, unsigned b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  multiply_matrices<T>(sum, a0, a1, a2, a3, b0, b1);
#else
  __trap();  // the caller did not check has_tensor_cores: fail rather than return a wrong sum
#endif
}

#endif

}  // namespace attn_plugins
