// The block types: the layout of their numbers in a panel (blocks.h), and functions that read them.
#pragma once

#include "blocks.h"
#include "vectors.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace prefold {

constexpr int kRun = 32;  // numbers along k whose planes lie together
// Bytes to prefetch ahead. Decoding is so slow that the processor does not recognise the stream by itself.
constexpr int kAhead = 8192;

// The header of a unit, for each column: float16 numbers, then a byte or two for each group.
//   kScale       d                     x = d * q
//   kScaleMin    d, m                  x = d * q + m
//   kScalesMins  d, m, scales, minima  x = d * scale * q - m * minimum
//   kScales      d, signed scales      x = d * scale * q
//   kPower       an exponent e         x = 2^(e - 128) * q, and q is two times a number of E2M1 (MXFP4)
enum Scales { kScale, kScaleMin, kScalesMins, kScales, kPower };

// A block type. kUnit: numbers in a block, and in a unit; kGroup: numbers that share a scale; kBits: bits of a number;
// kZero: subtracted from the unsigned q; kBytes: the size of a block in the file.
template <int TYPE>
struct Blocks;

#define PREFOLD_BLOCKS(type, unit, group, bits, zero, scales, bytes)                               \
  template <>                                                                                      \
  struct Blocks<type> {                                                                            \
    static constexpr int kUnit = unit, kGroup = group, kBits = bits, kZero = zero, kBytes = bytes; \
    static constexpr Scales kKind = scales;                                                        \
  };
PREFOLD_BLOCKS(kQ4_0, 32, 32, 4, 8, kScale, 18)
PREFOLD_BLOCKS(kQ4_1, 32, 32, 4, 0, kScaleMin, 20)
PREFOLD_BLOCKS(kQ5_0, 32, 32, 5, 16, kScale, 22)
PREFOLD_BLOCKS(kQ5_1, 32, 32, 5, 0, kScaleMin, 24)
PREFOLD_BLOCKS(kQ8_0, 32, 32, 8, 0, kScale, 34)
PREFOLD_BLOCKS(kQ4_K, 256, 32, 4, 0, kScalesMins, 144)
PREFOLD_BLOCKS(kQ5_K, 256, 32, 5, 0, kScalesMins, 176)
PREFOLD_BLOCKS(kQ6_K, 256, 16, 6, 32, kScales, 210)
PREFOLD_BLOCKS(kMXFP4, 32, 32, 4, 16, kPower, 17)
#undef PREFOLD_BLOCKS

template <class B>
constexpr int kGroups = B::kUnit / B::kGroup;
// Sizes in bytes of the parts of a unit: its float16 numbers, the bytes of its groups, and a run of its numbers.
template <class B>
constexpr int kHalves = (B::kKind == kPower                          ? 0
                         : B::kKind == kScale || B::kKind == kScales ? 1
                                                                     : 2) *
                        kPanel * 2;
template <class B>
constexpr int kBytesOfGroup = B::kKind == kScalesMins                     ? 2
                              : B::kKind == kScales || B::kKind == kPower ? 1
                                                                          : 0;
template <class B>
constexpr int kGroupBytes = kBytesOfGroup<B> * kGroups<B> * kPanel;
template <class B>
constexpr int kLowBytes = kRun * kPanel * (B::kBits == 8 ? 8 : 4) / 8;
template <class B>
constexpr int kRunBytes = kRun * kPanel * B::kBits / 8;
template <class B>
constexpr int kUnitBytes = kHalves<B> + kGroupBytes<B> + B::kUnit / kRun * kRunBytes<B>;

// The order within a run: a word of a plane has numbers of one column, at places along k that are all even, or all odd.
// The word's lane is twice the column, plus one for odd places. So two neighbouring lanes have the numbers of a word of
// bfloat16 pairs. kTurn: numbers along k in one turn of words.
template <class B>
constexpr int kTurn = 2 * 32 / (B::kBits == 8 ? 8 : 4);

// The first bit of number i of a turn in its word.
template <class B>
constexpr int low_place(int i) {
  return B::kBits == 8 ? 8 * i : i % 4 * 8 + i / 4 * 4;
}

// Convert the float16 numbers in the lower halves of words to floats.
PREFOLD_INLINE Floats of_float16(const Words& halves) {
  return Floats::map([](Part<uint32_t> word) {
    const Part<uint32_t> bits = word & 0xffffu;
#ifdef __AVX512F__
    return (Part<float>)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)bits));
