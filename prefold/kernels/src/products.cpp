// The linears of a layer, and the LM head: products of rows with a packed matrix (products.h).
#include <atomic>
#include <cmath>
#include <memory>
#include <new>

#include "amx_products.h"
#include "epilogue.h"
#include "few_rows.h"
#include "int8.h"
#include "interface.h"
#include "ranks.h"

namespace prefold {
namespace {

// Rows of x in the form that products read. They are copied if they must be widened to float32, or if their stride
// would map all of them to the same sets of the nearest cache.
template <class Format>
class Rows {
  using Element = typename Format::Element;
  using Number = std::conditional_t<Format::kWidth == 2, Element, typename Format::Stored>;
  static constexpr int64_t kBadStride = 2048, kPadding = 64;  // bytes

 public:
  Rows(const Element* x, int64_t x_row, int64_t rows, int64_t k)
      : data(reinterpret_cast<const char*>(x)), row(x_row * sizeof(Element)) {
    constexpr bool kWiden = sizeof(Number) != sizeof(Element);
    if (!kWiden && (row % kBadStride || rows < kBlockRows)) return;
    row = k * sizeof(Number) + (k * sizeof(Number) % kBadStride ? 0 : kPadding);
    copy_.reset(new char[rows * row]);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < k; i += kLanes) {
        store_some(reinterpret_cast<Number*>(copy_.get() + r * row) + i, load_some(x + r * x_row + i, k - i), k - i);
      }
    }
    data = copy_.get();
  }

  const char* data;
  int64_t row;  // bytes

 private:
  std::unique_ptr<char[]> copy_;
};

inline bool is_bf16(const BlockPanel* blocks, int64_t columns) {
  for (int64_t p = 0; p * kPanel < columns; ++p) {
    if (blocks[p].type != kBF16) return false;
  }
  return true;
}

#ifdef PREFOLD_FEW_ROWS

// Multiply x [rows, k] with the matrix, if few_rows.h is fast for this number of rows and supports at least one panel.
// Return false otherwise. Panels that it does not support are decoded.
template <class Format>
bool multiply_few(const typename Format::Element* x, int64_t x_row, const BlockPanel* blocks, int64_t rows,
                  int64_t columns, int64_t k, int threads, const Store& store) {
  using Element = typename Format::Element;
  const int64_t digits = blocks->type & kInInt8 ? 1 : kDigits<Element>;
  if (!are_few(rows, digits)) return false;
  Product product{nullptr, 0, nullptr, rows, columns, static_cast<int64_t>(k * sizeof(Element) / sizeof(uint32_t)),
                  blocks};
  int64_t in_few = 0, type = -1;
  bool sixteens = false, has_few = false;
  for (int64_t p = 0; p < product.panels(); ++p) {
    if (blocks[p].type != type) {  // most panels have the type of the panel before
      type = blocks[p].type;
      has_few = add_few(type, 1) != nullptr;
      sixteens |= (type & ~int64_t{kInInt8}) == kQ6_K;
    }
    in_few += has_few;
  }
  if (in_few == 0) return false;
  std::unique_ptr<Rows<Format>> floats;
  if (in_few < product.panels()) {
    floats.reset(new Rows<Format>(x, x_row, rows, k));
    product.x = floats->data, product.x_row = floats->row;
  }
  const Int8Rows given = quantise(x, x_row, rows, k, 32, sixteens, 1, digits);
  for_panels(product, kMostPasses * kMostLines, kMostPasses * kMostLines, threads,
             [&](int64_t p, int64_t first, int64_t) {
    if (floats && !add_few(blocks[p].type, 1)) return multiply_panel<Format>(product, p, first, rows, store);
    alignas(64) float sums[kFewSums];
    multiply_few_rows(blocks[p], k, given, rows, digits, sums);
    store(first, p * kPanel, rows, std::min<int64_t>(kPanel, columns - p * kPanel), sums);
  }, [](const Body<>& run) { run(); });
  return true;
}

#endif

