// Checks the bounds, alignment and races of every memory access of a kernel. The accesses arrive through the
// calls that -fsanitize=thread inserts; its own runtime library is not linked.
#include "emulator.h"

#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

namespace emulator {

namespace {

constexpr size_t kGranule = 2;  // bytes per record; smaller elements are only checked for bounds
constexpr size_t kArena = 256 << 10, kGap = 64;

// The last access to a granule.
struct Record {
  uint32_t launch, block, epoch, clock;
  uint16_t thread;
  uint8_t access;
};
struct Granule {
  Record write, reads[2];  // the last two readers from different threads
};

struct Span {
  uintptr_t begin, end;
  bool constant;
};
struct Storage {
  uintptr_t begin, end;
  std::vector<Span> spans;  // the tensors in it
  Granule* granules = nullptr;
};
std::vector<Storage> storages;
size_t last_storage;

struct Variable {
  const void* key;
  const char* name;
  size_t begin, bytes;
};
alignas(128) char arena[kArena];
Granule arena_granules[kArena / kGranule];
std::vector<Variable> variables;  // shared variables of the block
size_t dynamic_bytes, arena_used;

struct Image {
  uintptr_t begin = 0, end = 0;
};
Image own_image;  // of the library: constants and compiler-generated data

int find_image(dl_phdr_info* info, size_t, void*) {
  const uintptr_t here = reinterpret_cast<uintptr_t>(&find_image);
  Image image{~uintptr_t(0), 0};
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
    const uintptr_t begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
    image.begin = std::min(image.begin, begin);
    image.end = std::max(image.end, begin + info->dlpi_phdr[i].p_memsz);
  }
  if (here < image.begin || here >= image.end) return 0;
  own_image = image;
  return 1;
}

const char* const kVerbs[] = {"reads", "reads by __ldg", "writes", "adds to"};

// Returns true if the recorded access happened before the current thread's access.
bool ordered(const Record& r, bool shared) {
  if (r.launch != now.launch) return true;
  if (r.block != now.block) return shared;
  if (r.thread == now.thread || r.epoch < now.epoch) return true;
  return r.thread / kLanes == now.thread / kLanes && r.clock < now.known[now.thread][r.thread % kLanes];
}

[[noreturn]] void race(const Record& other, Access access, const void* at) {
  const bool in_block = other.block == now.block;
  fail("race: %s %p, which thread %u of block %u %s in the same launch, and no %s orders the two",
       kVerbs[access], at, other.thread, other.block, kVerbs[other.access],
       !in_block                                      ? "barrier"
       : other.thread / kLanes == now.thread / kLanes ? "__syncwarp"
                                                      : "__syncthreads");
}

void touch(Granule& g, bool shared, Access access, const void* at) {
  const Record mine{now.launch,           now.block,      now.epoch, now.clock[now.thread],
                    uint16_t(now.thread), uint8_t(access)};
  if (access == kConstantRead && g.write.launch == now.launch) {
    fail("reads %p by __ldg, which thread %u of block %u writes in the same launch", at, g.write.thread,
         g.write.block);
  }
  const bool both_add = access == kAtomic && g.write.access == kAtomic;
  if (!both_add && !ordered(g.write, shared)) race(g.write, access, at);
  if (access == kRead || access == kConstantRead) {
    Record& last = g.reads[0];
    const bool again = last.launch == mine.launch && last.block == mine.block && last.thread == mine.thread;
    if (!again) g.reads[1] = last;
    last = mine;
    return;
  }
  for (const Record& read : g.reads) {
    if (read.launch == now.launch && read.access == kConstantRead) {
      fail("%s %p, which thread %u of block %u reads by __ldg in the same launch", kVerbs[access], at,
           read.thread, read.block);
    }
    if (!ordered(read, shared)) race(read, access, at);
  }
  g.write = mine;
}

void touch_all(Granule* granules, bool shared, uintptr_t offset, size_t bytes, Access access,
               const void* at) {
  if (!device().finds_races || bytes < kGranule) return;
  for (uintptr_t i = offset / kGranule; i <= (offset + bytes - 1) / kGranule; ++i)
    touch(granules[i], shared, access, at);
}

bool in_shared(uintptr_t at, size_t bytes, Access access, const void* pointer) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(arena);
  if (at < begin || at >= begin + kArena) return false;
  const size_t offset = at - begin;
  if (access == kConstantRead) fail("reads shared memory by __ldg");
  for (const Variable& v : variables) {
    if (offset >= v.begin && offset + bytes <= v.begin + v.bytes) {
      touch_all(arena_granules, true, offset, bytes, access, pointer);
      return true;
    }
  }
  const Variable* nearest = nullptr;
  for (const Variable& v : variables) {
    if (v.begin <= offset) nearest = &v;
  }
  if (nearest == nullptr) fail("%s shared memory before its first variable", kVerbs[access]);
  fail("%s %zu bytes of shared memory at byte %zu of %s, which has %zu", kVerbs[access], bytes,
       offset - nearest->begin, nearest->name, nearest->bytes);
}