#elif defined(__AVX2__) && defined(__F16C__)
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)bits, (__m256i)bits), 0x08);
    return (Part<float>)_mm256_cvtph_ps(_mm256_castsi256_si128(halves));
#else
    const Part<uint32_t> size = bits & 0x7fffu, sign = (bits & 0x8000u) << 16;
    const Part<uint32_t> finite = (Part<uint32_t>)((Part<float>)(size << 13) * 0x1p112f);  // also if subnormal
    const Part<uint32_t> endless = size << 13 | 0x7f800000u;                               // infinity and NaN
    return (Part<float>)(sign | (size > 0x7bffu ? endless : finite));
#endif
  }, halves);
}

// Load sixteen integers as words. Without intrinsics GCC converts vectors of bytes one by one.
template <class N>
PREFOLD_INLINE Words load_words(const uint8_t* at) {
  typedef N Numbers __attribute__((vector_size(kPartLanes * sizeof(N)), may_alias));
  return Words::make([=](int p) {
    Numbers x;
    memcpy(&x, at + p * sizeof x, sizeof x);
#if defined(__AVX512F__)
    if constexpr (sizeof(N) == 2) return (Part<uint32_t>)_mm512_cvtepu16_epi32((__m256i)x);
    else if constexpr (std::is_signed_v<N>) return (Part<uint32_t>)_mm512_cvtepi8_epi32((__m128i)x);
    else return (Part<uint32_t>)_mm512_cvtepu8_epi32((__m128i)x);
#elif defined(__AVX2__)
    if constexpr (sizeof(N) == 2) return (Part<uint32_t>)_mm256_cvtepu16_epi32((__m128i)x);
    else if constexpr (std::is_signed_v<N>)
      return (Part<uint32_t>)_mm256_cvtepi8_epi32(_mm_loadl_epi64((__m128i*)(at + p * 8)));
    else return (Part<uint32_t>)_mm256_cvtepu8_epi32(_mm_loadl_epi64((__m128i*)(at + p * 8)));
#else
    return (Part<uint32_t>)__builtin_convertvector(x, Part<int32_t>);
#endif
  });
}

// Load sixteen float16 numbers.
PREFOLD_INLINE Floats load_float16(const uint8_t* at) {
#ifdef __AVX512F__
  __m256i halves;
  memcpy(&halves, at, sizeof halves);
  return Floats::make([=](int) { return (Part<float>)_mm512_cvtph_ps(halves); });
#elif defined(__AVX2__) && defined(__F16C__)
  return Floats::make([=](int p) { return (Part<float>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at + p)); });
#else
  return of_float16(load_words<uint16_t>(at));
#endif
}

PREFOLD_INLINE Floats to_floats(const Words& x) {
  return Floats::map([](Part<uint32_t> part) { return __builtin_convertvector((Part<int32_t>)part, Part<float>); }, x);
}

// Shift left by BY bits; right if BY is negative.
template <int BY>
PREFOLD_INLINE Words shift(const Words& x) {
  return Words::map([](Part<uint32_t> part) { return BY < 0 ? part >> (BY < 0 ? -BY : 0) : part << (BY < 0 ? 0 : BY); },
                    x);
}

// (x & mask) | y
template <class Y>
PREFOLD_INLINE Words masked_or(const Words& x, uint32_t mask, const Y& y) {
#ifdef __AVX512F__
  return Words::make([=](int p) {
    return (Part<uint32_t>)_mm512_ternarylogic_epi32((__m512i)x.part[p], _mm512_set1_epi32(mask),
                                                     (__m512i)Words(y).part[p], 0xea);
  });
#else
  return (x & Words(mask)) | Words(y);
#endif
}

// Lanes 2 c and 2 c + 1 of the result are lane FIRST + c of x.
template <int FIRST>
PREFOLD_INLINE Floats doubled(const Floats& x) {
  return Floats::make([&](int p) {
    const int first = FIRST + p * kPartLanes / 2;
    const Part<float> from = x.part[first / kPartLanes];
    return pick(from, from, lane_numbers(0) / 2 + first % kPartLanes);
  });
}

// The even lanes of two vectors; the odd lanes if `odd` is 1.
PREFOLD_INLINE Part<float> every_other(Part<float> a, Part<float> b, int odd) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256 mixed =
      odd ? _mm256_shuffle_ps((__m256)a, (__m256)b, 0xdd) : _mm256_shuffle_ps((__m256)a, (__m256)b, 0x88);
  return (Part<float>)_mm256_permute4x64_epi64((__m256i)mixed, 0xd8);
