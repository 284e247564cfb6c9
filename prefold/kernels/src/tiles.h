// Which keys each tile of up to sixteen queries reads.
#pragma once

#include <cstdint>
#include <vector>

namespace prefold {

// Keys are listed as aligned pairs (2p, 2p + 1): bfloat16 instructions take two keys at once.
// A run is pairs [first, first + count) that every query of the tile sees.
struct Run {
  int32_t first, count;
};

// A pair of which some query sees some key: bit r of `mask` says that query r sees key 2p,
// bit 16 + r that it sees key 2p + 1.
struct MaskedPair {
  int32_t pair;
  uint32_t mask;
};

// Slots [first, first + count), which one query sees.
struct OwnRun {
  int32_t first, count;
};

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
