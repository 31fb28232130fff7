// The arithmetic of global attention for one instruction set. each_target.h includes this file once per set,
// inside a namespace and under a target pragma, with VECTOR_BYTES defined. It therefore has no include guard
// and only includes files of the same kind. Explicit vectors keep the accumulators of the products in
// registers.
//
// A task works on blocks of BLOCK queries of one head, whose logits stay in the L2 cache from the first
// product to the last. Keys and values are packed for this first, zero-padded to whole vectors of 64 bytes.

#include "common/vector_kernel.h"

#include "common/product_kernel.h"

// --- C (rows x columns) = A (rows x depth) * B^T (columns x depth)
//
// The depth is contiguous in both and a whole number of vectors. This form suits few columns, because it does
// not pad them to whole vectors.

template <typename T, int ROWS, int COLUMNS>
void dot_tile(const T* A, int64_t a_row, const T* B, int64_t b_row, T* C, int64_t c_row, int64_t depth) {
  using V = typename Vector<T>::type;
  V sum[ROWS][COLUMNS] = {};
  for (int64_t k = 0; k < depth; k += Vector<T>::lanes) {
    V b[COLUMNS];
#pragma GCC unroll 8
    for (int c = 0; c < COLUMNS; ++c) b[c] = *reinterpret_cast<const V*>(B + c * b_row + k);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const V a = *reinterpret_cast<const V*>(A + r * a_row + k);
#pragma GCC unroll 8
      for (int c = 0; c < COLUMNS; ++c) sum[r][c] += a * b[c];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < COLUMNS; ++c) C[r * c_row + c] = lanes_sum<T>(sum[r][c]);
}

template <typename T, int COLUMNS>
void dot_columns(const T* A, int64_t a_row, const T* B, int64_t b_row, T* C, int64_t c_row, int64_t rows,
                 int64_t depth) {
  constexpr int ROWS = VECTOR_BYTES == 64 ? 4 : 2;  // five columns then fill the registers
  int64_t i = 0;
  for (; i + ROWS <= rows; i += ROWS)
    dot_tile<T, ROWS, COLUMNS>(A + i * a_row, a_row, B, b_row, C + i * c_row, c_row, depth);
  for (; i < rows; ++i) dot_tile<T, 1, COLUMNS>(A + i * a_row, a_row, B, b_row, C + i * c_row, c_row, depth);
}

template <typename T>
void dot_product(const T* A, int64_t a_row, const T* B, int64_t b_row, T* C, int64_t c_row, int64_t rows,
                 int64_t columns, int64_t depth) {
  for (int64_t tiles = (columns + 4) / 5; tiles > 0; --tiles) {
    const int64_t width = (columns + tiles - 1) / tiles;  // of the remaining columns, shared evenly
    auto* tile = width == 5   ? dot_columns<T, 5>
                 : width == 4 ? dot_columns<T, 4>
                 : width == 3 ? dot_columns<T, 3>
                 : width == 2 ? dot_columns<T, 2>
                              : dot_columns<T, 1>;
    tile(A, a_row, B, b_row, C, c_row, rows, depth);
    B += width * b_row, C += width, columns -= width;
  }
}

// --- softmax and its gradient over one query's row of logits

// Adds row, column and key logits, each if present, to the content logits. Absent column logits are zeros.
template <typename T>
ATTN_INLINE void add_logits(T* __restrict s, int64_t Hk, int64_t Wk, const T* row, int64_t row_stride,
                            const T* __restrict column, const T* __restrict key) {
  for (int64_t h = 0; h < Hk; ++h) {
    T* __restrict line = s + h * Wk;
    const T base = row ? row[h * row_stride] : T(0);
    if (key) {
      const T* __restrict key_line = key + h * Wk;
      for (int64_t w = 0; w < Wk; ++w) line[w] += column[w] + key_line[w] + base;
    } else {
      for (int64_t w = 0; w < Wk; ++w) line[w] += column[w] + base;
    }
  }
}

template <typename T>
ATTN_INLINE T sum_of(const T* g, int64_t keys) {
  constexpr int64_t few = 8;  // rows of keys are short
  T lane[few] = {};
  int64_t i = 0;
  for (; i + few <= keys; i += few)
    for (int64_t l = 0; l < few; ++l) lane[l] += g[i + l];
  T sum = 0;
  for (; i < keys; ++i) sum += g[i];
  for (int64_t l = 0; l < few; ++l) sum += lane[l];
  return sum;
}

// --- packing of keys, tasks of one head

