// Products of matrices in blocks and of int8 by a compiled library, beside sums in float64; a program of its own for
// test_emulated.py, since PyTorch takes minutes to load in emulation.
//
//     emulated_products LIBRARY SEED CASES
//
// Each case is a random matrix of a GGUF type, multiplied in float32, with int8 rows, and packed as int8. Errors are
// relative to the root of the sum of the squares of the summed numbers. A row alone must have the same bits as among
// other rows.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "emulated.h"

#ifdef __x86_64__
typedef _Float16 Half;
#else
typedef __fp16 Half;
#endif

namespace {

using namespace prefold;

constexpr int64_t kGroup = 64;

struct Type {
  int64_t number, block, bytes;
  std::vector<int> halves;  // where float16 numbers lie in a block
};

const std::vector<Type> kTypes = {
    {2, 32, 18, {0}},       {3, 32, 20, {0, 2}},    {6, 32, 22, {0}},      {7, 32, 24, {0, 2}},  {8, 32, 34, {0}},
    {12, 256, 144, {0, 2}}, {13, 256, 176, {0, 2}}, {14, 256, 210, {208}}, {kMXFP4, 32, 17, {}},
};

// Panels in memory that begins at a cache line.
struct Panels {
  std::unique_ptr<uint8_t, FreePages> memory;
  int64_t bytes;

  Panels(int64_t count, int64_t size) : memory(pages(count * size)), bytes(size) {}
  std::vector<BlockPanel> table(int64_t count, int64_t type) const {
    std::vector<BlockPanel> made;
    for (int64_t p = 0; p < count; ++p) made.push_back({memory.get() + p * bytes, type});
    return made;
  }
};

}  // namespace

int main(int, char** arguments) {
  open_library(arguments[1]);
  const bool has_int8 = FUNCTION(prefold_has_int8)();
  const auto panel_size = FUNCTION(prefold_block_panel_size);
  const auto pack = FUNCTION(prefold_pack_blocks);
  const auto rows_of = FUNCTION(prefold_block_rows_float32);
  const auto pack_int8 = FUNCTION(prefold_pack_int8_float32);
  const auto linear = FUNCTION(prefold_linear_float32);
  const auto has_products = FUNCTION(prefold_has_products);
  printf("int8 %d, products %d, of bfloat16 %d\n", has_int8, has_products(0), has_products(1));
  std::mt19937_64 rng(atoi(arguments[2]));
  std::normal_distribution<float> normal;
  double most_in_float = 0, most_in_int8 = 0;
  int64_t sums = 0, wrong = 0, unlike = 0;
  for (int at = 0; at < atoi(arguments[3]); ++at) {
    const Type& type = kTypes[at % kTypes.size()];
    const int64_t k = 256 * (1 + rng() % 3), columns = 1 + rng() % 80, rows = 1 + rng() % 20;
    const int64_t panels = (columns + kPanel - 1) / kPanel, row_bytes = k / type.block * type.bytes;
    std::vector<uint8_t> file(columns * row_bytes);
    for (auto& byte : file) byte = rng();
    for (uint8_t* block = file.data(); block < file.data() + file.size(); block += type.bytes) {
      if (type.number == kMXFP4) block[0] = 119 + rng() % 6;  // the exponent
      for (int half : type.halves) {
        const Half scale = 0.01f * normal(rng);
        memcpy(block + half, &scale, sizeof scale);
      }
    }
    std::vector<const uint8_t*> addresses(panels * kPanel, nullptr);
    for (int64_t i = 0; i < columns; ++i) addresses[i] = &file[i * row_bytes];
    const Panels blocks(panels, panel_size(type.number, k));
    pack(type.number, addresses.data(), panels, k, blocks.memory.get(), 1);
    std::vector<int64_t> ids(columns);
    for (int64_t i = 0; i < columns; ++i) ids[i] = i;
    std::vector<float> weight(columns * k), x(rows * k), out(rows * columns), alone(columns);
    rows_of(blocks.table(panels, type.number).data(), ids.data(), weight.data(), columns, k, 1);
    for (auto& number : x) number = normal(rng);
    const auto check = [&](const char* what, const std::vector<BlockPanel>& table, double tolerance, double& most) {
      if (linear(x.data(), k, nullptr, table.data(), nullptr, out.data(), rows, columns, k, 1, nullptr)) exit(3);
      for (int64_t i = 0; i < rows * columns; ++i, ++sums) {
        double sum = 0, squares = 0;
        for (int64_t j = 0; j < k; ++j) {
          const double product = double(x[i / columns * k + j]) * weight[i % columns * k + j];
          sum += product, squares += product * product;
        }
        const double error = std::fabs(out[i] - sum) / std::sqrt(squares + 1e-12);
        most = std::max(most, error);
        if (error < tolerance) continue;
        if (wrong++ < 5)
          printf("%s, type %ld, %ld rows: %g for %g\n", what, long(type.number), long(rows), out[i], sum);
      }
      const int64_t row = rng() % rows;
      if (linear(&x[row * k], k, nullptr, table.data(), nullptr, alone.data(), 1, columns, k, 1, nullptr)) exit(3);
      return memcmp(alone.data(), &out[row * columns], columns * sizeof(float)) != 0;
    };
    check("float32", blocks.table(panels, type.number), 2e-5, most_in_float);  // few rows are summed in another way
    if (!has_int8) continue;
    unlike += check("int8", blocks.table(panels, type.number + kInInt8), 0.06, most_in_int8);
    const Panels ours(panels, panel_size(kS8 + kGroup, k));
    if (pack_int8(weight.data(), k, columns, k, kGroup, ours.memory.get(), 1)) exit(3);
    unlike += check("int8 of our own", ours.table(panels, kS8 + kGroup), 0.06, most_in_int8);
  }
  printf("%ld sums, %ld wrong; largest error in float32 %.2g, in int8 %.2g; %ld rows are others when alone\n",
         long(sums), long(wrong), most_in_float, most_in_int8, long(unlike));
  return wrong || unlike;
}
