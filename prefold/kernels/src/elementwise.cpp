// The position-wise parts of a transformer block that are not matrix products. Arithmetic is in float32 for every
// dtype. Widths may be any.
#include <cmath>

#include "activations.h"
#include "interface.h"
#include "parallel.h"

namespace prefold {
namespace {

// Run body(d, count) for whole vectors of [0, width), and for the remaining numbers, fewer than sixteen.
template <class Body>
PREFOLD_INLINE void for_vectors(int64_t width, const Body& body) {
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) body(d, int64_t{kLanes});
  if (d < width) body(d, width - d);
}

PREFOLD_INLINE Floats inverse_rms(const Floats& squares, int64_t width, float eps) {
  return Floats(1.0f / std::sqrt(sum_of(squares) / static_cast<float>(width) + eps));
}

// x += delta (unless null), written back; then out = x / rms(x) * weight.
template <class E, class W>
void add_norm_row(E* x, const E* delta, const W* weight, E* out, int64_t width, float eps) {
  Floats squares = zeros();
  if (delta) {
    for_vectors(width, [&](int64_t d, int64_t count) __attribute__((always_inline)) {
      const Floats v = rounded_to<E>(load_some(x + d, count) + load_some(delta + d, count));
      store_some(x + d, v, count);
      squares += v * v;
    });
  } else {
    for_vectors(width, [&](int64_t d, int64_t count) __attribute__((always_inline)) {
      const Floats v = load_some(x + d, count);
      squares += v * v;
    });
  }
  const Floats scale = inverse_rms(squares, width, eps);
  for_vectors(width, [&](int64_t d, int64_t count) __attribute__((always_inline)) {
    store_some(out + d, load_some(x + d, count) * scale * load_some(weight + d, count), count);
  });
}

// x += delta (unless null), written back; then out = (x - mean) / deviation * weight + bias (Ba et al. 2016).
template <class E, class W>
void add_layer_norm_row(E* x, const E* delta, const W* weight, const W* bias, E* out, int64_t width, float eps) {
  Floats sums = zeros(), squares = zeros();
  for_vectors(width, [&](int64_t d, int64_t count) __attribute__((always_inline)) {
    Floats v = load_some(x + d, count);
    if (delta) {
      v = rounded_to<E>(v + load_some(delta + d, count));
      store_some(x + d, v, count);
    }
    sums += v;
  });
  const Floats mean(sum_of(sums) / static_cast<float>(width));
  for_vectors(width, [&](int64_t d, int64_t count) __attribute__((always_inline)) {
    const Floats v = choose((1u << count) - 1, load_some(x + d, count) - mean, zeros());
    squares += v * v;
  });
  const Floats scale = inverse_rms(squares, width, eps);
  for_vectors(width, [&](int64_t d, int64_t count) __attribute__((always_inline)) {
    const Floats v = (load_some(x + d, count) - mean) * scale;
    store_some(out + d, v * load_some(weight + d, count) + load_some(bias + d, count), count);
  });
}

// Process one head of `dim` numbers in place: x / rms(x) * weight (unless null), then rotate the first half against the
// second.
template <class E, class W>
void rope_head(E* x, const float* cosines, const float* sines, const W* weight, int64_t dim, float eps) {
  const int64_t half = dim / 2;
  Floats scale = zeros();
  if (weight) {
    Floats squares = zeros();
    for_vectors(dim, [&](int64_t d, int64_t count) __attribute__((always_inline)) {
      const Floats v = load_some(x + d, count);
      squares += v * v;
    });
    scale = inverse_rms(squares, dim, eps);
  }
  for_vectors(half, [&](int64_t d, int64_t count) __attribute__((always_inline)) {
    Floats a = load_some(x + d, count), b = load_some(x + half + d, count);
    if (weight) {
      a *= scale * load_some(weight + d, count);
      b *= scale * load_some(weight + half + d, count);
    }
    const Floats c = load_some(cosines + d, count), s = load_some(sines + d, count);
    // `fused`, so that whole vectors and the rest of a head are rounded alike.
    store_some(x + d, fused_less(b, s, a * c), count);
    store_some(x + half + d, fused(a, s, b * c), count);
  });
}

template <class Activation, class E>
void gate_mul_row(const E* gate, const E* up, E* out, int64_t width) {
  constexpr bool kExact = std::is_same_v<E, float>;
  for_vectors(width, [&](int64_t d, int64_t count) __attribute__((always_inline)) {
    const Floats g = load_some(gate + d, count), u = load_some(up + d, count);
    store_some(out + d, gated<Activation, kExact>(g, u), count);
  });
}

template <class E, class W>
void add_rms_norm(E* x, const E* delta, const W* weight, E* out, int64_t rows, int64_t width, int64_t x_row,
                  int64_t delta_row, int64_t out_row, float eps, int threads) {
  parallel_ranges(rows, width, threads, [&](int64_t first, int64_t stop) {
    for (int64_t i = first; i < stop; ++i) {
      add_norm_row(x + i * x_row, delta ? delta + i * delta_row : nullptr, weight, out + i * out_row, width, eps);
    }
  });
}

template <class E, class W>
void add_layer_norm(E* x, const E* delta, const W* weight, const W* bias, E* out, int64_t rows, int64_t width,
                    float eps, int threads) {
  parallel_ranges(rows, width, threads, [&](int64_t first, int64_t stop) {
    for (int64_t i = first * width; i < stop * width; i += width) {
      add_layer_norm_row(x + i, delta ? delta + i : nullptr, weight, bias, out + i, width, eps);
    }
  });
}

template <class E>
void norm_heads(E* x, const float* weight, const float* bias, int64_t rows, int64_t heads, int64_t dim, int64_t row,
                int64_t head, int64_t apart, float eps, int threads) {
  E* const none = nullptr;
  parallel_ranges(rows, heads * dim, threads, [&](int64_t first, int64_t stop) {
    for (int64_t i = first; i < stop; ++i) {
      for (int64_t h = 0; h < heads; ++h) {
        E* of_head = x + i * row + h * head;
        if (bias) add_layer_norm_row(of_head, none, weight + h * apart, bias + h * apart, of_head, dim, eps);
        else add_norm_row(of_head, none, weight + h * apart, of_head, dim, eps);
      }
    }
  });
}

// Rotate rows [first, stop). This is a function of its own because variables that a lambda captures would be reloaded
// for each head.
template <class E, class W>
void rope_rows(E* x, const float* cos_sin, const W* weight, int64_t first, int64_t stop, int64_t heads, int64_t dim,
               int64_t row, int64_t head, float eps) {
  for (int64_t i = first; i < stop; ++i) {
    const float* angles = cos_sin + i * dim;
    for (int64_t h = 0; h < heads; ++h) {
      rope_head(x + i * row + h * head, angles, angles + dim / 2, weight, dim, eps);
    }
  }
}

template <class E, class W>
void rope(E* x, const float* cos_sin, const W* weight, int64_t rows, int64_t heads, int64_t dim, int64_t row,
          int64_t head, float eps, int threads) {
  parallel_ranges(rows, heads * dim, threads, [&](int64_t first, int64_t stop) {
    rope_rows(x, cos_sin, weight, first, stop, heads, dim, row, head, eps);
  });
}

template <class Activation, class E>
void gate_mul(const E* gate_up, E* out, int64_t rows, int64_t width, int64_t row, int threads) {
  parallel_ranges(rows, width, threads, [&](int64_t first, int64_t stop) {
    for (int64_t i = first; i < stop; ++i) {
      gate_mul_row<Activation>(gate_up + i * row, gate_up + i * row + width, out + i * width, width);
    }
  });
}

}  // namespace
#define PREFOLD_EXPORT_NORMED(name, E, W)                                                                       \
  extern "C" void prefold_add_rms_norm_##name(E* x, const E* delta, const W* weight, E* out, int64_t rows,      \
                                              int64_t width, int64_t x_row, int64_t delta_row, int64_t out_row, \
                                              float eps, int32_t threads) {                                     \
    add_rms_norm(x, delta, weight, out, rows, width, x_row, delta_row, out_row, eps, threads);                  \
  }                                                                                                             \
  extern "C" void prefold_rope_##name(E* x, const float* cos_sin, const W* weight, int64_t rows, int64_t heads, \
                                      int64_t dim, int64_t row, int64_t head, float eps, int32_t threads) {     \
    rope(x, cos_sin, weight, rows, heads, dim, row, head, eps, threads);                                        \
  }
