// The two fused passes of global attention over one chunk of queries. The dot products around them are
// batched GEMMs of the library; what is left, and would cost a walk over the chunk per torch operator, is
//   softmax:  s = content + row + column + key  ->  p = exp(s - max) / sum, log-sum-exp
//   backward: dp -> ds = p * (dp - sum(p * dp)), and ds summed over rows, columns and queries.
// A chunk is (B, M, Hc, Wc, Hk * Wk), contiguous; every logit is a strided view of it (stride 0 = broadcast).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "simd.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Partial results per vector lane: what lets the compiler vectorise a sum or a maximum without -ffast-math.
constexpr int64_t LANES = 32;

// exp(x) for x <= 0 in plain arithmetic, so that a loop over it vectorises: 2^n * e^r, |r| <= ln(2) / 2, with
// a Taylor polynomial whose error is below one rounding. Below LOWEST the result is an exact 0; NaN stays NaN.
template <typename T>
struct Exp;

template <>
struct Exp<float> {
  static constexpr float LOWEST = -87.0f;
  static ATTN_INLINE float of(float x) {
    const float clamped = x < LOWEST ? LOWEST : x;
    const float shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: n lands in the low bits
    const float n = shifted - 12582912.0f;
    float r = clamped - n * 0.693145752f;
    r = r - n * 1.42860677e-6f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const float power = std::bit_cast<float>((std::bit_cast<int32_t>(shifted) + 127) << 23);
    return x < LOWEST ? 0.0f : p * power;
  }
};

template <>
struct Exp<double> {
  static constexpr double LOWEST = -708.0;
  static ATTN_INLINE double of(double x) {
    const double clamped = x < LOWEST ? LOWEST : x;
    const double shifted = clamped * 1.4426950408889634 + 6755399441055744.0;  // 1.5 * 2^52
    const double n = shifted - 6755399441055744.0;
    double r = clamped - n * 6.93147180369123816490e-01;
    r = r - n * 1.90821492927058770002e-10;
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    const double power = std::bit_cast<double>((std::bit_cast<int64_t>(shifted) + 1023) << 52);
    return x < LOWEST ? 0.0 : p * power;
  }
};

// A (B, M, Hc, Wc, ·) view, or nothing.
template <typename T>
struct View {
  T* data = nullptr;
  int64_t stride[5] = {0, 0, 0, 0, 0};

  View() = default;
  explicit View(const Tensor& tensor) : data(static_cast<T*>(tensor.data_ptr())) {
    for (int64_t i = 0; i < tensor.dim(); ++i) stride[i] = tensor.stride(i);
  }
  explicit View(const std::optional<Tensor>& tensor) {
    if (tensor.has_value()) *this = View(*tensor);
  }
  ATTN_INLINE T* at(int64_t b, int64_t m, int64_t h, int64_t w) const {
    return data + b * stride[0] + m * stride[1] + h * stride[2] + w * stride[3];
  }
};

// Adds what there is of row, column and key logits to one query's content logits; returns the maximum.
template <typename T>
ATTN_INLINE T add_logits(T* __restrict s, int64_t Hk, int64_t Wk, bool content, const T* __restrict row,
                    int64_t row_stride, const T* __restrict column, const T* __restrict key) {
  T lane[LANES];
  for (int64_t l = 0; l < LANES; ++l) lane[l] = -std::numeric_limits<T>::infinity();
  T rest = -std::numeric_limits<T>::infinity();
  for (int64_t h = 0; h < Hk; ++h) {
    T* __restrict line = s + h * Wk;
    const T base = row ? row[h * row_stride] : T(0);
    if (key) {
      const T* __restrict key_line = key + h * Wk;
      if (content) {
        for (int64_t w = 0; w < Wk; ++w) line[w] += column[w] + key_line[w] + base;
      } else {
        for (int64_t w = 0; w < Wk; ++w) line[w] = column[w] + key_line[w] + base;
      }
    } else if (content) {
      for (int64_t w = 0; w < Wk; ++w) line[w] += column[w] + base;
    } else {
      for (int64_t w = 0; w < Wk; ++w) line[w] = column[w] + base;
    }
  }
  const int64_t keys = Hk * Wk;
  int64_t i = 0;
  for (; i + LANES <= keys; i += LANES)
    for (int64_t l = 0; l < LANES; ++l) lane[l] = s[i + l] > lane[l] ? s[i + l] : lane[l];
  for (; i < keys; ++i) rest = s[i] > rest ? s[i] : rest;
  for (int64_t l = 0; l < LANES; ++l) rest = lane[l] > rest ? lane[l] : rest;
  return rest;
}

