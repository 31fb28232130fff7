// The arithmetic of window attention for one instruction set. each_target.h includes this file once per set,
// inside a namespace and under a target pragma, with VECTOR_BYTES defined. It therefore has no include guard
// and only includes files of the same kind.
//
// Vectors run along the queries of a row. Keys, values, queries and gradients are packed as (row, phase,
// channel, column): column j of the padded map is element j / stride of phase j % stride, so all queries of a
// vector have the key of a tap at the same distance. Two products remain, both sums over a list of pointers:
// `dots` of a query with the keys of its taps, and `mixes` of rows by weights.

#include "common/vector_kernel.h"

constexpr int64_t TILE = 64, NARROW_TILE = 16;  // queries of a row computed together

// --- out[t] += scale * sum over c of left[c] * sources[t][c], for one vector of columns

template <typename T, int TAPS>
ATTN_INLINE void dots_of(const T* left, const T* const* sources, int64_t shift, int64_t width, int64_t line,
                         T* const* out, int64_t out_shift, T scale) {
  using V = typename Vector<T>::type;
  V sum[TAPS] = {};
  for (int64_t c = 0; c < width; ++c) {
    const V a = *reinterpret_cast<const V*>(left + c * line);
#pragma GCC unroll 16
    for (int t = 0; t < TAPS; ++t) sum[t] += a * *reinterpret_cast<const V*>(sources[t] + shift + c * line);
  }
#pragma GCC unroll 16
  for (int t = 0; t < TAPS; ++t) *reinterpret_cast<V*>(out[t] + out_shift) += sum[t] * scale;
}

template <typename T>
void dots(const T* left, const T* const* sources, int64_t taps, int64_t shift, int64_t width, int64_t line,
          T* const* out, int64_t out_shift, T scale) {
  int64_t t = 0;
  if constexpr (VECTOR_BYTES == 64)
    for (; t + 16 <= taps; t += 16)
      dots_of<T, 16>(left, sources + t, shift, width, line, out + t, out_shift, scale);
  for (; t + 8 <= taps; t += 8)
    dots_of<T, 8>(left, sources + t, shift, width, line, out + t, out_shift, scale);
  for (; t + 3 <= taps; t += 3)
    dots_of<T, 3>(left, sources + t, shift, width, line, out + t, out_shift, scale);
  for (; t < taps; ++t) dots_of<T, 1>(left, sources + t, shift, width, line, out + t, out_shift, scale);
}

// --- out[c] = sum over t of weights[t] * sources[t][c], for one vector of columns; of MASKED, where
// outside[t] is 0

template <typename T, bool MASKED, int ROWS>
ATTN_INLINE void mixes_of(const T* const* weights, int64_t weight_shift, const T* const* sources,
                          int64_t shift, const T* const* outside, int64_t taps, int64_t line, T* out) {
  using V = typename Vector<T>::type;
  V sum[ROWS] = {};
  for (int64_t t = 0; t < taps; ++t) {
    const auto part = [&](const T* from) {  // neither a weight nor a source outside may be NaN or infinite
      const V v = *reinterpret_cast<const V*>(from);
      if constexpr (MASKED) return *reinterpret_cast<const V*>(outside[t] + weight_shift) == V{} ? v : V{};
      return v;
    };
    const V w = part(weights[t] + weight_shift);
    const T* source = sources[t] + shift;
#pragma GCC unroll 16
    for (int c = 0; c < ROWS; ++c) sum[c] += w * part(source + c * line);
  }
#pragma GCC unroll 16
  for (int c = 0; c < ROWS; ++c) *reinterpret_cast<V*>(out + c * TILE) = sum[c];
}

template <typename T, bool MASKED>
ATTN_INLINE void mixes_of_all(const T* const* weights, int64_t x, const T* const* sources,
                              const T* const* outside, int64_t taps, int64_t width, int64_t line, T* out) {
  int64_t c = 0;
  const auto next = [&](auto rows) {
    constexpr int ROWS = decltype(rows)::value;
    for (; c + ROWS <= width; c += ROWS)
      mixes_of<T, MASKED, ROWS>(weights, x, sources, x + c * line, outside, taps, line, out + c * TILE);
  };
  if constexpr (VECTOR_BYTES == 64) next(std::integral_constant<int, 16>());
  next(std::integral_constant<int, 8>());
  next(std::integral_constant<int, 2>());
  next(std::integral_constant<int, 1>());
}

