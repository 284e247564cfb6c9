// Products of bfloat16 rows with a packed matrix in AMX tiles. Sixteen steps of half a panel lie in memory exactly as a
// tile does.
//
// A block of 32 rows goes through a slab with four tiles of sums. If the number of rows is no multiple of sixteen, the
// last tile starts earlier, and some rows are computed twice, with the same result. Fewer than sixteen rows use a
// smaller tile. As with vectors, a row's sums run in the order of k, no matter which rows are beside it.
#pragma once

#include "amx.h"
#include "products.h"

namespace prefold {

#ifdef PREFOLD_TILES

constexpr int kTileBlockRows = 2 * kTile;
constexpr int kTileGroupRows = 192;  // these stay in the second-level cache, which two threads may share
// Decoding a matrix pays off with more rows: as many rows as fit into this cache with their part of a slab.
constexpr int64_t kMostDecodedRows = 1024, kDecodedBytes = 1280 << 10;

constexpr int64_t kAheadBytes = 16384;

// Set tile [rows, kPanel] to the rows times a slab, plus the old tile if `more`. The rows are a tile from x on, and
// with TWO another one from x + second * x_row on, whose sums lie `second` rows below. Every sixteen steps prefetch
// `lines` cache lines from `ahead` on.
template <bool TWO>
PREFOLD_APART void multiply_tiles(const char* x, int64_t x_row, int64_t second, const uint32_t* slab, int64_t steps,
                                  const char* ahead, int64_t lines, float* tile, bool more) {
  asm volatile("" ::: "memory");  // GCC does not know that loading a tile reads memory
  const char* y = x + second * x_row;
  float* below = tile + second * kPanel;
  if (more) {
    _tile_loadd(0, tile, kStepBytes);
    _tile_loadd(1, tile + kTile, kStepBytes);
    if constexpr (TWO) {
      _tile_loadd(2, below, kStepBytes);
      _tile_loadd(3, below + kTile, kStepBytes);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t s = 0; s < steps; s += kTile) {
    _tile_loadd(6, slab, kStepBytes);
    _tile_loadd(4, x, x_row);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, slab + kTile, kStepBytes);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (TWO) {
      _tile_loadd(5, y, x_row);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    for (int64_t i = 0; i < lines; ++i, ahead += kLine) __builtin_prefetch(ahead, 0, 2);
    slab += kTile * kPanel;
    x += kTileBytes;
    y += kTileBytes;
  }
  _tile_stored(0, tile, kStepBytes);
  _tile_stored(1, tile + kTile, kStepBytes);
  if constexpr (TWO) {
    _tile_stored(2, below, kStepBytes);
    _tile_stored(3, below + kTile, kStepBytes);
  }
}

// Multiply rows [first, stop), at most GROUP, with panel p. Fewer than sixteen rows must be all rows of the product.
template <int GROUP = kTileGroupRows>
void multiply_panel_in_tiles(const Product& product, int64_t p, int64_t first, int64_t stop, const Store& store) {
  const int64_t rows = stop - first, blocks = (rows + kTileBlockRows - 1) / kTileBlockRows;
  const int64_t columns = std::min<int64_t>(kPanel, product.columns - p * kPanel);
  const int64_t whole = product.steps / kTile * kTile;
  constexpr int64_t kTileLines = kTile * kStepBytes / kLine;  // in a panel
  const int64_t lines = (kTileLines + blocks - 1) / blocks;
  alignas(64) float tiles[GROUP / kTileBlockRows][kTileBlockRows * kPanel];
  Decoded room;
  const int64_t most = slab_steps<Bf16Words>(product, rows);
  for (int64_t step = 0, steps; step < product.steps; step += steps) {
    steps = step < whole ? std::min(most, whole - step) : product.steps - whole;
    const uint32_t* slab = slab_of<Bf16Words>(product, p, step, steps, room.words);
    const char* x = product.x + first * product.x_row + step * sizeof(uint32_t);
    // The time of few rows is reading time. They prefetch a little ahead, past the end into the next matrix.
    const char* ahead = rows <= kTile ? reinterpret_cast<const char*>(slab) + kAheadBytes
                                      : reinterpret_cast<const char*>(slab + steps * kPanel);
    const bool done = step + steps == product.steps, last = rows > kTile && done && p + 1 == product.panels();
    if (step == whole) configure_tiles(rows, steps);
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t row = std::min(b * kTileBlockRows, std::max<int64_t>(0, rows - kTileBlockRows));
      const int64_t count = std::min<int64_t>(rows, kTileBlockRows);
      const auto multiply = count > kTile ? multiply_tiles<true> : multiply_tiles<false>;
      multiply(x + row * product.x_row, product.x_row, std::max<int64_t>(0, count - kTile), slab, steps, ahead,
               last || product.blocks ? 0 : lines, tiles[b], step > 0);
      ahead += lines * kLine * ((steps + kTile - 1) / kTile);
      if (done) store(first + row, p * kPanel, count, columns, tiles[b]);
    }
  }
  if (whole < product.steps) configure_tiles(rows, kTile);
}

// Multiply the whole product, in parallel.
inline void multiply_all_in_tiles(const Product& product, int threads, const Store& store) {
  const auto in_tiles = [&](const Body<>& run) {
    configure_tiles(product.rows, kTile);
    run();
    _tile_release();
  };
  const auto with = [&](auto most, int group_rows) {
    for_panels(product, kTileBlockRows, group_rows, threads, [&](int64_t panel, int64_t first, int64_t stop) {
      multiply_panel_in_tiles<decltype(most)::value>(product, panel, first, stop, store);
    }, in_tiles);
  };
  if (!product.blocks) return with(std::integral_constant<int, kTileGroupRows>(), kTileGroupRows);
  const int64_t fit = kDecodedBytes / (std::min(product.steps, kSlabSteps) * sizeof(uint32_t));
  with(std::integral_constant<int, kMostDecodedRows>(), std::clamp<int64_t>(fit, kTileGroupRows, kMostDecodedRows));
}

#endif

}  // namespace prefold
