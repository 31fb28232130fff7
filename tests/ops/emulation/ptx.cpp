// Interprets inline assembly by PTX's documentation. An unknown instruction ends the kernel with an error
// that names it.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "emulator.h"
#include "ptx_matrix.h"
#include "ptx_number.h"

namespace emulator {

namespace {

// An argument: %0, the name of a register, a number, {...} or [address + offset].
struct Argument {
  enum Kind { kOperand, kRegister, kNumber, kList, kAddress } kind;
  int64_t number = 0;  // index of an operand, value of a number, offset of an address
  std::string name;
  std::vector<Argument> parts;  // elements of a list, base of an address
};
struct Instruction {
  std::string guard;  // name of a predicate, or empty
  bool negated = false;
  std::string text;
  std::vector<std::string> words;  // parts of the opcode between dots
  std::vector<Argument> arguments;

  bool has(const char* word) const {
    for (const std::string& w : words) {
      if (w == word) return true;
    }
    return false;
  }
  const std::string& type() const { return words.back(); }
};

std::string trimmed(const std::string& text) {
  const char* const blank = " \t\n\r";
  const size_t first = text.find_first_not_of(blank);
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(blank) - first + 1);
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::string part;
  int depth = 0;
  for (const char c : text) {
    depth += (c == '{' || c == '[') - (c == '}' || c == ']');
    if (c == at && depth == 0) {
      parts.push_back(trimmed(part)), part.clear();
    } else {
      part += c;
    }
  }
  if (!trimmed(part).empty()) parts.push_back(trimmed(part));
  return parts;
}

Argument parse_argument(const std::string& text) {
  if (text.empty()) fail("asm: an empty argument");
  if (text[0] == '{') {
    Argument list{Argument::kList, 0, "", {}};
    for (const std::string& part : split(text.substr(1, text.size() - 2), ','))
      list.parts.push_back(parse_argument(part));
    return list;
  }
  if (text[0] == '[') {
    const std::vector<std::string> parts = split(text.substr(1, text.size() - 2), '+');
    Argument address{Argument::kAddress, 0, "", {parse_argument(parts[0])}};
    if (parts.size() > 1) address.number = std::strtoll(parts[1].c_str(), nullptr, 0);
    return address;
  }
  if (text[0] == '%' && text.size() > 1 && std::isdigit(static_cast<unsigned char>(text[1]))) {
    return {Argument::kOperand, std::atoi(text.c_str() + 1), "", {}};
  }
  if (text.size() > 2 && (text.rfind("0f", 0) == 0 || text.rfind("0F", 0) == 0)) {  // the bits of a float
    return {Argument::kNumber, std::strtoll(text.c_str() + 2, nullptr, 16), "", {}};
  }
  if (std::isdigit(static_cast<unsigned char>(text[0])) || text[0] == '-') {
    return {Argument::kNumber, int64_t(std::strtoull(text.c_str(), nullptr, 0)), "", {}};
  }
  return {Argument::kRegister, 0, text, {}};
}

using Program = std::vector<Instruction>;

Program parse(const char* source) {
  Program program;
  std::string text = source;
  for (size_t at; (at = text.find("//")) != std::string::npos;) {
    text.erase(at, text.find('\n', at) == std::string::npos ? std::string::npos : text.find('\n', at) - at);
  }
  std::string statement;
  int depth = 0;
  const auto finish = [&] {
    statement = trimmed(statement);
    if (!statement.empty() && statement[0] != '.') {  // otherwise, it declares a register
      Instruction one;
      one.text = statement;
      if (statement[0] == '@') {
        const size_t end = statement.find_first_of(" \t\n");
        one.negated = statement[1] == '!';
        one.guard = statement.substr(one.negated ? 2 : 1, end - (one.negated ? 2 : 1));
        statement = trimmed(statement.substr(end));
      }
      const size_t end = statement.find_first_of(" \t\n");
      one.words = split(statement.substr(0, end), '.');
      if (end != std::string::npos) {
        for (const std::string& part : split(statement.substr(end), ','))
          one.arguments.push_back(parse_argument(part));
      }
      program.push_back(one);
    }
    statement.clear();
  };
  for (const char c : text) {
    const bool begins = trimmed(statement).empty();
    if (c == ';') {
      finish();
    } else if (depth == 0 && begins && (c == '{' || c == '}')) {  // a scope of registers
    } else {
      depth += (c == '{') - (c == '}');
      statement += c;
    }
  }
  finish();
  return program;
}

// A copy started by cp.async. Its target is undefined until the thread waits for it.
struct Copy {
  void* to;
  const void* from;
  size_t bytes, zeros;
};
struct Copies {
  std::vector<Copy> begun;
  std::vector<std::vector<Copy>> groups;
};
Copies copies[kMostThreads];

void arrive(const std::vector<Copy>& group) {
  for (const Copy& copy : group) {
    now.in_kernel = true;
    access(copy.to, copy.bytes + copy.zeros, kWrite);
    now.in_kernel = false;
    if (copy.bytes > 0) std::memcpy(copy.to, copy.from, copy.bytes);
    std::memset(static_cast<char*>(copy.to) + copy.bytes, 0, copy.zeros);
  }
}

void check(const void* at, size_t bytes, Access how, size_t alignment) {
  now.in_kernel = true;
  access(at, bytes, how, alignment);
  now.in_kernel = false;
}

struct Machine {
  const Operand* operands;
  int count;
  uint64_t values[32];
  std::map<std::string, uint64_t> registers;

