// Layers with a state that each row changes: the gated short convolution, the gated delta net (Yang et al. 2024), and
// Mamba-2 (Dao and Gu 2024).
//
// The delta rule is computed row by row. The chunkwise form needs additional products, between the rows of a chunk. It
// pays off on hardware that cannot hold a state near its arithmetic units. Here, some columns of one head's state stay
// in the nearest cache during all rows of a run, and each number of them is read and written once per row. Mamba-2 is
// computed in the same way. A row's result has the same bits, no matter how its path is cut into runs. That is why
// `fused` is used.
#include <cmath>
#include <vector>

#include "activations.h"
#include "interface.h"
#include "pack.h"
#include "parallel.h"

namespace prefold {
namespace {

// Vectors of a state's columns that are processed together. For a long run, this part of the state should fit into the
// nearest cache (with AVX-512, four vectors are a sixth faster than two). For a short run, it should be one stream of
// memory.
constexpr int kLongVectors = kPartBytes == 64 ? 4 : 2, kShortVectors = 8;
constexpr int64_t kShortRun = 2;  // rows
// A task takes neighbouring runs until they have this many rows.
constexpr int64_t kTaskRows = 16;

// The address of a row that a convolution reads.
template <class E>
PREFOLD_INLINE const E* row_at(const ConvCall& call, int64_t row) {
  return static_cast<const E*>(call.x) + (call.row_of ? call.row_of[row] : row) * call.x_row;
}

// Convolve sixteen channels at one row. column(row, channel, count): the numbers to convolve.
template <class E, class Column>
PREFOLD_INLINE Floats convolved(const ConvCall& call, int64_t row, int64_t c, int64_t count, const Column& column) {
  const auto* states = static_cast<const E*>(call.states);
  Floats sum = column(row, c, count) * load_some(call.taps + call.kept * call.channels + c, count);
  if (call.bias) sum += load_some(call.bias + c, count);
  for (int64_t back = 0; back < call.kept; ++back) {
    const int64_t place = call.above[back * call.rows + row];
    const Floats x = place < call.first_row ? load_some(states + place * call.channels + c, count)
                                            : column(place - call.first_row, c, count);
    sum += x * load_some(call.taps + (call.kept - 1 - back) * call.channels + c, count);
  }
  return sum;
}

// Store the states at the ends of runs. If a state replaces the state that it was made from, its columns move to the
// places of older columns. They are copied oldest first, so each column is read before it is overwritten.
template <class E, class Column>
void store_ends(const ConvCall& call, int threads, const Column& column) {
  auto* states = static_cast<E*>(call.states);
  const int64_t channels = call.channels;
  parallel_ranges(call.num_ends, call.kept * channels, threads, [&](int64_t first, int64_t stop) {
    for (int64_t i = first * call.kept; i < stop * call.kept; ++i) {
      const int64_t place = call.below[i];
      E* to = states + (call.to[i / call.kept] * call.kept + i % call.kept) * channels;
      for (int64_t c = 0; c < channels; c += kLanes) {
        const int64_t count = std::min<int64_t>(kLanes, channels - c);
        const Floats x = place < call.first_row ? load_some(states + place * channels + c, count)
                                                : column(place - call.first_row, c, count);
        store_some(to + c, x, count);
      }
    }
  });
}

template <class E>
void short_conv(const ShortConvCall& call) {
  const ConvCall& conv = call.conv;
  const int64_t channels = conv.channels;
  const auto column = [&](int64_t row, int64_t c, int64_t count) __attribute__((always_inline)) {
    const E* x = row_at<E>(conv, row) + c;
    return rounded_to<E>(load_some(x, count) * load_some(x + 2 * channels, count));
  };
  parallel_ranges(call.picked, channels * (conv.kept + 1), call.threads, [&](int64_t first, int64_t stop) {
    for (int64_t i = first; i < stop; ++i) {
      const int64_t row = call.pick ? call.pick[i] : i;
      E* out = static_cast<E*>(call.out) + i * channels;
      for (int64_t c = 0; c < channels; c += kLanes) {
        const int64_t count = std::min<int64_t>(kLanes, channels - c);
        const Floats gate = load_some(row_at<E>(conv, row) + channels + c, count);
        store_some(out + c, gate * convolved<E>(conv, row, c, count, column), count);
      }
    }
  });
  store_ends<E>(conv, call.threads, column);
}

// The common part of layers with a state that changes with each row. `rows_` has float32 numbers for each row, first
// the results of the convolution. Derived defines:
//   prepare(x, to): computes the other numbers of a row;
//   run_columns<V>(run, head, column, part): runs V vectors of one head's columns through a run;
//   finish(x, of_row, out): computes the result of a row;
//   kLong, kShort: V for long and for short runs.
template <class Derived, class E, class Call>
class Scan {
 public:
  explicit Scan(const Call& call, int64_t channels, int64_t numbers)
      : call_(call), channels_(channels), row_((channels + numbers + kLanes - 1) / kLanes * kLanes) {}

