// The arithmetic of deformable attention for one instruction set; common/each_target.h includes this file
// once per set. A task of the forward is a head and a block of its queries. Vectors run along a head's
// channels. The four corners of a sample have separate sums, which keeps the additions independent.

#include "common/vector_kernel.h"

// The samples of one query: for each of their corners, the row among the head's values and the weight. A
// corner outside the map has row -1, and its weight multiplies zeros.
template <typename T>
class Samples {
 public:
  explicit Samples(int64_t points)
      : points_(points), numbers_(10 * points), rows_(4 * points), dy(numbers_.data()), dx(dy + points) {}

  // Computes rows and weights. A corner's weight is its bilinear weight, (1 - dy) (1 - dx) for the first,
  // times the attention weight.
  template <typename E, typename L>
  ATTN_INLINE void locate(const Problem<T, E, L>& p, int64_t at) {
    const L *locations = p.locations + at * p.P * 2, *weights = p.weights + at * p.P;
    if (p.propagates_nan) return locate<true>(p.levels, locations, weights);
    locate<false>(p.levels, locations, weights);
  }

  ATTN_INLINE int64_t row(int corner, int64_t p) const { return rows_[corner * points_ + p]; }
  ATTN_INLINE T weight(int corner, int64_t p) const { return numbers_[(2 + corner) * points_ + p]; }
  ATTN_INLINE T* products(int corner) { return numbers_.data() + (6 + corner) * points_; }

 private:
  template <bool PROPAGATES_NAN, typename L>
  ATTN_INLINE void locate(const Levels<T>& levels, const L* locations, const L* weights) {
    T* __restrict w = corner_weights();
    int64_t* __restrict row = rows_.data();
    T* __restrict fy = dy;
    T* __restrict fx = dx;
    const int64_t P = points_;
    for (int64_t p = 0; p < P; ++p) {
      const T height = levels.height[p], width = levels.width[p];
      const T x = T(locations[2 * p]) * width - T(0.5), y = T(locations[2 * p + 1]) * height - T(0.5);
      // Comparisons that also put NaN outside: values outside must not be converted to an integer.
      const bool inside = (y >= T(-1)) & (y < height) & (x >= T(-1)) & (x < width);
      const T yi = inside ? y : T(-1), xi = inside ? x : T(-1);
      const T y0 = std::floor(yi), x0 = std::floor(xi);
      const T a = T(weights[p]);
      T b = yi - y0, r = xi - x0;
      if constexpr (PROPAGATES_NAN) b += y * T(0), r += x * T(0);  // NaN if not finite
      const bool top = y0 >= T(0), bottom = inside & (y0 + 1 < height);
      const bool left = x0 >= T(0), right = inside & (x0 + 1 < width);
      const int64_t at = levels.start[p] + int64_t(y0) * int64_t(width) + int64_t(x0);
      fy[p] = b, fx[p] = r;
      w[p] = a * (1 - b) * (1 - r), w[P + p] = a * (1 - b) * r;
      w[2 * P + p] = a * b * (1 - r), w[3 * P + p] = a * b * r;
      row[p] = (top & left) ? at : -1;
      row[P + p] = (top & right) ? at + 1 : -1;
      row[2 * P + p] = (bottom & left) ? at + int64_t(width) : -1;
      row[3 * P + p] = (bottom & right) ? at + int64_t(width) + 1 : -1;
    }
  }

  T* corner_weights() { return numbers_.data() + 2 * points_; }

  int64_t points_;
  std::vector<T> numbers_;
  std::vector<int64_t> rows_;

 public:
  T *dy, *dx;
};

template <typename T>
ATTN_INLINE T sum_of_lanes(typename Vector<T>::type v) {
  typename Vector<T>::bits order;
#pragma GCC unroll 4
  for (int distance = Vector<T>::lanes / 2; distance > 0; distance /= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < Vector<T>::lanes; ++i) order[i] = i ^ distance;
    v += shuffled<T>(v, order);
  }
  return v[0];
}

// A head's values, packed if that pays off: rows of `stride` numbers, read in whole vectors.
template <typename E>
struct Rows {
  const E* data;
  int64_t stride;
  const E* nothing;  // a row of zeros

  ATTN_INLINE const E* at(int64_t row) const { return row < 0 ? nothing : data + row * stride; }
};

