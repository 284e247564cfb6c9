// Calls of layers whose state runs along the sequence.
#pragma once

#include <cstdint>

namespace prefold {

// How a causal convolution reads rows, and of how many rows a state of it consists.
//
// A place below kept * states is a column of a state; what is above counts rows of x. A state that is stored takes the
// place of one that only its own rows read, if any do.
struct ConvCall {
  const void* x;             // [rows, ...] with row stride x_row, in elements
  void* states;              // [states, kept, channels]
  const float *taps, *bias;  // [kept + 1, channels], the last of the row itself; [channels] or null
  const int64_t *above, *below;  // places: [kept, rows], the nearest row above first; [ends, kept], the oldest first
  const int64_t* to;             // [ends]: the states that are stored
  int64_t rows, x_row, channels, kept, first_row, num_ends;  // first_row: the place of the first row of x
};

// A gated short convolution: with b, c, x of a row side by side, out = c * conv(b * x) for `picked` rows.
struct ShortConvCall {
  ConvCall conv;
  void* out;            // [picked, channels]
  const int64_t* pick;  // [picked], or null: all rows
  int64_t picked;
  int32_t threads;
};

// A gated delta net. A row of x has q, k, v of its heads, z, b and a side by side; the convolution has the channels of the
// first three. Runs of rows are ordered so that each comes behind that whose end it starts from, in `waves` of runs that
// do not depend on each other.
struct DeltaCall {
  ConvCall conv;
  void* out;            // [picked, heads * value_dim]
  const int64_t* pick;  // [picked], or null: all rows
  float *states, *between;  // [.., heads, key_dim, value_dim]; between: those that only later runs start from
  // Of each run: its first row, the row behind its last, where its state comes from and where it goes. These count states,
  // then between; -1: the state at its end is not wanted. A state that is written is read by none but that run before.
  const int64_t *first, *stop, *from, *to, *waves;  // waves: [num_waves + 1], runs
  const float *rates, *dt_bias, *norm;              // [heads]: -exp(a_log); [heads]; [value_dim]
  int64_t picked, num_waves, num_states, heads, key_heads, key_dim, value_dim;
  float eps;
  int32_t threads;
};

}  // namespace prefold
