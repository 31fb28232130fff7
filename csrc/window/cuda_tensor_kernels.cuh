// cuda_kernels.cuh's kernels on tensor cores, for half numbers.
//
// A warp has a tile of 16 queries (in the keys' gradients: keys): two rows of eight, or one row of 16, whose
// windows overlap tap on tap. It multiplies them with 16 keys of a row at a time; the products of queries and
// keys that are in no common window are masked, as are the weights (so an infinite value spoils its
// neighbours). Everything is in registers: the order of channels is the threads' own, since sums over
// channels have none.
#pragma once

#include "common/tensor_core.cuh"
#include "cuda_kernels.cuh"

namespace attn_plugins {

// Channels 0 ... WIDTH - 1 of rows, as operands of products.
template <class T, int WIDTH>
struct Tile {
  static constexpr int WORDS = WIDTH / 8;            // a lane's pairs of channels of one row
  static constexpr int CHUNK = WIDTH >= 32 ? 8 : 4;  // channels of one load of a row
  static constexpr int COLUMNS = WIDTH / 8;          // channels of a lane in products over rows
  const int group = int(threadIdx.x) % 32 / 4, member = int(threadIdx.x) % 4;  // g and c of tensor_core.cuh

  // A's rows g (or g + 8), or B's column g, of a product over channels.
  __device__ __forceinline__ void read(const T* row, bool present, int width,
                                       unsigned (&words)[WORDS]) const {
#pragma unroll
    for (int part = 0; part < WIDTH / (4 * CHUNK); ++part) {
      const int first = (part * 4 + member) * CHUNK;
      Vector<T, CHUNK> v;
      if (present && first < width) v = load_constant<T, CHUNK>(row + first);
      memcpy(words + part * (CHUNK / 2), &v, sizeof v);
    }
  }

  // sum (16 rows, 8 columns) += rows of `low` and `high` times rows of `right`.
  __device__ __forceinline__ void dots(float (&sum)[4], const unsigned (&low)[WORDS],
                                       const unsigned (&high)[WORDS], const unsigned (&right)[WORDS]) const {
#pragma unroll
    for (int k = 0; k < WORDS; k += 2) {
      multiply_add<T>(sum, low[k], high[k], low[k + 1], high[k + 1], right[k], right[k + 1]);
    }
  }

  // sum (16 rows, channels) += weights (16 rows, 16 places) times the rows of places first ... first + 15 of
  // a line.
  __device__ __forceinline__ void mix(float (&sum)[COLUMNS][4], const float (&weights)[2][4], const T* line,
                                      int distance, int first, Span present, int width) const {
    unsigned words[4][COLUMNS / 2];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int place = first + n / 2 * 8 + 2 * member + n % 2, channel = group * COLUMNS;
      Vector<T, COLUMNS> v;
      if (present.has(place) && channel < width) {
        v = load_constant<T, COLUMNS>(along(line, place, distance) + channel);
      }
      memcpy(words[n], &v, sizeof v);
    }
    const unsigned a0 = pack<T>(weights[0][0], weights[0][1]), a1 = pack<T>(weights[0][2], weights[0][3]);
    const unsigned a2 = pack<T>(weights[1][0], weights[1][1]), a3 = pack<T>(weights[1][2], weights[1][3]);
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      multiply_add<T>(sum[i], a0, a1, a2, a3, pair(words[0][i / 2], words[1][i / 2], i % 2),
                      pair(words[2][i / 2], words[3][i / 2], i % 2));
    }
  }

  // Row g of a sum over places, or row g + 8 where `half` is 1.
  __device__ __forceinline__ void write(T* row, int width, const float (&sum)[COLUMNS][4], int half,
                                        float factor) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int first = (2 * member + e) * COLUMNS;
      Vector<T, COLUMNS> v;
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) v.element[i] = narrow_to<T>(sum[i][2 * half + e] * factor);
      if (first < width) store(row + first, v);
    }
  }

 private:
  // The low halves of both words, or the high ones.
  static __device__ __forceinline__ unsigned pair(unsigned first, unsigned second, bool high) {
    return high ? first >> 16 | (second & 0xffff0000u) : (first & 0xffffu) | second << 16;
  }
};

