// Runs CUDA kernels on the CPU, to test their source on machines without a GPU.
//
// Include it before csrc/*/*.cuh as rewritten by translate.py, which turns launches and shared variables into
// calls, puts ptx.cuh in the place of csrc/common/ptx.cuh and changes nothing else.
//
// Emulated:
// * Grids, blocks, warps: every thread is a fiber. Blocks run one after another in random order. Threads run
//   in random order, and any memory access may switch to another thread.
// * __syncthreads, __syncwarp, shuffles, votes: threads wait for each other. Errors: a lane outside its mask,
//   lanes of a mask that meet at different intrinsics, threads that have returned or never arrive.
// * Memory. Errors: an access outside the tensors, the shared variables and the thread's own stack, a write
//   to a constant tensor, a misaligned vector. Shared memory and new tensors start as NaN, and local
//   variables as a fill pattern.
// * Races in shared and global memory. Errors: two threads access the same two bytes in one launch without a
//   barrier in between, at least one of them writing (unless both are atomic); __ldg of data that the launch
//   writes.
// * __CUDA_ARCH__ and, in ptx.cuh, the instructions of csrc/common/ptx.cuh. The compiler option EMULATED_ARCH
//   is 800 or 900.
// * Properties of the device, grid limits, the shared memory that a block may request.
//
// Not emulated: registers and spilling, launch bounds, time; the weak memory order of GPUs, fences, blocks
// that wait for each other; the rounding within mma (here: one rounding at the end) and of approximate
// functions (here: the CPU's).
//
// An error ends the kernel with a RuntimeError that names the thread, the block and, if addr2line is
// installed, the line. Environment variables:
//   EMULATOR_MULTIPROCESSORS (132), EMULATOR_L2 (bytes)  the device
//   EMULATOR_SEED (0)      selects an order of threads and blocks
//   EMULATOR_PREEMPTS (1)  0: switch threads only at barriers
//   EMULATOR_RACES (1)     0: do not detect races
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "emulator.h"

namespace emulator {

// Allows kernels to access a tensor whose data pointer was requested; they may access no other.
inline void allow_tensor(AtenTensorHandle tensor, const void* data, bool constant) {
  int64_t dim = 0, *sizes = nullptr, *strides = nullptr, offset = 0, bytes = 0;
  int32_t type = 0;
  aoti_torch_get_dim(tensor, &dim), aoti_torch_get_sizes(tensor, &sizes),
      aoti_torch_get_strides(tensor, &strides);
  aoti_torch_get_storage_offset(tensor, &offset), aoti_torch_get_storage_size(tensor, &bytes);
  aoti_torch_get_dtype(tensor, &type);
  const int64_t element = int64_t(aoti_torch_dtype_element_size(type));
  int64_t span = 1;
  for (int64_t i = 0; i < dim; ++i)
    span = sizes[i] == 0 || span == 0 ? 0 : span + (sizes[i] - 1) * strides[i];
  char* const first = static_cast<char*>(const_cast<void*>(data));
  allow(first - offset * element, size_t(bytes), first, size_t(span * element), constant);
}
inline AOTITorchError data_pointer(AtenTensorHandle tensor, void** data) {
  const AOTITorchError error = aoti_torch_get_data_ptr(tensor, data);
  if (error == 0) allow_tensor(tensor, *data, false);
  return error;
}
inline AOTITorchError mutable_pointer(AtenTensorHandle tensor, void** data) {
  const AOTITorchError error = torch_get_mutable_data_ptr(tensor, data);
  if (error == 0) allow_tensor(tensor, *data, false);
  return error;
}
inline AOTITorchError constant_pointer(AtenTensorHandle tensor, const void** data) {
  const AOTITorchError error = torch_get_const_data_ptr(tensor, data);
  if (error == 0) allow_tensor(tensor, *data, true);
  return error;
}

// Fill uninitialized memory with NaN.
inline void poison_all(AtenTensorHandle tensor) {
  void* data = nullptr;
  int64_t bytes = 0;
  aoti_torch_get_data_ptr(tensor, &data), aoti_torch_get_storage_size(tensor, &bytes);
  if (bytes > 0) poison(data, size_t(bytes));
}
inline AOTITorchError dispatch(const char* name, const char* overload, StableIValue* stack,
                               uint64_t version) {
  const AOTITorchError error = torch_call_dispatcher(name, overload, stack, version);
  if (error == 0 &&
      (std::strcmp(name, "aten::new_empty") == 0 || std::strcmp(name, "aten::empty_like") == 0)) {
    AtenTensorHandle tensor;
    std::memcpy(&tensor, &stack[0], sizeof tensor);
    poison_all(tensor);
  }
  return error;
}
inline AOTITorchError empty(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t type,
                            int32_t device, int32_t index, AtenTensorHandle* tensor) {
  const AOTITorchError error = aoti_torch_empty_strided(dim, sizes, strides, type, device, index, tensor);
  if (error == 0) poison_all(*tensor);
  return error;
}

}  // namespace emulator

#define aoti_torch_get_data_ptr emulator::data_pointer
#define torch_get_mutable_data_ptr emulator::mutable_pointer
#define torch_get_const_data_ptr emulator::constant_pointer
#define torch_call_dispatcher emulator::dispatch
#define aoti_torch_empty_strided emulator::empty

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/Half.h>

#include "cuda_index.h"
#include "cuda_language.h"
#include "cuda_runtime.h"

// Defined after torch's headers, which would otherwise include CUDA's.
#define __CUDACC__ 1
#define __CUDA_ARCH__ EMULATED_ARCH

namespace emulator {

// Wraps an operator: each call forgets the tensors of earlier calls.
template <auto FUNCTION>
struct Operator;
template <class Result, class... Arguments, Result (*FUNCTION)(Arguments...)>
struct Operator<FUNCTION> {
  static Result call(Arguments... arguments) {
    begin_session();
    return FUNCTION(arguments...);
  }
};

}  // namespace emulator

#define EMULATED(function) TORCH_BOX(&emulator::Operator<&function>::call)
