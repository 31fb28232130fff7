// Matrix products of float by oneDNN, for CPU operators. plugins/core/onednn.py has the rule and its
// reason.
#pragma once

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>

#include "common/simd.h"
#include "common/tensor_ops.h"

namespace attn_plugins {

// True on AMD processors with AVX-512, unless the environment says ATTN_PLUGINS_ONEDNN=0.
inline bool onednn_is_faster() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool faster = [] {
    const char* wanted = std::getenv("ATTN_PLUGINS_ONEDNN");
    __builtin_cpu_init();
    return ATTN_CPU_LEVEL >= 4 && __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512f") &&
           !(wanted && std::strcmp(wanted, "0") == 0);
  }();
  return faster;
#else
  return false;
#endif
}

// out = a @ b, if this returns true; nothing has happened otherwise. Some builds of PyTorch have no oneDNN:
// these are asked once.
inline bool onednn_mm_out(const Tensor& out, const Tensor& a, const Tensor& b) {
  static std::atomic<bool> missing{false};
  constexpr int64_t kWork = 4'000'000, kWide = 256;
  if (missing || !onednn_is_faster() || a.scalar_type() != ScalarType::Float) return false;
  if (a.size(0) * a.size(1) * b.size(1) < kWork) return false;
  if (a.stride(1) != 1 && (a.size(0) >= b.size(1) || b.size(1) < kWide)) return false;
  std::array<StableIValue, 6> stack{
      torch::stable::detail::from(a),
      torch::stable::detail::from(transposed(b)),
      torch::stable::detail::from(std::optional<Tensor>()),
      torch::stable::detail::from(std::string("none")),
      torch::stable::detail::from(std::vector<std::optional<double>>()),
      torch::stable::detail::from(std::optional<std::string>("")),
  };
  missing = torch_call_dispatcher("mkldnn::_linear_pointwise", "", stack.data(), TORCH_ABI_VERSION) != 0;
  if (missing) return false;
  copy_to(out, torch::stable::detail::to<Tensor>(stack[0]));
  return true;
}

}  // namespace attn_plugins
