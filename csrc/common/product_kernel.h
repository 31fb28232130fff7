// Matrix products that keep their accumulators in vector registers, and softmax over a row, for kernels that
// are compiled once per instruction set. Include vector_kernel.h first.

// --- C (rows x columns) = or += A (rows x depth, any strides) * B (depth x columns, rows contiguous)

template <typename T, int ROWS, int VECTORS>
ATTN_INLINE void product_tile(const T* A, int64_t a_row, int64_t a_depth, const T* B, int64_t b_row, T* C,
                              int64_t c_row, int64_t depth, bool add) {
  using V = typename Vector<T>::type;
  constexpr int64_t lanes = Vector<T>::lanes;
  V sum[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v)
      sum[r][v] = add ? *reinterpret_cast<const V*>(C + r * c_row + v * lanes) : V{};
  for (int64_t k = 0; k < depth; ++k) {
    V b[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) b[v] = *reinterpret_cast<const V*>(B + k * b_row + v * lanes);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const T a = A[r * a_row + k * a_depth];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) sum[r][v] += a * b[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) *reinterpret_cast<V*>(C + r * c_row + v * lanes) = sum[r][v];
}

template <typename T, int ROWS, int VECTORS>
void product_columns(const T* A, int64_t a_row, int64_t a_depth, const T* B, int64_t b_row, T* C,
                     int64_t c_row, int64_t rows, int64_t depth, bool add) {
  int64_t i = 0;
  for (; i + ROWS <= rows; i += ROWS)
    product_tile<T, ROWS, VECTORS>(A + i * a_row, a_row, a_depth, B, b_row, C + i * c_row, c_row, depth, add);
  for (; i + 2 <= rows; i += 2)
    product_tile<T, 2, VECTORS>(A + i * a_row, a_row, a_depth, B, b_row, C + i * c_row, c_row, depth, add);
  for (; i < rows; ++i)
    product_tile<T, 1, VECTORS>(A + i * a_row, a_row, a_depth, B, b_row, C + i * c_row, c_row, depth, add);
}

// The tile sizes fill the vector registers: 32 of 64 bytes on x86-64-v4, 16 elsewhere.
template <typename T>
void product(const T* A, int64_t a_row, int64_t a_depth, const T* B, int64_t b_row, T* C, int64_t c_row,
             int64_t rows, int64_t columns, int64_t depth, bool add) {
  constexpr int64_t lanes = Vector<T>::lanes;
  int64_t j = 0;
  if constexpr (VECTOR_BYTES == 64) {
    for (; j + 4 * lanes <= columns; j += 4 * lanes)
      product_columns<T, 6, 4>(A, a_row, a_depth, B + j, b_row, C + j, c_row, rows, depth, add);
    for (; j + 2 * lanes <= columns; j += 2 * lanes)
      product_columns<T, 12, 2>(A, a_row, a_depth, B + j, b_row, C + j, c_row, rows, depth, add);
    for (; j < columns; j += lanes)
      product_columns<T, 12, 1>(A, a_row, a_depth, B + j, b_row, C + j, c_row, rows, depth, add);
  } else {
    for (; j < columns; j += 2 * lanes)
      product_columns<T, 6, 2>(A, a_row, a_depth, B + j, b_row, C + j, c_row, rows, depth, add);
  }
}

// Sum over all lanes, or their maximum.
template <typename T, bool SUM>
ATTN_INLINE T over_all_lanes(typename Vector<T>::type vector) {
  constexpr int64_t lanes = Vector<T>::lanes;
  typename Vector<T>::bits lane;
  for (int64_t l = 0; l < lanes; ++l) lane[l] = l;
#pragma GCC unroll 4
  for (int64_t half = lanes / 2; half > 0; half /= 2) {
    const auto other = shuffled<T>(vector, lane ^ typename Exp<T>::Bits(half));
    if constexpr (SUM)
      vector += other;
    else
      vector = other > vector ? other : vector;
  }
  return vector[0];
}

template <typename T>
ATTN_INLINE T lanes_sum(typename Vector<T>::type vector) {
  return over_all_lanes<T, true>(vector);
}

// --- softmax over one query's row of logits, padded to whole vectors

template <typename T>
ATTN_INLINE T maximum(const T* s, int64_t padded) {
  using V = typename Vector<T>::type;
  constexpr int64_t lanes = Vector<T>::lanes;
  V top = *reinterpret_cast<const V*>(s);
  for (int64_t i = lanes; i < padded; i += lanes) {
    const V v = *reinterpret_cast<const V*>(s + i);
    top = v > top ? v : top;
  }
  return over_all_lanes<T, false>(top);
}

// Replaces s by exp(s - shift) and returns the sum.
template <typename T>
ATTN_INLINE T exponentials(T* s, int64_t padded, T shift) {
  using V = typename Vector<T>::type;
  V sum = {};
  for (int64_t i = 0; i < padded; i += Vector<T>::lanes) {
    V* at = reinterpret_cast<V*>(s + i);
    const V p = exponential<T>(*at - shift);
    *at = p;
    sum += p;
  }
  return lanes_sum<T>(sum);
}

template <typename T>
ATTN_INLINE T dot(const T* p, const T* g, int64_t padded) {
  using V = typename Vector<T>::type;
  V sum = {};
  for (int64_t i = 0; i < padded; i += Vector<T>::lanes)
    sum += *reinterpret_cast<const V*>(p + i) * *reinterpret_cast<const V*>(g + i);
  return lanes_sum<T>(sum);
}
