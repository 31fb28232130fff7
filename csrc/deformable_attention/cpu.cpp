// Deformable attention on the CPU, without materialising samples. This file holds the entry points and the
// choice of the instruction set; the arithmetic is in cpu_kernel.h.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <vector>

#include "common/vectors.h"
#include "deformable_attention.h"

namespace {

using torch::headeronly::ScalarType;

constexpr int64_t BLOCK = 256;  // queries per task of the forward

// For every point of a query, the size of its map and the map's first row among the values.
template <typename T>
struct Levels {
  std::vector<T> height, width;
  std::vector<int64_t> start;

  Levels(const std::vector<int64_t>& shapes, const std::vector<int64_t>& points) {
    int64_t first = 0;
    for (size_t level = 0; level < points.size(); ++level) {
      const int64_t rows = shapes[2 * level], columns = shapes[2 * level + 1];
      height.insert(height.end(), points[level], T(rows));
      width.insert(width.end(), points[level], T(columns));
      start.insert(start.end(), points[level], first);
      first += rows * columns;
    }
  }
};

// Operands of one call; absent ones are null. All except the value are contiguous (B, Q, M, ...). Values and
// outputs are stored as E, locations and weights as L, and T computes.
template <typename T, typename E, typename L>
struct Problem {
  View<E> value;  // (B, S, M, d)
  const L *locations, *weights;
  Levels<T> levels;
  int64_t B, S, M, d, Q, P, blocks;
  // With several heads, a head's rows are not contiguous; gathering from them then costs more than packing
  // them once, if there are enough samples.
  bool packs;
  bool propagates_nan;  // a location that is not finite reads NaN, as by grid_sample on CPUs, instead of 0
  E* output = nullptr;
  const E* grad_output = nullptr;
  T* grad_value = nullptr;
  L *grad_locations = nullptr, *grad_weights = nullptr;

  Problem(const Tensor& values, const Tensor& locations, const Tensor& weights,
          const std::vector<int64_t>& shapes, const std::vector<int64_t>& points, bool propagates_nan_)
      : value(values),
        locations(static_cast<const L*>(locations.data_ptr())),
        weights(static_cast<const L*>(weights.data_ptr())),
        levels(shapes, points),
        B(values.size(0)),
        S(values.size(1)),
        M(values.size(2)),
        d(values.size(3)),
        Q(weights.size(1)),
        P(weights.size(3)),
        blocks((Q + BLOCK - 1) / BLOCK),
        packs(M > 1 && Q * P >= 4 * S),
        propagates_nan(propagates_nan_) {}
};

#define KERNEL "deformable_attention/cpu_kernel.h"
#include "common/each_target.h"

template <typename T, typename E, typename L>
void forward(const Tensor& value, const Tensor& locations, const Tensor& weights, const Tensor& output,
             const std::vector<int64_t>& shapes, const std::vector<int64_t>& points, bool propagates_nan) {
  Problem<T, E, L> p(value, locations, weights, shapes, points, propagates_nan);
  p.output = static_cast<E*>(output.data_ptr());
  using Range = void (*)(const Problem<T, E, L>&, int64_t, int64_t);
  const Range range = BEST(Range, forward_range);
  torch::stable::parallel_for(0, p.B * p.M * p.blocks, 1,
                              [&](int64_t begin, int64_t end) { range(p, begin, end); });
}

template <typename T>
T* data_or_null(const Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.data_ptr()) : nullptr;
}

template <typename T, typename E, typename L>
void backward(const Tensor& grad_output, const Tensor& value, const Tensor& locations, const Tensor& weights,
              const Tensor& grad_value, const Tensor& grad_locations, const Tensor& grad_weights,
              const std::vector<int64_t>& shapes, const std::vector<int64_t>& points, bool propagates_nan) {
  Problem<T, E, L> p(value, locations, weights, shapes, points, propagates_nan);
  p.grad_output = static_cast<const E*>(grad_output.data_ptr());
  p.grad_value = data_or_null<T>(grad_value);
  p.grad_locations = data_or_null<L>(grad_locations);
  p.grad_weights = data_or_null<L>(grad_weights);
  using Range = void (*)(const Problem<T, E, L>&, int64_t, int64_t);
  const Range range = BEST(Range, backward_range);
  torch::stable::parallel_for(0, p.B * p.M, 1, [&](int64_t begin, int64_t end) { range(p, begin, end); });
}

// Returns the function for values and locations of these dtypes.
#define FOR_DTYPES(function, values, locations)                          \
  (values == ScalarType::Double     ? ::function<double, double, double> \
   : values == ScalarType::Float    ? ::function<float, float, float>    \
   : locations == ScalarType::Float ? ::function<float, BFloat16, float> \
                                    : ::function<float, BFloat16, BFloat16>)

struct CpuKernels {
  static ScalarType compute_type(const Tensor& value) {
    return value.scalar_type() == ScalarType::BFloat16 ? ScalarType::BFloat16 : attn_plugins::sum_type(value);
  }
  static Tensor readable(const Tensor& value) {
    return value.stride(3) == 1 ? value : attn_plugins::as_contiguous(value);
  }
  static Tensor sums_of(const Tensor& value) {
    return attn_plugins::empty_like_options(value, attn_plugins::sizes_of(value),
                                            attn_plugins::sum_type(value));
  }

  template <class... Arguments>
  static void forward(const Tensor& value, const Tensor& locations, const Arguments&... arguments) {
    FOR_DTYPES(forward, value.scalar_type(), locations.scalar_type())(value, locations, arguments...);
  }

  template <class... Arguments>
  static void backward(const Tensor& grad_output, const Tensor& value, const Tensor& locations,
                       const Arguments&... arguments) {
    FOR_DTYPES(backward, value.scalar_type(), locations.scalar_type())
    (grad_output, value, locations, arguments...);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attn_plugins, CPU, m) {
  using namespace attn_plugins;
  m.impl("deformable_attention_forward_kernel", TORCH_BOX(&deformable_attention_driver<CpuKernels>));
  m.impl("deformable_attention_backward_kernel",
         TORCH_BOX(&deformable_attention_backward_driver<CpuKernels>));
}