 protected:
  // Process the rows of all runs, in parallel: the convolution and Derived::prepare, the states to store, the runs, and
  // Derived::finish for the rows that are picked. column(row, channel, count): the numbers to convolve.
  template <class Column>
  void run_with(const Column& column) {
    static thread_local Workspace workspace;
    rows_ = static_cast<float*>(workspace.reserve((call_.conv.rows * row_ + kLanes) * sizeof(float)));
    auto& derived = static_cast<Derived&>(*this);
    parallel_ranges(call_.conv.rows, 4 * channels_, call_.threads, [&](int64_t first, int64_t stop) {
      for (int64_t row = first; row < stop; ++row) {
        float* to = rows_ + row * row_;
        for (int64_t c = 0; c < channels_; c += kLanes) {
          const int64_t count = std::min<int64_t>(kLanes, channels_ - c);
          const Floats x = convolved<E>(call_.conv, row, c, count, column);
          store_some(to + c, gated<Silu, true>(x, Floats(1.0f)), count);
        }
        derived.prepare(row_at<E>(call_.conv, row), to);
      }
    });
    store_ends<E>(call_.conv, call_.threads, column);
    const RunLists& runs = call_.runs;
    for (int64_t wave = 0; wave < runs.num_waves; ++wave) run_wave(runs.waves[wave], runs.waves[wave + 1]);
    const int64_t values = call_.heads * call_.value_dim;
    parallel_ranges(call_.picked, 4 * values, call_.threads, [&](int64_t first, int64_t stop) {
      for (int64_t i = first; i < stop; ++i) {
        const int64_t row = call_.pick ? call_.pick[i] : i;
        derived.finish(row_at<E>(call_.conv, row), rows_ + row * row_, static_cast<E*>(call_.out) + i * values);
      }
    });
  }

  // One row of a state after a row of the run.
  static PREFOLD_INLINE Floats moved(const Floats& decay, const Floats& s, const Floats& added, float by) {
    return fused(added, Floats(by), decay * s);
  }

  static float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

  // Process runs that do not depend on each other. Runs that start from the same state follow each other on one thread,
  // so that a head's part of the state is read from memory once.
  void run_wave(int64_t first, int64_t stop) {
    struct Piece {
      int64_t first, stop;
      bool is_short;
    };
    std::vector<Piece> pieces;
    for (int64_t run = first; run < stop;) {
      const bool is_short = rows_in(run) <= kShortRun;
      int64_t rows = 0, last = run;
      while (last < stop && (rows_in(last) <= kShortRun) == is_short && rows < kTaskRows) rows += rows_in(last++);
      pieces.push_back({run, last, is_short});
      run = last;
    }
    const int64_t heads = call_.heads;
    parallel_tasks(static_cast<int64_t>(pieces.size()) * heads, call_.threads, [&](int64_t task) {
      const Piece& piece = pieces[task / heads];
      if (piece.is_short) {
        run_head<Derived::kShort>(piece.first, piece.stop, task % heads);
      } else {
        run_head<Derived::kLong>(piece.first, piece.stop, task % heads);
      }
    });
  }

  int64_t rows_in(int64_t run) const { return call_.runs.stop[run] - call_.runs.first[run]; }

  template <int V>
  void run_head(int64_t first, int64_t stop, int64_t head) {
    static thread_local Workspace workspace;
    auto* part = static_cast<float*>(workspace.reserve(call_.key_dim * V * kLanes * sizeof(float)));
    for (int64_t column = 0; column < call_.value_dim; column += V * kLanes) {
      for (int64_t run = first; run < stop; ++run) {
        static_cast<Derived&>(*this).template run_columns<V>(run, head, column, part);
      }
    }
  }

  float* state(int64_t number, int64_t head) const {
    const int64_t size = call_.key_dim * call_.value_dim, at = size * head, all = size * call_.heads;
    return at + (number < call_.runs.num_states ? call_.states + number * all
                                                : call_.between + (number - call_.runs.num_states) * all);
  }

