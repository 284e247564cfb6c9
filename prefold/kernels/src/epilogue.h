// The last part of a product, before its sums are stored: add the LoRA adapters' sums, then the bias, and activate.
#pragma once

#include "activations.h"
#include "interface.h"
#include "products.h"

namespace prefold {

template <bool kExact>
PREFOLD_INLINE Floats activated(int32_t activation, const Floats& x) {
  switch (activation) {
    case kSilu: return gated<Silu, kExact>(x, Floats(1.0f));
    case kGeluTanh: return gated<GeluTanh, kExact>(x, Floats(1.0f));
    case kGelu: return gated<Gelu, kExact>(x, Floats(1.0f));
    case kRelu: return gated<Relu, kExact>(x, Floats(1.0f));
    case kRelu2: return gated<Relu2, kExact>(x, Floats(1.0f));
    default: return x;
  }
}

// Add the adapters' part to sums [count, kPanel], for rows from `row` on and the panel that starts at `column`.
template <class E>
void add_low_rank(const RowLow* adapted, int64_t row, int64_t column, int64_t count, float* sums) {
  for (int64_t r = 0; r < count; ++r, sums += kPanel) {
    const auto [adapter, low] = adapted[row + r];
    if (!adapter) continue;
    const int64_t* span = adapter->spans + column / kPanel * 3;
    const E* b = static_cast<const E*>(adapter->b) + span[2];
    Floats left = zeros(), right = zeros();
    for (int64_t i = span[0]; i < span[1]; ++i, b += kPanel) {
      left += Floats(low[i]) * load(b);
      right += Floats(low[i]) * load(b + kLanes);
    }
    store(sums, load(sums) + left);
    store(sums + kLanes, load(sums + kLanes) + right);
  }
}

}  // namespace prefold
