// What the gate of an MLP does: activation(g) * u.
#pragma once

#include "vectors.h"

namespace prefold {

// All activations but Relu2 are g / (1 + 2^h(g)), of a gate g.
struct Plain {
  static PREFOLD_INLINE Floats gate(const Floats& g) { return g; }
  static PREFOLD_INLINE Floats up(const Floats& u) { return u; }
};

struct Silu : Plain {
  static PREFOLD_INLINE Floats exponent(const Floats& g) { return g * Floats(-1.44269504f); }  // -log2(e) g
};

// GELU by way of tanh: (1 + tanh z) / 2 = 1 / (1 + exp(-2 z)) with z = sqrt(2 / pi) (g + 0.044715 g^3).
struct GeluTanh : Plain {
  static PREFOLD_INLINE Floats exponent(const Floats& g) {
    return g * (Floats(-2.30220820f) + Floats(-0.102943240f) * g * g);
  }
};

// That of gpt-oss: gates of at most 7, and 1 + u, where u is within 7. NaN stays NaN.
struct Clamped {
  static constexpr float kLimit = 7.0f;
  static PREFOLD_INLINE Floats gate(const Floats& g) { return Floats(0.0f) - larger(Floats(-kLimit), Floats(0.0f) - g); }
  static PREFOLD_INLINE Floats up(const Floats& u) { return Floats(1.0f) + larger(Floats(-kLimit), gate(u)); }
  static PREFOLD_INLINE Floats exponent(const Floats& g) { return g * Floats(-1.702f * 1.44269504f); }
};

// The square of what is above 0. NaN stays NaN.
struct Relu2 : Plain {
  static PREFOLD_INLINE Floats gate(const Floats& g) { return larger(Floats(0.0f), g); }
};

// The activation of g, times u. kExact: to float32's rounding, else to bfloat16's.
template <class Activation, bool kExact>
PREFOLD_INLINE Floats gated(const Floats& g, const Floats& u) {
  const Floats x = Activation::gate(g);
  if constexpr (std::is_same_v<Activation, Relu2>) return x * x * Activation::up(u);
  else return x / (Floats(1.0f) + exp2<kExact>(Activation::exponent(x))) * Activation::up(u);
}

// 1 / (1 + e^-x), to float32's rounding.
PREFOLD_INLINE Floats sigmoid(const Floats& x) { return Floats(1.0f) / (Floats(1.0f) + exp2<true>(Silu::exponent(x))); }

}  // namespace prefold