  const Call& call_;
  int64_t channels_, row_;
  float* rows_ = nullptr;
};

template <class E>
class DeltaNet : public Scan<DeltaNet<E>, E, DeltaCall> {
  using Base = Scan<DeltaNet<E>, E, DeltaCall>;
  friend Base;
  using Base::call_, Base::channels_, Base::row_, Base::rows_, Base::state, Base::moved;
  static constexpr int kLong = kLongVectors, kShort = kShortVectors;

 public:
  explicit DeltaNet(const DeltaCall& call)
      : Base(call, 2 * call.key_heads * call.key_dim + call.heads * call.value_dim, 2 * call.heads + call.key_heads),
        keys_(call.key_heads * call.key_dim) {}

  void run() {
    this->run_with([&](int64_t row, int64_t c, int64_t count)
                       __attribute__((always_inline)) { return load_some(row_at<E>(call_.conv, row) + c, count); });
  }

 private:
  // Compute a row's q and k with unit length, then the decays, beta, and the products of q and k.
  void prepare(const E* x, float* to) {
    const int64_t dim = call_.key_dim;
    float *decays = to + channels_, *betas = decays + call_.heads, *products = betas + call_.heads;
    for (int64_t h = 0; h < call_.key_heads; ++h) {
      float *q = to + h * dim, *k = q + keys_;
      const float root = 1.0f / std::sqrt(static_cast<float>(dim));
      scale(q, root / std::sqrt(product(q, q) + 1e-6f));
      scale(k, 1.0f / std::sqrt(product(k, k) + 1e-6f));
      products[h] = product(q, k);
    }
    const E *b = x + channels_ + call_.heads * call_.value_dim, *a = b + call_.heads;
    for (int64_t h = 0; h < call_.heads; ++h) {
      decays[h] = std::exp(call_.rates[h] * this->softplus(number_at(a + h) + call_.dt_bias[h]));
      betas[h] = call_.beta_scale / (1.0f + std::exp(-number_at(b + h)));
    }
  }

  float product(const float* x, const float* y) const {
    Floats sum = zeros();
    for (int64_t i = 0; i < call_.key_dim; i += kLanes) {
      sum += load_some(x + i, call_.key_dim - i) * load_some(y + i, call_.key_dim - i);
    }
    return sum_of(sum);
  }

  void scale(float* x, float by) const {
    for (int64_t i = 0; i < call_.key_dim; i += kLanes) {
      store_some(x + i, load_some(x + i, call_.key_dim - i) * Floats(by), call_.key_dim - i);
    }
  }

