// Multiplies few rows with a panel of blocks (few_rows.h).
#include "few_rows.h"

#include <algorithm>
#include <utility>

#include "block_types.h"

namespace prefold {

#ifdef PREFOLD_FEW_ROWS

namespace {

// Vectors of lanes whose columns fill whole registers, and the number of these columns.
constexpr int kSides = kParts == 1 ? 2 : 1, kColumns = kSides * kLanes / 2, kSums = kSides * kParts;

// Eight bytes of a line, repeated: four numbers for the lanes of even places, then four for the lanes of odd places.
PREFOLD_INLINE Part<int32_t> piece(const int8_t* at) {
  uint64_t both;
  memcpy(&both, at, sizeof both);
  return (Part<int32_t>)(Part<uint64_t>{} + both);
}

#ifdef PREFOLD_INT8
// The matrix's unsigned numbers as a factor.
template <int BITS>
struct Factors {
  Words u;

  PREFOLD_INLINE Factors(const Words& numbers) : u(numbers) {}
  PREFOLD_INLINE Part<int32_t> add(Part<int32_t> sums, int p, Part<int32_t> a) const { return dot(sums, u.part[p], a); }
};
template <int BITS>
constexpr int kShift = BITS == 8 ? 7 : BITS - 1;
#else
// The instruction sums two products in sixteen bits. So numbers of eight bits become signed, and the other factor gets
// the sign.
template <int BITS>
struct Factors {
  Words u, sign;

  PREFOLD_INLINE Factors(const Words& numbers) : u(numbers), sign(numbers) {
    if constexpr (BITS < 8) return;
    sign = Words::make([&](int p) { return u.part[p] ^ 0x80808080u; });
    u = Words::make([&](int p) { return (Part<uint32_t>)_mm256_abs_epi8((__m256i)sign.part[p]); });
  }
  PREFOLD_INLINE Part<int32_t> add(Part<int32_t> sums, int p, Part<int32_t> a) const {
    const __m256i factor = BITS < 8 ? (__m256i)a : _mm256_sign_epi8((__m256i)a, (__m256i)sign.part[p]);
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)u.part[p], factor);
    return sums + (Part<int32_t>)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
};
template <int BITS>
constexpr int kShift = BITS == 8 ? -1 : BITS - 1;
#endif

template <class F, int... I>
PREFOLD_INLINE void unrolled(const F& body, std::integer_sequence<int, I...>) {
  (body(std::integral_constant<int, I>()), ...);
}

// Run body(I) for every I below COUNT, as constants.
template <int COUNT, class F>
PREFOLD_INLINE void unrolled(const F& body) {
  unrolled(body, std::make_integer_sequence<int, COUNT>());
}

template <int TYPE, int LINES>
PREFOLD_APART void add_panel(const uint8_t* panel, int64_t count, const FewPass& pass, float* sums) {
  using B = Blocks<TYPE>;
  constexpr int kInRun = kRun / B::kGroup, kTurns = kRun / kTurn<B>;
  const RowGroup* groups = kInRun == 2 ? pass.sixteens : pass.groups;
  const int8_t* x[(LINES + 2) / 3];
  for (int i = 0; i < (LINES + 2) / 3; ++i) x[i] = pass.x + 3 * i * pass.x_row;
  const int64_t x_row = pass.x_row;
  for (int64_t k = 0; k < count; k += kRun, groups += kInRun * pass.groups_row) {
    const auto [unit, number, run] = run_of<B>(panel, k);
#pragma GCC unroll 1
    for (int column = 0; column < kPanel; column += kLanes) {
      ScaleAndLeast scales[kInRun];
      for (int g = 0; g < kInRun; ++g) scales[g] = scale_and_least<B>(unit, number * kInRun + g, column);
#pragma GCC unroll 1
      for (int first = 0; first < kLanes; first += kColumns) {
        Words low[kSides][kTurns], high[kSides];
        for (int side = 0; side < kSides; ++side) {
          const int lane = 2 * (column + first) + side * kLanes;
          for (int t = 0; t < kTurns; ++t) low[side][t] = load_bits<uint32_t>(run + (t * 2 * kPanel + lane) * 4);
          if constexpr (B::kBits == 5) high[side] = load_words<uint16_t>(run + kLowBytes<B> + lane * 2);
          if constexpr (B::kBits == 6) high[side] = load_bits<uint32_t>(run + kLowBytes<B> + lane * 4);
        }
        unrolled<kInRun>([&](auto of_run) __attribute__((always_inline)) {
          constexpr int kG = decltype(of_run)::value, kPieces = B::kGroup / 8;
          Part<int32_t> acc[LINES][kSums] = {};  // in neighbouring registers
          unrolled<kPieces>([&](auto of_group) __attribute__((always_inline)) {
            constexpr int kPiece = kG * kPieces + decltype(of_group)::value;
            for (int side = 0; side < kSides; ++side) {
              const Words u = whole_numbers<B, 2 * kPiece>(low[side][kPiece * kTurns / 4], high[side]);
              const Factors<kWholeBits<B>> factors(u);
#pragma GCC unroll 8
              for (int i = 0; i < LINES; ++i) {
                const Part<int32_t> a = piece(x[i / 3] + i % 3 * x_row + kPiece * 8);
                for (int p = 0; p < kParts; ++p) acc[i][side + p] = factors.add(acc[i][side + p], p, a);
              }
            }
          });
#pragma GCC unroll 2
          for (int pair = 0; pair < kSums / 2; ++pair) {
            const int at = first + pair * kPartLanes;
            const Part<float> scale = scales[kG].scale.part[at / kPartLanes],
                              least = scales[kG].least.part[at / kPartLanes];
#pragma GCC unroll 8
            for (int i = 0; i < LINES; ++i) {
              const auto half = [&](int odd) {
                return (Part<int32_t>)every_other((Part<float>)acc[i][2 * pair], (Part<float>)acc[i][2 * pair + 1],
                                                  odd);
              };
              const RowGroup& of = groups[kG * pass.groups_row + i];
              float* to = sums + i * kPanel + column + at;
              Part<int32_t> whole = half(0) + half(1);
              if constexpr (!kHasMinima<B> && kShift<kWholeBits<B>> >= 0)
                whole += of.zero * (1 << kShift<kWholeBits<B>>);
              Part<float> sum;
              memcpy(&sum, to, sizeof sum);
              sum = sum + __builtin_convertvector(whole, Part<float>) * (scale * of.scale);
              if constexpr (kHasMinima<B>) sum = sum + least * of.sum;
              memcpy(to, &sum, sizeof sum);
            }
          }
        });
      }
    }
    for (auto& line : x) line += kRun;
  }
}

template <int TYPE, int... LINES>
AddFew of_lines(int64_t lines, std::integer_sequence<int, LINES...>) {
  constexpr AddFew kOf[] = {add_panel<TYPE, LINES + 1>...};
  return kOf[lines - 1];
}

template <int... TYPE>
AddFew of_type(int64_t type, int64_t lines) {
  AddFew found = nullptr;
  const auto look = [&](int one, AddFew add) {
    if (type == one) found = add;
  };
  (look(TYPE, of_lines<TYPE>(lines, std::make_integer_sequence<int, kMostLines>())), ...);
  return found;
}

}  // namespace

