// Gradients of bilinear samples, summed in shared memory.
//
// Every sample adds its share of a gradient to four pixels of a map, and neighbouring samples share pixels. A
// block takes neighbouring samples, sums their shares in windows of the map, and adds each pixel of a window
// to global memory once. Samples outside their window are added to global memory directly.
//
// Each warp takes 8 * N channels and has its own window. The window consists of cells of 2 x 2 pixels; the
// thread with number 8 * corner + i takes N channels of that corner of every cell. The four pixels of a
// sample lie in different corners, so that no two threads ever share an address: additions to a window need
// neither atomics nor barriers, and have no bank conflicts.
#pragma once

#include <climits>

#include "common/bilinear.cuh"

namespace attn_plugins {

constexpr int kWarps = kThreads / 32;
constexpr int kScatterRun = 8;  // neighbouring samples whose gradients are loaded together
constexpr int kNowhere = -1;    // the target of a share that no pixel of the map receives

// Blocks on a multiprocessor. Windows of four channels a thread have as many cells as those of two channels
// of two blocks, and half as many instructions serve a channel.
template <int N>
constexpr int kScatterBlocks = N == 4 ? 1 : 2;

// What a sample adds to one of its pixels. `target` is the element of a warp's window, kNowhere, or -2 - the
// number of a pixel outside the window.
struct alignas(8) ScatterShare {
  float weight;
  int target;
};

// The upper left pixels of a tile's samples: their extent, and their sum and number.
struct ScatterExtent {
  int top, left, bottom, right;
  float rows, columns, count;

  __device__ __forceinline__ static ScatterExtent none() {
    return {INT_MAX, INT_MAX, INT_MIN, INT_MIN, 0.0f, 0.0f, 0.0f};
  }

  __device__ __forceinline__ void include(const Sample<float>& s) {
    if (!s.near) return;
    top = min(top, s.row), bottom = max(bottom, s.row);
    left = min(left, s.column), right = max(right, s.column);
    rows += float(s.row), columns += float(s.column), count += 1.0f;
  }

  // Becomes the extent of the whole warp.
  __device__ __forceinline__ void reduce_warp() {
    constexpr unsigned kAll = 0xffffffffu;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      top = min(top, __shfl_xor_sync(kAll, top, step)),
      bottom = max(bottom, __shfl_xor_sync(kAll, bottom, step));
      left = min(left, __shfl_xor_sync(kAll, left, step)),
      right = max(right, __shfl_xor_sync(kAll, right, step));
      rows += __shfl_xor_sync(kAll, rows, step), columns += __shfl_xor_sync(kAll, columns, step);
      count += __shfl_xor_sync(kAll, count, step);
    }
  }

  // Sets *total, in shared memory, to the extent of the whole block. Ends with a barrier.
  __device__ __forceinline__ void reduce(ScatterExtent* total) {
    if (threadIdx.x == 0) *total = none();
    __syncthreads();
    reduce_warp();
    if (threadIdx.x % 32 == 0) {
      atomicMin(&total->top, top), atomicMax(&total->bottom, bottom);
      atomicMin(&total->left, left), atomicMax(&total->right, right);
      atomicAdd(&total->rows, rows), atomicAdd(&total->columns, columns), atomicAdd(&total->count, count);
    }
    __syncthreads();
  }
};

// A window of the map: its upper left pixel, which may lie outside, and its cells.
struct ScatterWindow {
  int row, column, rows, columns;

  // The samples' extent if it has at most `cells` cells, or else a part of it around their mean, about
  // side x side.
  __device__ __forceinline__ ScatterWindow(const ScatterExtent& e, int cells, int side) {
    const int high = (e.bottom - e.top + 3) / 2, wide = (e.right - e.left + 3) / 2;
    columns = min(wide, cells / min(high, side));
    rows = min(high, cells / columns);
    row = place(e.rows / e.count, rows, e.top, e.bottom);
    column = place(e.columns / e.count, columns, e.left, e.right);
  }

  // The first pixel of `cells` cells around `mean`, none of them beyond the samples from `first` to `last`.
  __device__ __forceinline__ static int place(float mean, int cells, int first, int last) {
    return max(first, min(static_cast<int>(mean) - cells + 1, last + 2 - 2 * cells));
  }