  uint64_t read(const Argument& a) const {
    switch (a.kind) {
      case Argument::kOperand:
        if (a.number >= count) fail("asm: no operand %%%d", int(a.number));
        return values[a.number];
      case Argument::kNumber:
        return uint64_t(a.number);
      case Argument::kRegister: {
        const auto entry = registers.find(a.name);
        if (entry == registers.end()) fail("asm: %s is read before it is written", a.name.c_str());
        return entry->second;
      }
      default: {  // {low, high}
        uint64_t packed = 0;
        const unsigned bits = a.parts.size() == 2 && a.parts[0].kind == Argument::kOperand &&
                                      operands[a.parts[0].number].bytes == 4
                                  ? 32
                                  : 16;
        for (size_t i = 0; i < a.parts.size(); ++i) {
          packed |= (read(a.parts[i]) & ((uint64_t(1) << bits) - 1)) << (bits * i);
        }
        return packed;
      }
    }
  }
  void write(const Argument& a, uint64_t value) {
    if (a.kind == Argument::kOperand) {
      if (a.number >= count || operands[a.number].out == nullptr)
        fail("asm: %%%d is no output", int(a.number));
      values[a.number] = value;
    } else if (a.kind == Argument::kRegister) {
      registers[a.name] = value;
    } else {
      fail("asm: a result goes where it cannot");
    }
  }
  // Returns the elements of a list, or the argument itself.
  static std::vector<Argument> parts(const Argument& a) {
    return a.kind == Argument::kList ? a.parts : std::vector<Argument>{a};
  }
  void* address(const Instruction& i, const Argument& a) const {
    if (a.kind != Argument::kAddress) fail("asm: %s takes an address", i.text.c_str());
    const uint64_t base = read(a.parts[0]) + uint64_t(a.number);
    return i.has("shared") ? shared_pointer(unsigned(base)) : reinterpret_cast<void*>(base);
  }

