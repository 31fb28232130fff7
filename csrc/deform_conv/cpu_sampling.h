// CPU kernels of deformable convolution: bilinear samples into columns, and back, for ranges of output
// pixels. Arithmetic is in T; operands and columns are of E, which is T or bfloat16. Vectors run over a
// pixel's channels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/bfloat16.h"
#include "common/simd.h"
#include "deform_conv.h"

namespace attn_plugins {
namespace {

using Geometry = DeformConvGeometry;

// One bilinear sample: the offsets, in elements, of its four pixels in an image (H, W, C), -1 if outside, and
// their weights, which derive from the fractions dy and dx.
template <class T>
struct Sample {
  int64_t corner[4];
  T weight[4];
  T dy, dx, mask;
};

template <class E>
struct Taps {
  const E* offset;
  const E* mask;  // nullptr: every mask is 1
  TapStrides offset_strides, mask_strides;
};

template <class T, class E>
ATTN_INLINE Sample<T> locate(const Geometry& g, const Taps<E>& taps, int64_t n, int64_t oy, int64_t ox,
                             int64_t d, int64_t ky, int64_t kx) {
  const int64_t tap = (d * g.Kh + ky) * g.Kw + kx;
  const TapStrides& so = taps.offset_strides;
  const E* offset = taps.offset + n * so.n + 2 * tap * so.channel + oy * so.y + ox * so.x;
  const T y = T(oy * g.stride_h - g.pad_h + ky * g.dilation_h) + T(offset[0]);
  const T x = T(ox * g.stride_w - g.pad_w + kx * g.dilation_w) + T(offset[so.channel]);
  Sample<T> s;
  s.mask = 1;
  if (taps.mask) {
    const TapStrides& sm = taps.mask_strides;
    s.mask = T(taps.mask[n * sm.n + tap * sm.channel + oy * sm.y + ox * sm.x]);
  }
  // The negated comparison also holds for NaN: values outside must not be converted to an integer. As in
  // torchvision, a position beyond the map reads 0, any other NaN, and infinite positions have NaN fractions.
  if (!(y >= T(-1) && y < T(g.H) && x >= T(-1) && x < T(g.W))) {
    s.dy = y - y, s.dx = x - x;
    const bool beyond = y < T(-1) || y >= T(g.H) || x < T(-1) || x >= T(g.W);
    for (int i = 0; i < 4; ++i) s.corner[i] = -1, s.weight[i] = beyond ? T(0) : s.dy + s.dx;
    return s;
  }
  const T fy = std::floor(y), fx = std::floor(x);
  const int64_t y0 = int64_t(fy), x0 = int64_t(fx);
  s.dy = y - fy;
  s.dx = x - fx;
  const bool top = y0 >= 0, bottom = y0 + 1 < g.H, left = x0 >= 0, right = x0 + 1 < g.W;
  const int64_t base = (y0 * g.W + x0) * g.C;
  s.corner[0] = top && left ? base : -1;
  s.corner[1] = top && right ? base + g.C : -1;
  s.corner[2] = bottom && left ? base + g.W * g.C : -1;
  s.corner[3] = bottom && right ? base + (g.W + 1) * g.C : -1;
  s.weight[0] = (1 - s.dy) * (1 - s.dx);
  s.weight[1] = (1 - s.dy) * s.dx;
  s.weight[2] = s.dy * (1 - s.dx);
  s.weight[3] = s.dy * s.dx;
  return s;
}

// A sample outside the map is NaN instead if its position is NaN or its mask is not finite.
template <class T>
ATTN_INLINE bool is_zero(const Sample<T>& s) {
  return s.corner[0] < 0 && s.corner[1] < 0 && s.corner[2] < 0 && s.corner[3] < 0 &&
         s.weight[0] * s.mask == 0;
}

// Calls body(n, pixel index within the block, oy, ox) for pixels [begin, end) of the block that starts at
// `start`.
template <class Body>
ATTN_INLINE void for_pixels(const Geometry& g, int64_t start, int64_t begin, int64_t end, const Body& body) {
  int64_t ox = (start + begin) % g.Wo, oy = (start + begin) / g.Wo % g.Ho,
          n = (start + begin) / (g.Wo * g.Ho);
  for (int64_t p = begin; p < end; ++p) {
    body(n, p, oy, ox);
    if (++ox == g.Wo) {
      ox = 0;
      if (++oy == g.Ho) oy = 0, ++n;
    }
  }
}

// Calls body(first channel, count, offset into the columns) for each run of channels in [begin, end) that is
// contiguous in columns (G, length, K, Cg) at pixel p and tap k.
template <class Body>
ATTN_INLINE void for_runs(const Geometry& g, int64_t length, int64_t p, int64_t k, int64_t begin, int64_t end,
                          const Body& body) {
  const int64_t width = g.channels_per_group(), taps = g.taps();
  for (int64_t c = begin; c < end;) {
    const int64_t group = c / width, stop = std::min(end, (group + 1) * width);
    body(c, stop - c, ((group * length + p) * taps + k) * width + c - group * width);
    c = stop;
  }
}

// Operands of a block. zero_row stands in for pixels outside the map, which keeps branches out of inner
// loops.
template <class T, class E>
struct Block {
  Geometry g;
  Taps<E> taps;
  const E* input;
  const E* zero_row;
  int64_t start, length;

