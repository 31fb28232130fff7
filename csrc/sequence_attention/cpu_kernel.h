// The arithmetic of sequence attention for one instruction set; each_target.h includes this file once per
// set, in the same way as global_attention/cpu_kernel.h.
//
// A task works on one head and on every slots-th block of queries. It packs the head's keys and values once,
// into panels that stay in the L1 cache while a block's logits are computed. The logits stay in the L2 cache
// from the first product to the last.

#include "common/vector_kernel.h"

#include "common/product_kernel.h"

#include "cpu_memory.h"

// The logits of few queries (count x keys), from keys that are read in place.
template <typename T>
ATTN_INLINE void direct_logits(const Problem<T>& p, Scratch<T>& s, int64_t b, int64_t m, int64_t count,
                               int64_t keys) {
  using V = typename Vector<T>::type;
  constexpr int64_t lanes = Vector<T>::lanes;
  const int64_t whole = p.d / lanes * lanes;
  for (int64_t k = 0; k < keys; ++k) {
    const T* key = p.key.at(b, m, 0, k);
    for (int64_t i = 0; i < count; ++i) {
      const T* query = s.query.data() + i * p.d_padded;
      V sums = {};
      for (int64_t c = 0; c < whole; c += lanes)
        sums += *reinterpret_cast<const V*>(query + c) * *reinterpret_cast<const V*>(key + c);
      T sum = lanes_sum<T>(sums);
      for (int64_t c = whole; c < p.d; ++c) sum += query[c] * key[c];
      s.weights[i * p.line + k] = sum;
    }
  }
}

template <typename T>
ATTN_INLINE void direct_mixture(const Problem<T>& p, Scratch<T>& s, int64_t b, int64_t m, int64_t count,
                                int64_t keys) {
  std::fill_n(s.mixed.data(), count * p.dv_padded, T(0));
  for (int64_t k = 0; k < keys; ++k) {
    const T* __restrict value = p.value.at(b, m, 0, k);
    for (int64_t i = 0; i < count; ++i) {
      T* __restrict mixed = s.mixed.data() + i * p.dv_padded;
      const T weight = s.weights[i * p.line + k];
      for (int64_t c = 0; c < p.dv; ++c) mixed[c] += weight * value[c];
    }
  }
}

// The keys visible to query t, 0 ... keys - 1, and its band among them, first ... last - 1.
template <typename T>
struct Reach {
  int64_t position, keys, first, last;
  ATTN_INLINE Reach(const Problem<T>& p, int64_t t) : position(p.start + t) {
    keys = p.causal ? std::min(p.S, position + 1) : p.S;
    first = std::min(std::max(position - p.left, int64_t(0)), keys);
    last = std::max(first, std::min(position - p.left + p.K, keys));
  }
};

// Turns maxima of logits and sums of exponentials into log-sum-exps and factors of the weights. A fully
// masked query has weights of 0; a log-sum-exp of +inf gives the same in the backward.
template <typename T>
ATTN_INLINE void finish(int64_t count, T* tops, T* sums) {
  using V = typename Vector<T>::type;
  for (int64_t i = 0; i < count; i += Vector<T>::lanes) {
    V* const top = reinterpret_cast<V*>(tops + i);
    V* const sum = reinterpret_cast<V*>(sums + i);
    const auto nothing = *top == V{} - std::numeric_limits<T>::infinity();
    *top = nothing ? V{} + std::numeric_limits<T>::infinity() : *top + logarithm<T>(*sum);
    *sum = nothing ? V{} : T(1) / *sum;
  }
}

