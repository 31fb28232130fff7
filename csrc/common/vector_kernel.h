// Vectors of one instruction set, for kernels that are compiled once per set. Like those kernels, this file
// has no include guard and expects VECTOR_BYTES to be defined.

template <typename T>
struct Vector {
  typedef T type __attribute__((vector_size(VECTOR_BYTES), aligned(alignof(T)), may_alias));
  typedef typename Exp<T>::Bits bits __attribute__((vector_size(VECTOR_BYTES)));
  static constexpr int64_t lanes = VECTOR_BYTES / sizeof(T);
};

// Returns the lanes in another order; clang's builtin for that takes only constants.
template <typename T>
ATTN_INLINE typename Vector<T>::type shuffled(typename Vector<T>::type vector,
                                              typename Vector<T>::bits order) {
#ifdef __clang__
  typename Vector<T>::type result;
  for (int l = 0; l < Vector<T>::lanes; ++l) result[l] = vector[order[l]];
  return result;
#else
  return __builtin_shuffle(vector, order);
#endif
}

// Loads a vector of elements without any alignment requirement.
template <typename T>
ATTN_INLINE typename Vector<T>::type load(const T* from) {
  return *reinterpret_cast<const typename Vector<T>::type*>(from);
}

typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));

template <typename T>
ATTN_INLINE typename Vector<T>::type widened(Halves halves) {
  return (typename Vector<T>::type)(__builtin_convertvector(halves, Words) << 16);
}

template <typename T>
ATTN_INLINE typename Vector<T>::type load(const BFloat16* from) {
  return widened<T>(*reinterpret_cast<const Halves*>(from));
}

// Loads the first `count` elements, fewer than the lanes, and reads nothing beyond them.
template <typename T, typename E>
ATTN_INLINE typename Vector<T>::type load_first(const E* from, int64_t count) {
  using V = typename Vector<T>::type;
#if defined(HAS_TARGETS) && VECTOR_BYTES == 64
  const uint32_t mask = (1u << count) - 1;
  if constexpr (std::is_same_v<E, float>) return (V)_mm512_maskz_loadu_ps(mask, from);
  if constexpr (std::is_same_v<E, double>) return (V)_mm512_maskz_loadu_pd(mask, from);
  if constexpr (std::is_same_v<E, BFloat16>) return widened<T>((Halves)_mm256_maskz_loadu_epi16(mask, from));
#endif
  V vector = {};
  for (int64_t l = 0; l < count; ++l) vector[l] = T(from[l]);
  return vector;
}

template <typename T>
ATTN_INLINE void store(typename Vector<T>::type vector, T* to) {
  *reinterpret_cast<typename Vector<T>::type*>(to) = vector;
}

// Rounds as BFloat16's constructor does.
template <typename T>
ATTN_INLINE void store(typename Vector<T>::type vector, BFloat16* to) {
  const Words whole = (Words)vector, rounded = (whole + 0x7fffu + ((whole >> 16) & 1u)) >> 16;
  const Words kept = vector != vector ? (whole >> 16) | 0x40u : rounded;
  *reinterpret_cast<Halves*>(to) = __builtin_convertvector(kept, Halves);
}

// Transposes a square of `lanes` rows: in step `half`, rows i and i + half exchange lanes.
template <typename T>
ATTN_INLINE void transpose(typename Vector<T>::type (&rows)[Vector<T>::lanes]) {
  constexpr int64_t lanes = Vector<T>::lanes;
#pragma GCC unroll 4
  for (int64_t half = 1; half < lanes; half *= 2) {
    typename Vector<T>::bits upper, left, right;
    for (int64_t l = 0; l < lanes; ++l)
      upper[l] = l & half ? -1 : 0, left[l] = (l - half) & (lanes - 1), right[l] = (l + half) & (lanes - 1);
#pragma GCC unroll 16
    for (int64_t i = 0; i < lanes; ++i) {
      if (i & half) continue;
      const auto low = rows[i], high = rows[i + half];
      rows[i] = upper ? shuffled<T>(high, left) : low;
      rows[i + half] = upper ? high : shuffled<T>(low, right);
    }
  }
}

