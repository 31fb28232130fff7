// Transposition between (images, pixels, channels) and (images, channels, pixels), and addition of a bias.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <optional>
#include <vector>

#include "dispatch.cuh"
#include "divisor.cuh"
#include "launch.cuh"
#include "vector.cuh"

namespace attn_plugins {

constexpr int kTile = 32;

// Writes the contiguous out (images, columns, rows) from in (images, rows, columns), whose elements lie at
// image * image_stride + row * row_stride + column; times the one element of `scale`, plus `addend`, which
// lies as out does, where they are not nullptr.
template <class In, class Out>
__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const In* __restrict__ in, Out* __restrict__ out, const Out* __restrict__ addend,
                     const Out* __restrict__ scale, int64_t rows, int64_t columns, int64_t image_stride,
                     int64_t row_stride, int64_t row_tiles, int64_t column_tiles) {
  __shared__ Out
      tile[kTile][kTile + (sizeof(Out) == 2 ? 2 : 1)];  // odd number of words per row: no bank conflicts
  const int64_t image = blockIdx.x / (row_tiles * column_tiles);
  const int64_t in_image = blockIdx.x % (row_tiles * column_tiles);
  const int64_t row = in_image / column_tiles * kTile, column = in_image % column_tiles * kTile;
  const int x = threadIdx.x % kTile, y = threadIdx.x / kTile;
#pragma unroll
  for (int i = y; i < kTile; i += kThreads / kTile) {
    if (row + i < rows && column + x < columns) {
      const In value = in[image * image_stride + (row + i) * row_stride + column + x];
      tile[i][x] = narrow_to<Out>(widen(value));
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = y; i < kTile; i += kThreads / kTile) {
    if (column + i < columns && row + x < rows) {
      const int64_t at = (image * columns + column + i) * rows + row + x;
      accumulate_t<Out> value = widen(tile[x][i]);
      if (scale) value *= widen(*scale);
      if (addend) value += widen(addend[at]);
      out[at] = narrow_to<Out>(value);
    }
  }
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

// Transposes `in` (images, rows, columns), of the given strides, into the contiguous out (images, columns,
// rows), as transpose_kernel does. `in` has out's dtype, or holds float sums of half gradients.
inline void transpose_images(const Tensor& in, const Tensor& out, int64_t images, int64_t rows,
                             int64_t columns, int64_t image_stride, int64_t row_stride,
                             const Tensor& addend = Tensor(), const Tensor& scale = Tensor()) {
  const int64_t row_tiles = divide_up(rows, kTile), column_tiles = divide_up(columns, kTile);
  for_type(out.scalar_type(), [&](auto zero) {
    using Out = decltype(zero);
    const auto run = [&](auto from) {
      using In = decltype(from);
      launch(transpose_kernel<In, Out>, images * row_tiles * column_tiles, data_of<const In>(in),
             data_of<Out>(out), data_of<const Out>(addend), data_of<const Out>(scale), rows, columns,
             image_stride, row_stride, row_tiles, column_tiles);
    };
    if (in.scalar_type() == out.scalar_type()) {
      run(Out());
    } else {
      run(accumulate_t<Out>());
    }
  });
}

// Returns the contiguous transposes (N, columns, rows) of `in` (N, rows, columns), times `scale`, of one
// element, plus `addend`, of the result's shape. All have one dtype; rows that are not contiguous are copied.
inline Tensor transposed_matrices(const Tensor& in, std::optional<Tensor> addend,
                                  std::optional<Tensor> scale) {
  const int64_t images = in.size(0), rows = in.size(1), columns = in.size(2);
  const Tensor from = columns == 1 || in.stride(2) == 1 ? in : torch::stable::contiguous(in);
  const Tensor out = torch::stable::new_empty(in, std::vector<int64_t>{images, columns, rows});
  transpose_images(from, out, images, rows, columns, from.stride(0), from.stride(1),
                   addend ? torch::stable::contiguous(*addend) : Tensor(), scale.value_or(Tensor()));
  return out;
}

}  // namespace
}  // namespace attn_plugins
