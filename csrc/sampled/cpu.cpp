// CPU kernels of deformable convolution: arithmetic in T, operands and columns of E, which is T or bfloat16;
// vectors run over a pixel's channels, threads over output pixels
// (and, where input gradients are summed, over images and slices of channels: no atomics, so the result does
// not depend on the number of threads).
#include <cmath>
#include <cstring>

#include "common/bfloat16.h"
#include "common/simd.h"
#include "common/transpose.h"
#include "deform_conv.h"

namespace attn_plugins {
namespace {

using Geometry = DeformConvGeometry;

// One bilinear sample: where its four pixels lie in an image (H, W, C), in elements and -1 where outside, and
// what each weighs; dy and dx are the fractions that the weights come from.
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
  // Written so that a NaN, too, is outside; nothing outside is ever converted to an integer.
  if (!(y >= T(-1) && y < T(g.H) && x >= T(-1) && x < T(g.W))) {
    for (int i = 0; i < 4; ++i) s.corner[i] = -1, s.weight[i] = 0;
    s.dy = s.dx = 0;
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

template <class T>
ATTN_INLINE bool is_outside(const Sample<T>& s) {
  return s.corner[0] < 0 && s.corner[1] < 0 && s.corner[2] < 0 && s.corner[3] < 0;
}

// Calls body(n, pixel index in the block, oy, ox) for pixels [begin, end) of the block that starts at
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

// Calls body(first channel, count, offset into the columns) for the runs of channels of [begin, end) that are
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

// A block's operands; zero_row stands in for pixels outside the map, so that inner loops have no branch.
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
                   if (is_outside(s)) {
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

// sums[i] += <grad, corner i>; and, where `column` is not null, the sample itself.
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

// Locates every sample of pixels [begin, end) for the scatter that follows; writes the columns and the offset
// and mask gradients where they are wanted. With s_i = <grad column, corner i>, every one of them is a
// combination of the four s_i.
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
                     if (is_outside(s)) {
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

// Adds the gradients of pixels [begin, end), all of one image, to channels [first, last) of the input
// gradient.
template <class T, class E>
ATTN_INLINE void scatter_range(const Block<T, E>& b, const E* grad_columns, const Sample<T>* samples,
                               T* grad_image, int64_t begin, int64_t end, int64_t first, int64_t last) {
  const Geometry& g = b.g;
  const int64_t per_offset_group = g.channels_per_offset_group();
  for (int64_t p = begin; p < end; ++p) {
    for (int64_t k = 0; k < g.taps(); ++k) {
      for (int64_t d = first / per_offset_group; d * per_offset_group < last; ++d) {
        const Sample<T>& s = samples[(p * g.taps() + k) * g.offset_groups + d];
        if (is_outside(s)) continue;
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

// The functions that are compiled once per instruction set (templates cannot be).
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

// What elements of E are computed in.
template <class E>
struct Computed {
  using type = float;
};
template <>
struct Computed<double> {
  using type = double;
};

// Calls body(E()) with the element type of `t`.
template <class Body>
void for_element(const Tensor& t, const Body& body) {
  switch (t.scalar_type()) {
    case ScalarType::Double:
      return body(double());
    case ScalarType::BFloat16:
      return body(BFloat16());
    default:
      return body(float());
  }
}

template <class T>
T* data(const Tensor& t) {
  return t.defined() ? static_cast<T*>(t.data_ptr()) : nullptr;
}

template <class E>
Block<typename Computed<E>::type, E> make_block(const Geometry& g, const Tensor& input, const Tensor& offset,
                                                const Tensor& mask, const std::vector<E>& zero_row,
                                                int64_t start, int64_t length) {
  Taps<E> taps{data<E>(offset), data<E>(mask), tap_strides(offset), {}};
  if (mask.defined()) taps.mask_strides = tap_strides(mask);
  return {g, taps, data<E>(input), zero_row.data(), start, length};
}

constexpr int64_t kPixelsPerTask = 8;
constexpr int64_t kChannelsPerSlice = 16;  // one cache line of floats: no two threads write to one

template <class E>
void sample_backward_block(const Geometry& g, const Tensor& input, const Tensor& offset, const Tensor& mask,
                           const Tensor& grad_columns, const Tensor& columns, const Tensor& grad_input,
                           const Tensor& grad_offset, const Tensor& grad_mask, int64_t start,
                           int64_t length) {
  using T = typename Computed<E>::type;
  const std::vector<E> zero_row(g.C, E(T(0)));
  const Block<T, E> block = make_block<E>(g, input, offset, mask, zero_row, start, length);
  TapGradients<E> grads{data<E>(grad_offset), data<E>(grad_mask), {}, {}};
  if (grads.offset) grads.offset_strides = tap_strides(grad_offset);
  if (grads.mask) grads.mask_strides = tap_strides(grad_mask);
  std::vector<Sample<T>> samples(grad_input.defined() ? length * g.taps() * g.offset_groups : 0);

  torch::stable::parallel_for(0, length, kPixelsPerTask, [&](int64_t begin, int64_t end) {
    tap_gradients(block, data<E>(grad_columns), data<E>(columns), grads,
                  samples.empty() ? nullptr : samples.data(), begin, end);
  });
  if (!grad_input.defined()) return;

  const int64_t image = g.Ho * g.Wo, first_image = start / image, last_image = (start + length - 1) / image;
  const int64_t slices = std::clamp<int64_t>(torch::stable::get_num_threads(), 1,
                                             (g.C + kChannelsPerSlice - 1) / kChannelsPerSlice);
  const int64_t slice = (g.C + slices - 1) / slices;
  const int64_t width = (slice + kChannelsPerSlice - 1) / kChannelsPerSlice * kChannelsPerSlice;
  const int64_t tasks = (last_image - first_image + 1) * slices;
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t n = first_image + task / slices, first = task % slices * width;
      const int64_t from = std::max(n * image, start) - start;
      const int64_t to = std::min((n + 1) * image, start + length) - start;
      const int64_t last = std::min(first + width, g.C);
      if (first >= last) continue;
      scatter(block, data<E>(grad_columns), samples.data(), data<T>(grad_input) + n * g.H * g.W * g.C, from,
              to, first, last);
    }
  });
}

// Whether products of bfloat16 are faster than those of float here: by instructions of their own.
bool multiplies_bfloat16() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool found = [] {
    __builtin_cpu_init();
    return bool(__builtin_cpu_supports("avx512bf16"));
  }();
  return found;
#else
  return false;
#endif
}

struct CpuKernels {
  // A block's columns: few blocks, for all threads meet after each, yet a small part of a whole batch's.
  static constexpr int64_t kBlockBytes = 12 << 20;

  // The blocks of a chunk, of equal size.
  static int64_t block_pixels(const Geometry& g, int64_t element_bytes) {
    const int64_t most = pixels_of_bytes(g, element_bytes, kBlockBytes);
    const int64_t blocks = std::max<int64_t>(1, (g.pixels() + most - 1) / most);
    return std::max<int64_t>(1, (g.pixels() + blocks - 1) / blocks);
  }

  // Images of about two blocks: their channels-last copies stay small as well.
  static int64_t images_per_chunk(const Geometry& g, int64_t element_bytes) {
    const int64_t pixels = 2 * pixels_of_bytes(g, element_bytes, kBlockBytes);
    return std::clamp<int64_t>(pixels / std::max<int64_t>(1, g.Ho * g.Wo), 1, std::max<int64_t>(1, g.N));
  }
  static constexpr bool columns_replace_gradients = false;

  static ScalarType compute_type(const Tensor& t) {
    const ScalarType type = t.scalar_type();
    const bool as_it_is =
        type == ScalarType::Double || (type == ScalarType::BFloat16 && multiplies_bfloat16());
    return as_it_is ? type : ScalarType::Float;
  }
  static ScalarType accumulate_type(const Tensor& t) {
    return t.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  }

  static void sample(const Geometry& g, const Tensor& input, const Tensor& offset, const Tensor& mask,
                     const Tensor& columns, int64_t start, int64_t length) {
    for_element(input, [&](auto element) {
      using E = decltype(element);
      const std::vector<E> zero_row(g.C, E(typename Computed<E>::type(0)));
      const auto block = make_block<E>(g, input, offset, mask, zero_row, start, length);
      torch::stable::parallel_for(0, length, kPixelsPerTask, [&](int64_t begin, int64_t end) {
        attn_plugins::sample(block, data<E>(columns), begin, end);
      });
    });
  }

  static void sample_backward(const Geometry& g, const Tensor& input, const Tensor& offset,
                              const Tensor& mask, const Tensor& grad_columns, const Tensor& columns,
                              const Tensor& grad_input, const Tensor& grad_offset, const Tensor& grad_mask,
                              int64_t start, int64_t length) {
    for_element(input, [&](auto element) {
      sample_backward_block<decltype(element)>(g, input, offset, mask, grad_columns, columns, grad_input,
                                               grad_offset, grad_mask, start, length);
    });
  }

  static void accumulate(Tensor& sum, const Tensor& part) {
    sum = add(sum, to_dtype(part, accumulate_type(part)));
  }

  // Rows are written faster than planes, a whole vector of channels at a time.
  static bool writes_planes(const Geometry&, int64_t) { return false; }
  static int64_t images_per_copy(const Geometry& g, int64_t) { return g.N; }
  static void add_plane_bias(const Tensor&, const Tensor&) {}

  static Tensor channels_last(const Tensor& t) { return to_channels_last(t); }

  static void channels_first(const Tensor& t, const Tensor& out) {
    const int64_t images = t.size(0), pixels = t.size(1) * t.size(2), channels = t.size(3);
    for_element(t, [&](auto from) {
      for_element(out, [&](auto to) {
        transpose_images(data<decltype(to)>(out), data<decltype(from)>(t), images, pixels, channels);
      });
    });
  }

  static void add_bias(const Tensor& rows, const Tensor& bias) {
    const int64_t width = rows.size(1);
    const Tensor row = contiguous(bias);
    for_element(rows, [&](auto element) {
      using E = decltype(element);
      torch::stable::parallel_for(0, rows.size(0), 64, [&](int64_t begin, int64_t end) {
        add_row(data<E>(rows) + begin * width, data<E>(row), end - begin, width);
      });
    });
  }
};

}  // namespace
}  // namespace attn_plugins

STABLE_TORCH_LIBRARY_IMPL(attn_plugins, CPU, m) {
  using namespace attn_plugins;
  m.impl("deform_conv2d_forward_kernel", TORCH_BOX(&deform_conv2d_driver<CpuKernels>));
  m.impl("deform_conv2d_backward_kernel", TORCH_BOX(&deform_conv2d_backward_driver<CpuKernels>));
}