// Multiply x [rows, k] with the matrix, and call store(row, column, number of rows, number of columns, sums [rows,
// kPanel]). Return 0, or kNoMemory.
template <class Format>
int32_t product(const typename Format::Element* x, int64_t x_row, const uint32_t* packed, const BlockPanel* blocks,
                int64_t rows, int64_t columns, int64_t k, int threads, const Store& store) {
  if (rows == 0 || columns == 0) return 0;
  try {
#ifdef PREFOLD_FEW_ROWS
    if (blocks && !(blocks->type & kOneForm) &&
        multiply_few<Format>(x, x_row, blocks, rows, columns, k, threads, store))
      return 0;
#endif
#ifdef PREFOLD_INT8
    if (blocks && int8_form(blocks->type)) {
      multiply_all_in_int8(x, x_row, blocks, rows, columns, k, threads, store);
      return 0;
    }
#endif
    const int64_t steps = k * sizeof(typename Format::Element) / sizeof(uint32_t);
#ifdef PREFOLD_TILES
    if constexpr (Format::kWidth == 2) {
      if (may_use_tiles()) {  // tiles read whole cache lines of rows, so any stride is fast
        const int64_t distance = x_row * sizeof(typename Format::Element);
        multiply_all_in_tiles({reinterpret_cast<const char*>(x), distance, packed, rows, columns, steps, blocks},
                              threads, store);
        return 0;
      }
    }
#endif
    const Rows<Format> given(x, x_row, rows, k);
    if constexpr (std::is_same_v<Format, FloatWords>) {
      // With more rows, it is faster to decode the matrix once for all of them.
      if (blocks && rows <= 2 * kBlockRows && is_bf16(blocks, columns)) {
        multiply_all<WidenedWords>({given.data, given.row, nullptr, rows, columns, k / 2, blocks, true}, threads,
                                   store);
        return 0;
      }
    }
    multiply_all<Format>({given.data, given.row, packed, rows, columns, steps, blocks}, threads, store);
    return 0;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

// out [rows, columns] = activation(x times the matrix, plus the adapters' sums and the bias, if any).
template <class Format, class Out>
int32_t linear(const typename Format::Element* x, int64_t x_row, const uint32_t* packed, const BlockPanel* blocks,
               const typename Format::Element* bias, Out* out, int64_t rows, int64_t columns, int64_t k, int threads,
               const Epilogue* epilogue) {
  constexpr bool kExact = std::is_same_v<Out, float>;
  const RowLow* adapted = epilogue ? epilogue->adapted : nullptr;
  const int32_t activation = epilogue ? epilogue->activation : kLinearly;
  return product<Format>(x, x_row, packed, blocks, rows, columns, k, threads,
                         [&](int64_t row, int64_t column, int64_t count, int64_t width, float* tile) {
    if (adapted) add_low_rank<typename Format::Element>(adapted, row, column, count, tile);
    for (int64_t r = 0; r < count; ++r, tile += kPanel) {
      Out* to = out + (row + r) * columns + column;
      for (int64_t i = 0; i < width; i += kLanes) {
        Floats sum = load(tile + i);
        if (bias) sum += load_some(bias + column + i, width - i);
        store_some(to + i, activated<kExact>(activation, sum), width - i);
      }
    }
  });
}

// out [rows, width] = activation(gate_scale * gate) * up. A panel has sixteen columns of the gate, then sixteen of up.
template <class Format, class Activation>
int32_t gated_linear(const typename Format::Element* x, int64_t x_row, const uint32_t* packed, const BlockPanel* blocks,
                     const typename Format::Element* bias, typename Format::Element* out, int64_t rows, int64_t width,
                     int64_t k, int threads, const Epilogue* epilogue) {
  static_assert(kPanel == 2 * kLanes);
  constexpr bool kExact = std::is_same_v<typename Format::Element, float>;
  const RowLow* adapted = epilogue ? epilogue->adapted : nullptr;
  const float scale = epilogue ? epilogue->gate_scale : 1.0f;
  return product<Format>(x, x_row, packed, blocks, rows, 2 * width, k, threads,
                         [&](int64_t row, int64_t column, int64_t count, int64_t, float* tile) {
    if (adapted) add_low_rank<typename Format::Element>(adapted, row, column, count, tile);
    for (int64_t r = 0; r < count; ++r, tile += kPanel) {
      Floats g = load(tile), u = load(tile + kLanes);
      if (bias) g += load_some(bias + column, kLanes), u += load_some(bias + column + kLanes, kLanes);
      store_some(out + (row + r) * width + column / 2, gated<Activation, kExact>(g * Floats(scale), u), kLanes);
    }
  });
}

// A key that orders numbers: it rises with x, and for equal x falls with the column. NaN has the largest key.
inline uint64_t rank_of(float x, int64_t column) {
  x += 0.0f;  // -0 becomes +0, so that all zeros are equal
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  bits = std::isnan(x) ? ~0u : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return uint64_t{bits} << 32 | (~static_cast<uint32_t>(column));
}

// The number that has this key; NaN if the key is below the keys of all numbers.
inline float number_of(uint64_t rank) {
  uint32_t bits = rank >> 32;
  bits = bits & 0x80000000u ? bits & 0x7fffffffu : ~bits;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

PREFOLD_INLINE Words not_below(const Floats& x, const Floats& y) {
  return Words::make([&](int p) { return (Part<uint32_t>)~(x.part[p] < y.part[p]); });
}

// best [rows] = the largest `rank_of` in each row of the product.
template <class Format>
int32_t largest(const typename Format::Element* x, const uint32_t* packed, const BlockPanel* blocks,
                std::atomic<uint64_t>* best, int64_t rows, int64_t columns, int64_t k, int threads, int64_t first) {
  for (int64_t r = 0; r < rows; ++r) best[r].store(0, std::memory_order_relaxed);
  return product<Format>(x, k, packed, blocks, rows, columns, k, threads,
                         [&](int64_t row, int64_t column, int64_t count, int64_t width, const float* tile) {
    for (int64_t r = 0; r < count; ++r, tile += kPanel) {
      uint64_t here = 0, before = best[row + r].load(std::memory_order_relaxed);
      const Floats top(number_of(before));
      if (!any_bit(not_below(load(tile), top) | not_below(load(tile + kLanes), top))) continue;
      for (int64_t i = 0; i < width; ++i) here = std::max(here, rank_of(tile[i], first + column + i));
      while (here > before && !best[row + r].compare_exchange_weak(before, here, std::memory_order_relaxed)) {
      }
    }
  });
}

// ids [rows] = the column of the largest number in each row of the product. Ties go to the first column. `none` if the
// largest number is not finite. If the columns are split over ranks, this rank's columns start at `first`.
template <class Format>
int32_t greedy(const typename Format::Element* x, const uint32_t* packed, const BlockPanel* blocks, int64_t* ids,
               int64_t rows, int64_t columns, int64_t k, int64_t none, int threads, int64_t first, RanksView* ranks) {
  static_assert(sizeof(std::atomic<uint64_t>) == sizeof(int64_t));
  auto* best = reinterpret_cast<std::atomic<uint64_t>*>(ids);
  if (const int32_t failed = largest<Format>(x, packed, blocks, best, rows, columns, k, threads, first)) return failed;
  if (ranks) {
    if (const int32_t unmet = Ranks{*ranks}.most(reinterpret_cast<uint64_t*>(ids), rows)) return unmet;
  }
  constexpr uint64_t kInfinity = 0xff800000u, kLowest = 0x007fffffu;  // upper halves of +inf (NaN is above), of -inf
  for (int64_t r = 0; r < rows; ++r) {
    const uint64_t rank = best[r].load(std::memory_order_relaxed), upper = rank >> 32;
    ids[r] = upper >= kInfinity || upper <= kLowest ? none : static_cast<int64_t>(~static_cast<uint32_t>(rank));
  }
  return 0;
}

}  // namespace
extern "C" int32_t prefold_has_products(int32_t is_bf16) {
#ifdef __AVX512F__
  return !is_bf16 || Bf16Words::kParts == 1;
#elif (defined(__AVX2__) && defined(__FMA__)) || defined(__aarch64__)
  (void)is_bf16;
  return 1;
#else
  (void)is_bf16;
  return 0;
#endif
}

#define PREFOLD_EXPORT_LINEAR(name, Format, E, Out)                                                                 \
  extern "C" int32_t prefold_linear_##name(const E* x, int64_t x_row, const uint32_t* packed,                       \
                                           const BlockPanel* blocks, const E* bias, Out* out, int64_t rows,         \
                                           int64_t columns, int64_t k, int32_t threads, const Epilogue* epilogue) { \
    return linear<Format>(x, x_row, packed, blocks, bias, out, rows, columns, k, threads, epilogue);                \
  }
PREFOLD_EXPORT_LINEAR(float32, FloatWords, float, float)
PREFOLD_EXPORT_LINEAR(bfloat16, Bf16Words, Bf16, Bf16)
PREFOLD_EXPORT_LINEAR(bfloat16_float32, Bf16Words, Bf16, float)

#define PREFOLD_EXPORT_GREEDY(name, Format, E)                                                                         \
  extern "C" int32_t prefold_greedy_##name(const E* x, const uint32_t* packed, const BlockPanel* blocks, int64_t* ids, \
                                           int64_t rows, int64_t columns, int64_t k, int64_t none, int32_t threads,    \
                                           int64_t first, RanksView* ranks) {                                          \
    return greedy<Format>(x, packed, blocks, ids, rows, columns, k, none, threads, first, ranks);                      \
  }
