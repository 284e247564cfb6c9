// Quantises rows, and multiplies them with units of a matrix (int8.h).
#include "int8.h"

#include <array>
#include <atomic>
#include <cmath>
#include <memory>
#include <new>

#include "interface.h"
#include "workspace.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace prefold {
namespace {

constexpr int kRun = 32;  // numbers along k
// If the largest number of a group is smaller, all count as zeros: its reciprocal would overflow in float32.
constexpr float kTiny = 0x1p-100f;

PREFOLD_INLINE Floats absolute(const Floats& x) { return as<float>(as<uint32_t>(x) & Words(0x7fffffffu)); }

// Write the lowest byte of each of sixteen words. Among every eight bytes, the bytes at even places come first.
PREFOLD_INLINE void put_bytes(int8_t* to, const Words& words) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)words.part[0]);
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(bytes, order));
#elif defined(__AVX2__)
  // Each half of a register has four words. Their bytes go to their places among eight; the other places are zeros.
  const __m256i order = _mm256_setr_epi8(0, 8, -1, -1, 4, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                         -1, -1, 0, 8, -1, -1, 4, 12, -1, -1, -1, -1, -1, -1, -1, -1);
  for (int p = 0; p < kParts; ++p) {
    const __m256i places = _mm256_shuffle_epi8((__m256i)words.part[p], order);
    const __m128i bytes = _mm_or_si128(_mm256_castsi256_si128(places), _mm256_extracti128_si256(places, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to + p * 8), bytes);
  }
#else
  uint32_t lanes[kLanes];
  memcpy(lanes, &words, sizeof lanes);
  for (int i = 0; i < kLanes; ++i) to[i / 8 * 8 + i % 2 * 4 + i % 8 / 2] = static_cast<int8_t>(lanes[i]);
#endif
}

// The largest integer of a group, by the number of digits of base 255.
constexpr float kBase = 255, kLargest[] = {0, 127, 127 * kBase + 127, 64 * (kBase * kBase)};

// Adding it to a number below 2^22 rounds that number to the nearest integer, in the lowest bits. Ties go to the even
// one.
constexpr float kWhole = 0x1.8p23f;

// Quantise `count` numbers of a row, with zeros up to `group`, a multiple of 32. Each digit is a row of its own, `line`
// bytes from the next, the highest digit first. out [DIGITS]; sixteens [groups of sixteen, `stride` apart][DIGITS], or
// null.
template <int DIGITS, class E>
void quantise_group(const E* x, int64_t count, int64_t group, int8_t* to, int64_t line, RowGroup* out,
                    RowGroup* sixteens, int64_t stride) {
  Floats most = zeros();
  Words unsafe(0);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats size = absolute(load_some(x + i, count - i));
    most = larger(most, size);
    unsafe |= Words::make([&](int p) { return (Part<uint32_t>)((Part<uint32_t>)size.part[p] >= 0x7f800000u); });
  }
  const bool finite = !any_bit(unsafe);
  float largest = max_of(most);
  if (!(largest >= kTiny)) largest = 0;
  const float inverse = largest > 0 && finite ? kLargest[DIGITS] / largest : 0;
  float scales[DIGITS], sums[DIGITS] = {};
  scales[DIGITS - 1] = finite ? largest / kLargest[DIGITS] : std::nanf("");
  for (int d = DIGITS - 1; d > 0; --d) scales[d - 1] = scales[d] * kBase;
  for (int64_t i = 0; i < group; i += kLanes) {
    Floats shifted(kWhole);
    if (finite && i < count) shifted = load_some(x + i, count - i) * Floats(inverse) + Floats(kWhole);
    float power = DIGITS == 3 ? kBase * kBase : kBase;
    for (int d = 0; d < DIGITS; ++d, power /= kBase) {
      const Floats rest = shifted - Floats(kWhole);
      Floats digit = shifted;
      if (d < DIGITS - 1) {
        digit = rest / Floats(power) + Floats(kWhole);
        shifted = shifted - (digit - Floats(kWhole)) * Floats(power);
      }
      const float part = sum_of(digit - Floats(kWhole));
      put_bytes(to + d * line + i, as<uint32_t>(digit));
      if (sixteens) sixteens[i / kLanes * stride + d] = {scales[d], scales[d] * part, -static_cast<int32_t>(part)};
      sums[d] += part;
    }
  }
  for (int d = 0; d < DIGITS; ++d) out[d] = {scales[d], scales[d] * sums[d], -static_cast<int32_t>(sums[d])};
}

