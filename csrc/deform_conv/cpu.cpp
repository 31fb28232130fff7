// Deformable convolution on CPUs: the drivers of deform_conv.h with the kernels of cpu_sampling.h. Threads
// divide the output pixels among themselves, and for input gradients the images and slices of channels. There
// are no atomics, so the result does not depend on the number of threads.
#include "common/bfloat16.h"
#include "common/onednn.h"
#include "common/transpose.h"
#include "cpu_sampling.h"

namespace attn_plugins {
namespace {

// The type of arithmetic on elements of E.
template <class E>
struct Computed {
  using type = float;
};
template <>
struct Computed<double> {
  using type = double;
};

// Calls body(E()), E being the element type of `t`.
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
constexpr int64_t kChannelsPerSlice = 16;  // one cache line of floats, so that threads never share a line

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

// Returns true if the CPU has instructions for bfloat16 products, which are then faster than those of float.
bool multiplies_bfloat16() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool found = [] {
    __builtin_cpu_init();
    return ATTN_CPU_LEVEL >= 4 && __builtin_cpu_supports("avx512bf16");
  }();
  return found;
#else
  return false;
#endif
}

struct CpuKernels {
  // Memory for a block's columns, or for its samples if these take more: large enough for few blocks, since
  // all threads synchronize after each, yet a small part of the columns of a whole batch.
  static constexpr int64_t kBlockBytes = 12 << 20;

  // Bytes per channel of a tap's column, or of its samples.
  static int64_t tap_bytes(const Geometry& g, int64_t element_bytes) {
    const int64_t samples = g.offset_groups * static_cast<int64_t>(sizeof(Sample<float>));
    return std::max(element_bytes, (samples + g.C - 1) / std::max<int64_t>(1, g.C));
  }

  // Pixels per block, such that the blocks of a chunk have equal sizes.
  static int64_t block_pixels(const Geometry& g, int64_t element_bytes) {
    const int64_t most = pixels_of_bytes(g, tap_bytes(g, element_bytes), kBlockBytes);
    const int64_t blocks = std::max<int64_t>(1, (g.pixels() + most - 1) / most);
    return std::max<int64_t>(1, (g.pixels() + blocks - 1) / blocks);
  }

  // Images that fill about two blocks, so that their channels-last copies stay small as well.
  static int64_t images_per_chunk(const Geometry& g, int64_t element_bytes) {
    const int64_t pixels = 2 * pixels_of_bytes(g, tap_bytes(g, element_bytes), kBlockBytes);
    return std::clamp<int64_t>(pixels / std::max<int64_t>(1, g.Ho * g.Wo), 1, std::max<int64_t>(1, g.N));
  }
  static constexpr bool columns_replace_gradients = false;

  static void mm_out(const Tensor& out, const Tensor& a, const Tensor& b) {
    if (!attn_plugins::onednn_mm_out(out, a, b)) attn_plugins::mm_out(out, a, b);
  }

  static void linear_out(const Tensor& out, const Tensor& a, const Tensor& weight, const Tensor& bias) {
    mm_out(out, a, transposed(weight));
    if (bias.defined()) add_bias(out, bias);
  }

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

  // Rows are faster to write than planes: a whole vector of channels at a time.
  static bool writes_planes(const Geometry&, int64_t) { return false; }
  static bool reads_planes(const Geometry&, int64_t) { return false; }
  static int64_t images_per_copy(const Geometry& g, int64_t) { return g.N; }
  static void add_plane_bias(const Tensor&, const Tensor&) {}

  // Nothing is launched here, so jobs are done at once.
  struct Jobs {
    Tensor channels_last(const Tensor& t) {
      if (!t.is_contiguous()) return to_channels_last(t);
      const int64_t N = t.size(0), C = t.size(1), H = t.size(2), W = t.size(3);
      const Tensor copy = empty_like_options(t, {N, H, W, C});
      transpose_into(copy, view_of(t, {N, C, H * W}, {C * H * W, H * W, 1}));
      return copy;
    }

    void channels_first(const Tensor& t, const Tensor& out) {
      if (!out.is_contiguous()) return copy_to(out, permuted(t, {0, 3, 1, 2}));
      const int64_t N = t.size(0), pixels = t.size(1) * t.size(2), C = t.size(3);
      transpose_into(out, view_of(t, {N, pixels, C}, {pixels * C, C, 1}));
    }

    void zero(const Tensor& sums) { set_zero(sums); }
    void run() {}
  };

  static void add_bias(const Tensor& rows, const Tensor& bias) {
    const int64_t width = rows.size(1);
    const Tensor row = as_contiguous(bias);
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
