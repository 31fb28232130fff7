// Input gradient of deformable convolution, summed in shared memory (common/scatter.cuh): for 3 x 3 taps,
// there are 36 additions per output pixel and channel, most of them to pixels that the taps and the
// neighbouring output pixels also add to. A block takes a tile of output pixels, and its warps different
// channels.
#pragma once

#include "common/scatter.cuh"
#include "cuda_sampling.cuh"

namespace attn_plugins {

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
  const ScatterWindow window(total, tiles.cells, tiles.side);

  const int v = ((tile.channel_slice * kWarps + thread / 32) * 8 + thread % 8) * N;
  const bool active = v < p.offset_group_channels;
  const int c = tile.offset_group * p.offset_group_channels + (active ? v : 0);
  const T* column = grad_columns + column_index(p, c);
  float* image = grad_input + tile.n * p.image + c;
  float* own = windows + (thread / 32 * tiles.cells * 32 + thread % 32) * N;
  const int column_bytes = p.taps * p.group_channels * int(sizeof(T));
  if (active) clear_window<N>(window, own);

  for (int first = 0; first < samples; first += kThreads) {
    const int count = min(kThreads, samples - first);
    if (first > 0) __syncthreads();  // wait until the previous round has been read
    if (thread < count) {
      float mask;
      const Sample<float> s = tile.sample(p, tiles, first + thread, &mask);
#pragma unroll
      for (int i = 0; i < 4; ++i) shares[thread][i] = window.share(s, mask, i, p.H, p.W, 32 * N);
    }
    __syncthreads();
    for (int j = 0; active && j < count; j += kScatterRun) {
      int tap, y, x;
      tiles.split(first + j, &tap, &y, &x);
      // Pixels beyond the block have no columns, and their shares no target: other pixels' columns stand in.
      const int64_t pixel = tile.pixel(p, y, x);
      const int run = static_cast<int>(min(max(pixel, int64_t(-kScatterRun)), int64_t(p.length)));
      const T* tap_column = column + tap * int64_t(p.group_channels);
      const auto at = [&](int u) {
        return pixel_at(tap_column, min(max(run + u, 0), p.length - 1), column_bytes);
      };
      add_run<T, N>(shares + j, corner, at, own, image, p.C);
    }
  }
  if (active) add_window<N>(window, own, corner, image, p.W, p.C);
}

}  // namespace attn_plugins
