// Which keys each tile of up to sixteen queries reads.
#pragma once

#include <vector>

#include "interface.h"

namespace prefold {

// Tile t reads runs [run_offsets[t], run_offsets[t + 1]) and masked pairs likewise, each in ascending order; or placed
// runs, along each query's path.
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

// The same over slots, where tiles are not all of sixteen queries and a query may have keys of its own: tile t is
// queries [tile_starts[t], tile_starts[t + 1]), and query i also reads own runs [own_offsets[i], own_offsets[i + 1]).
struct SlotLists : TileLists {
  std::vector<int64_t> tile_starts{0}, own_offsets{0};
  std::vector<OwnRun> own;
};

}  // namespace prefold
