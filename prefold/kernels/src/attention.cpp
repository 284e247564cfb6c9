// softmax(q k^T * scale) v. Each query attends over the keys in its tile's lists, and over the keys in its own list.
//
// A task is one tile of up to sixteen queries and up to four heads that share a KV head.
#include <vector>

#include "interface.h"
#include "own_keys.h"
#include "pack.h"
#include "tile_keys.h"

namespace prefold {
namespace {

bool has_lists(const TileCall& call, int64_t tile) {
  if (call.placed_offsets) return call.placed_offsets[tile] != call.placed_offsets[tile + 1];
  return call.run_offsets[tile] != call.run_offsets[tile + 1] || call.mask_offsets[tile] != call.mask_offsets[tile + 1];
}

template <class Format>
struct Tasks {
  const TileCall& call;
  const Packed<Format>& packed;

  void run(const Tile& tile) const {
    const int vectors = (tile.heads * tile.stride + kLanes - 1) / kLanes;
    using Function = void (Tasks::*)(const Tile&) const;
    static constexpr Function kRun[] = {&Tasks::run_lists<1>, &Tasks::run_lists<2>, &Tasks::run_lists<3>,
                                        &Tasks::run_lists<4>};
    static constexpr Function kRunPlaced[] = {&Tasks::run_placed<1>, &Tasks::run_placed<2>, &Tasks::run_placed<3>,
                                              &Tasks::run_placed<4>};
    if (call.placed_offsets) {
      has_lists(call, tile.number) ? (this->*kRunPlaced[vectors - 1])(tile) : run_own_placed<1>(tile, nullptr);
    } else if (has_lists(call, tile.number)) {
      (this->*kRun[vectors - 1])(tile);
    } else {
      go_on(tile, nullptr);
    }
  }

  template <int V>
  void run_placed(const Tile& tile) const {
    TileKeys<Format, V> keys(call, packed, tile);
    keys.begin();
    keys.go_on(PlacedReader<PlacedRun>(call.placed + call.placed_offsets[tile.number],
                                       call.placed + call.placed_offsets[tile.number + 1]));
    if (has_own(tile)) {
      run_own_placed<V>(tile, &keys);
    } else {
      keys.store_out();
    }
  }

  // Run each query as a tile of its own. keys: the sums so far, or null.
  template <int V>
  void run_own_placed(const Tile& tile, const TileKeys<Format, V>* keys) const {
    for (int query = 0; query < tile.queries; ++query) {
      const Tile one{tile.number, tile.first_query + query, tile.kv_head, tile.first_head, 1, tile.heads, 1};
      TileKeys<Format, 1> own(call, packed, one);
      keys ? own.begin(*keys, query) : own.begin();
      const int64_t* offset = call.own_offsets + one.first_query;
      own.go_on(PlacedReader<OwnRun>(call.own + offset[0], call.own + offset[1]));
      own.store_out();
    }
  }

  template <int V>
  void run_lists(const Tile& tile) const {
    TileKeys<Format, V> keys(call, packed, tile);
    keys.run();
    if (has_own(tile)) {
      const TileSums sums = keys.turn_out();
      go_on(tile, &sums);
    } else {
      keys.store_out();
    }
  }

  bool has_own(const Tile& tile) const {
    return call.own_offsets && call.own_offsets[tile.first_query] != call.own_offsets[tile.first_query + tile.queries];
  }

  void go_on(const Tile& tile, const TileSums* sums) const {
    using Function = void (Tasks::*)(const Tile&, const TileSums*) const;
    static constexpr Function kRun[] = {&Tasks::run_own<1>, &Tasks::run_own<2>, &Tasks::run_own<3>, &Tasks::run_own<4>};
    (this->*kRun[tile.heads - 1])(tile, sums);
  }

