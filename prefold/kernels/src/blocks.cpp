// Packs the blocks of a file into panels, and decodes panels (blocks.h).
#include "blocks.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <utility>

#include "block_types.h"
#include "interface.h"
#include "parallel.h"

namespace prefold {
namespace {

// The parts of a block of a file.
struct Apart {
  uint16_t d, m;
  uint8_t scales[16], minima[8], numbers[256];
};

// Extract the six bits of scale j, and of minimum j, from twelve bytes.
inline void scale_and_minimum(const uint8_t* bytes, int j, uint8_t* scale, uint8_t* minimum) {
  if (j < 4) {
    *scale = bytes[j] & 63, *minimum = bytes[j + 4] & 63;
  } else {
    *scale = (bytes[j + 4] & 15) | bytes[j - 4] >> 6 << 4;
    *minimum = bytes[j + 4] >> 4 | bytes[j] >> 6 << 4;
  }
}

// Write the lower four bits of `count` bytes, then their upper four bits. Works on eight bytes at a time.
inline void put_halves(const uint8_t* bytes, int count, uint8_t* numbers) {
  constexpr uint64_t kLower = 0x0f0f0f0f0f0f0f0f;
  for (int i = 0; i < count; i += 8) {
    uint64_t both;
    memcpy(&both, bytes + i, 8);
    const uint64_t lower = both & kLower, upper = both >> 4 & kLower;
    memcpy(numbers + i, &lower, 8);
    memcpy(numbers + count + i, &upper, 8);
  }
}

// Add two more bits above the lower four bits of 128 numbers. The lowest two bits of the 32 bytes belong to the first
// 32 numbers, the next two bits to the next 32 numbers, and so on.
inline void put_upper(const uint8_t* bytes, uint8_t* numbers) {
  for (int i = 0; i < 128; i += 8) {
    uint64_t two, lower;
    memcpy(&two, bytes + i % 32, 8);
    memcpy(&lower, numbers + i, 8);
    lower |= (two >> 2 * (i / 32) & 0x0303030303030303) << 4;
    memcpy(numbers + i, &lower, 8);
  }
}

// Split a block into its parts. Layout: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
template <int TYPE>
void take_apart(const uint8_t* block, Apart& out) {
  using B = Blocks<TYPE>;
  if constexpr (B::kKind == kScale || B::kKind == kScaleMin) {
    memcpy(&out.d, block, 2), block += 2;
    if constexpr (B::kKind == kScaleMin) memcpy(&out.m, block, 2), block += 2;
    uint32_t high = 0;
    if constexpr (B::kBits == 5) memcpy(&high, block, 4), block += 4;
    if constexpr (B::kBits == 8) {
      memcpy(out.numbers, block, B::kUnit);
    } else {
      put_halves(block, 16, out.numbers);
    }
    if constexpr (B::kBits == 5) {
      for (int i = 0; i < 32; ++i) out.numbers[i] |= (high >> i & 1) << 4;
    }
  } else if constexpr (B::kKind == kPower) {
    out.scales[0] = block[0];
    put_halves(block + 1, 16, out.numbers);
  } else if constexpr (B::kKind == kScalesMins) {
    memcpy(&out.d, block, 2), memcpy(&out.m, block + 2, 2);
    for (int j = 0; j < kGroups<B>; ++j) scale_and_minimum(block + 4, j, &out.scales[j], &out.minima[j]);
    const uint8_t *high = block + 16, *low = block + (B::kBits == 5 ? 48 : 16);
    for (int pair = 0; pair < kGroups<B> / 2; ++pair) put_halves(low + 32 * pair, 32, out.numbers + 64 * pair);
    for (int i = 0; B::kBits == 5 && i < B::kUnit; ++i) out.numbers[i] |= (high[i % 32] >> i / 32 & 1) << 4;
  } else {
    memcpy(out.scales, block + 192, 16), memcpy(&out.d, block + 208, 2);
    for (int half = 0; half < 2; ++half) {
      put_halves(block + 64 * half, 64, out.numbers + 128 * half);
      put_upper(block + 128 + 32 * half, out.numbers + 128 * half);
    }
  }
}

// The bytes 0, 2, 4 and 6 of eight, packed together.
inline uint32_t even_bytes(uint64_t bytes) {
  bytes &= 0x00ff00ff00ff00ff;
  bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffff;
  return static_cast<uint32_t>(bytes | bytes >> 16);
}

// Write the numbers of a run of one column into their planes. Words are built in registers before they are stored:
// adding each number to memory takes five times as long.
template <class B>
void put_run(const uint8_t* numbers, int column, uint8_t* run) {
  for (int odd = 0; odd < 2; ++odd) {
    const int lane = 2 * column + odd;
    for (int turn = 0; turn < kRun / kTurn<B>; ++turn) {
      uint64_t bytes[kTurn<B> / 8];  // a turn has the numbers of one word of each lane, see `low_place`
      memcpy(bytes, numbers + turn * kTurn<B>, kTurn<B>);
      uint32_t word = even_bytes(bytes[0] >> 8 * odd);
      if constexpr (B::kBits == 8) {
        word ^= 0x80808080;
      } else {
        word = (word & 0x0f0f0f0f) | (even_bytes(bytes[1] >> 8 * odd) & 0x0f0f0f0f) << 4;
      }
      memcpy(run + (turn * 2 * kPanel + lane) * 4, &word, 4);
    }
    uint32_t high = 0;
    constexpr int kHigh = B::kBits % 4;            // bits of a number above its four or eight
    for (int i = 0; kHigh && i < kRun / 8; ++i) {  // four numbers of the lane at a time
      uint64_t bits;
      memcpy(&bits, numbers + 8 * i, 8);
      bits = bits >> (8 * odd + 4) & ((1u << kHigh) - 1) * 0x0001000100010001;
      bits |= bits >> (16 - kHigh);
      bits |= bits >> 2 * (16 - kHigh);
      high |= (static_cast<uint32_t>(bits) & ((1u << 4 * kHigh) - 1)) << 4 * kHigh * i;
    }
    if constexpr (kHigh == 1) reinterpret_cast<uint16_t*>(run + kLowBytes<B>)[lane] = high;
    if constexpr (kHigh == 2) reinterpret_cast<uint32_t*>(run + kLowBytes<B>)[lane] = high;
  }
}

// Write a unit of a panel from a block of each of its rows. A null row becomes zeros.
template <int TYPE>
void put_unit(const uint8_t* const* rows, int64_t number, uint8_t* unit) {
  using B = Blocks<TYPE>;
  if (!rows[kPanel - 1]) memset(unit, 0, kUnitBytes<B>);  // null rows come last
  for (int column = 0; column < kPanel; ++column) {
    if (!rows[column]) continue;
    Apart apart;
    take_apart<TYPE>(rows[column] + number * B::kBytes, apart);
    auto* halves = reinterpret_cast<uint16_t*>(unit);
    if constexpr (kHalves<B> > 0) halves[column] = apart.d;
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

// Write 16-bit numbers in pairs along k, like the bfloat16 words of products.h.
void put_pairs(const uint8_t* const* rows, int64_t number, uint8_t* unit) {
  for (int pair = 0; pair < kRun / 2; ++pair) {
    for (int column = 0; column < kPanel; ++column) {
      uint32_t word = 0;
      if (rows[column]) memcpy(&word, rows[column] + (number * kRun / 2 + pair) * 4, 4);
      memcpy(unit + (pair * kPanel + column) * 4, &word, 4);
    }
  }
}

// Write floats like the words of products.h.
void put_floats(const uint8_t* const* rows, int64_t number, uint8_t* unit) {
  for (int i = 0; i < kRun; ++i) {
    for (int column = 0; column < kPanel; ++column) {
      uint32_t word = 0;
      if (rows[column]) memcpy(&word, rows[column] + (number * kRun + i) * 4, 4);
      memcpy(unit + (i * kPanel + column) * 4, &word, 4);
    }
  }
}

// The even lanes, or the odd lanes, of two consecutive vectors.
template <class T>
PREFOLD_INLINE Vec<T> of_one_parity(const Vec<T>& left, const Vec<T>& right, int odd) {
  return Vec<T>::make([&](int p) {
    const auto part = [&](int i) { return (Part<float>)(i < kParts ? left.part[i] : right.part[i - kParts]); };
    return (Part<T>)every_other(part(2 * p), part(2 * p + 1), odd);
  });
}

// Write two numbers along k of sixteen columns. `left` has the first eight columns and `right` the other eight, with
// the two numbers of a column in neighbouring lanes.
template <bool PAIRS>
PREFOLD_INLINE void put(uint32_t* words, int64_t pair, const Floats& left, const Floats& right) {
  if constexpr (PAIRS) {
#ifdef __AVX512BF16__
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)right.part[0], (__m512)left.part[0]);
    memcpy(words + pair * kPanel, &both, sizeof both);
#else
    store(reinterpret_cast<Bf16*>(words + pair * kPanel), left);
    store(reinterpret_cast<Bf16*>(words + pair * kPanel) + kLanes, right);
#endif
  } else {
    store_bits(words + 2 * pair * kPanel, of_one_parity(left, right, 0));
    store_bits(words + (2 * pair + 1) * kPanel, of_one_parity(left, right, 1));
  }
}

// Data that all turns of a run share, for sixteen lanes.
struct Lanes {
  Words high;  // the plane of higher bits, with the bits of the next turn lowest
  Floats scale, least;
};

// Decode number I of a turn.
template <class B, int I>
PREFOLD_INLINE Floats decoded(const uint8_t* turn, const Lanes& lanes) {
  const Floats q = number<B, I>(load_bits<uint32_t>(turn), lanes.high);
  if constexpr (kExcess<B> == 0 && !kHasMinima<B>) return q * lanes.scale;
  else return q * lanes.scale + lanes.least;
}

// Decode the pairs of a turn for sixteen columns.
template <class B, bool PAIRS, int... PAIR>
PREFOLD_INLINE void decode_turn(const uint8_t* turn, const Lanes& left, const Lanes& right, uint32_t* words,
                                std::integer_sequence<int, PAIR...>) {
  (put<PAIRS>(words, PAIR, decoded<B, PAIR>(turn, left), decoded<B, PAIR>(turn + kLanes * 4, right)), ...);
}

template <class B>
PREFOLD_INLINE Words high_bits(const uint8_t* run, int lane) {
  if constexpr (B::kBits == 5) return load_words<uint16_t>(run + kLowBytes<B> + lane * 2);
  if constexpr (B::kBits == 6) return load_bits<uint32_t>(run + kLowBytes<B> + lane * 4);
  return Words(0);
}

// Decode `count` numbers along k, from `first` on.
template <int TYPE, bool PAIRS>
void decode_runs(const uint8_t* panel, int64_t first, int64_t count, uint32_t* words) {
  using B = Blocks<TYPE>;
  constexpr int kInRun = kRun / B::kGroup;                               // scales
  constexpr int kPairs = kTurn<B> / 2, kUsed = kPairs * (B::kBits % 4);  // per turn; used bits of the higher plane
  for (int64_t k = first; k < first + count; k += kRun) {
    const auto [unit, number, run] = run_of<B>(panel, k);
#pragma GCC unroll 1
    for (int column = 0; column < kPanel; column += kLanes) {
      const uint8_t* turn = run + 2 * column * 4;
      uint32_t* to = words + column;
      Lanes left, right;
      left.high = high_bits<B>(run, 2 * column), right.high = high_bits<B>(run, 2 * column + kLanes);
#pragma GCC unroll 1
      for (int g = 0; g < kInRun; ++g) {
        auto [scale, minimum] = scale_and_least<B>(unit, number * kInRun + g, column);
        if constexpr (!kHasMinima<B>) minimum = scale * Floats(-kExcess<B>);
        left.scale = doubled<0>(scale), right.scale = doubled<kLanes / 2>(scale);
        left.least = doubled<0>(minimum), right.least = doubled<kLanes / 2>(minimum);
#pragma GCC unroll 1
        for (int t = 0; t < B::kGroup / kTurn<B>;
             ++t, turn += 2 * kPanel * 4, to += kPairs * (PAIRS ? 1 : 2) * kPanel) {
          decode_turn<B, PAIRS>(turn, left, right, to, std::make_integer_sequence<int, kPairs>());
          if constexpr (kUsed > 0) left.high = shift<-kUsed>(left.high), right.high = shift<-kUsed>(right.high);
        }
      }
    }
    words += kRun / (PAIRS ? 2 : 1) * kPanel;
  }
}

// Write a run of sixteen columns as integers: words [kRun / 4][kPanel], in units of B::kGroup / 4 words each.
template <class B, int... J>
PREFOLD_INLINE void put_whole_run(const uint8_t* run, int column, uint8_t* units, int64_t unit_bytes, int64_t header,
                                  std::integer_sequence<int, J...>) {
  Words high[2] = {Words(0), Words(0)};
  const auto lanes = [&](const uint8_t* plane) __attribute__((always_inline)) {
    return std::array<Words, 2>{load_bits<uint32_t>(plane), load_bits<uint32_t>(plane + kLanes * 4)};
  };
  if constexpr (B::kBits == 5) {
    const uint8_t* plane = run + kLowBytes<B> + 2 * column * 2;
    const Words left = load_words<uint16_t>(plane), right = load_words<uint16_t>(plane + kLanes * 2);
    for (int odd = 0; odd < 2; ++odd) high[odd] = of_one_parity(left, right, odd);
  }
  if constexpr (B::kBits == 6) {
    const auto [left, right] = lanes(run + kLowBytes<B> + 2 * column * 4);
    for (int odd = 0; odd < 2; ++odd) high[odd] = of_one_parity(left, right, odd);
  }
  const auto word = [&](auto number) __attribute__((always_inline)) {
    constexpr int kJ = decltype(number)::value, kOdd = kJ % 2, kTurnWords = kTurn<B> / 4, kUnitWords = B::kGroup / 4;
    const auto [left, right] = lanes(run + kJ / kTurnWords * 2 * kPanel * 4 + 2 * column * 4);
    const Words numbers = whole_numbers<B, kJ>(of_one_parity(left, right, kOdd), high[kOdd]);
    store_bits(units + kJ / kUnitWords * unit_bytes + header + (kJ % kUnitWords * kPanel + column) * 4, numbers);
  };
  (word(std::integral_constant<int, J>()), ...);
}

template <class B>
constexpr int64_t kWholeHeader = kPanel * sizeof(float) * (kHasMinima<B> ? 2 : 1);
template <class B>
constexpr int64_t kWholeBytes = kWholeHeader<B> + kPanel * B::kGroup;

// Decode `count` numbers along k, from `first` on, into units of integers.
template <int TYPE>
void decode_whole(const uint8_t* panel, int64_t first, int64_t count, uint8_t* units) {
  using B = Blocks<TYPE>;
  constexpr int kInRun = kRun / B::kGroup;
  for (int64_t k = first; k < first + count; k += kRun, units += kInRun * kWholeBytes<B>) {
    const auto [unit, number, run] = run_of<B>(panel, k);
#pragma GCC unroll 1
    for (int column = 0; column < kPanel; column += kLanes) {
      for (int g = 0; g < kInRun; ++g) {
        const auto [scale, minimum] = scale_and_least<B>(unit, number * kInRun + g, column);
        auto* header = reinterpret_cast<float*>(units + g * kWholeBytes<B>) + column;
        store(header, scale);
        if constexpr (kHasMinima<B>) store(header + kPanel, minimum);
      }
      put_whole_run<B>(run, column, units, kWholeBytes<B>, kWholeHeader<B>,
                       std::make_integer_sequence<int, kRun / 4>());
    }
  }
}

// Two numbers rounded to bfloat16, with the first in the lower half of the word.
PREFOLD_INLINE Words in_pairs(const Floats& first, const Floats& second) {
  const auto bits = [](const Floats& x, int p) { return __builtin_convertvector(narrow(x.part[p]), Part<uint32_t>); };
  return Words::make([&](int p) { return bits(first, p) | bits(second, p) << 16; });
}

template <bool PAIRS>
void decode_floats(const uint8_t* panel, int64_t first, int64_t count, uint32_t* words) {
  const uint8_t* at = panel + first * kPanel * 4;
  if constexpr (!PAIRS) {
    memcpy(words, at, count * kPanel * 4);
    return;
  }
  for (int64_t i = 0; i < count; i += 2, at += 2 * kPanel * 4) {
    for (int column = 0; column < kPanel; column += kLanes, words += kLanes) {
      const Floats even = as<float>(load_bits<uint32_t>(at + column * 4));
      store_bits(words, in_pairs(even, as<float>(load_bits<uint32_t>(at + (kPanel + column) * 4))));
    }
  }
}

template <int TYPE, bool PAIRS>
void decode_16_bits(const uint8_t* panel, int64_t first, int64_t count, uint32_t* words) {
  const uint8_t* at = panel + first * kPanel * 2;
  for (int64_t i = 0; i < count; ++i, at += kLanes * 4) {  // one pair along k of sixteen columns
    const Words both = load_bits<uint32_t>(at);
    if constexpr (TYPE == kBF16 && PAIRS) {
      store_bits(words + i * kLanes, both);
      continue;
    }
    const Floats first = TYPE == kF16 ? of_float16(both) : as<float>(shift<16>(both));
    const Floats second = TYPE == kF16 ? of_float16(shift<-16>(both)) : as<float>(both & Words(0xffff0000u));
    uint32_t* to = words + i % 2 * kLanes + i / 2 * (PAIRS ? 1 : 2) * kPanel;
    if constexpr (PAIRS) {
      store_bits(to, in_pairs(first, second));
    } else {
      store_bits(to, first);
      store_bits(to + kPanel, second);
    }
  }
}

template <int TYPE>
constexpr Int8Form int8_form_of() {
  using B = Blocks<TYPE>;
  constexpr int kShift = B::kBits == 8 ? 7 : kWholeBits<B> - 1;
  static_assert(kHasMinima<B> || B::kBits == 8 || B::kZero == 1 << kShift);
  return {B::kGroup, kShift, kHasMinima<B>, kWholeBytes<B>, decode_whole<TYPE>};
}

// The form of groups that are int8 already.
constexpr Int8Form int8_form_of(int group) { return {group, 7, false, kPanel * (group + int64_t{4}), nullptr}; }

constexpr Int8Form kS8Forms[] = {int8_form_of(32), int8_form_of(64), int8_form_of(128), int8_form_of(192)};

// The functions and sizes of a block type: numbers in a unit, and bytes of a unit in a panel.
struct Form {
  int type, unit, unit_bytes;
  void (*put)(const uint8_t* const*, int64_t, uint8_t*);
  void (*floats)(const uint8_t*, int64_t, int64_t, uint32_t*);
  void (*pairs)(const uint8_t*, int64_t, int64_t, uint32_t*);
  Int8Form whole = {};
};

template <int TYPE>
constexpr Form form() {
  using B = Blocks<TYPE>;
  return {TYPE,
          B::kUnit,
          kUnitBytes<B>,
          put_unit<TYPE>,
          decode_runs<TYPE, false>,
          decode_runs<TYPE, true>,
          int8_form_of<TYPE>()};
}

template <int TYPE>
constexpr Form form_of_16_bits() {
  return {TYPE, kRun, kRun * kPanel * 2, put_pairs, decode_16_bits<TYPE, false>, decode_16_bits<TYPE, true>};
}

// clang-format off
constexpr Form kForms[] = {form<kQ4_0>(), form<kQ4_1>(), form<kQ5_0>(), form<kQ5_1>(), form<kQ8_0>(),
                           form<kQ4_K>(), form<kQ5_K>(), form<kQ6_K>(), form<kMXFP4>(), form_of_16_bits<kF16>(),
                           form_of_16_bits<kBF16>(),
                           {kF32, kRun, 4 * kRun * kPanel, put_floats, decode_floats<false>, decode_floats<true>}};
// clang-format on

const Form* form_of(int64_t type) {
  for (const Form& form : kForms) {
    if (form.type == (type & ~int64_t{kOneForm})) return &form;
  }
  return nullptr;
}

}  // namespace

void decode(const BlockPanel& panel, int64_t first, int64_t count, bool pairs, uint32_t* words) {
  const Form& form = *form_of(panel.type);
  (pairs ? form.pairs : form.floats)(panel.data, first, count, words);
}

const Int8Form* int8_form(int64_t type) {
  for (const Int8Form& form : kS8Forms) {
    if (type == kS8 + form.group) return &form;
  }
  const Form* form = type & kInInt8 ? form_of(type & ~int64_t{kInInt8}) : nullptr;
  return form && form->whole.decode ? &form->whole : nullptr;
}

extern "C" int64_t prefold_block_panel_size(int64_t type, int64_t k) {
  if (const Int8Form* whole = int8_form(type); whole && !whole->decode) {
    const int64_t padded = (k + 31) / 32 * 32;
    return padded % whole->group ? 0 : padded / whole->group * whole->unit_bytes;
  }
  const Form* form = form_of(type);
  return form && k % form->unit == 0 ? k / form->unit * form->unit_bytes : 0;
}

extern "C" void prefold_pack_blocks(int64_t type, const uint8_t* const* rows, int64_t panels, int64_t k, uint8_t* out,
                                    int32_t threads) {
  const Form& form = *form_of(type);
  const int64_t units = k / form.unit;
  parallel_ranges(panels, units * form.unit_bytes, threads, [&](int64_t first, int64_t stop) {
    for (int64_t i = first * units; i < stop * units; ++i) {
      form.put(rows + i / units * kPanel, i % units, out + i * form.unit_bytes);
    }
  });
}

template <class E>
static void block_rows(const BlockPanel* panels, const int64_t* ids, E* out, int64_t n, int64_t k, int32_t threads) {
  parallel_ranges(n, k * kPanel, threads, [&](int64_t first, int64_t stop) {
    constexpr int64_t kDecoded = 256;  // numbers to decode at once
    alignas(64) uint32_t words[kDecoded * kPanel];
    for (int64_t row = first, next; row < stop; row = next) {
      // Decode consecutive rows of the same panel together.
      for (next = row + 1; next < stop && ids[next] / kPanel == ids[row] / kPanel;) ++next;
      for (int64_t at = 0; at < k; at += kDecoded) {
        const int64_t count = std::min(kDecoded, k - at);
        decode(panels[ids[row] / kPanel], at, count, false, words);
        for (int64_t one = row; one < next; ++one) {
          for (int64_t i = 0; i < count; i += kLanes) {
            float numbers[kLanes];
            for (int l = 0; l < kLanes; ++l) memcpy(numbers + l, words + (i + l) * kPanel + ids[one] % kPanel, 4);
            store(out + one * k + at + i, load(numbers));
          }
        }
      }
    }
  });
}

#define PREFOLD_EXPORT_BLOCK_ROWS(name, E)                                                                   \
  extern "C" void prefold_block_rows_##name(const BlockPanel* panels, const int64_t* ids, E* out, int64_t n, \
                                            int64_t k, int32_t threads) {                                    \
    block_rows(panels, ids, out, n, k, threads);                                                             \
  }
PREFOLD_EXPORT_BLOCK_ROWS(float32, float)
PREFOLD_EXPORT_BLOCK_ROWS(bfloat16, Bf16)

}  // namespace prefold
