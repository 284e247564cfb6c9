// Which keys each tile of up to sixteen queries reads.
#pragma once

#include <vector>

#include "interface.h"

namespace prefold {

// Tile t reads runs [run_offsets[t], run_offsets[t + 1]) and masked pairs likewise, each in ascending order.
struct TileLists {
  std::vector<int64_t> run_offsets{0}, mask_offsets{0};
  std::vector<Run> runs;
  std::vector<MaskedPair> masked;
};

// The same over slots, where tiles are not all of sixteen queries and a query may have keys of its own: tile t is
// queries [tile_starts[t], tile_starts[t + 1]), and query i also reads own runs [own_offsets[i], own_offsets[i + 1]).
struct SlotLists : TileLists {
  std::vector<int64_t> tile_starts{0}, own_offsets{0};
  std::vector<OwnRun> own;
};

}  // namespace prefold