  // What a sample adds to the pixel that lies in `corner` of its cell.
  __device__ __forceinline__ ScatterShare share(const Sample<float>& s, float scale, int corner, int H, int W,
                                                int stride) const {
    const int down = ((s.row - row) ^ (corner >> 1)) & 1, across = ((s.column - column) ^ corner) & 1;
    const float weight = (down ? s.dy : 1.0f - s.dy) * (across ? s.dx : 1.0f - s.dx);
    return {weight * scale, s.near ? target(s.row + down, s.column + across, H, W, stride) : kNowhere};
  }

  // The target of a pixel of the map. A corner of a cell has `stride` elements for each of the four corners.
  __device__ __forceinline__ int target(int y, int x, int H, int W, int stride) const {
    if (y < 0 || y >= H || x < 0 || x >= W) return kNowhere;
    const int down = y - row, across = x - column;
    const bool inside = down >= 0 && across >= 0 && down < 2 * rows && across < 2 * columns;
    return inside ? ((down >> 1) * columns + (across >> 1)) * stride : -2 - (y * W + x);
  }
};

// sum += weight * gradient
template <class T, int N>
__device__ __forceinline__ void add_share(float weight, const Vector<T, N>& gradient, float (&sum)[N]) {
  float x[N];
  widen(gradient, x);
#pragma unroll
  for (int e = 0; e < N; ++e) sum[e] += weight * x[e];
}

// Zeroes a thread's elements of a window, which begin at `own`; those of other cells are 32 * N elements
// apart.
template <int N>
__device__ __forceinline__ void clear_window(const ScatterWindow& window, float* own) {
  for (int cell = 0; cell < window.rows * window.columns; ++cell)
    store(own + cell * 32 * N, Vector<float, N>());
}

// Adds the shares of a run of samples to the thread's corner of the window, or to the map, whose pixels are
// `stride` elements apart. at(u) is the address of sample u's gradient, one that can be read where the sample
// has no target.
template <class T, int N, class At>
__device__ __forceinline__ void add_run(const ScatterShare (*shares)[4], int corner, const At& at, float* own,
                                        float* map, int64_t stride) {
  ScatterShare share[kScatterRun];
  Vector<T, N> gradient[kScatterRun];
  bool beyond = false;
#pragma unroll
  for (int u = 0; u < kScatterRun; ++u) gradient[u] = load_constant<T, N>(at(u));
#pragma unroll
  for (int u = 0; u < kScatterRun; ++u) {
    share[u] = shares[u][corner];
    beyond |= share[u].target < kNowhere;
  }
#pragma unroll
  for (int u = 0; u < kScatterRun; ++u) {
    if (share[u].target < 0) continue;
    Vector<float, N> sum = load<float, N>(own + share[u].target);
    add_share(share[u].weight, gradient[u], sum.element);
    store(own + share[u].target, sum);
  }
  if (!beyond) return;
#pragma unroll 1
  for (int u = 0; u < kScatterRun; ++u) {
    const ScatterShare one = shares[u][corner];
    if (one.target >= kNowhere) continue;
    float part[N] = {};
    add_share(one.weight, load_constant<T, N>(at(u)), part);
    add_atomically(map + int64_t(-2 - one.target) * stride, part);
  }
}

// Adds the thread's elements of a window to a map of W pixels a row, which are `stride` elements apart.
template <int N>
__device__ __forceinline__ void add_window(const ScatterWindow& window, const float* own, int corner,
                                           float* map, int W, int64_t stride) {
  for (int y = 0; y < window.rows; ++y) {
    for (int x = 0; x < window.columns; ++x, own += 32 * N) {
      const Vector<float, N> sum = load<float, N>(own);
      bool touched = false;  // pixels outside the map are not
      float part[N];
#pragma unroll
      for (int e = 0; e < N; ++e) part[e] = sum.element[e], touched |= part[e] != 0.0f;
      const int64_t row = window.row + 2 * y + corner / 2, at = window.column + 2 * x + corner % 2;
      if (touched) add_atomically(map + (row * W + at) * stride, part);
    }
  }
}

}  // namespace attn_plugins