template <typename T>
void mixes(const std::vector<const T*>& weights, int64_t x, const std::vector<const T*>& sources,
           const std::vector<const T*>* outside, int64_t width, int64_t line, T* out) {
  const int64_t taps = int64_t(sources.size());
  if (outside)
    return mixes_of_all<T, true>(weights.data(), x, sources.data(), outside->data(), taps, width, line, out);
  mixes_of_all<T, false>(weights.data(), x, sources.data(), nullptr, taps, width, line, out);
}

// --- packing

// Packs columns 0 ... count - 1 of a row, placing them from column `first` of the padded map on.
template <typename E, typename T>
ATTN_INLINE void pack_row(const E* from, int64_t column_stride, int64_t channel_stride, int64_t count,
                          int64_t width, int64_t phases, int64_t first, int64_t line, T* to) {
  if (phases == 1)
    return copy_matrix(from, channel_stride, column_stride, width, count, T(1), to + first, line);
  constexpr int64_t tile = 16;  // both sides of a transposition stay in the L1 cache
  for (int64_t x0 = 0; x0 < count; x0 += tile)
    for (int64_t c = 0; c < width; ++c)
      for (int64_t x = x0; x < std::min(count, x0 + tile); ++x) {
        const int64_t at = x + first;
        to[(at % phases * width + c) * line + at / phases] = T(from[c * channel_stride + x * column_stride]);
      }
}

template <typename T>
void pack_tasks(const Packing<T>& p, int64_t begin, int64_t end) {
  for (int64_t task = begin; task < end; ++task) {
    // The heads of a row follow each other: channels-last, they lie in the same pages.
    const int64_t m = task % p.M, y = task / p.M % p.rows, b = task / p.M / p.rows;
    T* to = p.to + ((b * p.M + m) * p.rows + y) * p.phases * p.width * p.line;
    with_elements(p.view, b, m, y, 0, [&](const auto* from) {
      if (p.view.stride[4] == 1 && m + 1 < p.M)  // the hardware does not follow a stride of pixels
        for (int64_t x = 0; x < p.columns; ++x)
          for (int64_t c = 0; c < p.width; c += 64 / sizeof(*from))
            __builtin_prefetch(from + p.view.stride[1] + x * p.view.stride[3] + c);
      pack_row(from, p.view.stride[3], p.view.stride[4], p.columns, p.width, p.phases, p.first, p.line, to);
    });
  }
}

// --- a tile of queries

template <typename T>
struct Scratch {
  Buffer<T> weights, slopes, mixed;
  std::vector<const T*> keys, values, weight_rows, slope_rows, outside;
  std::vector<T*> weight_out, slope_out;
  std::vector<int64_t> taps;           // whose row is inside the map
  const std::vector<const T*>* masks;  // where lanes of a tile have different taps

  Scratch(const Problem<T>& p, bool backward)
      : weights(p.weights ? 0 : p.taps() * TILE),
        slopes(backward && !p.slopes ? p.taps() * TILE : 0),
        mixed(std::max(p.d, p.dv) * TILE),
        masks(p.inside() ? &outside : nullptr) {
    for (auto* list : {&keys, &values, &weight_rows, &slope_rows, &outside}) list->reserve(p.taps());
    weight_out.reserve(p.taps()), slope_out.reserve(p.taps()), taps.reserve(p.taps());
  }
};

