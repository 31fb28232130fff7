// What the kernels' drivers do with tensors beside kernels. Views and memory go around torch's dispatcher,
// which takes longer for each of them than a small kernel runs; copies and products are ATen operators.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace attn_plugins {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Sizes = std::vector<int64_t>;

// Calls operator `name.overload` with `arguments` and returns its first result.
template <class... Arguments>
Tensor call(const char* name, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// The functions below are not named `permute`, `reshape` and `narrow`: argument-dependent lookup would also
// find torch::stable's of those names.

inline Sizes sizes_of(const Tensor& self) {
  const auto sizes = self.sizes();
  return Sizes(sizes.begin(), sizes.end());
}

inline Sizes strides_of(const Tensor& self) {
  const auto strides = self.strides();
  return Sizes(strides.begin(), strides.end());
}

inline Sizes contiguous_strides(const Sizes& sizes) {
  Sizes strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= sizes[i] > 1 ? sizes[i] : 1;
  }
  return strides;
}

// The memory of `self` from element `offset` on, with other sizes and strides.
inline Tensor view_of(const Tensor& self, const Sizes& sizes, const Sizes& strides, int64_t offset = 0) {
  AtenTensorHandle view = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(self.get(), int64_t(sizes.size()), sizes.data(),
                                                        strides.data(), offset, &view));
  return Tensor(view);
}

inline Tensor permuted(const Tensor& self, const Sizes& dims) {
  Sizes sizes, strides;
  for (const int64_t dim : dims) sizes.push_back(self.size(dim)), strides.push_back(self.stride(dim));
  return view_of(self, sizes, strides);
}

// A view of `self` where that is contiguous.
inline Tensor reshaped(const Tensor& self, const Sizes& sizes) {
  return self.is_contiguous() ? view_of(self, sizes, contiguous_strides(sizes))
                              : torch::stable::reshape(self, sizes);
}

inline Tensor narrowed(const Tensor& self, int64_t dim, int64_t start, int64_t length) {
  Sizes sizes = sizes_of(self);
  const Sizes strides = strides_of(self);
  const size_t axis = size_t(dim < 0 ? dim + self.dim() : dim);
  sizes[axis] = length;
  return view_of(self, sizes, strides, start * strides[axis]);
}

// `self` with its last two axes exchanged.
inline Tensor transposed(const Tensor& self) {
  Sizes sizes = sizes_of(self), strides = strides_of(self);
  const size_t last = sizes.size() - 1;
  std::swap(sizes[last - 1], sizes[last]), std::swap(strides[last - 1], strides[last]);
  return view_of(self, sizes, strides);
}

inline Tensor new_strided(const Tensor& like, const Sizes& sizes, const Sizes& strides, ScalarType dtype) {
  int32_t device = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  AtenTensorHandle result = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(int64_t(sizes.size()), sizes.data(), strides.data(),
                               torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)), device,
                               like.get_device_index(), &result));
  return Tensor(result);
}

inline Tensor empty_like_options(const Tensor& like, const Sizes& sizes, ScalarType dtype) {
  return new_strided(like, sizes, contiguous_strides(sizes), dtype);
}

inline Tensor empty_like_options(const Tensor& like, const Sizes& sizes) {
  return empty_like_options(like, sizes, like.scalar_type());
}

inline void set_zero(const Tensor& self) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(self.get()));
}

inline Tensor zeros_like_options(const Tensor& like, const Sizes& sizes, ScalarType dtype) {
  const Tensor zeros = empty_like_options(like, sizes, dtype);
  set_zero(zeros);
  return zeros;
}

inline Tensor zeros_like_options(const Tensor& like, const Sizes& sizes) {
  return zeros_like_options(like, sizes, like.scalar_type());
}

// Copies between strides and dtypes.
inline void copy_to(const Tensor& target, const Tensor& source) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(target.get(), source.get(), 0));
}

inline Tensor copied(const Tensor& self, const Sizes& strides, ScalarType dtype) {
  const Tensor copy = new_strided(self, sizes_of(self), strides, dtype);
  copy_to(copy, self);
  return copy;
}

// `self`, or a contiguous copy of it.
inline Tensor as_contiguous(const Tensor& self) {
  return self.is_contiguous() ? self : copied(self, contiguous_strides(sizes_of(self)), self.scalar_type());
}

// Returns whether a map (N, C, H, W) is channels-last, and not contiguous as well.
inline bool is_channels_last(const Tensor& self) {
  if (self.dim() != 4 || self.is_contiguous()) return false;
  const auto sizes = self.sizes(), strides = self.strides();
  int64_t stride = 1;
  for (const size_t axis : {1, 3, 2, 0}) {
    if (sizes[axis] != 1 && strides[axis] != stride) return false;
    stride *= sizes[axis];
  }
  return true;
}

// `self`, or a copy of the same strides in another dtype.
inline Tensor to_dtype(const Tensor& self, ScalarType dtype) {
  if (self.scalar_type() == dtype) return self;
  return self.is_contiguous() || is_channels_last(self) ? copied(self, strides_of(self), dtype)
                                                        : torch::stable::to(self, dtype);
}

// Uninitialized memory of the same sizes and strides.
inline Tensor like(const Tensor& self) {
  return self.is_contiguous() ? empty_like_options(self, sizes_of(self)) : torch::stable::empty_like(self);
}

// out = a @ b.
inline void mm_out(const Tensor& out, const Tensor& a, const Tensor& b) {
  call("aten::mm", "out", a, b, out);
}

// out[g] = a[g] @ b[g].
inline void bmm_out(const Tensor& out, const Tensor& a, const Tensor& b) {
  call("aten::bmm", "out", a, b, out);
}

// out = a @ weight^T + bias.
inline void linear_out(const Tensor& out, const Tensor& a, const Tensor& weight, const Tensor& bias) {
  call("aten::linear", "out", a, weight, std::optional<Tensor>(bias), out);
}

// a + b with broadcasting. The stable dispatcher cannot pass a Scalar, which rules out add_ and addmm.
inline Tensor add(const Tensor& a, const Tensor& b) {
  return torch::stable::subtract(a, b, -1.0);
}

}  // namespace attn_plugins
