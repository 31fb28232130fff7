// Input gradient of deformable convolution, summed in shared memory.
//
// Every sample adds its share of a column's gradient to four input pixels: for 3 x 3 taps, 36 additions per
// output pixel and channel, most of them to pixels that the taps and the neighbouring output pixels also add
// to. A block takes a tile of output pixels, sums their shares in a window of the input map, and adds each
// pixel of the window to global memory once. Samples outside the window are added to global memory directly.
//
// Each warp takes 8 * N channels and has its own window. The window consists of cells of 2 x 2 pixels; the
// thread with number 8 * corner + i takes N channels of that corner of every cell. The four pixels of a
// sample lie in different corners, so that no two threads ever share an address: additions to a window need
// neither atomics nor barriers, and have no bank conflicts.
#pragma once

#include <climits>

#include "cuda_sampling.cuh"

namespace attn_plugins {

constexpr int kWarps = kThreads / 32;
constexpr int kScatterRun = 8;  // output pixels of a row whose column gradients are loaded together
constexpr int kNowhere = -1;    // the target of a share that no pixel of the map receives

// Blocks on a multiprocessor. Windows of four channels a thread have as many cells as those of two channels
// of two blocks, and half as many instructions serve a channel.
template <int N>
constexpr int kScatterBlocks = N == 4 ? 1 : 2;

// How a convolution's output is cut into tiles of output pixels.
struct ScatterTiles {
  int rows_log2, columns_log2;           // of a tile; its columns are a multiple of kScatterRun
  int first_image;                       // of the grid
  int cells, side;                       // of a warp's window: at most `cells`, about side x side
  Divisor across, down, channel_slices;  // tiles per row and column of an image; blocks that share a tile

  // The tap and output pixel of a tile's sample: all pixels' first tap, then all pixels' second tap, and so
  // on.
  __device__ __forceinline__ void split(int number, int* tap, int* y, int* x) const {
    *tap = number >> (rows_log2 + columns_log2);
    *y = (number >> columns_log2) & ((1 << rows_log2) - 1);
    *x = number & ((1 << columns_log2) - 1);
  }
};

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

  // Sets *total, in shared memory, to the extent of the whole block. Ends with a barrier.
  __device__ __forceinline__ void reduce(ScatterExtent* total) {
    if (threadIdx.x == 0) *total = none();
    __syncthreads();
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

  // The samples' extent if it has few enough cells, or else a part of it around their mean.
  __device__ __forceinline__ ScatterWindow(const ScatterExtent& e, const ScatterTiles& tiles) {
    const int high = (e.bottom - e.top + 3) / 2, wide = (e.right - e.left + 3) / 2;
    columns = min(wide, tiles.cells / min(high, tiles.side));
    rows = min(high, tiles.cells / columns);
    row = place(e.rows / e.count, rows, e.top, e.bottom);
    column = place(e.columns / e.count, columns, e.left, e.right);
  }

  // The first pixel of `cells` cells around `mean`, none of them beyond the samples from `first` to `last`.
  __device__ __forceinline__ static int place(float mean, int cells, int first, int last) {
    return max(first, min(static_cast<int>(mean) - cells + 1, last + 2 - 2 * cells));
  }

  // The target of a pixel of the map. A corner of a cell has `stride` elements for each of the four corners.
  __device__ __forceinline__ int target(int y, int x, int H, int W, int stride) const {
    if (y < 0 || y >= H || x < 0 || x >= W) return kNowhere;
    const int down = y - row, across = x - column;
    const bool inside = down >= 0 && across >= 0 && down < 2 * rows && across < 2 * columns;
    return inside ? ((down >> 1) * columns + (across >> 1)) * stride : -2 - (y * W + x);
  }
};

// The tile of a block.
struct ScatterTile {
  int n, oy, ox, offset_group, channel_slice;

  template <class T>
  __device__ __forceinline__ ScatterTile(const SamplingProblem<T>& p, const ScatterTiles& tiles) {
    int rest = tiles.channel_slices.divide(static_cast<int>(blockIdx.x), &channel_slice);
    rest = p.offset_groups.divide(rest, &offset_group);
    rest = tiles.across.divide(rest, &ox);
    n = tiles.first_image + tiles.down.divide(rest, &oy);
    oy <<= tiles.rows_log2, ox <<= tiles.columns_log2;
  }

  // The number of output pixel (y, x) of the tile within the block of pixels whose columns exist. It is
  // outside of that block, or belongs to another row, if the tile is cut off.
  template <class T>
  __device__ __forceinline__ int64_t pixel(const SamplingProblem<T>& p, int y, int x) const {
    return (int64_t(n) * p.rows.divisor + oy + y) * p.columns.divisor + ox + x - p.start;
  }