// Computes output[first, first + VECTORS * lanes) of one query.
template <int VECTORS, typename T, typename E>
ATTN_INLINE void mix(const Samples<T>& samples, int64_t points, const Rows<E>& values, int64_t first,
                     E* output) {
  using V = typename Vector<T>::type;
  V sum[4][VECTORS] = {};
  for (int64_t p = 0; p < points; ++p) {
#pragma GCC unroll 4
    for (int corner = 0; corner < 4; ++corner) {
      const E* value = values.at(samples.row(corner, p)) + first;
      const V weight = V{} + samples.weight(corner, p);
#pragma GCC unroll 2
      for (int c = 0; c < VECTORS; ++c) sum[corner][c] += weight * load<T>(value + c * Vector<T>::lanes);
    }
  }
#pragma GCC unroll 2
  for (int c = 0; c < VECTORS; ++c) {
    store<T>((sum[0][c] + sum[1][c]) + (sum[2][c] + sum[3][c]), output + c * Vector<T>::lanes);
  }
}

template <typename T>
ATTN_INLINE int64_t padded_width(int64_t width) {
  return (width + Vector<T>::lanes - 1) / Vector<T>::lanes * Vector<T>::lanes;
}

// Shared by the tasks of one thread: the current head's values, packed, and a row of zeros.
template <typename T, typename E, typename L>
class Head {
 public:
  explicit Head(const Problem<T, E, L>& p)
      : p_(p),
        width_(padded_width<T>(p.d)),
        packs_(p.packs || width_ != p.d),
        zeros_(width_),
        packed_(packs_ ? p.S * width_ : 0) {}

  ATTN_INLINE Rows<E> of(int64_t b, int64_t m) {
    const E* values = p_.value.data + b * p_.value.stride[0] + m * p_.value.stride[2];
    const int64_t step = p_.value.stride[1];
    if (!packs_) return {values, step, zeros_.data()};
    if (const int64_t head = b * p_.M + m; head != head_) {
      head_ = head;
      for (int64_t s = 0; s < p_.S; ++s) {
        const E* __restrict from = values + s * step;
        E* __restrict to = packed_.data() + s * width_;
        for (int64_t c = 0; c < p_.d; ++c) to[c] = from[c];
      }
    }
    return {packed_.data(), width_, zeros_.data()};
  }

  int64_t width() const { return width_; }
  bool packs() const { return packs_; }

 private:
  const Problem<T, E, L>& p_;
  int64_t width_;
  bool packs_;
  int64_t head_ = -1;
  Buffer<E> zeros_, packed_;
};

template <typename T, typename E, typename L>
void forward_range(const Problem<T, E, L>& p, int64_t begin, int64_t end) {
  constexpr int64_t lanes = Vector<T>::lanes;
  Head<T, E, L> head(p);
  Samples<T> samples(p.P);
  Buffer<E> row(head.width());
  for (int64_t task = begin; task < end; ++task) {
    const int64_t block = task % p.blocks, m = task / p.blocks % p.M, b = task / p.blocks / p.M;
    const Rows<E> values = head.of(b, m);
    for (int64_t q = block * BLOCK; q < std::min(p.Q, (block + 1) * BLOCK); ++q) {
      const int64_t at = (b * p.Q + q) * p.M + m;
      samples.locate(p, at);
      E* output = head.width() == p.d ? p.output + at * p.d : row.data();
      int64_t c = 0;
      for (; c + 2 * lanes <= head.width(); c += 2 * lanes) mix<2>(samples, p.P, values, c, output + c);
      if (c < head.width()) mix<1>(samples, p.P, values, c, output + c);
      if (output == row.data()) std::copy_n(output, p.d, p.output + at * p.d);
    }
  }
}

