// A mixture of experts: each row of a step runs through some of a layer's MLPs.
//
// The pairs of a row and an expert are sorted by expert, so that all rows of an expert are one product with its
// matrices. The results are stored in the row's own order, largest logit first, and summed in this order. So a row's
// result does not depend on the rows beside it, nor on the number of threads.
#include <algorithm>
#include <cmath>
#include <vector>

#include "activations.h"
#include "amx_products.h"
#include "few_rows.h"
#include "interface.h"
#include "pack.h"

namespace prefold {
namespace {

// The matrices of all experts, one after the other: packed, or in blocks.
struct Stack {
  const void* packed;
  const BlockPanel* blocks;
  int64_t panels;  // of an expert
};

// The number of pieces per thread, for balance; and the least panels in a piece, so that copying its rows pays off.
constexpr int64_t kPiecesPerThread = 8, kLeastPanels = 4;
// A row stride that is a multiple of kBadStride maps all rows to the same sets of the nearest cache. In bytes.
constexpr int64_t kBadStride = 2048, kPadding = 64;

constexpr int64_t padded_row(int64_t bytes) { return bytes + (bytes % kBadStride ? 0 : kPadding); }

// Write the indices of the `count` largest keys to `to`, in descending order of the keys. Ties go to the lower index.
// NaN counts as the lowest key.
void choose_largest(const float* keys, int64_t size, int64_t count, int32_t* to) {
  const auto key = [](float x) { return std::isnan(x) ? -HUGE_VALF : x; };
  for (int64_t e = 0, found = 0; e < size; ++e) {
    const float x = key(keys[e]);
    if (found == count && !(x > key(keys[to[found - 1]]))) continue;
    int64_t at = found < count ? found++ : found - 1;
    for (; at > 0 && x > key(keys[to[at - 1]]); --at) to[at] = to[at - 1];
    to[at] = static_cast<int32_t>(e);
  }
}

// Set the keys of the experts to minus infinity, except in the best groups. A group's rank is the sum of its largest
// keys.
void leave_groups(float* keys, const ExpertsCall& call) {
  const int64_t size = call.experts / call.groups, count = std::min(call.group_best, size);
  std::vector<float> sums(call.groups);
  std::vector<int32_t> largest(std::max(size, call.groups));
  for (int64_t g = 0; g < call.groups; ++g) {
    choose_largest(keys + g * size, size, count, largest.data());
    for (int64_t i = 0; i < count; ++i) sums[g] += keys[g * size + largest[i]];
  }
  choose_largest(sums.data(), call.groups, call.chosen_groups, largest.data());
  for (int64_t g = 0; g < call.groups; ++g) {
    const auto stop = largest.begin() + call.chosen_groups;
    if (std::find(largest.begin(), stop, static_cast<int32_t>(g)) != stop) continue;
    std::fill(keys + g * size, keys + (g + 1) * size, -HUGE_VALF);
  }
}

// Choose the experts of one row and their weights with kSparseMixer.
void mix_sparsely(const ExpertsCall& call, const float* logits, int32_t* to, float* weights) {
  choose_largest(logits, call.experts, call.chosen, to);
  for (int64_t i = 0; i < call.chosen; ++i) {
    const float top = logits[to[i]];
    float sum = 0;
    for (int64_t e = 0; e < call.experts; ++e) {
      const bool was_chosen = std::find(to, to + i, static_cast<int32_t>(e)) != to + i;
      if (was_chosen || (top - logits[e]) / std::max(std::abs(logits[e]), top) > call.tolerance) continue;
      sum += std::exp(logits[e] - top);
    }
    weights[i] = call.scale / sum;
  }
}

// Choose the experts of one row and their weights.
void route(const ExpertsCall& call, const float* logits, int32_t* to, float* weights) {
  const int64_t experts = call.experts, chosen = call.chosen;
  if (call.score == kSparseMixer) return mix_sparsely(call, logits, to, weights);
  // If plain, the largest scores belong to the largest logits, and a softmax of the chosen logits is enough.
  const bool plain = !call.correction && call.groups == 1 && call.least_sum == 0;
  const bool is_sigmoid = call.score == kSigmoid;
  static thread_local std::vector<float> scores, keys;
  if (!plain || is_sigmoid) {
    scores.resize(experts);
    float sum = 0, top = -HUGE_VALF;
    for (int64_t e = 0; e < experts; ++e) top = std::max(top, logits[e]);
    for (int64_t e = 0; e < experts; ++e) {
      scores[e] = is_sigmoid ? 1 / (1 + std::exp(-logits[e])) : std::exp(logits[e] - top);
      sum += scores[e];
    }
    if (!is_sigmoid) {
      for (float& score : scores) score /= sum;
    }
  }
  if (plain) {
    choose_largest(logits, experts, chosen, to);
  } else {
    keys = scores;
    if (call.corrects_logits) keys.assign(logits, logits + experts);
    if (call.correction) {
      for (int64_t e = 0; e < experts; ++e) keys[e] += call.correction[e];
    }
    if (call.groups > 1) leave_groups(keys.data(), call);
    choose_largest(keys.data(), experts, chosen, to);
  }
  if (!plain || is_sigmoid) {
    float sum = 0;
    for (int64_t i = 0; i < chosen; ++i) sum += weights[i] = scores[to[i]];
    const float by = call.normalised ? call.scale / std::max(sum, call.least_sum) : call.scale;
    for (int64_t i = 0; i < chosen; ++i) weights[i] *= by;
    return;
  }
  const float top = logits[to[0]];
  float sum = 0;
  for (int64_t i = 0; i < chosen; ++i) sum += weights[i] = std::exp(logits[to[i]] - top);
  if (!call.normalised) {
    sum = 0;
    for (int64_t e = 0; e < experts; ++e) sum += std::exp(logits[e] - top);
  }
  for (int64_t i = 0; i < chosen; ++i) weights[i] = weights[i] / sum * call.scale;
}

// The pairs of a row and an expert, numbered row by row and sorted by expert.
struct Sorted {
  Sorted(const int32_t* experts_of, int64_t pairs, int64_t experts) : starts(experts + 1), pair(pairs) {
    for (int64_t i = 0; i < pairs; ++i) ++starts[experts_of[i] + 1];
    for (int64_t e = 0; e < experts; ++e) starts[e + 1] += starts[e];
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t i = 0; i < pairs; ++i) pair[next[experts_of[i]]++] = i;
  }

