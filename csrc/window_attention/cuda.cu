// Window attention on CUDA: cuda.cuh's entry points, on the tensors' device.
#include "cuda.cuh"

namespace attn_plugins {
namespace {

void forward_entry(std::optional<Tensor> query, std::optional<Tensor> key, Tensor value,
                   std::optional<Tensor> position_logits, Tensor output, Tensor log_sum_exp,
                   std::vector<int64_t> geometry, std::string border, double scale) {
  const OnDeviceOf guard(value);
  window_attention_forward(query, key, value, position_logits, output, log_sum_exp, geometry, border, scale);
}

void backward_entry(Tensor grad_output, std::optional<Tensor> query, std::optional<Tensor> key, Tensor value,
                    std::optional<Tensor> position_logits, Tensor output, Tensor log_sum_exp,
                    std::optional<Tensor> grad_query, std::optional<Tensor> grad_key,
                    std::optional<Tensor> grad_value, std::optional<Tensor> grad_position_logits,
                    std::vector<int64_t> geometry, std::string border, double scale) {
  const OnDeviceOf guard(value);
  window_attention_backward(grad_output, query, key, value, position_logits, output, log_sum_exp, grad_query,
                            grad_key, grad_value, grad_position_logits, geometry, border, scale);
}

}  // namespace
}  // namespace attn_plugins

STABLE_TORCH_LIBRARY_IMPL(attn_plugins, CUDA, m) {
  m.impl("window_attention_forward_", TORCH_BOX(&attn_plugins::forward_entry));
  m.impl("window_attention_gather_backward_", TORCH_BOX(&attn_plugins::backward_entry));
}
