// Window attention with position logits alone, as in dynamic convolution, for one instruction set
// (cpu_kernel.h includes this file). Without dot products nothing has to be packed along the queries: vectors
// run along the value's channels, and a span of neighboring queries shares every value it loads.

constexpr int64_t SPAN = VECTOR_BYTES == 64 ? 8 : 4;  // queries computed together

// Sum over all lanes, or their maximum (NaN if any lane is NaN), in every lane.
template <typename T, bool SUM>
ATTN_INLINE typename Vector<T>::type over_lanes(typename Vector<T>::type v) {
  using V = typename Vector<T>::type;
  typename Vector<T>::bits order;
#pragma GCC unroll 4
  for (int distance = Vector<T>::lanes / 2; distance > 0; distance /= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < Vector<T>::lanes; ++i) order[i] = i ^ distance;
    const V other = shuffled<T>(v, order);
    v = SUM ? v + other : ((other > v) | (other != other) ? other : v);
  }
  return v;
}

template <typename T>
struct Softmax {
  T top, sum;
};

// weights = exp(logits - max) over `taps` >= lanes logits, of which excluded ones are -inf. Returns the
// maximum and the sum. The last vector overlaps the one before it, so that nothing beyond the last tap is
// read; it is written first.
template <typename T, typename E>
ATTN_INLINE Softmax<T> exponentials(const E* logits, int64_t taps, T* weights) {
  using V = typename Vector<T>::type;
  constexpr int64_t lanes = Vector<T>::lanes;
  constexpr T NONE = -std::numeric_limits<T>::infinity();
  const int64_t last = taps - lanes, repeated = (lanes - taps % lanes) % lanes;
  V top = load<T>(logits + last), sum = {};
  for (int64_t t = 0; t < last; t += lanes) {
    const V l = load<T>(logits + t);
    top = (l > top) | (l != l) ? l : top;  // NaN stays NaN
  }
  top = over_lanes<T, false>(top);
  const V shift = top == NONE ? V{} : top;
  const V e = exponential<T>(load<T>(logits + last) - shift);
  *reinterpret_cast<V*>(weights + last) = e;
  typename Vector<T>::bits lane;
#pragma GCC unroll 16
  for (int i = 0; i < lanes; ++i) lane[i] = i;
  sum = lane < typename Exp<T>::Bits(repeated) ? V{} : e;
  for (int64_t t = 0; t < last; t += lanes) {
    const V e = exponential<T>(load<T>(logits + t) - shift);
    *reinterpret_cast<V*>(weights + t) = e;
    sum += e;
  }
  return {top[0], over_lanes<T, true>(sum)[0]};
}

// Computes 1 / sum and log(sum) + top for the queries of a span; 0 and +inf if all taps are excluded.
template <typename T>
ATTN_INLINE void finish(const T* tops, const T* sums, T* scale, T* log_sum_exp) {
  using V = typename Vector<T>::type;
  for (int64_t q = 0; q < SPAN; q += Vector<T>::lanes) {
    const V top = *reinterpret_cast<const V*>(tops + q), sum = *reinterpret_cast<const V*>(sums + q);
    const auto masked = top == V{} - std::numeric_limits<T>::infinity();
    *reinterpret_cast<V*>(scale + q) = masked ? V{} : T(1) / sum;
    *reinterpret_cast<V*>(log_sum_exp + q) =
        masked ? V{} + std::numeric_limits<T>::infinity() : top + logarithm<T>(sum);
  }
}

// Adds one column of values, weighted, to queries FIRST ... LAST - 1. The windows of neighboring queries
// begin one column apart, so the weight moves one tap back from query to query.
template <typename T, int FIRST, int LAST, int VECTORS>
ATTN_INLINE void mix_column(const T* weights, int64_t taps, const T* value,
                            typename Vector<T>::type (*sum)[VECTORS]) {
  using V = typename Vector<T>::type;
  V v[VECTORS];
#pragma GCC unroll 4
  for (int c = 0; c < VECTORS; ++c) v[c] = *reinterpret_cast<const V*>(value + c * Vector<T>::lanes);
#pragma GCC unroll 8
  for (int q = FIRST; q < LAST; ++q) {
    const V weight = V{} + weights[q * (taps - 1)];
#pragma GCC unroll 4
    for (int c = 0; c < VECTORS; ++c) sum[q][c] += weight * v[c];
  }
}

