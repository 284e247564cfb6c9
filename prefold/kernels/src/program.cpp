// Runs the forward pass of a step in one call. A program is the list of a model's operations, built once when the model
// is loaded. A call runs it for the rows of one step.
//
// Rows lie in buffers, [rows, width] each. An operation names the buffers that it reads and writes. Operations process
// all rows, and after a kPick only the rows that are read.
#include <atomic>
#include <cmath>
#include <cstring>

#include "activations.h"
#include "attention.h"
#include "epilogue.h"
#include "interface.h"
#include "latent.h"
#include "parallel.h"
#include "ranks.h"
#include "workspace.h"

namespace prefold {
namespace {

// The overload for element type E.
template <class E, class Float, class Half>
constexpr auto pick_of(Float* of_float, Half* of_bf16) {
  if constexpr (std::is_same_v<E, float>) return of_float;
  else return of_bf16;
}

template <class E>
struct Pass {
  static constexpr bool kBf16 = std::is_same_v<E, Bf16>;
  const ProgramCall& call;
  int64_t rows;
  bool all;  // whether `rows` are all rows, not only the rows that are read

  E* buffer(int number) const { return reinterpret_cast<E*>(call.buffers[number]); }

  void norm(const Operation& op) const {
    E *x = buffer(op.source) + op.at, *out = buffer(op.out) + op.at;
    const E* delta = op.beside < 0 ? nullptr : buffer(op.beside);
    const int64_t width = op.columns;
    if (op.bias) {
      const auto layered = [&](auto* function, auto* weight, auto* bias) {
        function(x, delta, weight, bias, out, rows, width, op.eps, call.threads);
      };
      if constexpr (kBf16) {
        const auto *weight = static_cast<const float*>(op.weight), *bias = static_cast<const float*>(op.bias);
        if (op.wide) return layered(prefold_add_layer_norm_bfloat16_float32, weight, bias);
      }
      return layered(pick_of<E>(prefold_add_layer_norm_float32, prefold_add_layer_norm_bfloat16),
                     static_cast<const E*>(op.weight), static_cast<const E*>(op.bias));
    }
    const auto scaled = [&](auto* function, auto* weight) {
      function(x, delta, weight, out, rows, width, call.widths[op.source], width, call.widths[op.out], op.eps,
               call.threads);
    };
    if constexpr (kBf16) {
      if (op.wide) return scaled(prefold_add_rms_norm_bfloat16_float32, static_cast<const float*>(op.weight));
    }
    scaled(pick_of<E>(prefold_add_rms_norm_float32, prefold_add_rms_norm_bfloat16), static_cast<const E*>(op.weight));
  }

  // The RMS norm of a row whose numbers are split over the ranks: the squares are summed over the ranks.
  int32_t split_norm(const Operation& op) const {
    if constexpr (kBf16) {
      if (op.wide) return split_norm(op, static_cast<const float*>(op.weight));
    }
    return split_norm(op, static_cast<const E*>(op.weight));
  }

  template <class W>
  int32_t split_norm(const Operation& op, const W* weight) const {
    static thread_local Workspace workspace;
    auto* squares = static_cast<float*>(workspace.reserve(rows * sizeof(float)));
    const int64_t width = op.columns, x_row = call.widths[op.source], out_row = call.widths[op.out];
    const E* x = buffer(op.source) + op.at;
    E* out = buffer(op.out) + op.at;
    parallel_ranges(rows, width, call.threads, [&](int64_t first, int64_t stop) {
      for (int64_t r = first; r < stop; ++r) {
        Floats sums = zeros();
        for (int64_t d = 0; d < width; d += kLanes) {
          const Floats some = load_some(x + r * x_row + d, width - d);
          sums += some * some;
        }
        squares[r] = sum_of(sums) / static_cast<float>(op.kv_heads);
      }
    });
    if (const int32_t unmet = Ranks{*call.ranks}.sum(squares, rows, call.threads, false)) return unmet;
    parallel_ranges(rows, width, call.threads, [&](int64_t first, int64_t stop) {
      for (int64_t r = first; r < stop; ++r) {
        const Floats scale(1 / std::sqrt(squares[r] / static_cast<float>(op.heads) + op.eps));
        for (int64_t d = 0; d < width; d += kLanes) {
          const Floats normed = load_some(x + r * x_row + d, width - d) * scale;
          store_some(out + r * out_row + d, normed * load_some(weight + d, width - d), width - d);
        }
      }
    });
    return 0;
  }

  static auto gated_linear(int32_t activation) {
    switch (activation) {
      case kSilu: return pick_of<E>(prefold_gated_linear_silu_float32, prefold_gated_linear_silu_bfloat16);
      case kGelu: return pick_of<E>(prefold_gated_linear_gelu_float32, prefold_gated_linear_gelu_bfloat16);
      case kRelu: return pick_of<E>(prefold_gated_linear_relu_float32, prefold_gated_linear_relu_bfloat16);
      case kRelu2: return pick_of<E>(prefold_gated_linear_relu2_float32, prefold_gated_linear_relu2_bfloat16);
      default: return pick_of<E>(prefold_gated_linear_gelu_tanh_float32, prefold_gated_linear_gelu_tanh_bfloat16);
    }
  }

