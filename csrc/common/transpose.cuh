// Transposition between (images, pixels, channels) and (images, channels, pixels), and addition of a bias.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <optional>
#include <type_traits>
#include <vector>

#include "dispatch.cuh"
#include "divisor.cuh"
#include "launch.cuh"
#include "vector.cuh"

namespace attn_plugins {

// Rows and columns of a block's tile: with 2-byte elements, larger tiles keep as many bytes in flight.
constexpr int tile_side(int64_t element_bytes) {
  return element_bytes == 2 ? 64 : 32;
}
template <class T>
constexpr int kTile = tile_side(sizeof(T));

// A block's tile, with an odd number of words per row: no bank conflicts.
template <class T>
using Tile = T[kTile<T>][kTile<T> + (sizeof(T) == 2 ? 2 : 1)];

// Writes the contiguous out (images, columns, rows) from in (images, rows, columns), whose elements lie at
// image * image_stride + row * row_stride + column.
struct Transposition {
  const void* in;
  void* out;
  int64_t rows, columns, image_stride, row_stride;
  Divisor row_tiles, column_tiles;
};

// Transposes tile `number`. A sum is that times the one element of `scale`, plus `addend`, which lies as out
// does, where they are not nullptr. A thread keeps its column and steps through rows by additions to a
// pointer: with products and checks for each element, these took most of the time.
template <class In, bool kSum, class Out>
__device__ __forceinline__ void transpose_tile(const Transposition& t, int number, Tile<Out>& tile,
                                               const Out* addend, const Out* scale) {
  constexpr int kSide = kTile<Out>, kStep = kThreads / kSide, kEach = kSide / kStep;
  int row_tile, column_tile;
  const int64_t image = t.row_tiles.divide(t.column_tiles.divide(number, &column_tile), &row_tile);
  const int64_t row = int64_t(row_tile) * kSide, column = int64_t(column_tile) * kSide;
  const int high = static_cast<int>(min(t.rows - row, int64_t(kSide)));
  const int wide = static_cast<int>(min(t.columns - column, int64_t(kSide)));
  const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;

  const auto run = [&](auto whole) {  // a tile without checks, or one that is cut off
    const In* from =
        static_cast<const In*>(t.in) + image * t.image_stride + (row + y) * t.row_stride + column + x;
    const int64_t first = (image * t.columns + column + y) * t.rows + row + x;
    In loaded[kEach] = {};
    Out added[kEach] = {};
#pragma unroll
    for (int i = 0; i < kEach; ++i, from += kStep * t.row_stride) {  // these loads are in flight together
      if (whole || (x < wide && y + i * kStep < high)) loaded[i] = *from;
    }
    if (kSum && addend) {
      const Out* other = addend + first;
#pragma unroll
      for (int i = 0; i < kEach; ++i, other += kStep * t.rows) {
        if (whole || (x < high && y + i * kStep < wide)) added[i] = *other;
      }
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if constexpr (std::is_same_v<In, Out>) {
        tile[y + i * kStep][x] = loaded[i];
      } else {
        tile[y + i * kStep][x] = narrow_to<Out>(widen(loaded[i]));
      }
    }
    __syncthreads();
    const accumulate_t<Out> factor = kSum && scale ? widen(*scale) : accumulate_t<Out>(1);
    Out* to = static_cast<Out*>(t.out) + first;
#pragma unroll
    for (int i = 0; i < kEach; ++i, to += kStep * t.rows) {
      if (!whole && (x >= high || y + i * kStep >= wide)) continue;
      const Out value = tile[x][y + i * kStep];
      *to = kSum ? narrow_to<Out>(widen(value) * factor + widen(added[i])) : value;
    }
  };
  if (high == kSide && wide == kSide) {
    run(std::true_type());
  } else {
    run(std::false_type());
  }
}

template <bool kSum, class T>
__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const Transposition t, const T* addend, const T* scale) {
  __shared__ Tile<T> tile;
  transpose_tile<T, kSum>(t, static_cast<int>(blockIdx.x), tile, addend, scale);
}

// sum += part; both are contiguous.
template <class T>
__global__ void __launch_bounds__(kThreads)
    accumulate_kernel(accumulate_t<T>* __restrict__ sum, const T* __restrict__ part, int64_t count) {
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (at < count) sum[at] += widen(part[at]);
}

// rows (count, width) += bias (width). Each thread adds N elements, and N divides width.
template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    add_bias_kernel(T* __restrict__ rows, const T* __restrict__ bias, int64_t count, int64_t width) {
  const int64_t at = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * N;
  if (at >= count * width) return;
  Vector<T, N> value = load<T, N>(rows + at);
  const Vector<T, N> addend = load_constant<T, N>(bias + at % width);
#pragma unroll
  for (int e = 0; e < N; ++e) {
    value.element[e] = narrow_to<T>(widen(value.element[e]) + widen(addend.element[e]));
  }
  store(rows + at, value);
}

// planes (images, channels, pixels) += bias (channels). Each thread adds N elements; `vectors` threads cover
// a plane.
template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    add_plane_bias_kernel(T* __restrict__ planes, const T* __restrict__ bias, int64_t count, Divisor vectors,
                          Divisor channels) {
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count) return;
  int rest, channel;
  channels.divide(vectors.divide(static_cast<int>(at), &rest), &channel);
  const accumulate_t<T> addend = widen(__ldg(bias + channel));
  const Vector<T, N> value = load<T, N>(planes + at * N);
  accumulate_t<T> x[N];
  widen(value, x);
#pragma unroll
  for (int e = 0; e < N; ++e) x[e] += addend;
  store(planes + at * N, narrow<T>(x));
}

namespace {

// Returns the transposition of `in` (images, rows, columns), of the given strides, into the contiguous out
// (images, columns, rows), and stores the number of its tiles.
inline Transposition transposition(const Tensor& in, const Tensor& out, int64_t images, int64_t rows,
                                   int64_t columns, int64_t image_stride, int64_t row_stride,
                                   int64_t* tiles) {
  const int64_t side = tile_side(out.element_size());
  const int64_t row_tiles = divide_up(rows, side), column_tiles = divide_up(columns, side);
  *tiles = images * row_tiles * column_tiles;
  if (*tiles == 0) return {};
  return {in.data_ptr(),      out.data_ptr(),       rows, columns, image_stride, row_stride,
          Divisor(row_tiles), Divisor(column_tiles)};
}

// Returns the contiguous transposes (N, columns, rows) of `in` (N, rows, columns), times `scale`, of one
// element, plus `addend`, of the result's shape. All have one dtype; rows that are not contiguous are copied.
inline Tensor transposed_matrices(const Tensor& in, std::optional<Tensor> addend,
                                  std::optional<Tensor> scale) {
  const int64_t images = in.size(0), rows = in.size(1), columns = in.size(2);
  const Tensor from = columns == 1 || in.stride(2) == 1 ? in : torch::stable::contiguous(in);
  const Tensor out = torch::stable::new_empty(in, std::vector<int64_t>{images, columns, rows});
  const Tensor other = addend ? torch::stable::contiguous(*addend) : Tensor();
  int64_t tiles = 0;
  const Transposition t =
      transposition(from, out, images, rows, columns, from.stride(0), from.stride(1), &tiles);
  for_type(out.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const auto kernel = addend || scale ? transpose_kernel<true, T> : transpose_kernel<false, T>;
    launch(kernel, tiles, t, data_of<const T>(other), data_of<const T>(scale.value_or(Tensor())));
  });
  return out;
}

}  // namespace
}  // namespace attn_plugins
