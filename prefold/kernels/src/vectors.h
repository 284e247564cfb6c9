// Sixteen numbers at a time, in the vector extensions of GCC and Clang, so that one source serves
// every instruction set; AVX-512 is named only where the generic form is clearly slower.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace prefold {

constexpr int kLanes = 16;

// may_alias: scratch memory holds floats first and bfloat16 pairs later.
typedef float Floats __attribute__((vector_size(64), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), may_alias));
typedef uint32_t Words __attribute__((vector_size(64), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), may_alias));

// A bfloat16 as it lies in memory.
struct Bf16 {
  uint16_t bits;
};

#define PREFOLD_INLINE inline __attribute__((always_inline))
// For inner loops that need every register: constants of the code around them must not sit in any.
#define PREFOLD_APART __attribute__((noinline))

PREFOLD_INLINE Floats splat(float x) { return Floats{} + x; }

PREFOLD_INLINE Words bits_of(Floats x) { return (Words)x; }

PREFOLD_INLINE Floats widen(Halves x) { return (Floats)(__builtin_convertvector(x, Words) << 16); }

// Rounds to nearest even, as PyTorch does; NaN stays NaN.
PREFOLD_INLINE Halves narrow(Floats x) {
#ifdef __AVX512BF16__
  return (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
  Words bits = bits_of(x);
  Words rounded = bits + 0x7fff + ((bits >> 16) & 1);
  Words nan = bits | 0x400000;
  return __builtin_convertvector((x == x ? rounded : nan) >> 16, Halves);
#endif
}

PREFOLD_INLINE Floats load(const float* p) {
  Floats x;
  memcpy(&x, p, sizeof x);
  return x;
}

PREFOLD_INLINE Floats load(const Bf16* p) {
  Halves x;
  memcpy(&x, p, sizeof x);
  return widen(x);
}

PREFOLD_INLINE void store(float* p, Floats x) { memcpy(p, &x, sizeof x); }

PREFOLD_INLINE void store(Bf16* p, Floats x) {
  Halves h = narrow(x);
  memcpy(p, &h, sizeof h);
}

// The first `count` of up to sixteen numbers, and zeros.
template <class E>
PREFOLD_INLINE Floats load_some(const E* p, int64_t count) {
  if (count >= kLanes) return load(p);
  E lanes[kLanes] = {};
  memcpy(lanes, p, count * sizeof(E));
  return load(lanes);
}

template <class E>
PREFOLD_INLINE void store_some(E* p, Floats x, int64_t count) {
  if (count >= kLanes) return store(p, x);
  E lanes[kLanes];
  store(lanes, x);
  memcpy(p, lanes, count * sizeof(E));
}

// Lane r of the result is a's where bit r of `bits` is set, else b's. A choice, not a product: what is
// not chosen may be NaN.
PREFOLD_INLINE Floats choose(uint32_t bits, Floats a, Floats b) {
#ifdef __AVX512F__
  return (Floats)_mm512_mask_mov_ps((__m512)b, (__mmask16)bits, (__m512)a);
#else
  const Ints lane_bit = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  return ((Ints{} + (int32_t)bits) & lane_bit) != 0 ? a : b;
#endif
}

// b where a is NaN.
PREFOLD_INLINE Floats larger(Floats a, Floats b) {
#ifdef __AVX512F__
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

PREFOLD_INLINE float sum_of(Floats x) {
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += x[i];
  return total;
}

// 2^x: the whole part goes into the exponent, the fraction f in [0, 1) through a minimax polynomial that
// is exact at f = 0. Relative error 8e-8, or 9e-5 where the result is rounded to bfloat16 (2e-3) anyway.
// NaN stays NaN; what is too small becomes zero (AVX-512) or 2^-126.
template <bool kExact>
PREFOLD_INLINE Floats exp2(Floats x) {
#ifdef __AVX512DQ__
  Floats f = (Floats)_mm512_reduce_ps((__m512)x, 0x09);  // x - floor(x)
#else
  x = x < -126.0f ? splat(-126.0f) : x;
  x = x > 126.0f ? splat(126.0f) : x;
  Ints whole = __builtin_convertvector(x, Ints);
  whole += (__builtin_convertvector(whole, Floats) > x);  // truncation to floor: true is -1
  Floats f = x - __builtin_convertvector(whole, Floats);
#endif
  Floats p;
  if constexpr (kExact) {
    p = splat(1.8671303442925476e-3f);
    p = p * f + 9.017029740500629e-3f;
    p = p * f + 5.579991352065253e-2f;
    p = p * f + 2.4016445004040288e-1f;
    p = p * f + 6.931513118140826e-1f;
  } else {
    p = splat(7.706705932265084e-2f);
    p = p * f + 2.2764497226720734e-1f;
    p = p * f + 6.951167907078639e-1f;
  }
  p = p * f + 1.0f;
#ifdef __AVX512DQ__
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)x);  // p * 2^floor(x)
#else
  return p * (Floats)((whole + 127) << 23);
#endif
}

// Transposes sixteen vectors of sixteen lanes: at distance 8, 4, 2, 1 two vectors swap the blocks that
// lie off the diagonal.
template <class Lanes>
PREFOLD_INLINE void transpose(Lanes* rows) {
  const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
  for (int distance = 8; distance > 0; distance /= 2) {
    const Ints upper = (lane & distance) != 0;
    const Ints low = upper ? lane + (kLanes - distance) : lane;   // from the second vector: index + 16
    const Ints high = upper ? lane + kLanes : lane + distance;
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i & distance) continue;
      Lanes a = rows[i], b = rows[i + distance];
#ifdef __clang__
      for (int k = 0; k < kLanes; ++k) {
        rows[i][k] = low[k] < kLanes ? a[low[k]] : b[low[k] - kLanes];
        rows[i + distance][k] = high[k] < kLanes ? a[high[k]] : b[high[k] - kLanes];
      }
#else
      rows[i] = __builtin_shuffle(a, b, low);
      rows[i + distance] = __builtin_shuffle(a, b, high);
#endif
    }
  }
}

}  // namespace prefold