  int32_t product(const Operation& op) const {
    const auto* weight = static_cast<const uint32_t*>(op.weight);
    const auto* bias = static_cast<const E*>(op.bias);
    const int64_t k = call.widths[op.source], columns = call.widths[op.out];
    const E* in = buffer(op.source);
    const bool is_given = op.summed && rows * columns * static_cast<int64_t>(sizeof(E)) <= call.ranks->part;
    E* out = is_given ? Ranks{*call.ranks}.part_of<E>(call.ranks->rank) : buffer(op.out);
    const Epilogue epilogue{call.numbers ? call.adapted : nullptr, op.activation, op.eps};
    if (call.numbers) {
      if (const int32_t failed = lower(op)) return failed;
    }
    auto* function = pick_of<E>(prefold_linear_float32, prefold_linear_bfloat16);
    if (op.kind == kGated) function = gated_linear(op.activation);
    const int32_t failed = function(in, k, weight, op.blocks, bias, out, rows, columns, k, call.threads, &epilogue);
    if (failed || !op.summed) return failed;
    return Ranks{*call.ranks}.sum(buffer(op.out), rows * columns, call.threads, is_given);
  }

  // Multiply each row that has an adapter with the adapter's A. Neighbours with the same adapter are one product.
  int32_t lower(const Operation& op) const {
    const int64_t k = call.widths[op.source];
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t number = call.numbers[all ? r : call.read[r]];
      const LowRank* adapter = number < 0 ? nullptr : call.adapters[number] + op.linear;
      call.adapted[r].adapter = adapter && adapter->ranks ? adapter : nullptr;
    }
    std::atomic<int32_t> failed{0};
    parallel_ranges(rows, k * kPanel, call.threads, [&](int64_t first, int64_t stop) {
      for (int64_t next; first < stop; first = next) {
        const LowRank* adapter = call.adapted[first].adapter;
        float* low = call.low + first * call.most_ranks;
        for (next = first; next < stop && call.adapted[next].adapter == adapter; ++next) {
          call.adapted[next].low = adapter ? low + (next - first) * adapter->ranks : nullptr;
        }
        if (!adapter) continue;
        auto* const function = pick_of<E>(prefold_linear_float32, prefold_linear_bfloat16_float32);
        if (function(buffer(op.source) + first * k, k, adapter->a, nullptr, nullptr, low, next - first, adapter->ranks,
                     k, 1, nullptr)) {
          failed.store(kNoMemory, std::memory_order_relaxed);
        }
      }
    });
    return failed.load(std::memory_order_relaxed);
  }

  // Gather the cosines and sines of all rows.
  void turn() const {
    for (int64_t t = 0; t < call.num_tables; ++t) {
      const int64_t dim = call.dims[t];
      float* angles = angles_of(t);
      parallel_ranges(rows, dim, call.threads, [&](int64_t first, int64_t stop) {
        for (int64_t r = first; r < stop; ++r) {
          const int64_t position = call.positions[all ? r : call.read[r]];
          std::memcpy(angles + r * dim, call.tables[t] + position * dim, dim * sizeof(float));
        }
      });
    }
  }

  float* angles_of(int64_t table) const {
    float* angles = call.angles;
    for (int64_t t = 0; t < table; ++t) angles += rows * call.dims[t];
    return angles;
  }

  // Copy one row of a matrix that is packed in words.
  static void copy_words(const uint32_t* packed, int64_t row, int64_t width, E* to) {
    const int64_t words = width * static_cast<int64_t>(sizeof(E)) / static_cast<int64_t>(sizeof(uint32_t));
    const uint32_t* from = packed + row / kPanel * words * kPanel + row % kPanel;
    char* out = reinterpret_cast<char*>(to);
    for (int64_t w = 0; w < words; ++w) std::memcpy(out + w * sizeof *from, from + w * kPanel, sizeof *from);
  }

  int32_t embed(const Operation& op) const {
    static thread_local Workspace workspace;
    auto* inside = op.keys ? static_cast<int64_t*>(workspace.reserve(rows * sizeof(int64_t))) : nullptr;
    const int64_t* tokens = inside ? inside : call.tokens;
    for (int64_t r = 0; r < rows; ++r) {
      if (call.tokens[r] < 0 || call.tokens[r] >= op.dim) return kNoToken;
      if (op.bias && (call.positions[r] < 0 || call.positions[r] >= op.positions)) return kNoPosition;
      if (inside) inside[r] = call.tokens[r] < op.keys ? call.tokens[r] : 0;
    }
    const int64_t width = call.widths[op.out];
    const auto *table = static_cast<const E*>(op.weight), *learned = static_cast<const E*>(op.bias);
    if (op.blocks) {
      pick_of<E>(prefold_block_rows_float32, prefold_block_rows_bfloat16)(op.blocks, tokens, buffer(op.out), rows,
                                                                          width, call.threads);
      if (op.eps == 1 && !learned) return 0;
    }
    parallel_ranges(rows, width, call.threads, [&](int64_t first, int64_t stop) {
      for (int64_t r = first; r < stop; ++r) {
        E* to = buffer(op.out) + r * width;
        const int64_t token = tokens[r] - op.at;
        if (token < 0 || token >= op.columns) {  // it belongs to another rank
          std::memset(static_cast<void*>(to), 0, width * sizeof(E));
          continue;
        }
        if (op.wide) copy_words(static_cast<const uint32_t*>(op.weight), token, width, to);
        const E* from = table && !op.wide ? table + token * width : to;
        if (from == to && op.eps == 1 && !learned) continue;
        if (op.eps == 1 && !learned) {
          std::memcpy(to, from, width * sizeof(E));
          continue;
        }
        for (int64_t d = 0; d < width; d += kLanes) {
          Floats x = rounded_to<E>(load_some(from + d, width - d) * Floats(op.eps));
          if (learned) x += load_some(learned + call.positions[r] * width + d, width - d);
          store_some(to + d, x, width - d);
        }
      }
    });
    return op.summed ? Ranks{*call.ranks}.sum(buffer(op.out), rows * width, call.threads, false) : 0;
  }