// Columns inside the windows of only the first queries, or only the last.
template <typename T, int VECTORS, int... AT>
ATTN_INLINE void mix_first(const T* weights, int64_t taps, const T* values, int64_t width,
                           typename Vector<T>::type (*sum)[VECTORS], std::integer_sequence<int, AT...>) {
  (mix_column<T, 0, AT + 1, VECTORS>(weights + AT, taps, values + AT * width, sum), ...);
}
template <typename T, int VECTORS, int... AT>
ATTN_INLINE void mix_last(const T* weights, int64_t taps, const T* values, int64_t width,
                          typename Vector<T>::type (*sum)[VECTORS], std::integer_sequence<int, AT...>) {
  (mix_column<T, AT + 1, SPAN, VECTORS>(weights + AT, taps, values + AT * width, sum), ...);
}

// out[q] = scale[q] * sum over i and j of weights[q][i][j] * values[i][q + j], for i < rows and j < columns,
// where columns >= SPAN - 1.
template <typename T, int VECTORS>
ATTN_INLINE void mix_span(const T* weights, int64_t taps, int64_t columns, const T* values, int64_t value_row,
                          int64_t rows, int64_t width, const T* scale, T* out) {
  using V = typename Vector<T>::type;
  using Edge = std::make_integer_sequence<int, int(SPAN) - 1>;
  V sum[SPAN][VECTORS] = {};
  for (int64_t i = 0; i < rows; ++i) {
    const T* w = weights + i * columns;
    const T* v = values + i * value_row;
    mix_first<T, VECTORS>(w, taps, v, width, sum, Edge());
    for (int64_t j = SPAN - 1; j < columns; ++j)
      mix_column<T, 0, SPAN, VECTORS>(w + j, taps, v + j * width, sum);
    mix_last<T, VECTORS>(w + columns, taps, v + columns * width, width, sum, Edge());
  }
#pragma GCC unroll 8
  for (int q = 0; q < SPAN; ++q)
#pragma GCC unroll 4
    for (int c = 0; c < VECTORS; ++c)
      *reinterpret_cast<V*>(out + q * width + c * Vector<T>::lanes) = sum[q][c] * scale[q];
}

// Copies `count` elements, as vectors if they are contiguous; the last two vectors may overlap.
template <typename T, typename From, typename To>
ATTN_INLINE void copy_strided(const From* from, int64_t from_step, int64_t count, To* to,
                              int64_t to_step = 1) {
  constexpr int64_t lanes = Vector<T>::lanes;
  if (from_step != 1 || to_step != 1 || count < lanes) {
    for (int64_t i = 0; i < count; ++i) to[i * to_step] = To(from[i * from_step]);
    return;
  }
  for (int64_t i = 0; i < count - lanes; i += lanes) store<T>(load<T>(from + i), to + i);
  store<T>(load<T>(from + count - lanes), to + count - lanes);
}

// Returns true if a query's logits can be read as they are: none is excluded, and they fill a vector. `row`
// and `column` are the map coordinates of the window's first tap.
template <typename T>
ATTN_INLINE bool readable(const Problem<T>& p, int64_t row, int64_t column) {
  const bool whole = row >= 0 && column >= 0 && row + p.kernel[0] <= p.Hk && column + p.kernel[1] <= p.Wk;
  return p.taps() >= Vector<T>::lanes && (whole || p.border == Border::kZero);
}

// Copies a query's logits to `room`, with -inf in place of the excluded ones.
template <typename T, typename E>
ATTN_INLINE const T* copied(const Problem<T>& p, const E* logits, int64_t row, int64_t column, T* room) {
  constexpr T NONE = -std::numeric_limits<T>::infinity();
  const int64_t taps = p.taps(), columns = p.kernel[1];
  copy_strided<T>(logits, int64_t(1), taps, room);
  for (int64_t t = taps; t < Vector<T>::lanes; ++t) room[t] = NONE;
  if (p.border == Border::kZero) return room;
  const int64_t begin = std::clamp(-column, int64_t(0), columns),
                end = std::clamp(p.Wk - column, begin, columns);
  for (int64_t i = 0; i < p.kernel[0]; ++i) {
    const bool inside = row + i >= 0 && row + i < p.Hk;
    T* tap = room + i * columns;
    std::fill(tap, tap + (inside ? begin : columns), NONE);
    std::fill(tap + end, tap + columns, NONE);
  }
  return room;
}

