// Sixteen numbers at a time: bfloat16 in memory, float32 in registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace specplug {

using bf16 = uint16_t;

inline __m512 widened(__m256i values) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}

inline __m512 load(const bf16* from) { return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }

inline __m256i narrowed(__m512 values) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values)); }

inline void store(bf16* to, __m512 values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrowed(values));
}

// To what bfloat16 can hold, as an operation of its own would leave it.
inline __m512 rounded(__m512 values) { return widened(narrowed(values)); }

// The polynomial of Cephes' expf, within 2 ulp; 0 below float32's normal numbers. In this order min and max keep NaN.
inline __m512 exponential(__m512 x) {
  const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.3f), _CMP_NLT_UQ);
  x = _mm512_min_ps(_mm512_set1_ps(100.0f), _mm512_max_ps(_mm512_set1_ps(-87.3f), x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_maskz_scalef_ps(counts, p, n);
}

struct Likeliest {
  int64_t index;      // the first of the largest values; NaN counts as none, 0 where all are
  float probability;  // its share in a softmax over all
};

// size: one at least.
inline Likeliest likeliest(const bf16* values, int64_t size) {
  const __m512 lowest = _mm512_set1_ps(-__builtin_inff());
  const auto within = [&](int64_t i) {
    return static_cast<__mmask16>(size - i >= 16 ? 0xffff : (1u << (size - i)) - 1);
  };
  const auto at = [&](int64_t i) {
    return _mm512_mask_mov_ps(lowest, within(i), widened(_mm256_maskz_loadu_epi16(within(i), values + i)));
  };
  __m512 most = lowest;
  for (int64_t i = 0; i < size; i += 16) most = _mm512_max_ps(at(i), most);
  const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
  int64_t index = 0;
  __mmask16 equal = 0;
  for (; index < size && equal == 0; index += 16)
    equal = _mm512_mask_cmpeq_ps_mask(within(index), at(index), largest);
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += 16) sum = _mm512_add_ps(sum, exponential(_mm512_sub_ps(at(i), largest)));
  return {equal == 0 ? 0 : index - 16 + __builtin_ctz(equal), 1.0f / _mm512_reduce_add_ps(sum)};
}

}  // namespace specplug
