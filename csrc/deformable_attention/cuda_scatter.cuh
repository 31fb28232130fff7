// Gradient of the values of deformable attention, summed in shared memory (common/scatter.cuh), where the
// queries are the pixels of the levels, as in an encoder: neighbouring pixels sample neighbouring pixels.
// Each warp takes a tile of queries, one head, and one level that they sample.
#pragma once

#include <cstdlib>

#include "common/scatter.cuh"
#include "cuda_problem.cuh"

namespace attn_plugins {

constexpr int kTileLog2 = 3, kTileQueries = 1 << 2 * kTileLog2;  // of 8 x 8 queries

struct AttentionTiles {
  int warps;                      // B * tiles * levels * M * slices
  int cells, side;                // of a warp's window: at most `cells`, about side x side
  Divisor tiles, levels, slices;  // of an image; of a head's channels
  int last[kMostLevels];          // number of tiles of this level and the levels before it
  Divisor across[kMostLevels];    // tiles per row of a level
};

// The work of a warp: its queries, from pixel (y, x) of `queries` on, and what they sample.
struct AttentionTile {
  int b, m, y, x, slice, first_point, points;
  AttentionLevel queries, level;

  __device__ __forceinline__ AttentionTile(const AttentionProblem& p, const AttentionTiles& tiles,
                                           int number) {
    int tile, sampled, l = 0;
    number = p.heads.divide(tiles.slices.divide(number, &slice), &m);
    b = tiles.tiles.divide(tiles.levels.divide(number, &sampled), &tile);
    while (tile >= tiles.last[l]) ++l;
    y = tiles.across[l].divide(tile - (l > 0 ? tiles.last[l - 1] : 0), &x);
    y <<= kTileLog2, x <<= kTileLog2;
    queries = p.level[l], level = p.level[sampled];
    first_point = sampled > 0 ? p.level[sampled - 1].last_point : 0;
    points = level.last_point - first_point;
  }

  // The query at (row, column) of the tile, the last of its row or column if the tile is cut off there.
  __device__ __forceinline__ int query(int row, int column) const {
    return queries.first_pixel + min(y + row, queries.height - 1) * queries.width +
           min(x + column, queries.width - 1);
  }

  // Sample `number`: all queries' first point, then all queries' second point, and so on. Outside the map if
  // its query does not exist.
  __device__ __forceinline__ Sample<float> sample(const AttentionProblem& p, const float* locations,
                                                  const float* weights, int number, float* weight) const {
    const int row = number >> kTileLog2 & 7, column = number & 7, point = number / kTileQueries;
    *weight = 0.0f;
    if (y + row >= queries.height || x + column >= queries.width) return {};
    const int64_t at = ((b * p.S + query(row, column)) * p.M + m) * p.P + first_point + point;
    *weight = __ldg(weights + at);
    return sample_at<float>(__ldg(locations + 2 * at + 1) * float(level.height) - 0.5f,
                            __ldg(locations + 2 * at) * float(level.width) - 0.5f, level.height, level.width);
  }
};

// grad_value (B, S, M, d) += the shares of all samples. Each thread takes N channels.
template <class T, int N>
__global__ void __launch_bounds__(kThreads, kScatterBlocks<N>)
    attend_scatter_kernel(const AttentionProblem p, const AttentionTiles tiles,
                          const T* __restrict__ grad_output, const float* __restrict__ locations,
                          const float* __restrict__ weights, float* __restrict__ grad_value) {
  extern __shared__ __align__(16) float windows[];
  __shared__ ScatterShare staged[kWarps][32][4];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32, corner = lane / 8;
  const int number = static_cast<int>(blockIdx.x) * kWarps + warp;
  if (number >= tiles.warps) return;
  const AttentionTile tile(p, tiles, number);
  const int samples = tile.points * kTileQueries;

  ScatterExtent extent = ScatterExtent::none();
  for (int s = lane; s < samples; s += 32) {
    float weight;
    extent.include(tile.sample(p, locations, weights, s, &weight));
  }
  extent.reduce_warp();
  if (extent.count == 0.0f) return;
  const ScatterWindow window(extent, tiles.cells, tiles.side);

  const int v = (tile.slice * 8 + lane % 8) * N;
  const bool active = v < p.d;
  const int c = tile.m * p.d + (active ? v : 0), pixel = p.M * p.d;
  const T* gradients = grad_output + tile.b * p.S * pixel + c;
  float* map = grad_value + (tile.b * p.S + tile.level.first_pixel) * pixel + c;
  float* own = windows + (warp * tiles.cells * 32 + lane) * N;
  if (active) clear_window<N>(window, own);

  for (int first = 0; first < samples; first += 32) {
    if (first > 0) __syncwarp();  // wait until the previous round has been read
    float weight;
    const Sample<float> s = tile.sample(p, locations, weights, first + lane, &weight);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      staged[warp][lane][i] = window.share(s, weight, i, tile.level.height, tile.level.width, 32 * N);
    }
    __syncwarp();
    for (int j = 0; active && j < 32; j += kScatterRun) {
      const int row = (first + j) >> kTileLog2 & 7;
      const auto at = [&](int u) { return gradients + int64_t(tile.query(row, u)) * pixel; };
      add_run<T, N>(staged[warp] + j, corner, at, own, map, pixel);
    }
  }
  if (active) add_window<N>(window, own, corner, map, tile.level.width, pixel);
}

namespace {

// Adds to grad_value by attend_scatter_kernel, or returns false: in double, where the queries are not the
// pixels, where a thread would not have four channels, and where the work is so small that one launch more
// costs more than it saves. ATTN_PLUGINS_SCATTER=0 or another number replaces the last condition.
template <class T>
bool attend_scatter(const AttentionProblem& p, int64_t B, int64_t Q, const T* grad_output,
                    const float* locations, const float* weights, float* grad_value) {
  constexpr int N = 4;
  const char* forced = std::getenv("ATTN_PLUGINS_SCATTER");
  const bool large = B * Q * p.M * p.P * p.d >= int64_t(1) << 20;
  if (forced ? *forced == '0' : !large) return false;
  if (Q != p.S || p.d < 16 || !vectors_fit<T, N>({p.d}, {grad_output})) return false;
  constexpr int64_t kStatic = sizeof(ScatterShare) * 4 * kThreads;
  AttentionTiles tiles{};
  tiles.cells = int((device_limits().block_bytes - kStatic) / (kWarps * 128 * N));
  while ((tiles.side + 1) * (tiles.side + 1) <= tiles.cells) ++tiles.side;
  if (tiles.side < 4) return false;
  int64_t count = 0;
  for (int l = 0; l < p.levels; ++l) {
    const auto [height, width, first_pixel, last_point] = p.level[l];
    const int64_t across = divide_up(width, 1 << kTileLog2);
    tiles.across[l] = Divisor(across);
    tiles.last[l] = int(count += across * divide_up(height, 1 << kTileLog2));
  }
  const int64_t slices = divide_up(p.d, 8 * N), warps = B * count * p.levels * p.M * slices;
  if (warps >= std::numeric_limits<int32_t>::max()) return false;
  tiles.warps = int(warps);
  tiles.tiles = Divisor(count), tiles.levels = Divisor(p.levels), tiles.slices = Divisor(slices);
  launch_with_much_shared_memory(attend_scatter_kernel<T, N>, divide_up(warps, kWarps),
                                 kWarps * int64_t(tiles.cells) * 128 * N, p, tiles, grad_output, locations,
                                 weights, grad_value);
  return true;
}

}  // namespace
}  // namespace attn_plugins