template <typename T>
ATTN_INLINE T exponentials(T* __restrict s, int64_t keys, T shift) {
  T lane[LANES] = {};
  int64_t i = 0;
  for (; i + LANES <= keys; i += LANES)
    for (int64_t l = 0; l < LANES; ++l) {
      const T p = Exp<T>::of(s[i + l] - shift);
      s[i + l] = p;
      lane[l] += p;
    }
  T sum = 0;
  for (; i < keys; ++i) sum += (s[i] = Exp<T>::of(s[i] - shift));
  for (int64_t l = 0; l < LANES; ++l) sum += lane[l];
  return sum;
}

template <typename T>
struct SoftmaxArguments {
  int64_t B, M, H, W, Hk, Wk;
  T* logits;
  View<const T> row, column, key;
  View<T> log_sum_exp;
  bool content, known;  // known: the log-sum-exp is given, only the probabilities are wanted
};

template <typename T>
ATTN_INLINE void softmax_queries(const SoftmaxArguments<T>& a, int64_t begin, int64_t end, T* scratch) {
  const int64_t keys = a.Hk * a.Wk;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t w = i % a.W, h = i / a.W % a.H, m = i / (a.W * a.H) % a.M, b = i / (a.W * a.H * a.M);
    T* s = a.logits + i * keys;
    const T* column = scratch;
    if (a.column.data) {
      const T* from = a.column.at(b, m, h, w);
      if (a.column.stride[4] == 1) {
        column = from;
      } else {
        for (int64_t k = 0; k < a.Wk; ++k) scratch[k] = from[k * a.column.stride[4]];
      }
    }
    const T* row = a.row.data ? a.row.at(b, m, h, w) : nullptr;
    const T* key = a.key.data ? a.key.data + b * a.key.stride[0] + m * a.key.stride[1] : nullptr;
    const T top = add_logits(s, a.Hk, a.Wk, a.content, row, a.row.stride[4], column, key);
    T* stored = a.log_sum_exp.at(b, m, h, w);
    if (a.known) {
      exponentials(s, keys, *stored);
      continue;
    }
    // All keys masked: no probability anywhere, and a log-sum-exp that repeats this in the backward.
    const bool masked = top == -std::numeric_limits<T>::infinity();
    const T sum = exponentials(s, keys, masked ? T(0) : top);
    const T scale = masked ? T(0) : T(1) / sum;
    for (int64_t k = 0; k < keys; ++k) s[k] *= scale;
    *stored = masked ? std::numeric_limits<T>::infinity() : top + std::log(sum);
  }
}

ATTN_TARGETS void softmax_range(const SoftmaxArguments<float>& a, int64_t begin, int64_t end, float* scratch) {
  softmax_queries(a, begin, end, scratch);
}
ATTN_TARGETS void softmax_range(const SoftmaxArguments<double>& a, int64_t begin, int64_t end, double* scratch) {
  softmax_queries(a, begin, end, scratch);
}

template <typename T>
void softmax(Tensor& logits, const std::optional<Tensor>& row, const std::optional<Tensor>& column,
             const std::optional<Tensor>& key, Tensor& log_sum_exp, int64_t Hk, bool content, bool known) {
  SoftmaxArguments<T> a;
  a.B = logits.size(0), a.M = logits.size(1), a.H = logits.size(2), a.W = logits.size(3);
  a.Hk = Hk, a.Wk = logits.size(4) / Hk;
  a.logits = static_cast<T*>(logits.data_ptr());
  a.row = View<const T>(row), a.column = View<const T>(column), a.key = View<const T>(key);
  a.log_sum_exp = View<T>(log_sum_exp);
  a.content = content, a.known = known;
  torch::stable::parallel_for(0, a.B * a.M * a.H * a.W, 8, [&](int64_t begin, int64_t end) {
    std::vector<T> scratch(a.Wk, T(0));  // one query's column logits where they are strided or absent
    softmax_range(a, begin, end, scratch.data());
  });
}

template <typename T>
struct GradientArguments {
  int64_t B, M, H, W, Hk, Wk, slots;
  const T* probabilities;
  T* gradient;
  View<T> row, column;
  T* key;  // (B, M, slots, Hk * Wk) partial sums over the queries, added to
};

template <typename T>
ATTN_INLINE T dot(const T* __restrict p, const T* __restrict g, int64_t keys) {
  T lane[LANES] = {};
  int64_t i = 0;
  for (; i + LANES <= keys; i += LANES)
    for (int64_t l = 0; l < LANES; ++l) lane[l] += p[i + l] * g[i + l];
  T sum = 0;
  for (; i < keys; ++i) sum += p[i] * g[i];
  for (int64_t l = 0; l < LANES; ++l) sum += lane[l];
  return sum;
}

