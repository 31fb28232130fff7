// Registers and shared memory of a warp of window attention's tensor kernels: a tile of 16 positions (two
// rows of eight, or one of 16), the operands of its products, and the position logits of its queries.
#pragma once

#include "common/tensor_core.cuh"
#include "cuda_team.cuh"

namespace attn_plugins {

// How kernels read position logits: not at all; from shared memory, after a warp has copied those of its
// tile; directly from global memory, if shared memory is too small for them.
enum class Logits { kNone, kStaged, kDirect };

constexpr int kTileRow = 8;             // places of a half of a tile, one per group of four lanes
constexpr int kSharedBytes = 48 << 10;  // available to every block on every device
constexpr int kWarps = kThreads / 32;

// Returns the number of shared elements for a warp's logits of `taps` taps, with room to align both halves as
// their global memory is.
constexpr int64_t staged_elements(int64_t taps) {
  return 2 * (kTileRow * taps + 8);
}

// Dynamic shared memory.
__device__ __forceinline__ void* shared_memory() {
  extern __shared__ uint4 window_shared_memory[];
  return window_shared_memory;
}

// Returns the low, or the high, halves of two words as one word.
__device__ __forceinline__ unsigned low_halves(unsigned first, unsigned second) {
  return __byte_perm(first, second, 0x5410);
}
__device__ __forceinline__ unsigned high_halves(unsigned first, unsigned second) {
  return __byte_perm(first, second, 0x7632);
}

// Channels 0 ... WIDTH - 1 of rows, as operands of products. A line is a row of a map, seen from its place 0
// on; each lane has its own pointer into it.
template <class T, int WIDTH>
struct Tile {
  static constexpr int WORDS = WIDTH / 8;            // a lane's pairs of channels of one row
  static constexpr int CHUNK = WIDTH >= 32 ? 8 : 4;  // channels of one load of a row
  static constexpr int PARTS = WIDTH / (4 * CHUNK);  // loads of a row
  static constexpr int COLUMNS = WIDTH / 8;          // channels of a lane in products over rows
  const int group = int(threadIdx.x) % 32 / 4, member = int(threadIdx.x) % 4;  // g and c of tensor_core.cuh

  // Elements along a line from a lane's first place to its others.
  struct Distances {
    int of[4];

    __device__ __forceinline__ explicit Distances(int step, int start = 0)
        : of{start, start + step, start + 8 * step, start + 9 * step} {
      keep(of[1]), keep(of[2]), keep(of[3]);
    }
  };

  // Places of a lane: `group` and 8 places on in products over channels; these four in products over places.
  __device__ __forceinline__ int pair_place(int n) const { return n / 2 * 8 + 2 * member + n % 2; }

  // Returns the lane's pointer into row `group` of a line.
  __device__ __forceinline__ const T* row_of(const T* line, int first, int distance) const {
    return line + int64_t(first + group) * distance + member * CHUNK;
  }
  // Returns the lane's pointer to the channels of its column at its first position.
  __device__ __forceinline__ const T* column_of(const T* line, int first, int distance) const {
    return line + int64_t(first + 2 * member) * distance + group * COLUMNS;
  }
  // Returns the element offset between the two pointers above.
  __device__ __forceinline__ int row_to_column(int distance) const {
    int elements = (2 * member - group) * distance + group * COLUMNS - member * CHUNK;
    keep(elements);
    return elements;
  }

  // Returns a mask: bit n * PARTS + part is set if that part of row `group` + 8 n exists.
  __device__ __forceinline__ unsigned rows_there(Span present, int first, int width) const {
    unsigned there = 0;
#pragma unroll
    for (int n = 0; n < 2 * PARTS; ++n) {
      const int place = first + n / PARTS * 8 + group, channel = (n % PARTS * 4 + member) * CHUNK;
      there |= unsigned(present.has(place) && channel < width) << n;
    }
    return there;
  }
  // Returns a mask: bit n is set if position n of the column exists.
  __device__ __forceinline__ unsigned places_there(Span present, int first) const {
    unsigned there = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) there |= unsigned(present.has(first + pair_place(n))) << n;
    return there;
  }
  __device__ __forceinline__ bool has_column(int width) const { return group * COLUMNS < width; }

