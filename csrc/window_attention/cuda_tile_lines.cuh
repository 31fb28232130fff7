// Rows of keys, with their position logits, that a tile of queries visits, and rows of queries that a tile of
// keys visits.
#pragma once

#include "cuda_tile.cuh"

namespace attn_plugins {

// 2^exponent, -126 <= exponent <= 127.
__device__ __forceinline__ float whole_power_of_two(int exponent) {
  Vector<float, 1> power;
  power.word = unsigned(exponent + 127) << 23;
  return power.element[0];
}

// Returns the exponent of the largest power of two <= x, for x >= 0; 0 for x = 0, infinity and NaN.
__device__ __forceinline__ int exponent_of(float x) {
  Vector<float, 1> power;
  power.element[0] = x;
  const int exponent = int(power.word >> 23);
  return exponent == 0 || exponent == 255 ? 0 : exponent - 127;
}

// Of the line of keys that the windows of a tile of queries share, and of queries that see a tile of keys.
template <class T>
__device__ __forceinline__ int line_length(const WindowProblem<T>& p) {
  return p.x.taps + (p.tall ? 7 : 15);
}

// The line of keys that the windows of a tile of queries share, and the rows of such lines.
template <class T>
struct KeyLines {
  int first[2], row_tap[2];  // of halves: where their windows begin on the line, and on the column
  Span on_map, window[2], rows, rows_on_map;
  const T *keys, *values;  // row 0, place 0

  __device__ __forceinline__ KeyLines(const WindowProblem<T>& p, const TilePlace& at, int group,
                                      bool all_rows) {
    const int column = at.x0 - p.x.padding, row = at.y0 - p.y.padding;
    on_map = Span::on_axis(column, p.x.by_dilation, p.x.keys);
    const Span all{0, p.y.taps + (p.tall ? 1 : 0)};
    rows_on_map = Span::on_axis(row, p.y.by_dilation, p.y.keys).common(0, all.count);
    rows = p.border == Border::kZero || all_rows ? all : rows_on_map;
    const Span counting = p.border == Border::kZero ? Span{0, line_length(p)} : on_map;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      first[h] = group + (p.tall ? 0 : 8 * h), row_tap[h] = p.tall ? h : 0;
      window[h] = counting.common(first[h], first[h] + p.x.taps).only_if(at.valid[h]);
    }
    keys = p.key.at(at.b, at.m, row, column), values = p.value.at(at.b, at.m, row, column);
    keep(row_tap[1]);
  }
};

// Masks of a lane's eight elements in a chunk of a line: bit n belongs to half n / 2 % 2, position
// n / 4 * 8 + 2 member + n % 2. The elements that lie in windows:
__device__ __forceinline__ unsigned elements_in(const Span (&window)[2], int place) {
  unsigned bits = 0;
#pragma unroll
  for (int n = 0; n < 8; ++n) bits |= unsigned(window[n / 2 % 2].has(place + n / 4 * 8 + n % 2)) << n;
  return bits;
}
// The elements of each half:
__device__ __forceinline__ unsigned elements_of(bool half_0, bool half_1) {
  return (half_0 ? 0x33 : 0) | (half_1 ? 0xcc : 0);
}

// The position logits of a tile of queries, at a lane's elements of a chunk.
template <class T, Logits LOGITS>
struct TileLogits {
  Stage<T> stage;
  const T* direct[2];
  int index[2], offset[2];  // bytes of shared memory: of row 0, of the row that was read

  __device__ __forceinline__ TileLogits(const WindowProblem<T>& p, const TilePlace& at) : stage(p) {
    if (LOGITS == Logits::kStaged) stage.fill(p, at);
  }

  // To the chunk that begins with this place of the lane.
  __device__ __forceinline__ void begin(const WindowProblem<T>& p, const TilePlace& at,
                                        const KeyLines<T>& lines, int group, int place) {
    const int taps = p.y.taps * p.x.taps;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int tap = place - lines.first[h] - lines.row_tap[h] * p.x.taps;
      if (LOGITS == Logits::kStaged) {
        index[h] = (stage.first[h] + group * taps + tap) * int(sizeof(T));
        keep(index[h]);
      }
      direct[h] =
          p.position_logits.at(at.b, at.m, at.y[h], at.x[h]) + int64_t(tap) * p.position_logits.channel;
    }
  }

  // In shared memory, the logits at the lane's places of half h, after `read`.
  __device__ __forceinline__ T* staged(int h) const {
    return reinterpret_cast<T*>(static_cast<char*>(shared_memory()) + offset[h]);
  }

  // Of key row i, for these elements; -inf for others.
  __device__ __forceinline__ void read(const WindowProblem<T>& p, int i, unsigned seen, float (&bias)[2][4]) {
    if (LOGITS == Logits::kStaged) {
#pragma unroll
      for (int h = 0; h < 2; ++h) offset[h] = index[h] + i * p.x.taps * int(sizeof(T)), keep(offset[h]);
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int h = n / 2 % 2, place = n / 4 * 8 + n % 2;
      float& x = bias[n / 4][n % 4];
      x = -INFINITY;
      if (!(seen >> n & 1)) continue;
      if constexpr (LOGITS == Logits::kNone) {
        x = 0;
      } else if constexpr (LOGITS == Logits::kStaged) {
        x = widen(staged(h)[place]);
      } else {
        x = load_one(direct[h] + (int64_t(i) * p.x.taps + place) * p.position_logits.channel);
      }
    }
  }
};

// The line of queries that see a tile of keys, and the rows of such lines. Place l sees the lane's key of
// half 0 by tap - l; rows likewise.
template <class T>
struct QueryLines {
  int x, y, tap, row_tap;  // of place 0 and row 0
  Span on_map, window[2], rows;

  __device__ __forceinline__ QueryLines(const WindowProblem<T>& p, const TilePlace& at, int group) {
    row_tap = p.y.taps - 1, tap = p.x.taps - 1 + group;
    y = at.y0 + p.y.padding - row_tap * p.y.dilation;
    x = at.x0 + p.x.padding - (p.x.taps - 1) * p.x.dilation;
    on_map = Span::on_axis(x, p.x.by_dilation, p.x.queries).common(0, line_length(p));
    rows = Span::on_axis(y, p.y.by_dilation, p.y.queries).common(0, p.y.taps + (p.tall ? 1 : 0));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int first = group + (p.tall ? 0 : 8 * h);
      window[h] = on_map.common(first, first + p.x.taps).only_if(at.valid[h]);
    }
  }

  // The greatest magnitude in the gradients of these queries' outputs; for all of the warp.
  __device__ __forceinline__ float greatest_peak(const WindowProblem<T>& p, const TilePlace& at) const {
    float peak = 0;
    for (int i = rows.first; i < rows.first + rows.count; ++i) {
      const float* peaks = p.peaks + p.query_index(at.b, at.m, y + i * p.y.dilation, x);
      for (int n = int(threadIdx.x) % 32; n < on_map.count; n += 32) {
        peak = fmaxf(peak, load_one(along(peaks, on_map.first + n, p.x.dilation)));
      }
    }
#pragma unroll
    for (int bits = 16; bits > 0; bits /= 2) {
      peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, bits, 32));
    }
    return peak;
  }
};

}  // namespace attn_plugins