// Calls `copy(first, count, elements)` for runs of keys whose rows lie at one distance.
template <typename T, typename Copy>
ATTN_INLINE void each_run(const View<T>& view, const Problem<T>& p, int64_t b, int64_t m, const Copy& copy) {
  const bool whole = view.stride[2] == p.Wk * view.stride[3] || p.Hk == 1;
  const int64_t count = whole ? p.Hk * p.Wk : p.Wk;
  for (int64_t h = 0; h < (whole ? 1 : p.Hk); ++h) copy(h * p.Wk, count, view.at(b, m, h, 0));
}

// Packs rows (Hk, Wk, width) as columns (width, keys_padded) and as rows (keys, padded), where wanted.
template <typename T>
ATTN_INLINE void pack(const View<T>& view, const Problem<T>& p, int64_t head, int64_t width, int64_t padded,
                      T scale, T* columns, T* rows) {
  const int64_t keys = p.Hk * p.Wk, row = view.stride[3], step = view.stride[4];
  if (columns) columns += head * width * p.keys_padded;
  if (rows) rows += head * keys * padded;
  each_run(view, p, head / p.M, head % p.M, [&](int64_t first, int64_t count, const T* from) {
    if (columns) copy_matrix(from, step, row, width, count, scale, columns + first, p.keys_padded);
    if (rows) copy_matrix(from, row, step, count, width, scale, rows + first * padded, padded);
  });
  if (columns)
    for (int64_t c = 0; c < width; ++c)
      std::fill(columns + c * p.keys_padded + keys, columns + (c + 1) * p.keys_padded, T(0));
  if (rows && width < padded)  // products of this padding are unused, but denormal numbers would slow them
    for (int64_t k = 0; k < keys; ++k) std::fill(rows + k * padded + width, rows + (k + 1) * padded, T(0));
}

template <typename T>
void pack_tasks(const Problem<T>& p, int64_t begin, int64_t end) {
  for (int64_t head = begin; head < end; ++head) {
    if (p.key.data) pack(p.key, p, head, p.d, p.d_padded, p.scale, p.key_columns, p.key_rows);
    pack(p.value, p, head, p.dv, p.dv_padded, T(1), p.value_columns, p.value_rows);
  }
}

// Adds up the slots of a head, `size` numbers each, into the first.
template <typename T>
ATTN_INLINE T* sum_slots(T* sums, const Problem<T>& p, int64_t head, int64_t size) {
  T* __restrict first = sums + head * p.slots * size;
  for (int64_t slot = 1; slot < p.slots; ++slot)
    for (int64_t i = 0; i < size; ++i) first[i] += first[slot * size + i];
  return first;
}

// Writes the sums of the slots, (width, keys_padded), to a gradient (B, M, Hk, Wk, width).
template <typename T>
ATTN_INLINE void write_sums(T* sums, const View<T>& view, const Problem<T>& p, int64_t head, int64_t width,
                            T scale) {
  const T* from = sum_slots(sums, p, head, width * p.keys_padded);
  each_run(view, p, head / p.M, head % p.M, [&](int64_t first, int64_t count, T* to) {
    copy_matrix(from + first, int64_t(1), p.keys_padded, count, width, scale, to, view.stride[3]);
  });
}

template <typename T>
void finish_tasks(const Problem<T>& p, int64_t begin, int64_t end) {
  const int64_t keys = p.Hk * p.Wk;
  for (int64_t head = begin; head < end; ++head) {
    if (p.key_sums) write_sums(p.key_sums, p.grad_key, p, head, p.d, p.scale);
    if (p.value_sums) write_sums(p.value_sums, p.grad_value, p, head, p.dv, T(1));
    if (p.key_logits_sums) {
      const T* from = sum_slots(p.key_logits_sums, p, head, keys);
      std::copy(from, from + keys, p.grad_key_logits + head * keys);
    }
  }
}

// --- blocks of queries

template <typename T>
struct Scratch {
  Buffer<T> query, gradient, mixed, column, weights, slopes, scale;
  Scratch(const Problem<T>& p, bool backward, int64_t rows)
      : query(rows * p.d_padded),
        gradient(backward ? rows * p.dv_padded : 0),
        mixed(rows * (backward ? p.d_padded : p.dv_padded)),
        column(p.Wk),
        weights(rows * p.keys_padded),
        slopes(backward ? rows * p.keys_padded : 0),
        scale(rows) {}
};

// Copies rows of a (B, M, Hq, Wq, width) view, one after another.
template <typename T>
ATTN_INLINE void gather(const View<T>& view, const Problem<T>& p, int64_t b, int64_t m, int64_t first,
                        int64_t count, int64_t width, int64_t padded, T* to) {
  for (int64_t i = 0; i < count; ++i) {
    const T* from = view.at(b, m, (first + i) / p.Wq, (first + i) % p.Wq);
    for (int64_t c = 0; c < width; ++c) to[i * padded + c] = from[c * view.stride[4]];
  }
}

