// Which keys each tile of up to sixteen queries reads.
#pragma once

#include <vector>

#include "interface.h"

namespace prefold {

// Tile t reads runs [run_offsets[t], run_offsets[t + 1]) and masked pairs [mask_offsets[t], mask_offsets[t + 1]), both
// in ascending order. A placed plan has placed runs instead, along each query's path.
struct TileLists {
  std::vector<int64_t> run_offsets{0}, mask_offsets{0}, placed_offsets{0};
  std::vector<Run> runs;
  std::vector<MaskedPair> masked;
  std::vector<PlacedRun> placed;

  void finish_tile() {
    run_offsets.push_back(static_cast<int64_t>(runs.size()));
    mask_offsets.push_back(static_cast<int64_t>(masked.size()));
    placed_offsets.push_back(static_cast<int64_t>(placed.size()));
  }
};

// Lists over slots. A tile may have fewer than sixteen queries, and a query may have keys of its own. Tile t has the
// queries [tile_starts[t], tile_starts[t + 1]). Query i also reads the own runs [own_offsets[i], own_offsets[i + 1]).
struct SlotLists : TileLists {
  std::vector<int64_t> tile_starts{0}, own_offsets{0};
  std::vector<OwnRun> own;
};

}  // namespace prefold
