// The number formats of the attention kernel. A format defines how keys and values are packed, and how a packed number
// is multiplied with a vector of queries:
//
//   Element     the type of queries, of results, and of keys and values before packing
//   Kept        the type of packed keys and values: Stored, or Bf16 that is widened to Stored when a chunk is read
//   Read        the format after widening, with Kept = Stored
//   Stored      the type of one broadcast: a float, or two bfloat16 numbers
//   Lane        the element type of a vector of queries; a lane has as many numbers as a Stored
//   kWidth      the number of numbers in one Stored
//   kExactExp   whether probabilities need float32's precision
//   mul_add     acc + vector x Stored (or vector x vector), the inner product of kWidth numbers
//
// Keys are rows of Stored along the head's dimensions. The kWidth numbers of a Stored of values belong to kWidth
// consecutive keys, because values are summed over keys.
#pragma once

#include "vectors.h"

namespace prefold {

// Elements E (float or Bf16), packed as K (float or Bf16), with float32 arithmetic.
template <class E, class K = float>
struct InFloat32 {
  using Element = E;
  using Kept = K;
  using Read = InFloat32<E>;
  using Stored = float;
  using Lane = float;
  static constexpr int kWidth = 1;
  static constexpr bool kExactExp = std::is_same_v<E, float>;

  static PREFOLD_INLINE Part<float> mul_add(Part<float> acc, Part<float> x, Stored y) { return acc + x * y; }
  static PREFOLD_INLINE Part<float> mul_add(Part<float> acc, Part<float> x, Part<float> y) { return acc + x * y; }

  // Load sixteen Stored along a row, with zeros past its `count` numbers; and store them.
  static PREFOLD_INLINE Floats load_row(const E* row, int64_t count) { return load_some(row, count); }
  static PREFOLD_INLINE void store_row(E* row, const Floats& x, int64_t count) { store_some(row, x, count); }

  // Make a vector of Stored from kWidth vectors.
  static PREFOLD_INLINE Floats join(const Floats& first, const Floats&) { return first; }

  // Store the probabilities of a pair of keys as the vectors that are multiplied with the values, `stride` floats
  // apart.
  static PREFOLD_INLINE void store_probabilities(float* out, int stride, const Floats& first, const Floats& second) {
    store(out, first);
    store(out + stride, second);
  }
  static PREFOLD_INLINE Floats probability(const float* at, int stride, int half) { return load(at + half * stride); }

  // Store the probabilities of sixteen keys for one query.
  static PREFOLD_INLINE void store_in_order(float* out, const Floats& x) { store(out, x); }

  // Store sixteen dimensions of the values of two consecutive keys into a packed pair of `dim` dimensions.
  static PREFOLD_INLINE void store_values(K* out, int64_t dim, const Floats& first, const Floats& second) {
    store(out, first);
    store(out + dim, second);
  }
  // Store sixteen dimensions of one key's values. The other key's values do not change.
  static PREFOLD_INLINE void store_half(K* out, int64_t dim, const Floats& x, int half) { store(out + half * dim, x); }
  // Load sixteen dimensions of one key's values.
  static PREFOLD_INLINE Floats load_half(const K* pair, int64_t dim, int half) { return load(pair + half * dim); }
  // Return one number of one key's values.
  static PREFOLD_INLINE float value(const float* pair, int64_t dim, int64_t d, int half) {
    return pair[half * dim + d];
  }
};

#ifdef __AVX512BF16__
// bfloat16 products summed in float32, with two numbers per lane. InFloat32 documents the members.
struct InBf16Pairs {
  using Element = Bf16;
  using Kept = uint32_t;
  using Read = InBf16Pairs;
  using Stored = uint32_t;
  using Lane = uint32_t;
  static constexpr int kWidth = 2;
  static constexpr bool kExactExp = false;
  static constexpr uint32_t kHigh = 0xffff0000u;  // the bits of a lane's second number; as a float, its value

