// The threads of a block as fibers, which run in random order and wait for each other as CUDA's threads do.
#include "emulator.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_index.h"

Index3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

Now now;

namespace {

constexpr size_t kStack = 128 << 10, kGuard = 4096;

enum State : uint8_t { kReady, kWaits, kReturned };

struct Fiber {
  jmp_buf context;
  bool started = false;
  State state = kReturned;
  const char* waits_at = nullptr;
};

// Lanes of a warp that wait for the other lanes of a mask.
struct Meeting {
  unsigned mask = 0, arrived = 0;  // mask 0: unused
  const char* name = nullptr;
  size_t bytes = 0;
};

Fiber fibers[kMostThreads];
char* stacks = nullptr;
Payload payloads[kMostThreads];
Meeting meetings[kMostThreads / kLanes][kLanes];  // by warp; masks are disjoint
unsigned returned[kMostThreads / kLanes];         // lanes by warp
unsigned ready[kMostThreads], ready_count, in_barrier;
jmp_buf scheduler;
void (*body)(void*);
void* parameters;
std::string message;
uint64_t random_state;

unsigned random_below(unsigned count) {
  random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
  return unsigned((random_state >> 32) * count >> 32);
}

void set_indices(unsigned thread) {
  now.thread = thread;
  threadIdx = {thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / (blockDim.x * blockDim.y)};
  now.stack = stacks + thread * kStack, now.stack_end = now.stack + kStack;
}

// Not inlined: values that the caller keeps in registers must not change between the two returns of setjmp.
__attribute__((noinline)) void leave() {
  if (_setjmp(fibers[now.thread].context) == 0) _longjmp(scheduler, 1);
}

void make_ready(unsigned thread) {
  fibers[thread].state = kReady;
  ready[ready_count++] = thread;
}

void wait(const char* at) {
  fibers[now.thread].state = kWaits, fibers[now.thread].waits_at = at;
  leave();
}

// A fiber runs the same thread of every block.
void entry() {
  for (;;) {
    now.in_kernel = true;
    body(parameters);
    now.in_kernel = false;
    const unsigned me = now.thread, warp = me / kLanes, lane = me % kLanes;
    for (const Meeting& meeting : meetings[warp]) {
      if (meeting.mask >> lane & 1) {
        fail("lanes %08x wait at %s for lane %u, which has returned", meeting.arrived, meeting.name, lane);
      }
    }
    if (in_barrier > 0) fail("returned while %u threads wait at __syncthreads", in_barrier);
    returned[warp] |= 1u << lane;
    fibers[me].state = kReturned;
    leave();
  }
}

void start(unsigned thread) {
  static ucontext_t here, there;
  Fiber& fiber = fibers[thread];
  fiber.started = true;
  getcontext(&there);
  there.uc_stack.ss_sp = stacks + thread * kStack + kGuard;
  there.uc_stack.ss_size = kStack - kGuard;
  there.uc_link = nullptr;
  makecontext(&there, entry, 0);
  swapcontext(&here, &there);
}

std::string where_all_wait() {
  std::string text = "threads wait for each other for ever:";
  for (unsigned i = 0; i < now.threads; ++i) {
    if (fibers[i].state != kWaits) continue;
    if (i > 0 && fibers[i - 1].state == kWaits && fibers[i].waits_at == fibers[i - 1].waits_at) continue;
    text += " from thread " + std::to_string(i) + " on at " + fibers[i].waits_at + ",";
  }
  text.pop_back();
  return text;
}

// Returns the current line of the running kernel, if addr2line is installed. The emulator's own frames have
// no line numbers, only "?".
std::string source_line() {
  void* frames[24];
  const int count = backtrace(frames, 24);
  Dl_info own{}, info{};
  dladdr(&now, &own);
  std::string command = "addr2line -ie '" + std::string(own.dli_fname ? own.dli_fname : "") + "'";
  for (int i = 0; i < count; ++i) {
    if (!dladdr(frames[i], &info) || info.dli_fbase != own.dli_fbase) continue;
    char offset[40];
    std::snprintf(offset, sizeof offset, " %#tx",
                  static_cast<char*>(frames[i]) - 1 - static_cast<char*>(info.dli_fbase));
    command += offset;
  }
  std::string place;
  FILE* lines = popen((command + " 2>/dev/null").c_str(), "r");
  for (char line[1000]; lines != nullptr && std::fgets(line, sizeof line, lines) != nullptr;) {
    const std::string text(line, std::strcspn(line, " (\n"));  // without "(discriminator 3)"
    const bool ours = text.empty() || text.find("/emulation/cuda_") != std::string::npos ||
                      text.find("/emulation/ptx.cuh") != std::string::npos || text.back() == '?';
    if (place.empty() && !ours) place = " (" + text + ")";
  }
  if (lines != nullptr) pclose(lines);
  return place;
}

void run_block(unsigned block) {
  now.block = block, now.epoch = 0;
  blockIdx = {block % gridDim.x, block / gridDim.x % gridDim.y, block / (gridDim.x * gridDim.y)};
  std::memset(now.clock, 0, now.threads * sizeof now.clock[0]);
  std::memset(now.known, 0, now.threads * sizeof now.known[0]);
  std::memset(meetings, 0, sizeof meetings);
  std::memset(returned, 0, sizeof returned);
  in_barrier = ready_count = 0;
  for (unsigned i = 0; i < now.threads; ++i) make_ready(i);
  while (ready_count > 0) {
    const unsigned chosen = random_below(ready_count);
    const unsigned thread = ready[chosen];
    ready[chosen] = ready[--ready_count];
    set_indices(thread);
    if (_setjmp(scheduler) == 0) {
      if (!fibers[thread].started) start(thread);
      _longjmp(fibers[thread].context, 1);
    }
    if (!message.empty()) return;
  }
  for (unsigned i = 0; i < now.threads; ++i) {
    if (fibers[i].state == kWaits) {
      message = where_all_wait();
      return;
    }
  }
}

}  // namespace