// Lists the pointers of a tile's taps; the weights of tap t are at weights + t * step.
template <typename T>
ATTN_INLINE void list_taps(const Problem<T>& p, Scratch<T>& s, int64_t head, int64_t y, int64_t x0,
                           int64_t count, T* weights, T* slopes, int64_t step) {
  const int64_t first = p.first_tap(x0 + count - 1), last = p.first_tap(x0) + p.window[1];
  s.outside.clear(), s.keys.clear(), s.values.clear(), s.weight_rows.clear(), s.slope_rows.clear();
  s.weight_out.clear(), s.slope_out.clear(), s.taps.clear();
  for (int64_t i = 0; i < p.kernel[0]; ++i) {
    const int64_t row = p.first_key(0, y) + i * p.dilation[0];
    if (row < 0 || row >= p.Hk) continue;
    for (int64_t j = first; j < last; ++j) {
      const int64_t t = i * p.kernel[1] + j, offset = j * p.dilation[1];
      const int64_t phase = (head * p.Hk + row) * p.stride[1] + offset % p.stride[1];
      const int64_t column = offset / p.stride[1] + x0;
      if (p.key) s.keys.push_back(p.key + phase * p.d * p.line + column);
      s.values.push_back(p.value + phase * p.dv * p.line + column);
      s.weight_rows.push_back(weights + t * step), s.weight_out.push_back(weights + t * step);
      if (slopes) s.slope_rows.push_back(slopes + t * step), s.slope_out.push_back(slopes + t * step);
      s.taps.push_back(t);
      if (p.outside)
        s.outside.push_back(
            p.outside + (p.inside() ? j * p.line + p.margin + x0 : offset % p.stride[1] * p.line + column));
    }
  }
}

// Calls body(x, own, t) for each query x of a tile and each tap of its window: `own` of the window's, t of
// all.
template <typename T, typename Body>
ATTN_INLINE void for_own_taps(const Problem<T>& p, int64_t x0, int64_t count, const Body& body) {
  for (int64_t x = 0; x < count; ++x) {
    const int64_t first = p.first_tap(x0 + x);
    for (int64_t i = 0; i < p.kernel[0]; ++i)
      for (int64_t j = 0; j < p.window[1]; ++j) body(x, i * p.window[1] + j, i * p.kernel[1] + first + j);
  }
}

// Computes a tile's logits for all taps: -inf outside the map, unless the border counts as zeros.
template <typename T>
ATTN_INLINE void tile_logits(const Problem<T>& p, Scratch<T>& s, int64_t head, int64_t b, int64_t m,
                             int64_t y, int64_t x0, int64_t count, int64_t padded, T* weights, int64_t step) {
  using V = typename Vector<T>::type;
  constexpr int64_t lanes = Vector<T>::lanes;
  const int64_t taps = p.taps();
  for (int64_t t = 0; t < taps; ++t)
    for (int64_t x = p.position_logits.data && !p.inside() ? count : 0; x < padded; ++x)
      weights[t * step + x] = T(0);
  if (p.position_logits.data) {
    const int64_t column = p.position_logits.stride[3], tap = p.position_logits.stride[4];
    with_elements(p.position_logits, b, m, y, x0, [&](const auto* from) {
      if (!p.inside()) return copy_matrix(from, tap, column, taps, count, T(1), weights, step);
      for_own_taps(p, x0, count, [&](int64_t x, int64_t own, int64_t t) {
        weights[t * step + x] = T(from[x * column + own * tap]);
      });
    });
  }
  if (p.query) {
    const T* left = p.query + (head * p.Hq + y) * p.d * p.line + p.margin + x0;
    for (int64_t x = 0; x < padded; x += lanes)
      dots(left + x, s.keys.data(), int64_t(s.keys.size()), x, p.d, p.line, s.weight_out.data(), x, p.scale);
  }
  if (p.border == Border::kZero) return;
  size_t next = 0;
  for (int64_t t = 0; t < taps; ++t) {
    T* row = weights + t * step;
    if (next < s.taps.size() && s.taps[next] == t) {
      const T* outside = s.outside[next++];
      for (int64_t x = 0; x < padded; x += lanes) {
        const V l = *reinterpret_cast<const V*>(row + x), o = *reinterpret_cast<const V*>(outside + x);
        *reinterpret_cast<V*>(row + x) = o == V{} ? l : o;  // chosen: a sum could be NaN
      }
    } else {
      for (int64_t x = 0; x < padded; ++x) row[x] = -std::numeric_limits<T>::infinity();
    }
  }
}

template <typename T>
ATTN_INLINE void scatter(const View<T>& view, int64_t b, int64_t m, int64_t y, int64_t first, int64_t step,
                         int64_t begin, int64_t end, int64_t width, const T* from) {
  const int64_t column = view.stride[3] * step, channel = view.stride[4];
  with_elements(view, b, m, y, first, [&](auto* to) {
    if (channel == 1)
      return copy_matrix(from + begin, int64_t(1), TILE, end - begin, width, T(1), to + begin * column,
                         column);
    if (column == 1)
      return copy_matrix(from + begin, TILE, int64_t(1), width, end - begin, T(1), to + begin, channel);
    using E = std::remove_reference_t<decltype(*to)>;
    for (int64_t x = begin; x < end; ++x)
      for (int64_t c = 0; c < width; ++c) to[x * column + c * channel] = E(from[c * TILE + x]);
  });
}

