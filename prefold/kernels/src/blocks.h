// Matrices that stay in the number format of their file while they are multiplied with: the blocks of GGUF, in which
// some numbers that follow each other along k share a scale, and 16-bit numbers where the arithmetic is float32.
//
// As products.h has it, a matrix comes in panels of 32 columns. A panel is a row of units, one behind the other along
// k; a unit holds, of each column, what is one or eight blocks of the file. No bit of the file's numbers is lost, they
// only lie in another order: scales of all columns first, then the numbers, in planes of four bits (or eight), and one
// or two bits more.
//
// A slab of a panel is decoded into the words that products.h multiplies, in memory that stays in the nearest cache,
// once for all the rows that go through it. What is decoded is what dequantising the file gives, to the bit.
#pragma once

#include "interface.h"

namespace prefold {

// Decodes the numbers [first, first + count) along k, multiples of 32, of a panel: to floats, words [count][32], or,
// where `pairs` is true, to bfloat16 numbers in pairs, words [count / 2][32].
void decode(const BlockPanel& panel, int64_t first, int64_t count, bool pairs, uint32_t* words);

// How a panel's numbers are multiplied with rows of int8: in units, which are the numbers of a group: 32 scales, as
// many minima where there are any, and words of four numbers along k, [group / 4][32].
struct Int8Form {
  int group, shift;  // what a number stands for is less by 1 << shift, where there are no minima
  bool minima;
  int64_t unit_bytes;
  void (*decode)(const uint8_t* panel, int64_t first, int64_t count, uint8_t* units);  // null: they lie so in the panel
};

// Null where there is none.
const Int8Form* int8_form(int64_t type);

}  // namespace prefold