// Task t = (b, m, slot): all queries h, w of one head whose number falls into the slot, in order.
template <typename T>
ATTN_INLINE void gradient_tasks(const GradientArguments<T>& a, int64_t begin, int64_t end, T* scratch) {
  const int64_t keys = a.Hk * a.Wk, queries = a.H * a.W;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t slot = task % a.slots, m = task / a.slots % a.M, b = task / (a.slots * a.M);
    T* key = a.key ? a.key + task * keys : nullptr;
    for (int64_t q = queries * slot / a.slots; q < queries * (slot + 1) / a.slots; ++q) {
      const int64_t h = q / a.W, w = q % a.W, offset = ((b * a.M + m) * queries + q) * keys;
      const T* __restrict p = a.probabilities + offset;
      T* __restrict g = a.gradient + offset;
      const T mean = dot(p, g, keys);
      for (int64_t k = 0; k < keys; ++k) g[k] = p[k] * (g[k] - mean);
      if (key)
        for (int64_t k = 0; k < keys; ++k) key[k] += g[k];
      if (a.row.data) {
        T* row = a.row.at(b, m, h, w);
        for (int64_t y = 0; y < a.Hk; ++y) {
          T lane[LANES] = {};
          const T* line = g + y * a.Wk;
          int64_t x = 0;
          for (; x + LANES <= a.Wk; x += LANES)
            for (int64_t l = 0; l < LANES; ++l) lane[l] += line[x + l];
          T sum = 0;
          for (; x < a.Wk; ++x) sum += line[x];
          if (a.Wk >= LANES)
            for (int64_t l = 0; l < LANES; ++l) sum += lane[l];
          row[y * a.row.stride[4]] = sum;
        }
      }
      if (a.column.data) {
        for (int64_t x = 0; x < a.Wk; ++x) scratch[x] = g[x];
        for (int64_t y = 1; y < a.Hk; ++y)
          for (int64_t x = 0; x < a.Wk; ++x) scratch[x] += g[y * a.Wk + x];
        T* column = a.column.at(b, m, h, w);
        for (int64_t x = 0; x < a.Wk; ++x) column[x * a.column.stride[4]] = scratch[x];
      }
    }
  }
}

ATTN_TARGETS void gradient_range(const GradientArguments<float>& a, int64_t begin, int64_t end, float* scratch) {
  gradient_tasks(a, begin, end, scratch);
}
ATTN_TARGETS void gradient_range(const GradientArguments<double>& a, int64_t begin, int64_t end, double* scratch) {
  gradient_tasks(a, begin, end, scratch);
}

template <typename T>
void logit_gradient(const Tensor& probabilities, Tensor& gradient, const std::optional<Tensor>& row,
                    const std::optional<Tensor>& column, const std::optional<Tensor>& key, int64_t Hk,
                    int64_t slots) {
  GradientArguments<T> a;
  a.B = gradient.size(0), a.M = gradient.size(1), a.H = gradient.size(2), a.W = gradient.size(3);
  a.Hk = Hk, a.Wk = gradient.size(4) / Hk, a.slots = slots;
  a.probabilities = static_cast<const T*>(probabilities.data_ptr());
  a.gradient = static_cast<T*>(gradient.data_ptr());
  a.row = View<T>(row), a.column = View<T>(column);
  a.key = key.has_value() ? static_cast<T*>(key->data_ptr()) : nullptr;
  torch::stable::parallel_for(0, a.B * a.M * slots, 1, [&](int64_t begin, int64_t end) {
    std::vector<T> scratch(a.Wk);
    gradient_range(a, begin, end, scratch.data());
  });
}

void softmax_entry(Tensor logits, std::optional<Tensor> row, std::optional<Tensor> column,
                   std::optional<Tensor> key, Tensor log_sum_exp, int64_t key_rows, bool content, bool known) {
  if (logits.scalar_type() == ScalarType::Double) {
    softmax<double>(logits, row, column, key, log_sum_exp, key_rows, content, known);
  } else {
    STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Float, "logits must be float32 or float64");
    softmax<float>(logits, row, column, key, log_sum_exp, key_rows, content, known);
  }
}

void gradient_entry(Tensor probabilities, Tensor gradient, std::optional<Tensor> row,
                    std::optional<Tensor> column, std::optional<Tensor> key, int64_t key_rows,
                    int64_t slots) {
  if (gradient.scalar_type() == ScalarType::Double) {
    logit_gradient<double>(probabilities, gradient, row, column, key, key_rows, slots);
  } else {
    STD_TORCH_CHECK(gradient.scalar_type() == ScalarType::Float, "gradient must be float32 or float64");
    logit_gradient<float>(probabilities, gradient, row, column, key, key_rows, slots);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attn_plugins, CPU, m) {
  m.impl("global_attention_softmax_", TORCH_BOX(&softmax_entry));
  m.impl("global_attention_logit_gradient_", TORCH_BOX(&gradient_entry));
}