  int32_t add(const Operation& op) const {
    const int64_t width = call.widths[op.source];
    E* x = buffer(op.source);
    const E* delta = buffer(op.beside);
    parallel_ranges(rows, width, call.threads, [&](int64_t first, int64_t stop) {
      for (int64_t i = first * width; i < stop * width; i += kLanes) {
        const int64_t count = stop * width - i;
        const Floats more = rounded_to<E>(load_some(delta + i, count) * Floats(op.eps));
        store_some(x + i, load_some(x + i, count) + more, count);
      }
    });
    return op.summed ? Ranks{*call.ranks}.sum(x, rows * width, call.threads, false) : 0;
  }

  // The distance from one head to the next.
  static int64_t stride(const Operation& op) { return op.stride ? op.stride : op.dim; }

  // The sigmoid or GELU is rounded before the product, as in PyTorch.
  void gate(const Operation& op) const {
    const int64_t row = call.widths[op.source], gates_row = call.widths[op.beside], apart = stride(op);
    const auto of_gate = [&](const Floats& gate) {
      if (op.activation == kGeluTanh) return rounded_to<E>(gated<GeluTanh, !kBf16>(gate, Floats(1.0f)));
      return op.wide ? gate : rounded_to<E>(sigmoid(gate));
    };
    parallel_ranges(rows, op.heads * op.dim, call.threads, [&](int64_t first, int64_t stop) {
      for (int64_t r = first; r < stop; ++r) {
        for (int64_t h = 0; h < op.heads; ++h) {
          E* x = buffer(op.source) + r * row + h * op.dim;
          const E* gates = buffer(op.beside) + r * gates_row + op.at + h * apart;
          const bool one = op.columns == 1;
          const Floats of_all = one ? of_gate(Floats(number_at(gates))) : zeros();
          for (int64_t d = 0; d < op.dim; d += kLanes) {
            const int64_t count = op.dim - d;
            const Floats by = one ? of_all : of_gate(load_some(gates + d, count));
            store_some(x + d, load_some(x + d, count) * by, count);
          }
        }
      }
    });
  }

  void norm_heads(const Operation& op) const {
    const auto *weight = static_cast<const float*>(op.weight), *bias = static_cast<const float*>(op.bias);
    pick_of<E>(prefold_norm_heads_float32, prefold_norm_heads_bfloat16)(buffer(op.source) + op.at, weight, bias, rows,
                                                                        op.heads, op.dim, call.widths[op.source],
                                                                        stride(op), op.columns, op.eps, call.threads);
  }

  void xielu(const Operation& op) const {
    const Xielu function = *static_cast<const Xielu*>(op.weight);
    const int64_t width = call.widths[op.source];
    E* x = buffer(op.source);
    parallel_ranges(rows, width, call.threads, [&](int64_t first, int64_t stop) {
      for (int64_t i = first * width; i < stop * width; i += kLanes) {
        const int64_t count = stop * width - i;
        store_some(x + i, function.of(load_some(x + i, count)), count);
      }
    });
  }

  void scale(const Operation& op) const {
    const int64_t width = call.widths[op.source];
    const E* x = buffer(op.source);
    E* out = buffer(op.out);
    const auto* weight = static_cast<const float*>(op.weight);
    parallel_ranges(rows, width, call.threads, [&](int64_t first, int64_t stop) {
      for (int64_t r = first * width; r < stop * width; r += width) {
        for (int64_t d = 0; d < width; d += kLanes) {
          Floats factor(op.eps);
          if (weight) factor *= load_some(weight + d, width - d);
          store_some(out + r + d, load_some(x + r + d, width - d) * factor, width - d);
        }
      }
    });
  }