// Adds `position`, if given, to the logits of `keys`, sets the logits beyond to -inf, and returns the
// maximum. Only whole vectors are stored: a vector load after narrower stores would stall on store
// forwarding.
template <typename T, typename E>
ATTN_INLINE T complete(T* line, const E* position, int64_t keys, int64_t columns) {
  using V = typename Vector<T>::type;
  using B = typename Vector<T>::bits;
  constexpr int64_t lanes = Vector<T>::lanes;
  const V none = V{} - std::numeric_limits<T>::infinity();
  V top = none;
  for (int64_t k = 0; k < columns; k += lanes) {
    V* const at = reinterpret_cast<V*>(line + k);
    const int64_t here = keys - k;
    if (here >= lanes) {
      if (position) *at += load<T>(position + k);
    } else if (here <= 0) {
      *at = none;
    } else {
      B lane;
#pragma GCC unroll 16
      for (int64_t l = 0; l < lanes; ++l) lane[l] = l;
      V last = *at;
      if (position) last += load_first<T>(position + k, here);
      *at = lane < B{} + typename Exp<T>::Bits(here) ? last : none;
    }
    top = *at > top ? *at : top;
  }
  return over_all_lanes<T, false>(top);
}

// Computes the attention weights of queries first ... first + count - 1 over `columns` keys into s.weights, 0
// where there is no key, which the caller multiplies by s.scale. The backward computes the same weights anew:
// with a rounded log-sum-exp, those of large logits would not sum to 1.
template <typename T>
ATTN_INLINE void attention_weights(const Problem<T>& p, Scratch<T>& s, int64_t b, int64_t m, int64_t first,
                                   int64_t count, int64_t columns, bool forward) {
  constexpr T masked = -std::numeric_limits<T>::infinity();
  T* weights = s.weights.data();
  if (p.query.data) {
    gather(p.query, b, m, first, count, p.d, p.d_padded, p.scale, s.query.data());
    if (p.direct)
      direct_logits(p, s, b, m, count, std::min(p.S, columns));
    else
      panel_product(s.query.data(), p.d_padded, s.key_panels.data(), p.d, weights, p.line, count, columns);
  } else {
    for (int64_t i = 0; i < count; ++i)
      for (int64_t k = 0; k < columns; ++k) weights[i * p.line + k] = T(0);
  }
  for (int64_t i = 0; i < count; ++i) {
    const Reach<T> reach(p, first + i);
    T* __restrict line = weights + i * p.line;
    const bool apart = p.position.data && (p.padding || s.segment || p.position.stride[4] != 1);
    if (apart) {
      const int64_t step = p.position.stride[4];
      with_elements(p.position, b, m, 0, first + i, [&](const auto* __restrict from) {
        for (int64_t k = 0; k < reach.keys; ++k) line[k] += T(from[k * step]);
      });
    }
    if (p.band.data) {
      const int64_t step = p.band.stride[4], shift = p.left - reach.position;
      with_elements(p.band, b, m, 0, first + i, [&](const auto* __restrict from) {
        for (int64_t k = reach.first; k < reach.last; ++k) line[k] += T(from[(k + shift) * step]);
      });
      if (p.outside.data) {
        T outside = 0;
        with_elements(p.outside, b, m, 0, first + i, [&](const auto* from) { outside = T(*from); });
        for (int64_t k = 0; k < reach.first; ++k) line[k] += outside;
        for (int64_t k = reach.last; k < reach.keys; ++k) line[k] += outside;
      }
    }
    if (p.padding) {
      const bool* __restrict padding = p.padding + b * p.S;
      for (int64_t k = 0; k < reach.keys; ++k) line[k] = padding[k] ? masked : line[k];
    }
    if (s.segment) {
      const int32_t* __restrict segment = s.segment;
      const int32_t own = segment[reach.position];
      for (int64_t k = 0; k < reach.keys; ++k) line[k] = segment[k] == own ? line[k] : masked;
    }
    T top;
    if (p.position.data && !apart)
      with_elements(p.position, b, m, 0, first + i,
                    [&](const auto* from) { top = complete(line, from, reach.keys, columns); });
    else
      top = complete(line, static_cast<const T*>(nullptr), reach.keys, columns);
    s.top[i] = top;
    s.scale[i] = exponentials(line, columns, s.top[i] == masked ? T(0) : s.top[i]);
  }
  finish(count, s.top.data(), s.scale.data());
  for (int64_t i = 0; forward && i < count; ++i) *p.log_sum_exp.at(b, m, 0, first + i) = s.top[i];
}

