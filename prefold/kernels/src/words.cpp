// Packs the rows of a matrix into the panels of words that products.h multiplies.
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

constexpr int64_t kTile = 64;  // words of each column that are converted at once

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

// A number as float32 has it.
inline uint32_t widen_bits(float x) { return bits_of(x); }
inline uint32_t widen_bits(Bf16 x) { return uint32_t{x.bits} << 16; }
inline uint32_t widen_bits(F16 x) {
  const uint32_t sign = uint32_t{x.bits} << 16 & 0x80000000u, rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) return sign | 0x7f800000u | rest << 13;  // an infinity, or NaN
  if (rest >= 0x0400u) return sign | ((rest << 13) + (112u << 23));
  return sign | bits_of(static_cast<float>(rest) * 0x1p-24f);  // below the normal numbers: exact in float32
}

// float32 to bfloat16, to nearest even. No vector instruction: that of AVX-512 makes zeros of numbers that are below
// float32's normal ones.
inline uint32_t round_bits(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded;
}

// `count` words of a row: numbers of type To, converted from `from`.
template <class From, class To>
void convert(const From* from, int64_t count, uint32_t* words) {
  if constexpr (std::is_same_v<From, To>) {
    memcpy(words, from, count * sizeof words[0]);
  } else if constexpr (std::is_same_v<To, float>) {
    for (int64_t i = 0; i < count; ++i) words[i] = widen_bits(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) {
      words[i] = round_bits(widen_bits(from[2 * i])) | round_bits(widen_bits(from[2 * i + 1])) << 16;
    }
  }
}

template <class From, class To>
void pack_words(const From* const* rows, int64_t panels, int64_t k, int64_t words, uint32_t* out, int32_t threads) {
  constexpr int64_t kNumbers = sizeof(uint32_t) / sizeof(To);  // of a word
  parallel_ranges(panels, words * kPanel, threads, [&](int64_t first, int64_t stop) {
    // Rows are a word longer than a tile: the same word of all columns would lie in one set of the cache otherwise.
    alignas(64) uint32_t tile[kPanel][kTile + 1];
    for (int64_t panel = first; panel < stop; ++panel) {
      for (int64_t word = 0; word < words; word += kTile) {
        const int64_t count = std::min(kTile, words - word);
        for (int64_t column = 0; column < kPanel; ++column) {
          const From* row = rows[panel * kPanel + column];
          const int64_t left = row ? std::clamp<int64_t>(k - word * kNumbers, 0, count * kNumbers) : 0;
          if (left < count * kNumbers) memset(tile[column], 0, count * sizeof(uint32_t));
          if (!left) continue;
          // Copied first: the rows of a mapped file may lie at any byte.
          From numbers[kTile * kNumbers + 1];
          memcpy(numbers, reinterpret_cast<const char*>(row) + word * kNumbers * sizeof(From), left * sizeof(From));
          if (left % kNumbers) numbers[left] = From{};
          convert<From, To>(numbers, (left + kNumbers - 1) / kNumbers, tile[column]);
        }
        uint32_t* at = out + (panel * words + word) * kPanel;
        for (int64_t i = 0; i < count; ++i, at += kPanel) {
          for (int64_t column = 0; column < kPanel; ++column) at[column] = tile[column][i];
        }
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
