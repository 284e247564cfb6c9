// Writes the keys of a tile by their places. So the keys of a query are summed in the same portions, no matter which
// keys the tile's other queries see.
//
// The keys on a query's path are numbered from the root. Portion c has the keys [kPlaces * c, kPlaces * (c + 1)). A
// chunk has one portion of each of its queries. If the paths of two queries part within a portion, each query gets its
// own chunk for this portion, and both chunks contain the keys before the fork.
#pragma once

#include <algorithm>
#include <numeric>

#include "tile_writer.h"

namespace prefold {

class PlacedWriter {
 public:
  explicit PlacedWriter(TileLists& lists) : lists_(lists) {}

  // Add a piece of a tile of `count` queries, in any order. Keys on the same path must have different depths.
  void add(const PathPiece& piece, int count) {
    count_ = count;
    if (!piece.queries) return;
    if (!pieces_.empty()) {
      PathPiece& last = pieces_.back();
      if (last.queries == piece.queries && last.first + last.count == piece.first && last.stop() == piece.depth) {
        last.count += piece.count;
        return;
      }
    }
    pieces_.push_back(piece);
  }

  void finish() {
    const std::vector<PathPiece>& pieces = pieces_;
    order_.resize(pieces.size());
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) { return pieces[a].depth < pieces[b].depth; });
    open_.clear();
    size_t next = 0;
    for (int64_t portion = 0;;) {
      const auto has_ended = [&](const PathPiece& piece) { return piece.stop() <= portion * kPlaces; };
      open_.erase(std::remove_if(open_.begin(), open_.end(), has_ended), open_.end());
      if (open_.empty()) {
        if (next == order_.size()) break;
        portion = pieces[order_[next]].depth / kPlaces;
      }
      while (next < order_.size() && pieces[order_[next]].depth < (portion + 1) * kPlaces) {
        open_.push_back(pieces[order_[next++]]);
      }
      const PathPiece& one = open_.front();
      if (open_.size() == 1 && one.depth <= portion * kPlaces) {  // the only open piece, for whole portions
        int64_t stop = one.stop() / kPlaces;
        if (next < order_.size()) stop = std::min(stop, pieces[order_[next]].depth / kPlaces);
        if (stop > portion) {
          append(one.first + portion * kPlaces - one.depth, (stop - portion) * kPlaces, 0, one.queries);
          portion = stop;
          continue;
        }
      }
      write_portion(portion);
      ++portion;
    }
    pieces_.clear();
    lists_.finish_tile();
  }

 private:
  struct Group {
    int32_t key[kPlaces];  // -1: none
    uint32_t queries[kPlaces];
  };

  // Queries share a chunk if they see the same key at each place at which both see a key.
  void write_portion(int64_t portion) {
    groups_.clear();
    for (int r = 0; r < count_; ++r) {
      const uint32_t bit = 1u << r;
      if (std::none_of(open_.begin(), open_.end(), [&](const PathPiece& piece) { return piece.queries & bit; }))
        continue;
      const auto fits = [&](const Group& group) {
        return each_key(portion, bit,
                        [&](int64_t place, int64_t key) { return group.key[place] < 0 || group.key[place] == key; });
      };
      auto group = std::find_if(groups_.begin(), groups_.end(), fits);
      if (group == groups_.end()) {
        groups_.emplace_back();
        group = groups_.end() - 1;
        std::fill(group->key, group->key + kPlaces, -1);
        std::fill(group->queries, group->queries + kPlaces, 0u);
      }
      each_key(portion, bit, [&](int64_t place, int64_t key) {
        group->key[place] = static_cast<int32_t>(key);
        group->queries[place] |= bit;
        return true;
      });
    }
    for (const Group& group : groups_) {
      for (int place = 0, stop; place < kPlaces; place = stop) {
        stop = place + 1;
        if (group.key[place] < 0) continue;
        while (stop < kPlaces && group.key[stop] == group.key[place] + stop - place &&
               group.queries[stop] == group.queries[place]) {
          ++stop;
        }
        append(group.key[place], stop - place, place, group.queries[place]);
      }
    }
  }

  // Return whether body(place, key) is true for all keys of a portion that the query `bit` sees.
  template <class Body>
  bool each_key(int64_t portion, uint32_t bit, const Body& body) const {
    const int64_t begin = portion * kPlaces;
    for (const PathPiece& piece : open_) {
      if (!(piece.queries & bit)) continue;
      const int64_t stop = std::min(piece.stop(), begin + kPlaces);
      for (int64_t depth = std::max(piece.depth, begin); depth < stop; ++depth) {
        if (!body(depth - begin, piece.first + depth - piece.depth)) return false;
      }
    }
    return true;
  }

  void append(int64_t first, int64_t count, int64_t place, uint32_t queries) {
    // Lanes past the last query are never stored. Let them see all keys, so that a run that all queries see has no
    // mask.
    lists_.placed.push_back({static_cast<int32_t>(first), static_cast<int32_t>(count), static_cast<int32_t>(place),
                             queries == (1u << count_) - 1 ? kAllQueries : queries});
  }

  TileLists& lists_;
  int count_ = 0;
  std::vector<PathPiece> pieces_;
  std::vector<int> order_;
  std::vector<PathPiece> open_;
  std::vector<Group> groups_;
};

}  // namespace prefold