// Replaces the logits of a vector of queries by their exponentials, and returns the maximum, -inf where there
// is no key, with the factor that makes them weights. The backward computes the same weights anew: with a
// rounded log-sum-exp, those of large logits would not sum to 1.
template <typename T>
ATTN_INLINE typename Vector<T>::type exponentials_of_taps(T* logits, int64_t taps, int64_t step,
                                                          typename Vector<T>::type& factor) {
  using V = typename Vector<T>::type;
  const V lowest = V{} - std::numeric_limits<T>::infinity();
  V top = lowest, sum = {};
  for (int64_t t = 0; t < taps; ++t) {
    const V l = *reinterpret_cast<const V*>(logits + t * step);
    top = (l > top) | (l != l) ? l : top;  // NaN stays NaN
  }
  const V shift = top == lowest ? V{} : top;
  for (int64_t t = 0; t < taps; ++t) {
    V* at = reinterpret_cast<V*>(logits + t * step);
    *at = exponential<T>(*at - shift);
    sum += *at;
  }
  factor = top == lowest ? V{} : T(1) / sum;
  return top;
}

template <typename T>
void forward_tasks(const Problem<T>& p, int64_t begin, int64_t end) {
  using V = typename Vector<T>::type;
  constexpr int64_t lanes = Vector<T>::lanes;
  Scratch<T> s(p, false);
  const int64_t tiles = (p.Wq + p.tile - 1) / p.tile, taps = p.taps();
  for (int64_t task = begin; task < end; ++task) {
    const int64_t x0 = task % tiles * p.tile, y = task / tiles % p.Hq, head = task / tiles / p.Hq;
    const int64_t m = head % p.M, b = head / p.M, count = std::min(p.tile, p.Wq - x0);
    const int64_t padded = (count + lanes - 1) / lanes * lanes;
    T* weights = s.weights.data();
    list_taps(p, s, head, y, x0, count, weights, static_cast<T*>(nullptr), TILE);
    tile_logits(p, s, head, b, m, y, x0, count, padded, weights, TILE);
    for (int64_t x = 0; x < padded; x += lanes) {
      V scale;
      const V top = exponentials_of_taps<T>(weights + x, taps, TILE, scale);
      mixes(s.weight_rows, x, s.values, s.masks, p.dv, p.line, s.mixed.data() + x);
      for (int64_t c = 0; c < p.dv; ++c) *reinterpret_cast<V*>(s.mixed.data() + c * TILE + x) *= scale;
      const V infinite = V{} + std::numeric_limits<T>::infinity();
      const V log_sum_exp = top == -infinite ? infinite : top - logarithm<T>(scale);
      for (int64_t l = 0; l < lanes && x + l < count; ++l)
        *p.log_sum_exp.at(b, m, y, x0 + x + l) = log_sum_exp[l];
    }
    scatter(p.output, b, m, y, x0, int64_t(1), int64_t(0), count, p.dv, s.mixed.data());
  }
}

