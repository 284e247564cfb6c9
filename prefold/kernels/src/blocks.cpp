// Packs the blocks of a file into panels, and decodes panels: see blocks.h.
#include "blocks.h"

#include <algorithm>
#include <cstdlib>

#include "parallel.h"
#include "vectors.h"

namespace prefold {
namespace {

constexpr int kPanel = 32;  // columns
constexpr int kRun = 32;    // numbers along k whose planes lie together

// What stands before the numbers of a unit, of each column: float16 numbers, then a byte or two for each group.
//   kScale       d                     x = d * q
//   kScaleMin    d, m                  x = d * q + m
//   kScalesMins  d, m, scales, minima  x = d * scale * q - m * minimum
//   kScales      d, signed scales      x = d * scale * q
enum Scales { kScale, kScaleMin, kScalesMins, kScales };

// A type: numbers of a block, which are those of a unit, and of a group that shares a scale; bits of a number;
// what is taken from the unsigned q; and where its parts lie in a block of the file.
template <int TYPE>
struct Blocks;

#define PREFOLD_BLOCKS(type, unit, group, bits, zero, scales, bytes)                             \
  template <>                                                                                    \
  struct Blocks<type> {                                                                          \
    static constexpr int kUnit = unit, kGroup = group, kBits = bits, kZero = zero, kBytes = bytes; \
    static constexpr Scales kKind = scales;                                                      \
  };
PREFOLD_BLOCKS(kQ4_0, 32, 32, 4, 8, kScale, 18)
PREFOLD_BLOCKS(kQ4_1, 32, 32, 4, 0, kScaleMin, 20)
PREFOLD_BLOCKS(kQ5_0, 32, 32, 5, 16, kScale, 22)
PREFOLD_BLOCKS(kQ5_1, 32, 32, 5, 0, kScaleMin, 24)
PREFOLD_BLOCKS(kQ8_0, 32, 32, 8, 0, kScale, 34)
PREFOLD_BLOCKS(kQ4_K, 256, 32, 4, 0, kScalesMins, 144)
PREFOLD_BLOCKS(kQ5_K, 256, 32, 5, 0, kScalesMins, 176)
PREFOLD_BLOCKS(kQ6_K, 256, 16, 6, 32, kScales, 210)
#undef PREFOLD_BLOCKS

template <class B>
constexpr int kGroups = B::kUnit / B::kGroup;
// Of a unit, in bytes: its float16 numbers, the bytes of its groups, and a run of its numbers.
template <class B>
constexpr int kHalves = (B::kKind == kScale || B::kKind == kScales ? 1 : 2) * kPanel * 2;
template <class B>
constexpr int kGroupBytes = (B::kKind == kScalesMins ? 2 : B::kKind == kScales ? 1 : 0) * kGroups<B> * kPanel;
template <class B>
constexpr int kLowBytes = kRun * kPanel * (B::kBits == 8 ? 8 : 4) / 8;
template <class B>
constexpr int kRunBytes = kRun * kPanel * B::kBits / 8;
template <class B>
constexpr int kUnitBytes = kHalves<B> + kGroupBytes<B> + B::kUnit / kRun * kRunBytes<B>;

// Where, in a word of a plane of one or two bits, those of number i are: so that shifting them right by i times their
// number of bits (or left, round the end) takes them behind the four low ones.
constexpr int high_place(int bits, int i) { return (4 + bits * i) % 32; }

// A block as it is in a file, taken apart.
struct Apart {
  uint16_t d, m;
  uint8_t scales[16], minima[8], numbers[256];
};

// The six bits of scale and minimum j of twelve bytes.
inline void scale_and_minimum(const uint8_t* bytes, int j, uint8_t* scale, uint8_t* minimum) {
  if (j < 4) {
    *scale = bytes[j] & 63, *minimum = bytes[j + 4] & 63;
  } else {
    *scale = (bytes[j + 4] & 15) | bytes[j - 4] >> 6 << 4;
    *minimum = bytes[j + 4] >> 4 | bytes[j] >> 6 << 4;
  }
}

// Takes a block apart, as https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h lays it out.
template <int TYPE>
void take_apart(const uint8_t* block, Apart& out) {
  using B = Blocks<TYPE>;
  if constexpr (B::kKind == kScale || B::kKind == kScaleMin) {
    memcpy(&out.d, block, 2), block += 2;
    if constexpr (B::kKind == kScaleMin) memcpy(&out.m, block, 2), block += 2;
    uint32_t high = 0;
    if constexpr (B::kBits == 5) memcpy(&high, block, 4), block += 4;
    for (int i = 0; i < B::kUnit; ++i) {
      if constexpr (B::kBits == 8) out.numbers[i] = block[i];
      else out.numbers[i] = (i < 16 ? block[i] & 15 : block[i - 16] >> 4) | (high >> i & 1) << 4;
    }
  } else if constexpr (B::kKind == kScalesMins) {
    memcpy(&out.d, block, 2), memcpy(&out.m, block + 2, 2);
    for (int j = 0; j < kGroups<B>; ++j) scale_and_minimum(block + 4, j, &out.scales[j], &out.minima[j]);
    const uint8_t *high = block + 16, *low = block + (B::kBits == 5 ? 48 : 16);
    for (int i = 0; i < B::kUnit; ++i) {
      const int group = i / 32, at = i % 32, byte = group / 2 * 32 + at;
      out.numbers[i] = group % 2 ? low[byte] >> 4 : low[byte] & 15;
      if constexpr (B::kBits == 5) out.numbers[i] |= (high[at] >> group & 1) << 4;
    }
  } else {
    memcpy(out.scales, block + 192, 16), memcpy(&out.d, block + 208, 2);
    for (int i = 0; i < B::kUnit; ++i) {
      const int half = i / 128, quarter = i % 128 / 32, at = i % 32;
      const uint8_t low = block[half * 64 + quarter % 2 * 32 + at], high = block[128 + half * 32 + at];
      out.numbers[i] = (quarter < 2 ? low & 15 : low >> 4) | (high >> 2 * quarter & 3) << 4;
    }
  }
}

// Puts the numbers of a run of one column into their planes, which are zeros before.
template <class B>
void put_run(const uint8_t* numbers, int column, uint8_t* run) {
  for (int i = 0; i < kRun; ++i) {
    if constexpr (B::kBits == 8) {
      run[(i / 4 * kPanel + column) * 4 + i % 4] = numbers[i];
      continue;
    }
    run[(i / 8 * kPanel + column) * 4 + i % 4] |= (numbers[i] & 15) << (i / 4 % 2 * 4);
    if constexpr (B::kBits > 4 && B::kBits < 8) {
      constexpr int kHigh = B::kBits - 4, kInWord = 32 / kHigh;
      auto* words = reinterpret_cast<uint32_t*>(run + kLowBytes<B>) + i / kInWord * kPanel + column;
      *words |= uint32_t{numbers[i]} >> 4 << high_place(kHigh, i % kInWord);
    }
  }
}

// A unit of a panel out of a block of each of its rows; a row that is null has zeros.
template <int TYPE>
void put_unit(const uint8_t* const* rows, int64_t number, uint8_t* unit) {
  using B = Blocks<TYPE>;
  memset(unit, 0, kUnitBytes<B>);
  for (int column = 0; column < kPanel; ++column) {
    if (!rows[column]) continue;
    Apart apart;
    take_apart<TYPE>(rows[column] + number * B::kBytes, apart);
    auto* halves = reinterpret_cast<uint16_t*>(unit);
    halves[column] = apart.d;
    if constexpr (B::kKind == kScaleMin || B::kKind == kScalesMins) halves[kPanel + column] = apart.m;
    uint8_t* groups = unit + kHalves<B>;
    if constexpr (kGroupBytes<B> > 0) {
      for (int j = 0; j < kGroups<B>; ++j) {
        groups[j * kPanel + column] = apart.scales[j];
        if constexpr (B::kKind == kScalesMins) groups[(kGroups<B> + j) * kPanel + column] = apart.minima[j];
      }
    }
    for (int run = 0; run < B::kUnit / kRun; ++run) {
      put_run<B>(apart.numbers + run * kRun, column, groups + kGroupBytes<B> + run * kRunBytes<B>);
    }
  }
}

// 16-bit numbers lie in pairs along k, as bfloat16 words of products.h.
void put_pairs(const uint8_t* const* rows, int64_t number, uint8_t* unit) {
  for (int pair = 0; pair < kRun / 2; ++pair) {
    for (int column = 0; column < kPanel; ++column) {
      uint32_t word = 0;
      if (rows[column]) memcpy(&word, rows[column] + (number * kRun / 2 + pair) * 4, 4);
      memcpy(unit + (pair * kPanel + column) * 4, &word, 4);
    }
  }
}

// The float16 numbers in the lower halves of words, as floats.
PREFOLD_INLINE Floats of_float16(const Words& halves) {
  return Floats::make([&](int p) {
    const Part<uint32_t> bits = halves.part[p] & 0xffffu;
#ifdef __AVX512F__
    return (Part<float>)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)bits));
#else
    const Part<uint32_t> size = bits & 0x7fffu, sign = (bits & 0x8000u) << 16;
    const Part<uint32_t> finite = (Part<uint32_t>)((Part<float>)(size << 13) * 0x1p112f);  // subnormal ones as well
    const Part<uint32_t> endless = size << 13 | 0x7f800000u;                               // infinity and NaN
    return (Part<float>)(sign | (size > 0x7bffu ? endless : finite));
#endif
  });
}

