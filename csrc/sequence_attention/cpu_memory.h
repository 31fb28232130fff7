// The working memory of sequence attention's tasks, copies between it and tensors, and matrix products in it.
// cpu_kernel.h includes this file.

constexpr int64_t BLOCK = 48;
constexpr int64_t WHOLE = 64;  // up to this many queries, a window of 8 x 8, make one block
constexpr int64_t DEPTH = 96;  // rows of keys or values per step of a product over keys

template <typename T>
constexpr int64_t PANEL = 256 / sizeof(T);  // columns of a panel: four of the widest vectors

template <typename T>
ATTN_INLINE int64_t block_size(const Problem<T>& p) {
  return p.queries <= WHOLE && p.slots == 1 ? p.queries : BLOCK;
}

template <typename T>
struct Scratch {
  Buffer<T> query, gradient, mixed, weights, slopes, top, scale;
  Buffer<T> key_panels, value_panels, key_rows, value_rows, grad_key, grad_value;
  const int32_t* segment = nullptr;  // of a batch entry's keys; nullptr where all are of one
  Scratch(const Problem<T>& p, bool backward)
      : query(block_size(p) * p.d_padded),
        gradient(backward ? block_size(p) * p.dv_padded : 0),
        mixed(block_size(p) * std::max(p.d_padded, p.dv_padded)),
        weights(block_size(p) * p.line),
        slopes(backward ? block_size(p) * p.line : 0),
        top(block_size(p) + 64 / sizeof(T)),  // whole vectors
        scale(block_size(p) + 64 / sizeof(T)),
        key_panels(panels(p, p.query.data && !p.direct ? p.d : 0)),
        value_panels(panels(p, backward && p.logits_wanted ? p.dv : 0)),
        key_rows(backward && p.grad_query.data ? p.S * p.d_padded : 0),
        value_rows(backward || p.direct ? 0 : p.S * p.dv_padded),
        grad_key(p.grad_key.data ? p.S * p.d_padded : 0),
        grad_value(p.grad_value.data ? p.S * p.dv_padded : 0) {}

  static int64_t panels(const Problem<T>& p, int64_t width) {
    return (p.S + PANEL<T> - 1) / PANEL<T> * PANEL<T> * width;
  }
};

// Copies rows of a (B, M, 1, N, width) view, one after another, multiplied by `scale`.
template <typename T>
ATTN_INLINE void gather(const View<T>& view, int64_t b, int64_t m, int64_t first, int64_t count,
                        int64_t width, int64_t padded, T scale, T* __restrict to) {
  const int64_t row = view.stride[3], step = view.stride[4];
  with_elements(view, b, m, 0, first, [&](const auto* __restrict from) {
    for (int64_t i = 0; i < count; ++i) {
      if (step == 1)
        for (int64_t c = 0; c < width; ++c) to[i * padded + c] = T(from[i * row + c]) * scale;
      else
        for (int64_t c = 0; c < width; ++c) to[i * padded + c] = T(from[i * row + c * step]) * scale;
    }
  });
}

template <typename T>
ATTN_INLINE void scatter(const View<T>& view, int64_t b, int64_t m, int64_t slot, int64_t first,
                         int64_t count, int64_t width, int64_t padded, const T* scale, int64_t scale_step,
                         const T* __restrict from) {
  const int64_t row = view.stride[3], step = view.stride[4];
  with_elements(view, b, m, slot, first, [&](auto* __restrict to) {
    using E = std::remove_reference_t<decltype(*to)>;
    for (int64_t i = 0; i < count; ++i) {
      const T factor = scale[i * scale_step];
      if (step == 1)
        for (int64_t c = 0; c < width; ++c) to[i * row + c] = E(from[i * padded + c] * factor);
      else
        for (int64_t c = 0; c < width; ++c) to[i * row + c * step] = E(from[i * padded + c] * factor);
    }
  });
}

// Packs rows (N, width) into panels (N / PANEL, width, PANEL).
template <typename T>
ATTN_INLINE void pack_panels(const View<T>& view, int64_t b, int64_t m, int64_t count, int64_t width,
                             T* __restrict to) {
  constexpr int64_t few = 16;
  const int64_t row = view.stride[3], step = view.stride[4];
  with_elements(view, b, m, 0, 0, [&](const auto* elements) {
    for (int64_t k = 0; k < count; k += few) {
      T* __restrict panel = to + k / PANEL<T> * PANEL<T> * width + k % PANEL<T>;
      const int64_t n = std::min(few, count - k);
      decltype(elements) from[few];
      for (int64_t i = 0; i < few; ++i) from[i] = elements + (k + std::min(i, n - 1)) * row;
      for (int64_t c = 0; c < width; ++c) {
        for (int64_t i = 0; i < few; ++i) panel[c * PANEL<T> + i] = i < n ? T(from[i][c * step]) : T(0);
      }
    }
  });
}

// C (count x columns) = A (count x width) * panels.
template <typename T>
ATTN_INLINE void panel_product(const T* A, int64_t padded, const T* panels, int64_t width, T* C, int64_t line,
                               int64_t count, int64_t columns) {
  for (int64_t j = 0; j < columns; j += PANEL<T>)
    product(A, padded, int64_t(1), panels + j * width, PANEL<T>, C + j, line, count,
            std::min(PANEL<T>, columns - j), width, false);
}

// C (count x padded) = A (count x keys) * rows (keys x padded).
template <typename T>
ATTN_INLINE void row_product(const T* A, int64_t line, const T* rows, int64_t padded, T* C, int64_t count,
                             int64_t keys) {
  for (int64_t k = 0; k < keys; k += DEPTH)
    product(A + k, line, int64_t(1), rows + k * padded, padded, C, padded, count, padded,
            std::min(DEPTH, keys - k), k > 0);
}