  void mix(const Operation& op) const {
    const int64_t count = op.heads, others = op.kv_heads, gates = op.columns;
    const auto* weight = static_cast<const float*>(op.weight);
    E* at[2 * kMostMixed];
    for (int64_t i = 0; i < count + others; ++i)
      at[i] = buffer(static_cast<int32_t>(static_cast<const int64_t*>(op.bias)[i]));
    const int64_t width = call.widths[static_cast<const int64_t*>(op.bias)[0]], by_row = call.widths[op.beside];
    const E* by = buffer(op.beside);
    parallel_ranges(rows, (count + others) * width, call.threads, [&](int64_t first, int64_t stop) {
      for (int64_t r = first; r < stop; ++r) {
        float turned[kMostMixed], shares[kMostMixed * kMostMixed];
        for (int64_t g = 0; g < gates; ++g) turned[g] = std::tanh(number_at(by + r * by_row + g));
        for (int64_t i = 0; i < count * others; ++i) {
          float sum = 0;
          for (int64_t g = 0; g < gates; ++g) sum += weight[i * gates + g] * turned[g];
          shares[i] = op.eps + sum;
        }
        for (int64_t d = 0; d < width; d += kLanes) {
          Floats parts[kMostMixed];
          for (int64_t j = 0; j < others; ++j) parts[j] = load_some(at[count + j] + r * width + d, width - d);
          for (int64_t i = 0; i < count; ++i) {
            E* to = at[i] + r * width + d;
            Floats sum = zeros();
            for (int64_t j = 0; j < others; ++j) sum += Floats(shares[i * others + j]) * parts[j];
            store_some(to, load_some(to, width - d) + sum, width - d);
          }
        }
      }
    });
  }

  // The mean square of a row.
  static float mean_square(const E* x, int64_t width) {
    Floats sums = zeros();
    for (int64_t d = 0; d < width; d += kLanes) {
      const Floats some = load_some(x + d, width - d);
      sums += some * some;
    }
    return sum_of(sums) / static_cast<float>(width);
  }

  void match(const Operation& op) const {
    const int64_t width = call.widths[op.source];
    parallel_ranges(rows, 2 * width, call.threads, [&](int64_t first, int64_t stop) {
      for (int64_t r = first * width; r < stop * width; r += width) {
        E* x = buffer(op.source) + r;
        const float own = mean_square(x, width), wanted = mean_square(buffer(op.beside) + r, width);
        const Floats factor(std::sqrt(wanted) / std::sqrt(own < op.eps ? op.eps : own));  // NaN stays NaN
        for (int64_t d = 0; d < width; d += kLanes) store_some(x + d, load_some(x + d, width - d) * factor, width - d);
      }
    });
  }

  // The numbers after a row's `columns` results become zeros.
  void sparse_gate(const Operation& op) const {
    const int64_t width = op.columns, row = call.widths[op.source], out_row = call.widths[op.out];
    parallel_ranges(rows, 4 * width, call.threads, [&](int64_t first, int64_t stop) {
      for (int64_t r = first; r < stop; ++r) {
        const E *gates = buffer(op.source) + r * row, *up = gates + width;
        E* out = buffer(op.out) + r * out_row;
        Floats sums = zeros(), squares = zeros();
        for (int64_t d = 0; d < width; d += kLanes) sums += load_some(gates + d, width - d);
        const float mean = sum_of(sums) / static_cast<float>(width);
        for (int64_t d = 0; d < width; d += kLanes) {
          const uint32_t here = width - d < kLanes ? (1u << (width - d)) - 1 : (1u << kLanes) - 1;
          const Floats apart = prefold::choose(here, load_some(gates + d, width - d) - Floats(mean), zeros());
          squares += apart * apart;
        }
        const Floats cut(mean + op.eps * std::sqrt(sum_of(squares) / static_cast<float>(width)));
        for (int64_t d = 0; d < width; d += kLanes) {
          const Floats gate = larger(Floats(0.0f), load_some(gates + d, width - d) - cut);
          store_some(out + d, activated<!kBf16>(op.activation, gate) * load_some(up + d, width - d), width - d);
        }
        std::memset(static_cast<void*>(out + width), 0, (out_row - width) * sizeof(E));
      }
    });
  }

  // NaN stays NaN.
  void clamp(const Operation& op) const {
    const auto* limits = static_cast<const float*>(op.weight);
    const Floats low(limits[0]), less(-limits[1]);
    const int64_t width = op.columns;
    parallel_ranges(rows, width, call.threads, [&](int64_t first, int64_t stop) {
      for (int64_t r = first; r < stop; ++r) {
        const E* from = buffer(op.source) + r * call.widths[op.source];
        E* to = buffer(op.out) + r * call.widths[op.out] + op.at;
        for (int64_t d = 0; d < width; d += kLanes) {
          const Floats x = larger(low, load_some(from + d, width - d));
          store_some(to + d, Floats(0.0f) - larger(less, Floats(0.0f) - x), width - d);
        }
      }
    });
  }

  void scale_by_position(const Operation& op) const {
    const int64_t row = call.widths[op.source];
    parallel_ranges(rows, op.heads * op.dim, call.threads, [&](int64_t first, int64_t stop) {
      for (int64_t r = first; r < stop; ++r) {
        const int64_t position = call.positions[all ? r : call.read[r]];
        if (position < op.positions) continue;  // the factor is 1
        const Floats factor(1 + op.eps * std::log(static_cast<float>(1 + position / op.positions)));
        for (int64_t h = 0; h < op.heads; ++h) {
          E* x = buffer(op.source) + r * row + op.at + h * stride(op);
          for (int64_t d = 0; d < op.dim; d += kLanes)
            store_some(x + d, load_some(x + d, op.dim - d) * factor, op.dim - d);
        }
      }
    });
  }