  static PREFOLD_INLINE Part<float> mul_add(Part<float> acc, Part<uint32_t> x, Stored y) {
    return mul_add(acc, x, Part<uint32_t>{} + y);
  }
  static PREFOLD_INLINE Part<float> mul_add(Part<float> acc, Part<uint32_t> x, Part<uint32_t> y) {
    return (Part<float>)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)y);
  }

  static PREFOLD_INLINE Words load_row(const Bf16* row, int64_t count) {
    Words x;
    if (count >= 2 * kLanes) {
      memcpy(&x, row, sizeof x);
    } else {
      Words some(0);
      if (count > 0) memcpy(&some, row, count * sizeof(Bf16));  // row may be null if count is 0
      x = some;
    }
    return x;
  }

  static PREFOLD_INLINE void store_row(Bf16* row, const Words& x, int64_t count) {
    if (count >= 2 * kLanes) {
      memcpy(row, &x, sizeof x);
    } else {
      const Words some = x;
      memcpy(row, &some, count * sizeof(Bf16));
    }
  }

  static PREFOLD_INLINE Words join(const Floats& first, const Floats& second) {
    const Part<uint32_t> order = (Part<uint32_t>)lane_numbers(0) * 0x10001u + 0x100000u;  // lane i: halves i, 16 + i
    const __m512bh halves = _mm512_cvtne2ps_pbh((__m512)second.part[0], (__m512)first.part[0]);
    return Words::make([&](int) { return (Part<uint32_t>)_mm512_permutexvar_epi16((__m512i)order, (__m512i)halves); });
  }

  static PREFOLD_INLINE void store_probabilities(float* out, int, const Floats& first, const Floats& second) {
    const Words both = join(first, second);
    memcpy(out, &both, sizeof both);
  }
  static PREFOLD_INLINE Floats probability(const float* at, int, int half) {
    const Words both = as<uint32_t>(load(at));
    return as<float>(half ? both & Words(kHigh) : both * Words(0x10000));
  }

  static PREFOLD_INLINE void store_in_order(uint32_t* out, const Floats& x) {
    const HalfPart halves = narrow(x.part[0]);
    memcpy(out, &halves, sizeof halves);
  }

  // The numbers were bfloat16 before, so this rounds nothing.
  static PREFOLD_INLINE void store_values(uint32_t* out, int64_t, const Floats& first, const Floats& second) {
    const Words both = join(first, second);
    memcpy(out, &both, sizeof both);
  }
  static PREFOLD_INLINE void store_half(uint32_t* out, int64_t, const Floats& x, int half) {
    Part<uint32_t> both;
    memcpy(&both, out, sizeof both);
    const Part<uint32_t> bits = (Part<uint32_t>)x.part[0];
    both = half ? (both & ~kHigh) | bits : (both & kHigh) | bits >> 16;
    memcpy(out, &both, sizeof both);
  }
  static PREFOLD_INLINE Floats load_half(const uint32_t* pair, int64_t, int half) {
    Part<uint32_t> both;
    memcpy(&both, pair, sizeof both);
    return Floats::make([&](int) { return (Part<float>)(half ? both & kHigh : both << 16); });
  }
  static PREFOLD_INLINE float value(const uint32_t* pair, int64_t, int64_t d, int half) {
    const uint32_t bits = half ? pair[d] & kHigh : pair[d] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
  }
};
using InBf16 = InBf16Pairs;
using InBf16Slots = InBf16Pairs;
#else
using InBf16 = InFloat32<Bf16>;
using InBf16Slots = InFloat32<Bf16, Bf16>;
#endif

// The pairs of a chunk as Stored: in packed memory, or widened into this object's memory.
template <class Format, int PAIRS, int MOST_DIM>
struct ChunkPairs {
  using Stored = typename Format::Stored;
  static constexpr bool kWidens = !std::is_same_v<typename Format::Kept, Stored>;

  // Return pair `j` of a chunk, which has `size` numbers at `kept`.
  PREFOLD_INLINE const Stored* at(int j, const typename Format::Kept* kept, int64_t size) {
    if constexpr (kWidens) {
      Stored* out = numbers_ + j * size;
      for (int64_t i = 0; i < size; i += kLanes) store(out + i, load(kept + i));
      return out;
    } else {
      return kept;
    }
  }

 private:
  alignas(64) Stored numbers_[kWidens ? PAIRS * 2 * MOST_DIM : 1];
};

}  // namespace prefold
