// Shared by the CPU and CUDA deformable convolutions: the geometry, and the drivers, which cut the work into
// blocks of output pixels whose columns stay in cache, fill the columns with a sampling kernel, and leave the
// rest to GEMM.
//
// Shapes: N batch, C channels, H x W input, Ho x Wo output, K = Kh * Kw taps, G groups (blocks of Cg = C / G
// channels that share weights), D offset groups (blocks of Cd = C / D channels that share offsets).
// Everything here is channels-last: the channels of an input pixel are contiguous, and so are the
// (tap, channel) of a column.
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

// Strides, in elements, of offsets or masks (N, D * taps * components, Ho, Wo) with 2 or 1 components.
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

// (N, C, H, W) of any strides -> contiguous (N, H, W, C); no copy if the input is channels-last.
inline Tensor to_channels_last(const Tensor& t) {
  return as_contiguous(permuted(t, {0, 2, 3, 1}));
}

// (N, channels, height, width) -> its sums over all but the channels.
inline Tensor sum_of_pixels(const Tensor& t) {
  return call("aten::sum", "dim_IntList", t, std::optional<Sizes>({0, 2, 3}), false,
              std::optional<ScalarType>());
}

// An uninitialized (N, channels, height, width) tensor of like_type's dtype, channels-last or contiguous.
// Results are channels-last where their source is; the fake functions in
// plugins/ops/deform_conv/deform_conv.py follow the same rule.
inline Tensor empty_images(const Tensor& like_type, bool channels_last, int64_t N, int64_t channels,
                           int64_t height, int64_t width) {
  return channels_last ? permuted(empty_like_options(like_type, {N, height, width, channels}), {0, 3, 1, 2})
                       : empty_like_options(like_type, {N, channels, height, width});
}

// Images [start, start + count) of t; undefined if t is.
inline Tensor images(const Tensor& t, int64_t start, int64_t count) {
  return t.defined() && t.size(0) != count ? narrowed(t, 0, start, count) : t;
}

// Matrices of these sizes (groups, rows, columns) and strides in the memory of t from element `offset` on.
// One group is a matrix (rows, columns), so that products are plain matrix products.
inline Tensor matrices(const Tensor& t, const Sizes& sizes, const Sizes& strides, int64_t offset = 0) {
  return sizes[0] == 1 ? view_of(t, {sizes[1], sizes[2]}, {strides[1], strides[2]}, offset)
                       : view_of(t, sizes, strides, offset);
}

// The same of contiguous matrices.
inline Tensor matrices(const Tensor& t, const Sizes& sizes, int64_t offset = 0) {
  return matrices(t, sizes, contiguous_strides(sizes), offset);
}

// Matrices (G, length, out_channels / G): rows [start, start + length) of a chunk's (pixels, out_channels).
inline Tensor group_rows(const Tensor& rows, int64_t start, int64_t length, const DeformConvGeometry& g) {
  const int64_t width = g.out_channels / g.groups;
  return matrices(rows, {g.groups, length, width}, {width, g.out_channels, 1}, start * g.out_channels);
}

// The same pixels of one image's planes (1, out_channels, Ho, Wo), whose channels are not neighbors.
inline Tensor plane_rows(const Tensor& planes, int64_t start, int64_t length, const DeformConvGeometry& g) {
  const int64_t width = g.out_channels / g.groups, pixels = g.Ho * g.Wo;
  return matrices(planes, {g.groups, length, width}, {width * pixels, 1, pixels}, start);
}

// `count` times the matrix t (rows, columns).
inline Tensor repeated(const Tensor& t, int64_t count) {
  return view_of(t, {count, t.size(0), t.size(1)}, {0, t.stride(0), t.stride(1)});
}

// out = a @ b, for matrices or batches of one matrix per group.
template <class Kernels>
void product_out(const Tensor& out, const Tensor& a, const Tensor& b) {
  a.dim() == 2 ? Kernels::mm_out(out, a, b) : bmm_out(out, a, b);
}

