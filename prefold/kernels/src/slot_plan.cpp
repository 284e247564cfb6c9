// Planning over slots: cuts the queries into tiles, and deals each tile's keys out to the tile's lists, for those
// that many of its queries see, and to the queries' own lists.
//
// Whatever the plan, the result is the same; what is decided here is how long it takes. The unit of all costs is
// one key in one vector of a tile, for sixteen lanes.
#include <algorithm>
#include <new>
#include <numeric>

#include "interface.h"
#include "placed_writer.h"
#include "tile.h"

namespace prefold {
namespace {

// What a key costs that a query reads from a list of its own: so much, and so much a head. That is where it is
// decided how many of a tile's queries must see a key for it to go into the tile's lists: of sixteen queries 5, 8, 10
// or 11 where one, two, three or four heads share a KV head. Measured on a Zen 4 core, K/V in its caches: in bfloat16
// with 64 dimensions 0.24, 0.27, 0.34 and 0.43 for one to four heads (a unit being 21 ns), with 128 dimensions 0.19,
// 0.23, 0.27 and 0.36; in float32 0.19, 0.24, 0.30 and 0.33.
constexpr float kOwnKey = 0.15f, kOwnHead = 0.05f;
// What the first key costs more, for each vector of a tile and for a query's own list; measured in the same way.
constexpr float kTileStart = 20, kOwnStart = 6;
// With places, a query's own keys go through the loop of the tiles, as a tile of one query.
constexpr float kOwnPlaced = 1;

// As KeyRuns of attention/slot_plan.py.
struct SlotRequest {
  const int64_t *start, *count, *position, *first, *last;
  int64_t runs, queries;
  const int64_t* query_positions;  // null: no window
  int64_t window, group;
  bool placed;
};

// Keys in neighbouring slots, at neighbouring positions: key j is seen by queries [first + j * step, last). New
// rows of a prompt are one chain of step 1.
struct Chain {
  int64_t slot, count, position, first, last;
  int step;
};

// Slots [slot, slot + count), at positions from `position` on, seen by the queries of `mask`.
struct Piece {
  int64_t slot, count, position;
  uint32_t mask;
  bool shared = false;  // goes into the tile's lists, not into those of its queries

  float queries() const { return static_cast<float>(__builtin_popcount(mask)); }
};

class SlotPlanner {
 public:
  SlotPlanner(const SlotRequest& request, SlotLists& lists)
      : request_(request), lists_(lists), writer_(lists), placed_writer_(lists) {
    // As in the kernel: the heads of a group in parts of up to four.
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
  // Runs by their first query, those that continue each other joined.
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

  // How many keys each query sees, and how many it has in common with the query before it; windows make that less,
  // which only the choice of tiles depends on.
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

  // Up to sixteen queries from `first` on; fewer where it is cheaper to cut at the place with the least in common.
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

  // Vectors of a tile of so many queries.
  float vectors(int64_t queries) const { return static_cast<float>((queries * heads_ + kLanes - 1) / kLanes); }

  // About what queries [first, stop) cost as one tile. How many keys are seen by how many of them follows from
  // what neighbours have in common, as in a suffix array: the keys of a stack are open at the current query.
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

  // As above. A query's keys stand along its path, first those in the tile's list, which end with a whole portion of
  // kPlaces keys unless they are all.
  void place_tile(int64_t first, int count, bool split) {
    int64_t limit[kTile] = {};  // the first position of a query's own keys
    if (split) {
      // What stands before a shared piece on a path is shared too.
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
        // A piece is cut at the limits of its queries.
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

  // The list of the tile's query r: what it sees from position `limit` on, behind a gap up to the first key's place.
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

  // Adds slots to the list of a query. fresh: the list is empty.
  void add_own_run(int64_t slot, int64_t count, bool fresh) {
    std::vector<OwnRun>& own = lists_.own;
    if (!fresh && own.back().first + own.back().count == slot) {
      own.back().count += static_cast<int32_t>(count);
    } else {
      own.push_back({static_cast<int32_t>(slot), static_cast<int32_t>(count)});
    }
  }

  // Decides which pieces go into the tile's lists; false where it is best that none does.
  bool choose_lists(int count) {
    const float tile_key = vectors(count);
    // What each query saves with a list of its own: it must be worth the beginning of one.
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

  // What queries [first, first + count) see.
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

  // The pieces of a chain of which the queries of `mask` do not all see the same keys: a query sees those from
  // the edge of its window up to itself.
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

  // The list of the tile's query r: all that it sees, or what is not shared.
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
  float own_key_, own_start_;         // costs for all of them
  std::vector<Chain> chains_, open_;  // all; those that began and have not ended
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
