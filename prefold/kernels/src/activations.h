// What an MLP does to a number, or to the numbers of a gate and of up: activation(g) * u.
#pragma once

#include "vectors.h"

namespace prefold {

// An activation has `of`, of a gate g, and `up`, what is multiplied with it. kExact: to float32's rounding, else to
// bfloat16's.
struct Plain {
  static PREFOLD_INLINE Floats up(const Floats& u) { return u; }
};

// g / (1 + 2^h(g)), where Self has h as `exponent`.
template <class Self>
struct Sigmoidal : Plain {
  static PREFOLD_INLINE Floats gate(const Floats& g) { return g; }
  template <bool kExact>
  static PREFOLD_INLINE Floats of(const Floats& g) {
    const Floats x = Self::gate(g);
    return x / (Floats(1.0f) + exp2<kExact>(Self::exponent(x)));
  }
};

struct Silu : Sigmoidal<Silu> {
  static PREFOLD_INLINE Floats exponent(const Floats& g) { return g * Floats(-1.44269504f); }  // -log2(e) g
};

// GELU by way of tanh: (1 + tanh z) / 2 = 1 / (1 + exp(-2 z)) with z = sqrt(2 / pi) (g + 0.044715 g^3).
struct GeluTanh : Sigmoidal<GeluTanh> {
  static PREFOLD_INLINE Floats exponent(const Floats& g) {
    return g * (Floats(-2.30220820f) + Floats(-0.102943240f) * g * g);
  }
};

// That of gpt-oss: gates of at most 7, and 1 + u, where u is within 7. NaN stays NaN.
struct Clamped : Sigmoidal<Clamped> {
  static constexpr float kLimit = 7.0f;
  static PREFOLD_INLINE Floats gate(const Floats& g) { return Floats(0.0f) - larger(Floats(-kLimit), Floats(0.0f) - g); }
  static PREFOLD_INLINE Floats up(const Floats& u) { return Floats(1.0f) + larger(Floats(-kLimit), gate(u)); }
  static PREFOLD_INLINE Floats exponent(const Floats& g) { return g * Floats(-1.702f * 1.44269504f); }
};

struct Relu2 : Plain {
  template <bool kExact>
  static PREFOLD_INLINE Floats of(const Floats& g) {
    const Floats x = larger(Floats(0.0f), g);
    return x * x;
  }
};

// The activation of g, times u.
template <class Activation, bool kExact>
PREFOLD_INLINE Floats gated(const Floats& g, const Floats& u) {
  return Activation::template of<kExact>(g) * Activation::up(u);
}

// 1 / (1 + e^-x), to float32's rounding.
PREFOLD_INLINE Floats sigmoid(const Floats& x) { return Floats(1.0f) / (Floats(1.0f) + exp2<true>(Silu::exponent(x))); }

}  // namespace prefold