// Sixteen whole numbers of memory, as words.
template <class N>
PREFOLD_INLINE Words load_words(const uint8_t* at) {
  typedef N Numbers __attribute__((vector_size(kPartLanes * sizeof(N)), may_alias));
  return Words::make([&](int p) {
    Numbers x;
    memcpy(&x, at + p * sizeof x, sizeof x);
    return (Part<uint32_t>)__builtin_convertvector(x, Part<int32_t>);
  });
}

PREFOLD_INLINE Words load_words(const uint8_t* at) {
  Words x;
  memcpy(&x, at, sizeof x);
  return x;
}

PREFOLD_INLINE Floats to_floats(const Words& x) {
  return Floats::make([&](int p) { return __builtin_convertvector((Part<int32_t>)x.part[p], Part<float>); });
}

template <int LEFT, int RIGHT>
PREFOLD_INLINE Words shift(const Words& x) {
  return Words::make([&](int p) { return LEFT ? x.part[p] << LEFT : x.part[p] >> RIGHT; });
}

// Byte i of each word, with its sign.
template <int I>
PREFOLD_INLINE Words signed_byte(const Words& x) {
  return Words::make([&](int p) { return (Part<uint32_t>)((Part<int32_t>)(x.part[p] << (24 - 8 * I)) >> 24); });
}