// Computes the weights and slopes (gradients of the logits) of tiles, and the gradients of query and position
// logits.
template <typename T>
void query_tasks(const Problem<T>& p, int64_t begin, int64_t end) {
  using V = typename Vector<T>::type;
  constexpr int64_t lanes = Vector<T>::lanes;
  Scratch<T> s(p, true);
  const int64_t tiles = (p.Wq + p.tile - 1) / p.tile, taps = p.taps();
  for (int64_t task = begin; task < end; ++task) {
    const int64_t x0 = task % tiles * p.tile, y = task / tiles % p.Hq, local = task / tiles / p.Hq;
    const int64_t head = p.first_head + local, m = head % p.M, b = head / p.M;
    const int64_t count = std::min(p.tile, p.Wq - x0), padded = (count + lanes - 1) / lanes * lanes;
    const int64_t stored = (local * p.Hq + y) * taps * p.line + p.margin + x0;
    const bool keep = p.weights != nullptr;
    T* weights = keep ? p.weights + stored : s.weights.data();
    T* slopes = keep ? p.slopes + stored : s.slopes.data();
    const int64_t step = keep ? p.line : TILE;
    list_taps(p, s, head, y, x0, count, weights, slopes, step);
    tile_logits(p, s, head, b, m, y, x0, count, padded, weights, step);
    for (int64_t t = 0; t < taps; ++t)
      for (int64_t x = 0; x < padded; x += lanes) *reinterpret_cast<V*>(slopes + t * step + x) = V{};
    const T* left = p.gradient + (head * p.Hq + y) * p.dv * p.line + p.margin + x0;
    for (int64_t x = 0; x < padded; x += lanes) {
      V scale;
      exponentials_of_taps<T>(weights + x, taps, step, scale);
      for (int64_t t = 0; t < taps; ++t) *reinterpret_cast<V*>(weights + t * step + x) *= scale;
      if (!p.logits_wanted) continue;
      dots(left + x, s.values.data(), int64_t(s.values.size()), x, p.dv, p.line, s.slope_out.data(), x, T(1));
      if (p.inside())
        for (size_t n = 0; n < s.taps.size(); ++n) {
          V* at = reinterpret_cast<V*>(s.slope_out[n] + x);
          *at = *reinterpret_cast<const V*>(s.outside[n] + x) == V{} ? *at : V{};
        }
      V mean = {};
      for (int64_t t = 0; t < taps; ++t)
        mean += *reinterpret_cast<const V*>(weights + t * step + x) *
                *reinterpret_cast<const V*>(slopes + t * step + x);
      for (int64_t t = 0; t < taps; ++t) {
        V* at = reinterpret_cast<V*>(slopes + t * step + x);
        *at = *reinterpret_cast<const V*>(weights + t * step + x) * (*at - mean);
      }
      if (p.grad_query.data) {
        mixes(s.slope_rows, x, s.keys, s.masks, p.d, p.line, s.mixed.data() + x);
        for (int64_t c = 0; c < p.d; ++c) *reinterpret_cast<V*>(s.mixed.data() + c * TILE + x) *= p.scale;
      }
    }
    // Exclude the padding from the sums over queries.
    if (keep) {
      for (int64_t t = 0; t < taps; ++t)
        for (int64_t x = count; x < padded; ++x) weights[t * step + x] = slopes[t * step + x] = T(0);
    }
    if (p.grad_query.data)
      scatter(p.grad_query, b, m, y, x0, int64_t(1), int64_t(0), count, p.d, s.mixed.data());
    if (p.grad_position_logits.data) {
      const int64_t column = p.grad_position_logits.stride[3], tap = p.grad_position_logits.stride[4];
      with_elements(p.grad_position_logits, b, m, y, x0, [&](auto* to) {
        using E = std::remove_reference_t<decltype(*to)>;
        if (p.inside())
          return for_own_taps(p, x0, count, [&](int64_t x, int64_t own, int64_t t) {
            to[x * column + own * tap] = E(slopes[t * step + x]);
          });
        for (int64_t x = 0; x < count; ++x)
          for (int64_t t = 0; t < taps; ++t) to[x * column + t * tap] = E(slopes[t * step + x]);
      });
    }
  }
}