  // Sample `number` of the tile; one outside the map if its output pixel does not exist.
  template <class T>
  __device__ __forceinline__ Sample<float> sample(const SamplingProblem<T>& p, const ScatterTiles& tiles,
                                                  int number, float* mask) const {
    int tap, y, x;
    tiles.split(number, &tap, &y, &x);
    const int64_t at = pixel(p, y, x);
    const bool exists =
        oy + y < int(p.rows.divisor) && ox + x < int(p.columns.divisor) && at >= 0 && at < p.length;
    const Team team{
        exists ? static_cast<int>(at) : 0, n, oy + y, ox + x, offset_group, 0, 0, exists ? p.taps : 0};
    return locate(p, team, tap, mask);
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

// grad_input (N, H, W, C) += the shares of all samples of the block of output pixels.
template <class T, int N>
__global__ void __launch_bounds__(kThreads, kScatterBlocks<N>)
    scatter_kernel(const SamplingProblem<T> p, const ScatterTiles tiles, const T* __restrict__ grad_columns,
                   float* __restrict__ grad_input) {
  extern __shared__ __align__(16) float windows[];
  __shared__ ScatterShare shares[kThreads][4];
  __shared__ ScatterExtent total;
  const int thread = static_cast<int>(threadIdx.x), corner = thread % 32 / 8;
  const ScatterTile tile(p, tiles);
  const int samples = p.taps << (tiles.rows_log2 + tiles.columns_log2);

  ScatterExtent extent = ScatterExtent::none();
  for (int s = thread; s < samples; s += kThreads) {
    float mask;
    extent.include(tile.sample(p, tiles, s, &mask));
  }
  extent.reduce(&total);
  if (total.count == 0.0f) return;
  const ScatterWindow window(total, tiles);

  const int v = ((tile.channel_slice * kWarps + thread / 32) * 8 + thread % 8) * N;
  const bool active = v < p.offset_group_channels;
  const int c = tile.offset_group * p.offset_group_channels + (active ? v : 0);
  const T* column = grad_columns + column_index(p, c);
  float* image = grad_input + tile.n * p.image + c;
  // The first of the thread's own elements; those of other cells are 32 * N elements apart.
  float* own = windows + (thread / 32 * tiles.cells * 32 + thread % 32) * N;
  const int cells = window.rows * window.columns, column_bytes = p.taps * p.group_channels * int(sizeof(T));
  for (int cell = 0; active && cell < cells; ++cell) store(own + cell * 32 * N, Vector<float, N>());

  for (int first = 0; first < samples; first += kThreads) {
    const int count = min(kThreads, samples - first);
    if (first > 0) __syncthreads();  // wait until the previous round has been read
    if (thread < count) {
      float mask;
      const Sample<float> s = tile.sample(p, tiles, first + thread, &mask);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Pixel (down, across) of the sample lies in corner i of its cell.
        const int down = ((s.row - window.row) ^ (i >> 1)) & 1, across = ((s.column - window.column) ^ i) & 1;
        const float weight = (down ? s.dy : 1.0f - s.dy) * (across ? s.dx : 1.0f - s.dx);
        const int target = window.target(s.row + down, s.column + across, p.H, p.W, 32 * N);
        shares[thread][i] = {weight * mask, s.near ? target : kNowhere};
      }
    }
    __syncthreads();
    for (int j = 0; active && j < count; j += kScatterRun) {
      int tap, y, x;
      tiles.split(first + j, &tap, &y, &x);
      // Pixels beyond the block have no columns, and their shares no target: other pixels' columns stand in.
      const int64_t pixel = tile.pixel(p, y, x);
      const int run = static_cast<int>(min(max(pixel, int64_t(-kScatterRun)), int64_t(p.length)));
      const T* tap_column = column + tap * int64_t(p.group_channels);
      ScatterShare share[kScatterRun];
      Vector<T, N> gradient[kScatterRun];
      bool beyond = false;
#pragma unroll
      for (int u = 0; u < kScatterRun; ++u) {
        gradient[u] =
            load_constant<T, N>(pixel_at(tap_column, min(max(run + u, 0), p.length - 1), column_bytes));
      }
#pragma unroll
      for (int u = 0; u < kScatterRun; ++u) {
        share[u] = shares[j + u][corner];
        beyond |= share[u].target < kNowhere;
      }
#pragma unroll
      for (int u = 0; u < kScatterRun; ++u) {
        if (share[u].target < 0) continue;
        Vector<float, N> sum = load<float, N>(own + share[u].target);
        add_share(share[u].weight, gradient[u], sum.element);
        store(own + share[u].target, sum);
      }
      if (!beyond) continue;
#pragma unroll 1
      for (int u = 0; u < kScatterRun; ++u) {
        const ScatterShare one = shares[j + u][corner];
        if (one.target >= kNowhere) continue;
        float part[N] = {};
        add_share(one.weight, load_constant<T, N>(pixel_at(tap_column, run + u, column_bytes)), part);
        add_atomically(image + int64_t(-2 - one.target) * p.C, part);
      }
    }
  }

  for (int y = 0; active && y < window.rows; ++y) {
    for (int x = 0; x < window.columns; ++x, own += 32 * N) {
      const Vector<float, N> sum = load<float, N>(own);
      bool touched = false;  // pixels outside the map are not
      float part[N];
#pragma unroll
      for (int e = 0; e < N; ++e) part[e] = sum.element[e], touched |= part[e] != 0.0f;
      const int64_t row = window.row + 2 * y + corner / 2, at = window.column + 2 * x + corner % 2;
      if (touched) add_atomically(image + (row * p.W + at) * p.C, part);
    }
  }
}

}  // namespace attn_plugins