  std::vector<int64_t> starts;  // the first pair of each expert, and the number of pairs
  std::vector<int64_t> pair;
};

// Some panels of an expert's matrix, and some of its pairs.
struct Piece {
  int64_t expert, first_panel, stop_panel, first, stop;
};

// Cut a product into pieces and run body(piece) for them in parallel. Each expert has a matrix of `panels` panels with
// `steps` words along k.
void for_pieces(const Sorted& sorted, int64_t panels, int64_t steps, int threads, bool in_tiles,
                const Body<const Piece&>& body) {
  const int64_t experts = static_cast<int64_t>(sorted.starts.size()) - 1;
#ifdef PREFOLD_TILES
  const int64_t most = in_tiles ? kTileGroupRows : kGroupRows;
#else
  const int64_t most = kGroupRows;
#endif
  // Reading a panel takes as long as multiplying it with kFewRows rows.
  const auto cost = [&](int64_t rows) { return rows ? std::max<int64_t>(rows, kFewRows) : 0; };
  int64_t whole = 0;
  for (int64_t e = 0; e < experts; ++e) whole += cost(sorted.starts[e + 1] - sorted.starts[e]) * panels;
  const int64_t products = whole * steps * kPanel;
  const int workers = static_cast<int>(std::min<int64_t>(threads, 1 + products / kProductsPerThread));
  const int64_t aim = std::max<int64_t>(1, whole / (workers * kPiecesPerThread));
  std::vector<Piece> pieces;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t begin = sorted.starts[e], rows = sorted.starts[e + 1] - begin, groups = (rows + most - 1) / most;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = begin + rows * g / groups, stop = begin + rows * (g + 1) / groups;
      const int64_t wanted = (cost(stop - first) * panels + aim - 1) / aim;
      const int64_t parts = std::max<int64_t>(1, std::min(wanted, panels / kLeastPanels));
      for (int64_t i = 0; i < parts; ++i) {
        pieces.push_back({e, panels * i / parts, panels * (i + 1) / parts, first, stop});
      }
    }
  }
  parallel_shares(static_cast<int64_t>(pieces.size()), workers, [&](int64_t i) { body(pieces[i]); },
                  [&](const Body<>& run) {
    run();
#ifdef PREFOLD_TILES
    if (in_tiles) _tile_release();
#endif
  });
}