// Adds <gradient, corner i> to products[i] for all samples and, unless `sums` is null, weight_i * gradient to
// the row of corner i in `sums`.
template <int VECTORS, typename T, typename E>
ATTN_INLINE void spread(Samples<T>& samples, int64_t points, const Rows<E>& values, const E* gradient,
                        int64_t first, T* sums, int64_t stride) {
  using V = typename Vector<T>::type;
  V g[VECTORS];
#pragma GCC unroll 2
  for (int c = 0; c < VECTORS; ++c) g[c] = load<T>(gradient + first + c * Vector<T>::lanes);
  for (int64_t p = 0; p < points; ++p) {
#pragma GCC unroll 4
    for (int corner = 0; corner < 4; ++corner) {
      const int64_t row = samples.row(corner, p);
      if (row < 0) continue;
      const E* value = values.data + row * values.stride + first;
      V product = g[0] * load<T>(value);
#pragma GCC unroll 2
      for (int c = 1; c < VECTORS; ++c) product += g[c] * load<T>(value + c * Vector<T>::lanes);
      samples.products(corner)[p] += sum_of_lanes<T>(product);
      if (!sums) continue;
      const V weight = V{} + samples.weight(corner, p);
      T* sum = sums + row * stride + first;
#pragma GCC unroll 2
      for (int c = 0; c < VECTORS; ++c) {
        *reinterpret_cast<V*>(sum + c * Vector<T>::lanes) = load(sum + c * Vector<T>::lanes) + weight * g[c];
      }
    }
  }
}

// Returns 0, or NaN if one of the numbers is not finite.
template <typename T, typename E>
ATTN_INLINE T product_with_zeros(const E* numbers, int64_t width) {
  typename Vector<T>::type sum = {};
  for (int64_t c = 0; c < width; c += Vector<T>::lanes) sum += T(0) * load<T>(numbers + c);
  return sum_of_lanes<T>(sum);
}

// A task is a whole head, so that the order of summation does not depend on the number of threads.
template <typename T, typename E, typename L>
void backward_range(const Problem<T, E, L>& p, int64_t begin, int64_t end) {
  constexpr int64_t lanes = Vector<T>::lanes;
  Head<T, E, L> head(p);
  Samples<T> samples(p.P);
  Buffer<E> row(head.width());
  const bool packs_sums = p.grad_value && head.packs();
  Buffer<T> packed_sums(packs_sums ? p.S * head.width() : 0);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t m = task % p.M, b = task / p.M;
    const Rows<E> values = head.of(b, m);
    T* grad_value = p.grad_value ? p.grad_value + (b * p.S * p.M + m) * p.d : nullptr;
    T* sums = packs_sums ? packed_sums.data() : grad_value;
    const int64_t stride = packs_sums ? head.width() : p.M * p.d;
    for (int64_t s = 0; sums && s < p.S; ++s) std::fill_n(sums + s * stride, p.d, T(0));
    for (int64_t q = 0; q < p.Q; ++q) {
      const int64_t at = (b * p.Q + q) * p.M + m;
      samples.locate(p, at);
      const E* gradient = p.grad_output + at * p.d;
      if (head.width() != p.d) gradient = std::copy_n(gradient, p.d, row.data()) - p.d;
      // Corners outside the map read zeros, whose product with a gradient that is not finite is NaN.
      const T outside = p.propagates_nan ? product_with_zeros<T>(gradient, head.width()) : T(0);
      std::fill_n(samples.products(0), 4 * p.P, outside);
      int64_t c = 0;
      for (; c + 2 * lanes <= head.width(); c += 2 * lanes) {
        spread<2>(samples, p.P, values, gradient, c, sums, stride);
      }
      if (c < head.width()) spread<1>(samples, p.P, values, gradient, c, sums, stride);
      const T *s0 = samples.products(0), *s1 = samples.products(1), *s2 = samples.products(2),
              *s3 = samples.products(3);
      const L* weight = p.weights + at * p.P;
      for (int64_t i = 0; i < p.P; ++i) {
        const T dy = samples.dy[i], dx = samples.dx[i];
        const T above = (1 - dx) * s0[i] + dx * s1[i], below = (1 - dx) * s2[i] + dx * s3[i];
        const T across = (1 - dy) * (s1[i] - s0[i]) + dy * (s3[i] - s2[i]);
        if (p.grad_weights) p.grad_weights[at * p.P + i] = L((1 - dy) * above + dy * below);
        if (p.grad_locations) {
          L* out = p.grad_locations + (at * p.P + i) * 2;
          out[0] = L(T(weight[i]) * p.levels.width[i] * across);
          out[1] = L(T(weight[i]) * p.levels.height[i] * (below - above));
        }
      }
    }
    if (!packs_sums) continue;
    for (int64_t s = 0; s < p.S; ++s) std::copy_n(sums + s * stride, p.d, grad_value + s * p.M * p.d);
  }
}