  void scale_heads(const Operation& op) const {
    const int64_t row = call.widths[op.source];
    const auto* weight = static_cast<const float*>(op.weight);
    parallel_ranges(rows, op.heads * op.dim, call.threads, [&](int64_t first, int64_t stop) {
      for (int64_t r = first; r < stop; ++r) {
        for (int64_t h = 0; h < op.heads; ++h) {
          E* x = buffer(op.source) + r * row + op.at + h * stride(op);
          const float* by = weight + h * op.dim;
          for (int64_t d = 0; d < op.dim; d += kLanes) {
            const int64_t count = op.dim - d;
            store_some(x + d, load_some(x + d, count) * load_some(by + d, count), count);
          }
        }
      }
    });
  }

  void activate_gated(const Operation& op) const {
    const int64_t row = call.widths[op.source], out_row = call.widths[op.out];
    parallel_ranges(rows, 2 * op.columns, call.threads, [&](int64_t first, int64_t stop) {
      for (int64_t r = first; r < stop; ++r) {
        const E *gate = buffer(op.source) + r * row, *up = gate + op.columns;
        E* out = buffer(op.out) + r * out_row;
        for (int64_t d = 0; d < op.columns; d += kLanes) {
          const int64_t count = op.columns - d;
          store_some(out + d, activated<true>(op.activation, load_some(gate + d, count)) * load_some(up + d, count),
                     count);
        }
      }
    });
  }

  void interpolate(const Operation& op) const {
    const int64_t width = call.widths[op.source];
    const auto* rates = static_cast<const float*>(op.weight);
    parallel_ranges(rows, width, call.threads, [&](int64_t first, int64_t stop) {
      for (int64_t r = first; r < stop; ++r) {
        E* x = buffer(op.source) + r * width;
        const E* y = buffer(op.beside) + r * width;
        for (int64_t d = 0; d < width; d += kLanes) {
          const int64_t count = width - d;
          const Floats from = load_some(x + d, count), way = load_some(y + d, count) - from;
          store_some(x + d, fused(load_some(rates + d, count), way, from), count);
        }
      }
    });
  }

  int32_t experts(const Operation& op) const {
    auto experts = *static_cast<const ExpertsCall*>(op.call);
    static thread_local Workspace workspace;
    auto* logits = static_cast<float*>(workspace.reserve(rows * experts.experts * sizeof(float)));
    const int64_t k = call.widths[op.source], router_k = call.widths[op.beside];
    if (const int32_t failed = pick_of<E>(prefold_linear_float32, prefold_linear_bfloat16_float32)(
            buffer(op.beside), router_k, static_cast<const uint32_t*>(op.weight), op.blocks,
            static_cast<const E*>(op.bias), logits, rows, experts.experts, router_k, call.threads, nullptr)) {
      return failed;
    }
    experts.x = buffer(op.source), experts.x_row = experts.hidden = k, experts.logits = logits;
    experts.out = buffer(op.out), experts.rows = rows, experts.threads = call.threads;
    auto* function = pick_of<E>(prefold_experts_silu_float32, prefold_experts_silu_bfloat16);
    if (op.activation == kGeluTanh) {
      function = pick_of<E>(prefold_experts_gelu_tanh_float32, prefold_experts_gelu_tanh_bfloat16);
    } else if (op.activation == kClamped) {
      function = pick_of<E>(prefold_experts_clamped_float32, prefold_experts_clamped_bfloat16);
    } else if (op.activation == kRelu2) {
      function = pick_of<E>(prefold_experts_relu2_float32, prefold_experts_relu2_bfloat16);
    }
    const int32_t failed = function(&experts);
    if (failed || !op.summed) return failed;
    return Ranks{*call.ranks}.sum(buffer(op.out), rows * k, call.threads, false);
  }

  // Set the fields that all mixers have. Mixers read all rows; with sharing "mlp", these are the rows of the stream.
  template <class Call>
  void set_mixer(const Operation& op, Call& mixer) const {
    const StateStep& step = *call.state_step;
    ConvCall& conv = mixer.conv;
    const PlaceLists& places = step.places[conv.kept];
    conv.x = buffer(op.source), conv.x_row = call.widths[op.source];
    conv.row_of = call.scatter, conv.rows = call.scatter ? call.unfolded : call.rows;
    conv.states = call.states[op.plane].columns, conv.first_row = step.runs.num_states * conv.kept;
    conv.above = places.above, conv.below = places.below, conv.to = step.to, conv.num_ends = step.num_ends;
    const bool reads = (op.beside || !all) && call.picked < call.rows;
    mixer.out = buffer(op.out), mixer.threads = call.threads, mixer.picked = reads ? call.picked : call.rows;
    mixer.pick = call.scatter ? call.gather : nullptr;
    if (!reads) return;
    mixer.pick = call.read;
    if (!call.scatter) return;
    static thread_local Workspace workspace;
    auto* rows_of_stream = static_cast<int64_t*>(workspace.reserve(call.picked * sizeof(int64_t)));
    for (int64_t r = 0; r < call.picked; ++r) rows_of_stream[r] = call.gather[call.read[r]];
    mixer.pick = rows_of_stream;
  }