// The segments of a batch entry's keys, nullptr where they all are one: most of a map's windows, for example.
template <typename T>
ATTN_INLINE const int32_t* segment_of(const Problem<T>& p, int64_t b) {
  if (!p.segments) return nullptr;
  const int32_t* __restrict segment = p.segments + b % p.period * p.S;
  int32_t differences = 0;
  for (int64_t k = 0; k < p.S; ++k) differences |= segment[k] ^ segment[0];
  return differences ? segment : nullptr;
}

// The number of keys to compute for a block: those visible to its last query, rounded up to whole vectors of
// 64 bytes.
template <typename T>
ATTN_INLINE int64_t columns_of(const Problem<T>& p, int64_t last) {
  constexpr int64_t lanes = 64 / sizeof(T);
  return (Reach<T>(p, last).keys + lanes - 1) / lanes * lanes;
}

template <typename T>
void forward_tasks(const Problem<T>& p, int64_t begin, int64_t end) {
  Scratch<T> s(p, false);
  const int64_t size = block_size(p), blocks = size ? (p.queries + size - 1) / size : 0;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t slot = task % p.slots, head = task / p.slots, m = head % p.M, b = head / p.M;
    s.segment = segment_of(p, b);
    if (p.query.data && !p.direct) pack_panels(p.key, b, m, p.S, p.d, s.key_panels.data());
    if (!p.direct) gather(p.value, b, m, int64_t(0), p.S, p.dv, p.dv_padded, T(1), s.value_rows.data());
    for (int64_t block = slot; block < blocks; block += p.slots) {
      const int64_t first = block * size, count = std::min(size, p.queries - first);
      const int64_t columns = columns_of(p, first + count - 1);
      attention_weights(p, s, b, m, first, count, columns, true);
      const int64_t keys = std::min(p.S, columns);
      if (p.direct)
        direct_mixture(p, s, b, m, count, keys);
      else
        row_product(s.weights.data(), p.line, s.value_rows.data(), p.dv_padded, s.mixed.data(), count, keys);
      scatter(p.output, b, m, int64_t(0), first, count, p.dv, p.dv_padded, &s.scale[0], int64_t(1),
              s.mixed.data());
    }
  }
}

template <typename E, typename T>
ATTN_INLINE void add(E* __restrict to, const T* __restrict from, int64_t count) {
  for (int64_t k = 0; k < count; ++k) to[k] = E(T(to[k]) + from[k]);
}

// Adds one query's logit gradients to those of the band, outside and position logits.
template <typename T>
ATTN_INLINE void add_logit_gradients(const Problem<T>& p, int64_t group, int64_t b, int64_t m, int64_t slot,
                                     int64_t t, const T* __restrict slope) {
  const Reach<T> reach(p, t);
  if (p.grad_position.data) {
    with_elements(p.grad_position, p.position_by_group ? group : b, m, slot, t,
                  [&](auto* __restrict to) { add(to, slope, reach.keys); });
  }
  if (p.grad_band.data) {
    const int64_t shift = p.left - reach.position;
    with_elements(p.grad_band, p.band_by_group ? group : b, m, slot, t, [&](auto* __restrict to) {
      add(to + reach.first + shift, slope + reach.first, reach.last - reach.first);
    });
  }
  if (p.grad_outside.data) {
    T sum = 0;
    for (int64_t k = 0; k < reach.first; ++k) sum += slope[k];
    for (int64_t k = reach.last; k < reach.keys; ++k) sum += slope[k];
    with_elements(p.grad_outside, p.outside_by_group ? group : b, m, slot, t,
                  [&](auto* to) { add(to, &sum, int64_t(1)); });
  }
}