#else
  return pick(a, b, 2 * lane_numbers(0) + odd);
#endif
}

#ifdef __AVX512F__
// Sixteen floats from 16 * HALF - ZERO on.
template <int HALF, int ZERO>
PREFOLD_INLINE __m512 table() {
  return (__m512)(__builtin_convertvector(lane_numbers(0), Part<float>) + float(16 * HALF - ZERO));
}
#endif

template <class B>
constexpr bool kHasMinima = B::kKind == kScaleMin || B::kKind == kScalesMins;

// Bits of an integer, including kZero. Twice a number of E2M1 is from -12 to 12.
template <class B>
constexpr int kWholeBits = B::kKind == kPower ? 5 : B::kBits;

// Look up the lower four bits of each byte: twice the E2M1 number, plus 16. The other bits of each byte must be zero.
PREFOLD_INLINE Words whole_e2m1(const Words& codes) {
#if defined(__AVX512BW__)
  const __m512i sums =
      _mm512_broadcast_i32x4(_mm_setr_epi8(16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4));
  return Words::map([=](Part<uint32_t> part) { return (Part<uint32_t>)_mm512_shuffle_epi8(sums, (__m512i)part); },
                    codes);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i sums =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4));
  return Words::map([=](Part<uint32_t> part) { return (Part<uint32_t>)_mm256_shuffle_epi8(sums, (__m256i)part); },
                    codes);
#else
  return Words::map([](Part<uint32_t> code) {
    const Part<uint32_t> size = code & 0x07070707u, low = size & (size >> 2 & 0x01010101u) * 3u;  // low: for sizes >= 4
    const Part<uint32_t> sum = size + low + 2u * (low & low >> 1 & 0x01010101u);
    return 0x10101010u + sum - 2u * (sum & (code >> 3 & 0x01010101u) * 255u);
  }, codes);
#endif
}

// Look up the lower four bits of each word: twice the E2M1 number.
PREFOLD_INLINE Floats e2m1(const Words& codes) {
#if defined(__AVX512F__)
  const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  return Floats::make([&](int p) { return (Part<float>)_mm512_permutexvar_ps((__m512i)codes.part[p], numbers); });
#elif defined(__AVX2__)
  const __m256 sizes = _mm256_setr_ps(0, 1, 2, 3, 4, 6, 8, 12);
  return Floats::make([&](int p) {
    const Part<uint32_t> sign = (codes.part[p] & 8u) << 28;
    return (Part<float>)((Part<uint32_t>)_mm256_permutevar8x32_ps(sizes, (__m256i)codes.part[p]) ^ sign);
  });
#else
  return to_floats(whole_e2m1(codes & Words(15)) & Words(255)) + Floats(-16.0f);
#endif
}

// Whether a number becomes a float by writing its bits below the leading one of a power of two. The float is then too
// large by kExcess. Subtracting kExcess times the scale is exact, but not if a minimum is added as well. Other types
// look their numbers up or convert them.
template <class B>
constexpr bool kBehindPower =
#ifdef __AVX512F__
    B::kBits == 8 || B::kBits == 6 || (B::kBits == 5 && !kHasMinima<B>);
#else
    !kHasMinima<B> && B::kKind != kPower;
#endif

// The excess of a number: the power of two above its bits, and the zero of its type.
template <class B>
constexpr int kExcess = kBehindPower<B> ? (1 << B::kBits) + (B::kBits == 8 ? 128 : B::kZero) : 0;

// Number I of each lane, without its scale and plus kExcess. low: the word of its turn; high: the plane of higher bits.
template <class B, int I>
PREFOLD_INLINE Floats number(const Words& low, const Words& high) {
  constexpr int kPlace = low_place<B>(I % (kTurn<B> / 2)), kLowBits = B::kBits == 8 ? 8 : 4;
  constexpr int kHighBits = B::kBits - kLowBits;
  if constexpr (kBehindPower<B>) {
    constexpr int kUnit = 23 - B::kBits;  // the bit that is worth one in a float with this power
    constexpr uint32_t kPower = uint32_t(127 + B::kBits) << 23;
    Words bits = masked_or(shift<kUnit - kPlace>(low), ((1u << kLowBits) - 1) << kUnit, kPower);
    if constexpr (kHighBits > 0) {
      constexpr uint32_t kMask = ((1u << kHighBits) - 1) << (kUnit + 4);
      bits = masked_or(shift<kUnit + 4 - I * kHighBits>(high), kMask, bits);
    }
    return as<float>(bits);
  }
  const Words index = shift<-kPlace>(low);
  if constexpr (B::kKind == kPower) return e2m1(index);
#ifdef __AVX512F__
  if constexpr (kHighBits == 0) {
    return Floats::make(
        [&](int p) { return (Part<float>)_mm512_permutexvar_ps((__m512i)index.part[p], table<0, B::kZero>()); });
  }
  const Words upper = shift<4 - I>(high);
  return Floats::make([&](int p) {  // four bits of `index`, and the fifth bit of `upper`
    const __m512i whole =
        _mm512_ternarylogic_epi32(_mm512_set1_epi32(16), (__m512i)upper.part[p], (__m512i)index.part[p], 0xca);
    return (Part<float>)_mm512_permutex2var_ps(table<0, B::kZero>(), whole, table<1, B::kZero>());
  });
#else
  Words whole = index & Words(15);
  if constexpr (kHighBits > 0) whole |= shift<4 - I>(high) & Words(16);
  return to_floats(whole);
#endif
}

