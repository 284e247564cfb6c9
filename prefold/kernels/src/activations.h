// Activations of MLPs, of a number or of a gate g and a number u: activation(g) * u.
#pragma once

#include "vectors.h"

namespace prefold {

// An activation has the functions `of`, applied to a gate g, and `up`, applied to its factor u. kExact: precise to
// float32's rounding, else to bfloat16's.
struct Plain {
  static PREFOLD_INLINE Floats up(const Floats& u) { return u; }
};

// g / (1 + 2^h(g)). Self defines h as `exponent`.
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

// GELU with tanh: (1 + tanh z) / 2 = 1 / (1 + exp(-2 z)) with z = sqrt(2 / pi) (g + 0.044715 g^3).
struct GeluTanh : Sigmoidal<GeluTanh> {
  static PREFOLD_INLINE Floats exponent(const Floats& g) {
    return g * (Floats(-2.30220820f) + Floats(-0.102943240f) * g * g);
  }
};

// The activation of gpt-oss: gates are at most 7, and u is clamped to [-7, 7] before 1 is added. NaN stays NaN.
struct Clamped : Sigmoidal<Clamped> {
  static constexpr float kLimit = 7.0f;
  static PREFOLD_INLINE Floats gate(const Floats& g) {
    return Floats(0.0f) - larger(Floats(-kLimit), Floats(0.0f) - g);
  }
  static PREFOLD_INLINE Floats up(const Floats& u) { return Floats(1.0f) + larger(Floats(-kLimit), gate(u)); }
  static PREFOLD_INLINE Floats exponent(const Floats& g) { return g * Floats(-1.702f * 1.44269504f); }
};

// NaN stays NaN.
struct Relu : Plain {
  template <bool kExact>
  static PREFOLD_INLINE Floats of(const Floats& g) {
    return larger(Floats(0.0f), g);
  }
};

struct Relu2 : Plain {
  template <bool kExact>
  static PREFOLD_INLINE Floats of(const Floats& g) {
    const Floats x = larger(Floats(0.0f), g);
    return x * x;
  }
};

// GELU with the error function: max(g, 0) - |g| q(|g|), where q(t) = erfc(t / sqrt(2)) / 2. q is exp(-t^2 / 2) times a
// polynomial of s = 1 / (1 + 0.3 t), fitted with a relative error of 1.5e-7 for t up to 14. Beyond that q is 0 in
// float32.
struct Gelu : Plain {
  template <bool kExact>
  static PREFOLD_INLINE Floats of(const Floats& g) {
    const Floats least = larger(Floats(-14.0f), Floats(0.0f) - larger(g, Floats(0.0f) - g)), t = Floats(0.0f) - least;
    const Floats s = Floats(1.0f) / fused(t, Floats(3.00000012e-01f), Floats(1.0f));
    Floats q(3.56748067e-02f);
    for (const float c : {-1.57203168e-01f, 2.06353590e-01f, -5.36837019e-02f, 1.28561646e-01f, 9.99134928e-02f,
                          1.20753959e-01f, 1.19629301e-01f}) {
      q = fused(q, s, Floats(c));
    }
    q = q * s * exp2<kExact>(t * t * Floats(-0.721347520f));  // -log2(e) / 2
    return fused_less(t, q, larger(Floats(0.0f), g));
  }
};

// activation(g) * u.
template <class Activation, bool kExact>
PREFOLD_INLINE Floats gated(const Floats& g, const Floats& u) {
  return Activation::template of<kExact>(g) * Activation::up(u);
}

// 1 / (1 + e^-x), precise to float32's rounding.
PREFOLD_INLINE Floats sigmoid(const Floats& x) { return Floats(1.0f) / (Floats(1.0f) + exp2<true>(Silu::exponent(x))); }

// xIELU (Huang and Schlag 2024): beta x + p x^2 if x > 0, else beta x + n (exp(min(x, eps)) - 1 - x).
struct Xielu {
  float p, n, beta, eps;

  PREFOLD_INLINE Floats of(const Floats& x) const {
    const Floats below = Floats(0.0f) - larger(Floats(-eps), Floats(0.0f) - x);
    const Floats curve = Floats(n) * (exp2<true>(below * Floats(1.44269504f)) - Floats(1.0f) - x);
    const Floats square = Floats(p) * x * x;
    const Floats part =
        Floats::map([](Part<float> x, Part<float> a, Part<float> b) { return x > 0 ? a : b; }, x, square, curve);
    return fused(Floats(beta), x, part);
  }
};

}  // namespace prefold