// Computes the gradients of one head from the slot's share of its queries.
template <typename T>
void backward_head(const Problem<T>& p, Scratch<T>& s, int64_t group, int64_t b, int64_t m, int64_t slot) {
  const int64_t size = block_size(p), blocks = size ? (p.queries + size - 1) / size : 0, line = p.line;
  const T one = 1;
  T* weights = s.weights.data();
  T* slopes = s.slopes.data();
  s.segment = segment_of(p, b);
  if (p.query.data) pack_panels(p.key, b, m, p.S, p.d, s.key_panels.data());
  if (p.logits_wanted) pack_panels(p.value, b, m, p.S, p.dv, s.value_panels.data());
  if (p.grad_query.data) gather(p.key, b, m, int64_t(0), p.S, p.d, p.d_padded, p.scale, s.key_rows.data());
  if (p.grad_key.data) std::fill_n(s.grad_key.data(), p.S * p.d_padded, T(0));
  if (p.grad_value.data) std::fill_n(s.grad_value.data(), p.S * p.dv_padded, T(0));
  for (int64_t block = slot; block < blocks; block += p.slots) {
    const int64_t first = block * size, count = std::min(size, p.queries - first);
    const int64_t columns = columns_of(p, first + count - 1), keys = std::min(p.S, columns);
    attention_weights(p, s, b, m, first, count, columns, false);
    gather(p.grad_output, b, m, first, count, p.dv, p.dv_padded, one, s.gradient.data());
    for (int64_t i = 0; i < count; ++i)
      for (int64_t c = 0; c < p.dv_padded; ++c) s.gradient[i * p.dv_padded + c] *= s.scale[i];
    if (p.grad_value.data)
      product(weights, int64_t(1), line, s.gradient.data(), p.dv_padded, s.grad_value.data(), p.dv_padded,
              keys, p.dv_padded, count, true);
    if (!p.logits_wanted) continue;
    panel_product(s.gradient.data(), p.dv_padded, s.value_panels.data(), p.dv, slopes, line, count, columns);
    for (int64_t i = 0; i < count; ++i) {
      const T* __restrict weight = weights + i * line;
      T* __restrict slope = slopes + i * line;
      const T mean = dot(weight, slope, columns) * s.scale[i];  // slopes have that factor already
      for (int64_t k = 0; k < columns; ++k) slope[k] = weight[k] * (slope[k] - mean);
      add_logit_gradients(p, group, b, m, slot, first + i, slope);
    }
    if (p.grad_key.data)
      product(slopes, int64_t(1), line, s.query.data(), p.d_padded, s.grad_key.data(), p.d_padded, keys,
              p.d_padded, count, true);
    if (p.grad_query.data) {
      row_product(slopes, line, s.key_rows.data(), p.d_padded, s.mixed.data(), count, keys);
      scatter(p.grad_query, b, m, int64_t(0), first, count, p.d, p.d_padded, &one, int64_t(0),
              s.mixed.data());
    }
  }
  if (p.grad_key.data)
    scatter(p.grad_key, b, m, slot, int64_t(0), p.S, p.d, p.d_padded, &one, int64_t(0), s.grad_key.data());
  if (p.grad_value.data)
    scatter(p.grad_value, b, m, slot, int64_t(0), p.S, p.dv, p.dv_padded, &one, int64_t(0),
            s.grad_value.data());
}

// A task is one head and slot of a group; it processes the group's batch entries in order.
template <typename T>
void backward_tasks(const Problem<T>& p, int64_t begin, int64_t end) {
  Scratch<T> s(p, true);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t slot = task % p.slots, m = task / p.slots % p.M, group = task / p.slots / p.M;
    for (int64_t b = group * p.B / p.groups; b < (group + 1) * p.B / p.groups; ++b)
      backward_head(p, s, group, b, m, slot);
  }
}

void forward_range(const Problem<float>& p, int64_t begin, int64_t end) {
  forward_tasks(p, begin, end);
}
void forward_range(const Problem<double>& p, int64_t begin, int64_t end) {
  forward_tasks(p, begin, end);
}
void backward_range(const Problem<float>& p, int64_t begin, int64_t end) {
  backward_tasks(p, begin, end);
}
void backward_range(const Problem<double>& p, int64_t begin, int64_t end) {
  backward_tasks(p, begin, end);
}
