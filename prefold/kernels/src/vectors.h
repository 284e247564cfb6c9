// Vectors of sixteen numbers, in the vector extensions of GCC and Clang, so that one source serves every instruction
// set. Intrinsics are used only if the generic form is clearly slower.
//
// Sixteen numbers are one register with AVX-512, two with AVX2, and four with SSE or NEON. A Vec is an array of such
// parts. Code for whole Vecs need not know this. Inner loops that must fit into the registers work on one part at a
// time.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace prefold {

#define PREFOLD_INLINE inline __attribute__((always_inline))
// For inner loops that need every register: constants of the surrounding code must not occupy any.
#define PREFOLD_APART __attribute__((noinline))

#if defined(__AVX512F__)
constexpr int kPartBytes = 64;
constexpr int kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kPartBytes = 32;
constexpr int kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kPartBytes = 16;
constexpr int kRegisters = 32;
#else
constexpr int kPartBytes = 16;
constexpr int kRegisters = 16;
#endif

constexpr int kLanes = 16;
constexpr int kParts = 64 / kPartBytes;
constexpr int kPartLanes = kLanes / kParts;

// may_alias, because scratch memory first has floats and later bfloat16 pairs.
template <class T>
using Part __attribute__((vector_size(kPartBytes), may_alias)) = T;

// Parts are accessed one by one, and most functions of parts capture nothing. With loops and captures by reference, GCC
// recognises late that parts are registers, and a source takes up to twice as long to compile.
template <class T>
struct Vec {
  Part<T> part[kParts];

  // Part p of the result is lane_part(p).
  template <class F>
  static PREFOLD_INLINE Vec make(const F& lane_part) {
    Vec x;
    x.part[0] = lane_part(0);
    if constexpr (kParts > 1) x.part[1] = lane_part(1);
    if constexpr (kParts > 2) x.part[2] = lane_part(2), x.part[3] = lane_part(3);
    return x;
  }

  // Each part of the result is `f` of the parts at the same place in the other vectors.
  template <class F, class... V>
  static PREFOLD_INLINE Vec map(const F& f, const V&... from) {
    Vec x;
    x.part[0] = f(from.part[0]...);
    if constexpr (kParts > 1) x.part[1] = f(from.part[1]...);
    if constexpr (kParts > 2) x.part[2] = f(from.part[2]...), x.part[3] = f(from.part[3]...);
    return x;
  }

  PREFOLD_INLINE Vec() = default;
  PREFOLD_INLINE Vec(T x) {
    const Part<T> all = Part<T>{} + x;
    part[0] = all;
    if constexpr (kParts > 1) part[1] = all;
    if constexpr (kParts > 2) part[2] = all, part[3] = all;
  }

#define PREFOLD_OPERATOR(op)                                                  \
  friend PREFOLD_INLINE Vec operator op(const Vec& a, const Vec& b) {         \
    return map([](Part<T> x, Part<T> y) { return (Part<T>)(x op y); }, a, b); \
  }
  PREFOLD_OPERATOR(+)
  PREFOLD_OPERATOR(-)
  PREFOLD_OPERATOR(*)
  PREFOLD_OPERATOR(/)
  PREFOLD_OPERATOR(|)
  PREFOLD_OPERATOR(&)
#undef PREFOLD_OPERATOR
  PREFOLD_INLINE Vec& operator+=(const Vec& b) { return *this = *this + b; }
  PREFOLD_INLINE Vec& operator*=(const Vec& b) { return *this = *this * b; }
  PREFOLD_INLINE Vec& operator|=(const Vec& b) { return *this = *this | b; }
};

using Floats = Vec<float>;
using Words = Vec<uint32_t>;

// A bfloat16 number in memory.
struct Bf16 {
  uint16_t bits;
};

// Reinterpret the bits as another type.
template <class To, class From>
PREFOLD_INLINE Vec<To> as(const Vec<From>& x) {
  return Vec<To>::map([](Part<From> part) { return (Part<To>)part; }, x);
}

PREFOLD_INLINE Floats zeros() { return Floats(0.0f); }

// Load sixteen numbers, and store them. Part by part, because GCC copies objects larger than a register through the
// stack.
template <class T>
PREFOLD_INLINE Vec<T> load_bits(const void* p) {
  return Vec<T>::make([=](int i) {
    Part<T> x;
    memcpy(&x, static_cast<const char*>(p) + i * sizeof x, sizeof x);
    return x;
  });
}

template <class T>
PREFOLD_INLINE void store_bits(void* p, const Vec<T>& x) {
  constexpr size_t kSize = sizeof(Part<T>);
  char* to = static_cast<char*>(p);
  memcpy(to, &x.part[0], kSize);
  if constexpr (kParts > 1) memcpy(to + kSize, &x.part[1], kSize);
  if constexpr (kParts > 2) memcpy(to + 2 * kSize, &x.part[2], kSize), memcpy(to + 3 * kSize, &x.part[3], kSize);
}