// The columns of the current block, in memory that all blocks of a call share.
class __attribute__((visibility("hidden"))) Columns {
 public:
  // Returns uninitialized matrices (groups, length, width) of like's dtype, or (length, width) for one group.
  const Tensor& resize(const Tensor& like, int64_t groups, int64_t length, int64_t width) {
    if (view_.defined() && groups_ == groups && length_ == length) return view_;
    const int64_t count = groups * length * width;
    if (!memory_.defined() || memory_.size(0) < count) {
      memory_ = Tensor(), view_ = Tensor();  // free the old memory before allocating the new
      memory_ = empty_like_options(like, {count});
    }
    groups_ = groups, length_ = length;
    view_ = matrices(memory_, {groups, length, width});
    return view_;
  }

 private:
  Tensor memory_, view_;
  int64_t groups_ = 0, length_ = 0;
};

// The number of rows whose columns take about `block_bytes`.
inline int64_t pixels_of_bytes(const DeformConvGeometry& g, int64_t element_bytes, int64_t block_bytes) {
  const int64_t row = std::max<int64_t>(1, g.taps() * g.C * element_bytes);
  return std::clamp<int64_t>(block_bytes / row, 64, std::max<int64_t>(64, g.pixels()));
}

// The work is cut twice: into chunks of images, so that their channels-last copies need not all exist at
// once, and each chunk into blocks of output pixels, whose columns stay in cache.
//
// A `Kernels` class provides:
//   static void mm_out(out, a, b)                    out = a @ b, for matrices
//   static void linear_out(out, a, weight, bias)     out = a @ weight^T + bias, which may be undefined
//   static int64_t images_per_chunk(g, element_bytes)
//   static int64_t block_pixels(g, element_bytes)    for the geometry g of a chunk
//   static constexpr bool columns_replace_gradients
//       True if sample_backward may overwrite grad_columns with columns.
//   class Jobs                                       copies that may share a launch; run() completes them
//     Tensor channels_last(t)                        (N, C, H, W) of any strides -> contiguous (N, H, W, C)
//     void channels_first(t, out)
//       Contiguous (N, H, W, C) -> out (N, C, H, W), contiguous or channels-last, of t's or a narrower dtype.
//     void zero(t)                                   t = 0, contiguous or channels-last
//   static void sample(g, input, offset, mask, columns, start, length)
//       Writes bilinear samples times mask of output pixels [start, start + length) to columns
//       (G, length, K, Cg).
//   static void sample_backward(g, input, offset, mask, grad_columns, columns, grad_input, grad_offset,
//                               grad_mask, start, length)
//       Writes columns as above, adds to grad_input (N, H, W, C) of dtype accumulate_type, and overwrites
//       grad_offset and grad_mask. Results that are not needed are undefined (default-constructed) tensors.
//   static void add_bias(rows, bias)                 rows (length, out_channels) += bias
//   static bool writes_planes(g, element_bytes)
//       True if products are written directly to an image's (out_channels, Ho, Wo).
//   static bool reads_planes(g, element_bytes)
//       True if products read the gradient of one image's output as it is, with transposed matrices.
//   static int64_t images_per_copy(g, element_bytes) replaces images_per_chunk if writes_planes
//   static void add_plane_bias(planes, bias)         planes (N, out_channels, Ho, Wo) += bias
//   static void accumulate(sum, part)                sum += part, in accumulate_type
//   static ScalarType accumulate_type(t)             dtype of the sums of input and weight gradients
//   static ScalarType compute_type(t)                dtype of the computation on t

// (out_channels, Cg, Kh, Kw) -> matrices of (G, out_channels / G, K * Cg).
template <class Jobs>
Tensor pack_weight(Jobs& jobs, const Tensor& weight, const DeformConvGeometry& g) {
  return matrices(jobs.channels_last(weight),
                  {g.groups, g.out_channels / g.groups, g.taps() * g.channels_per_group()});
}

