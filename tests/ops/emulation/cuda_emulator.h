// Runs CUDA kernels on the CPU, thread by thread, so that a machine without a GPU can test their source.
//
// Included before csrc/*/*.cuh (compiled as C++), it stands in for csrc/common/launch.cuh. Each CUDA thread
// is a fiber; a shuffle or __syncthreads is where fibers wait for each other. Blocks run one after the other.
#pragma once

#define ATTN_PLUGINS_CUDA_LAUNCH  // launch.cuh stays out
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <utility>
#include <vector>

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct Index {
  unsigned x;
};
inline Index threadIdx, blockIdx;
using std::floor;
using std::min;

template <class T>
T __ldg(const T* from) {
  return *from;
}

namespace emulator {

constexpr int kBlockThreads = 256;

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool finished = false;
};

struct Barrier {
  unsigned arrived = 0;
  uint64_t generation = 0;
};

struct Block {
  std::vector<Fiber> fibers = std::vector<Fiber>(kBlockThreads);
  ucontext_t scheduler;
  unsigned current = 0;
  std::map<std::pair<unsigned, unsigned>, Barrier> warp_barriers;  // (warp, members)
  Barrier block_barrier;
  double slots[kBlockThreads];  // what a shuffle hands over, bit by bit
  std::function<void()> body;
};

inline Block* block = nullptr;

inline void yield() {
  const unsigned me = block->current;
  swapcontext(&block->fibers[me].context, &block->scheduler);
  threadIdx.x = me;
}

inline void wait(Barrier& barrier, unsigned expected) {
  const uint64_t generation = barrier.generation;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  for (uint64_t turns = 0; barrier.generation == generation; ++turns) {
    if (turns > 1000000)
      std::fprintf(stderr, "emulator: threads wait for each other for ever\n"), std::abort();
    yield();
  }
}

inline void entry() {
  block->body();
  block->fibers[block->current].finished = true;
  swapcontext(&block->fibers[block->current].context, &block->scheduler);
}

inline void run_block(unsigned index, const std::function<void()>& body) {
  static Block reused;  // stacks are costly
  block = &reused;
  block->body = body;
  block->warp_barriers.clear();
  block->block_barrier = {};
  blockIdx.x = index;
  for (Fiber& fiber : block->fibers) {
    fiber.stack.resize(64 << 10);
    fiber.finished = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
  }
  for (bool alive = true; alive;) {
    alive = false;
    for (unsigned i = 0; i < kBlockThreads; ++i) {
      if (block->fibers[i].finished) continue;
      alive = true;
      block->current = threadIdx.x = i;
      swapcontext(&block->scheduler, &block->fibers[i].context);
    }
  }
}

template <class V>
V shuffle(unsigned members, V value, unsigned source) {
  static_assert(sizeof(V) <= sizeof(double));
  const unsigned me = block->current, warp = me / 32;
  if (!(members >> (me % 32) & 1) || !(members >> (source % 32) & 1) || source / 32 != warp) {
    std::fprintf(stderr, "emulator: thread %u shuffles outside its members\n", me), std::abort();
  }
  Barrier& barrier = block->warp_barriers[{warp, members}];
  const unsigned count = unsigned(__builtin_popcount(members));
  std::memcpy(&block->slots[me], &value, sizeof(V));
  wait(barrier, count);
  V got;
  std::memcpy(&got, &block->slots[source], sizeof(V));
  wait(barrier, count);
  return got;
}

}  // namespace emulator

template <class V>
V __shfl_sync(unsigned members, V value, int source, int width) {
  const unsigned me = emulator::block->current;
  return emulator::shuffle(members, value, me - me % unsigned(width) + unsigned(source) % unsigned(width));
}
template <class V>
V __shfl_xor_sync(unsigned members, V value, int bits, int) {
  return emulator::shuffle(members, value, emulator::block->current ^ unsigned(bits));
}
inline void __syncthreads() {
  emulator::wait(emulator::block->block_barrier, emulator::kBlockThreads);
}

template <class T>
void atomicAdd(T* to, T value) {
  *to += value;
}

namespace attn_plugins {

constexpr int kThreads = emulator::kBlockThreads;

struct DeviceLimits {
  int64_t multiprocessors, l2_bytes;
};
inline DeviceLimits device_limits() {
  return {2, 1 << 20};
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, const Arguments&... arguments) {
  for (int64_t i = 0; i < blocks; ++i) emulator::run_block(unsigned(i), [&] { kernel(arguments...); });
}

}  // namespace attn_plugins
