// Products of few rows with a matrix in blocks, in one pass: its whole numbers are multiplied as they are read, and what a
// group gives has the scale.
//
// Rows are whole numbers as well: 32 neighbours along k have one scale, by which the largest of them fits into two or three digits
// of base 255, from -127 to 127: each is written in so many, which are rows of int8 (int8.h, "lines" below). So bfloat16 rows have 16 bits, and rows of
// float32 have 23, of the largest of 32: the result is that of the decoded matrix but for rounding. It is nearer to the exact one,
// since the matrix is not rounded to bfloat16, and whole numbers are summed as they are. Where the arithmetic is int8, a line is a
// row, and the result has the same bits as the products of int8.h.
//
// A lane has numbers of one column whose places along k are all even, or all odd, as block_types.h has it; a pair of neighbouring
// lanes is a column.
#pragma once

#include "int8.h"

namespace prefold {

#if defined(PREFOLD_INT8) || (defined(__AVX2__) && !defined(__AVX512F__))
#define PREFOLD_FEW_ROWS

constexpr int kMostLines = kParts == 4 ? 4 : kRegisters == 32 ? 8 : 6;  // of a pass

// Passes that take less time than decoding the panel, with so many digits.
#ifdef PREFOLD_INT8
constexpr int kPasses[] = {0, 1, 3, 2}, kMostPasses = 3;
#else
constexpr int kPasses[] = {0, 1, 1, 1}, kMostPasses = 1;
#endif

struct FewPass {
  const int8_t* x;
  int64_t x_row;
  const RowGroup *groups, *sixteens;  // of the first line; those of the next group are `groups_row` behind
  int64_t groups_row;
};

// Adds a panel of `count` numbers along k times lines to sums [lines, kPanel].
using AddFew = void (*)(const uint8_t* panel, int64_t count, const FewPass& pass, float* sums);

// For panels of a type, and up to kMostLines lines. Null where there is none.
AddFew add_few(int64_t type, int64_t lines);

// The most floats that `multiply_few_rows` needs for its sums.
constexpr int64_t kFewSums = int64_t{kMostPasses} * kMostLines * kPanel;
// Digits of a row of E.
template <class E>
constexpr int64_t kDigits = sizeof(E) == sizeof(float) ? 3 : 2;
// Whether products of so many rows take less time in this way than by decoding the panel.
bool are_few(int64_t rows, int64_t digits);
// sums [rows, kPanel] = the rows times a panel of a type that `add_few` has. x: the rows in groups of 32, with sixteens if
// the panel's groups are that small; sums has memory for kFewSums
void multiply_few_rows(const BlockPanel& panel, int64_t k, const Int8Rows& x, int64_t rows, int64_t digits,
                       float* sums);

#endif

}  // namespace prefold
