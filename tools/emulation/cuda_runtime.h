// Replaces CUDA's header of this name: the functions that our host code calls, for an emulated device.
#pragma once

#include <cstdio>

#include "emulator.h"

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxThreadsPerMultiProcessor,
  cudaDevAttrL2CacheSize,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
};

namespace emulator {
inline cudaError_t last_error = cudaSuccess;
inline cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}
}  // namespace emulator

inline cudaError_t cudaGetDevice(int* index) {
  *index = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const emulator::Device& device = emulator::device();
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = device.multiprocessors;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = 2048;
      break;
    case cudaDevAttrL2CacheSize:
      *value = device.l2_bytes;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = EMULATED_ARCH / 100;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = EMULATED_ARCH / 10 % 10;
      break;
    default:
      return emulator::result(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}
struct cudaFuncAttributes {
  size_t sharedSizeBytes, localSizeBytes;
  int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, maxDynamicSharedSizeBytes;
};
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel*) {
  *attributes = {0,
                 0,
                 int(emulator::kMostThreads),
                 0,
                 EMULATED_ARCH / 10,
                 EMULATED_ARCH / 10,
                 int(emulator::kMostShared)};
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() {
  const cudaError_t error = emulator::last_error;
  emulator::last_error = cudaSuccess;
  return error;
}
inline cudaError_t cudaPeekAtLastError() {
  return emulator::last_error;
}

// The functions behind torch's STD_CUDA_CHECK, and the current stream, which a torch without CUDA lacks.
#define torch_c10_cuda_check_msg emulated_check_message
#define torch_c10_cuda_free_error_msg emulated_free_message
#define aoti_torch_get_current_cuda_stream emulated_current_stream
inline int emulated_check_message(int error, const char* file, const char*, unsigned line, bool,
                                  char** message) {
  *message = nullptr;
  if (error == cudaSuccess) return 0;
  *message = new char[500];
  std::snprintf(*message, 500, "CUDA error: %d (%s:%u)", error, file, line);
  return 0;
}
inline void emulated_free_message(char* message) {
  delete[] message;
}
inline int emulated_current_stream(int, void** stream) {
  *stream = nullptr;
  return 0;
}

namespace emulator {

// kernel<<<configuration>>>(arguments...), which translate.py rewrites to this call.
template <class... Parameters, class... Arguments>
void launch(const Configuration& configuration, void (*kernel)(Parameters...),
            const Arguments&... arguments) {
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> parameters;
  } call{kernel, {static_cast<Parameters>(arguments)...}};
  const auto body = [](void* given) {
    const Call& c = *static_cast<Call*>(given);
    std::apply(c.kernel, c.parameters);
  };
  run(configuration, body, &call, sizeof call);
}

}  // namespace emulator
