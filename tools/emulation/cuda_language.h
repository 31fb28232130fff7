// CUDA's keywords and intrinsics.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda_index.h"
#include "emulator.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define EMULATOR_UNSEEN __attribute__((no_sanitize("thread"), noinline))

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct dim3 : emulator::Index {
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : emulator::Index{x, y, z} {}
};

using std::ceil;
using std::floor;
using std::max;
using std::min;

// Memory

template <class T>
EMULATOR_UNSEEN T __ldg(const T* from) {
  emulator::access(from, sizeof(T), emulator::kConstantRead, sizeof(T));
  return *from;
}
template <class T, class Change>
EMULATOR_UNSEEN T change_atomically(T* at, const Change& change) {
  emulator::access(at, sizeof(T), emulator::kAtomic, sizeof(T));
  const T old = *at;
  *at = change(old);
  return old;
}
template <class T>
T atomicAdd(T* to, T value) {
  return change_atomically(to, [&](T old) { return old + value; });
}
template <class T>
T atomicMax(T* to, T value) {
  return change_atomically(to, [&](T old) { return std::max(old, value); });
}
template <class T>
T atomicOr(T* to, T value) {
  return change_atomically(to, [&](T old) { return old | value; });
}
inline void __trap() {
  emulator::fail("trap");
}

// Barriers

inline void __syncthreads() {
  emulator::block_barrier();
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emulator::together("__syncwarp", mask, nullptr, 0, nullptr, true);
}

// Shuffles: a lane contributes a value and names the lane whose value it reads.

namespace emulator {

struct Exchange {
  uint64_t value;
  unsigned source;  // a lane
};
inline void exchange(Payload* lanes, unsigned mask) {
  Exchange all[kLanes];
  for (unsigned l = 0; l < kLanes; ++l) std::memcpy(&all[l], lanes[l].bytes, sizeof all[l]);
  for (unsigned l = 0; l < kLanes; ++l) {
    if (!(mask >> l & 1)) continue;
    if (!(mask >> all[l].source & 1)) {
      fail("lane %u shuffles from lane %u, which is not in the mask %08x", l, all[l].source, mask);
    }
    const uint64_t got = all[all[l].source].value;
    std::memcpy(lanes[l].bytes, &got, sizeof got);
  }
}
template <class T>
T shuffle(const char* name, unsigned mask, T value, unsigned source) {
  Exchange mine{bits_of(value), source};
  together(name, mask, &mine, sizeof mine, exchange);
  T got;
  std::memcpy(&got, &mine.value, sizeof got);
  return got;
}
inline unsigned lane() {
  return now.thread % kLanes;
}
inline unsigned checked_width(int width) {
  if (width < 1 || width > 32 || (width & (width - 1)) != 0) fail("a shuffle's width is %d", width);
  return unsigned(width);
}
inline void vote(Payload* lanes, unsigned mask) {
  unsigned votes = 0;
  for (unsigned l = 0; l < kLanes; ++l) {
    if (mask >> l & 1 && lanes[l].bytes[0]) votes |= 1u << l;
  }
  for (unsigned l = 0; l < kLanes; ++l) {
    if (mask >> l & 1) std::memcpy(lanes[l].bytes, &votes, sizeof votes);
  }
}

}  // namespace emulator

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const unsigned lane = emulator::lane(), size = emulator::checked_width(width);
  return emulator::shuffle("__shfl_sync", mask, value, lane - lane % size + unsigned(source) % size);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const unsigned lane = emulator::lane(), size = emulator::checked_width(width),
                 source = lane ^ unsigned(bits);
  const bool beyond = source / size > lane / size;  // the lane then keeps its own value
  return emulator::shuffle("__shfl_xor_sync", mask, value, beyond ? lane : source % 32);
}
inline int __any_sync(unsigned mask, int predicate) {
  unsigned votes = predicate != 0;
  emulator::together("__any_sync", mask, &votes, sizeof votes, emulator::vote);
  return votes != 0;
}

// Arithmetic

inline long long __float2ll_rn(float x) {
  return std::llrint(x);
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = low | uint64_t(high) << 32;
  unsigned result = 0;
  for (unsigned i = 0; i < 4; ++i) result |= unsigned(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
