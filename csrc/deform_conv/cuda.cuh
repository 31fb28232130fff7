// The kernels that the drivers of deform_conv.h call on a GPU. Matrix products go to ATen, so torch's
// switches (allow_tf32, float32_matmul_precision, reduced-precision reductions) apply to them.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <limits>

#include "common/dispatch.cuh"
#include "common/jobs.cuh"
#include "cuda_sampling.cuh"
#include "deform_conv.h"

namespace attn_plugins {
namespace {

struct CudaKernels {
  using Geometry = DeformConvGeometry;

  static ScalarType compute_type(const Tensor& t) { return t.scalar_type(); }
  static ScalarType accumulate_type(const Tensor& t) {
    return t.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  }
  // One buffer instead of two halves the memory and the cache that a block needs.
  static constexpr bool columns_replace_gradients = true;

  static void mm_out(const Tensor& out, const Tensor& a, const Tensor& b) { attn_plugins::mm_out(out, a, b); }

  // cuBLASLt adds the bias to what it writes. A view has no gradient, which `out` operators refuse.
  static void linear_out(const Tensor& out, const Tensor& a, const Tensor& weight, const Tensor& bias) {
    if (bias.defined()) {
      const Tensor row = view_of(bias, sizes_of(bias), strides_of(bias));
      attn_plugins::linear_out(out, a, weight, row);
    } else {
      attn_plugins::mm_out(out, a, transposed(weight));
    }
  }

  // Approximate number of output pixels per GEMM. The tiles of the GEMM should fill the chip: with tiles of
  // 128 pixels x 64 output channels, one wave is multiprocessors * 128 * 64 / out_channels pixels, and a last
  // wave that is not full costs less, the more there are. Four take the time from 2.1 ms to 1.85 ms for 16
  // maps of 256 channels, 64 x 64, in float32 on an H100 (all pixels at once: 1.82 ms), though their columns
  // no longer fit into the L2 cache; up to three times as much is allowed. If C = out_channels and K = 9, the
  // columns of such a block take 78 MB in half precision and 156 MB in float32 on 132 multiprocessors, for
  // any C. ATTN_PLUGINS_BLOCK_PIXELS overrides the number, where memory counts for more.
  //
  // The resulting working memory in MB, for N = 16, C = out_channels = 256, 64 x 64 pixels and K = 9 on 132
  // multiprocessors and 50 MB of L2 cache, compared with the column buffer of the whole batch (chunks of four
  // images, each a block of 16384 pixels):
  //                                                     bfloat16                   float32
  //   columns (replacing their gradients in backward)   75.5                       151.0
  //   packed weight                                     1.2                        2.4
  //   input of four images, channels-last               8.4                        16.8
  //   forward                                           85.1 of 302 (28 %)         170.2 of 604 (28 %)
  //   rows of four images, channels-last                8.4                        16.8
  //   sums of their input gradients, float32            16.8                       16.8
  //   sum and part of the weight gradient               2.4 + 1.2                  2.4 + 2.4
  //   backward                                          113.9 of 302 (38 %)        208.6 of 604 (35 %)
  // tests/ops/deform_conv/test_cuda.py checks these figures. A channels-last input needs no copies of
  // input and rows.
  static int64_t target_pixels(const Geometry& g, int64_t element_bytes) {
    if (const char* forced = std::getenv("ATTN_PLUGINS_BLOCK_PIXELS")) {
      return std::max<int64_t>(1, std::strtoll(forced, nullptr, 10));
    }
    const DeviceLimits device = device_limits();
    const int64_t waves = 4 * device.multiprocessors * 128 * 64 / g.out_channels;
    const int64_t most = device.l2_bytes * 3 / (g.taps() * g.C * element_bytes);
    return std::max<int64_t>(256, std::min(waves, most));
  }

  // Images whose pixels make about one block. Their channels-last copies and gradient sums (float32 even for
  // half inputs) then take a few MB and stay in cache as well.
  static int64_t images_per_chunk(const Geometry& g, int64_t element_bytes) {
    const int64_t image = std::max<int64_t>(1, g.Ho * g.Wo);
    const int64_t target = target_pixels(g, element_bytes);
    const int64_t images = std::clamp<int64_t>((target + image / 2) / image, 1, std::max<int64_t>(1, g.N));
    return divide_up(g.N, std::max<int64_t>(1, divide_up(g.N, images)));  // for chunks of equal size
  }