// Two vectors of floats as bfloat16 in one, the first in the lower halves.
PREFOLD_INLINE Words pair_of(const Floats& first, const Floats& second) {
  return Words::make([&](int p) {
#ifdef __AVX512BF16__
    const __m512i order = (__m512i)((Part<uint32_t>)lane_numbers(0) * 0x10001u + 0x100000u);  // lane i: halves i, 16 + i
    return (Part<uint32_t>)_mm512_permutexvar_epi16(
        order, (__m512i)_mm512_cvtne2ps_pbh((__m512)second.part[p], (__m512)first.part[p]));
#else
    return __builtin_convertvector(narrow(first.part[p]), Part<uint32_t>) |
           __builtin_convertvector(narrow(second.part[p]), Part<uint32_t>) << 16;
#endif
  });
}

// Writes numbers 2 * PAIR and 2 * PAIR + 1 along k of sixteen columns.
template <bool PAIRS>
PREFOLD_INLINE void put(uint32_t* words, int64_t pair, const Floats& first, const Floats& second) {
  if constexpr (PAIRS) {
    const Words both = pair_of(first, second);
    memcpy(words + pair * kPanel, &both, sizeof both);
  } else {
    memcpy(words + 2 * pair * kPanel, &first, sizeof first);
    memcpy(words + (2 * pair + 1) * kPanel, &second, sizeof second);
  }
}

