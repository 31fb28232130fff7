// Criss-cross attention's matrix products on the CPU: ATen's take strided batches matrix by matrix, by MKL,
// which reaches AVX2's speed on AMD processors. The arithmetic is in cpu_kernel.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>

#include "common/vectors.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// result = or += scale * left @ right, B * M * N matrices each.
template <typename T>
struct Problem {
  int64_t B, M, N, rows, depth, columns;
  View<T> left, right, result;
  T scale;
  bool add;

  bool packs_left() const { return scale != T(1) || left.stride[4] != 1; }
};

#define KERNEL "criss_cross_attention/cpu_kernel.h"
#include "common/each_target.h"

template <typename T>
void product(const Tensor& result, const Tensor& left, const Tensor& right, bool add, double scale) {
  Problem<T> p;
  p.B = result.size(0), p.M = result.size(1), p.N = result.size(2);
  p.rows = result.size(3), p.columns = result.size(4);
  p.depth = scale == 0 ? 0 : left.size(4);  // as BLAS: factors are not read then, which may be infinite
  p.left = View<T>(left), p.right = View<T>(right), p.result = View<T>(result);
  p.scale = T(scale), p.add = add;
  using Range = void (*)(const Problem<T>&, int64_t, int64_t);
  const Range range = BEST(Range, multiply_range);
  constexpr int64_t few = 65536;  // multiplications that are not worth a thread
  const int64_t work = std::max<int64_t>(1, p.rows * p.depth * p.columns);
  torch::stable::parallel_for(0, p.B * p.M * p.N, (few + work - 1) / work,
                              [&](int64_t begin, int64_t end) { range(p, begin, end); });
}

void product_entry(Tensor result, Tensor left, Tensor right, bool add, double scale) {
  auto* typed = result.scalar_type() == ScalarType::Double ? product<double> : product<float>;
  typed(result, left, right, add, scale);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attn_plugins, CPU, m) {
  m.impl("criss_cross_product_", TORCH_BOX(&product_entry));
}