  // A's rows g (or g + 8), or B's column g, of a product over channels; bit `part` of `there`: it is read.
  __device__ __forceinline__ void read(const T* row, unsigned there, unsigned (&words)[WORDS]) const {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      Vector<T, CHUNK> v;
      if (there >> part & 1) v = load_constant<T, CHUNK>(row + part * 4 * CHUNK);
      memcpy(words + part * (CHUNK / 2), &v, sizeof v);
    }
  }
  // Reads two rows of a line.
  __device__ __forceinline__ void read_two(const T* row, const Distances& distances, unsigned there,
                                           unsigned (&words)[2][WORDS]) const {
    read(row, there, words[0]);
    read(go(row, distances.of[2], sizeof(T)), there >> PARTS, words[1]);
  }
  // Reads a row that is not part of a line.
  __device__ __forceinline__ void read_row(const T* row, bool present, int width,
                                           unsigned (&words)[WORDS]) const {
    unsigned there = 0;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      there |= unsigned(present && (part * 4 + member) * CHUNK < width) << part;
    }
    read(row + member * CHUNK, there, words);
  }

  // sums (16 rows, 16 columns) = rows of `left` times rows of `right`.
  __device__ __forceinline__ void dots(float (&sums)[2][4], const unsigned (&left)[2][WORDS],
                                       const unsigned (&right)[2][WORDS]) const {
#pragma unroll
    for (int n = 0; n < 8; ++n) sums[n / 4][n % 4] = 0;
#pragma unroll
    for (int k = 0; k < WORDS; k += 2) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        multiply_add<T>(sums[n], left[0][k], left[1][k], left[0][k + 1], left[1][k + 1], right[n][k],
                        right[n][k + 1]);
      }
    }
  }

  // The channels of the lane's column at its four places: operands of `mix`.
  struct Columns {
    unsigned words[4][COLUMNS / 2];
  };
  __device__ __forceinline__ Columns columns(const T* column, const Distances& distances,
                                             unsigned there) const {
    Columns c;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      Vector<T, COLUMNS> v;
      if (there >> n & 1) v = load_constant<T, COLUMNS>(go(column, distances.of[n], sizeof(T)));
      memcpy(c.words[n], &v, sizeof v);
    }
    return c;
  }

  // sum (16 rows, channels) += weights (16 rows, 16 places; packed) times the rows of these places.
  __device__ __forceinline__ void mix(float (&sum)[COLUMNS][4], const unsigned (&weights)[4],
                                      const Columns& c) const {
#pragma unroll
    for (int i = 0; i < COLUMNS; i += 2) {
      const unsigned (&w)[4][COLUMNS / 2] = c.words;
      const int pair = i / 2;
      multiply_add<T>(sum[i], weights[0], weights[1], weights[2], weights[3],
                      low_halves(w[0][pair], w[1][pair]), low_halves(w[2][pair], w[3][pair]));
      multiply_add<T>(sum[i + 1], weights[0], weights[1], weights[2], weights[3],
                      high_halves(w[0][pair], w[1][pair]), high_halves(w[2][pair], w[3][pair]));
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
};

// Weights n of a lane (half n / 2 % 2 of the tile, place pair_place(n / 4 * 2 + n % 2)) as pairs, in the
// order of multiply_add's A.
template <class T>
__device__ __forceinline__ void pack_weights(const float (&x)[2][4], unsigned (&packed)[4]) {
#pragma unroll
  for (int n = 0; n < 4; ++n) packed[n] = pack<T>(x[n / 2][n % 2 * 2], x[n / 2][n % 2 * 2 + 1]);
}

__device__ __forceinline__ float greatest_of_four_lanes(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1, 32));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2, 32));
}