#ifdef PREFOLD_INT8

template <class T>
PREFOLD_INLINE Part<T> load_part(const void* at) {
  Part<T> x;
  memcpy(&x, at, sizeof x);
  return x;
}

// Add the sum of a group. All products use this function, so that they have the same bits.
PREFOLD_INLINE Part<float> plus_group(Part<float> sum, Part<int32_t> whole, Part<float> scale, float of_row) {
  return sum + __builtin_convertvector(whole, Part<float>) * (scale * of_row);
}

constexpr int kHeader = kPanel * sizeof(float);  // bytes of scales, or of minima

// Multiply ROWS rows with two vectors of columns at a time.
template <int ROWS, bool MINIMA, bool FETCH>
PREFOLD_APART void add_rows(const Int8Pass& pass, float* tile) {
  constexpr int kBoth = 2 * kPartLanes, kPasses = kPanel / kBoth;
  const int64_t steps = pass.form->group / 4, unit_bytes = pass.form->unit_bytes, x_row = pass.x_row;
  const Part<int32_t> shift = Part<int32_t>{} + pass.form->shift;
  constexpr int kBases = (ROWS + 2) / 3;
  for (int turn = 0; turn < kPasses; ++turn, tile += kBoth) {
    const RowGroup* groups = pass.groups;
    const uint8_t* unit = pass.units + turn * kBoth * 4;
    const int8_t* base[kBases];
    for (int i = 0; i < kBases; ++i) base[i] = pass.x + 3 * i * x_row;
    for (int64_t g = 0; g < pass.count; ++g, unit += unit_bytes, groups += pass.groups_row) {
      const uint8_t* words = unit + kHeader * (MINIMA ? 2 : 1);
      Part<int32_t> acc[ROWS][2];
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; ++r) {
        acc[r][0] = MINIMA ? Part<int32_t>{} : (Part<int32_t>{} + groups[r].zero) << shift;
        acc[r][1] = acc[r][0];
      }
      for (int64_t s = 0; s < steps; ++s, words += kStepBytes) {
        const Part<uint32_t> left = load_part<uint32_t>(words), right = load_part<uint32_t>(words + kPartBytes);
        if constexpr (FETCH) {
          for (int i = 0; i < kBoth * 4; i += kLine) __builtin_prefetch(words + pass.ahead + i, 0, 2);
        }
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
          int32_t a;
          memcpy(&a, base[r / 3] + r % 3 * x_row, sizeof a);
          acc[r][0] = dot(acc[r][0], left, Part<int32_t>{} + a);
          acc[r][1] = dot(acc[r][1], right, Part<int32_t>{} + a);
        }
#pragma GCC unroll 4
        for (int i = 0; i < kBases; ++i) base[i] += sizeof(int32_t);
      }
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const Part<float> scale = load_part<float>(unit + i * kPartBytes);
        const Part<float> least = load_part<float>(unit + (MINIMA ? kHeader : 0) + i * kPartBytes);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
          float* to = tile + r * kPanel + i * kPartLanes;
          Part<float> sum = plus_group(load_part<float>(to), acc[r][i], scale, groups[r].scale);
          if constexpr (MINIMA) sum = sum + least * groups[r].sum;
          memcpy(to, &sum, sizeof sum);
        }
      }
    }
  }
}

using AddRows = void (*)(const Int8Pass&, float*);

template <bool MINIMA, bool FETCH, int... ROWS>
constexpr std::array<AddRows, sizeof...(ROWS)> adders(std::integer_sequence<int, ROWS...>) {
  return {add_rows<ROWS + 1, MINIMA, FETCH>...};
}

// The functions by the number of rows, minus one.
template <bool MINIMA, bool FETCH>
constexpr auto kAdders = adders<MINIMA, FETCH>(std::make_integer_sequence<int, kBlockRows>());

#ifdef PREFOLD_INT8_TILES

constexpr int kTileNumbers = 64;  // int8 numbers in a row of a tile