PREFOLD_INLINE Floats load(const float* p) { return load_bits<float>(p); }
PREFOLD_INLINE void store(float* p, const Floats& x) { store_bits(p, x); }

// a * b + c, rounded once if the processor can. With plain operators, the compiler decides in each place which product
// of a sum to fuse, so the same sum may have other bits elsewhere.
PREFOLD_INLINE Floats fused(const Floats& a, const Floats& b, const Floats& c) {
  return Floats::map([](Part<float> a, Part<float> b, Part<float> c) {
#if defined(__AVX512F__)
    return (Part<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Part<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Part<float>)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return (Part<float>)(a * b + c);
#endif
  }, a, b, c);
}

// c - a * b, rounded like `fused`.
PREFOLD_INLINE Floats fused_less(const Floats& a, const Floats& b, const Floats& c) {
  return Floats::map([](Part<float> a, Part<float> b, Part<float> c) {
#if defined(__AVX512F__)
    return (Part<float>)_mm512_fnmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Part<float>)_mm256_fnmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Part<float>)vfmsq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return (Part<float>)(c - a * b);
#endif
  }, a, b, c);
}

typedef uint16_t HalfPart __attribute__((vector_size(kPartBytes / 2)));

PREFOLD_INLINE Part<float> widen(HalfPart x) {
#ifdef __AVX512F__
  return (Part<float>)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)x), 16);
#else
  return (Part<float>)(__builtin_convertvector(x, Part<uint32_t>) << 16);
#endif
}

PREFOLD_INLINE Floats load(const Bf16* p) {
  return Floats::make([=](int i) {
    HalfPart x;
    memcpy(&x, p + i * kPartLanes, sizeof x);
    return widen(x);
  });
}

// Round to bfloat16: to nearest even, as PyTorch does. NaN stays NaN.
PREFOLD_INLINE HalfPart narrow(Part<float> x) {
#ifdef __AVX512BF16__
  return (HalfPart)_mm512_cvtneps_pbh((__m512)x);
#else
  const Part<uint32_t> bits = (Part<uint32_t>)x;
  const Part<uint32_t> rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return __builtin_convertvector((x == x ? rounded : (bits | 0x400000)) >> 16, HalfPart);
#endif
}

PREFOLD_INLINE void store(Bf16* p, const Floats& x) {
  const auto store_part = [=](int i, Part<float> part) {
    const HalfPart h = narrow(part);
    memcpy(p + i * kPartLanes, &h, sizeof h);
  };
  store_part(0, x.part[0]);
  if constexpr (kParts > 1) store_part(1, x.part[1]);
  if constexpr (kParts > 2) store_part(2, x.part[2]), store_part(3, x.part[3]);
}

PREFOLD_INLINE float number_at(const float* p) { return *p; }

PREFOLD_INLINE float number_at(const Bf16* p) {
  const uint32_t bits = static_cast<uint32_t>(p->bits) << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// Round as if stored as E and loaded again.
template <class E>
PREFOLD_INLINE Floats rounded_to(const Floats& x) {
  if constexpr (std::is_same_v<E, float>) return x;
  return Floats::map([](Part<float> part) { return widen(narrow(part)); }, x);
}

// Load the first `count` of up to sixteen numbers, and zeros for the rest.
template <class E>
PREFOLD_INLINE Floats load_some(const E* p, int64_t count) {
  if (count >= kLanes) return load(p);
  E lanes[kLanes] = {};
  if (count > 0) memcpy(lanes, p, count * sizeof(E));  // p may be null if count is 0
  return load(lanes);
}

template <class E>
PREFOLD_INLINE void store_some(E* p, const Floats& x, int64_t count) {
  if (count >= kLanes) return store(p, x);
  E lanes[kLanes];
  store(lanes, x);
  memcpy(p, lanes, count * sizeof(E));
}

PREFOLD_INLINE Part<int32_t> lane_numbers(int part) {
  constexpr int32_t kNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Part<int32_t> x;
  memcpy(&x, kNumbers + part * kPartLanes, sizeof x);
  return x;
}

// Lane r of the result is lane r of a if bit r of `bits` is set, else of b. This is a selection, not a product: the
// other lanes may be NaN.
PREFOLD_INLINE Floats choose(uint32_t bits, const Floats& a, const Floats& b) {
#ifdef __AVX512F__
  return Floats::make(
      [&](int p) { return (Part<float>)_mm512_mask_mov_ps((__m512)b.part[p], (__mmask16)bits, (__m512)a.part[p]); });
#else
  return Floats::make([&](int p) {
    Part<int32_t> lane_bit;
    for (int i = 0; i < kPartLanes; ++i) lane_bit[i] = 1 << (p * kPartLanes + i);
    return ((Part<int32_t>{} + (int32_t)bits) & lane_bit) != 0 ? a.part[p] : b.part[p];
  });
#endif
}

// The larger number. b if a is NaN.
PREFOLD_INLINE Floats larger(const Floats& a, const Floats& b) {
  return Floats::map([](Part<float> a, Part<float> b) {
#ifdef __AVX512F__
    return (Part<float>)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
  }, a, b);
}

PREFOLD_INLINE float sum_of(const Floats& x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)x.part[0]);
#else
  float lanes[kLanes];
  store(lanes, x);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
