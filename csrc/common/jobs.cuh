// Small kernels that do not depend on each other, in one launch: where maps are small, a launch takes longer
// than what it does.
#pragma once

#include <array>

#include "transpose.cuh"

namespace attn_plugins {

struct Job {
  enum Kind { kTranspose, kTransposeSums, kRound, kZero } kind;  // sums: floats, of which results are halves
  int blocks;
  int vector;        // elements that a thread rounds or sets to zero at once: 1 or 4
  Transposition at;  // `rows` is the number of elements that are rounded, or of words that are set to zero
};

constexpr int kMostJobs = 4;
struct JobList {
  Job job[kMostJobs];
};

constexpr int kVectorsPerThread = 4;

template <int N, class T>
__device__ __forceinline__ void round_or_zero(const Job& job, int block) {
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
    const int64_t at = ((int64_t(block) * kVectorsPerThread + i) * kThreads + threadIdx.x) * N;
    if (at >= job.at.rows) return;
    if (job.kind == Job::kZero) {
      store(static_cast<unsigned*>(job.at.out) + at, Vector<unsigned, N>());
    } else if constexpr (sizeof(T) == 2) {
      const Vector<float, N> sums = load<float, N>(static_cast<const float*>(job.at.in) + at);
      store(static_cast<T*>(job.at.out) + at, narrow<T>(sums.element));
    }
  }
}

// Each job has a range of blocks.
template <class T>
__global__ void __launch_bounds__(kThreads, 6) jobs_kernel(const JobList list) {
  __shared__ Tile<T> tile;
  int block = static_cast<int>(blockIdx.x), number = 0;
  while (block >= list.job[number].blocks) block -= list.job[number++].blocks;
  const Job& job = list.job[number];
  const T* const none = nullptr;
  if (job.kind == Job::kTranspose) {
    transpose_tile<T, false>(job.at, block, tile, none, none);
  } else if (sizeof(T) == 2 && job.kind == Job::kTransposeSums) {
    transpose_tile<float, false>(job.at, block, tile, none, none);
  } else if (job.vector == 4) {
    round_or_zero<4, T>(job, block);
  } else {
    round_or_zero<1, T>(job, block);
  }
}

namespace {

// Collects jobs, whose results have one dtype, until run() does them.
class Jobs {
 public:
  // As `transposition` of transpose.cuh. `in` has out's dtype, or holds float sums of half gradients.
  void transpose(const Tensor& in, const Tensor& out, int64_t images, int64_t rows, int64_t columns,
                 int64_t image_stride, int64_t row_stride) {
    int64_t tiles = 0;
    const Transposition at = transposition(in, out, images, rows, columns, image_stride, row_stride, &tiles);
    const bool sums = in.scalar_type() != out.scalar_type();
    add(sums ? Job::kTransposeSums : Job::kTranspose, at, tiles, in);
    dtype_ = out.scalar_type();
  }

  // Rounds float sums to halves. Both fill their memory in the same order.
  void round(const Tensor& sums, const Tensor& out) {
    add_flat(Job::kRound, {sums.data_ptr(), out.data_ptr(), out.numel()}, sums);
    dtype_ = out.scalar_type();
  }

  // Sets sums to zero, which fill their memory.
  void zero(const Tensor& sums) {
    const int64_t words = sums.numel() * sums.element_size() / int64_t(sizeof(unsigned));
    add_flat(Job::kZero, {nullptr, sums.data_ptr(), words}, sums);
  }

  void run() {
    if (count_ > 0) for_type(dtype_, [&](auto zero) { launch(jobs_kernel<decltype(zero)>, blocks_, list_); });
    *this = Jobs();
  }

 private:
  void add_flat(Job::Kind kind, const Transposition& at, const Tensor& sums) {
    const int vector = vectors_fit<float, 4>({at.rows}, {at.in, at.out}) ? 4 : 1;
    add(kind, at, divide_up(at.rows, kThreads * kVectorsPerThread * vector), sums, vector);
  }

  void add(Job::Kind kind, const Transposition& at, int64_t blocks, const Tensor& in, int vector = 1) {
    if (blocks == 0) return;
    if (count_ == kMostJobs) run();
    list_.job[count_] = {kind, static_cast<int>(blocks), vector, at};
    kept_[count_++] = in;
    blocks_ += blocks;  // launch() checks it
  }

  JobList list_{};
  std::array<Tensor, kMostJobs> kept_;  // until they are read
  int count_ = 0;
  int64_t blocks_ = 0;
  ScalarType dtype_ = ScalarType::Float;
};

}  // namespace
}  // namespace attn_plugins