template <typename T>
void predicted_tasks(const Problem<T>& p, int64_t begin, int64_t end) {
  constexpr int64_t lanes = Vector<T>::lanes, ROOM = std::max(SPAN, lanes);
  auto whole = [](int64_t n) { return (n + lanes - 1) / lanes * lanes; };
  const int64_t taps = p.taps(), columns = p.kernel[1], reach = TILE + columns - 1;
  const int64_t step = whole(taps), width = whole(p.dv);
  const bool contiguous = p.position_logits.stride[4] == 1;
  Buffer<T> logits(contiguous ? 0 : TILE * step), room(step), weights(SPAN * step),
      values(p.kernel[0] * reach * width), mixed(SPAN * width);
  const int64_t tiles = (p.Wq + TILE - 1) / TILE;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t x0 = task % tiles * TILE, y = task / tiles % p.Hq, head = task / tiles / p.Hq;
    const int64_t m = head % p.M, b = head / p.M, count = std::min(TILE, p.Wq - x0);
    const int64_t top = y - p.padding[0], left = x0 - p.padding[1];
    const int64_t first_row = std::clamp(-top, int64_t(0), p.kernel[0]);
    const int64_t last_row = std::clamp(p.Hk - top, first_row, p.kernel[0]);
    // The values inside the tile's windows, zeros outside the map.
    const int64_t from = std::clamp(-left, int64_t(0), reach), to = std::clamp(p.Wk - left, from, reach);
    for (int64_t i = first_row; i < last_row; ++i) {
      T* row = values.data() + i * reach * width;
      std::fill(row, row + from * width, T(0));
      if (from < to)
        with_elements(p.value_view, b, m, top + i, left + from, [&](const auto* value) {
          copy_matrix(value, p.value_view.stride[3], p.value_view.stride[4], to - from, p.dv, T(1),
                      row + from * width, width);
        });
      std::fill(row + to * width, row + reach * width, T(0));
    }
    if (!contiguous)
      with_elements(p.position_logits, b, m, y, x0, [&](const auto* from) {
        const int64_t column = p.position_logits.stride[3], tap = p.position_logits.stride[4];
        // The next row's logits: the hardware does not follow as many streams as there are taps.
        if (y + 1 < p.Hq)
          for (int64_t t = 0; t < taps; ++t)
            for (int64_t x = 0; x < count; x += 64 / sizeof(*from))
              __builtin_prefetch(from + p.position_logits.stride[2] + x * column + t * tap);
        copy_matrix(from, column, tap, count, taps, T(1), logits.data(), step);
      });
    for (int64_t x = 0; x < count; x += SPAN) {
      const int64_t queries = std::min(SPAN, count - x);
      // Whole vectors; the padding beyond the row's last query has a maximum of 0 and a sum of 1.
      T tops[ROOM] = {}, sums[ROOM], scale[ROOM], log_sum_exp[ROOM];
      std::fill(sums, sums + ROOM, T(1));
      for (int64_t q = 0; q < queries; ++q) {
        // The hardware does not prefetch the next query's logits if those of other heads lie between them.
        const int64_t ahead = std::min(SPAN, p.Wq - 1 - (x0 + x + q)) * p.position_logits.stride[3];
        const auto take = [&](const auto* taken) {
          T* const to = weights.data() + q * step;
          const auto softmax =
              readable(p, top, left + x + q)
                  ? exponentials(taken, taps, to)
                  : exponentials(copied(p, taken, top, left + x + q, room.data()), std::max(taps, lanes), to);
          tops[q] = softmax.top, sums[q] = softmax.sum;
        };
        if (!contiguous)
          take(logits.data() + (x + q) * step);
        else
          with_elements(p.position_logits, b, m, y, x0 + x + q, [&](const auto* taken) {
            for (int64_t t = 0; t < taps; t += 64 / sizeof(*taken)) __builtin_prefetch(taken + ahead + t);
            take(taken);
          });
      }
      finish(tops, sums, scale, log_sum_exp);
      for (int64_t q = 0; q < queries; ++q) *p.log_sum_exp.at(b, m, y, x0 + x + q) = log_sum_exp[q];
      const T* w = weights.data() + first_row * columns;
      const T* v = values.data() + (first_row * reach + x) * width;
      const int64_t rows = last_row - first_row;
      int64_t c = 0;
      for (; c + 2 * lanes <= width; c += 2 * lanes)
        mix_span<T, 2>(w, step, columns, v + c, reach * width, rows, width, scale, mixed.data() + c);
      for (; c < width; c += lanes)
        mix_span<T, 1>(w, step, columns, v + c, reach * width, rows, width, scale, mixed.data() + c);
      with_elements(p.output, b, m, y, x0 + x, [&](auto* output) {
        for (int64_t q = 0; q < queries; ++q)
          copy_strided<T>(mixed.data() + q * width, 1, p.dv, output + q * p.output.stride[3],
                          p.output.stride[4]);
      });
    }
  }
}
