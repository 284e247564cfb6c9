// Plans attention over slots: cuts the queries into tiles. Keys that many queries of a tile see go into the tile's
// lists, other keys into the lists of single queries.
//
// The plan does not change the result, only the time. The unit of all costs is one key for one vector of a tile, which
// has sixteen lanes.
#include <algorithm>
#include <new>
#include <numeric>

#include "interface.h"
#include "placed_writer.h"
#include "tile.h"

namespace prefold {
namespace {

// The cost of a key in a query's own list: kOwnKey, plus kOwnHead per head. It decides how many of a tile's sixteen
// queries must see a key for it to go into the tile's lists: 5, 8, 10 or 11 if one, two, three or four heads share a KV
// head. Measured on a Zen 4 core with K/V in its caches, for one to four heads (one unit is 21 ns): bfloat16 with 64
// dimensions 0.24, 0.27, 0.34 and 0.43; with 128 dimensions 0.19, 0.23, 0.27 and 0.36; float32 0.19, 0.24, 0.30 and
// 0.33.
constexpr float kOwnKey = 0.15f, kOwnHead = 0.05f;
// The extra cost of the first key: per vector of a tile, and for a query's own list. Measured in the same way.
constexpr float kTileStart = 20, kOwnStart = 6;
// If keys have places, a query's own keys run through the loop for tiles, as a tile of one query.
constexpr float kOwnPlaced = 1;

// The `KeyRuns` of the attention package (slot_plan.py).
struct SlotRequest {
  const int64_t *start, *count, *position, *first, *last;
  int64_t runs, queries;
  const int64_t* query_positions;  // null: no window
  int64_t window, group;
  bool placed;
};

// Keys in consecutive slots at consecutive positions. Key j is seen by the queries [first + j * step, last). The new
// rows of a prompt are one chain of step 1.
struct Chain {
  int64_t slot, count, position, first, last;
  int step;
};

// The slots [slot, slot + count) at positions from `position` on, seen by the queries in `mask`.
struct Piece {
  int64_t slot, count, position;
  uint32_t mask;
  bool shared = false;  // belongs to the tile's lists, not to the lists of its queries

  float queries() const { return static_cast<float>(__builtin_popcount(mask)); }
};

class SlotPlanner {
 public:
  SlotPlanner(const SlotRequest& request, SlotLists& lists)
      : request_(request), lists_(lists), writer_(lists), placed_writer_(lists) {
    // Like the kernel: the heads of a group in parts of up to four.
    const int64_t parts = (request.group + kMaxHeads - 1) / kMaxHeads;
    heads_ = (request.group + parts - 1) / parts;
    own_key_ = request.placed ? kOwnPlaced : kOwnKey + kOwnHead * static_cast<float>(heads_);
    own_start_ = request.placed ? kTileStart : kOwnStart;
  }

  void plan() {
    find_chains();
    find_sharing();
    for (int64_t first = 0; first < request_.queries;) {
      const int64_t stop = tile_end(first);
      plan_tile(first, static_cast<int>(stop - first));
      first = stop;
    }
  }

 private:
  // Sort the runs by their first query, and join runs that continue each other.
  void find_chains() {
    std::vector<int64_t> order(request_.runs);
    std::iota(order.begin(), order.end(), 0);
    const auto earlier = [&](int64_t a, int64_t b) { return request_.first[a] < request_.first[b]; };
    if (!std::is_sorted(order.begin(), order.end(), earlier)) std::stable_sort(order.begin(), order.end(), earlier);
    for (const int64_t i : order) {
      const Chain next{request_.start[i], request_.count[i], request_.position[i],
                       request_.first[i], request_.last[i],  0};
      if (chains_.empty() || !join(chains_.back(), next)) chains_.push_back(next);
    }
  }

  static bool join(Chain& chain, const Chain& next) {
    if (next.slot != chain.slot + chain.count || next.position != chain.position + chain.count ||
        next.last != chain.last) {
      return false;
    }
    if (next.first == chain.first && chain.step == 0) {
      chain.count += next.count;
      return true;
    }
    if (next.count == 1 && next.first == chain.first + chain.count && (chain.step == 1 || chain.count == 1)) {
      chain.step = 1;
      ++chain.count;
      return true;
    }
    return false;
  }