  void short_conv(const Operation& op) const {
    auto mixer = *static_cast<const ShortConvCall*>(op.call);
    set_mixer(op, mixer);
    pick_of<E>(prefold_short_conv_float32, prefold_short_conv_bfloat16)(&mixer);
  }

  template <class Call>
  int32_t scan(const Operation& op, int32_t (*function)(const Call*)) const {
    auto mixer = *static_cast<const Call*>(op.call);
    set_mixer(op, mixer);
    mixer.runs = call.state_step->runs;
    static thread_local Workspace workspace;
    const int64_t state = mixer.heads * mixer.key_dim * mixer.value_dim;
    mixer.states = call.states[op.plane].states;
    mixer.between = static_cast<float*>(workspace.reserve(mixer.runs.num_between * state * sizeof(float)));
    return function(&mixer);
  }

  int32_t choose(const Operation& op) const {
    return pick_of<E>(prefold_greedy_float32, prefold_greedy_bfloat16)(
        buffer(op.source), static_cast<const uint32_t*>(op.weight), op.blocks, call.ids, rows, op.columns,
        call.widths[op.source], call.none, call.threads, op.at, call.ranks);
  }

  void rope(const Operation& op) const {
    if constexpr (kBf16) {
      if (op.wide) return turn_heads<float>(op, prefold_rope_bfloat16_float32, prefold_add_rms_norm_bfloat16_float32);
    }
    turn_heads<E>(op, pick_of<E>(prefold_rope_float32, prefold_rope_bfloat16),
                  pick_of<E>(prefold_add_rms_norm_float32, prefold_add_rms_norm_bfloat16));
  }

  template <class W>
  void turn_heads(const Operation& op, Rope<E, W>* rope, AddRmsNorm<E, W>* norm) const {
    const int64_t width = call.widths[op.source], turned = op.plane < 0 ? 0 : call.dims[op.plane];
    const float* table = turned ? angles_of(op.plane) : nullptr;
    const auto* weight = static_cast<const W*>(op.weight);
    E* x = buffer(op.source) + op.at;
    if (turned == op.dim || (turned && !weight)) {
      return rope(x, table, weight, rows, op.heads, turned, width, stride(op), op.eps, call.threads);
    }
    if (!weight) return;
    // The kernel norms only the numbers that it rotates. So the norm of whole heads is a call of its own.
    parallel_ranges(rows, op.heads * op.dim, call.threads, [&](int64_t first, int64_t stop) {
      for (int64_t r = first; r < stop; ++r) {
        E* row = x + r * width;
        norm(row, nullptr, weight, row, op.heads, op.dim, stride(op), 0, stride(op), op.eps, 1);
        if (turned) rope(row, table + r * turned, nullptr, 1, op.heads, turned, width, stride(op), op.eps, 1);
      }
    });
  }

  TileCall tiles(const Operation& op) const { return tiles(op, (all ? call.plans : call.read_plans)[op.window], rows); }

  // lists: of `queries` queries.
  TileCall tiles(const Operation& op, const TileCall& lists, int64_t queries) const {
    TileCall tiles = lists;
    tiles.q = buffer(op.source) + op.at;
    tiles.out = buffer(op.out);
    tiles.q_row = call.widths[op.source];
    tiles.q_head = stride(op);
    tiles.queries = queries;
    tiles.heads = op.heads;
    tiles.kv_heads = op.kv_heads;
    tiles.dim = op.dim;
    tiles.value_dim = op.columns;
    tiles.scale = call.scale;
    tiles.cap = call.cap;
    tiles.sinks = static_cast<const float*>(op.weight);
    tiles.threads = call.threads;
    return tiles;
  }

  // The keys and values of the new rows. A plane may store values as the first numbers of the keys.
  struct NewRows {
    const E *keys, *values;
    int64_t row, key_size, value_size;
  };

  NewRows new_rows(const Operation& op) const {
    const int64_t size = op.kv_heads * op.dim;
    const E* keys = buffer(op.beside) + op.keys;
    return {keys, keys + size, call.widths[op.beside], size, op.kv_heads * op.columns};
  }

  int32_t attend(const Operation& op) const {
    const NewRows fresh = new_rows(op);
    const bool is_own = !op.wide;
    if (call.slots) {
      const SlotPlane& plane = call.planes[op.plane];
      const WriteCall write{plane,  call.slots, fresh.keys, fresh.values, fresh.row,
                            op.dim, fresh.row,  op.columns, call.rows,    call.threads};
      if (is_own) {
        if (const int32_t failed = prefold_write_slots(&write, kBf16)) return failed;
      }
      const SlotCall over{tiles(op), plane};
      return prefold_slot_attention(&over, kBf16);
    }
    const PathPlane& path = call.paths[op.plane];
    RowCall over{tiles(op), fresh.keys,       fresh.values, path.keys,  path.values,
                 fresh.row, op.dim,           fresh.row,    op.columns, fresh.key_size,
                 op.dim,    fresh.value_size, op.columns,   call.rows,  call.path};
    over.tail_dim = 0;
    if (call.scatter) unfold(over);
    if (const int32_t failed = prefold_row_attention(&over, kBf16)) return failed;
    if (call.scatter) fold(static_cast<const E*>(over.tiles.out), buffer(op.out), op.heads * op.columns);
    if (is_own) {
      carry(path.next_keys, path.keys, static_cast<const E*>(over.k), fresh.key_size, over.k_row);
      carry(path.next_values, path.values, static_cast<const E*>(over.v), fresh.value_size, over.v_row);
    }
    return 0;
  }