// Add the integer sums of one group to the rows [first, stop).
PREFOLD_INLINE void add_group(const int32_t* whole, const uint8_t* unit, const RowGroup* groups, Part<int32_t> shift,
                              int first, int stop, float* tile) {
  const Part<float> left = load_part<float>(unit), right = load_part<float>(unit + kPartBytes);
  for (int r = first; r < stop; ++r) {
    const Part<int32_t> zero = (Part<int32_t>{} + groups[r].zero) << shift;
    float* to = tile + r * kPanel;
    const int32_t* from = whole + r * kPanel;
    const Part<float> a = plus_group(load_part<float>(to), load_part<int32_t>(from) + zero, left, groups[r].scale);
    const Part<float> b = plus_group(load_part<float>(to + kPartLanes), load_part<int32_t>(from + kPartLanes) + zero,
                                     right, groups[r].scale);
    memcpy(to, &a, sizeof a);
    memcpy(to + kPartLanes, &b, sizeof b);
  }
}

// Multiply sixteen rows, and with TWO sixteen more that start at row `second`. While AMX multiplies a group, vectors
// add the sums of the previous group.
template <bool TWO>
PREFOLD_APART void add_tiles(const Int8Pass& pass, int rows, float* tile) {
  alignas(64) int32_t whole[2][2 * kTile * kPanel];
  const int64_t steps = pass.form->group / kTileNumbers;
  const int second = TWO ? rows - kTile : 0, quarter = (rows + 3) / 4;
  const Part<int32_t> shift = Part<int32_t>{} + pass.form->shift;
  const int8_t *x = pass.x, *y = x + second * pass.x_row;
  const uint8_t* unit = pass.units;
  const RowGroup* before = pass.groups - pass.groups_row;
  for (int64_t g = 0; g <= pass.count; ++g, unit += pass.form->unit_bytes, before += pass.groups_row) {
    const int32_t* done = whole[(g + 1) % 2];
    const uint8_t* done_unit = unit - pass.form->unit_bytes;
    const auto add = [&](int part) __attribute__((always_inline)) {
      const int stop = std::min(rows, (part + 1) * quarter);
      if (g > 0) add_group(done, done_unit, before, shift, part * quarter, stop, tile);
    };
    if (g == pass.count) {
      for (int part = 0; part < 4; ++part) add(part);
      break;
    }
    int32_t* now = whole[g % 2];
    asm volatile("" ::: "memory");  // GCC does not know that loading a tile reads memory
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (TWO) {
      _tile_zero(2);
      _tile_zero(3);
    }
    const uint8_t* words = unit + kHeader;
    for (int64_t s = 0; s < steps; ++s, words += kTile * kStepBytes, x += kTileNumbers, y += kTileNumbers) {
      _tile_loadd(6, words, kStepBytes);
      _tile_loadd(4, x, pass.x_row);
      _tile_dpbsud(0, 4, 6);
      _tile_loadd(7, words + kTileBytes, kStepBytes);
      _tile_dpbsud(1, 4, 7);
      if constexpr (TWO) {
        _tile_loadd(5, y, pass.x_row);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
      }
      if (pass.ahead) {
        for (int64_t i = 0; i < kTile * kStepBytes; i += kLine) __builtin_prefetch(words + pass.ahead + i, 0, 2);
      }
      if (s < 2) add(2 * s), add(2 * s + 1);
    }
    if (steps < 2) add(2), add(3);
    _tile_stored(0, now, kStepBytes);
    _tile_stored(1, now + kTile, kStepBytes);
    if constexpr (TWO) {
      _tile_stored(2, now + second * kPanel, kStepBytes);
      _tile_stored(3, now + second * kPanel + kTile, kStepBytes);
    }
    asm volatile("" ::: "memory");
  }
}

#endif
#endif

}  // namespace

template <class E>
Int8Rows quantise(const E* x, int64_t x_row, int64_t rows, int64_t k, int64_t group, bool sixteens, int threads,
                  int64_t digits) {
  // Bytes. A row stride that is a multiple of kBadStride would map all rows to the same sets of the nearest cache.
  constexpr int64_t kBadStride = 2048, kPadding = 64;
  const int64_t padded = int8_padded(k), count = (padded + group - 1) / group, lines = rows * digits;
  const int64_t stride = padded % kBadStride ? padded : padded + kPadding;
  static thread_local Workspace workspace;
  const int64_t group_bytes = (count + (sixteens ? padded / kLanes : 0)) * lines * sizeof(RowGroup);
  auto* groups = static_cast<RowGroup*>(workspace.reserve(group_bytes + lines * stride + kPadding));
  RowGroup* halves = sixteens ? groups + count * lines : nullptr;
  const int64_t first_number = (group_bytes + kPadding - 1) / kPadding * kPadding;
  auto* numbers = reinterpret_cast<int8_t*>(groups) + first_number;
  const auto one = digits == 1 ? quantise_group<1, E> : digits == 2 ? quantise_group<2, E> : quantise_group<3, E>;
  parallel_ranges(rows, k, threads, [&](int64_t first, int64_t stop) {
    for (int64_t r = first; r < stop; ++r) {
      for (int64_t g = 0; g < count; ++g) {
        const int64_t at = g * group, size = std::min(group, padded - at), line = r * digits;
        one(x + r * x_row + at, std::min(size, k - at), size, numbers + line * stride + at, stride,
            groups + g * lines + line, halves ? halves + at / kLanes * lines + line : nullptr, lines);
      }
    }
  });
  return {numbers, stride, groups, halves};
}