  // True if the tiles of the products are aligned and few of them are cut off at the ends of images.
  static bool writes_planes(const Geometry& g, int64_t element_bytes) {
    const int64_t pixels = g.Ho * g.Wo;
    return reads_planes(g, element_bytes) && (g.N == 1 || pixels >= 1024 || pixels % 128 == 0);
  }

  static bool reads_planes(const Geometry& g, int64_t element_bytes) {
    return g.Ho * g.Wo * element_bytes % 16 == 0;
  }

  // Images whose channels-last copy takes an eighth of the memory of a block's columns, but at least
  // images_per_chunk, to keep the number of launches small.
  static int64_t images_per_copy(const Geometry& g, int64_t element_bytes) {
    const int64_t map = std::max<int64_t>(1, g.H * g.W);
    const int64_t images = target_pixels(g, element_bytes) * g.taps() / (8 * map);
    return std::clamp<int64_t>(images, images_per_chunk(g, element_bytes), std::max<int64_t>(1, g.N));
  }

  // Pixels per block, such that the blocks of a chunk have equal sizes, rounded up to whole tiles of 128
  // rows.
  static int64_t block_pixels(const Geometry& g, int64_t element_bytes) {
    const int64_t target = target_pixels(g, element_bytes);
    const int64_t blocks = std::max<int64_t>(1, (g.pixels() + target / 2) / target);
    return std::max<int64_t>(1, divide_up(divide_up(g.pixels(), blocks), 128) * 128);
  }

  template <class T>
  static SamplingProblem<T> problem(const Geometry& g, const Tensor& input, const Tensor& offset,
                                    const Tensor& mask, int64_t start, int64_t length) {
    // Pixel numbers, channels and their divisors are 32-bit in the kernels; addresses are 64-bit.
    constexpr int64_t limit = std::numeric_limits<int32_t>::max();
    const auto small = [](std::initializer_list<int64_t> numbers) {
      return std::ranges::all_of(numbers, [](int64_t n) { return n <= limit; });
    };
    STD_TORCH_CHECK(small({g.C * 8, g.H * g.W, g.H + 2 * g.pad_h, g.W + 2 * g.pad_w, g.pixels(),
                           length * g.taps(), 2 * g.taps() * g.offset_groups, g.Ho * g.stride_h,
                           g.Wo * g.stride_w, g.Kh * g.dilation_h, g.Kw * g.dilation_w}),
                    "attn_plugins: no map, stride, dilation, number of taps or of a block's taps "
                    "(ATTN_PLUGINS_BLOCK_PIXELS) of a deformable convolution may reach 2^31 on CUDA, nor "
                    "channels 2^28, got input (",
                    g.N, ", ", g.C, ", ", g.H, ", ", g.W, ") and output ", g.Ho, " x ", g.Wo);
    SamplingProblem<T> p{};
    p.input = data_of<const T>(input);
    p.offset = data_of<const T>(offset);
    p.mask = data_of<const T>(mask);
    p.offset_strides = tap_strides(offset);
    if (mask.defined()) p.mask_strides = tap_strides(mask);
    p.image = g.H * g.W * g.C;
    p.group_step = (length * g.taps() - 1) * g.channels_per_group();
    p.start = int(start), p.length = int(length);
    p.C = int(g.C), p.H = int(g.H), p.W = int(g.W), p.taps = int(g.taps());
    p.stride_h = int(g.stride_h), p.stride_w = int(g.stride_w);
    p.pad_h = int(g.pad_h), p.pad_w = int(g.pad_w);
    p.dilation_h = int(g.dilation_h), p.dilation_w = int(g.dilation_w);
    p.group_channels = int(g.channels_per_group());
    p.offset_group_channels = int(g.channels_per_offset_group());
    p.pixel_bytes = int(g.C * sizeof(T));
    p.rows = Divisor(g.Ho), p.columns = Divisor(g.Wo), p.kernel_columns = Divisor(g.Kw);
    p.channel_groups = Divisor(g.channels_per_group()), p.offset_groups = Divisor(g.offset_groups);
    return p;
  }

