// Transposition of matrices on CPUs, which converts maps between memory formats: in blocks, whose squares of
// one vector's width are transposed in registers.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "common/transpose.h"
#include "common/vectors.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t BLOCK = 64;  // rows and columns: two blocks of float lie in the L1 cache

template <typename In, typename Out>
struct Problem {
  int64_t rows, columns, in_stride[3], addend_stride[3];
  const In* in;
  const Out* addend = nullptr;
  Out* out;
  double scale = 1;

  static int64_t blocks(int64_t size) { return (size + BLOCK - 1) / BLOCK; }
};

#define KERNEL "common/cpu_transpose_kernel.h"
#include "common/each_target.h"

template <typename In, typename Out>
void run(const Tensor& out, const Tensor& in, const std::optional<Tensor>& addend, double scale) {
  Problem<In, Out> p;
  p.rows = in.size(1), p.columns = in.size(2), p.scale = scale;
  p.in = static_cast<const In*>(in.data_ptr()), p.out = static_cast<Out*>(out.data_ptr());
  for (int64_t i = 0; i < 3; ++i) {
    p.in_stride[i] = in.stride(i);
    p.addend_stride[i] = addend.has_value() ? addend->stride(i) : 0;
  }
  if (addend.has_value()) p.addend = static_cast<const Out*>(addend->data_ptr());
  using Range = void (*)(const Problem<In, Out>&, int64_t, int64_t);
  const Range range = BEST(Range, transpose_range);
  const int64_t tasks = in.size(0) * p.blocks(p.rows) * p.blocks(p.columns);
  torch::stable::parallel_for(0, tasks, 8, [&](int64_t begin, int64_t end) { range(p, begin, end); });
}

double number(const Tensor& element) {
  return element.scalar_type() == ScalarType::Double ? *static_cast<const double*>(element.data_ptr())
                                                     : *static_cast<const float*>(element.data_ptr());
}

Tensor transposed_entry(Tensor in, std::optional<Tensor> addend, std::optional<Tensor> scale) {
  const Tensor out = attn_plugins::empty_like_options(in, {in.size(0), in.size(2), in.size(1)});
  auto* typed = in.scalar_type() == ScalarType::Double ? run<double, double> : run<float, float>;
  typed(out, in, addend, scale.has_value() ? number(*scale) : 1);
  return out;
}

}  // namespace

namespace attn_plugins {

void transpose_into(const Tensor& out, const Tensor& in) {
  const bool from_half = in.scalar_type() == ScalarType::BFloat16;
  const bool to_half = out.scalar_type() == ScalarType::BFloat16;
  auto* typed = in.scalar_type() == ScalarType::Double ? run<double, double>
                : from_half && to_half                 ? run<BFloat16, BFloat16>
                : from_half                            ? run<BFloat16, float>
                : to_half                              ? run<float, BFloat16>
                                                       : run<float, float>;
  typed(out, in, std::nullopt, 1);
}

}  // namespace attn_plugins

STABLE_TORCH_LIBRARY_IMPL(attn_plugins, CPU, m) {
  m.impl("transposed_kernel", TORCH_BOX(&transposed_entry));
}