// Number I of a run, of sixteen columns. low: the word that it is in; high: likewise, of the plane of higher bits
template <class B, int I>
PREFOLD_INLINE Floats number(const Words& low, const Words* high, const Floats& scale, const Floats& least) {
  Words q;
  if constexpr (B::kBits == 8) {
    q = signed_byte<I % 4>(low);
  } else {
    q = shift<0, I % 4 * 8 + I / 4 % 2 * 4>(low) & Words(15);
    if constexpr (B::kBits > 4) {
      constexpr int kHigh = B::kBits - 4, kInWord = 32 / kHigh, kPlace = high_place(kHigh, I % kInWord);
      q |= shift<(kPlace < 4 ? 4 - kPlace : 0), (kPlace < 4 ? 0 : kPlace - 4)>(high[I / kInWord]) &
           Words(((1 << kHigh) - 1) << 4);
    }
  }
  return to_floats(q) * scale + least;
}

template <class B, bool PAIRS, int... PAIR>
PREFOLD_INLINE void decode_run(const uint8_t* run, const Floats* scales, const Floats* least, uint32_t* words,
                               std::integer_sequence<int, PAIR...>) {
  constexpr int kInWord = B::kBits == 8 ? 4 : 8;
  Words high[2];
  if constexpr (B::kBits == 5) high[0] = load_words(run + kLowBytes<B>);
  if constexpr (B::kBits == 6) {
    high[0] = load_words(run + kLowBytes<B>);
    high[1] = load_words(run + kLowBytes<B> + kPanel * 4);
  }
  const auto pair = [&](auto number_of_pair) __attribute__((always_inline)) {
    constexpr int kI = 2 * decltype(number_of_pair)::value, kScaleOf = kI / B::kGroup;
    const Words low = load_words(run + kI / kInWord * kPanel * 4);
    put<PAIRS>(words, kI / 2, number<B, kI>(low, high, scales[kScaleOf], least[kScaleOf]),
               number<B, kI + 1>(low, high, scales[kScaleOf], least[kScaleOf]));
  };
  (pair(std::integral_constant<int, PAIR>()), ...);
}

template <int TYPE, bool PAIRS>
void decode_units(const uint8_t* unit, int64_t count, uint32_t* words) {
  using B = Blocks<TYPE>;
  constexpr int kInRun = kRun / B::kGroup;  // scales
  for (int64_t u = 0; u < count; ++u, unit += kUnitBytes<B>) {
    for (int half = 0; half < 2; ++half) {
      const int column = half * kLanes;
      const uint8_t* groups = unit + kHalves<B> + column;
      const Floats d = of_float16(load_words<uint16_t>(unit + column * 2));
      Floats m = zeros();
      if constexpr (kHalves<B> > kPanel * 2) m = of_float16(load_words<uint16_t>(unit + (kPanel + column) * 2));
      const uint8_t* run = unit + kHalves<B> + kGroupBytes<B> + column * 4;
      uint32_t* to = words + column;
#pragma GCC unroll 1
      for (int r = 0; r < B::kUnit / kRun; ++r, run += kRunBytes<B>, to += kRun / (PAIRS ? 2 : 1) * kPanel) {
        Floats scales[kInRun], least[kInRun];
        for (int g = 0; g < kInRun; ++g) {
          const uint8_t* group = groups + (r * kInRun + g) * kPanel;
          if constexpr (B::kKind == kScalesMins) {
            scales[g] = d * to_floats(load_words<uint8_t>(group));
            least[g] = zeros() - m * to_floats(load_words<uint8_t>(group + kGroups<B> * kPanel));
          } else {
            scales[g] = B::kKind == kScales ? d * to_floats(load_words<int8_t>(group)) : d;
            least[g] = B::kKind == kScaleMin ? m : scales[g] * Floats(-B::kZero);
          }
        }
        decode_run<B, PAIRS>(run, scales, least, to, std::make_integer_sequence<int, kRun / 2>());
      }
    }
    words += B::kUnit / (PAIRS ? 2 : 1) * kPanel;
  }
}

template <int TYPE, bool PAIRS>
void decode_16_bits(const uint8_t* unit, int64_t count, uint32_t* words) {
  for (int64_t i = 0; i < count * kRun; ++i, unit += kLanes * 4) {  // sixteen columns of a pair
    const Words both = load_words(unit);
    const Floats first = TYPE == kF16 ? of_float16(both) : as<float>(shift<16, 0>(both));
    const Floats second = TYPE == kF16 ? of_float16(shift<0, 16>(both)) : as<float>(both & Words(0xffff0000u));
    put<PAIRS>(words + i % 2 * kLanes, i / 2, first, second);
  }
}