  // Sets the teams for vectors of `width` channels and returns the number of thread blocks they fill. If
  // there are too few pixels to fill the chip with warps, several teams share a pixel's taps.
  template <class T>
  static int64_t assign_teams(SamplingProblem<T>& p, int width, bool slice_channels) {
    const int vectors = p.offset_group_channels / width;
    p.lanes_log2 = slice_channels ? 0 : 2;  // sum_over_team needs 4 lanes
    while ((1 << p.lanes_log2) < std::min(vectors, 32)) ++p.lanes_log2;
    const int64_t slices = slice_channels ? divide_up(vectors, int64_t(1) << p.lanes_log2) : 1;
    p.channel_slices = Divisor(slices);
    const int64_t threads = (int64_t(p.length) * p.offset_groups.divisor * slices) << p.lanes_log2;
    const int64_t wanted = device_limits().multiprocessors * 1024;  // threads in flight
    const int64_t shares = std::clamp<int64_t>(wanted / std::max<int64_t>(threads, 1), 1, p.taps);
    p.slice_taps = int(divide_up(p.taps, shares));
    const int64_t tap_slices = divide_up(p.taps, p.slice_taps);
    p.tap_slices = Divisor(tap_slices);
    const int64_t teams = (threads * tap_slices) >> p.lanes_log2;
    STD_TORCH_CHECK(teams < std::numeric_limits<int32_t>::max() - kThreads, "attn_plugins: a block of ",
                    p.length, " output pixels is too large for CUDA");
    return divide_up(teams, kThreads >> p.lanes_log2);
  }

  static void sample(const Geometry& g, const Tensor& input, const Tensor& offset, const Tensor& mask,
                     const Tensor& columns, int64_t start, int64_t length) {
    for_type(input.scalar_type(), [&](auto zero) {
      using T = decltype(zero);
      SamplingProblem<T> p = problem<T>(g, input, offset, mask, start, length);
      T* out = data_of<T>(columns);
      for_width<T>({p.group_channels, p.offset_group_channels}, {p.input, out}, [&](auto, auto width) {
        const int64_t blocks = assign_teams(p, width, true);
        launch(sample_kernel<T, width>, blocks, p, out);
      });
    });
  }

  // All but the input's gradient.
  template <class T, class S>
  static SamplingGradients<T, S> gradients(const Tensor& grad_columns, const Tensor& columns,
                                           const Tensor& grad_offset, const Tensor& grad_mask) {
    SamplingGradients<T, S> grads{};
    grads.grad_columns = data_of<const T>(grad_columns);
    grads.columns = data_of<T>(columns);
    grads.grad_offset = data_of<T>(grad_offset);
    grads.grad_mask = data_of<T>(grad_mask);
    if (grad_offset.defined()) grads.offset_strides = tap_strides(grad_offset);
    if (grad_mask.defined()) grads.mask_strides = tap_strides(grad_mask);
    return grads;
  }

  static void sample_backward(const Geometry& g, const Tensor& input, const Tensor& offset,
                              const Tensor& mask, const Tensor& grad_columns, const Tensor& columns,
                              const Tensor& grad_input, const Tensor& grad_offset, const Tensor& grad_mask,
                              int64_t start, int64_t length) {
    for_type(input.scalar_type(), [&](auto zero) {
      using T = decltype(zero);
      using S = accumulate_t<T>;
      SamplingProblem<T> p = problem<T>(g, input, offset, mask, start, length);
      auto grads = gradients<T, S>(grad_columns, columns, grad_offset, grad_mask);
      grads.grad_input = data_of<S>(grad_input);
      const auto run = [&](auto, auto width) {
        const int64_t blocks = assign_teams(p, width, false);
        launch(sample_backward_kernel<T, width, S>, blocks, p, grads);
      };
      // grad_input needs no check: it is a new allocation, aligned to far more than four floats.
      const std::initializer_list<int64_t> counts = {p.group_channels, p.offset_group_channels};
      const std::initializer_list<const void*> pointers = {p.input, grads.grad_columns, grads.columns};
      if (grads.grad_input) {
        for_atomic_width<T>(counts, pointers, run);
      } else {
        for_width<T>(counts, pointers, run);
      }
    });
  }

  static void accumulate(const Tensor& sum, const Tensor& part) {
    for_type(part.scalar_type(), [&](auto zero) {
      using T = decltype(zero);
      launch(accumulate_kernel<T>, divide_up(part.numel(), kThreads), data_of<accumulate_t<T>>(sum),
             data_of<const T>(part), int64_t(part.numel()));
    });
  }

