// Small kernels that do not depend on each other, in one launch: where maps are small, a launch takes longer
// than what it does.
#pragma once

#include <array>
#include <limits>

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

// Collects jobs whose results have one dtype; they are done by run().
class Jobs {
 public:
  // As `transposition` of transpose.cuh. `in` has out's dtype, or holds float sums of half gradients.
  void transpose(const Tensor& in, const Tensor& out, int64_t images, int64_t rows, int64_t columns,
                 int64_t image_stride, int64_t row_stride) {
    int64_t tiles = 0;
    const Transposition at = transposition(in, out, images, rows, columns, image_stride, row_stride, &tiles);
    const bool sums = in.scalar_type() != out.scalar_type();
    add({sums ? Job::kTransposeSums : Job::kTranspose, 0, 1, at}, tiles, in, out.scalar_type());
  }

  // Rounds float sums to out, a half; both are contiguous.
  void round(const Tensor& sums, const Tensor& out) {
    add_flat({Job::kRound, 0, 1, {sums.data_ptr(), out.data_ptr(), out.numel()}}, sums, out.scalar_type());
  }

  // Sets contiguous sums to zero.
  void zero(const Tensor& sums) {
    const int64_t words = sums.numel() * sums.element_size() / int64_t(sizeof(unsigned));
    add_flat({Job::kZero, 0, 1, {nullptr, sums.data_ptr(), words}}, sums, ScalarType::Undefined);
  }

  void run() {
    if (count_ == 0) return;
    for_type(dtype_ == ScalarType::Undefined ? ScalarType::Float : dtype_,
             [&](auto zero) { launch(jobs_kernel<decltype(zero)>, blocks_, list_); });
    *this = Jobs();
  }

 private:
  void add_flat(Job job, const Tensor& sums, ScalarType dtype) {
    const bool aligned = vectors_fit<float, 4>({job.at.rows}, {job.at.in, job.at.out});
    job.vector = aligned && sums.element_size() == 4 ? 4 : 1;
    add(job, divide_up(job.at.rows, kThreads * kVectorsPerThread * job.vector), sums, dtype);
  }

  void add(Job job, int64_t blocks, const Tensor& in, ScalarType dtype) {
    if (blocks == 0) return;
    if (count_ == kMostJobs) run();
    if (dtype != ScalarType::Undefined) dtype_ = dtype;
    job.blocks = static_cast<int>(std::min<int64_t>(blocks, std::numeric_limits<int>::max()));
    list_.job[count_] = job;
    kept_[count_++] = in;
    blocks_ += blocks;
  }

  JobList list_{};
  std::array<Tensor, kMostJobs> kept_;  // what is read
  int count_ = 0;
  int64_t blocks_ = 0;
  ScalarType dtype_ = ScalarType::Undefined;
};

}  // namespace
}  // namespace attn_plugins
