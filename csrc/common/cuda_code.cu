// The C interface that plugins/core/library.py calls through ctypes.
#include "launch.cuh"

// Returns nullptr if the kernels can run on the current device, else CUDA's error string. Other failures,
// such as an earlier kernel's, are not a reason to refuse: a later call reports them.
extern "C" __attribute__((visibility("default"))) const char* attn_plugins_cuda_refusal() {
  int architecture = 0;
  const cudaError_t status = attn_plugins::find_code(&architecture);
  switch (status) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidKernelImage:
    case cudaErrorInvalidPtx:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorJitCompilationDisabled:
      return cudaGetErrorString(status);
    default:
      return nullptr;
  }
}
