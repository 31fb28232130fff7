// What plugins/ops/library.py asks of this library, through ctypes.
#include "launch.cuh"

// nullptr where the kernels can run on the current device, else the reason in CUDA's words. Whatever else
// fails, such as an earlier kernel, is no reason: it will be reported where it matters.
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
