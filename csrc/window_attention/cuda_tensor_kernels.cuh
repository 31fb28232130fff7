// cuda_kernels.cuh's kernels on tensor cores, for half numbers.
//
// A warp has a tile of 16 queries (in the keys' gradients: keys), whose windows overlap tap on tap. It
// multiplies them with 16 keys of a row at a time; the products of queries and keys that are in no common
// window are masked. Operands stay in registers; only position logits use shared memory. The order of
// channels is arbitrary, because they are summed over.
//
// A masked weight 0 times an infinite value gives NaN. A warp whose sums are infinite or NaN therefore
// recomputes its tile with the functions of cuda_kernels.cuh, which skip keys outside the windows. The same
// happens if gradients of logits, packed to float16 relative to the gradient of the output, overflow.
#pragma once

#include "cuda_gradient_kernels.cuh"
#include "cuda_tile_lines.cuh"

namespace attn_plugins {

template <class T, int WIDTH, Logits LOGITS, bool CONTENT>
__global__ void __launch_bounds__(kThreads, 2) window_forward_tensor_kernel(const WindowProblem<T> p) {
  const Tile<T, WIDTH> tile;
  const TileMap map = TileMap::of_queries(p);
  const TilePlace at = locate_tile(p, map);
  if (!at.exists) return;
  using Distances = typename Tile<T, WIDTH>::Distances;
  const Distances key_distances(p.key_step), value_distances(p.value_step);
  TileLogits<T, LOGITS> logits(p, at);
  unsigned query[2][tile.WORDS];
  // top: the logit that weights are relative to, at most kSlack below the greatest; shift: it in powers of
  // two.
  float sum[tile.COLUMNS][4] = {}, total[2] = {}, top[2] = {-INFINITY, -INFINITY}, shift[2] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    tile.read_row(p.query.at(at.b, at.m, at.y[h], at.x[h]), at.valid[h], p.d, query[h]);
  }
  for (int first = 0; first < line_length(p); first += 16) {
    const TilePlace here = at.again(map);
    const KeyLines<T> lines(p, here, tile.group, false);
    const int place = first + 2 * tile.member;
    // Bits of what is there: rows of keys, columns of values, weights.
    const unsigned columns_there = tile.has_column(p.dv) ? tile.places_there(lines.on_map, first) : 0;
    unsigned all_there = tile.rows_there(lines.on_map, first, p.d) | columns_there << 8 |
                         elements_in(lines.window, place) << 16;
    keep(all_there);
    const T* const keys = tile.row_of(lines.keys, first, p.key_step);
    const T* const values = tile.column_of(lines.values, first, p.value_step);
    logits.begin(p, here, lines, tile.group, place);
    for (int i = lines.rows.first; i < lines.rows.first + lines.rows.count; ++i) {
      // Outside of the map keys and values are zeros.
      const unsigned there = lines.rows_on_map.has(i) ? all_there : all_there & 0xffff0000u;
      float logit[2][4] = {}, bias[2][4], greatest[2] = {-INFINITY, -INFINITY};
      if (CONTENT) {
        unsigned words[2][tile.WORDS];
        tile.read_two(go(keys, i, p.key_bytes), key_distances, there, words);
        tile.dots(logit, query, words);
      }
      const auto columns = tile.columns(go(values, i, p.value_bytes), value_distances, there >> 8);
      logits.read(p, i, there >> 16 & elements_of(i < p.y.taps, i >= lines.row_tap[1]), bias);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        float& x = logit[n / 4][n % 4];
        x = x * p.scale + bias[n / 4][n % 4];
        greatest[n / 2 % 2] = fmaxf(greatest[n / 2 % 2], x);
      }
      if (__any_sync(0xffffffffu, greatest[0] > top[0] + kSlack || greatest[1] > top[1] + kSlack)) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float next = fmaxf(top[h], greatest_of_four_lanes(greatest[h]));
          const float next_shift = fmaxf(next, kLowestTop) * kLog2E;
          const float factor = top[h] > -INFINITY ? power_of_two(shift[h] - next_shift) : 1;  // 1: of 0
          top[h] = next, shift[h] = next_shift, total[h] *= factor;
#pragma unroll
          for (int c = 0; c < tile.COLUMNS; ++c) sum[c][2 * h] *= factor, sum[c][2 * h + 1] *= factor;
        }
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int h = n / 2 % 2;
        float& x = logit[n / 4][n % 4];
        x = power_of_two(x * kLog2E - shift[h]);
        total[h] += x;
      }
      unsigned packed[4];
      pack_weights<T>(logit, packed);
      tile.mix(sum, packed, columns);
    }
  }
  float trace = trace_of_infinite(sum);
  bool lost = false;  // all logits are finite, but too low for their powers
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    total[h] = sum_of_four_lanes(total[h]), trace += 0 * total[h];
    lost = lost || (total[h] == 0 && top[h] > -INFINITY);
  }
  if (__any_sync(0xffffffffu, trace != 0 || lost)) {
    for_tile_places(map, at, [&](const Place& place) {
      window_forward<1>(p, Team<32, 1, (WIDTH + 31) / 32>(32), place);
    });
    return;
  }
  const TilePlace to = at.again(map);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool empty = total[h] == 0;
    if (!to.valid[h]) continue;
    tile.write(p.output.at(to.b, to.m, to.y[h], to.x[h]), p.dv, sum, h, empty ? 0 : 1 / total[h]);
    if (tile.member == 0) {
      p.log_sum_exp[p.query_index(to.b, to.m, to.y[h], to.x[h])] = empty ? INFINITY : top[h] + logf(total[h]);
    }
  }
}