__device__ __forceinline__ float sum_of_four_lanes(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1, 32);
  return x + __shfl_xor_sync(0xffffffffu, x, 2, 32);
}

// NaN where an element is infinite or NaN, else 0.
template <int N>
__device__ __forceinline__ float trace_of_infinite(const float (&x)[N][4]) {
  float trace = 0;
#pragma unroll
  for (int n = 0; n < 4 * N; ++n) trace += 0 * x[n / 4][n % 4];
  return trace;
}

// The map of queries, or of keys, whose neighbors in a tile are a dilation apart.
struct TileMap {
  int rows, columns;
  const Divisor &row_dilation, &column_dilation, &heads;
  bool tall;

  template <class T>
  static __device__ __forceinline__ TileMap of_queries(const WindowProblem<T>& p) {
    return {p.y.queries, p.x.queries, p.y.by_dilation, p.x.by_dilation, p.by_heads, p.tall};
  }
  template <class T>
  static __device__ __forceinline__ TileMap of_keys(const WindowProblem<T>& p) {
    return {p.y.keys, p.x.keys, p.y.by_dilation, p.x.by_dilation, p.by_heads, p.tall};
  }
};

// Where a warp's tile is: from place (y0, x0) on; a lane's places (y, x) in halves 0 and 1.
struct TilePlace {
  int b, m, y0, x0, y[2], x[2];
  bool exists, valid[2];

  __device__ __forceinline__ TilePlace(const TileMap& map, const Place& first)
      : b(first.b), m(first.m), y0(first.y), x0(first.x), exists(first.exists) {
    const int group = int(threadIdx.x) % 32 / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      y[h] = y0 + (map.tall ? h * int(map.row_dilation.divisor) : 0);
      x[h] = x0 + (group + (map.tall ? 0 : 8 * h)) * int(map.column_dilation.divisor);
      valid[h] = exists && y[h] < map.rows && x[h] < map.columns;
    }
  }

  // Recomputes this struct, so that it does not occupy three registers in the meantime.
  __device__ __forceinline__ TilePlace again(const TileMap& map) const {
    int head = b * int(map.heads.divisor) + m;
    Place first{0, 0, y0, x0, true};
    keep(head), keep(first.y), keep(first.x);
    first.b = map.heads.divide(head, &first.m);
    return TilePlace(map, first);
  }
};

template <class T>
__device__ __forceinline__ TilePlace locate_tile(const WindowProblem<T>& p, const TileMap& map) {
  // All lanes have this value; the broadcast tells the compiler so.
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0, 32);
  Place tile = locate(p, int(blockIdx.x) * kWarps + warp);
  tile.y = spread(tile.y, map.row_dilation, p.tall ? 2 : 1);
  tile.x = spread(tile.x, map.column_dilation, p.tall ? 8 : 16);
  return TilePlace(map, tile);
}

// Calls body(place) with each place of a tile, one after the other.
template <class Body>
__device__ __forceinline__ void for_tile_places(const TileMap& map, const TilePlace& tile, const Body& body) {
  const TilePlace at = tile.again(map);
#pragma unroll 1
  for (int n = 0; n < 16; ++n) {
    const int y = at.y0 + (map.tall ? n / 8 * int(map.row_dilation.divisor) : 0);
    const int x = at.x0 + (map.tall ? n % 8 : n) * int(map.column_dilation.divisor);
    body(Place{at.b, at.m, y, x, y < map.rows && x < map.columns});
  }
}

// The position logits of a tile's queries in shared memory: of half h, query g's tap t is at
// elements[first[h] + g * taps + t].
template <class T>
struct Stage {
  int start;  // of the warp's elements
  T* elements;
  int first[2];

  __device__ __forceinline__ explicit Stage(const WindowProblem<T>& p) {
    start = int(threadIdx.x) / 32 * p.staged, elements = static_cast<T*>(shared_memory());
  }