// What there is of a type: numbers of a unit, its bytes in a panel, and those of a block in a file.
struct Form {
  int type, unit, unit_bytes;
  void (*put)(const uint8_t* const*, int64_t, uint8_t*);
  void (*floats)(const uint8_t*, int64_t, uint32_t*);
  void (*pairs)(const uint8_t*, int64_t, uint32_t*);
};

template <int TYPE>
constexpr Form form() {
  using B = Blocks<TYPE>;
  return {TYPE, B::kUnit, kUnitBytes<B>, put_unit<TYPE>, decode_units<TYPE, false>, decode_units<TYPE, true>};
}

template <int TYPE>
constexpr Form form_of_16_bits() {
  return {TYPE, kRun, kRun * kPanel * 2, put_pairs, decode_16_bits<TYPE, false>, decode_16_bits<TYPE, true>};
}

constexpr Form kForms[] = {form<kQ4_0>(), form<kQ4_1>(), form<kQ5_0>(), form<kQ5_1>(), form<kQ8_0>(),
                           form<kQ4_K>(), form<kQ5_K>(), form<kQ6_K>(), form_of_16_bits<kF16>(),
                           form_of_16_bits<kBF16>()};

const Form* form_of(int64_t type) {
  for (const Form& form : kForms) {
    if (form.type == type) return &form;
  }
  return nullptr;
}

}  // namespace

void decode(const BlockPanel& panel, int64_t first, int64_t count, bool pairs, uint32_t* words) {
  const Form& form = *form_of(panel.type);
  const uint8_t* units = panel.data + first / form.unit * form.unit_bytes;
  (pairs ? form.pairs : form.floats)(units, count / form.unit, words);
}

}  // namespace prefold

// Bytes of a panel of this type with k numbers along k; 0: there is no decoder for the type, or k is not a whole number
// of its blocks.
extern "C" int64_t prefold_block_panel_size(int64_t type, int64_t k) {
  const prefold::Form* form = prefold::form_of(type);
  return form && k % form->unit == 0 ? k / form->unit * form->unit_bytes : 0;
}

// Packs panels of one type. rows [panels * 32]: where each column's row begins in the file, or null: zeros.
extern "C" void prefold_pack_blocks(int64_t type, const uint8_t* const* rows, int64_t panels, int64_t k, uint8_t* out,
                                    int32_t threads) {
  using namespace prefold;
  const Form& form = *form_of(type);
  const int64_t units = k / form.unit;
  parallel_ranges(panels, units * form.unit_bytes, threads, [&](int64_t first, int64_t stop) {
    for (int64_t i = first * units; i < stop * units; ++i) {
      form.put(rows + i / units * kPanel, i % units, out + i * form.unit_bytes);
    }
  });
}

// out [n, k] = columns `ids` of a matrix: rows of an embedding.
template <class E>
static void block_rows(const prefold::BlockPanel* panels, const int64_t* ids, E* out, int64_t n, int64_t k,
                       int32_t threads) {
  using namespace prefold;
  parallel_ranges(n, k * kPanel, threads, [&](int64_t first, int64_t stop) {
    alignas(64) uint32_t words[kDecoded * kPanel];
    for (int64_t row = first; row < stop; ++row) {
      for (int64_t at = 0; at < k; at += kDecoded) {
        const int64_t count = std::min(kDecoded, k - at);
        decode(panels[ids[row] / kPanel], at, count, false, words);
        for (int64_t i = 0; i < count; i += kLanes) {
          float numbers[kLanes];
          for (int l = 0; l < kLanes; ++l) memcpy(numbers + l, words + (i + l) * kPanel + ids[row] % kPanel, 4);
          store(out + row * k + at + i, load(numbers));
        }
      }
    }
  });
}

#define PREFOLD_EXPORT_BLOCK_ROWS(name, E)                                                                     \
  extern "C" void prefold_block_rows_##name(const prefold::BlockPanel* panels, const int64_t* ids, E* out,     \
                                            int64_t n, int64_t k, int32_t threads) {                           \
    block_rows(panels, ids, out, n, k, threads);                                                               \
  }
PREFOLD_EXPORT_BLOCK_ROWS(float32, float)
PREFOLD_EXPORT_BLOCK_ROWS(bfloat16, prefold::Bf16)