// Gradients of queries and position logits.
template <class T, int WIDTH, Logits LOGITS, bool CONTENT>
__global__ void __launch_bounds__(kThreads, WIDTH > 32 ? 1 : 2)
    window_query_gradient_tensor_kernel(const WindowProblem<T> p) {
  constexpr bool kScaled = std::is_same_v<T, __half>;  // slopes: bfloat16 has float's range
  const Tile<T, WIDTH> tile;
  const TileMap map = TileMap::of_queries(p);
  const TilePlace at = locate_tile(p, map);
  if (!at.exists) return;
  using Distances = typename Tile<T, WIDTH>::Distances;
  const Distances key_distances(p.key_step), value_distances(p.value_step);
  const int key_column = tile.row_to_column(p.key_step);
  unsigned query[2][tile.WORDS], gradient[2][tile.WORDS];
  // shift: of weights in powers of two; mean: of slopes; unscale: of both's products.
  float shift[2] = {}, mean[2] = {}, unscale[2] = {1, 1};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    tile.read_row(p.query.at(at.b, at.m, at.y[h], at.x[h]), at.valid[h], p.d, query[h]);
    tile.read_row(p.grad_output.at(at.b, at.m, at.y[h], at.x[h]), at.valid[h], p.dv, gradient[h]);
    if (!at.valid[h]) continue;
    const int64_t query_index = p.query_index(at.b, at.m, at.y[h], at.x[h]);
    const auto stats = load<float, 2>(p.stats + 2 * query_index);
    const int exponent = kScaled ? exponent_of(load_one(p.peaks + query_index)) : 0;
    shift[h] = stats.element[0] * kLog2E + float(exponent), mean[h] = stats.element[1];
    unscale[h] = whole_power_of_two(exponent);
  }
  RowSums<T> sums[2];
  while (true) {
    TileLogits<T, LOGITS> logits(p, at.again(map));
    float sum[tile.COLUMNS][4] = {};
    for (int first = 0; first < line_length(p); first += 16) {
      const TilePlace here = at.again(map);
      const KeyLines<T> lines(p, here, tile.group, p.grad_position_logits.data != nullptr);
      Span taps[2];  // of the line, as far as their gradients are wanted
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        taps[h] = Span{lines.first[h], p.x.taps}.only_if(here.valid[h] && p.grad_position_logits.data);
      }
      const int place = first + 2 * tile.member;
      // Bits of what is there: rows of keys, of values, columns of keys, weights, the tile's own taps.
      const unsigned columns_there = tile.has_column(p.d) ? tile.places_there(lines.on_map, first) : 0;
      unsigned all_there = tile.rows_there(lines.on_map, first, p.d) |
                           tile.rows_there(lines.on_map, first, p.dv) << 4 | columns_there << 8 |
                           elements_in(lines.window, place) << 16 | elements_in(taps, place) << 24;
      keep(all_there);
      const T* const keys = tile.row_of(lines.keys, first, p.key_step);
      const T* const values = tile.row_of(lines.values, first, p.value_step);
      logits.begin(p, here, lines, tile.group, place);
      T* targets[2];  // without a stage, of row 0
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int64_t tap = place - lines.first[h] - lines.row_tap[h] * p.x.taps;
        targets[h] = p.grad_position_logits.at(here.b, here.m, here.y[h], here.x[h]) +
                     tap * p.grad_position_logits.channel;
      }
      for (int i = lines.rows.first; i < lines.rows.first + lines.rows.count; ++i) {
        // Outside of the map keys and values are zeros.
        const bool on_map = lines.rows_on_map.has(i);
        const unsigned there =
            on_map ? all_there : all_there & (p.border == Border::kZero ? 0xffff0000u : 0xff000000u);
        float logit[2][4] = {}, slope[2][4], bias[2][4];
        unsigned words[2][tile.WORDS];
        tile.read_two(go(values, i, p.value_bytes), value_distances, there >> 4, words);
        if (CONTENT) {
          unsigned key_words[2][tile.WORDS];
          tile.read_two(go(keys, i, p.key_bytes), key_distances, there, key_words);
          tile.dots(logit, query, key_words);
        }
        tile.dots(slope, gradient, words);
        const T* const key_columns = go(go(keys, i, p.key_bytes), key_column, sizeof(T));
        const auto columns = tile.columns(key_columns, key_distances, there >> 8);
        const unsigned in_row = elements_of(i < p.y.taps, i >= lines.row_tap[1]);
        logits.read(p, i, there >> 16 & in_row, bias);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const int h = n / 2 % 2;
          const float x = logit[n / 4][n % 4] * p.power_scale - shift[h];
          float& s = slope[n / 4][n % 4];
          const float weight = power_of_two(bias[n / 4][n % 4] * kLog2E + x);
          s = weight * (s - mean[h]);
          sums[h].add(weight, s);
        }
        unsigned packed[4];
        pack_weights<T>(slope, packed);
        if (CONTENT) tile.mix(sum, packed, columns);
        if (LOGITS == Logits::kNone || !p.grad_position_logits.data) continue;
        if (kScaled) {
#pragma unroll
          for (int n = 0; n < 8; ++n) slope[n / 4][n % 4] *= unscale[n / 2 % 2];
          pack_weights<T>(slope, packed);
        }
        const unsigned written = there >> 24 & in_row;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const int h = n / 2 % 2, offset = n / 4 * 8 + n % 2;
          if (!(written >> n & 1)) continue;
          Vector<T, 2> pair;
          pair.word = packed[n / 4 * 2 + h];
          if (LOGITS == Logits::kStaged) {
            logits.staged(h)[offset] = pair.element[n % 2];
          } else {
            *go(targets[h], i * p.x.taps + offset, int(p.grad_position_logits.channel * sizeof(T))) =
                pair.element[n % 2];
          }
        }
      }
    }
    float trace = trace_of_infinite(sum);
    bool unsettled = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sums[h].drift = sum_of_four_lanes(sums[h].drift), sums[h].size = sum_of_four_lanes(sums[h].size);
      sums[h].weights = sum_of_four_lanes(sums[h].weights);
      trace += 0 * sums[h].drift, unsettled = unsettled || sums[h].unsettled();
    }
    if (__any_sync(0xffffffffu, trace != 0)) {
      for_tile_places(map, at, [&](const Place& place) {
        window_query_gradient<1>(p, Team<32, 1, (WIDTH + 31) / 32>(32), place);
      });
      return;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) mean[h] += sums[h].missing();
    __syncwarp();  // before logits replace gradients in shared memory, and what all lanes have read is
                   // written
    if (__any_sync(0xffffffffu, unsettled)) {
      sums[0].restart(), sums[1].restart();
      continue;
    }
    const TilePlace to = at.again(map);
    if (LOGITS == Logits::kStaged && p.grad_position_logits.data) logits.stage.flush(p, to);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (!to.valid[h]) continue;
      if (tile.member == 0) stats_of(p, to.b, to.m, to.y[h], to.x[h])[1] = mean[h];
      if (p.grad_query.data) {
        tile.write(p.grad_query.at(to.b, to.m, to.y[h], to.x[h]), p.d, sum, h, p.scale * unscale[h]);
      }
    }
    return;
  }
}

