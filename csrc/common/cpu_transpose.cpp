// Transposition of matrices on CPUs, which converts maps between memory formats: in blocks, whose squares of
// one vector's width are transposed in registers.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "common/tensor_ops.h"
#include "common/vectors.h"

namespace {

using attn_plugins::empty_like_options;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t BLOCK = 64;  // rows and columns: two blocks of float lie in the L1 cache

// out (N, columns, rows) = addend + scale * the transposes of `in` (N, rows, columns).
template <typename T>
struct Problem {
  int64_t rows, columns, in_stride[3], addend_stride[3];
  const T *in, *addend = nullptr;
  T* out;
  T scale = 1;

  static int64_t blocks(int64_t size) { return (size + BLOCK - 1) / BLOCK; }
};

#define KERNEL "common/cpu_transpose_kernel.h"
#include "common/each_target.h"

template <typename T>
void run(const Tensor& out, const Tensor& in, const std::optional<Tensor>& addend,
         const std::optional<Tensor>& scale) {
  Problem<T> p;
  p.rows = in.size(1), p.columns = in.size(2);
  p.in = static_cast<const T*>(in.data_ptr()), p.out = static_cast<T*>(out.data_ptr());
  for (int64_t i = 0; i < 3; ++i) {
    p.in_stride[i] = in.stride(i);
    p.addend_stride[i] = addend.has_value() ? addend->stride(i) : 0;
  }
  if (addend.has_value()) p.addend = static_cast<const T*>(addend->data_ptr());
  if (scale.has_value()) p.scale = *static_cast<const T*>(scale->data_ptr());
  using Range = void (*)(const Problem<T>&, int64_t, int64_t);
  const Range range = BEST(Range, transpose_range);
  const int64_t tasks = in.size(0) * p.blocks(p.rows) * p.blocks(p.columns);
  torch::stable::parallel_for(0, tasks, 8, [&](int64_t begin, int64_t end) { range(p, begin, end); });
}

Tensor transposed_entry(Tensor in, std::optional<Tensor> addend, std::optional<Tensor> scale) {
  const Tensor out = empty_like_options(in, {in.size(0), in.size(2), in.size(1)});
  auto* typed = in.scalar_type() == ScalarType::Double ? run<double> : run<float>;
  typed(out, in, addend, scale);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attn_plugins, CPU, m) {
  m.impl("transposed_kernel", TORCH_BOX(&transposed_entry));
}