  int32_t attend_latent(const Operation& op) const {
    const LatentAttention<E> latent(call, op);
    const int64_t width = latent.width(), q_row = call.widths[op.source], latent_row = call.widths[op.beside];
    const E *q = buffer(op.source), *fresh = buffer(op.beside);
    if (call.slots) {
      const SlotPlane& plane = call.planes[op.plane];
      const WriteCall write{plane, call.slots, fresh, fresh,     latent_row,
                            width, latent_row, width, call.rows, call.threads};
      if (const int32_t failed = prefold_write_slots(&write, kBf16)) return failed;
      const LatentSplit* splits = all ? call.splits : call.read_splits;
      if (splits && splits[op.window].num_expanded) return attend_split(op, latent, splits[op.window], plane);
      return latent.over_slots(tiles(op), plane, q, q_row, buffer(op.out));
    }
    const PathPlane& path = call.paths[op.plane];
    const auto* before = reinterpret_cast<const E*>(path.keys);
    if (!call.scatter) {
      if (const int32_t failed =
              latent.over_rows(tiles(op), before, call.path, fresh, latent_row, call.rows, q, q_row, buffer(op.out)))
        return failed;
      carry(path.next_keys, path.keys, fresh, width, latent_row);
      return 0;
    }
    const int64_t queries = all ? call.unfolded : rows, q_width = q_row;
    E *unfolded_q = reinterpret_cast<E*>(call.unfolded_room), *latents = unfolded_q + call.unfolded * q_width;
    E* attended = latents + call.unfolded * width;
    copy_rows(q, q_row, all ? call.scatter : call.read_order, unfolded_q, nullptr, queries, q_width);
    copy_rows(fresh, latent_row, call.scatter, latents, nullptr, call.unfolded, width);
    TileCall over = tiles(op);
    over.queries = queries;
    if (const int32_t failed =
            latent.over_rows(over, before, call.path, latents, width, call.unfolded, unfolded_q, q_width, attended))
      return failed;
    fold(attended, buffer(op.out), call.widths[op.out]);
    carry(path.next_keys, path.keys, latents, width, width);
    return 0;
  }

  // Attend over slots with absorbed and expanded queries. A group that does not have all rows is copied to attend.
  int32_t attend_split(const Operation& op, const LatentAttention<E>& latent, const LatentSplit& split,
                       const SlotPlane& plane) const {
    static thread_local Workspace workspace;
    const int64_t q_row = call.widths[op.source], out_row = call.widths[op.out], width = latent.width();
    const int64_t copied = split.num_absorbed ? std::max(split.num_absorbed, split.num_expanded) : 0;
    const int64_t numbers = split.keys * width + copied * (q_row + out_row);
    auto* latents = static_cast<E*>(workspace.reserve(numbers * sizeof(E)));
    E *some = latents + split.keys * width, *attended = some + copied * q_row;
    const auto run = [&](const int64_t* queries, int64_t count, auto&& attend) -> int32_t {
      if (!copied) return attend(buffer(op.source), buffer(op.out));
      copy_rows(buffer(op.source), q_row, queries, some, nullptr, count, q_row);
      if (const int32_t failed = attend(some, attended)) return failed;
      copy_rows(attended, out_row, nullptr, buffer(op.out), queries, count, out_row);
      return 0;
    };
    if (split.num_absorbed) {
      const int32_t failed = run(split.absorbed, split.num_absorbed, [&](const E* q, E* out) {
        const TileCall& lists = (all ? call.plans : call.read_plans)[op.window];
        return latent.over_slots(tiles(op, lists, split.num_absorbed), plane, q, q_row, out);
      });
      if (failed) return failed;
    }
    prefold_read_keys(&plane, split.slots, split.keys, latents, call.threads, kBf16);
    return run(split.expanded, split.num_expanded, [&](const E* q, E* out) {
      const TileCall over = tiles(op, split.tiles, split.num_expanded);
      return latent.over_rows(over, latents, 0, latents, width, split.keys, q, q_row, out);
    });
  }

  // Copy `count` rows of `parts * width` numbers. Row i comes from row from[i] of `source` (null: row i), and goes to
  // row to[i] of `out` (null: row i). The parts of a source row are `apart` from each other.
  void copy_rows(const E* source, int64_t row, const int64_t* from, E* out, const int64_t* to, int64_t count,
                 int64_t width, int64_t parts = 1, int64_t apart = 0) const {
    parallel_ranges(count, parts * width, call.threads, [&](int64_t first, int64_t stop) {
      for (int64_t i = first; i < stop; ++i) {
        E* at = out + (to ? to[i] : i) * parts * width;
        const E* of_row = source + (from ? from[i] : i) * row;
        for (int64_t p = 0; p < parts; ++p) std::memcpy(at + p * width, of_row + p * apart, width * sizeof(E));
      }
    });
  }

