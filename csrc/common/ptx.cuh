// Instructions that CUDA C++ has no words for, all inline assembly of the kernels. Where kernels run on a
// CPU, tools/emulation/ptx.cuh takes the place of this header.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace attn_plugins {

// Keeps x in registers from here on: the compiler may neither move what computes it behind the code that
// follows nor compute it again in each turn of a loop.
template <class T>
__device__ __forceinline__ void keep(T& x) {
  asm volatile("" : "+r"(x));
}
__device__ __forceinline__ void keep(unsigned short& x) {
  asm volatile("" : "+h"(x));
}
__device__ __forceinline__ void keep(uint2& v) {
  asm volatile("" : "+r"(v.x), "+r"(v.y));
}
__device__ __forceinline__ void keep(uint4& v) {
  asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
}
// A pointer in a pair of registers: its halves may otherwise end up apart, so that each address takes more
// instructions.
template <class T>
__device__ __forceinline__ void keep(T*& x) {
  asm volatile("" : "+l"(x));
}

// x + a b, in one instruction, which the compiler does not always see.
__device__ __forceinline__ uintptr_t add_wide_product(uintptr_t x, int a, int b) {
  asm("mad.wide.s32 %0, %1, %2, %0;" : "+l"(x) : "r"(a), "r"(b));
  return x;
}

// 2^x, approximately; subnormal numbers become 0.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

// Rounds two numbers to T and packs them, the first one into the lower half.
template <class T>
__device__ __forceinline__ unsigned round_pair(float first, float second) {
  unsigned pair;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  }
  return pair;
}

// sum += A B; see tensor_core.cuh. The asm is volatile so that the compiler does not move it into a branch
// that only part of the warp takes.
template <class T>
__device__ __forceinline__ void multiply_matrices(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2,
                                                  unsigned a3, unsigned b0, unsigned b1) {
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
}

#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// to[i] += x[i], as one request. There is no memory clobber: no kernel here reads what it adds to, so loads
// may be reordered around it.
__device__ __forceinline__ void add_two(float* to, float x0, float x1) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x0), "f"(x1));
}
__device__ __forceinline__ void add_four(float* to, float x0, float x1, float x2, float x3) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x0), "f"(x1),
               "f"(x2), "f"(x3));
}

#endif

}  // namespace attn_plugins