PREFOLD_EXPORT_GREEDY(float32, FloatWords, float)
PREFOLD_EXPORT_GREEDY(bfloat16, Bf16Words, Bf16)

#define PREFOLD_EXPORT_GATED(name, Format, Activation, E)                                                            \
  extern "C" int32_t prefold_gated_linear_##name(                                                                    \
      const E* x, int64_t x_row, const uint32_t* packed, const BlockPanel* blocks, const E* bias, E* out,            \
      int64_t rows, int64_t width, int64_t k, int32_t threads, const Epilogue* epilogue) {                           \
    return gated_linear<Format, Activation>(x, x_row, packed, blocks, bias, out, rows, width, k, threads, epilogue); \
  }
PREFOLD_EXPORT_GATED(silu_float32, FloatWords, Silu, float)
PREFOLD_EXPORT_GATED(silu_bfloat16, Bf16Words, Silu, Bf16)
PREFOLD_EXPORT_GATED(gelu_tanh_float32, FloatWords, GeluTanh, float)
PREFOLD_EXPORT_GATED(gelu_tanh_bfloat16, Bf16Words, GeluTanh, Bf16)
PREFOLD_EXPORT_GATED(gelu_float32, FloatWords, Gelu, float)
PREFOLD_EXPORT_GATED(gelu_bfloat16, Bf16Words, Gelu, Bf16)
PREFOLD_EXPORT_GATED(relu_float32, FloatWords, Relu, float)
PREFOLD_EXPORT_GATED(relu_bfloat16, Bf16Words, Relu, Bf16)
PREFOLD_EXPORT_GATED(relu2_float32, FloatWords, Relu2, float)
PREFOLD_EXPORT_GATED(relu2_bfloat16, Bf16Words, Relu2, Bf16)

}  // namespace prefold