void fail(const char* format, ...) {
  now.in_kernel = false;
  char text[1000];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (body == nullptr) {
    std::fprintf(stderr, "emulator: %s\n", text);
    std::abort();
  }
  message = "thread " + std::to_string(now.thread) + " of block " + std::to_string(now.block) + ": " + text +
            source_line();
  _longjmp(scheduler, 1);
}

void run(const Configuration& c, void (*thread_body)(void*), void* thread_parameters, size_t bytes) {
  const uint64_t threads = uint64_t(c.block.x) * c.block.y * c.block.z;
  const uint64_t blocks = uint64_t(c.grid.x) * c.grid.y * c.grid.z;
  if (threads == 0 || threads > kMostThreads || c.block.z > 64) {
    throw std::runtime_error("emulator: invalid block of " + std::to_string(threads) + " threads");
  }
  if (blocks == 0 || c.grid.x > 0x7fffffff || c.grid.y > 0xffff || c.grid.z > 0xffff) {
    throw std::runtime_error("emulator: invalid grid of " + std::to_string(c.grid.x) + " x " +
                             std::to_string(c.grid.y) + " x " + std::to_string(c.grid.z) + " blocks");
  }
  if (c.shared_bytes > kMostShared) {
    throw std::runtime_error("emulator: " + std::to_string(c.shared_bytes) +
                             " bytes of dynamic shared memory, where the kernel may have " +
                             std::to_string(kMostShared));
  }
  if (stacks == nullptr) {
    stacks = static_cast<char*>(mmap(nullptr, kStack * kMostThreads, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks == MAP_FAILED) throw std::runtime_error("emulator: no memory for stacks");
    for (unsigned i = 0; i < kMostThreads; ++i) mprotect(stacks + i * kStack, kGuard, PROT_NONE);
  }
  body = thread_body, parameters = thread_parameters;
  now.parameters = static_cast<char*>(thread_parameters), now.parameters_end = now.parameters + bytes;
  now.threads = unsigned(threads), ++now.launch;
  blockDim = {c.block.x, c.block.y, c.block.z}, gridDim = {c.grid.x, c.grid.y, c.grid.z};
  random_state = (device().seed + 1) * 0x9e3779b97f4a7c15u;
  std::vector<unsigned> order(blocks);
  std::iota(order.begin(), order.end(), 0u);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random_below(unsigned(i))]);
  message.clear();
  for (size_t i = 0; i < order.size() && message.empty(); ++i) {
    begin_block(c.shared_bytes);
    run_block(order[i]);
  }
  body = nullptr;
  if (message.empty()) return;
  for (Fiber& fiber : fibers) fiber.started = false;  // abandon the contents of their stacks
  throw std::runtime_error("emulator: " + message);
}