#define PREFOLD_EXPORT_LAYER_NORM(name, E, W)                                                                 \
  extern "C" void prefold_add_layer_norm_##name(E* x, const E* delta, const W* weight, const W* bias, E* out, \
                                                int64_t rows, int64_t width, float eps, int32_t threads) {    \
    add_layer_norm(x, delta, weight, bias, out, rows, width, eps, threads);                                   \
  }
#define PREFOLD_EXPORT_NORM_HEADS(name, E)                                                                             \
  extern "C" void prefold_norm_heads_##name(E* x, const float* weight, const float* bias, int64_t rows, int64_t heads, \
                                            int64_t dim, int64_t row, int64_t head, int64_t apart, float eps,          \
                                            int32_t threads) {                                                         \
    norm_heads(x, weight, bias, rows, heads, dim, row, head, apart, eps, threads);                                     \
  }
#define PREFOLD_EXPORT_GATE(name, Activation, E)                                                              \
  extern "C" void prefold_gate_mul_##name(const E* gate_up, E* out, int64_t rows, int64_t width, int64_t row, \
                                          int32_t threads) {                                                  \
    gate_mul<Activation>(gate_up, out, rows, width, row, threads);                                            \
  }

PREFOLD_EXPORT_NORMED(float32, float, float)
PREFOLD_EXPORT_NORMED(bfloat16, Bf16, Bf16)
PREFOLD_EXPORT_NORMED(bfloat16_float32, Bf16, float)
PREFOLD_EXPORT_LAYER_NORM(float32, float, float)
PREFOLD_EXPORT_LAYER_NORM(bfloat16, Bf16, Bf16)
PREFOLD_EXPORT_LAYER_NORM(bfloat16_float32, Bf16, float)
PREFOLD_EXPORT_NORM_HEADS(float32, float)
PREFOLD_EXPORT_NORM_HEADS(bfloat16, Bf16)
PREFOLD_EXPORT_GATE(silu_float32, Silu, float)
PREFOLD_EXPORT_GATE(silu_bfloat16, Silu, Bf16)
PREFOLD_EXPORT_GATE(gelu_tanh_float32, GeluTanh, float)
PREFOLD_EXPORT_GATE(gelu_tanh_bfloat16, GeluTanh, Bf16)

}  // namespace prefold