template <typename T>
ATTN_INLINE void scatter(const View<T>& view, const Problem<T>& p, int64_t b, int64_t m, int64_t first,
                         int64_t count, int64_t width, int64_t padded, const T* from) {
  for (int64_t i = 0; i < count; ++i) {
    T* to = view.at(b, m, (first + i) / p.Wq, (first + i) % p.Wq);
    for (int64_t c = 0; c < width; ++c) to[c * view.stride[4]] = from[i * padded + c];
  }
}

// Computes the attention weights of queries first ... first + count - 1 into s.weights, 0 in the padding,
// which the caller multiplies by s.scale. The backward computes the same weights anew: with a rounded
// log-sum-exp, those of large logits would not sum to 1.
template <typename T>
ATTN_INLINE void attention_weights(const Problem<T>& p, Scratch<T>& s, int64_t b, int64_t m, int64_t first,
                                   int64_t count, bool forward) {
  const int64_t keys = p.Hk * p.Wk, head = b * p.M + m;
  T* weights = s.weights.data();
  if (p.query.data) {
    gather(p.query, p, b, m, first, count, p.d, p.d_padded, s.query.data());
    product(s.query.data(), p.d_padded, int64_t(1), p.key_columns + head * p.d * p.keys_padded, p.keys_padded,
            weights, p.keys_padded, count, p.keys_padded, p.d, false);
  } else {
    for (int64_t i = 0; i < count * p.keys_padded; ++i) weights[i] = T(0);
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t h = (first + i) / p.Wq, w = (first + i) % p.Wq;
    T* line = weights + i * p.keys_padded;
    if (p.column.data) {
      const T* from = p.column.at(b, m, h, w);
      for (int64_t x = 0; x < p.Wk; ++x) s.column[x] = from[x * p.column.stride[4]];
    }
    const T* row = p.row.data ? p.row.at(b, m, h, w) : nullptr;
    const T* key = p.key_logits.data ? p.key_logits.at(b, m, 0, 0) : nullptr;
    if (row || key || p.column.data) add_logits(line, p.Hk, p.Wk, row, p.row.stride[4], s.column.data(), key);
    for (int64_t k = keys; k < p.keys_padded; ++k) line[k] = -std::numeric_limits<T>::infinity();
    // A fully masked query has weights of 0 and a log-sum-exp of +inf.
    const T top = maximum(line, p.keys_padded);
    const bool masked = top == -std::numeric_limits<T>::infinity();
    const T sum = exponentials(line, p.keys_padded, masked ? T(0) : top);
    s.scale[i] = masked ? T(0) : T(1) / sum;
    if (forward)
      *p.log_sum_exp.at(b, m, h, w) = masked ? std::numeric_limits<T>::infinity() : top + std::log(sum);
  }
}

// A task is a block of queries; tasks are independent.
template <typename T>
void forward_tasks(const Problem<T>& p, int64_t begin, int64_t end) {
  const int64_t blocks = p.blocks, keys = p.Hk * p.Wk;
  Scratch<T> s(p, false, std::max(p.count(0), p.count(blocks - 1)));
  for (int64_t task = begin; task < end; ++task) {
    const int64_t m = task / blocks % p.M, b = task / blocks / p.M, block = task % blocks;
    const int64_t first = block * BLOCK, count = p.count(block);
    attention_weights(p, s, b, m, first, count, true);
    T* mixed = s.mixed.data();
    if (p.value_columns) {
      dot_product(s.weights.data(), p.keys_padded, p.value_columns + (b * p.M + m) * p.dv * p.keys_padded,
                  p.keys_padded, mixed, p.dv_padded, count, p.dv, p.keys_padded);
    } else {
      product(s.weights.data(), p.keys_padded, int64_t(1), p.value_rows + (b * p.M + m) * keys * p.dv_padded,
              p.dv_padded, mixed, p.dv_padded, count, p.dv_padded, keys, false);
    }
    for (int64_t i = 0; i < count; ++i)
      for (int64_t c = 0; c < p.dv; ++c) mixed[i * p.dv_padded + c] *= s.scale[i];
    scatter(p.output, p, b, m, first, count, p.dv, p.dv_padded, s.mixed.data());
  }
}

