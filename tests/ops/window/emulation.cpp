// csrc/window/cuda.cuh on CPU tensors: the operators attn_plugins_emulated_window::forward_ and
// ::backward_.
#include "cuda_emulator.h"  // first

// What cuda.cuh's kernels use beside that: votes, and products on tensor cores.
inline bool __any_sync(unsigned members, bool vote) {
  unsigned votes = vote;
  for (int bits = 1; bits < 32; bits *= 2)
    votes |= emulator::shuffle(members, votes, emulator::block->current ^ bits);
  return votes;
}

#include "common/vector.cuh"

namespace attn_plugins {

inline bool has_tensor_cores() {
  return true;
}

template <class T>
void multiply_add(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                  unsigned b1) {
  static unsigned shared[emulator::kBlockThreads][6];
  const unsigned me = emulator::block->current, first = me / 32 * 32, group = me % 32 / 4, member = me % 4;
  const unsigned mine[6] = {a0, a1, a2, a3, b0, b1};
  std::copy(mine, mine + 6, shared[me]);
  emulator::Barrier& barrier = emulator::block->warp_barriers[{me / 32, ~0u}];
  emulator::wait(barrier, 32);
  const auto element = [&](unsigned lane, unsigned word, unsigned half) {
    T pair[2];
    std::memcpy(pair, &shared[first + lane][word], sizeof pair);
    return widen(pair[half]);
  };
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned column = 2 * member + i % 2;
    for (unsigned k = 0; k < 16;
         ++k) {  // the pair of columns 2c and 2c + 1, or, 8 farther, the next of the words
      const unsigned lane = k % 8 / 2;
      sum[i] += element(4 * group + lane, i / 2 + 2 * (k / 8), k % 2) *
                element(4 * column + lane, 4 + k / 8, k % 2);
    }
  }
  emulator::wait(barrier, 32);
}

}  // namespace attn_plugins

#include "window/cuda.cuh"

STABLE_TORCH_LIBRARY(attn_plugins_emulated_window, m) {
  m.def(
      "forward_(Tensor? query, Tensor? key, Tensor value, Tensor? position_logits, Tensor(a!) output, "
      "Tensor(b!) log_sum_exp, int[] geometry, bool zero_border, float scale) -> ()");
  m.def(
      "backward_(Tensor grad_output, Tensor? query, Tensor? key, Tensor value, Tensor? position_logits, "
      "Tensor output, Tensor log_sum_exp, Tensor(a!)? grad_query, Tensor(b!)? grad_key, "
      "Tensor(c!)? grad_value, Tensor(d!)? grad_position_logits, int[] geometry, bool zero_border, "
      "float scale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(attn_plugins_emulated_window, CPU, m) {
  using namespace attn_plugins;
  m.impl("forward_", TORCH_BOX(&window_attention_forward));
  m.impl("backward_", TORCH_BOX(&window_attention_backward));
}