  // Element n of a half's logits is at data[n], or, not of neighbors, on the way of strides.
  struct Run {
    T* data;
    int count;  // queries
    bool contiguous;
  };
  template <class U>
  static __device__ __forceinline__ Run run(const WindowProblem<T>& p, const Maps<U>& map,
                                            const TilePlace& at, int h) {
    const int y = at.y0 + (p.tall ? h * p.y.dilation : 0), x = at.x0 + (p.tall ? 0 : 8 * h) * p.x.dilation;
    const int left = y < p.y.queries && x < p.x.queries
                         ? quotient(p.x.queries - x + p.x.dilation - 1, p.x.by_dilation)
                         : 0;
    Run r;
    r.data = const_cast<T*>(map.at(at.b, at.m, y, x)), r.count = min(left, kTileRow);
    const int taps = p.y.taps * p.x.taps;
    r.contiguous = (map.channel == 1 || taps == 1) && (r.count < 2 || map.column * p.x.dilation == taps);
    return r;
  }
  // Elements by which data is beyond a multiple of 16 bytes.
  static __device__ __forceinline__ int lead(const T* data) {
    return int(reinterpret_cast<uintptr_t>(data) / sizeof(T) % 8);
  }

  // Copies the logits of both halves to shared memory. Call with the whole warp, like the functions below.
  __device__ __forceinline__ void fill(const WindowProblem<T>& p, const TilePlace& at) {
    const int lane = int(threadIdx.x) % 32, taps = p.y.taps * p.x.taps;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Run from = run(p, p.position_logits, at, h);
      first[h] = start + h * (kTileRow * taps + 8) + (from.contiguous ? lead(from.data) : 0);
      T* to = elements + first[h];
      if (from.contiguous) {
        copy(from.count * taps, lead(from.data), [&](int n, auto many) {
          constexpr int N = decltype(many)::value;
          store(to + n, load_constant<T, N>(from.data + n));
        });
      } else {
        for (int n = lane; n < kTileRow * taps; n += 32) {
          const int query = n % kTileRow, tap = n / kTileRow;
          if (query >= from.count) continue;
          to[query * taps + tap] =
              from.data[query * (p.x.dilation * p.position_logits.column) + tap * p.position_logits.channel];
        }
      }
    }
    __syncwarp();
  }

  // Copies the gradients, which have replaced the logits, to global memory.
  __device__ __forceinline__ void flush(const WindowProblem<T>& p, const TilePlace& at) const {
    const int lane = int(threadIdx.x) % 32, taps = p.y.taps * p.x.taps;
    __syncwarp();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Run to = run(p, p.grad_position_logits, at, h);
      const T* from = elements + first[h];
      if (to.contiguous && lead(to.data) == lead(from)) {
        copy(to.count * taps, lead(from), [&](int n, auto many) {
          constexpr int N = decltype(many)::value;
          store(to.data + n, load<T, N>(from + n));
        });
      } else {
        const int step = p.x.dilation * int(p.grad_position_logits.column);
        for (int n = lane; n < to.count * taps; n += 32) {
          const int query = n / taps, tap = n - query * taps;
          // Of a single tap, the channels' stride is 0.
          to.data[to.contiguous ? n : query * int64_t(step) + tap * p.grad_position_logits.channel] = from[n];
        }
      }
    }
  }

 private:
  // Calls move(n, N) for elements n ... n + N - 1, N being 8 where memory is aligned, else 1.
  template <class Move>
  static __device__ __forceinline__ void copy(int count, int lead, const Move& move) {
    const int lane = int(threadIdx.x) % 32;
    const int head = min((8 - lead) % 8, count), vectors = (count - head) / 8, tail = head + vectors * 8;
    if (lane < head) move(lane, std::integral_constant<int, 1>());
    for (int n = lane; n < vectors; n += 32) move(head + 8 * n, std::integral_constant<int, 8>());
    if (tail + lane < count) move(tail + lane, std::integral_constant<int, 1>());
  }
};

}  // namespace attn_plugins