__device__ __forceinline__ float greatest_of_four_lanes(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1, 32));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2, 32));
}

__device__ __forceinline__ float sum_of_four_lanes(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1, 32);
  return x + __shfl_xor_sync(0xffffffffu, x, 2, 32);
}

// Where a warp's tile is: places (y, x) of halves 0 and 1, steps being those of neighbours in the tile.
struct TilePlace {
  int b, m, y0, x0, y[2], x[2];
  bool exists, valid[2];
};

template <class T>
__device__ __forceinline__ TilePlace locate_tile(const WindowProblem<T>& p, int rows, int columns,
                                                 int row_step, int column_step, int group) {
  const int64_t index = int64_t(blockIdx.x) * (kThreads / 32) + int(threadIdx.x) / 32;
  const Place tile = locate(index, p.teams, p.M, p.rows, p.columns);
  TilePlace at;
  at.b = tile.b, at.m = tile.m, at.exists = tile.exists;
  at.y0 = spread(tile.y, row_step, p.tall ? 2 : 1), at.x0 = spread(tile.x, column_step, p.tall ? 8 : 16);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    at.y[h] = at.y0 + (p.tall ? h * row_step : 0);
    at.x[h] = at.x0 + (group + (p.tall ? 0 : 8 * h)) * column_step;
    at.valid[h] = at.exists && at.y[h] < rows && at.x[h] < columns;
  }
  return at;
}

template <class T, int WIDTH>
__global__ void __launch_bounds__(kThreads, 2) window_forward_tensor_kernel(const WindowProblem<T> p) {
  const Tile<T, WIDTH> tile;
  const TilePlace at = locate_tile(p, p.y.queries, p.x.queries, p.y.step, p.x.step, tile.group);
  if (!at.exists) return;
  const bool content = p.d > 0, biased = p.position.data != nullptr;
  unsigned query[2][tile.WORDS];
  float sum[tile.COLUMNS][4] = {}, top[2] = {kLowest, kLowest}, total[2] = {};
  const int columns = p.x.taps + (p.tall ? 7 : 15) * p.x.shift, column = at.x0 * p.x.stride - p.x.padding;
  const Span on_map = Span::on_axis(column, p.x.dilation, p.x.keys);
  const Span counting = p.zero_border ? Span{0, columns} : on_map;
  Span window[2];  // places of the line of keys that halves see
  // Pointers are carried from row to row, else the compiler computes each anew for every load.
  const T* position[2];  // the logit of place 0 of a key row
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int first = (tile.group + (p.tall ? 0 : 8 * h)) * p.x.shift, row = p.tall ? h * p.y.shift : 0;
    tile.read(p.query.at(at.b, at.m, at.y[h], at.x[h]), at.valid[h], p.d, query[h]);
    window[h] = counting.common(first, first + p.x.taps).only_if(at.valid[h]);
    position[h] = p.position.at(at.b, at.m, at.y[h], at.x[h]) - (row * p.x.taps + first) * p.position.channel;
  }
  const int64_t key_row = p.y.dilation * p.key.row, value_row = p.y.dilation * p.value.row;
  const int64_t position_row = p.x.taps * p.position.channel;
  const int rows = p.y.taps + (p.tall ? p.y.shift : 0);
  int row = at.y0 * p.y.stride - p.y.padding;
  const T* keys = p.key.at(at.b, at.m, row, column);
  const T* values = p.value.at(at.b, at.m, row, column);
  for (int i = 0; i < rows; ++i, row += p.y.dilation, keys += key_row, values += value_row,
           position[0] += position_row, position[1] += position_row) {
    const bool row_inside = within(row, p.y.keys);
    if (!row_inside && !p.zero_border) continue;
    const Span present = on_map.only_if(row_inside);
    Span seen[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      seen[h] = window[h].only_if(within(i - (p.tall ? h * p.y.shift : 0), p.y.taps));
    }
    for (int first = 0; first < columns; first += 16) {
      float logit[2][4] = {}, bias[2][4] = {}, greatest[2] = {-INFINITY, -INFINITY};
      if (biased) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {  // half h of the tile, and a place of the line
          const int h = n / 2 % 2, place = first + n / 4 * 8 + 2 * tile.member + n % 2;
          if (seen[h].has(place))
            bias[n / 4][n % 4] = load_one(along(position[h], place, int(p.position.channel)));
        }
      }
      if (content) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int place = first + 8 * n + tile.group;
          unsigned key[tile.WORDS];
          tile.read(along(keys, place, p.key_step), present.has(place), p.d, key);
          tile.dots(logit[n], query[0], query[1], key);
        }
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int h = n / 2 % 2, place = first + n / 4 * 8 + 2 * tile.member + n % 2;
        float& x = logit[n / 4][n % 4];
        x = seen[h].has(place) ? x * p.scale + bias[n / 4][n % 4] : -INFINITY;
        greatest[h] = fmaxf(greatest[h], x);
      }
      if (__any_sync(0xffffffffu, greatest[0] > top[0] + kSlack || greatest[1] > top[1] + kSlack)) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float next = fmaxf(top[h], greatest_of_four_lanes(greatest[h]));
          const float factor = exponential(top[h] - next);
          top[h] = next, total[h] *= factor;
