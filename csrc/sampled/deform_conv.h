// What the CPU and the CUDA deformable convolution share: the geometry, and the drivers that cut the work
// into blocks of output pixels whose columns stay in cache, sample them with a kernel, and leave the rest to
// GEMM.
//
// Shapes: N batch, C channels, H x W input, Ho x Wo output, K = Kh * Kw taps, G groups (blocks of Cg = C / G
// channels that share weights), D offset groups (blocks of Cd = C / D channels that share offsets).
// Everything here is channels-last: an input pixel's channels are contiguous, so is a column's
// (tap, channel).
#pragma once

#include <algorithm>
#include <optional>
#include <tuple>

#include "common/tensor_ops.h"

namespace attn_plugins {

struct DeformConvGeometry {
  int64_t N, C, H, W, Ho, Wo, Kh, Kw, out_channels, groups, offset_groups;
  int64_t stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;

  int64_t taps() const { return Kh * Kw; }
  int64_t pixels() const { return N * Ho * Wo; }
  int64_t channels_per_group() const { return C / groups; }
  int64_t channels_per_offset_group() const { return C / offset_groups; }
};

// Strides, in elements, of a tensor (N, D * taps * components, Ho, Wo): offsets (2 components) or masks (1).
struct TapStrides {
  int64_t n, channel, y, x;
};

inline TapStrides tap_strides(const Tensor& t) {
  return {t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
}

inline DeformConvGeometry deform_conv_geometry(const Tensor& input, const Tensor& offset,
                                               const Tensor& weight, const std::vector<int64_t>& stride,
                                               const std::vector<int64_t>& padding,
                                               const std::vector<int64_t>& dilation, int64_t groups,
                                               int64_t offset_groups) {
  return {input.size(0),  input.size(1),  input.size(2),  input.size(3), offset.size(2), offset.size(3),
          weight.size(2), weight.size(3), weight.size(0), groups,        offset_groups,  stride[0],
          stride[1],      padding[0],     padding[1],     dilation[0],   dilation[1]};
}

// (N, C, H, W) of any strides -> (N, H, W, C), contiguous; no copy where the input is channels-last.
inline Tensor to_channels_last(const Tensor& t) {
  return contiguous(permuted(t, {0, 2, 3, 1}));
}

// The rule of plugins/ops/sampled/deform_conv.py's fake functions: a result is channels-last where its
// source is.
inline bool is_channels_last(const Tensor& t) {
  if (t.is_contiguous()) return false;
  int64_t expected = 1;
  for (int64_t dim : {1, 3, 2, 0}) {
    if (t.size(dim) != 1 && t.stride(dim) != expected) return false;
    expected *= t.size(dim);
  }
  return true;
}

// An uninitialised (N, channels, height, width) of like_type's dtype, channels-last or not.
inline Tensor empty_images(const Tensor& like_type, bool channels_last, int64_t N, int64_t channels,
                           int64_t height, int64_t width) {
  return channels_last ? permuted(empty_like_options(like_type, {N, height, width, channels}), {0, 3, 1, 2})
                       : empty_like_options(like_type, {N, channels, height, width});
}

// Images [start, start + count) of t; undefined where t is.
inline Tensor images(const Tensor& t, int64_t start, int64_t count) {
  return t.defined() && t.size(0) != count ? narrowed(t, 0, start, count) : t;
}

// (out_channels, Cg, Kh, Kw) -> (G, out_channels / G, K * Cg).
inline Tensor pack_weight(const Tensor& weight, const DeformConvGeometry& g) {
  return reshaped(permuted(weight, {0, 2, 3, 1}),
                  {g.groups, g.out_channels / g.groups, g.taps() * g.channels_per_group()});
}

// A chunk's rows [start, start + length) of (pixels, out_channels) as (G, length, out_channels / G).
inline Tensor group_rows(const Tensor& rows, int64_t start, int64_t length, const DeformConvGeometry& g) {
  return permuted(reshaped(narrowed(rows, 0, start, length), {length, g.groups, g.out_channels / g.groups}),
                  {1, 0, 2});
}

inline Tensor first(const Tensor& t) {
  return torch::stable::select(t, 0, 0);
}

// Rows of a block whose columns take about `block_bytes`.
inline int64_t pixels_of_bytes(const DeformConvGeometry& g, int64_t element_bytes, int64_t block_bytes) {
  const int64_t row = std::max<int64_t>(1, g.taps() * g.C * element_bytes);
  return std::clamp<int64_t>(block_bytes / row, 64, std::max<int64_t>(64, g.pixels()));
}

// The work is cut twice: into chunks of images, whose channels-last copies need not all exist at once, and
// those into blocks of output pixels, whose columns stay in cache.
//
// Kernels:
//   static int64_t images_per_chunk(g, element_bytes)
//   static int64_t block_pixels(g, element_bytes)  of a chunk's geometry g
//   static constexpr bool columns_replace_gradients   sample_backward may write columns over grad_columns
//   static Tensor channels_last(t)         (N, C, H, W) of any strides -> (N, H, W, C), contiguous
//   static void channels_first(t, out)     (N, H, W, C), contiguous, -> out (N, C, H, W), contiguous,
//                                          any dtype
//   static void sample(g, input, offset, mask, columns, start, length)
//       columns (G, length, K, Cg) = bilinear samples times mask of output pixels [start, start + length).
//   static void sample_backward(g, input, offset, mask, grad_columns, columns, grad_input, grad_offset,
//                               grad_mask, start, length)
//       columns as above where it is defined; grad_input (N, H, W, C), of dtype accumulate_type, += ;
//       grad_offset, grad_mask = ; what is not needed is undefined (a default-constructed Tensor).
//   static void add_bias(rows, bias)       rows (length, out_channels) += bias
//   static void accumulate(sum, part)      sum += part, in accumulate_type; an undefined sum is 0
//   static ScalarType accumulate_type(t)   what gradients of input and weight are summed in
//   static ScalarType compute_type(t)      what t is computed in

// One chunk: rows (pixels, out_channels) = the convolution of input (N, C, H, W);
// weight (G, K * Cg, out / G).
template <class Kernels>
void deform_conv2d_rows(const DeformConvGeometry& g, const Tensor& input_, const Tensor& offset,
                        const Tensor& mask, const Tensor& weight, const Tensor& bias, const Tensor& output) {
  const Tensor input = Kernels::channels_last(input_);
  const int64_t block = Kernels::block_pixels(g, input.element_size());
  const int64_t width = g.taps() * g.channels_per_group();
  Tensor columns = empty_like_options(input, {g.groups, std::min(block, g.pixels()), width});
  for (int64_t start = 0; start < g.pixels(); start += block) {
    const int64_t length = std::min(block, g.pixels() - start);
    if (length < columns.size(1)) columns = empty_like_options(input, {g.groups, length, width});
    Kernels::sample(g, input, offset, mask, columns, start, length);
    const Tensor rows = narrowed(output, 0, start, length);
    if (g.groups == 1) {
      mm_out(rows, first(columns), first(weight));
    } else {
      Tensor groups_of_rows = group_rows(output, start, length, g);
      torch::stable::copy_(groups_of_rows, torch::stable::matmul(columns, weight));
    }
    if (bias.defined()) Kernels::add_bias(rows, bias);
  }
}

template <class Kernels>
Tensor deform_conv2d_driver(const Tensor& input_, const Tensor& offset_, const Tensor& weight_,
                            std::optional<Tensor> bias_, std::optional<Tensor> mask_,
                            std::vector<int64_t> stride, std::vector<int64_t> padding,
                            std::vector<int64_t> dilation, int64_t groups, int64_t offset_groups) {
  const DeformConvGeometry g =
      deform_conv_geometry(input_, offset_, weight_, stride, padding, dilation, groups, offset_groups);
  const ScalarType type = Kernels::compute_type(input_);
  const Tensor input = to_dtype(input_, type);
  const Tensor offset = to_dtype(offset_, type);
  const Tensor mask = mask_ ? to_dtype(*mask_, type) : Tensor();
  const Tensor bias = bias_ ? to_dtype(*bias_, type) : Tensor();
  const Tensor weight = transpose(pack_weight(to_dtype(weight_, type), g), 1, 2);

  const bool channels_last = is_channels_last(input_);
  const Tensor result = empty_images(input, channels_last, g.N, g.out_channels, g.Ho, g.Wo);
  const int64_t chunk = Kernels::images_per_chunk(g, input.element_size());
  for (int64_t n = 0; n < g.N; n += chunk) {
    DeformConvGeometry part = g;
    part.N = std::min(chunk, g.N - n);
    const Tensor out = images(result, n, part.N);
    const Tensor rows = channels_last ? permuted(out, {0, 2, 3, 1})
                                      : empty_like_options(input, {part.N, g.Ho, g.Wo, g.out_channels});
    deform_conv2d_rows<Kernels>(part, images(input, n, part.N), images(offset, n, part.N),
                                images(mask, n, part.N), weight, bias,
                                reshaped(rows, {part.pixels(), g.out_channels}));
    if (!channels_last) Kernels::channels_first(rows, out);
  }
  return to_dtype(result, input_.scalar_type());
}

// What a chunk of the backward pass reads, and where its gradients go (undefined where not needed).
struct __attribute__((visibility("hidden"))) DeformConvBackward {
  Tensor grad_output, input, offset, mask;  // (N, channels, height, width)
  Tensor grad_input;                        // (N, H, W, C), of dtype accumulate_type, +=
  Tensor grad_offset, grad_mask;            // =
};

// One chunk; weight (G, out / G, K * Cg). Adds to grad_weight, of weight's shape and dtype accumulate_type.
template <class Kernels>
void deform_conv2d_backward_rows(const DeformConvGeometry& g, const DeformConvBackward& c,
                                 const Tensor& weight, bool needs_weight, Tensor& grad_weight) {
  const Tensor input = Kernels::channels_last(c.input);
  const Tensor grad_output = reshaped(Kernels::channels_last(c.grad_output), {g.pixels(), g.out_channels});
  const int64_t block = Kernels::block_pixels(g, input.element_size());
  const int64_t width = g.taps() * g.channels_per_group();
  for (int64_t start = 0; start < g.pixels(); start += block) {
    const int64_t length = std::min(block, g.pixels() - start);
    const Tensor grad_rows = group_rows(grad_output, start, length, g);  // (G, length, out / G)
    const bool needs_columns = c.grad_input.defined() || c.grad_offset.defined();
    Tensor grad_columns, columns;
    if (needs_columns) {
      grad_columns = empty_like_options(input, {g.groups, length, width});
      if (g.groups == 1) {
        mm_out(first(grad_columns), first(grad_rows), first(weight));
      } else {
        bmm_out(grad_columns, grad_rows, weight);
      }
    }
    if (needs_weight) {
      const bool replace = Kernels::columns_replace_gradients && needs_columns;
      columns = replace ? grad_columns : empty_like_options(input, {g.groups, length, width});
    }
    if (needs_columns) {
      Kernels::sample_backward(g, input, c.offset, c.mask, grad_columns, columns, c.grad_input, c.grad_offset,
                               c.grad_mask, start, length);
    } else if (needs_weight) {
      Kernels::sample(g, input, c.offset, c.mask, columns, start, length);
    }
    if (needs_weight)
      Kernels::accumulate(grad_weight, torch::stable::matmul(transpose(grad_rows, 1, 2), columns));
  }
}

template <class Kernels>
std::tuple<Tensor, Tensor, Tensor, Tensor> deform_conv2d_backward_driver(
    const Tensor& grad_output_, const Tensor& input_, const Tensor& offset_, const Tensor& weight_,
    std::optional<Tensor> mask_, std::vector<int64_t> stride, std::vector<int64_t> padding,
    std::vector<int64_t> dilation, int64_t groups, int64_t offset_groups, bool needs_input, bool needs_offset,
    bool needs_weight) {
  const DeformConvGeometry g =
      deform_conv_geometry(input_, offset_, weight_, stride, padding, dilation, groups, offset_groups);
  const ScalarType type = Kernels::compute_type(input_);
  const Tensor input = to_dtype(input_, type);
  const Tensor offset = to_dtype(offset_, type);
  const Tensor mask = mask_ ? to_dtype(*mask_, type) : Tensor();
  const Tensor grad_output = to_dtype(grad_output_, type);
  const Tensor weight = pack_weight(to_dtype(weight_, type), g);  // (G, out / G, K * Cg)
  const ScalarType sum_type = Kernels::accumulate_type(input);

  Tensor grad_input, grad_weight, grad_offset, grad_mask;
  const bool channels_last = is_channels_last(input_);
  const bool in_place = channels_last && sum_type == type;  // sums need no array of their own
  if (needs_input) grad_input = empty_images(input, channels_last, g.N, g.C, g.H, g.W);
  if (needs_offset) {
    grad_offset = torch::stable::empty_like(offset);
    if (mask_) grad_mask = torch::stable::empty_like(mask);
  }

  const int64_t chunk = Kernels::images_per_chunk(g, input.element_size());
  for (int64_t n = 0; n < g.N; n += chunk) {
    DeformConvGeometry part = g;
    part.N = std::min(chunk, g.N - n);
    DeformConvBackward c{images(grad_output, n, part.N),
                         images(input, n, part.N),
                         images(offset, n, part.N),
                         images(mask, n, part.N),
                         Tensor(),
                         images(grad_offset, n, part.N),
                         images(grad_mask, n, part.N)};
    Tensor out = images(grad_input, n, part.N);
    if (in_place && needs_input) {
      c.grad_input = permuted(out, {0, 2, 3, 1});
      torch::stable::zero_(c.grad_input);
    } else if (needs_input) {
      c.grad_input = torch::stable::new_zeros(input, std::vector<int64_t>{part.N, g.H, g.W, g.C}, sum_type);
    }
    deform_conv2d_backward_rows<Kernels>(part, c, weight, needs_weight, grad_weight);
    if (!needs_input || in_place) continue;
    if (channels_last) {
      torch::stable::copy_(out, permuted(c.grad_input, {0, 3, 1, 2}));
    } else {
      Kernels::channels_first(c.grad_input, out);
    }
  }

  const ScalarType out = input_.scalar_type();
  const auto none = [&] { return empty_like_options(input_, {0}); };  // no two results may share memory
  if (needs_weight) {
    if (!grad_weight.defined()) {
      grad_weight = zeros_like_options(
          weight, {g.groups, g.out_channels / g.groups, g.taps() * g.channels_per_group()});
    }
    grad_weight = contiguous(
        permuted(reshaped(grad_weight, {g.out_channels, g.Kh, g.Kw, g.channels_per_group()}), {0, 3, 1, 2}));
  }
  return {needs_input ? to_dtype(grad_input, out) : none(),
          needs_offset ? to_dtype(grad_offset, out) : none(),
          needs_weight ? to_dtype(grad_weight, out) : none(),
          needs_offset && mask_ ? to_dtype(grad_mask, out) : none()};
}

}  // namespace attn_plugins
