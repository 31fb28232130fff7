// Transposition of a batch of matrices in tiles that stay in the L1 cache.
#pragma once

#include <algorithm>

#include "tensor_ops.h"

namespace attn_plugins {

// Transposes the tile of in (pixels, channels) at (row, column) into out (channels, pixels).
template <class Out, class In>
void transpose_tile(Out* __restrict out, const In* __restrict in, int64_t pixels, int64_t channels,
                    int64_t row, int64_t column) {
  constexpr int64_t tile = 16;
  const int64_t rows = std::min(tile, pixels - row), columns = std::min(tile, channels - column);
  for (int64_t c = 0; c < columns; ++c) {
    Out* to = out + (column + c) * pixels + row;
    const In* from = in + row * channels + column + c;
    for (int64_t r = 0; r < rows; ++r) to[r] = Out(from[r * channels]);
  }
}

template <class Out, class In>
void transpose_images(Out* out, const In* in, int64_t images, int64_t pixels, int64_t channels) {
  const int64_t strips = (pixels + 15) / 16;
  torch::stable::parallel_for(0, images * strips, 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t image = i / strips * pixels * channels;
      for (int64_t c = 0; c < channels; c += 16) {
        transpose_tile(out + image, in + image, pixels, channels, i % strips * 16, c);
      }
    }
  });
}

}  // namespace attn_plugins