template Int8Rows quantise(const float*, int64_t, int64_t, int64_t, int64_t, bool, int, int64_t);
template Int8Rows quantise(const Bf16*, int64_t, int64_t, int64_t, int64_t, bool, int, int64_t);

#ifdef PREFOLD_INT8

void add_int8(const Int8Pass& pass, int rows, float* sums) {
  const auto& functions = pass.form->minima ? (pass.ahead ? kAdders<true, true> : kAdders<true, false>)
                                            : (pass.ahead ? kAdders<false, true> : kAdders<false, false>);
  functions[rows - 1](pass, sums);
}

#endif
#ifdef PREFOLD_INT8_TILES

void add_int8_in_tiles(const Int8Pass& pass, int rows, float* sums) {
  (rows > kTile ? add_tiles<true> : add_tiles<false>)(pass, rows, sums);
}

#endif

namespace {

// Pack a matrix into panels of int8, in units of kS8 groups (blocks.h).
template <class E>
int32_t pack_int8(const E* weight, int64_t row, int64_t outputs, int64_t k, int64_t group, uint8_t* out, int threads) {
  const int64_t padded = int8_padded(k), units = padded / group, unit_bytes = kPanel * (group + sizeof(float));
  std::atomic<int32_t> failed{0};
  parallel_ranges((outputs + kPanel - 1) / kPanel, kPanel * k, threads, [&](int64_t first, int64_t stop) {
    const std::unique_ptr<int8_t[]> numbers(new (std::nothrow) int8_t[kPanel * padded]);
    const std::unique_ptr<RowGroup[]> groups(new (std::nothrow) RowGroup[kPanel * units]);
    if (!numbers || !groups) return failed.store(kNoMemory, std::memory_order_relaxed);
    for (int64_t p = first; p < stop; ++p) {
      memset(numbers.get(), 0, kPanel * padded);
      memset(groups.get(), 0, kPanel * units * sizeof(RowGroup));
      for (int64_t c = 0; c < std::min<int64_t>(kPanel, outputs - p * kPanel); ++c) {
        for (int64_t u = 0; u < units; ++u) {
          const int64_t at = u * group;
          quantise_group<1>(weight + (p * kPanel + c) * row + at, std::max<int64_t>(0, std::min(group, k - at)), group,
                            numbers.get() + c * padded + at, 0, &groups[u * kPanel + c], nullptr, 0);
        }
      }
      for (int64_t u = 0; u < units; ++u) {
        uint8_t* unit = out + (p * units + u) * unit_bytes;
        for (int64_t c = 0; c < kPanel; ++c) {
          memcpy(unit + c * sizeof(float), &groups[u * kPanel + c].scale, sizeof(float));
          for (int64_t s = 0; s < group / 4; ++s) {
            uint32_t word;
            memcpy(&word, numbers.get() + c * padded + u * group + s * 4, sizeof word);
            word ^= 0x80808080u;
            memcpy(unit + kPanel * sizeof(float) + (s * kPanel + c) * sizeof word, &word, sizeof word);
          }
        }
      }
    }
  });
  return failed.load(std::memory_order_relaxed);
}

}  // namespace
extern "C" int32_t prefold_has_int8() {
#ifdef PREFOLD_INT8
  return 1;
#else
  return 0;
#endif
}

#define PREFOLD_EXPORT_PACK_INT8(name, E)                                                                              \
  extern "C" int32_t prefold_pack_int8_##name(const E* weight, int64_t row, int64_t outputs, int64_t k, int64_t group, \
                                              uint8_t* out, int32_t threads) {                                         \
    return pack_int8(weight, row, outputs, k, group, out, threads);                                                    \
  }
PREFOLD_EXPORT_PACK_INT8(float32, float)
PREFOLD_EXPORT_PACK_INT8(bfloat16, Bf16)

}  // namespace prefold
