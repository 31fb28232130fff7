// What the emulator's own files share: threads.cpp (fibers, barriers, launches), memory.cpp (bounds, races),
// ptx.cpp (inline assembly). cuda_emulator.h is what kernels see, and says what is emulated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

namespace emulator {

constexpr unsigned kMostThreads = 1024, kLanes = 32;

struct Index {
  unsigned x = 1, y = 1, z = 1;
};
struct Configuration {
  Index grid, block;
  size_t shared_bytes = 0;
  void* stream = nullptr;
};

// The device, as the environment describes it (see cuda_emulator.h).
struct Device {
  int multiprocessors, l2_bytes, shared_bytes;  // shared_bytes: the most of a block, dynamic
  uint64_t seed;
  bool preempts, finds_races;
};
const Device& device();

// threads.cpp

// Ends the kernel that runs, or the program where none runs, with a message like printf's.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
// Runs body(parameters) in every thread. Throws std::runtime_error where the launch is invalid or a thread
// failed.
void run(const Configuration& configuration, void (*body)(void*), void* parameters, size_t bytes,
         size_t most_dynamic_bytes);

// A warp's lanes in `mask` come together: `operation` is called once, by the last of them, with the payloads
// of all 32 lanes, in place, and every lane gets its own back. All must bring the same name and size.
struct alignas(16) Payload {
  unsigned char bytes[64];
};
using Operation = void (*)(Payload* lanes, unsigned mask);
void together(const char* name, unsigned mask, void* payload, size_t bytes, Operation operation,
              bool orders_memory = false);
void block_barrier(int* sum = nullptr);  // *sum becomes the block's sum
void preempt();                          // perhaps another thread goes on

// What memory.cpp needs to know of the thread that runs.
struct Now {
  uint32_t launch, block, epoch;         // epoch: of the block's barriers
  uint32_t clock[kMostThreads];          // of a thread: its warp's barriers
  uint32_t known[kMostThreads][kLanes];  // of its warp's clocks, to a thread
  unsigned thread, threads;
  const char *stack, *stack_end;
  const char *parameters, *parameters_end;
  bool in_kernel;  // else hooks do nothing
};
extern Now now;

// While it lives, the emulator's own accesses are not checked.
struct Outside {
  bool before = now.in_kernel;
  Outside() { now.in_kernel = false; }
  ~Outside() { now.in_kernel = before; }
};

// memory.cpp

enum Access { kRead, kConstantRead, kWrite, kAtomic };
void access(const void* at, size_t bytes, Access access, size_t alignment = 1);

void begin_session();  // forgets all tensors
// Kernels may read and write the `span` bytes at `data`, of a storage; not write them where `constant`.
void allow(void* storage, size_t storage_bytes, void* data, size_t span, bool constant);
void poison(void* data, size_t bytes);

void begin_block(size_t dynamic_shared_bytes);
void* shared(const void* variable, size_t bytes, size_t alignment, const char* name);
void* dynamic_shared();
unsigned shared_address(const void* at);
void* shared_pointer(unsigned address);

// ptx.cpp

struct Operand {
  const char* constraint;
  void* out;  // of outputs
  size_t bytes;
  uint64_t value;  // of inputs, and of outputs that are read, too
};
void ptx(const char* text, const Operand* operands, int count);
inline void ptx(const char* text, std::initializer_list<Operand> operands) {
  ptx(text, operands.begin(), int(operands.size()));
}
void end_thread();     // copies that the thread began, and did not wait for, arrive
void forget_copies();  // those of a kernel that failed

template <class T>
uint64_t bits_of(const T& value) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class T>
Operand output(const char* constraint, T& value) {
  return {constraint, &value, sizeof value, constraint[0] == '+' ? bits_of(value) : 0};
}
template <class T>
Operand input(const char* constraint, T value) {
  return {constraint, nullptr, sizeof value, bits_of(value)};
}

}  // namespace emulator
