// Writes the lists of a tile.
#pragma once

#include "tiles.h"

namespace prefold {

constexpr int kTile = 16;
constexpr uint32_t kAllQueries = 0xffff;

// Keys [first, first + count) at the depths [depth, depth + count) below the root, seen by the queries in `queries`.
struct PathPiece {
  int64_t first, count, depth;
  uint32_t queries;

  int64_t stop() const { return depth + count; }
};

// Turns the keys of a tile of `count` queries into its runs and masked pairs. Ascending keys make the shortest lists.
class TileWriter {
 public:
  explicit TileWriter(TileLists& lists) : lists_(lists) {}

  void add(const PathPiece& piece, int count) {
    // Lanes past the last query are never stored. Let them see all keys, so that these keys become a run.
    if (piece.queries == (1u << count) - 1) return add_run(piece.first, piece.first + piece.count);
    for (int64_t i = 0; i < piece.count; ++i) add_key(piece.first + i, piece.queries);
  }

  void add_key(int64_t key, uint32_t mask) {
    const int32_t pair = static_cast<int32_t>(key >> 1);
    if (pair != last_.pair) flush();
    last_.pair = pair;
    last_.mask |= mask << (key & 1 ? 16 : 0);
  }

  // Add the keys [first, stop), which every query sees.
  void add_run(int64_t first, int64_t stop) {
    if (first < stop && (first & 1)) add_key(first++, kAllQueries);
    if (const int64_t pairs = (stop - first) / 2; pairs > 0) {
      flush();
      append(static_cast<int32_t>(first >> 1), static_cast<int32_t>(pairs));
      first += 2 * pairs;
    }
    if (first < stop) add_key(first, kAllQueries);
  }

  void finish() {
    flush();
    lists_.finish_tile();
  }

 private:
  void flush() {
    if (last_.mask == 0xffffffff) {
      append(last_.pair, 1);
    } else if (last_.mask != 0) {
      lists_.masked.push_back(last_);
    }
    last_ = {-1, 0};
  }

  void append(int32_t first, int32_t count) {
    std::vector<Run>& runs = lists_.runs;
    const bool fresh = static_cast<int64_t>(runs.size()) == lists_.run_offsets.back();
    if (!fresh && runs.back().first + runs.back().count == first) {
      runs.back().count += count;
    } else {
      runs.push_back({first, count});
    }
  }

  TileLists& lists_;
  MaskedPair last_{-1, 0};
};

}  // namespace prefold
