// The ATen operators that the kernels' drivers call through torch's stable dispatcher.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <initializer_list>
#include <utility>
#include <vector>

namespace attn_plugins {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Calls operator `name.overload` with `arguments` and returns its first result.
template <class... Arguments>
Tensor call(const char* name, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Not named `permute`, `reshape` and `narrow`: argument-dependent lookup would also find torch::stable's
// functions of those names in versions of torch that have them.
inline Tensor permuted(const Tensor& self, std::vector<int64_t> dims) {
  return call("aten::permute", "", self, dims);
}

inline Tensor reshaped(const Tensor& self, std::vector<int64_t> sizes) {
  return torch::stable::reshape(self, sizes);
}

inline Tensor narrowed(Tensor self, int64_t dim, int64_t start, int64_t length) {
  return torch::stable::narrow(self, dim, start, length);
}

// View that repeats axes of size 1; a size of -1 keeps the axis.
inline Tensor expanded(const Tensor& self, std::vector<int64_t> sizes) {
  return call("aten::expand", "", self, sizes, false);
}

inline std::vector<int64_t> sizes_of(const Tensor& self) {
  std::vector<int64_t> sizes(self.dim());
  for (size_t i = 0; i < sizes.size(); ++i) sizes[i] = self.size(int64_t(i));
  return sizes;
}

inline Tensor to_dtype(const Tensor& self, ScalarType dtype) {
  return torch::stable::to(self, dtype);
}

inline Tensor empty_like_options(const Tensor& self, std::vector<int64_t> sizes) {
  return torch::stable::new_empty(self, sizes);
}

inline Tensor zeros_like_options(const Tensor& self, std::vector<int64_t> sizes) {
  return torch::stable::new_zeros(self, sizes);
}

inline Tensor zeros_like_options(const Tensor& self, std::vector<int64_t> sizes, ScalarType dtype) {
  return torch::stable::new_zeros(self, sizes, dtype);
}

// out = a @ b.
inline void mm_out(const Tensor& out, const Tensor& a, const Tensor& b) {
  call("aten::mm", "out", a, b, out);
}

// out[g] = a[g] @ b[g].
inline void bmm_out(const Tensor& out, const Tensor& a, const Tensor& b) {
  call("aten::bmm", "out", a, b, out);
}

// a + b with broadcasting. The stable dispatcher cannot pass a Scalar, which rules out add_ and addmm.
inline Tensor add(const Tensor& a, const Tensor& b) {
  return torch::stable::subtract(a, b, -1.0);
}

}  // namespace attn_plugins