  struct Jobs : attn_plugins::Jobs {
    Tensor channels_last(const Tensor& t) {
      const int64_t N = t.size(0), C = t.size(1), H = t.size(2), W = t.size(3);
      const bool planes = (W == 1 || t.stride(3) == 1) && (H == 1 || t.stride(2) == W);
      if (!planes || C == 1 || H * W == 1 || is_channels_last(t)) return to_channels_last(t);
      const Tensor out = empty_like_options(t, {N, H, W, C});
      transpose(t, out, N, C, H * W, t.stride(0), t.stride(1));
      return out;
    }

    void channels_first(const Tensor& t, const Tensor& out) {
      const int64_t N = t.size(0), C = t.size(3), pixels = t.size(1) * t.size(2);
      if (out.is_contiguous()) {
        transpose(t, out, N, pixels, C, pixels * C, C);
      } else {
        round(t, out);
      }
    }
  };

  static void add_bias(const Tensor& rows, const Tensor& bias) {
    const int64_t count = rows.size(0), width = rows.size(1);
    const Tensor row = as_contiguous(bias);
    for_type(rows.scalar_type(), [&](auto zero) {
      using T = decltype(zero);
      T* to = data_of<T>(rows);
      const T* from = data_of<const T>(row);
      for_width<T>({width}, {to, from}, [&](auto, auto n) {
        launch(add_bias_kernel<T, n>, divide_up(count * width / n, kThreads), to, from, count, width);
      });
    });
  }

  static void add_plane_bias(const Tensor& planes, const Tensor& bias) {
    const int64_t channels = planes.size(1), pixels = planes.size(2) * planes.size(3);
    const Tensor row = as_contiguous(bias);
    for_type(planes.scalar_type(), [&](auto zero) {
      using T = decltype(zero);
      T* to = data_of<T>(planes);
      for_width<T>({pixels}, {to}, [&](auto, auto n) {
        const int64_t count = planes.numel() / n;
        STD_TORCH_CHECK(count < std::numeric_limits<int32_t>::max(), "attn_plugins: ", planes.size(0),
                        " images of ", channels, " x ", pixels,
                        " are too large for one block of a deformable convolution on CUDA");
        launch(add_plane_bias_kernel<T, n>, divide_up(count, kThreads), to, data_of<const T>(row), count,
               Divisor(pixels / n), Divisor(channels));
      });
    });
  }
};

// The same with gradients whose bits are equal in every run: only the input's is a sum whose order varies.
struct DeterministicCudaKernels : CudaKernels {
  // A block's terms are products of a gradient of a column and a bilinear weight times mask. At most those of
  // all taps of the block's pixels of one image reach one sum. Blocks follow one another, so their values are
  // added in float32. The integers take twice the memory of a chunk's sums, beside these.
  static void sample_backward(const Geometry& g, const Tensor& input, const Tensor& offset,
                              const Tensor& mask, const Tensor& grad_columns, const Tensor& columns,
                              const Tensor& grad_input, const Tensor& grad_offset, const Tensor& grad_mask,
                              int64_t start, int64_t length) {
    if (!grad_input.defined()) {
      return CudaKernels::sample_backward(g, input, offset, mask, grad_columns, columns, grad_input,
                                          grad_offset, grad_mask, start, length);
    }
    const FixedSums sums(grad_input, std::min(length, g.Ho * g.Wo) * g.taps());
    for_type(input.scalar_type(), [&](auto zero) {
      using T = decltype(zero);
      if constexpr (sizeof(T) == 8) {
        STD_TORCH_CHECK(false, "attn_plugins: the deterministic backward takes no float64");
      } else {
        SamplingProblem<T> p = problem<T>(g, input, offset, mask, start, length);
        auto grads = gradients<T, Fixed>(grad_columns, columns, grad_offset, grad_mask);
        grads.grad_input = sums.data(), grads.scale = sums.scale;
        sums.begin<T, T>(mask.defined() ? as_contiguous(mask) : mask, grad_columns);
        // Integers are added one at a time, so neighboring threads take neighboring channels.
        launch(sample_backward_kernel<T, 1, Fixed>, assign_teams(p, 1, false), p, grads);
        sums.end<float, true>(grad_input);
      }
    });
  }
};

}  // namespace
}  // namespace attn_plugins
