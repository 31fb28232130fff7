// Products of a batch of strided matrices for one instruction set. each_target.h includes this file once per
// set, inside a namespace and under a target pragma, with VECTOR_BYTES defined; it has no include guard.
//
// The right factor is packed in panels of four of the widest vectors, which stay in the L1 cache: the rows of
// a map's column lie so far apart that many of them share a few of the cache's sets.

#include "common/vector_kernel.h"

#include "common/product_kernel.h"

template <typename T>
constexpr int64_t PANEL = 256 / sizeof(T);  // columns of a panel

template <typename T>
struct Scratch {
  Buffer<T> left, panel, product;
  explicit Scratch(const Problem<T>& p)
      : left(p.packs_left() ? p.rows * p.depth : 0), panel(p.depth * PANEL<T>), product(p.rows * PANEL<T>) {}
};

template <typename T>
void multiply(const Problem<T>& p, Scratch<T>& s, const T* left, const T* right, T* result) {
  int64_t left_row = p.left.stride[3], left_column = p.left.stride[4];
  if (p.packs_left()) {
    copy_matrix(left, left_row, left_column, p.rows, p.depth, p.scale, s.left.data(), p.depth);
    left = s.left.data(), left_row = p.depth, left_column = 1;
  }
  constexpr int64_t lanes = 64 / sizeof(T);
  for (int64_t first = 0; first < p.columns; first += PANEL<T>) {
    const int64_t width = std::min(PANEL<T>, p.columns - first), padded = (width + lanes - 1) / lanes * lanes;
    copy_matrix(right + first * p.right.stride[4], p.right.stride[3], p.right.stride[4], p.depth, width, T(1),
                s.panel.data(), padded);
    T* to = result + first * p.result.stride[4];
    if (width == padded && p.result.stride[4] == 1) {
      product(left, left_row, left_column, s.panel.data(), padded, to, p.result.stride[3], p.rows, padded,
              p.depth, p.add);
      continue;
    }
    product(left, left_row, left_column, s.panel.data(), padded, s.product.data(), padded, p.rows, padded,
            p.depth, false);
    for (int64_t r = 0; r < p.rows; ++r) {
      const T* from = s.product.data() + r * padded;
      T* line = to + r * p.result.stride[3];
      for (int64_t c = 0; c < width; ++c) {
        T& element = line[c * p.result.stride[4]];
        element = p.add ? element + from[c] : from[c];
      }
    }
  }
}

// A task is a matrix. Those of one line's heads follow each other: they lie in the same pages of memory.
template <typename T>
void multiply_tasks(const Problem<T>& p, int64_t begin, int64_t end) {
  Scratch<T> s(p);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t m = task % p.M, n = task / p.M % p.N, b = task / p.M / p.N;
    multiply(p, s, p.left.at(b, m, n, 0), p.right.at(b, m, n, 0), p.result.at(b, m, n, 0));
  }
}

void multiply_range(const Problem<float>& p, int64_t begin, int64_t end) {
  multiply_tasks(p, begin, end);
}
void multiply_range(const Problem<double>& p, int64_t begin, int64_t end) {
  multiply_tasks(p, begin, end);
}
