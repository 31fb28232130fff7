// Replaces CUDA's header of this name: the type and conversions that our kernels use, with torch's rounding.
#pragma once
#include <torch/headeronly/util/BFloat16.h>

using __nv_bfloat16 = c10::BFloat16;

inline float __bfloat162float(__nv_bfloat16 x) {
  return static_cast<float>(x);
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  return __nv_bfloat16(x);
}