template <class Format>
class Experts {
  using Element = typename Format::Element;
  using Number = std::conditional_t<Format::kWidth == 2, Element, typename Format::Stored>;
  static constexpr bool kWiden = sizeof(Number) != sizeof(Element);

 public:
  explicit Experts(const ExpertsCall& call)
      : call_(call),
        pairs_(call.rows * call.chosen),
        inner_row_(padded_row(call.width * sizeof(Element)) / sizeof(Element)),
        experts_of_(pairs_),
        shares_(pairs_) {
#ifdef PREFOLD_TILES
    in_tiles_ = Format::kWidth == 2 && may_use_tiles();
#endif
  }

  template <class Activation>
  void run() {
    const auto* logits = static_cast<const float*>(call_.logits);
    parallel_ranges(call_.rows, 4 * call_.experts, call_.threads, [&](int64_t first, int64_t stop) {
      for (int64_t r = first; r < stop; ++r) {
        int32_t* experts = &experts_of_[r * call_.chosen];
        float* shares = &shares_[r * call_.chosen];
        route(call_, logits + r * call_.experts, experts, shares);
        for (int64_t i = 0; call_.scales && i < call_.chosen; ++i) shares[i] *= call_.scales[experts[i]];
      }
    });
    const Sorted sorted(experts_of_.data(), pairs_, call_.experts);
    static thread_local Workspace workspace;
    auto* inner =
        static_cast<Element*>(workspace.reserve((pairs_ * (inner_row_ + call_.hidden) + 32) * sizeof(Element)));
    Element* results = inner + (pairs_ * inner_row_ + 31) / 32 * 32;
    multiply_gate_up<Activation>(sorted, inner);
    multiply_down(sorted, inner, results);
    add_up(results);
  }

 private:
  // Return the product of `rows` rows in the form that the kernels read. row_of(i): the address of row i. lie_well: the
  // rows are evenly spaced, with a good stride. Otherwise several rows are copied, as are rows of another number
  // format.
  template <class RowOf>
  Product rows_of(int64_t rows, int64_t k, const Stack& stack, bool lie_well, const RowOf& row_of) {
    const int64_t steps = k * sizeof(Element) / sizeof(uint32_t), columns = call_.experts * stack.panels * kPanel;
    const auto* words = static_cast<const uint32_t*>(stack.packed);
    const char* first = reinterpret_cast<const char*>(row_of(0));
    if (!kWiden && (rows == 1 || lie_well)) {
      const int64_t distance = rows == 1 ? 0 : reinterpret_cast<const char*>(row_of(1)) - first;
      return {first, distance, words, rows, columns, steps, stack.blocks};
    }
    static thread_local Workspace workspace;
    const int64_t row = padded_row(k * sizeof(Number));
    char* copy = static_cast<char*>(workspace.reserve(rows * row));
    for (int64_t i = 0; i < rows; ++i) {
      const Element* from = row_of(i);
      if constexpr (!kWiden) {
        memcpy(copy + i * row, from, k * sizeof(Element));
      } else {
        for (int64_t j = 0; j < k; j += kLanes) {
          store_some(reinterpret_cast<Number*>(copy + i * row) + j, load_some(from + j, k - j), k - j);
        }
      }
    }
    return {copy, row, words, rows, columns, steps, stack.blocks};
  }

  using StorePairs = Body<int64_t, int64_t, int64_t, const float*>;

#ifdef PREFOLD_FEW_ROWS
  // Multiply a piece with few_rows.h, if that is fast for this number of rows and supports the matrix. Return false
  // otherwise. All panels of a stack have the same type.
  template <class RowOf>
  bool multiply_few(const Piece& piece, int64_t k, const Stack& stack, const RowOf& row_of, const StorePairs& store) {
    const int64_t rows = piece.stop - piece.first;
    if (!stack.blocks || !are_few(rows, kDigits<Element>) || !add_few(stack.blocks->type, 1)) return false;
    static thread_local Workspace workspace;
    auto* copy = static_cast<Element*>(workspace.reserve(rows * k * sizeof(Element)));
    for (int64_t i = 0; i < rows; ++i) memcpy(copy + i * k, row_of(i), k * sizeof(Element));
    const Int8Rows given = quantise(copy, k, rows, k, 32, stack.blocks->type == kQ6_K, 1, kDigits<Element>);
    alignas(64) float sums[kFewSums];
    for (int64_t p = piece.first_panel; p < piece.stop_panel; ++p) {
      multiply_few_rows(stack.blocks[piece.expert * stack.panels + p], k, given, rows, kDigits<Element>, sums);
      store(piece.first, p * kPanel, rows, sums);
    }
    return true;
  }
#endif