  // Change a call so that it attends over all rows of the stream.
  void unfold(RowCall& over) const {
    TileCall& tiles = over.tiles;
    const int64_t queries = tiles.heads * tiles.dim, keys = tiles.kv_heads * tiles.dim;
    const int64_t values = tiles.kv_heads * tiles.value_dim;
    E *q = reinterpret_cast<E*>(call.unfolded_room), *k = q + call.unfolded * queries, *v = k + call.unfolded * keys;
    tiles.queries = all ? call.unfolded : rows;
    copy_rows(static_cast<const E*>(tiles.q), tiles.q_row, all ? call.scatter : call.read_order, q, nullptr,
              tiles.queries, tiles.dim, tiles.heads, tiles.q_head);
    copy_rows(static_cast<const E*>(over.k), over.k_row, call.scatter, k, nullptr, call.unfolded, keys);
    copy_rows(static_cast<const E*>(over.v), over.v_row, call.scatter, v, nullptr, call.unfolded, values);
    tiles.q = q, tiles.q_row = queries, tiles.q_head = tiles.dim, tiles.out = v + call.unfolded * values;
    over.k = k, over.v = v, over.k_row = keys, over.v_row = values, over.rows = call.unfolded;
  }

  // Copy the results of attention from the rows of the stream to the rows of the step.
  void fold(const E* attended, E* out, int64_t width) const {
    copy_rows(attended, width, all ? call.gather : nullptr, out, all ? nullptr : call.read_order, rows, width);
  }

  // Copy the path rows and the new rows that form the path of the next step.
  void carry(char* to, const char* path, const E* fresh, int64_t size, int64_t width) const {
    const int64_t bytes = size * sizeof(E);
    for (int64_t i = 0; i < call.kept_path; ++i, to += bytes) std::memcpy(to, path + call.keep_path[i] * bytes, bytes);
    for (int64_t i = 0; i < call.kept_new; ++i, to += bytes) std::memcpy(to, fresh + call.keep_new[i] * width, bytes);
  }

  // Move the rows that are read to the front of a buffer. Ascending order, so that no row is overwritten before it is
  // moved.
  void pick(const Operation& op) const {
    const int64_t width = call.widths[op.source];
    E* x = buffer(op.source);
    for (int64_t r = 0; r < call.picked; ++r) {
      if (call.read[r] != r) std::memcpy(x + r * width, x + call.read[r] * width, width * sizeof(E));
    }
  }

  int32_t run() {
    turn();
    for (int64_t i = 0; i < call.count; ++i) {
      const Operation& op = call.operations[i];
      int32_t failed = 0;
      switch (op.kind) {
        case kNorm:
          if (op.summed) failed = split_norm(op);
          else norm(op);
          break;
        case kAdd: failed = add(op); break;
        case kGate: gate(op); break;
        case kExperts: failed = experts(op); break;
        case kShortConv: short_conv(op); break;
        case kGatedDelta: failed = scan(op, pick_of<E>(prefold_delta_net_float32, prefold_delta_net_bfloat16)); break;
        case kNormHeads: norm_heads(op); break;
        case kXielu: xielu(op); break;
        case kByPosition: scale_by_position(op); break;
        case kScaleRows: scale(op); break;
        case kScaleHeads: scale_heads(op); break;
        case kActivateGated: activate_gated(op); break;
        case kInterpolate: interpolate(op); break;
        case kMix: mix(op); break;
        case kMatch: match(op); break;
        case kSparseGate: sparse_gate(op); break;
        case kClamp: clamp(op); break;
        case kMamba2: failed = scan(op, pick_of<E>(prefold_mamba2_float32, prefold_mamba2_bfloat16)); break;
        case kLinear:
        case kGated: failed = product(op); break;
        case kRope: rope(op); break;
        case kAttend: failed = attend(op); break;
        case kAttendLatent: failed = attend_latent(op); break;
        case kPick:
          if (call.picked == call.rows) break;
          pick(op);
          if (op.beside) {
            rows = call.picked, all = false;
            turn();
          }
          break;
        case kEmbed: failed = embed(op); break;
        case kHead:
          if (call.ids) failed = choose(op);
          break;
      }
      if (failed) return failed;
    }
    return 0;
  }
};

}  // namespace
extern "C" int32_t prefold_run_program(const ProgramCall* call) {
  if (call->rows == 0) return 0;
  try {
    if (call->is_bf16) return Pass<Bf16>{*call, call->rows, true}.run();
    return Pass<float>{*call, call->rows, true}.run();
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

extern "C" void prefold_follow_program(const ProgramCall* call, int32_t takes) {
  auto* tokens = const_cast<int64_t*>(call->tokens);
  auto *positions = const_cast<int64_t*>(call->positions), *slots = const_cast<int64_t*>(call->slots);
  auto* own = const_cast<OwnRun*>(call->plans[0].own);
  for (int64_t r = 0; r < call->rows; ++r) {
    ++positions[r], ++slots[r], ++own[call->plans[0].own_offsets[r + 1] - 1].count;
    if (takes) tokens[r] = call->ids[r];
  }
}

}  // namespace prefold