// A task is a (b, m, slot). A slot processes its blocks in order and adds to its own gradients of the keys,
// so the order of summation does not depend on the number of threads.
template <typename T>
void backward_tasks(const Problem<T>& p, int64_t begin, int64_t end) {
  const int64_t blocks = p.blocks, keys = p.Hk * p.Wk;
  Scratch<T> s(p, true, std::max(p.count(0), p.count(blocks - 1)));
  const int64_t line = p.keys_padded;
  T* weights = s.weights.data();
  T* slopes = s.slopes.data();
  for (int64_t task = begin; task < end; ++task) {
    const int64_t slot = task % p.slots, head = task / p.slots, m = head % p.M, b = head / p.M;
    T* key_sums = p.key_sums ? p.key_sums + task * p.d * line : nullptr;
    T* value_sums = p.value_sums ? p.value_sums + task * p.dv * line : nullptr;
    T* key_logits_sums = p.key_logits_sums ? p.key_logits_sums + task * keys : nullptr;
    if (key_sums) std::fill(key_sums, key_sums + p.d * line, T(0));
    if (value_sums) std::fill(value_sums, value_sums + p.dv * line, T(0));
    if (key_logits_sums) std::fill(key_logits_sums, key_logits_sums + keys, T(0));
    for (int64_t block = blocks * slot / p.slots; block < blocks * (slot + 1) / p.slots; ++block) {
      const int64_t first = block * BLOCK, count = p.count(block);
      attention_weights(p, s, b, m, first, count, false);
      gather(p.grad_output, p, b, m, first, count, p.dv, p.dv_padded, s.gradient.data());
      for (int64_t i = 0; i < count; ++i)
        for (int64_t c = 0; c < p.dv; ++c) s.gradient[i * p.dv_padded + c] *= s.scale[i];
      if (value_sums)
        product(s.gradient.data(), int64_t(1), p.dv_padded, weights, line, value_sums, line, p.dv, line,
                count, true);
      if (!p.logits_wanted) continue;
      product(s.gradient.data(), p.dv_padded, int64_t(1), p.value_columns + head * p.dv * line, line, slopes,
              line, count, line, p.dv, false);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t h = (first + i) / p.Wq, w = (first + i) % p.Wq;
        const T* __restrict weight = weights + i * line;
        T* __restrict slope = slopes + i * line;
        const T mean = dot(weight, slope, line) * s.scale[i];  // slopes have that factor already
        for (int64_t k = 0; k < line; ++k) slope[k] = weight[k] * (slope[k] - mean);
        if (key_logits_sums) {
          T* __restrict total = key_logits_sums;
          for (int64_t k = 0; k < keys; ++k) total[k] += slope[k];
        }
        if (p.grad_row.data) {
          T* row = p.grad_row.at(b, m, h, w);
          for (int64_t y = 0; y < p.Hk; ++y) row[y * p.grad_row.stride[4]] = sum_of(slope + y * p.Wk, p.Wk);
        }
        if (p.grad_column.data) {
          T* __restrict total = s.column.data();
          for (int64_t x = 0; x < p.Wk; ++x) total[x] = slope[x];
          for (int64_t y = 1; y < p.Hk; ++y)
            for (int64_t x = 0; x < p.Wk; ++x) total[x] += slope[y * p.Wk + x];
          T* column = p.grad_column.at(b, m, h, w);
          for (int64_t x = 0; x < p.Wk; ++x) column[x * p.grad_column.stride[4]] = total[x];
        }
      }
      if (key_sums)
        product(s.query.data(), int64_t(1), p.d_padded, slopes, line, key_sums, line, p.d, line, count, true);
      if (p.grad_query.data) {
        if (p.key_rows)
          product(slopes, line, int64_t(1), p.key_rows + head * keys * p.d_padded, p.d_padded, s.mixed.data(),
                  p.d_padded, count, p.d_padded, keys, false);
        else
          dot_product(slopes, line, p.key_columns + head * p.d * line, line, s.mixed.data(), p.d_padded,
                      count, p.d, line);
        scatter(p.grad_query, p, b, m, first, count, p.d, p.d_padded, s.mixed.data());
      }
    }
  }
}

#define RANGES(T)                                                        \
  void pack_range(const Problem<T>& p, int64_t begin, int64_t end) {     \
    pack_tasks(p, begin, end);                                           \
  }                                                                      \
  void forward_range(const Problem<T>& p, int64_t begin, int64_t end) {  \
    forward_tasks(p, begin, end);                                        \
  }                                                                      \
  void backward_range(const Problem<T>& p, int64_t begin, int64_t end) { \
    backward_tasks(p, begin, end);                                       \
  }                                                                      \
  void finish_range(const Problem<T>& p, int64_t begin, int64_t end) {   \
    finish_tasks(p, begin, end);                                         \
  }
RANGES(float)
RANGES(double)
#undef RANGES