  // Count the keys that each query sees, and the keys that it shares with the query before it. With windows the counts
  // are estimates: only the choice of tiles depends on them.
  void find_sharing() {
    seen_.assign(request_.queries + 2, 0);
    common_.assign(request_.queries + 2, 0);
    for (int64_t i = 0; i < request_.runs; ++i) {
      const int64_t count = request_.count[i], first = request_.first[i], last = request_.last[i];
      seen_[first] += count;
      seen_[last] -= count;
      common_[first + 1] += count;
      common_[last] -= count;
    }
    for (int64_t i = 1; i < request_.queries; ++i) {
      seen_[i] += seen_[i - 1];
      common_[i] += common_[i - 1];
    }
    if (!request_.query_positions) return;
    for (int64_t i = 0; i < request_.queries; ++i) {
      seen_[i] = std::min(seen_[i], request_.window);
      common_[i] = std::min(common_[i], seen_[i]);
    }
  }

  // Return the end of the tile from `first` on: up to sixteen queries, or fewer if it is cheaper to cut between the two
  // neighbours that share the fewest keys.
  int64_t tile_end(int64_t first) const {
    int64_t stop = std::min<int64_t>(first + kTile, request_.queries);
    while (stop - first > 1) {
      int64_t cut = stop - 1;
      for (int64_t i = stop - 2; i > first; --i) {
        if (common_[i] < common_[cut]) cut = i;
      }
      if (cost(first, cut) + cost(cut, stop) + kTileStart >= cost(first, stop)) break;
      stop = cut;
    }
    return stop;
  }

  // The number of vectors in a tile of `queries` queries.
  float vectors(int64_t queries) const { return static_cast<float>((queries * heads_ + kLanes - 1) / kLanes); }

  // Estimate the cost of queries [first, stop) as one tile. The keys that neighbours share tell how many queries see
  // how many keys, as in a suffix array. The stack has the keys that are open at the current query.
  float cost(int64_t first, int64_t stop) const {
    const float tile_key = vectors(stop - first);
    float total = 0, saved = 0;
    struct {
      int64_t keys, first;
    } open[kTile + 1];
    int depth = 0;
    const auto close = [&](int64_t keys, int64_t at) {
      for (; depth > 0 && open[depth - 1].keys > keys; --depth) {
        auto& top = open[depth - 1];
        const int64_t below = depth > 1 ? open[depth - 2].keys : 0;
        const float count = static_cast<float>(top.keys - std::max(below, keys));
        const float own_keys = static_cast<float>(at - top.first) * own_key_;
        total += count * own_keys;
        saved += count * std::max(own_keys - tile_key, 0.0f);
        if (below < keys) {
          top.keys = keys;
          return;
        }
      }
    };
    for (int64_t i = first; i < stop; ++i) {
      if (i > first) close(common_[i], i);
      if (seen_[i] > (depth ? open[depth - 1].keys : 0)) open[depth++] = {seen_[i], i};
    }
    close(0, stop);
    return total - std::max(saved - kTileStart * tile_key, 0.0f);
  }

  void plan_tile(int64_t first, int count) {
    find_pieces(first, count);
    const bool split = choose_lists(count);
    if (request_.placed) {
      place_tile(first, count, split);
    } else if (split) {
      for (const Piece& piece : pieces_) {
        if (piece.shared) writer_.add({piece.slot, piece.count, piece.position, piece.mask}, count);
      }
      for (int r = 0; r < count; ++r) add_own_runs(r, true);
      finish_tile(first + count);
    } else {
      for (int r = 0; r < count; ++r) {
        add_own_runs(r, false);
        finish_tile(first + r + 1);
      }
    }
  }

  // Plan a tile whose keys have places. On a query's path, the keys in the tile's lists come first. They end with a
  // whole portion of kPlaces keys, unless they are all of the query's keys.
  void place_tile(int64_t first, int count, bool split) {
    int64_t limit[kTile] = {};  // the first position of a query's own keys
    if (split) {
      // Keys before a shared piece on a path are shared too.
      uint32_t below = 0;
      for (auto piece = pieces_.rbegin(); piece != pieces_.rend(); ++piece) {
        piece->shared |= (piece->mask & below) != 0;
        if (piece->shared) below |= piece->mask;
      }
      for (int r = 0; r < count; ++r) {
        bool all = true;
        for (const Piece& piece : pieces_) {
          if (!(piece.mask >> r & 1)) continue;
          if (piece.shared) limit[r] = piece.position + piece.count;
          all &= piece.shared;
        }
        if (!all) limit[r] = limit[r] / kPlaces * kPlaces;
      }
      for (const Piece& piece : pieces_) {
        // Cut the piece at the limits of its queries.
        for (int64_t from = piece.position, stop = from + piece.count; piece.shared && from < stop;) {
          uint32_t queries = 0;
          int64_t to = stop;
          for (uint32_t left = piece.mask; left; left &= left - 1) {
            const int r = __builtin_ctz(left);
            if (limit[r] <= from) continue;
            queries |= 1u << r;
            to = std::min(to, limit[r]);
          }
          placed_writer_.add({piece.slot + from - piece.position, to - from, from, queries}, count);
          from = to;
        }
      }
      for (int r = 0; r < count; ++r) add_placed_runs(r, limit[r]);
      placed_writer_.finish();
      lists_.tile_starts.push_back(first + count);
      return;
    }
    for (int r = 0; r < count; ++r) {
      add_placed_runs(r, 0);
      placed_writer_.finish();
      lists_.tile_starts.push_back(first + r + 1);
    }
  }