  // Multiply a whole piece, and call store(row, column, number of rows, sums [rows, kPanel]). `row` counts the sorted
  // pairs, `column` is within the expert. lie_well, row_of: see `rows_of`.
  template <class RowOf>
  void multiply_piece(const Piece& piece, int64_t k, const Stack& stack, bool lie_well, const RowOf& row_of,
                      const StorePairs& store) {
#ifdef PREFOLD_FEW_ROWS
    if (multiply_few(piece, k, stack, row_of, store)) return;
#endif
    Product product = rows_of(piece.stop - piece.first, k, stack, lie_well, row_of);
    const int64_t panel = piece.expert * stack.panels;
    const auto put = [&](int64_t row, int64_t column, int64_t count, int64_t, const float* tile) {
      store(piece.first + row, column - panel * kPanel, count, tile);
    };
#ifdef PREFOLD_TILES
    if constexpr (Format::kWidth == 2) {
      if (in_tiles_) {
        configure_tiles(product.rows, kTile);
        for (int64_t p = piece.first_panel; p < piece.stop_panel; ++p) {
          multiply_panel_in_tiles(product, panel + p, 0, product.rows, put);
        }
        return;
      }
    }
#endif
    if constexpr (std::is_same_v<Format, FloatWords>) {
      // With more rows, it is faster to decode the matrix once for all of them.
      if (stack.blocks && stack.blocks->type == kBF16 && product.rows <= 2 * kBlockRows) {
        product.steps = k / 2, product.as_words = true;
        for (int64_t p = piece.first_panel; p < piece.stop_panel; ++p) {
          multiply_panel<WidenedWords>(product, panel + p, 0, product.rows, put);
        }
        return;
      }
    }
    for (int64_t p = piece.first_panel; p < piece.stop_panel; ++p) {
      multiply_panel<Format>(product, panel + p, 0, product.rows, put);
    }
  }

  // inner [sorted pairs, width] = activation(gate) * up, or activation(up) if experts have no gate.
  template <class Activation>
  void multiply_gate_up(const Sorted& sorted, Element* inner) {
    constexpr bool kExact = std::is_same_v<Element, float>;
    const auto* x = static_cast<const Element*>(call_.x);
    const int64_t outputs = call_.is_plain ? call_.width : 2 * call_.width;
    const Stack stack{call_.gate_up, call_.gate_up_blocks, (outputs + kPanel - 1) / kPanel};
    const int64_t steps = call_.hidden * sizeof(Element) / sizeof(uint32_t);
    for_pieces(sorted, stack.panels, steps, call_.threads, in_tiles_, [&](const Piece& piece) {
      const auto row_of = [&](int64_t i) { return x + sorted.pair[piece.first + i] / call_.chosen * call_.x_row; };
      multiply_piece(piece, call_.hidden, stack, false, row_of,
                     [&](int64_t row, int64_t column, int64_t count, const float* tile) {
        if (call_.is_plain) return put_plain<Activation>(piece.expert, row, column, count, tile, inner);
        Floats of_gate = zeros(), of_up = zeros();
        if (call_.gate_up_bias) {
          const int64_t width = call_.bias_width, left = width - column / 2;
          const Element* bias = static_cast<const Element*>(call_.gate_up_bias) + 2 * piece.expert * width + column / 2;
          of_gate = load_some(bias, left), of_up = load_some(bias + width, left);
        }
        for (int64_t r = 0; r < count; ++r, tile += kPanel) {
          const Floats inside = gated<Activation, kExact>(load(tile) + of_gate, load(tile + kLanes) + of_up);
          store(inner + (row + r) * inner_row_ + column / 2, inside);
        }
      });
    });
  }

