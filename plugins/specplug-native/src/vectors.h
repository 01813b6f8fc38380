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

// The polynomial of Cephes' expf, within 2 ulp; exponents are held within float32's normal numbers.
inline __m512 exponential(__m512 x) {
  x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.3f)), _mm512_set1_ps(88.3f));
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
  return _mm512_scalef_ps(p, n);
}

}  // namespace specplug
