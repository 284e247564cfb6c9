// A call of the experts of one layer.
#pragma once

#include <cstdint>

namespace prefold {

// x [rows, hidden] with row stride x_row, logits float [rows, experts] of the router, out [rows, hidden]; strides are in
// elements. Each row goes through its `chosen` experts of the largest logits, whose results are weighed by the softmax of
// the logits: over these experts (`normalised`), or over all.
//
// gate_up: each expert's matrix packed as products.h says, one behind the other, with sixteen columns of gate, sixteen
// of up, and so on; width is a multiple of sixteen. down: likewise.
//
// gate_up_bias [experts, 2 * bias_width], gate before up, and down_bias [experts, hidden], of the dtype of x, are added to
// the products; null: there are none.
struct ExpertsCall {
  const void *x, *logits, *gate_up, *down, *gate_up_bias, *down_bias;
  void* out;
  int64_t rows, x_row, experts, chosen, hidden, width, bias_width;
  int32_t normalised, threads;
};

}  // namespace prefold