  // Store activation(up + bias) for some rows of a panel. The last panel may have more columns than `inner`.
  template <class Activation>
  void put_plain(int64_t expert, int64_t row, int64_t column, int64_t count, const float* tile, Element* inner) const {
    constexpr bool kExact = std::is_same_v<Element, float>;
    const int64_t width = std::min<int64_t>(kPanel, call_.width - column), left = call_.bias_width - column;
    const auto* bias = static_cast<const Element*>(call_.gate_up_bias);
    for (int64_t i = 0; i < width; i += kLanes) {
      Floats added = zeros();
      if (bias && left > i) added = load_some(bias + expert * call_.bias_width + column + i, left - i);
      for (int64_t r = 0; r < count; ++r) {
        const Floats inside = gated<Activation, kExact>(load(tile + r * kPanel + i) + added, Floats(1.0f));
        store(inner + (row + r) * inner_row_ + column + i, inside);
      }
    }
  }

  // results [pairs, row by row, hidden] = inner times down.
  void multiply_down(const Sorted& sorted, const Element* inner, Element* results) {
    const Stack stack{call_.down, call_.down_blocks, (call_.hidden + kPanel - 1) / kPanel};
    const int64_t steps = call_.width * sizeof(Element) / sizeof(uint32_t);
    for_pieces(sorted, stack.panels, steps, call_.threads, in_tiles_, [&](const Piece& piece) {
      const auto row_of = [&](int64_t i) { return inner + (piece.first + i) * inner_row_; };
      multiply_piece(piece, call_.width, stack, true, row_of,
                     [&](int64_t row, int64_t column, int64_t count, const float* tile) {
        const int64_t width = std::min<int64_t>(kPanel, call_.hidden - column);
        for (int64_t r = 0; r < count; ++r, tile += kPanel) {
          Element* to = results + sorted.pair[row + r] * call_.hidden + column;
          for (int64_t i = 0; i < width; i += kLanes) {
            Floats result = load(tile + i);
            if (call_.down_bias) {
              const auto* bias = static_cast<const Element*>(call_.down_bias) + piece.expert * call_.hidden + column;
              result += load_some(bias + i, width - i);
            }
            store_some(to + i, result, width - i);
          }
        }
      });
    });
  }

  // out [rows, hidden] = the weighted sum of each row's results.
  void add_up(const Element* results) {
    auto* out = static_cast<Element*>(call_.out);
    const int64_t hidden = call_.hidden, chosen = call_.chosen;
    parallel_ranges(call_.rows, hidden * chosen, call_.threads, [&](int64_t first, int64_t stop) {
      for (int64_t r = first; r < stop; ++r) {
        const Element* of_row = results + r * chosen * hidden;
        for (int64_t d = 0; d < hidden; d += kLanes) {
          Floats sum = zeros();
          for (int64_t i = 0; i < chosen; ++i) {
            sum += Floats(shares_[r * chosen + i]) * load_some(of_row + i * hidden + d, hidden - d);
          }
          store_some(out + r * hidden + d, sum, hidden - d);
        }
      }
    });
  }

  const ExpertsCall& call_;
  int64_t pairs_, inner_row_;
  std::vector<int32_t> experts_of_;
  std::vector<float> shares_;
  bool in_tiles_ = false;
};

// Return 0, or kNoMemory.
template <class Format, class Activation>
int32_t experts(const ExpertsCall& call) {
  if (call.rows == 0) return 0;
  try {
    Experts<Format>(call).template run<Activation>();
    return 0;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

}  // namespace
#define PREFOLD_EXPORT_EXPERTS(name, Format, Activation) \
  extern "C" int32_t prefold_experts_##name(const ExpertsCall* call) { return experts<Format, Activation>(*call); }

PREFOLD_EXPORT_EXPERTS(silu_float32, FloatWords, Silu)
PREFOLD_EXPORT_EXPERTS(silu_bfloat16, Bf16Words, Silu)
PREFOLD_EXPORT_EXPERTS(gelu_tanh_float32, FloatWords, GeluTanh)
PREFOLD_EXPORT_EXPERTS(gelu_tanh_bfloat16, Bf16Words, GeluTanh)
PREFOLD_EXPORT_EXPERTS(clamped_float32, FloatWords, Clamped)
PREFOLD_EXPORT_EXPERTS(clamped_bfloat16, Bf16Words, Clamped)
PREFOLD_EXPORT_EXPERTS(relu2_float32, FloatWords, Relu2)
PREFOLD_EXPORT_EXPERTS(relu2_bfloat16, Bf16Words, Relu2)

}  // namespace prefold