#endif
}

PREFOLD_INLINE float max_of(const Floats& x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)x.part[0]);
#else
  float lanes[kLanes];
  store(lanes, x);
  float most = lanes[0];
  for (int i = 1; i < kLanes; ++i) most = lanes[i] > most ? lanes[i] : most;
  return most;
#endif
}

// 2^f for f in [0, 1), by minimax polynomials that are exact at 0. The relative error is 8e-8, or 9e-5 for results that
// are rounded to bfloat16 (2e-3) anyway.
template <bool kExact>
PREFOLD_INLINE Part<float> exp2_fraction(Part<float> f) {
  Part<float> p{};
  if constexpr (kExact) {
    p = 1.8671303442925476e-3f * f + 9.017029740500629e-3f;
    p = p * f + 5.579991352065253e-2f;
    p = p * f + 2.4016445004040288e-1f;
    p = p * f + 6.931513118140826e-1f;
  } else {
    p = 7.706705932265084e-2f * f + 2.2764497226720734e-1f;
    p = p * f + 6.951167907078639e-1f;
  }
  return p * f + 1.0f;
}

// 2^x: the integer part becomes the exponent, and the fraction goes through the polynomial. NaN stays NaN. Results that
// are too small become zero (AVX-512) or 2^-126.
template <bool kExact>
PREFOLD_INLINE Floats exp2(const Floats& whole_and_fraction) {
  return Floats::map([](Part<float> x) {
#ifdef __AVX512DQ__
    const Part<float> f = (Part<float>)_mm512_reduce_ps((__m512)x, 0x09);               // x - floor(x)
    return (Part<float>)_mm512_scalef_ps((__m512)exp2_fraction<kExact>(f), (__m512)x);  // times 2^floor(x)
#else
    const Part<float> least = Part<float>{} - 126.0f, most = Part<float>{} + 127.99999f;
    const Part<float> infinity = Part<float>{} + __builtin_inff();
    const auto is_over = x > most;
    x = x < least ? least : x;
    x = is_over ? most : x;
    Part<int32_t> whole = __builtin_convertvector(x, Part<int32_t>);
    whole += (__builtin_convertvector(whole, Part<float>) > x);  // truncation to floor: true is -1
    const Part<float> f = x - __builtin_convertvector(whole, Part<float>);
    return is_over ? infinity : exp2_fraction<kExact>(f) * (Part<float>)((whole + 127) << 23);
#endif
  }, whole_and_fraction);
}

// Select lanes of two vectors by number: 0 and up from a, kPartLanes and up from b.
template <class P>
PREFOLD_INLINE P pick(P a, P b, Part<int32_t> lanes) {
#ifdef __clang__
  P x;
  for (int i = 0; i < kPartLanes; ++i) x[i] = lanes[i] < kPartLanes ? a[lanes[i]] : b[lanes[i] - kPartLanes];
  return x;
#else
  return __builtin_shuffle(a, b, lanes);
#endif
}

// Transpose sixteen vectors of sixteen lanes: at the distances 8, 4, 2 and 1, two vectors swap the blocks off the
// diagonal. At a distance of whole parts, parts are swapped.
template <class T>
PREFOLD_INLINE void transpose(Vec<T>* rows) {
#pragma GCC unroll 4
  for (int distance = 8; distance > 0; distance /= 2) {
    const Part<int32_t> lane = lane_numbers(0);
    const Part<int32_t> upper = (lane & distance) != 0;
    const Part<int32_t> low = upper ? lane + (kPartLanes - distance) : lane;
    const Part<int32_t> high = upper ? lane + kPartLanes : lane + distance;
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i & distance) continue;
      Vec<T>& a = rows[i];
      Vec<T>& b = rows[i + distance];
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) {
        const int away = distance / kPartLanes;  // in parts
        if (away == 0) {
          const Part<T> x = a.part[p], y = b.part[p];
          a.part[p] = pick(x, y, low);
          b.part[p] = pick(x, y, high);
        } else if (!(p & away)) {
          const Part<T> x = a.part[p + away];
          a.part[p + away] = b.part[p];
          b.part[p] = x;
        }
      }
    }
  }
}

PREFOLD_INLINE bool any_bit(const Words& x) {
  uint32_t lanes[kLanes], any = 0;
  memcpy(lanes, &x, sizeof lanes);
  for (uint32_t lane : lanes) any |= lane;
  return any != 0;
}

}  // namespace prefold
