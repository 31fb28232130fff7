// Includes the kernel file named by KERNEL once per instruction set: in namespace baseline and, on x86-64, in
// v3 (AVX2) and v4 (AVX-512). BEST picks the function of the widest set that this machine supports. There is
// no include guard: every kernel's source includes this file once, after everything the kernel needs.

namespace baseline {
#define VECTOR_BYTES 16
#include KERNEL
#undef VECTOR_BYTES
}  // namespace baseline

#ifdef HAS_TARGETS
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
namespace v3 {
#define VECTOR_BYTES 32
#include KERNEL
#undef VECTOR_BYTES
}  // namespace v3
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
namespace v4 {
#define VECTOR_BYTES 64
#include KERNEL
#undef VECTOR_BYTES
}  // namespace v4
#pragma GCC pop_options
#define BEST(Function, name)                     \
  (instruction_set() == 4   ? Function(v4::name) \
   : instruction_set() == 3 ? Function(v3::name) \
                            : Function(baseline::name))
#else
#define BEST(Function, name) Function(baseline::name)
#endif
