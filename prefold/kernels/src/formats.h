// The two number formats the attention kernel computes in. A format says how keys and values are packed
// and how a packed number meets a vector of queries:
//
//   Stored      what one broadcast reads: a float, or two bfloat16 numbers
//   Vector      sixteen of them, one a query
//   kWidth      numbers in one Stored
//   kExactExp   whether probabilities need float32's precision
//   mul_add     acc + vector x stored, the inner product of kWidth numbers
//
// Keys lie as rows of Stored along the head's dimensions. Values lie so that the kWidth numbers of a Stored
// belong to kWidth consecutive keys, which is what the sum over keys wants.
#pragma once

#include "vectors.h"

namespace prefold {

// Elements E in memory (float or Bf16), float32 arithmetic.
template <class E>
struct InFloat32 {
  using Element = E;
  using Stored = float;
  using Vector = Floats;
  static constexpr int kWidth = 1;
  static constexpr bool kExactExp = std::is_same_v<E, float>;

  static PREFOLD_INLINE Floats mul_add(Floats acc, Vector x, Stored y) { return acc + x * y; }

  // Sixteen Stored along a row, zeros past its `count` numbers.
  static PREFOLD_INLINE Vector load_row(const E* row, int64_t count) { return load_some(row, count); }

  // The vector that holds these dimensions (kWidth of them count), rounded to elements, and back to a row.
  static PREFOLD_INLINE Vector join(Floats first, Floats) { return first; }

  static PREFOLD_INLINE void store_row(E* row, Vector x, int64_t count) { store_some(row, x, count); }

  // The probabilities of a pair of keys as the vectors that meet their values; `first` may overlap `out`.
  static PREFOLD_INLINE void store_probabilities(float* out, int stride, Floats first, Floats second) {
    store(out, first);
    store(out + stride, second);
  }

  static PREFOLD_INLINE Floats probability(const float* at, int stride, int half) { return load(at + half * stride); }

  // Sixteen dimensions of the values of two consecutive keys, for a packed pair of `dim` dimensions.
  static PREFOLD_INLINE void store_values(float* out, int64_t dim, Floats first, Floats second) {
    store(out, first);
    store(out + dim, second);
  }

  static PREFOLD_INLINE float value(const float* pair, int64_t dim, int64_t d, int half) { return pair[half * dim + d]; }
};

#ifdef __AVX512BF16__
// bfloat16 products summed in float32, two numbers a lane.
struct InBf16Pairs {
  using Element = Bf16;
  using Stored = uint32_t;
  using Vector = Words;
  static constexpr int kWidth = 2;
  static constexpr bool kExactExp = false;

  static PREFOLD_INLINE Floats mul_add(Floats acc, Vector x, Stored y) {
    return (Floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)(Words{} + y));
  }

  static PREFOLD_INLINE Vector load_row(const Bf16* row, int64_t count) {
    Words x;
    if (count >= 2 * kLanes) {
      memcpy(&x, row, sizeof x);
    } else {
      Words some{};
      memcpy(&some, row, count * sizeof(Bf16));
      x = some;
    }
    return x;
  }

  // Rounded to bfloat16, `first` in the low half of each lane.
  static PREFOLD_INLINE Vector join(Floats first, Floats second) {
    const Words order = (Words)(Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}) * 0x10001u + 0x100000u;
    const __m512bh halves = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return (Words)_mm512_permutexvar_epi16((__m512i)order, (__m512i)halves);
  }

  static PREFOLD_INLINE void store_row(Bf16* row, Vector x, int64_t count) {
    if (count >= 2 * kLanes) {
      memcpy(row, &x, sizeof x);
    } else {
      const Words some = x;
      memcpy(row, &some, count * sizeof(Bf16));
    }
  }

  static PREFOLD_INLINE void store_probabilities(float* out, int, Floats first, Floats second) {
    const Words both = join(first, second);
    memcpy(out, &both, sizeof both);
  }

  static PREFOLD_INLINE Floats probability(const float* at, int, int half) {
    Words both;
    memcpy(&both, at, sizeof both);
    return (Floats)(half ? both & 0xffff0000u : both << 16);
  }

  static PREFOLD_INLINE void store_values(uint32_t* out, int64_t, Floats first, Floats second) {
    const Words both = bits_of(first) >> 16 | (bits_of(second) & 0xffff0000u);  // they were bfloat16
    memcpy(out, &both, sizeof both);
  }

  static PREFOLD_INLINE float value(const uint32_t* pair, int64_t, int64_t d, int half) {
    const uint32_t bits = half ? pair[d] & 0xffff0000u : pair[d] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
  }
};
using InBf16 = InBf16Pairs;
#else
using InBf16 = InFloat32<Bf16>;
#endif

}  // namespace prefold