// Gradients of keys and values.
template <class T, int WIDTH, Logits LOGITS, bool CONTENT>
__global__ void __launch_bounds__(kThreads, WIDTH > 32 ? 1 : 2)
    window_key_gradient_tensor_kernel(const WindowProblem<T> p) {
  const Tile<T, WIDTH> tile;
  const TileMap map = TileMap::of_keys(p);
  const TilePlace at = locate_tile(p, map);
  if (!at.exists) return;
  unsigned key[2][tile.WORDS], value[2][tile.WORDS];
  float key_sum[tile.COLUMNS][4] = {}, value_sum[tile.COLUMNS][4] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    tile.read_row(p.key.at(at.b, at.m, at.y[h], at.x[h]), at.valid[h], p.d, key[h]);
    tile.read_row(p.value.at(at.b, at.m, at.y[h], at.x[h]), at.valid[h], p.dv, value[h]);
  }
  using Distances = typename Tile<T, WIDTH>::Distances;
  const Distances query_distances(p.query_step), gradient_distances(p.gradient_step);
  const Distances stats_distances(2 * p.x.dilation);
  const Distances position_distances(p.position_step);
  const int query_column = tile.row_to_column(p.query_step),
            gradient_column = tile.row_to_column(p.gradient_step);
  // Slopes of float16 are packed relative to this power of two.
  int exponent = 0;
  if (CONTENT && std::is_same_v<T, __half>) {
    exponent = exponent_of(QueryLines<T>(p, at, tile.group).greatest_peak(p, at));
  }
  const float scale = whole_power_of_two(-exponent);
  for (int first = 0; first < line_length(p); first += 16) {
    const TilePlace here = at.again(map);
    const QueryLines<T> lines(p, here, tile.group);
    const int place = first + 2 * tile.member;
    // Bits of what is there: rows of queries, of gradients, their columns, statistics, weights.
    const unsigned places_there = tile.places_there(lines.on_map, first);
    unsigned there =
        tile.rows_there(lines.on_map, first, p.d) | tile.rows_there(lines.on_map, first, p.dv) << 4 |
        (tile.has_column(p.d) ? places_there << 8 : 0) | (tile.has_column(p.dv) ? places_there << 12 : 0) |
        places_there << 16 | elements_in(lines.window, place) << 24;
    keep(there);
    // Of the first row of such queries; each turn moves them to the next row.
    const int row = lines.rows.first;
    const T* queries = go(tile.row_of(p.query.at(here.b, here.m, lines.y, lines.x), first, p.query_step), row,
                          p.query_bytes);
    const T* gradients =
        go(tile.row_of(p.grad_output.at(here.b, here.m, lines.y, lines.x), first, p.gradient_step), row,
           p.gradient_bytes);
    const float* stats =
        go(along(p.stats + 2 * p.query_index(here.b, here.m, lines.y, lines.x), place, 2 * p.x.dilation), row,
           p.stats_bytes);
    const int64_t tap = lines.row_tap * p.x.taps + lines.tap;
    const T* position = go(p.position_logits.at(here.b, here.m, lines.y, lines.x) +
                               tap * p.position_logits.channel + int64_t(place) * p.position_step,
                           row, p.position_bytes);
    int tap_row = lines.row_tap - row;
    const int end = tap_row - lines.rows.count;
    for (; tap_row > end; --tap_row) {
      const bool counts = within(tap_row, p.y.taps);
      const unsigned seen =
          there >> 24 & elements_of(counts, p.tall ? within(tap_row + 1, p.y.taps) : counts);
      float logit[2][4] = {}, slope[2][4] = {}, bias[2][4];
      // The same query sees half 1's keys by later taps. A lane's logits are those of eight queries, whose
      // taps differ: no two are neighbors in memory, so each is loaded alone.
      const T* const logits[2] = {position,
                                  position + (p.tall ? p.x.taps : 8) * int(p.position_logits.channel)};
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        float& x = bias[n / 4][n % 4];
        x = -INFINITY;
        if (seen >> n & 1) {
          x = LOGITS == Logits::kNone
                  ? 0
                  : load_one(go(logits[n / 2 % 2], position_distances.of[n / 4 * 2 + n % 2], sizeof(T)));
        }
      }
      if (CONTENT) {
        unsigned words[2][tile.WORDS], gradient_words[2][tile.WORDS];
        tile.read_two(queries, query_distances, there, words);
        tile.read_two(gradients, gradient_distances, there >> 4, gradient_words);
        tile.dots(logit, key, words);
        tile.dots(slope, value, gradient_words);
      }
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        Vector<float, 2> known;
        if (there >> (16 + m) & 1) {
          known = load_constant<float, 2>(go(stats, stats_distances.of[m], sizeof(float)));
        }
        const float shift = known.element[0] * kLog2E, product = known.element[1] * scale;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float &w = logit[m / 2][2 * h + m % 2], &s = slope[m / 2][2 * h + m % 2];
          const float x = w * p.power_scale - shift;
          w = power_of_two(bias[m / 2][2 * h + m % 2] * kLog2E + x);
          s = w * (s * scale - product);
        }
      }
      unsigned packed[4];
      const auto columns =
          tile.columns(go(gradients, gradient_column, sizeof(T)), gradient_distances, there >> 12);
      pack_weights<T>(logit, packed);
      tile.mix(value_sum, packed, columns);
      if (CONTENT) {
        const auto query_words =
            tile.columns(go(queries, query_column, sizeof(T)), query_distances, there >> 8);
        pack_weights<T>(slope, packed);
        tile.mix(key_sum, packed, query_words);
      }
      queries = next(queries, p.query_bytes), gradients = next(gradients, p.gradient_bytes);
      stats = next(stats, p.stats_bytes), position = next(position, p.position_bytes);
    }
  }
  if (__any_sync(0xffffffffu, trace_of_infinite(key_sum) + trace_of_infinite(value_sum) != 0)) {
    for_tile_places(map, at, [&](const Place& place) {
      window_key_gradient<1>(p, Team<32, 1, (WIDTH + 31) / 32>(32), place);
    });
    return;
  }
  const TilePlace to = at.again(map);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (!to.valid[h]) continue;
    if (p.grad_key.data) {
      tile.write(p.grad_key.at(to.b, to.m, to.y[h], to.x[h]), p.d, key_sum, h,
                 p.scale * whole_power_of_two(-exponent_of(scale)));
    }
    if (p.grad_value.data) tile.write(p.grad_value.at(to.b, to.m, to.y[h], to.x[h]), p.dv, value_sum, h, 1);
  }
}

}  // namespace attn_plugins
