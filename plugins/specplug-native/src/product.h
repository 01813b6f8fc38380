// Rows times packed weights. A sum runs over its inputs in order, in one register, however many rows there are:
// that is why a token's result does not depend on what else is in the step.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "vectors.h"

namespace specplug {

constexpr int kPanel = 32;     // outputs side by side: two registers
constexpr int kMostRows = 12;  // rows at once: 24 sums, two weights and an input fit the 32 registers

// Weights [out, in] as panels [out / 32][in / 2][32][2]; the last panel is filled up with zeros. bias: may be null.
struct Linear {
  const bf16* packed;
  const bf16* bias;
  int64_t in, out;

  int64_t num_panels() const { return (out + kPanel - 1) / kPanel; }
  const bf16* panel(int64_t index) const { return packed + index * in * kPanel; }
};

// sums[row][0..31] (+)= sum over pairs of the two inputs x[row][pair] times panel[pair][0..31].
template <int rows, bool adds>
void multiply_rows(const bf16* x, int64_t stride, const bf16* panel, int64_t num_pairs, float* sums,
                   int64_t sums_stride) {
  __m512 low[rows], high[rows];
  for (int row = 0; row < rows; ++row) {
    low[row] = adds ? _mm512_loadu_ps(sums + row * sums_stride) : _mm512_setzero_ps();
    high[row] = adds ? _mm512_loadu_ps(sums + row * sums_stride + 16) : _mm512_setzero_ps();
  }
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    const auto left = (__m512bh)_mm512_loadu_si512(panel + pair * 2 * kPanel);
    const auto right = (__m512bh)_mm512_loadu_si512(panel + pair * 2 * kPanel + kPanel);
#pragma GCC unroll 12
    for (int row = 0; row < rows; ++row) {
      int32_t both;
      std::memcpy(&both, x + row * stride + 2 * pair, sizeof both);
      const auto inputs = (__m512bh)_mm512_set1_epi32(both);
      low[row] = _mm512_dpbf16_ps(low[row], inputs, left);
      high[row] = _mm512_dpbf16_ps(high[row], inputs, right);
    }
  }
  for (int row = 0; row < rows; ++row) {
    _mm512_storeu_ps(sums + row * sums_stride, low[row]);
    _mm512_storeu_ps(sums + row * sums_stride + 16, high[row]);
  }
}

// The same for 1 to kMostRows rows.
template <bool adds>
void multiply(int64_t rows, const bf16* x, int64_t stride, const bf16* panel, int64_t num_pairs, float* sums,
              int64_t sums_stride) {
  switch (rows) {
#define SPECPLUG_ROWS(n) \
  case n:                \
    return multiply_rows<n, adds>(x, stride, panel, num_pairs, sums, sums_stride);
    SPECPLUG_ROWS(1)
    SPECPLUG_ROWS(2)
    SPECPLUG_ROWS(3)
    SPECPLUG_ROWS(4)
    SPECPLUG_ROWS(5)
    SPECPLUG_ROWS(6)
    SPECPLUG_ROWS(7)
    SPECPLUG_ROWS(8)
    SPECPLUG_ROWS(9)
    SPECPLUG_ROWS(10)
    SPECPLUG_ROWS(11)
    SPECPLUG_ROWS(12)
#undef SPECPLUG_ROWS
  }
}

// Calls do_block(first, last) for runs of at most kMostRows rows, of nearly equal length.
template <class Block>
void in_blocks(int64_t rows, Block do_block) {
  const int64_t blocks = (rows + kMostRows - 1) / kMostRows;
  for (int64_t block = 0; block < blocks; ++block) do_block(rows * block / blocks, rows * (block + 1) / blocks);
}

// Called by all threads of a team: finish(row, output, left, right) gets outputs `output` to `output` + 31 of a row.
template <class Finish>
void product(const Linear& linear, const bf16* x, int64_t rows, Finish finish) {
#pragma omp for schedule(static)
  for (int64_t panel = 0; panel < linear.num_panels(); ++panel) {
    alignas(64) float sums[kMostRows * kPanel];
    const int64_t output = panel * kPanel;
    in_blocks(rows, [&](int64_t first, int64_t last) {
      multiply<false>(last - first, x + first * linear.in, linear.in, linear.panel(panel), linear.in / 2, sums, kPanel);
      for (int64_t row = first; row < last; ++row) {
        const float* sum = sums + (row - first) * kPanel;
        __m512 left = _mm512_load_ps(sum), right = _mm512_load_ps(sum + 16);
        if (linear.bias != nullptr) {
          left = _mm512_add_ps(left, load(linear.bias + output));
          right = _mm512_add_ps(right, load(linear.bias + output + 16));
        }
        finish(row, output, left, right);
      }
    });
  }
}

}  // namespace specplug