  void load(const Instruction& i) {
    const std::vector<Argument> to = parts(i.arguments[0]);
    const size_t bytes = size_of_type(i.type());
    const char* at = static_cast<const char*>(address(i, i.arguments[1]));
    check(at, bytes * to.size(), i.has("nc") ? kConstantRead : kRead, bytes * to.size());
    for (size_t n = 0; n < to.size(); ++n) {
      uint64_t value = 0;
      std::memcpy(&value, at + n * bytes, bytes);
      write(to[n], value);
    }
  }
  void store(const Instruction& i) {
    const std::vector<Argument> from = parts(i.arguments[1]);
    const size_t bytes = size_of_type(i.type());
    char* at = static_cast<char*>(address(i, i.arguments[0]));
    check(at, bytes * from.size(), kWrite, bytes * from.size());
    for (size_t n = 0; n < from.size(); ++n) {
      const uint64_t value = read(from[n]);
      std::memcpy(at + n * bytes, &value, bytes);
    }
  }
  void reduce(const Instruction& i) {
    const std::vector<Argument> from = parts(i.arguments[1]);
    const size_t bytes = size_of_type(i.type());
    char* at = static_cast<char*>(address(i, i.arguments[0]));
    check(at, bytes * from.size(), kAtomic, bytes * from.size());
    for (size_t n = 0; n < from.size(); ++n) {
      uint64_t old = 0;
      std::memcpy(&old, at + n * bytes, bytes);
      const uint64_t sum = calculate(i.text, "add", i.type(), old, read(from[n]));
      std::memcpy(at + n * bytes, &sum, bytes);
    }
  }

  void multiply_matrices(const Instruction& i) {
    const std::vector<Argument> sum = parts(i.arguments[0]), a = parts(i.arguments[1]),
                                b = parts(i.arguments[2]);
    const std::vector<Argument> addend = parts(i.arguments[3]);
    const MatrixShape* shape = find_shape(i.text);
    if (shape == nullptr) fail("asm: %s is not emulated", i.text.c_str());
    if (a.size() != shape->a || b.size() != shape->b || sum.size() != 4 || addend.size() != 4) {
      fail("asm: %s has fragments of another size", i.text.c_str());
    }
    MatrixFragments mine{};
    for (size_t n = 0; n < a.size(); ++n) mine.a[n] = uint32_t(read(a[n]));
    for (size_t n = 0; n < b.size(); ++n) mine.b[n] = uint32_t(read(b[n]));
    for (size_t n = 0; n < 4; ++n) mine.sum[n] = float_of(uint32_t(read(addend[n])));
    together(shape->name, ~0u, &mine, sizeof mine, shape->operation);
    for (size_t n = 0; n < 4; ++n) write(sum[n], bits_of(mine.sum[n]));
  }

  void load_matrices(const Instruction& i) {
    const std::vector<Argument> to = parts(i.arguments[0]);
    MatrixRows mine{};
    mine.row = static_cast<const char*>(address(i, i.arguments[1]));
    mine.count = unsigned(to.size()), mine.transposed = i.has("trans");
    if (now.thread % kLanes < 8 * to.size()) check(mine.row, 16, kRead, 16);
    together("ldmatrix", ~0u, &mine, sizeof mine, load_matrix_rows);
    for (size_t n = 0; n < to.size(); ++n) write(to[n], mine.words[n]);
  }

  void copy_async(const Instruction& i) {
    Copies& mine = copies[now.thread];
    if (i.has("commit_group")) {
      mine.groups.push_back(std::move(mine.begun));
      mine.begun.clear();
    } else if (i.has("wait_group") || i.has("wait_all")) {
      const size_t left = i.has("wait_all") ? 0 : size_t(read(i.arguments[0]));
      while (mine.groups.size() > left) arrive(mine.groups[0]), mine.groups.erase(mine.groups.begin());
      if (i.has("wait_all")) arrive(mine.begun), mine.begun.clear();
    } else {
      const size_t bytes = size_t(read(i.arguments[2]));
      const size_t given = i.arguments.size() > 3 ? size_t(read(i.arguments[3])) : bytes;
      if (bytes != 16 && (i.has("cg") || (bytes != 4 && bytes != 8))) fail("cp.async of %zu bytes", bytes);
      if (given > bytes) fail("cp.async reads %zu bytes into %zu", given, bytes);
      void* to = shared_pointer(unsigned(read(i.arguments[0].parts[0]) + uint64_t(i.arguments[0].number)));
      const void* from =
          reinterpret_cast<const void*>(read(i.arguments[1].parts[0]) + uint64_t(i.arguments[1].number));
      check(to, bytes, kWrite, bytes);
      if (given > 0) check(from, given, kRead, 1);
      if (reinterpret_cast<uintptr_t>(from) % bytes != 0)
        fail("cp.async reads %p, which is misaligned", from);
      poison(to, bytes);
      mine.begun.push_back({to, from, given, bytes - given});
    }
  }