void preempt() {
  if (!device().preempts || random_below(16) != 0) return;
  make_ready(now.thread);
  leave();
}

void together(const char* name, unsigned mask, void* payload, size_t bytes, Operation operation,
              bool orders_memory) {
  const Outside outside;
  const unsigned me = now.thread, warp = me / kLanes, lane = me % kLanes, first = warp * kLanes;
  if (!(mask >> lane & 1)) fail("lane %u is not in the mask %08x that it gives to %s", lane, mask, name);
  if (mask & returned[warp]) {
    fail("%s waits for lanes %08x, which have returned", name, mask & returned[warp]);
  }
  if (now.threads - first < kLanes && mask >> (now.threads - first)) {
    fail("%s waits for lanes that the block of %u threads does not have: %08x", name, now.threads, mask);
  }
  Meeting* mine = nullptr;
  for (Meeting& meeting : meetings[warp]) {
    if (meeting.mask == 0) {
      if (mine == nullptr) mine = &meeting;
    } else if (meeting.mask == mask) {
      mine = &meeting;
      break;
    } else if (meeting.mask & mask & (meeting.arrived | 1u << lane)) {
      fail("lane %u comes to %s with mask %08x, while lanes %08x wait at %s with mask %08x", lane, name, mask,
           meeting.arrived, meeting.name, meeting.mask);
    }
  }
  if (mine->mask == 0) {
    *mine = {mask, 0, name, bytes};
  } else if (std::strcmp(mine->name, name) != 0 || mine->bytes != bytes) {
    fail("lane %u comes to %s (%zu bytes), while lanes %08x wait at %s (%zu bytes)", lane, name, bytes,
         mine->arrived, mine->name, mine->bytes);
  }
  if (bytes > 0) std::memcpy(payloads[me].bytes, payload, bytes);
  mine->arrived |= 1u << lane;
  if (mine->arrived == mask) {
    mine->mask = 0;
    if (operation != nullptr) operation(payloads + first, mask);
    if (orders_memory) {
      uint32_t most[kLanes] = {};
      for (unsigned l = 0; l < kLanes; ++l) {
        if (!(mask >> l & 1)) continue;
        now.known[first + l][l] = ++now.clock[first + l];
        for (unsigned k = 0; k < kLanes; ++k) most[k] = std::max(most[k], now.known[first + l][k]);
      }
      for (unsigned l = 0; l < kLanes; ++l) {
        if (mask >> l & 1) std::memcpy(now.known[first + l], most, sizeof most);
      }
    }
    for (unsigned l = 0; l < kLanes; ++l) {
      if (mask >> l & 1 && l != lane) make_ready(first + l);
    }
    make_ready(me);  // the last lane to arrive need not continue first
    leave();
  } else {
    wait(name);
  }
  if (bytes > 0) std::memcpy(payload, payloads[me].bytes, bytes);
}

void block_barrier() {
  const Outside outside;
  for (unsigned warp = 0; warp * kLanes < now.threads; ++warp) {
    if (returned[warp])
      fail("__syncthreads waits for lanes %08x of warp %u, which have returned", returned[warp], warp);
  }
  if (++in_barrier < now.threads) {
    wait("__syncthreads");
  } else {
    in_barrier = 0;
    ++now.epoch;
    for (unsigned i = 0; i < now.threads; ++i) {
      if (i != now.thread) make_ready(i);
    }
    make_ready(now.thread);
    leave();
  }
}

const Device& device() {
  const auto number = [](const char* name, long long otherwise) {
    const char* text = std::getenv(name);
    return text != nullptr ? std::strtoll(text, nullptr, 10) : otherwise;
  };
  static Device known;
  static uint32_t at = ~0u;
  if (at != now.launch || body == nullptr) {
    known.multiprocessors = int(number("EMULATOR_MULTIPROCESSORS", 132));
    known.l2_bytes = int(number("EMULATOR_L2", 60 << 20));
    known.seed = uint64_t(number("EMULATOR_SEED", 0));
    known.preempts = number("EMULATOR_PREEMPTS", 1) != 0;
    known.finds_races = number("EMULATOR_RACES", 1) != 0;
    at = now.launch;
  }
  return known;
}

}  // namespace emulator
