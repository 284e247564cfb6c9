// Products of few rows with a matrix in blocks, in one pass. The matrix's integers are multiplied as they are read, and
// the sum of each group is then multiplied with the group's scale.
//
// The rows become integers as well. 32 neighbours along k share a scale, with which the largest of them fits into two
// or three digits of base 255, each from -127 to 127. Each digit is a row of int8 (int8.h), called a line here. Two
// digits keep 16 bits of a bfloat16 row, and three keep 23 bits of a float32 row, relative to the largest of the 32. So
// the result equals the product with the decoded matrix up to rounding. It is closer to the exact product, because the
// matrix is not rounded to bfloat16, and integers are summed exactly. With int8 arithmetic a row is one line, and the
// result has the same bits as the products of int8.h.
//
// A lane has numbers of one column whose places along k are all even, or all odd (block_types.h). Two neighbouring
// lanes make up a column.
#pragma once

#include "int8.h"

namespace prefold {

#if defined(PREFOLD_INT8) || (defined(__AVX2__) && !defined(__AVX512F__))
#define PREFOLD_FEW_ROWS

constexpr int kMostLines = kParts == 4 ? 4 : kRegisters == 32 ? 8 : 6;  // per pass

// The most passes that are faster than decoding the panel, by the number of digits.
#ifdef PREFOLD_INT8
constexpr int kPasses[] = {0, 1, 3, 2}, kMostPasses = 3;
#else
constexpr int kPasses[] = {0, 1, 1, 1}, kMostPasses = 1;
#endif

struct FewPass {
  const int8_t* x;
  int64_t x_row;
  const RowGroup *groups, *sixteens;  // of the first line; the next group is `groups_row` further on
  int64_t groups_row;
};

// Add the product of lines with `count` numbers along k of a panel to sums [lines, kPanel].
using AddFew = void (*)(const uint8_t* panel, int64_t count, const FewPass& pass, float* sums);

// Return the function for a block type and up to kMostLines lines; null if the type has none.
AddFew add_few(int64_t type, int64_t lines);

// The number of floats in the `sums` of `multiply_few_rows`.
constexpr int64_t kFewSums = int64_t{kMostPasses} * kMostLines * kPanel;
// Digits for a row of E.
template <class E>
constexpr int64_t kDigits = sizeof(E) == sizeof(float) ? 3 : 2;
// Return whether this way is faster than decoding the panel.
bool are_few(int64_t rows, int64_t digits);
// Set sums [rows, kPanel] to the product of the rows with a panel whose type `add_few` supports. x: the rows in groups
// of 32, with `sixteens` if the panel's groups have sixteen numbers. `sums` needs memory for kFewSums floats.
void multiply_few_rows(const BlockPanel& panel, int64_t k, const Int8Rows& x, int64_t rows, int64_t digits,
                       float* sums);

#endif

}  // namespace prefold
