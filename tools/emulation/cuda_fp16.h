// Replaces CUDA's header of this name: the type and conversions that our kernels use, with torch's rounding.
#pragma once
#include <torch/headeronly/util/Half.h>

using __half = c10::Half;

inline float __half2float(__half x) {
  return static_cast<float>(x);
}
inline __half __float2half_rn(float x) {
  return __half(x);
}