  // Run V vectors of one head's columns through a run. The sum of row t is added to the state in the pass in which row
  // t + 1 reads the state:
  //   S = decay S + k d^T                            (of row t)
  //   d = beta (v - decay k^T S)                     (of row t + 1)
  //   o = decay q^T S + (q k) d                      (of row t + 1)
  template <int V>
  void run_columns(int64_t run, int64_t head, int64_t column, float* part) {
    const int64_t dim = call_.key_dim, wide = call_.value_dim;
    const int64_t key_head = call_.tiled ? head % call_.key_heads : head * call_.key_heads / call_.heads;
    const int64_t first = call_.runs.first[run], stop = call_.runs.stop[run], left = wide - column;
    const bool whole = left >= V * kLanes;
    const auto sums_of = [&](int64_t i, const float* q, const float* k, const Floats* s, Floats* by_k, Floats* by_q)
                             __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        by_k[v] = fused(s[v], Floats(k[i]), by_k[v]);
        by_q[v] = fused(s[v], Floats(q[i]), by_q[v]);
      }
    };
    Floats added[V];
    Floats decay = zeros();
    const float* last_k = nullptr;
    for (int64_t row = first; row < stop; ++row) {
      float* of_row = rows_ + row * row_;
      const float *q = of_row + key_head * dim, *k = q + keys_;
      Floats by_k[V], by_q[V], s[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) by_k[v] = by_q[v] = zeros();
      if (row == first) {
        const float* from = state(call_.runs.source[run], head) + column;
        for (int64_t i = 0; i < dim; ++i) {
#pragma GCC unroll 8
          for (int v = 0; v < V; ++v) {
            s[v] =
                whole ? load(from + i * wide + v * kLanes) : load_some(from + i * wide + v * kLanes, left - v * kLanes);
            store(part + (i * V + v) * kLanes, s[v]);
          }
          sums_of(i, q, k, s, by_k, by_q);
        }
      } else {
        for (int64_t i = 0; i < dim; ++i) {
#pragma GCC unroll 8
          for (int v = 0; v < V; ++v) {
            s[v] = moved(decay, load(part + (i * V + v) * kLanes), added[v], last_k[i]);
            store(part + (i * V + v) * kLanes, s[v]);
          }
          sums_of(i, q, k, s, by_k, by_q);
        }
      }
      const float* of_heads = of_row + channels_;
      const Floats beta(of_heads[call_.heads + head]), product(of_heads[2 * call_.heads + key_head]);
      decay = Floats(of_heads[head]), last_k = k;
      float* value = of_row + 2 * keys_ + head * wide + column;  // o overwrites v
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const int64_t count = left - v * kLanes;
        const Floats predicted = decay * by_k[v];
        added[v] = beta * fused(Floats(-1.0f), predicted, load_some(value + v * kLanes, count));  // v - predicted
        if (count > 0) store_some(value + v * kLanes, fused(product, added[v], decay * by_q[v]), count);
      }
    }
    if (call_.runs.to[run] < 0) return;
    float* to = state(call_.runs.to[run], head) + column;
    for (int64_t i = 0; i < dim; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const Floats s = moved(decay, load(part + (i * V + v) * kLanes), added[v], last_k[i]);
        if (whole) {
          store(to + i * wide + v * kLanes, s);
        } else if (left > v * kLanes) {
          store_some(to + i * wide + v * kLanes, s, left - v * kLanes);
        }
      }
    }
  }

  // Norm each head's o, and gate it with silu(z).
  void finish(const E* input, const float* of_row, E* out) {
    const int64_t dim = call_.value_dim;
    const float* o = of_row + 2 * keys_;
    const E* z = input + channels_;
    for (int64_t h = 0; h < call_.heads; ++h, o += dim, z += dim, out += dim) {
      Floats squares = zeros();
      for (int64_t d = 0; d < dim; d += kLanes) {
        const Floats x = load_some(o + d, dim - d);
        squares += x * x;
      }
      const Floats by(1.0f / std::sqrt(sum_of(squares) / static_cast<float>(dim) + call_.eps));
      for (int64_t d = 0; d < dim; d += kLanes) {
        const Floats normed = load_some(o + d, dim - d) * by * load_some(call_.norm + d, dim - d);
        store_some(out + d, gated<Silu, true>(load_some(z + d, dim - d), normed), dim - d);
      }
    }
  }

  int64_t keys_;
};

template <class E>
class Mamba2 : public Scan<Mamba2<E>, E, MambaCall> {
  using Base = Scan<Mamba2<E>, E, MambaCall>;
  friend Base;
  using Base::call_, Base::channels_, Base::row_, Base::rows_, Base::state, Base::moved;
  // A row of a state usually has 64 numbers.
  static constexpr int kLong = kLongVectors, kShort = 4;

 public:
  explicit Mamba2(const MambaCall& call)
      : Base(call, call.heads * call.value_dim + 2 * call.groups * call.key_dim, 2 * call.heads),
        values_(call.heads * call.value_dim) {}

  void run() {
    this->run_with([&](int64_t row, int64_t c, int64_t count) __attribute__((always_inline)) {
      return load_some(row_at<E>(call_.conv, row) + values_ + c, count);
    });
  }

 private:
  // Compute a row's time steps and decays.
  void prepare(const E* x, float* to) {
    const E* dt = x + values_ + channels_;
    float *decays = to + channels_, *steps = decays + call_.heads;
    for (int64_t h = 0; h < call_.heads; ++h) {
      const float t = this->softplus(number_at(dt + h) * call_.step_scale + call_.dt_bias[h]);
      steps[h] = t < call_.least ? call_.least : t > call_.most ? call_.most : t;  // NaN stays NaN
      decays[h] = std::exp(call_.rates[h] * steps[h]);
    }
  }