Storage* storage_of(uintptr_t at) {
  if (last_storage < storages.size() && at >= storages[last_storage].begin &&
      at < storages[last_storage].end) {
    return &storages[last_storage];
  }
  for (size_t i = 0; i < storages.size(); ++i) {
    if (at >= storages[i].begin && at < storages[i].end) {
      last_storage = i;
      return &storages[i];
    }
  }
  return nullptr;
}

// Describes the distance of an address from the tensors, for messages.
[[noreturn]] void fail_outside(uintptr_t at, size_t bytes, Access access) {
  const Span* nearest = nullptr;
  uintptr_t least = ~uintptr_t(0);
  for (const Storage& storage : storages) {
    for (const Span& span : storage.spans) {
      const uintptr_t distance = at < span.begin ? span.begin - at : at - span.end;
      if (distance < least) least = distance, nearest = &span;
    }
  }
  if (nearest == nullptr || least > 1 << 20) {
    fail("%s %zu bytes at %p, where no tensor of the operator is", kVerbs[access], bytes,
         reinterpret_cast<void*>(at));
  }
  fail("%s %zu bytes at byte %lld of a tensor that has %zu", kVerbs[access], bytes,
       static_cast<long long>(at - nearest->begin), size_t(nearest->end - nearest->begin));
}

bool in_global(uintptr_t at, size_t bytes, Access access, const void* pointer) {
  Storage* storage = storage_of(at);
  if (storage == nullptr) return false;
  bool known = false;
  for (const Span& span : storage->spans) {
    if (at < span.begin || at + bytes > span.end) continue;
    known = true;
    if (access >= kWrite && span.constant) continue;
    if (device().finds_races && storage->granules == nullptr) {
      const size_t count = (storage->end - storage->begin) / kGranule + 2;
      storage->granules = static_cast<Granule*>(std::calloc(count, sizeof(Granule)));
    }
    touch_all(storage->granules, false, at - storage->begin, bytes, access, pointer);
    return true;
  }
  if (known) fail("%s a tensor that it was given as constant", kVerbs[access]);
  return false;
}

}  // namespace

void access(const void* pointer, size_t bytes, Access access, size_t alignment) {
  if (!now.in_kernel) return;
  const uintptr_t at = reinterpret_cast<uintptr_t>(pointer);
  const char* byte = static_cast<const char*>(pointer);
  if (byte >= now.stack && byte < now.stack_end) return;
  const Outside outside;
  if (at % alignment != 0)
    fail("%s %zu bytes at %p, which is not aligned to that", kVerbs[access], bytes, pointer);
  if (in_shared(at, bytes, access, pointer) || in_global(at, bytes, access, pointer)) return preempt();
  const bool reads = access == kRead || access == kConstantRead;
  if (reads && byte >= now.parameters && byte + bytes <= now.parameters_end) return;
  if (own_image.begin == 0) dl_iterate_phdr(find_image, nullptr);
  if (reads && at >= own_image.begin && at + bytes <= own_image.end) return;
  fail_outside(at, bytes, access);
}

void begin_session() {
  for (Storage& storage : storages) std::free(storage.granules);
  storages.clear();
}

void allow(void* storage, size_t storage_bytes, void* data, size_t span, bool constant) {
  if (span == 0) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(storage), end = begin + storage_bytes;
  const uintptr_t first = reinterpret_cast<uintptr_t>(data);
  const Span added{first, first + span, constant};
  for (size_t i = 0; i < storages.size();) {
    Storage& known = storages[i];
    if (known.begin == begin && known.end == end) {
      for (const Span& s : known.spans) {
        if (s.begin == added.begin && s.end == added.end && s.constant == added.constant) return;
      }
      known.spans.push_back(added);
      return;
    }
    if (known.begin < end && begin < known.end) {  // has been freed since
      std::free(known.granules);
      storages.erase(storages.begin() + long(i));
    } else {
      ++i;
    }
  }
  storages.push_back({begin, end, {added}});
}

void poison(void* data, size_t bytes) {
  std::memset(data, 0xff, bytes);  // NaN in every floating-point type
}

void begin_block(size_t dynamic_shared_bytes) {
  poison(arena, kArena);
  variables.clear();
  dynamic_bytes = dynamic_shared_bytes, arena_used = kGap;
  if (dynamic_bytes == 0) return;
  arena_used = 128;
  variables.push_back({nullptr, "the dynamic shared memory", arena_used, dynamic_bytes});
  arena_used += dynamic_bytes + kGap;
}

