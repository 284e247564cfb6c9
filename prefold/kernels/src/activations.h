// What the gate of an MLP does: activation(g) * u.
#pragma once

#include "vectors.h"

namespace prefold {

// Both activations are g / (1 + 2^h(g)).
struct Silu {
  static PREFOLD_INLINE Floats exponent(const Floats& g) { return g * Floats(-1.44269504f); }  // -log2(e) g
};

// GELU by way of tanh: (1 + tanh z) / 2 = 1 / (1 + exp(-2 z)) with z = sqrt(2 / pi) (g + 0.044715 g^3).
struct GeluTanh {
  static PREFOLD_INLINE Floats exponent(const Floats& g) {
    return g * (Floats(-2.30220820f) + Floats(-0.102943240f) * g * g);
  }
};

// The activation of g, times u. kExact: to float32's rounding, else to bfloat16's.
template <class Activation, bool kExact>
PREFOLD_INLINE Floats gated(const Floats& g, const Floats& u) {
  return g / (Floats(1.0f) + exp2<kExact>(Activation::exponent(g))) * u;
}

}  // namespace prefold
