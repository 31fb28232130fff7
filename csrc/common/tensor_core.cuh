// Tensor cores: products of 16 x 16 and 16 x 8 matrices of half numbers, spread over a warp, summed in float.
//
// Lane 4 g + c holds of A (16 x 16) rows g and g + 8, columns 2c, 2c + 1, 2c + 8 and 2c + 9; of B (16 x 8)
// those rows of column g; of the sum (16 x 8) rows g and g + 8, columns 2c and 2c + 1.
#pragma once

#include "launch.cuh"
#include "vector.cuh"

namespace attn_plugins {

#ifdef __CUDACC__

// True where the current device runs code that can multiply_add. The device alone cannot tell: a new one runs
// old PTX too, in which the instruction is missing.
inline bool has_tensor_cores() {
  return code_architecture() >= 80;
}

// sum += A B (volatile: it must not move to where not all of a warp goes); A's pairs: row g, row g + 8, then
// the same of columns + 8. All threads of a warp together.
template <class T>
__device__ __forceinline__ void multiply_add(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2,
                                             unsigned a3, unsigned b0, unsigned b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
#else
  __trap();  // has_tensor_cores was not asked: an error, not a wrong sum
#endif
}

#endif

}  // namespace attn_plugins
