// Transposition of matrices on CPUs (cpu_transpose.cpp).
#pragma once

#include "tensor_ops.h"

namespace attn_plugins {

// Writes the transposes of `in`, (N, rows, columns) of any strides, to the contiguous `out`. Both are of
// double, or each of float or bfloat16.
void transpose_into(const Tensor& out, const Tensor& in);

}  // namespace attn_plugins