#pragma unroll
          for (int c = 0; c < tile.COLUMNS; ++c) sum[c][2 * h] *= factor, sum[c][2 * h + 1] *= factor;
        }
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int h = n / 2 % 2;
        float& x = logit[n / 4][n % 4];
        x = exponential(x - top[h]);
        total[h] += x;
      }
      tile.mix(sum, logit, values, p.value_step, first, present, p.dv);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    total[h] = sum_of_four_lanes(total[h]);
    const bool empty = total[h] == 0;
    if (!at.valid[h]) continue;
    tile.write(p.output.at(at.b, at.m, at.y[h], at.x[h]), p.dv, sum, h, empty ? 0 : 1 / total[h]);
    if (tile.member == 0) {
      p.log_sum_exp[p.query_index(at.b, at.m, at.y[h], at.x[h])] = empty ? INFINITY : top[h] + logf(total[h]);
    }
  }
}

// Gradients of queries and position logits.
template <class T, int WIDTH>
__global__ void __launch_bounds__(kThreads, WIDTH > 32 ? 1 : 2)
    window_query_gradient_tensor_kernel(const WindowProblem<T> p) {
  const Tile<T, WIDTH> tile;
  const TilePlace at = locate_tile(p, p.y.queries, p.x.queries, p.y.step, p.x.step, tile.group);
  if (!at.exists) return;
  const bool content = p.d > 0, biased = p.position.data != nullptr;
  unsigned query[2][tile.WORDS], gradient[2][tile.WORDS];
  float sum[tile.COLUMNS][4] = {};
  Vector<float, 2> stats[2];
  const int columns = p.x.taps + (p.tall ? 7 : 15) * p.x.shift, column = at.x0 * p.x.stride - p.x.padding;
  const Span on_map = Span::on_axis(column, p.x.dilation, p.x.keys);
  const Span counting = p.zero_border ? Span{0, columns} : on_map;
  Span taps[2], window[2];  // of the line of keys; window: those taps that count
  const T* position[2];
  T* grad_position[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int first = (tile.group + (p.tall ? 0 : 8 * h)) * p.x.shift, row = p.tall ? h * p.y.shift : 0;
    tile.read(p.query.at(at.b, at.m, at.y[h], at.x[h]), at.valid[h], p.d, query[h]);
    tile.read(p.grad_output.at(at.b, at.m, at.y[h], at.x[h]), at.valid[h], p.dv, gradient[h]);
    if (at.valid[h]) {
      stats[h] = load_constant<float, 2>(p.stats + 2 * p.query_index(at.b, at.m, at.y[h], at.x[h]));
    }
    taps[h] = {first, at.valid[h] ? p.x.taps : 0};
    window[h] = counting.common(first, first + p.x.taps).only_if(at.valid[h]);
    const int tap = row * p.x.taps + first;
    position[h] = p.position.at(at.b, at.m, at.y[h], at.x[h]) - tap * p.position.channel;
    grad_position[h] = p.grad_position.at(at.b, at.m, at.y[h], at.x[h]) - tap * p.grad_position.channel;
  }
  const int64_t key_row = p.y.dilation * p.key.row, value_row = p.y.dilation * p.value.row;
  const int64_t position_row = p.x.taps * p.position.channel;
  const int64_t grad_position_row = p.x.taps * p.grad_position.channel;
  const int rows = p.y.taps + (p.tall ? p.y.shift : 0);
  int row = at.y0 * p.y.stride - p.y.padding;
  const T* keys = p.key.at(at.b, at.m, row, column);
  const T* values = p.value.at(at.b, at.m, row, column);
  for (int i = 0; i < rows; ++i, row += p.y.dilation, keys += key_row, values += value_row,
           position[0] += position_row, position[1] += position_row, grad_position[0] += grad_position_row,
           grad_position[1] += grad_position_row) {
    const bool row_inside = within(row, p.y.keys);
    if (!row_inside && !p.zero_border && !p.grad_position.data) continue;
    const Span present = on_map.only_if(row_inside);
    Span seen[2], written[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool in_window = within(i - (p.tall ? h * p.y.shift : 0), p.y.taps);
      seen[h] = window[h].only_if(in_window && (row_inside || p.zero_border));
      written[h] = taps[h].only_if(in_window && p.grad_position.data);
    }
    for (int first = 0; first < columns; first += 16) {
      float logit[2][4] = {}, slope[2][4] = {}, bias[2][4] = {};
      if (biased) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const int h = n / 2 % 2, place = first + n / 4 * 8 + 2 * tile.member + n % 2;
          if (seen[h].has(place))
            bias[n / 4][n % 4] = load_one(along(position[h], place, int(p.position.channel)));
        }
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int place = first + 8 * n + tile.group;
        const bool inside = present.has(place);
        unsigned words[tile.WORDS];
        if (content) {
          tile.read(along(keys, place, p.key_step), inside, p.d, words);
          tile.dots(logit[n], query[0], query[1], words);
        }
        tile.read(along(values, place, p.value_step), inside, p.dv, words);
        tile.dots(slope[n], gradient[0], gradient[1], words);
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int h = n / 2 % 2, place = first + n / 4 * 8 + 2 * tile.member + n % 2;
        const float x = logit[n / 4][n % 4] * p.scale + bias[n / 4][n % 4];
        float& s = slope[n / 4][n % 4];
        s = seen[h].has(place) ? exponential(x - stats[h].element[0]) * (s - stats[h].element[1]) : 0;
        if (written[h].has(place)) {
          *along(grad_position[h], place, int(p.grad_position.channel)) = narrow_to<T>(s);
        }
      }
      if (content) tile.mix(sum, slope, keys, p.key_step, first, present, p.d);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (p.grad_query.data && at.valid[h]) {
      tile.write(p.grad_query.at(at.b, at.m, at.y[h], at.x[h]), p.d, sum, h, p.scale);
    }
  }
}

