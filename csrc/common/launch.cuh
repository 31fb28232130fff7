// Kernel launches from code that uses torch only through its stable ABI.
#ifndef ATTN_PLUGINS_CUDA_LAUNCH
#define ATTN_PLUGINS_CUDA_LAUNCH

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <limits>

namespace attn_plugins {

constexpr int kThreads = 256;  // per block, for every kernel here

// Makes the device of `t` current for the guard's lifetime.
struct OnDeviceOf {
  explicit OnDeviceOf(const torch::stable::Tensor& t) : guard(t.get_device_index()) {}
  torch::stable::accelerator::DeviceGuard guard;
};

inline const torch::stable::Tensor* tensor_among(const torch::stable::Tensor& t) {
  return &t;
}
template <class T>
const torch::stable::Tensor* tensor_among(const T&) {
  return nullptr;
}

// Wraps an operator: its first Tensor's device is current during a call.
template <auto function>
struct OnDevice;
template <class Result, class... Parameters, Result (*function)(Parameters...)>
struct OnDevice<function> {
  static Result call(Parameters... arguments) {
    const torch::stable::Tensor* tensor = nullptr;
    ((tensor = tensor ? tensor : tensor_among(arguments)), ...);
    const OnDeviceOf guard(*tensor);
    return function(arguments...);
  }
};

#define ON_DEVICE(function) TORCH_BOX(&attn_plugins::OnDevice<&function>::call)

inline int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

struct DeviceLimits {
  int64_t multiprocessors, l2_bytes;
};

// Returns the limits of the current device.
inline DeviceLimits device_limits() {
  int device = 0, multiprocessors = 0, l2_bytes = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device));
  return {multiprocessors, l2_bytes};
}

// Compiled for every target, as all kernels are, so the runtime's answer for this one holds for the others.
template <class>
__global__ void probe_kernel() {}

// Asks the runtime whether the current device can run this library's code. On success *architecture is the
// compute capability that the code, or the PTX it was built from, was compiled for: 80 for compute_80.
inline cudaError_t find_code(int* architecture) {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, probe_kernel<void>);
  if (status != cudaSuccess) cudaGetLastError();  // clear it, or the next launch would report it
  *architecture = attributes.ptxVersion;
  return status;
}

// The architecture that find_code reports, cached per device.
inline int code_architecture() {
  thread_local int known_device = -1, known = 0;
  int device = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  if (device != known_device) {
    STD_CUDA_CHECK(find_code(&known));
    known_device = device;
  }
  return known;
}

// Runs kernel<<<blocks, kThreads, bytes>>>(arguments...) on the current stream of the current device.
template <class... Parameters, class... Arguments>
void launch_with_shared_memory(void (*kernel)(Parameters...), int64_t blocks, int64_t bytes,
                               const Arguments&... arguments) {
  if (blocks == 0) return;
  STD_TORCH_CHECK(blocks <= std::numeric_limits<int32_t>::max(), "attn_plugins: a grid of ", blocks,
                  " blocks is too large for CUDA");
  int device = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  kernel<<<static_cast<unsigned>(blocks), kThreads, static_cast<size_t>(bytes),
           static_cast<cudaStream_t>(stream)>>>(arguments...);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// The same without dynamic shared memory.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, const Arguments&... arguments) {
  launch_with_shared_memory(kernel, blocks, 0, arguments...);
}

}  // namespace attn_plugins

#endif