// The reverse, from contiguous matrices of any dtype.
template <class Jobs>
Tensor unpack_weight(Jobs& jobs, const Tensor& packed, const Tensor& like, const DeformConvGeometry& g) {
  const Tensor rows = reshaped(packed, {g.out_channels, g.Kh, g.Kw, g.channels_per_group()});
  const Tensor weight = empty_like_options(like, {g.out_channels, g.channels_per_group(), g.Kh, g.Kw});
  jobs.channels_first(rows, weight);
  return weight;
}

// Convolves one chunk, input (N, H, W, C), into output, whose memory is that of contiguous (N, Ho, Wo,
// out_channels). weight: matrices of (G, out / G, K * Cg).
template <class Kernels>
void deform_conv2d_rows(const DeformConvGeometry& g, const Tensor& input, const Tensor& offset,
                        const Tensor& mask, const Tensor& weight, const Tensor& bias, const Tensor& output,
                        Columns& memory) {
  const int64_t block = Kernels::block_pixels(g, input.element_size());
  const int64_t width = g.taps() * g.channels_per_group();
  for (int64_t start = 0; start < g.pixels(); start += block) {
    const int64_t length = std::min(block, g.pixels() - start);
    const Tensor& columns = memory.resize(input, g.groups, length, width);
    Kernels::sample(g, input, offset, mask, columns, start, length);
    const Tensor rows = group_rows(output, start, length, g);
    if (g.groups == 1) {
      Kernels::linear_out(rows, columns, weight, bias);
      continue;
    }
    copy_to(rows, torch::stable::matmul(columns, transposed(weight)));
    if (bias.defined()) {
      Kernels::add_bias(matrices(output, {1, length, g.out_channels}, start * g.out_channels), bias);
    }
  }
}

