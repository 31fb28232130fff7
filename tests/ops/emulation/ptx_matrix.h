// Matrix products of a warp, with each lane's fragments as in PTX's documentation; the lane is 4 g + c.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "emulator.h"
#include "ptx_number.h"

namespace emulator {

struct MatrixFragments {
  uint32_t a[4], b[2];
  float sum[4];
};

// The elements of a word: two halves, or one float of which 19 bits count (tf32).
enum MatrixType { kHalf, kBrain, kTf32 };

template <MatrixType TYPE>
float matrix_element(const uint32_t* words, unsigned index) {
  if constexpr (TYPE == kTf32) return float_of(words[index] & 0xffffe000u);
  const uint16_t bits = uint16_t(words[index / 2] >> (index % 2 * 16));
  return TYPE == kHalf ? from_half(bits) : from_bfloat16(bits);
}

// sum (16 x 8) += A (16 x K) B (K x 8). The words of A alternate between rows g and g + 8. With E elements
// per word, the first pair of words covers columns c * E ... c * E + E - 1, and each further pair the columns
// 4 E on. The words of B cover rows likewise, in column g. The elements of the sum are in rows g, g, g + 8, g
// + 8 and alternate between columns 2c and 2c + 1. Products are exact and summed in double, because order and
// rounding on a device are not documented.
template <MatrixType TYPE, unsigned K>
void multiply_matrices(Payload* lanes, unsigned) {
  constexpr unsigned E = TYPE == kTf32 ? 1 : 2;
  MatrixFragments fragments[kLanes];
  for (unsigned l = 0; l < kLanes; ++l) std::memcpy(&fragments[l], lanes[l].bytes, sizeof fragments[l]);
  float a[16][K], b[K][8];
  for (unsigned l = 0; l < kLanes; ++l) {
    const unsigned g = l / 4, c = l % 4;
    for (unsigned word = 0; word < K / (4 * E); ++word) {
      for (unsigned e = 0; e < E; ++e) {
        const unsigned k = word * 4 * E + c * E + e;
        a[g][k] = matrix_element<TYPE>(fragments[l].a, (2 * word) * E + e);
        a[g + 8][k] = matrix_element<TYPE>(fragments[l].a, (2 * word + 1) * E + e);
        b[k][g] = matrix_element<TYPE>(fragments[l].b, word * E + e);
      }
    }
  }
  for (unsigned l = 0; l < kLanes; ++l) {
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned row = l / 4 + i / 2 * 8, column = 2 * (l % 4) + i % 2;
      double total = fragments[l].sum[i];
      for (unsigned k = 0; k < K; ++k) total += double(a[row][k]) * b[k][column];
      fragments[l].sum[i] = float(total);
    }
    std::memcpy(lanes[l].bytes, &fragments[l], sizeof fragments[l]);
  }
}

struct MatrixShape {
  const char* name;
  size_t a, b;  // words per lane
  Operation operation;
};

inline const MatrixShape* find_shape(const std::string& text) {
  static const MatrixShape shapes[] = {
      {"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", 4, 2, multiply_matrices<kHalf, 16>},
      {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", 4, 2, multiply_matrices<kBrain, 16>},
      {"mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32", 2, 1, multiply_matrices<kHalf, 8>},
      {"mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32", 2, 1, multiply_matrices<kBrain, 8>},
      {"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", 4, 2, multiply_matrices<kTf32, 8>},
      {"mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32", 2, 1, multiply_matrices<kTf32, 4>},
  };
  for (const MatrixShape& shape : shapes) {
    const size_t length = std::strlen(shape.name);
    if (text.compare(0, length, shape.name) == 0 && (text.size() == length || text[length] <= ' '))
      return &shape;
  }
  return nullptr;
}

// ldmatrix: lane 8 m + r passes the address of row r of matrix m (eight halves). Lane l receives one pair of
// each matrix, from row l / 4 or, if transposed, from column l / 4.
struct MatrixRows {
  const char* row;
  unsigned count;
  bool transposed;
  uint32_t words[4];
};

inline void load_matrix_rows(Payload* lanes, unsigned) {
  MatrixRows rows[kLanes];
  for (unsigned l = 0; l < kLanes; ++l) std::memcpy(&rows[l], lanes[l].bytes, sizeof rows[l]);
  for (unsigned l = 0; l < kLanes; ++l) {
    if (rows[l].count != rows[0].count || rows[l].transposed != rows[0].transposed) {
      fail("ldmatrix: lanes differ in the number of matrices, or in their transposition");
    }
    for (unsigned m = 0; m < rows[0].count; ++m) {
      for (unsigned e = 0; e < 2; ++e) {
        const unsigned pair = 2 * (l % 4) + e, other = l / 4;
        const unsigned row = rows[l].transposed ? pair : other, column = rows[l].transposed ? other : pair;
        uint16_t half;
        std::memcpy(&half, rows[8 * m + row].row + 2 * column, 2);
        rows[l].words[m] = e == 0 ? half : rows[l].words[m] | uint32_t(half) << 16;
      }
    }
    std::memcpy(lanes[l].bytes, &rows[l], sizeof rows[l]);
  }
}

}  // namespace emulator