  // Write the own list of the tile's query r: its keys from position `limit` on, after a gap up to the first key's
  // place.
  void add_placed_runs(int r, int64_t limit) {
    bool fresh = true;
    for (const Piece& piece : pieces_) {
      const int64_t skip = std::max<int64_t>(0, limit - piece.position);
      if (!(piece.mask >> r & 1) || skip >= piece.count) continue;
      if (const int64_t place = (piece.position + skip) % kPlaces; fresh && place)
        lists_.own.push_back({-1, static_cast<int32_t>(place)});
      add_own_run(piece.slot + skip, piece.count - skip, fresh);
      fresh = false;
    }
    lists_.own_offsets.push_back(static_cast<int64_t>(lists_.own.size()));
  }

  // Append slots to the own list of a query. fresh: the list is empty.
  void add_own_run(int64_t slot, int64_t count, bool fresh) {
    std::vector<OwnRun>& own = lists_.own;
    if (!fresh && own.back().first + own.back().count == slot) {
      own.back().count += static_cast<int32_t>(count);
    } else {
      own.push_back({static_cast<int32_t>(slot), static_cast<int32_t>(count)});
    }
  }

  // Choose the pieces for the tile's lists. Return false if it is best to put no piece there.
  bool choose_lists(int count) {
    const float tile_key = vectors(count);
    // The saving of each query if it gets its own list. It must exceed the cost of starting one.
    float saved[kTile] = {};
    for (const Piece& piece : pieces_) {
      const float queries = piece.queries(), gain = tile_key - queries * own_key_;
      if (gain <= 0) continue;
      for (uint32_t left = piece.mask; left; left &= left - 1) {
        saved[__builtin_ctz(left)] += static_cast<float>(piece.count) * gain / queries;
      }
    }
    uint32_t own = 0;
    for (int r = 0; r < count; ++r) own |= static_cast<uint32_t>(saved[r] > own_start_) << r;
    float all = own_start_ * static_cast<float>(count);
    float split = kTileStart * tile_key + own_start_ * static_cast<float>(__builtin_popcount(own));
    for (Piece& piece : pieces_) {
      const float keys = static_cast<float>(piece.count), own_keys = piece.queries() * own_key_;
      piece.shared = own_keys >= tile_key || (piece.mask & ~own) != 0;
      all += keys * own_keys;
      split += keys * (piece.shared ? tile_key : own_keys);
    }
    return split < all;
  }

  // Find the keys that queries [first, first + count) see.
  void find_pieces(int64_t first, int count) {
    pieces_.clear();
    const auto has_ended = [&](const Chain& chain) { return chain.last <= first; };
    open_.erase(std::remove_if(open_.begin(), open_.end(), has_ended), open_.end());
    for (; next_ < chains_.size() && chains_[next_].first < first + count; ++next_) open_.push_back(chains_[next_]);
    int64_t nearest = 0, farthest = 0;
    if (request_.query_positions) {
      const int64_t* at = request_.query_positions + first;
      const auto [low, high] = std::minmax_element(at, at + count);
      nearest = *low - request_.window;
      farthest = *high - request_.window;
    }
    for (const Chain& chain : open_) {
      const int64_t from = std::max<int64_t>(chain.first - first, 0), to = std::min<int64_t>(chain.last - first, count);
      if (from >= to) continue;
      const uint32_t mask = ((1u << to) - 1) & ~((1u << from) - 1);
      if (!request_.query_positions || chain.position > farthest) {
        if (chain.step == 0) {
          pieces_.push_back({chain.slot, chain.count, chain.position, mask});
        } else {
          cut_pieces(chain, first, mask);
        }
      } else if (chain.position + chain.count - 1 > nearest) {
        cut_pieces(chain, first, mask);
      }
    }
  }