  template <int H>
  void run_own(const Tile& tile, const TileSums* sums) const {
    OwnKeys<Format, H> keys(call, packed, tile);
    for (int query = 0; query < tile.queries; ++query) keys.run(query, sums);
  }
};

// Return the number of threads that pay off for this work.
int useful_threads(const TileCall& call) {
  int64_t pairs = call.mask_offsets[call.tiles];
  for (int64_t i = 0; i < call.run_offsets[call.tiles]; ++i) pairs += call.runs[i].count;
  int64_t keys = pairs * 2 * kLanes;  // times the queries that see them
  if (call.placed_offsets) {
    for (int64_t i = 0; i < call.placed_offsets[call.tiles]; ++i) keys += call.placed[i].count * kLanes;
  }
  if (call.own_offsets) {
    for (int64_t i = 0; i < call.own_offsets[call.queries]; ++i) keys += call.own[i].count;
  }
  return static_cast<int>(
      std::min<int64_t>(call.threads, 1 + keys * call.heads * (call.dim + call.value_dim) / kProductsPerThread));
}

Tile tile_of(const TileCall& call, int64_t number) {
  Tile tile;
  tile.number = number;
  if (call.tile_starts) {
    tile.first_query = call.tile_starts[number];
    tile.stride = tile.queries = static_cast<int>(call.tile_starts[number + 1] - tile.first_query);
  } else {
    tile.first_query = number * kLanes;
    tile.queries = static_cast<int>(std::min<int64_t>(kLanes, call.queries - tile.first_query));
    tile.stride = kLanes;
  }
  return tile;
}

// Order the tiles. First the tiles with lists, in descending order: later tiles see more keys, and no thread should
// start a long task at the end. Then the tiles whose queries have only own keys, in ascending order: neighbouring
// sequences tend to have neighbouring slots, which the hardware prefetches.
std::vector<Tile> tiles_in_order(const TileCall& call) {
  std::vector<Tile> tiles;
  tiles.reserve(call.tiles);
  for (int64_t i = call.tiles - 1; i >= 0; --i) {
    if (has_lists(call, i)) tiles.push_back(tile_of(call, i));
  }
  for (int64_t i = 0; i < call.tiles; ++i) {
    if (!has_lists(call, i)) tiles.push_back(tile_of(call, i));
  }
  return tiles;
}

template <class Format>
void attend(const TileCall& call, const Packed<Format>& packed) {
  // The heads of a group in parts of up to four, of about equal size.
  const int64_t group = call.heads / call.kv_heads;
  const int64_t parts = (group + kMaxHeads - 1) / kMaxHeads;
  const std::vector<Tile> tiles = tiles_in_order(call);
  const Tasks<Format> tasks{call, packed};
  // One KV head after the other, because neighbouring tasks then share its keys.
  parallel_tasks(call.tiles * call.kv_heads * parts, useful_threads(call), [&](int64_t i) {
    Tile tile = tiles[i % call.tiles];
    const int64_t part = i / call.tiles % parts, first = part * group / parts, stop = (part + 1) * group / parts;
    tile.kv_head = i / call.tiles / parts;
    tile.first_head = tile.kv_head * group + first;
    tile.heads = static_cast<int>(stop - first);
    tasks.run(tile);
  });
}

template <class Format>
void attend(const RowCall& call, Workspace& workspace) {
  attend(call.tiles, pack<Format>(call, workspace));
}

template <class Format>
void attend(const SlotCall& call) {
  attend(call.tiles, packed<Format>(call.plane));
}

}  // namespace
extern "C" int32_t prefold_row_attention(const RowCall* call, int32_t is_bf16) {
  if (call->tiles.queries == 0) return 0;
  thread_local Workspace workspace;
  try {
    if (is_bf16) {
      attend<InBf16>(*call, workspace);
    } else {
      attend<InFloat32<float>>(*call, workspace);
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

extern "C" int32_t prefold_slot_attention(const SlotCall* call, int32_t is_bf16) {
  if (call->tiles.queries == 0) return 0;
  try {
    if (is_bf16) {
      attend<InBf16Slots>(*call);
    } else if (call->plane.rounded) {
      attend<InFloat32<float, Bf16>>(*call);
    } else {
      attend<InFloat32<float>>(*call);
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

}  // namespace prefold