void* shared(const void* key, size_t bytes, size_t alignment, const char* name) {
  const Outside outside;
  size_t sum = bytes;
  for (const Variable& v : variables) {
    if (v.key == key) return arena + v.begin;
    if (v.key != nullptr) sum += v.bytes;
  }
  if (sum > 48 << 10) fail("%zu bytes of static shared memory are more than 48 KiB", sum);
  arena_used = (arena_used + alignment - 1) / alignment * alignment;
  const size_t begin = arena_used;
  variables.push_back({key, name, begin, bytes});
  arena_used += bytes + kGap;
  return arena + begin;
}

void* dynamic_shared() {
  return arena + 128;
}

}  // namespace emulator

// The functions that -fsanitize=thread and the sanitizers of undefined behavior call.

using emulator::access;

#define ATTN_ACCESS(bytes)                                                   \
  void __tsan_read##bytes(void* at) {                                        \
    access(at, bytes, emulator::kRead, bytes);                               \
  }                                                                          \
  void __tsan_write##bytes(void* at) {                                       \
    access(at, bytes, emulator::kWrite, bytes);                              \
  }                                                                          \
  void __tsan_unaligned_read##bytes(void* at) {                              \
    access(at, bytes, emulator::kRead);                                      \
  }                                                                          \
  void __tsan_unaligned_write##bytes(void* at) {                             \
    access(at, bytes, emulator::kWrite);                                     \
  }                                                                          \
  void __tsan_read_write##bytes(void* at) {                                  \
    access(at, bytes, emulator::kRead, bytes);                               \
    access(at, bytes, emulator::kWrite, bytes);                              \
  }                                                                          \
  void __tsan_unaligned_read_write##bytes(void* at) {                        \
    access(at, bytes, emulator::kRead), access(at, bytes, emulator::kWrite); \
  }

extern "C" {
ATTN_ACCESS(1)
ATTN_ACCESS(2)
ATTN_ACCESS(4)
ATTN_ACCESS(8)
ATTN_ACCESS(16)
void __tsan_read_range(void* at, size_t bytes) {
  access(at, bytes, emulator::kRead);
}
void __tsan_write_range(void* at, size_t bytes) {
  access(at, bytes, emulator::kWrite);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  access(from, bytes, emulator::kRead), access(to, bytes, emulator::kWrite);
  return std::memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, size_t bytes) {
  access(from, bytes, emulator::kRead), access(to, bytes, emulator::kWrite);
  return std::memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) {
  access(to, bytes, emulator::kWrite);
  return std::memset(to, value, bytes);
}

// Atomics of host code (reference counts, guards of static variables).
#define ATTN_ATOMIC(bits, type)                                                                            \
  type __tsan_atomic##bits##_load(const volatile type* at, int) {                                          \
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);                                                          \
  }                                                                                                        \
  void __tsan_atomic##bits##_store(volatile type* at, type value, int) {                                   \
    __atomic_store_n(at, value, __ATOMIC_SEQ_CST);                                                         \
  }                                                                                                        \
  type __tsan_atomic##bits##_exchange(volatile type* at, type value, int) {                                \
    return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST);                                               \
  }                                                                                                        \
  type __tsan_atomic##bits##_fetch_add(volatile type* at, type value, int) {                               \
    return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);                                                \
  }                                                                                                        \
  type __tsan_atomic##bits##_fetch_sub(volatile type* at, type value, int) {                               \
    return __atomic_fetch_sub(at, value, __ATOMIC_SEQ_CST);                                                \
  }                                                                                                        \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile type* at, type* seen, type value, int, int) { \
    return __atomic_compare_exchange_n(at, seen, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);        \
  }                                                                                                        \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile type* at, type* seen, type value, int, int) {   \
    return __atomic_compare_exchange_n(at, seen, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);        \
  }
ATTN_ATOMIC(8, uint8_t)
ATTN_ATOMIC(32, uint32_t)
ATTN_ATOMIC(64, uint64_t)

struct Place {  // the beginning of the first argument of all these calls
  const char* file;
  uint32_t line, column;
};
#define ATTN_UNDEFINED(name, what)                             \
  void __ubsan_handle_##name##_abort(const Place* place) {     \
    emulator::fail(what " (%s:%u)", place->file, place->line); \
  }
ATTN_UNDEFINED(add_overflow, "a sum overflows")
ATTN_UNDEFINED(sub_overflow, "a difference overflows")
ATTN_UNDEFINED(mul_overflow, "a product overflows")
ATTN_UNDEFINED(negate_overflow, "a negation overflows")
ATTN_UNDEFINED(divrem_overflow, "an integer is divided by zero, or the quotient overflows")
ATTN_UNDEFINED(out_of_bounds, "an index is outside its array")
ATTN_UNDEFINED(type_mismatch_v1, "a pointer is misaligned for its type")
ATTN_UNDEFINED(float_cast_overflow, "a number is too large for the integer it is converted to")
ATTN_UNDEFINED(shift_out_of_bounds, "a shift is negative or too far")
}
