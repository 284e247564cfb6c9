// Packs the rows of a matrix into panels of words (products.h).
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "interface.h"
#include "parallel.h"
#include "vectors.h"

namespace prefold {

struct F16 {
  uint16_t bits;
};

namespace {

constexpr int64_t kTile = 64;  // words of each column to convert at once

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

// The bits of a number after conversion to float32.
inline uint32_t widen_bits(float x) { return bits_of(x); }
inline uint32_t widen_bits(Bf16 x) { return uint32_t{x.bits} << 16; }
inline uint32_t widen_bits(F16 x) {
  const uint32_t sign = uint32_t{x.bits} << 16 & 0x80000000u, rest = x.bits & 0x7fffu;
  const uint32_t wide = (rest << 13) + (rest < 0x7c00u ? 112u << 23 : 224u << 23);           // or an infinity, or NaN
  const uint32_t tiny = bits_of(static_cast<float>(static_cast<int32_t>(rest)) * 0x1p-24f);  // exact in float32
  return sign | (rest < 0x0400u ? tiny : wide);
}

// Round float32 to bfloat16, to nearest even. Not with the AVX-512 instruction, which turns subnormal numbers into
// zeros.
inline uint32_t round_bits(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded;
}

// Write the numbers [first, first + count) of a row as type To, with zeros from number `k` on. A row of a mapped file
// may start at any byte, so it is copied before it is read.
template <class From, class To>
void convert(const From* row, int64_t first, int64_t count, int64_t k, char* out) {
  const int64_t left = row ? std::clamp<int64_t>(k - first, 0, count) : 0;
  if (left < count) memset(out + left * sizeof(To), 0, (count - left) * sizeof(To));
  const char* from = reinterpret_cast<const char*>(row) + first * static_cast<int64_t>(sizeof(From));
  if constexpr (std::is_same_v<From, To>) {
    if (left) memcpy(out, from, left * sizeof(To));
  } else {
    From numbers[kTile * sizeof(uint32_t) / sizeof(To)];
    if (left) memcpy(numbers, from, left * sizeof(From));
    for (int64_t i = 0; i < left; ++i) {
      const uint32_t wide = widen_bits(numbers[i]);
      if constexpr (std::is_same_v<To, float>) {
        memcpy(out + i * sizeof wide, &wide, sizeof wide);
      } else {
        const auto half = static_cast<uint16_t>(round_bits(wide));
        memcpy(out + i * sizeof half, &half, sizeof half);
      }
    }
  }
}

typedef uint32_t Four __attribute__((vector_size(16)));

inline Four load_four(const char* p) {
  Four x;
  memcpy(&x, p, sizeof x);
  return x;
}

// Interleave the first two lanes of a and b, or the last two.
#if defined(__clang__) || __GNUC__ >= 12
inline Four first_in_turn(Four a, Four b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
inline Four last_in_turn(Four a, Four b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
#else
inline Four first_in_turn(Four a, Four b) { return __builtin_shuffle(a, b, Four{0, 4, 1, 5}); }
inline Four last_in_turn(Four a, Four b) { return __builtin_shuffle(a, b, Four{2, 6, 3, 7}); }
#endif

// The words of each column, one column after the other. The rows are padded: otherwise the same word of all columns
// would fall into one set of the cache.
struct Tile {
  alignas(16) char rows[kPanel][(kTile + 4) * sizeof(uint32_t)];

  const char* at(int64_t column, int64_t word) const { return rows[column] + word * sizeof(uint32_t); }
};

// Transpose a tile: out [count][kPanel] has the same word of all columns together.
void transpose(const Tile& tile, int64_t count, uint32_t* out) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    for (int64_t column = 0; column < kPanel; column += 4) {
      const Four a = load_four(tile.at(column, i)), b = load_four(tile.at(column + 1, i));
      const Four c = load_four(tile.at(column + 2, i)), d = load_four(tile.at(column + 3, i));
      const Four ac = first_in_turn(a, c), bd = first_in_turn(b, d), ac2 = last_in_turn(a, c), bd2 = last_in_turn(b, d);
      const Four words[4] = {first_in_turn(ac, bd), last_in_turn(ac, bd), first_in_turn(ac2, bd2),
                             last_in_turn(ac2, bd2)};
      for (int64_t w = 0; w < 4; ++w) memcpy(out + (i + w) * kPanel + column, &words[w], sizeof words[w]);
    }
  }
  for (; i < count; ++i) {
    for (int64_t column = 0; column < kPanel; ++column) memcpy(out + i * kPanel + column, tile.at(column, i), 4);
  }
}

template <class From, class To>
void pack_words(const From* const* rows, int64_t panels, int64_t k, int64_t words, uint32_t* out, int32_t threads) {
  constexpr int64_t kNumbers = sizeof(uint32_t) / sizeof(To);  // of a word
  parallel_ranges(panels, words * kPanel, threads, [&](int64_t first, int64_t stop) {
    Tile tile;
    for (int64_t panel = first; panel < stop; ++panel) {
      for (int64_t word = 0; word < words; word += kTile) {
        const int64_t count = std::min(kTile, words - word);
        for (int64_t column = 0; column < kPanel; ++column) {
          const From* row = rows[panel * kPanel + column];
          convert<From, To>(row, word * kNumbers, count * kNumbers, k, tile.rows[column]);
        }
        transpose(tile, count, out + (panel * words + word) * kPanel);
      }
    }
  });
}

}  // namespace

#define PREFOLD_EXPORT_PACK_WORDS(name, From, To)                                                              \
  extern "C" void prefold_pack_words_##name(const From* const* rows, int64_t panels, int64_t k, int64_t words, \
                                            uint32_t* out, int32_t threads) {                                  \
    pack_words<From, To>(rows, panels, k, words, out, threads);                                                \
  }
PREFOLD_EXPORT_PACK_WORDS(float32, float, float)
PREFOLD_EXPORT_PACK_WORDS(float32_bfloat16, float, Bf16)
PREFOLD_EXPORT_PACK_WORDS(bfloat16, Bf16, Bf16)
PREFOLD_EXPORT_PACK_WORDS(bfloat16_float32, Bf16, float)
PREFOLD_EXPORT_PACK_WORDS(float16_float32, F16, float)
PREFOLD_EXPORT_PACK_WORDS(float16_bfloat16, F16, Bf16)

}  // namespace prefold