  void step(const Instruction& i) {
    const std::string& name = i.words[0];
    const std::vector<Argument>& a = i.arguments;
    if (name == "mov") {
      const std::vector<Argument> to = parts(a[0]);
      const uint64_t value = read(a[1]);
      const unsigned bits = unsigned(8 * size_of_type(i.type()) / to.size());
      for (size_t n = 0; n < to.size(); ++n) {
        write(to[n], to.size() == 1 ? value : value >> (bits * n) & ((uint64_t(1) << bits) - 1));
      }
    } else if (name == "setp") {
      write(a[0], compare(i.text, i.words[1], i.type(), read(a[1]), read(a[2])));
    } else if (name == "selp") {
      write(a[0], read(a[3]) ? read(a[1]) : read(a[2]));
    } else if (name == "ld") {
      load(i);
    } else if (name == "st") {
      store(i);
    } else if (name == "red" && i.has("add")) {
      reduce(i);
    } else if (name == "mma") {
      multiply_matrices(i);
    } else if (name == "ldmatrix") {
      load_matrices(i);
    } else if (name == "cp" && i.has("async")) {
      copy_async(i);
    } else if (name == "bar" && i.has("warp")) {
      together("__syncwarp", unsigned(read(a[0])), nullptr, 0, nullptr, true);
    } else if (name == "bar" && a.size() == 1 && read(a[0]) == 0) {
      block_barrier();
    } else if (name == "cvta") {
      const uint64_t from = read(a[1]);
      write(a[0], i.has("to") ? shared_address(reinterpret_cast<void*>(from))
                              : reinterpret_cast<uint64_t>(shared_pointer(unsigned(from))));
    } else if (name == "prefetch" || name == "discard") {
    } else if (name == "cvt") {
      write(a[0], a.size() == 3 ? convert_pair(i.text, i.words[i.words.size() - 2], read(a[1]), read(a[2]))
                                : convert(i.text, i.words[i.words.size() - 2], i.type(), read(a[1])));
    } else if (name == "mad" && i.has("wide") && i.type() == "s32") {
      write(a[0], uint64_t(int64_t(int32_t(read(a[1]))) * int32_t(read(a[2]))) + read(a[3]));
    } else if (name == "fma" || name == "mad") {
      write(a[0], multiply_add_numbers(i.text, i.type(), read(a[1]), read(a[2]), read(a[3])));
    } else if (a.size() == 2) {
      write(a[0], calculate(i.text, name, i.type(), read(a[1]), 0));
    } else if (a.size() == 3) {
      write(a[0], calculate(i.text, name, i.type(), read(a[1]), read(a[2])));
    } else {
      fail("asm: %s is not emulated", i.text.c_str());
    }
  }
};

}  // namespace

void ptx(const char* text, const Operand* operands, int count) {
  const Outside outside;
  static std::map<const void*, Program> programs;
  auto program = programs.find(text);
  if (program == programs.end()) program = programs.emplace(text, parse(text)).first;
  if (count > 32) fail("asm: more than 32 operands");
  Machine machine{operands, count, {}, {}};
  for (int i = 0; i < count; ++i) {
    machine.values[i] = operands[i].constraint[0] == '=' ? ~uint64_t(0) : operands[i].value;
  }
  for (const Instruction& i : program->second) {
    if (i.guard.empty() || (machine.registers[i.guard] != 0) != i.negated) machine.step(i);
  }
  for (int i = 0; i < count; ++i) {
    if (operands[i].out != nullptr) std::memcpy(operands[i].out, &machine.values[i], operands[i].bytes);
  }
}

void end_thread() {
  Copies& mine = copies[now.thread];
  if (mine.begun.empty() && mine.groups.empty()) return;
  for (const auto& group : mine.groups) arrive(group);
  arrive(mine.begun);
  mine.begun.clear(), mine.groups.clear();
}

void forget_copies() {
  for (Copies& one : copies) one.begun.clear(), one.groups.clear();
}

}  // namespace emulator
