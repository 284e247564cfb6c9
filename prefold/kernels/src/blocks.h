// Matrices that are multiplied in the number format of their file. These are the blocks of GGUF, in which some
// neighbours along k share a scale, and 16-bit numbers with float32 arithmetic.
//
// Like the matrices of products.h, they come in panels of 32 columns. A panel is a sequence of units along k. A unit
// has one or eight blocks of the file for each column. No bit of the file's numbers is lost, only their order changes:
// first the scales of all columns, then the numbers in planes of four bits (or eight), with one or two more bits.
//
// A slab of a panel is decoded into the words that products.h multiplies. This memory stays in the nearest cache, and
// all rows of the slab use it. The decoded numbers equal the dequantised numbers of the file, bit by bit.
#pragma once

#include "interface.h"

namespace prefold {

// Decode the numbers [first, first + count) along k of a panel; first and count are multiples of 32. The result is
// floats, words [count][32], or if `pairs` is true, pairs of bfloat16 numbers, words [count / 2][32].
void decode(const BlockPanel& panel, int64_t first, int64_t count, bool pairs, uint32_t* words);

// The form in which a panel is multiplied with int8 rows: units of one group each. A unit has 32 scales, 32 minima if
// the type has minima, and words of four numbers along k, [group / 4][32].
struct Int8Form {
  int group, shift;  // without minima, an unsigned number u stands for u - (1 << shift)
  bool minima;
  int64_t unit_bytes;
  void (*decode)(const uint8_t* panel, int64_t first, int64_t count, uint8_t* units);  // null: the panel has this form
};

// Return null if the type has no such form.
const Int8Form* int8_form(int64_t type);

}  // namespace prefold