// Copies rows x columns elements of any strides, times `scale`, to rows that are `stride` elements apart.
// Both are of T or BFloat16.
template <typename T, typename From, typename To>
void copy_matrix(const From* from, int64_t row, int64_t column, int64_t rows, int64_t columns, T scale,
                 To* to, int64_t stride) {
  constexpr int64_t lanes = Vector<T>::lanes;
  if (row == 1 && column != 1 && rows >= lanes && columns >= lanes) {
    for (int64_t across = 0; across < columns; across += lanes)
      for (int64_t down = 0; down < rows; down += lanes) {  // the last squares overlap those before them
        const int64_t r = std::min(down, rows - lanes), c = std::min(across, columns - lanes);
        typename Vector<T>::type square[lanes];
#pragma GCC unroll 16
        for (int64_t i = 0; i < lanes; ++i) square[i] = load<T>(from + r + (c + i) * column) * scale;
        transpose<T>(square);
#pragma GCC unroll 16
        for (int64_t i = 0; i < lanes; ++i) store<T>(square[i], to + (r + i) * stride + c);
      }
    return;
  }
  for (int64_t r = 0; r < rows; ++r) {
    To* line = to + r * stride;
    const From* source = from + r * row;
    int64_t c = 0;
    if (column == 1)
      for (; c + lanes <= columns; c += lanes) store<T>(load<T>(source + c) * scale, line + c);
    for (; c < columns; ++c) line[c] = To(source[c * column] * scale);
  }
}

// exp(x) for x <= 0 as 2^n * e^r with |r| <= ln(2) / 2, by the constants of Exp. Below LOWEST the result is
// exactly 0; NaN stays NaN.
template <typename T>
ATTN_INLINE typename Vector<T>::type exponential(typename Vector<T>::type x) {
  using V = typename Vector<T>::type;
  using B = typename Vector<T>::bits;
  using E = Exp<T>;
  const V zero = {}, lowest = zero + E::LOWEST;
  const V clamped = x < lowest ? lowest : x;
  const V shifted = clamped * E::LOG2E + E::SHIFTER;  // n lands in the low bits
  const V n = shifted - E::SHIFTER;
  const V r = (clamped - n * E::LN2_HIGH) - n * E::LN2_LOW;
  V p = zero + E::TAYLOR[0];
  for (int i = 1; i < int(std::size(E::TAYLOR)); ++i) p = p * r + E::TAYLOR[i];
  const B power = ((B)shifted + E::BIAS) << E::MANTISSA;
  return x < lowest ? zero : p * (V)power;
}

// log(x) for finite x >= 1. With x = 2^n * m and m near 1, log(m) = 2 artanh(s) for s = (m - 1) / (m + 1),
// |s| < 0.1716, computed as the sum of 2 s^(2i + 1) / (2i + 1). NaN stays NaN.
template <typename T>
ATTN_INLINE typename Vector<T>::type logarithm(typename Vector<T>::type x) {
  using V = typename Vector<T>::type;
  using B = typename Vector<T>::bits;
  using E = Exp<T>;
  constexpr typename E::Bits one = E::BIAS << E::MANTISSA,
                             mantissa = (typename E::Bits(1) << E::MANTISSA) - 1;
  const V fraction = (V)(((B)x & mantissa) | one);
  const B large = fraction > T(1.41421356);
  const V m = large ? fraction * T(0.5) : fraction;
  const V n = __builtin_convertvector(((B)x >> E::MANTISSA) - E::BIAS - large, V);  // a true lane is -1
  const V s = (m - T(1)) / (m + T(1)), square = s * s;
  constexpr int terms = sizeof(T) == 4 ? 6 : 12;
  V p = V{} + T(1) / (2 * terms - 1);
  for (int i = terms - 2; i >= 0; --i) p = p * square + T(1) / (2 * i + 1);
  const V result = n * E::LN2_HIGH + (n * E::LN2_LOW + 2 * s * p);
  return x != x ? x : result;
}

// A zero-filled array that begins on a cache line, so that no vector of a row straddles two lines.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t size) : storage_(size + 64 / sizeof(T), T(0)) {
    const auto address = reinterpret_cast<uintptr_t>(storage_.data());
    data_ = storage_.data() + (64 - address % 64) % 64 / sizeof(T);
  }
  Buffer(const Buffer&) = delete;
  T* data() { return data_; }
  T& operator[](int64_t i) { return data_[i]; }

 private:
  std::vector<T> storage_;
  T* data_;
};

// Calls `body` with a pointer to the view's elements at (b, m, h, w), which are of T or BFloat16.
template <typename T, typename Body>
ATTN_INLINE void with_elements(const View<T>& view, int64_t b, int64_t m, int64_t h, int64_t w,
                               const Body& body) {
  const int64_t offset = view.offset(b, m, h, w);
  if constexpr (sizeof(T) == sizeof(float)) {
    if (view.bfloat16) return body(reinterpret_cast<BFloat16*>(view.data) + offset);
  }
  body(view.data + offset);
}