// Gathers the gradients of keys and values: every key sums over the queries whose windows contain it.
template <typename T>
void key_tasks(const Problem<T>& p, int64_t begin, int64_t end) {
  constexpr int64_t lanes = Vector<T>::lanes;
  Buffer<T> mixed(std::max(p.d, p.dv) * TILE);
  std::vector<const T*> weights, slopes, gradients, queries, outside;
  const auto* masks = p.inside() ? &outside : nullptr;
  const int64_t columns = (p.Wk + p.padding[1] + p.stride[1] - 1) / p.stride[1];  // per phase
  const int64_t tiles = (columns + p.tile - 1) / p.tile, taps = p.taps();
  for (int64_t task = begin; task < end; ++task) {
    const int64_t u0 = task % tiles * p.tile, phase = task / tiles % p.stride[1];
    const int64_t row = task / tiles / p.stride[1] % p.Hk, local = task / tiles / p.stride[1] / p.Hk;
    const int64_t head = p.first_head + local, m = head % p.M, b = head / p.M;
    const int64_t count = std::min(p.tile, columns - u0), padded = (count + lanes - 1) / lanes * lanes;
    // Elements [from, to) of this tile are columns of the map.
    const int64_t first = u0 * p.stride[1] + phase - p.padding[1];
    int64_t from = 0, to = 0;
    if (first < 0) from = (-first + p.stride[1] - 1) / p.stride[1];
    if (p.Wk > first) to = std::min(count, (p.Wk - first + p.stride[1] - 1) / p.stride[1]);
    if (from >= to) continue;
    weights.clear(), slopes.clear(), gradients.clear(), queries.clear(), outside.clear();
    // Queries of row y have this row of keys as their taps' row i.
    const auto list = [&](int64_t y, int64_t i) {
      for (int64_t j = 0; j < p.kernel[1]; ++j) {
        const int64_t offset = j * p.dilation[1];
        if (offset % p.stride[1] != phase) continue;
        if (p.inside()) {
          const int64_t low = std::max(int64_t(0), u0 - offset), high = std::min(p.Wq, u0 - offset + count);
          if (low >= high || j < p.first_tap(high - 1) || j >= p.first_tap(low) + p.window[1]) continue;
          outside.push_back(p.outside + j * p.line + p.margin - offset + u0);
        }
        const int64_t x = p.margin - offset / p.stride[1] + u0;
        const int64_t stored = ((local * p.Hq + y) * taps + i * p.kernel[1] + j) * p.line + x;
        weights.push_back(p.weights + stored), slopes.push_back(p.slopes + stored);
        gradients.push_back(p.gradient + (head * p.Hq + y) * p.dv * p.line + x);
        if (p.query) queries.push_back(p.query + (head * p.Hq + y) * p.d * p.line + x);
      }
    };
    if (p.inside()) {
      const int64_t step = p.dilation[0], reach = (p.window[0] - 1) * step;
      for (int64_t y = row - reach; y <= row + reach; y += step) {
        const int64_t i = y < 0 || y >= p.Hq ? -1 : (row - p.first_key(0, y)) / step;
        if (i >= 0 && i < p.window[0]) list(y, i);
      }
    } else {
      for (int64_t i = 0; i < p.kernel[0]; ++i) {
        const int64_t up = row + p.padding[0] - i * p.dilation[0], y = up / p.stride[0];
        if (up >= 0 && up % p.stride[0] == 0 && y < p.Hq) list(y, i);
      }
    }
    if (p.grad_value.data) {
      for (int64_t u = 0; u < padded; u += lanes)
        mixes(weights, u, gradients, masks, p.dv, p.line, mixed.data() + u);
      scatter(p.grad_value, b, m, row, first, p.stride[1], from, to, p.dv, mixed.data());
    }
    if (p.grad_key.data) {
      for (int64_t u = 0; u < padded; u += lanes)
        mixes(slopes, u, queries, masks, p.d, p.line, mixed.data() + u);
      for (int64_t i = 0; i < p.d * TILE; ++i) mixed[i] *= p.scale;
      scatter(p.grad_key, b, m, row, first, p.stride[1], from, to, p.d, mixed.data());
    }
  }
}

#include "cpu_predicted_kernel.h"

template <typename T>
void run_tasks(Stage stage, const Problem<T>& p, int64_t begin, int64_t end) {
  if (stage == Stage::FORWARD) return forward_tasks(p, begin, end);
  if (stage == Stage::PREDICTED) return predicted_tasks(p, begin, end);
  if (stage == Stage::QUERIES) return query_tasks(p, begin, end);
  key_tasks(p, begin, end);
}

void run_range(Stage stage, const Problem<float>& p, int64_t begin, int64_t end) {
  run_tasks(stage, p, begin, end);
}
void run_range(Stage stage, const Problem<double>& p, int64_t begin, int64_t end) {
  run_tasks(stage, p, begin, end);
}
void pack_range(const Packing<float>& p, int64_t begin, int64_t end) {
  pack_tasks(p, begin, end);
}
void pack_range(const Packing<double>& p, int64_t begin, int64_t end) {
  pack_tasks(p, begin, end);
}