struct ScaleAndLeast {
  Floats scale, least;
};

// The scale of a group of a unit for sixteen columns from `column` on, and the number to add (zero if the type has no
// minima).
template <class B>
PREFOLD_INLINE ScaleAndLeast scale_and_least(const uint8_t* unit, int64_t group, int column) {
  const uint8_t* at = unit + kHalves<B> + group * kPanel + column;
  if constexpr (B::kKind == kPower) {
    return {Floats::map(
                [](Part<uint32_t> e) {  // the lowest two exponents are subnormal
      return (Part<float>)(e < 2u ? (Part<uint32_t>{} + 0x00200000u) << e : (e - 1u) << 23);
    }, load_words<uint8_t>(at)),
            zeros()};
  }
  const Floats d = load_float16(unit + column * 2);
  if constexpr (B::kKind == kScale) return {d, zeros()};
  if constexpr (B::kKind == kScales) return {d * to_floats(load_words<int8_t>(at)), zeros()};
  const Floats m = load_float16(unit + (kPanel + column) * 2);
  if constexpr (B::kKind == kScaleMin) return {d, m};
  return {d * to_floats(load_words<uint8_t>(at)),
          zeros() - m * to_floats(load_words<uint8_t>(at + kGroups<B> * kPanel))};
}

// The place of a run: its unit, its number in the unit, and the run itself.
struct RunPlace {
  const uint8_t* unit;
  int64_t number;
  const uint8_t* run;
};

// Find the run of a panel that has the numbers from k on, and prefetch data further on.
template <class B>
PREFOLD_INLINE RunPlace run_of(const uint8_t* panel, int64_t k) {
  const uint8_t* unit = panel + k / B::kUnit * kUnitBytes<B>;
  const int64_t number = k % B::kUnit / kRun;
  const uint8_t* run = unit + kHalves<B> + kGroupBytes<B> + number * kRunBytes<B>;
  constexpr int kRunLines = (kRunBytes<B> + kRun * (kHalves<B> + kGroupBytes<B>) / B::kUnit + 63) / 64;
  for (int i = 0; i < kRunLines; ++i) __builtin_prefetch(run + kAhead + i * 64, 0, 2);
  return {unit, number, run};
}

// Integers of word J of the eight words of a run, for one side of sixteen columns: four numbers at even places, or at
// odd places. low: the word of its turn; high: the plane of higher bits.
template <class B, int J>
PREFOLD_INLINE Words whole_numbers(const Words& low, const Words& high) {
  if constexpr (B::kBits == 8) return low;
  const Words four = (J % 4 / 2 ? shift<-4>(low) : low) & Words(0x0f0f0f0fu);
  if constexpr (B::kKind == kPower) return whole_e2m1(four);
  constexpr int kFour = J / 2;  // which four of the numbers at even places, or at odd places
  if constexpr (B::kBits == 5) {
    // The product moves each of four bits to the fifth bit of its byte. No two bits meet there.
    const Words bits = shift<-4 * kFour>(high) & Words(15);
    return masked_or(bits * Words(0x02040810u), 0x10101010u, four);
  }
  if constexpr (B::kBits == 6) {
    const Words bits = shift<-8 * kFour>(high);
    Words out = masked_or(shift<4>(bits), 0x30u, four);
    out = masked_or(shift<10>(bits), 0x3000u, out);
    out = masked_or(shift<16>(bits), 0x300000u, out);
    return masked_or(shift<22>(bits), 0x30000000u, out);
  }
  return four;
}

}  // namespace prefold