AddFew add_few(int64_t type, int64_t lines) {
  return of_type<kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4_K, kQ5_K, kQ6_K, kMXFP4>(type & ~int64_t{kInInt8}, lines);
}

bool are_few(int64_t rows, int64_t digits) {
  // AMX multiplies more rows in the time in which it decodes the panel.
  const int64_t most = digits == 2 && may_use_tiles() ? 1 : kPasses[digits];
  return (rows * digits + kMostLines - 1) / kMostLines <= most;
}

void multiply_few_rows(const BlockPanel& panel, int64_t k, const Int8Rows& x, int64_t rows, int64_t digits,
                       float* sums) {
  const int64_t lines = rows * digits, passes = (lines + kMostLines - 1) / kMostLines;
  std::fill(sums, sums + lines * kPanel, 0.0f);
  for (int64_t i = 0; i < passes; ++i) {
    const int64_t line = lines * i / passes, count = lines * (i + 1) / passes - line;
    const RowGroup* halves = x.sixteens ? x.sixteens + line : nullptr;
    const FewPass pass{x.numbers + line * x.stride, x.stride, x.groups + line, halves, lines};
    add_few(panel.type, count)(panel.data, k, pass, sums + line * kPanel);
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < kPanel; i += kLanes) {
      Floats sum = load(sums + r * digits * kPanel + i);
      for (int64_t d = 1; d < digits; ++d) sum += load(sums + (r * digits + d) * kPanel + i);
      store_bits(sums + r * kPanel + i, sum);
    }
  }
}

#endif

}  // namespace prefold