  ATTN_INLINE const E* pixel(const Sample<T>& s, int i, int64_t n, int64_t c) const {
    return s.corner[i] < 0 ? zero_row : input + n * g.H * g.W * g.C + s.corner[i] + c;
  }
};

template <class T, class E>
ATTN_INLINE void blend(E* __restrict out, const E* __restrict a, const E* __restrict b, const E* __restrict c,
                       const E* __restrict d, const T* w, T mask, int64_t count) {
  const T wa = w[0] * mask, wb = w[1] * mask, wc = w[2] * mask, wd = w[3] * mask;
  for (int64_t i = 0; i < count; ++i) out[i] = E(wa * T(a[i]) + wb * T(b[i]) + wc * T(c[i]) + wd * T(d[i]));
}

template <class T, class E>
ATTN_INLINE void sample_range(const Block<T, E>& b, E* columns, int64_t begin, int64_t end) {
  const Geometry& g = b.g;
  const int64_t per_offset_group = g.channels_per_offset_group();
  for_pixels(g, b.start, begin, end, [&](int64_t n, int64_t p, int64_t oy, int64_t ox) {
    for (int64_t k = 0; k < g.taps(); ++k) {
      for (int64_t d = 0; d < g.offset_groups; ++d) {
        const Sample<T> s = locate<T>(g, b.taps, n, oy, ox, d, k / g.Kw, k % g.Kw);
        for_runs(g, b.length, p, k, d * per_offset_group, (d + 1) * per_offset_group,
                 [&](int64_t c, int64_t count, int64_t at) {
                   if (is_zero(s)) {
                     std::memset(columns + at, 0, count * sizeof(E));
                   } else {
                     blend(columns + at, b.pixel(s, 0, n, c), b.pixel(s, 1, n, c), b.pixel(s, 2, n, c),
                           b.pixel(s, 3, n, c), s.weight, s.mask, count);
                   }
                 });
      }
    }
  });
}

// sums[i] += <grad, corner i>. Unless `column` is null, also writes the sample to it.
template <class T, class E>
ATTN_INLINE void corner_products(T* sums, E* __restrict column, const E* __restrict grad,
                                 const E* __restrict a, const E* __restrict b, const E* __restrict c,
                                 const E* __restrict d, const T* w, T mask, int64_t count) {
  constexpr int64_t lanes = 64 / sizeof(T);
  T pa[lanes] = {}, pb[lanes] = {}, pc[lanes] = {}, pd[lanes] = {};
  const int64_t whole = count / lanes * lanes;
  for (int64_t i = 0; i < whole; i += lanes) {
    for (int64_t j = 0; j < lanes; ++j) {
      pa[j] += T(grad[i + j]) * T(a[i + j]);
      pb[j] += T(grad[i + j]) * T(b[i + j]);
      pc[j] += T(grad[i + j]) * T(c[i + j]);
      pd[j] += T(grad[i + j]) * T(d[i + j]);
    }
  }
  for (int64_t i = whole; i < count; ++i) {
    pa[i - whole] += T(grad[i]) * T(a[i]);
    pb[i - whole] += T(grad[i]) * T(b[i]);
    pc[i - whole] += T(grad[i]) * T(c[i]);
    pd[i - whole] += T(grad[i]) * T(d[i]);
  }
  for (int64_t j = 0; j < lanes; ++j) sums[0] += pa[j], sums[1] += pb[j], sums[2] += pc[j], sums[3] += pd[j];
  if (column) blend(column, a, b, c, d, w, mask, count);
}

template <class E>
struct TapGradients {
  E* offset;
  E* mask;
  TapStrides offset_strides, mask_strides;
};

// Locates every sample of pixels [begin, end) for the scatter that follows, and writes the columns and the
// offset and mask gradients if they are needed. These gradients are combinations of the four
// s_i = <grad column, corner i>.
template <class T, class E>
ATTN_INLINE void tap_gradients_range(const Block<T, E>& b, const E* grad_columns, E* columns,
                                     const TapGradients<E>& grads, Sample<T>* samples, int64_t begin,
                                     int64_t end) {
  const Geometry& g = b.g;
  const int64_t per_offset_group = g.channels_per_offset_group();
  for_pixels(g, b.start, begin, end, [&](int64_t n, int64_t p, int64_t oy, int64_t ox) {
    for (int64_t k = 0; k < g.taps(); ++k) {
      for (int64_t d = 0; d < g.offset_groups; ++d) {
        const Sample<T> s = locate<T>(g, b.taps, n, oy, ox, d, k / g.Kw, k % g.Kw);
        if (samples) samples[(p * g.taps() + k) * g.offset_groups + d] = s;
        T sums[4] = {};
        if (columns || grads.offset) {
          for_runs(g, b.length, p, k, d * per_offset_group, (d + 1) * per_offset_group,
                   [&](int64_t c, int64_t count, int64_t at) {
                     E* column = columns ? columns + at : nullptr;
                     if (is_zero(s)) {
                       if (column) std::memset(column, 0, count * sizeof(E));
                     } else if (grads.offset) {
                       corner_products(sums, column, grad_columns + at, b.pixel(s, 0, n, c),
                                       b.pixel(s, 1, n, c), b.pixel(s, 2, n, c), b.pixel(s, 3, n, c),
                                       s.weight, s.mask, count);
                     } else {
                       blend(column, b.pixel(s, 0, n, c), b.pixel(s, 1, n, c), b.pixel(s, 2, n, c),
                             b.pixel(s, 3, n, c), s.weight, s.mask, count);
                     }
                   });
        }
        if (!grads.offset) continue;
        const int64_t tap = d * g.taps() + k;
        const TapStrides& so = grads.offset_strides;
        E* out = grads.offset + n * so.n + 2 * tap * so.channel + oy * so.y + ox * so.x;
        out[0] = E(s.mask * ((1 - s.dx) * (sums[2] - sums[0]) + s.dx * (sums[3] - sums[1])));
        out[so.channel] = E(s.mask * ((1 - s.dy) * (sums[1] - sums[0]) + s.dy * (sums[3] - sums[2])));
        if (grads.mask) {
          const TapStrides& sm = grads.mask_strides;
          grads.mask[n * sm.n + tap * sm.channel + oy * sm.y + ox * sm.x] = E(
              s.weight[0] * sums[0] + s.weight[1] * sums[1] + s.weight[2] * sums[2] + s.weight[3] * sums[3]);
        }
      }
    }
  });
}

template <class S, class E, class T>
ATTN_INLINE void accumulate(S* __restrict out, const E* __restrict grad, T weight, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = S(T(out[i]) + weight * T(grad[i]));
}

// Adds the gradients of pixels [begin, end) of one image to channels [first, last) of its input gradient.
template <class T, class E>
ATTN_INLINE void scatter_range(const Block<T, E>& b, const E* grad_columns, const Sample<T>* samples,
                               T* grad_image, int64_t begin, int64_t end, int64_t first, int64_t last) {
  const Geometry& g = b.g;
  const int64_t per_offset_group = g.channels_per_offset_group();
  for (int64_t p = begin; p < end; ++p) {
    for (int64_t k = 0; k < g.taps(); ++k) {
      for (int64_t d = first / per_offset_group; d * per_offset_group < last; ++d) {
        const Sample<T>& s = samples[(p * g.taps() + k) * g.offset_groups + d];
        if (is_zero(s)) continue;
        for_runs(g, b.length, p, k, std::max(first, d * per_offset_group),
                 std::min(last, (d + 1) * per_offset_group), [&](int64_t c, int64_t count, int64_t at) {
                   for (int i = 0; i < 4; ++i) {
                     if (s.corner[i] < 0) continue;
                     accumulate(grad_image + s.corner[i] + c, grad_columns + at, s.weight[i] * s.mask, count);
                   }
                 });
      }
    }
  }
}

// Functions that are compiled once per instruction set; target_clones does not apply to templates.
#define ATTN_DEFORM_KERNELS(T, E)                                                                         \
  ATTN_TARGETS void sample(const Block<T, E>& b, E* columns, int64_t begin, int64_t end) {                \
    sample_range(b, columns, begin, end);                                                                 \
  }                                                                                                       \
  ATTN_TARGETS void tap_gradients(const Block<T, E>& b, const E* grad_columns, E* columns,                \
                                  const TapGradients<E>& grads, Sample<T>* samples, int64_t begin,        \
                                  int64_t end) {                                                          \
    tap_gradients_range(b, grad_columns, columns, grads, samples, begin, end);                            \
  }                                                                                                       \
  ATTN_TARGETS void scatter(const Block<T, E>& b, const E* grad_columns, const Sample<T>* samples,        \
                            T* grad_image, int64_t begin, int64_t end, int64_t first, int64_t last) {     \
    scatter_range(b, grad_columns, samples, grad_image, begin, end, first, last);                         \
  }                                                                                                       \
  ATTN_TARGETS void add_row(E* __restrict rows, const E* __restrict bias, int64_t count, int64_t width) { \
    for (int64_t i = 0; i < count; ++i) accumulate(rows + i * width, bias, T(1), width);                  \
  }
ATTN_DEFORM_KERNELS(float, float)
ATTN_DEFORM_KERNELS(float, BFloat16)
ATTN_DEFORM_KERNELS(double, double)
#undef ATTN_DEFORM_KERNELS

}  // namespace
}  // namespace attn_plugins