  // Cut a chain into pieces if the queries in `mask` do not all see the same keys of it. A query sees the keys from the
  // edge of its window up to itself.
  void cut_pieces(const Chain& chain, int64_t first, uint32_t mask) {
    int64_t from[kTile], to[kTile], cuts[2 * kTile];
    int num_cuts = 0;
    for (uint32_t left = mask; left; left &= left - 1) {
      const int r = __builtin_ctz(left);
      from[r] = 0;
      to[r] = chain.step ? std::min(chain.count, first + r - chain.first + 1) : chain.count;
      if (request_.query_positions) {
        const int64_t nearest = request_.query_positions[first + r] - request_.window;
        from[r] = std::clamp<int64_t>(nearest - chain.position + 1, 0, to[r]);
      }
      cuts[num_cuts++] = from[r];
      cuts[num_cuts++] = to[r];
    }
    std::sort(cuts, cuts + num_cuts);
    for (int i = 0; i + 1 < num_cuts; ++i) {
      if (cuts[i] == cuts[i + 1]) continue;
      uint32_t seen = 0;
      for (uint32_t left = mask; left; left &= left - 1) {
        const int r = __builtin_ctz(left);
        seen |= static_cast<uint32_t>(from[r] <= cuts[i] && cuts[i] < to[r]) << r;
      }
      if (seen) pieces_.push_back({chain.slot + cuts[i], cuts[i + 1] - cuts[i], chain.position + cuts[i], seen});
    }
  }

  // Write the own list of the tile's query r: all of its keys, or only the keys that are not shared.
  void add_own_runs(int r, bool but_shared) {
    const std::vector<OwnRun>& own = lists_.own;
    for (const Piece& piece : pieces_) {
      if (!(piece.mask >> r & 1) || (but_shared && piece.shared)) continue;
      add_own_run(piece.slot, piece.count, static_cast<int64_t>(own.size()) == lists_.own_offsets.back());
    }
    lists_.own_offsets.push_back(static_cast<int64_t>(own.size()));
  }

  void finish_tile(int64_t stop) {
    writer_.finish();
    lists_.tile_starts.push_back(stop);
  }

  const SlotRequest& request_;
  SlotLists& lists_;
  TileWriter writer_;
  PlacedWriter placed_writer_;
  int64_t heads_;                     // of a task
  float own_key_, own_start_;         // costs for all heads of a task
  std::vector<Chain> chains_, open_;  // all chains; the chains that the current tile may see
  size_t next_ = 0;
  std::vector<int64_t> seen_, common_;
  std::vector<Piece> pieces_;
};

}  // namespace
extern "C" SlotLists* prefold_plan_slots(const int64_t* start, const int64_t* count, const int64_t* position,
                                         const int64_t* first, const int64_t* last, int64_t runs, int64_t queries,
                                         const int64_t* query_positions, int64_t window, int64_t group,
                                         int32_t placed) {
  SlotLists* lists = nullptr;
  try {
    lists = new SlotLists;
    const SlotRequest request{start,   count,           position, first, last,       runs,
                              queries, query_positions, window,   group, placed != 0};
    SlotPlanner(request, *lists).plan();
    return lists;
  } catch (const std::bad_alloc&) {
    delete lists;
    return nullptr;
  }
}

extern "C" void prefold_slot_list_sizes(const SlotLists* lists, int64_t* sizes) {
  sizes[0] = static_cast<int64_t>(lists->tile_starts.size()) - 1;
  sizes[1] = static_cast<int64_t>(lists->runs.size());
  sizes[2] = static_cast<int64_t>(lists->masked.size());
  sizes[3] = static_cast<int64_t>(lists->placed.size());
  sizes[4] = static_cast<int64_t>(lists->own.size());
}

extern "C" void prefold_copy_slot_lists(const SlotLists* lists, int64_t* run_offsets, int64_t* mask_offsets, Run* runs,
                                        MaskedPair* masked, int64_t* placed_offsets, PlacedRun* placed,
                                        int64_t* tile_starts, int64_t* own_offsets, OwnRun* own) {
  std::copy(lists->tile_starts.begin(), lists->tile_starts.end(), tile_starts);
  std::copy(lists->run_offsets.begin(), lists->run_offsets.end(), run_offsets);
  std::copy(lists->mask_offsets.begin(), lists->mask_offsets.end(), mask_offsets);
  std::copy(lists->own_offsets.begin(), lists->own_offsets.end(), own_offsets);
  std::copy(lists->runs.begin(), lists->runs.end(), runs);
  std::copy(lists->masked.begin(), lists->masked.end(), masked);
  std::copy(lists->placed_offsets.begin(), lists->placed_offsets.end(), placed_offsets);
  std::copy(lists->placed.begin(), lists->placed.end(), placed);
  std::copy(lists->own.begin(), lists->own.end(), own);
}

extern "C" void prefold_free_slot_lists(SlotLists* lists) { delete lists; }

}  // namespace prefold
