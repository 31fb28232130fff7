// The C interface that plugins/core/library.py calls through ctypes.
#include "vectors.h"

#ifdef _WIN32
#define ATTN_EXPORT __declspec(dllexport)
#else
#define ATTN_EXPORT __attribute__((visibility("default")))
#endif

// Returns the x86-64 level of the kernels that this machine runs: 4 with AVX-512, 3 with AVX2, 1 without
// both, 0 where there is one set of kernels.
extern "C" ATTN_EXPORT int attn_plugins_cpu_level() {
#ifdef HAS_TARGETS
  return instruction_set();
#else
  return 0;
#endif
}
