// Blocks of a transposition for one instruction set. each_target.h includes this file once per set, inside a
// namespace and under a target pragma, with VECTOR_BYTES defined; it has no include guard.

#include "common/vector_kernel.h"

template <typename T, typename In, typename Out>
ATTN_INLINE void transpose_blocks(const Problem<In, Out>& p, int64_t begin, int64_t end) {
  const int64_t down = p.blocks(p.rows), across = p.blocks(p.columns);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t c = task % across * BLOCK, r = task / across % down * BLOCK, n = task / across / down;
    const int64_t width = std::min(BLOCK, p.columns - c), height = std::min(BLOCK, p.rows - r);
    const In* in = p.in + n * p.in_stride[0] + r * p.in_stride[1] + c * p.in_stride[2];
    Out* out = p.out + (n * p.columns + c) * p.rows + r;
    copy_matrix(in, p.in_stride[2], p.in_stride[1], width, height, T(p.scale), out, p.rows);
    if (!p.addend) continue;
    const Out* addend = p.addend + n * p.addend_stride[0] + c * p.addend_stride[1] + r * p.addend_stride[2];
    for (int64_t i = 0; i < width; ++i)
      for (int64_t j = 0; j < height; ++j) {
        Out& sum = out[i * p.rows + j];
        sum = Out(T(sum) + T(addend[i * p.addend_stride[1] + j * p.addend_stride[2]]));
      }
  }
}

void transpose_range(const Problem<double, double>& p, int64_t begin, int64_t end) {
  transpose_blocks<double>(p, begin, end);
}
void transpose_range(const Problem<float, float>& p, int64_t begin, int64_t end) {
  transpose_blocks<float>(p, begin, end);
}
void transpose_range(const Problem<float, BFloat16>& p, int64_t begin, int64_t end) {
  transpose_blocks<float>(p, begin, end);
}
void transpose_range(const Problem<BFloat16, float>& p, int64_t begin, int64_t end) {
  transpose_blocks<float>(p, begin, end);
}
void transpose_range(const Problem<BFloat16, BFloat16>& p, int64_t begin, int64_t end) {
  transpose_blocks<float>(p, begin, end);
}
