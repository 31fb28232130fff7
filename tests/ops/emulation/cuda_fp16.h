// Replaces CUDA's header of this name: the type and conversions that our kernels use, with torch's rounding.
#pragma once
#include <torch/headeronly/util/Half.h>

using __half = c10::Half;
using half = __half;
struct alignas(4) __half2 {
  __half x, y;
};
using half2 = __half2;

inline float __half2float(__half x) {
  return static_cast<float>(x);
}
inline __half __float2half_rn(float x) {
  return __half(x);
}
inline __half __float2half(float x) {
  return __half(x);
}
inline float2 __half22float2(__half2 v) {
  return {static_cast<float>(v.x), static_cast<float>(v.y)};
}
inline __half2 __floats2half2_rn(float x, float y) {
  return {__half(x), __half(y)};
}