  // Run V vectors of one head's columns through a run:
  //   S = decay S + b (t x)^T; y = c^T S + skip x.
  // The first row reads the state at its source. The last row writes it to its destination.
  template <int V>
  void run_columns(int64_t run, int64_t head, int64_t column, float* part) {
    const int64_t dim = call_.key_dim, wide = call_.value_dim, group = head * call_.groups / call_.heads;
    const int64_t first = call_.runs.first[run], stop = call_.runs.stop[run], left = wide - column;
    const bool whole = left >= V * kLanes;
    const float* start = state(call_.runs.source[run], head) + column;
    float* end = call_.runs.to[run] < 0 ? nullptr : state(call_.runs.to[run], head) + column;
    const Floats skip(call_.skips[head]);
    for (int64_t row = first; row < stop; ++row) {
      float* of_row = rows_ + row * row_;
      const float *b = of_row + values_ + group * dim, *c = b + call_.groups * dim;
      const Floats decay(of_row[channels_ + head]), step(of_row[channels_ + call_.heads + head]);
      float* value = of_row + head * wide + column;  // y overwrites x
      Floats added[V], y[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        added[v] = step * load_some(value + v * kLanes, left - v * kLanes);
        y[v] = zeros();
      }
      // from_state, to_state: whether these numbers have the layout of a state, not of `part`.
      const auto pass = [&](auto from_state, auto to_state, const float* from, float* to)
                            __attribute__((always_inline)) {
        for (int64_t i = 0; i < dim; ++i) {
#pragma GCC unroll 8
          for (int v = 0; v < V; ++v) {
            Floats s;
            if constexpr (from_state) {
              s = whole ? load(from + i * wide + v * kLanes)
                        : load_some(from + i * wide + v * kLanes, left - v * kLanes);
            } else {
              s = load(from + (i * V + v) * kLanes);
            }
            s = moved(decay, s, added[v], b[i]);
            y[v] = fused(s, Floats(c[i]), y[v]);
            if constexpr (!to_state) {
              store(to + (i * V + v) * kLanes, s);
            } else if (whole) {
              store(to + i * wide + v * kLanes, s);
            } else if (left > v * kLanes) {
              store_some(to + i * wide + v * kLanes, s, left - v * kLanes);
            }
          }
        }
      };
      const bool leaves = row + 1 == stop && end;
      constexpr std::true_type yes{};
      constexpr std::false_type no{};
      if (row == first) {
        if (leaves) pass(yes, yes, start, end);
        else pass(yes, no, start, part);
      } else if (leaves) {
        pass(no, yes, part, end);
      } else {
        pass(no, no, part, part);
      }
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const int64_t count = left - v * kLanes;
        if (count > 0) store_some(value + v * kLanes, fused(skip, load_some(value + v * kLanes, count), y[v]), count);
      }
    }
  }

  // Compute y silu(gate), and the RMS norm of each group: of this product, or of y before it, or no norm.
  void finish(const E* x, float* y, E* out) {
    const int64_t size = values_ / call_.groups;
    const auto gate = [&](int64_t d, int64_t count, const Floats& value) __attribute__((always_inline)) {
      return gated<Silu, true>(load_some(x + d, count) * Floats(call_.gate_scale), value);
    };
    for (int64_t at = 0; at < values_; at += size) {
      Floats squares = zeros();
      for (int64_t d = at; d < at + size; d += kLanes) {
        const int64_t count = at + size - d;
        const Floats value = load_some(y + d, count), inside = call_.norm_first ? value : gate(d, count, value);
        store_some(y + d, inside, count);
        squares += inside * inside;
      }
      const Floats by(call_.norm ? 1.0f / std::sqrt(sum_of(squares) / static_cast<float>(size) + call_.eps) : 1.0f);
      for (int64_t d = at; d < at + size; d += kLanes) {
        const int64_t count = at + size - d;
        Floats normed = load_some(y + d, count) * by;
        if (call_.norm) normed *= load_some(call_.norm + d, count);
        store_some(out + d, call_.norm_first ? gate(d, count, normed) : normed, count);
      }
    }
  }

  int64_t values_;
};

// Return 0, or kNoMemory.
template <class Layer, class Call>
int32_t run_layer(const Call& call) {
  try {
    Layer(call).run();
    return 0;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

}  // namespace
#define PREFOLD_EXPORT_STATES(name, E)                                                                         \
  extern "C" void prefold_short_conv_##name(const ShortConvCall* call) { short_conv<E>(*call); }               \
  extern "C" int32_t prefold_delta_net_##name(const DeltaCall* call) { return run_layer<DeltaNet<E>>(*call); } \
  extern "C" int32_t prefold_mamba2_##name(const MambaCall* call) { return run_layer<Mamba2<E>>(*call); }

PREFOLD_EXPORT_STATES(float32, float)
PREFOLD_EXPORT_STATES(bfloat16, Bf16)

}  // namespace prefold
