// Attention of packed queries over the slots of their rows, tile by tile with a running softmax. A query meets the
// slots of its row in the same tiles whatever else is in the step, so that its result does not depend on it.
#pragma once

#include <algorithm>
#include <limits>

#include "product.h"

namespace specplug {

constexpr int kTile = 64;         // slots read at once
constexpr int kMostQueries = 48;  // queries that share a tile once it is packed
constexpr int kMostHeadDim = 256;

// What a layer of a kind sees. hidden: per token the slots it may not see [span], null for those up to its own.
struct Kind {
  int64_t size;  // position p stands in slot p % size
  const uint8_t* const* hidden;
  const int64_t* spans;
};

// Queries [first, last) of one row and key head; query q is head q % groups of the row's token q / groups.
struct Task {
  int64_t row, kv_head, first, last;
};

struct Heads {
  int64_t num_heads, num_kv_heads, head_dim;
  float scaling;

  int64_t groups() const { return num_heads / num_kv_heads; }
  int64_t width() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
};

// 16 rows of 16 32-bit values, columns for rows.
inline void transpose(__m512i rows[16]) {
  __m512i other[16];
  for (int i = 0; i < 16; i += 2) {
    other[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    other[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(other[i], other[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(other[i], other[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(other[i + 1], other[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(other[i + 1], other[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    other[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    other[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    other[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    other[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0xdd);
    rows[i + 4] = _mm512_shuffle_i32x4(other[i + 4], other[i + 12], 0x88);
    rows[i + 12] = _mm512_shuffle_i32x4(other[i + 4], other[i + 12], 0xdd);
  }
}

// Keys [count, head_dim] as panels of 32 slots, [kTile / 32][head_dim / 2][32][2]; zeros for missing slots.
inline void pack_keys(const bf16* keys, int64_t count, int64_t head_dim, bf16* packed) {
  for (int64_t slot = 0; slot < kTile; slot += 16) {
    bf16* panel = packed + slot / kPanel * head_dim * kPanel + slot % kPanel * 2;
    for (int64_t dim = 0; dim < head_dim; dim += 32) {
      __m512i rows[16];
      for (int i = 0; i < 16; ++i)
        rows[i] = slot + i < count ? _mm512_loadu_si512(keys + (slot + i) * head_dim + dim) : _mm512_setzero_si512();
      transpose(rows);
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(panel + (dim / 2 + i) * 2 * kPanel, rows[i]);
    }
  }
}

// Values [count, head_dim] as panels of 32 dims, [head_dim / 32][kTile / 2][32][2]; zeros for missing slots.
inline void pack_values(const bf16* values, int64_t count, int64_t head_dim, bf16* packed) {
  alignas(64) static constexpr uint16_t kFirstHalf[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                          8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i first_half = _mm512_load_si512(kFirstHalf);
  const __m512i second_half = _mm512_add_epi16(first_half, _mm512_set1_epi16(16));
  for (int64_t slot = 0; slot < kTile; slot += 2)
    for (int64_t dim = 0; dim < head_dim; dim += kPanel) {
      const bf16* from = values + slot * head_dim + dim;
      const __m512i even = slot < count ? _mm512_loadu_si512(from) : _mm512_setzero_si512();
      const __m512i odd = slot + 1 < count ? _mm512_loadu_si512(from + head_dim) : _mm512_setzero_si512();
      bf16* to = packed + dim * kTile + slot * kPanel;
      _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, first_half, odd));
      _mm512_storeu_si512(to + kPanel, _mm512_permutex2var_epi16(even, second_half, odd));
    }
}

// Which of the 16 slots from `slot` on a query sees.
inline __mmask16 seen(int64_t slot, int64_t visible, const uint8_t* hidden) {
  const int64_t count = std::clamp<int64_t>(visible - slot, 0, 16);
  const auto within = static_cast<__mmask16>((1u << count) - 1);
  if (hidden == nullptr) return within;
  return _mm_mask_testn_epi8_mask(within, _mm_maskz_loadu_epi8(within, hidden + slot), _mm_set1_epi8(-1));
}

// One query's softmax over the tile: its scores become weights, and what it has summed so far is scaled to them.
struct Running {
  float most = -std::numeric_limits<float>::infinity();
  float total = 0;

  // Returns by how much earlier sums shrink.
  float take(const float* scores, float scaling, int64_t start, int64_t visible, const uint8_t* hidden, bf16* weights) {
    __m512 scaled[kTile / 16];
    __mmask16 masks[kTile / 16];
    __m512 largest = _mm512_set1_ps(most);
    for (int i = 0; i < kTile / 16; ++i) {
      masks[i] = seen(start + 16 * i, visible, hidden);
      scaled[i] = _mm512_mul_ps(_mm512_loadu_ps(scores + 16 * i), _mm512_set1_ps(scaling));
      largest = _mm512_mask_max_ps(largest, masks[i], largest, scaled[i]);
    }
    const float now = _mm512_reduce_max_ps(largest);
    if (now == -std::numeric_limits<float>::infinity()) {
      std::fill(weights, weights + kTile, 0);
      return 1;
    }
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < kTile / 16; ++i) {
      const __m512 weight =
          _mm512_maskz_mov_ps(masks[i], exponential(_mm512_sub_ps(scaled[i], _mm512_set1_ps(now))));
      sum = _mm512_add_ps(sum, weight);
      store(weights + 16 * i, weight);
    }
    const float shrink = most == now ? 1 : _mm512_cvtss_f32(exponential(_mm512_set1_ps(most - now)));
    total = total * shrink + _mm512_reduce_add_ps(sum);
    most = now;
    return shrink;
  }
};

// heads [T, width]: queries, keys, values of each token; attended [T, num_heads * head_dim]. The row's tokens are
// first_token and on, and `length` entries stood before them. keys, values: of this row and head [size, head_dim].
inline void attend(const Task& task, const Heads& shape, const Kind& kind, const bf16* heads, int64_t first_token,
                   int64_t length, const bf16* keys, const bf16* values, bf16* attended) {
  alignas(64) bf16 queries[kMostQueries * kMostHeadDim];
  alignas(64) bf16 packed_keys[kTile * kMostHeadDim], packed_values[kTile * kMostHeadDim];
  alignas(64) float scores[kMostQueries * kTile], sums[kMostQueries * kMostHeadDim];
  alignas(64) bf16 weights[kMostQueries * kTile];
  Running running[kMostQueries];
  int64_t visible[kMostQueries];
  const uint8_t* hidden[kMostQueries];
  const int64_t dim = shape.head_dim, groups = shape.groups(), count = task.last - task.first;

  int64_t span = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t query = task.first + i, in_row = query / groups, token = first_token + in_row;
    const int64_t head = task.kv_head * groups + query % groups;
    std::memcpy(queries + i * dim, heads + token * shape.width() + head * dim, dim * sizeof(bf16));
    hidden[i] = kind.hidden == nullptr ? nullptr : kind.hidden[token];
    visible[i] = hidden[i] == nullptr ? length + in_row + 1 : kind.spans[token];
    span = std::max(span, visible[i]);
  }
  std::fill(sums, sums + count * dim, 0.0f);

  for (int64_t start = 0; start < span; start += kTile) {
    const int64_t in_tile = std::min<int64_t>(kTile, span - start);
    pack_keys(keys + start * dim, in_tile, dim, packed_keys);
    pack_values(values + start * dim, in_tile, dim, packed_values);
    in_blocks(count, [&](int64_t first, int64_t last) {
      for (int64_t slot = 0; slot < kTile; slot += kPanel)
        multiply<false>(last - first, queries + first * dim, dim, packed_keys + slot * dim, dim / 2,
                        scores + first * kTile + slot, kTile);
    });
    for (int64_t i = 0; i < count; ++i) {
      const float shrink =
          running[i].take(scores + i * kTile, shape.scaling, start, visible[i], hidden[i], weights + i * kTile);
      if (shrink != 1)
        for (int64_t at = 0; at < dim; at += 16)
          _mm512_store_ps(sums + i * dim + at, _mm512_mul_ps(_mm512_load_ps(sums + i * dim + at), _mm512_set1_ps(shrink)));
    }
    in_blocks(count, [&](int64_t first, int64_t last) {
      for (int64_t at = 0; at < dim; at += kPanel)
        multiply<true>(last - first, weights + first * kTile, kTile, packed_values + at * kTile, kTile / 2,
                       sums + first * dim + at, dim);
    });
  }

  for (int64_t i = 0; i < count; ++i) {
    const int64_t query = task.first + i, token = first_token + query / groups;
    bf16* to = attended + (token * shape.num_heads + task.kv_head * groups + query % groups) * dim;
    for (int64_t at = 0; at < dim; at += 16)
      store(to + at, _mm512_div_ps(_mm512_load_ps(sums + i * dim + at), _mm512_set1_ps(running[i].total)));
  }
}

}  // namespace specplug