// Gradients of keys and values.
template <class T, int WIDTH>
__global__ void __launch_bounds__(kThreads, WIDTH > 32 ? 1 : 2)
    window_key_gradient_tensor_kernel(const WindowProblem<T> p) {
  const Tile<T, WIDTH> tile;
  const TilePlace at = locate_tile(p, p.y.keys, p.x.keys, p.y.dilation, p.x.dilation, tile.group);
  if (!at.exists) return;
  const bool content = p.d > 0, biased = p.position.data != nullptr, slopes = p.grad_key.data != nullptr;
  unsigned key[2][tile.WORDS], value[2][tile.WORDS];
  float key_sum[tile.COLUMNS][4] = {}, value_sum[tile.COLUMNS][4] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    tile.read(p.key.at(at.b, at.m, at.y[h], at.x[h]), at.valid[h], p.d, key[h]);
    tile.read(p.value.at(at.b, at.m, at.y[h], at.x[h]), at.valid[h], p.dv, value[h]);
  }
  const Reach row_reach(p.y, at.y0), column_reach(p.x, at.x0);
  const bool any = row_reach.exists && column_reach.exists;
  const int column = column_reach.query, places = (p.x.taps + (p.tall ? 7 : 15) + p.x.shift - 1) / p.x.shift;
  const Span on_map = Span::on_axis(column, p.x.step, p.x.queries);
  Span window[2];  // of the line of queries; place l sees the first key by tap - l * shift
  int tap[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    tap[h] = column_reach.tap + tile.group + (p.tall ? 0 : 8 * h);
    const Span reach =
        Span::on_axis(p.x.taps - 1 - tap[h], p.x.shift, p.x.taps);  // taps - 1 - tap is on the kernel
    window[h] = on_map.common(reach.first, reach.first + reach.count).only_if(at.valid[h]);
  }
  const int64_t query_row = p.y.step * p.query.row, gradient_row = p.y.step * p.grad_output.row;
  const int64_t position_row = p.y.step * p.position.row - p.y.shift * p.x.taps * p.position.channel;
  const int64_t stats_row = 2 * int64_t(p.y.step) * p.x.queries;
  int y = row_reach.query;
  const T* queries = p.query.at(at.b, at.m, y, column);
  const T* gradients = p.grad_output.at(at.b, at.m, y, column);
  const float* stats = p.stats + 2 * p.query_index(at.b, at.m, y, column);
  const T* position[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int tap_row = row_reach.tap + (p.tall ? h : 0);
    position[h] = p.position.at(at.b, at.m, y, column) + (tap_row * p.x.taps + tap[h]) * p.position.channel;
  }
  for (int i = 0; any && i * p.y.shift < p.y.taps + (p.tall ? 1 : 0); ++i, y += p.y.step,
           queries += query_row, gradients += gradient_row, stats += stats_row, position[0] += position_row,
           position[1] += position_row) {
    if (!within(y, p.y.queries)) continue;
    Span seen[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      seen[h] = window[h].only_if(within(row_reach.tap - i * p.y.shift + (p.tall ? h : 0), p.y.taps));
    }
    for (int first = 0; first < places; first += 16) {
      float logit[2][4] = {}, slope[2][4] = {}, bias[2][4] = {};
      if (biased) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const int h = n / 2 % 2, place = first + n / 4 * 8 + 2 * tile.member + n % 2;
          if (seen[h].has(place)) bias[n / 4][n % 4] = load_one(along(position[h], place, p.position_step));
        }
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int place = first + 8 * n + tile.group;
        const bool inside = on_map.has(place);
        unsigned words[tile.WORDS];
        if (content) {
          tile.read(along(queries, place, p.query_step), inside, p.d, words);
          tile.dots(logit[n], key[0], key[1], words);
        }
        if (slopes) {
          tile.read(along(gradients, place, p.gradient_step), inside, p.dv, words);
          tile.dots(slope[n], value[0], value[1], words);
        }
      }
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int place = first + m / 2 * 8 + 2 * tile.member + m % 2;
        Vector<float, 2> known;
        if (on_map.has(place)) known = load_constant<float, 2>(along(stats, place, 2 * p.x.step));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float &w = logit[m / 2][2 * h + m % 2], &s = slope[m / 2][2 * h + m % 2];
          const float x = w * p.scale + bias[m / 2][2 * h + m % 2];
          w = seen[h].has(place) ? exponential(x - known.element[0]) : 0;
          s = w * (s - known.element[1]);
        }
      }
      if (p.grad_value.data) tile.mix(value_sum, logit, gradients, p.gradient_step, first, on_map, p.dv);
      if (slopes) tile.mix(key_sum, slope, queries, p.query_step, first, on_map, p.d);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (!at.valid[h]) continue;
    if (p.grad_key.data) tile.write(p.grad_key.at(at.b, at.m, at.y[h], at.x[h]), p.d, key_sum, h, p.scale);
    if (p.grad_value.data) tile.write(p.grad_value.at(at.b, at.m, at.y[h], at.x[h]), p.dv, value_sum, h, 1);
  }
}

}  // namespace attn_plugins
