// Declarations shared by the emulator's files: threads.cpp (fibers, barriers, launches) and memory.cpp
// (bounds, races). Kernels include cuda_emulator.h, which documents the emulation.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

constexpr unsigned kMostThreads = 1024, kLanes = 32;
constexpr size_t kMostShared = 48 << 10;  // dynamic memory of a block, in bytes

struct Index {
  unsigned x = 1, y = 1, z = 1;
};
struct Configuration {
  Index grid, block;
  size_t shared_bytes = 0;
  void* stream = nullptr;
};

// The device, configured by environment variables (see cuda_emulator.h).
struct Device {
  int multiprocessors, l2_bytes;
  uint64_t seed;
  bool preempts, finds_races;
};
const Device& device();

// threads.cpp

// Ends the running kernel, or the program if none is running, with a message formatted like printf's.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
// Runs body(parameters) in every thread. Throws std::runtime_error if the launch is invalid or a thread
// fails.
void run(const Configuration& configuration, void (*body)(void*), void* parameters, size_t bytes);

// Synchronizes a warp's lanes in `mask`. The last one to arrive calls `operation` once, in place, with the
// payloads of all 32 lanes, and every lane gets its own payload back. All must pass the same name and size.
struct alignas(16) Payload {
  unsigned char bytes[64];
};
using Operation = void (*)(Payload* lanes, unsigned mask);
void together(const char* name, unsigned mask, void* payload, size_t bytes, Operation operation,
              bool orders_memory = false);
void block_barrier();
void preempt();  // may switch to another thread

// The running thread, as far as memory.cpp needs it.
struct Now {
  uint32_t launch, block, epoch;         // epoch: number of barriers of the block
  uint32_t clock[kMostThreads];          // of each thread: number of barriers of its warp
  uint32_t known[kMostThreads][kLanes];  // the clocks of its warp that a thread has synchronized with
  unsigned thread, threads;
  const char *stack, *stack_end;
  const char *parameters, *parameters_end;
  bool in_kernel;  // if false, hooks do nothing
};
extern Now now;

// Disables checks of memory accesses during its lifetime, for the emulator's own accesses.
struct Outside {
  bool before = now.in_kernel;
  Outside() { now.in_kernel = false; }
  ~Outside() { now.in_kernel = before; }
};

// memory.cpp

enum Access { kRead, kConstantRead, kWrite, kAtomic };
void access(const void* at, size_t bytes, Access access, size_t alignment = 1);

void begin_session();  // forgets all tensors
// Allows kernels to read the `span` bytes at `data` of a storage and, unless `constant`, to write them.
void allow(void* storage, size_t storage_bytes, void* data, size_t span, bool constant);
void poison(void* data, size_t bytes);

void begin_block(size_t dynamic_shared_bytes);
void* shared(const void* variable, size_t bytes, size_t alignment, const char* name);
void* dynamic_shared();

template <class T>
uint64_t bits_of(const T& value) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  return bits;
}
}  // namespace emulator