// Convolves one chunk directly into planes, contiguous output (N, out_channels, Ho, Wo), which saves the rows
// and their copy. A block covers part of one image or several whole images.
template <class Kernels>
void deform_conv2d_planes(const DeformConvGeometry& g, const Tensor& input, const Tensor& offset,
                          const Tensor& mask, const Tensor& weight, const Tensor& output, Columns& memory) {
  const int64_t bytes = input.element_size(), pixels = g.Ho * g.Wo;
  const int64_t width = g.taps() * g.channels_per_group();
  DeformConvGeometry one = g;
  one.N = 1;
  const int64_t most = g.groups == 1 ? Kernels::block_pixels(g, bytes) / std::max<int64_t>(1, pixels) : 1;
  const int64_t together = std::clamp<int64_t>(most, 1, std::max<int64_t>(1, g.N));
  const int64_t block = together > 1 ? pixels : Kernels::block_pixels(one, bytes);
  const auto weights = [&](int64_t count) { return count == 1 ? weight : repeated(weight, count); };
  const Tensor factors = weights(together);
  for (int64_t n = 0; n < g.N; n += together) {
    const int64_t count = std::min(together, g.N - n), matrix_count = count * g.groups;
    const Tensor image =
        matrices(output, {matrix_count, g.out_channels / g.groups, pixels}, n * g.out_channels * pixels);
    for (int64_t start = 0; start < pixels; start += block) {
      const int64_t length = std::min(block, pixels - start);
      const Tensor& columns = memory.resize(input, matrix_count, length, width);
      Kernels::sample(g, input, offset, mask, columns, n * pixels + start, count * length);
      const Tensor out = length == pixels ? image : narrowed(image, -1, start, length);
      product_out<Kernels>(out, count == together ? factors : weights(count), transposed(columns));
    }
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
  typename Kernels::Jobs jobs;
  const Tensor weight = pack_weight(jobs, to_dtype(weight_, type), g);

  const bool channels_last = is_channels_last(input_);
  const bool planes = !channels_last && Kernels::writes_planes(g, input.element_size());
  const Tensor result = empty_images(input, channels_last, g.N, g.out_channels, g.Ho, g.Wo);
  const int64_t chunk = planes ? Kernels::images_per_copy(g, input.element_size())
                               : Kernels::images_per_chunk(g, input.element_size());
  Columns columns;
  for (int64_t n = 0; n < g.N; n += chunk) {
    DeformConvGeometry part = g;
    part.N = std::min(chunk, g.N - n);
    const Tensor in = jobs.channels_last(images(input, n, part.N));
    jobs.run();
    const Tensor out = images(result, n, part.N);
    const Tensor shifts = images(offset, n, part.N), factors = images(mask, n, part.N);
    if (planes) {
      deform_conv2d_planes<Kernels>(part, in, shifts, factors, weight, out, columns);
      if (bias.defined()) Kernels::add_plane_bias(out, bias);
      continue;
    }
    const Tensor rows = channels_last ? out : empty_like_options(input, {part.N, g.Ho, g.Wo, g.out_channels});
    deform_conv2d_rows<Kernels>(part, in, shifts, factors, weight, bias, rows, columns);
    if (channels_last) continue;
    jobs.channels_first(rows, out);
    jobs.run();
  }
  return to_dtype(result, input_.scalar_type());
}

// Inputs of a chunk's backward pass, and its gradients, undefined if not needed.
struct __attribute__((visibility("hidden"))) DeformConvBackward {
  Tensor input, grad_output;      // (N, H, W, C); (N, Ho, Wo, out_channels), or one image's planes
  bool planes;                    // whether grad_output is (1, out_channels, Ho, Wo)
  Tensor offset, mask;            // (N, channels, Ho, Wo)
  Tensor grad_offset, grad_mask;  // overwritten
  Tensor grad_input;              // memory of (N, H, W, C), of dtype accumulate_type, accumulated
};

// Shared by the chunks of the backward pass: memory for columns and their gradients (grad_columns serves both
// if columns_replace_gradients), and the weight gradient, of dtype accumulate_type from the second block on,
// beside one block's part.
struct __attribute__((visibility("hidden"))) DeformConvSums {
  Columns grad_columns, columns;
  Tensor grad_weight, part;
};

// Computes the gradients of one chunk and adds to sums.grad_weight. weight and sums.grad_weight: matrices of
// (G, out / G, K * Cg).
template <class Kernels>
void deform_conv2d_backward_rows(const DeformConvGeometry& g, const DeformConvBackward& c,
                                 const Tensor& weight, bool needs_weight, DeformConvSums& sums) {
  const int64_t block = Kernels::block_pixels(g, c.input.element_size());
  const int64_t width = g.taps() * g.channels_per_group();
  const bool needs_columns = c.grad_input.defined() || c.grad_offset.defined();
  for (int64_t start = 0; start < g.pixels(); start += block) {
    const int64_t length = std::min(block, g.pixels() - start);
    const Tensor grad_rows =
        c.planes ? plane_rows(c.grad_output, start, length, g) : group_rows(c.grad_output, start, length, g);
    Tensor grad_columns, columns;
    if (needs_columns) {
      grad_columns = sums.grad_columns.resize(c.input, g.groups, length, width);
      product_out<Kernels>(grad_columns, grad_rows, weight);
    }
    if (needs_weight) {
      const bool replace = Kernels::columns_replace_gradients && needs_columns;
      columns = replace ? grad_columns : sums.columns.resize(c.input, g.groups, length, width);
    }
    if (needs_columns) {
      Kernels::sample_backward(g, c.input, c.offset, c.mask, grad_columns, columns, c.grad_input,
                               c.grad_offset, c.grad_mask, start, length);
    } else if (needs_weight) {
      Kernels::sample(g, c.input, c.offset, c.mask, columns, start, length);
    }
    if (!needs_weight) continue;
    const bool first = !sums.grad_weight.defined();
    Tensor& product = first ? sums.grad_weight : sums.part;
    if (!product.defined()) product = empty_like_options(weight, sizes_of(weight));
    product_out<Kernels>(product, transposed(grad_rows), columns);
    if (first) continue;
    sums.grad_weight = to_dtype(sums.grad_weight, Kernels::accumulate_type(weight));
    Kernels::accumulate(sums.grad_weight, sums.part);
  }
}

template <class Kernels>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> deform_conv2d_backward_driver(
    const Tensor& grad_output_, const Tensor& input_, const Tensor& offset_, const Tensor& weight_,
    std::optional<Tensor> mask_, std::vector<int64_t> stride, std::vector<int64_t> padding,
    std::vector<int64_t> dilation, int64_t groups, int64_t offset_groups, bool needs_input, bool needs_offset,
    bool needs_weight, bool needs_bias) {
  const auto none = [&] { return empty_like_options(input_, {0}); };  // results must not share memory
  const Tensor grad_bias = needs_bias ? sum_of_pixels(grad_output_) : none();
  if (!(needs_input || needs_offset || needs_weight)) return {none(), none(), none(), none(), grad_bias};
  const DeformConvGeometry g =
      deform_conv_geometry(input_, offset_, weight_, stride, padding, dilation, groups, offset_groups);
  const ScalarType type = Kernels::compute_type(input_);
  const Tensor input = to_dtype(input_, type);
  const Tensor offset = to_dtype(offset_, type);
  const Tensor mask = mask_ ? to_dtype(*mask_, type) : Tensor();
  const Tensor grad_output = to_dtype(grad_output_, type);
  typename Kernels::Jobs before, after;  // a chunk's samples
  const Tensor weight = pack_weight(before, to_dtype(weight_, type), g);
  const ScalarType sum_type = Kernels::accumulate_type(input);

  DeformConvSums sums;
  Tensor grad_input, grad_weight, grad_offset, grad_mask;
  const bool channels_last = is_channels_last(input_);
  const bool in_place = channels_last && sum_type == type;  // accumulate directly in grad_input
  if (needs_input) grad_input = empty_images(input, channels_last, g.N, g.C, g.H, g.W);
  if (needs_offset) {
    grad_offset = like(offset);
    if (mask_) grad_mask = like(mask);
  }

  const int64_t bytes = input.element_size(), chunk = Kernels::images_per_chunk(g, bytes);
  for (int64_t n = 0; n < g.N; n += chunk) {
    DeformConvGeometry part = g;
    part.N = std::min(chunk, g.N - n);
    after.run();  // frees the previous chunk's sums
    const Tensor out = images(grad_input, n, part.N);
    DeformConvBackward c{before.channels_last(images(input, n, part.N)),
                         images(grad_output, n, part.N),
                         part.N == 1 && grad_output.is_contiguous() && Kernels::reads_planes(g, bytes),
                         images(offset, n, part.N),
                         images(mask, n, part.N),
                         images(grad_offset, n, part.N),
                         images(grad_mask, n, part.N),
                         {}};
    if (!c.planes) c.grad_output = before.channels_last(c.grad_output);
    if (needs_input) {
      c.grad_input = in_place ? out : empty_like_options(input, {part.N, g.H, g.W, g.C}, sum_type);
      before.zero(c.grad_input);
    }
    before.run();
    deform_conv2d_backward_rows<Kernels>(part, c, weight, needs_weight, sums);
    if (needs_input && !in_place) after.channels_first(c.grad_input, out);
  }

  const ScalarType out = input_.scalar_type();
  if (needs_weight) {
    grad_weight = sums.grad_weight.defined() ? unpack_weight(after, sums.grad_weight, weight, g)
                                             : zeros_like_options(weight, sizes_of(weight_));
  }
  after.run();
  return {needs_input ? to_dtype(grad_input, out) : none(),
          needs_offset ? to_dtype(grad_offset, out) : none(),
          needs_weight ? to_dtype(grad_weight, out) : none(),
          needs_offset && mask_ ? to_dtype(grad_mask, out) : none(), grad_bias};
}

}  // namespace attn_plugins
