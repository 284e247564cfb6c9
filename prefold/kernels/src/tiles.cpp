// Plans attention over rows. The planner walks the keys once, depth-first, with a stack of the open keys. For each tile
// of sixteen queries it writes the keys that all of them see, and with masks the keys that only some see. The keys of a
// span (an image, whose rows see each other both ways) open together, at the first row of the span.
//
// The stack holds the keys whose interval [j, end[j]) covers the current row. Intervals are nested, so the keys that
// end first lie on top. The keys that a whole tile sees are a contiguous part of the stack: long runs of consecutive
// keys. A key needs a mask only in the tiles in which it begins or ends, or crosses the edge of the window. So the
// lists stay short even if very many pairs are visible.
#include <algorithm>
#include <new>

#include "interface.h"
#include "placed_writer.h"

namespace prefold {
namespace {

// The arguments of a plan. first: null if there are no spans; positions: null if there is no window.
struct Request {
  const int64_t* end;
  int64_t keys;
  const int64_t* first;
  const int64_t* positions;
  int64_t window;

  // The first row that sees a key: the key's own row, or the first row of its span.
  int64_t first_of(int64_t key) const { return first ? first[key] : key; }
};

// The keys that are open at the current row, ascending. run_starts: the indices in `keys` at which a run of consecutive
// keys begins.
class OpenKeys {
 public:
  explicit OpenKeys(const Request& request) : request_(request) {}

  // Walk up to `row`, and on to the end of its span. Return false if a key ends after the key below it: not a trie.
  bool advance(int64_t row) {
    for (; next_ < request_.keys && request_.first_of(next_) <= row; ++next_) {
      while (!keys.empty() && request_.end[keys.back()] <= next_) pop();
      if (!keys.empty() && !nested(keys.back(), next_)) return false;
      if (keys.empty() || keys.back() != next_ - 1) run_starts.push_back(static_cast<int32_t>(keys.size()));
      keys.push_back(static_cast<int32_t>(next_));
    }
    return true;
  }

  // The first key that the walk has not reached.
  int64_t next() const { return next_; }

  std::vector<int32_t> keys, run_starts;

 private:
  void pop() {
    keys.pop_back();
    if (run_starts.back() == static_cast<int32_t>(keys.size())) run_starts.pop_back();
  }

  bool nested(int64_t outer, int64_t inner) const {
    return request_.end[inner] <= request_.end[outer] &&
           (!request_.positions || request_.positions[outer] < request_.positions[inner]);
  }

  const Request& request_;
  int64_t next_ = 0;
};

// Plans one tile. rows: the key rows of its queries, ascending.
class TilePlanner {
 public:
  TilePlanner(const Request& request, const int64_t* rows, int count) : request_(request), rows_(rows), count_(count) {
    if (!request.positions) return;
    const auto nearer = [&](int64_t a, int64_t b) { return request.positions[a] < request.positions[b]; };
    const auto [low, high] = std::minmax_element(rows, rows + count, nearer);
    nearest_start_ = request.positions[*low] - request.window;
    farthest_start_ = request.positions[*high] - request.window;
  }

  // Pass each key that a query may see to `sink`, then finish the tile.
  template <class Sink>
  bool plan(OpenKeys& open, Sink& sink) const {
    if (!open.advance(rows_[0])) return false;
    add_stack(open, sink);
    for (int r = 1; r < count_; ++r) {
      const int64_t seen = open.next();
      if (!open.advance(rows_[r])) return false;
      const auto fresh = std::lower_bound(open.keys.begin(), open.keys.end(), seen);
      add_keys(open, fresh - open.keys.begin(), static_cast<int64_t>(open.keys.size()), sink);
    }
    sink.finish();
    return true;
  }

 private:
  // Add the keys that the first query may see. From the bottom of the stack: keys outside of every window, keys that
  // some queries see, keys that all see, and on top the keys that end within the tile.
  template <class Sink>
  void add_stack(const OpenKeys& open, Sink& sink) const {
    const std::vector<int32_t>& keys = open.keys;
    const int64_t size = static_cast<int64_t>(keys.size());
    int64_t shared_stop = size;
    while (shared_stop > 0 && request_.end[keys[shared_stop - 1]] <= rows_[count_ - 1]) --shared_stop;
    const int64_t first = first_after(keys, nearest_start_);
    const int64_t shared = std::clamp(first_after(keys, farthest_start_), first, std::max(first, shared_stop));
    add_keys(open, first, shared, sink);
    add_runs(open, shared, shared_stop, sink);
    add_keys(open, std::max(shared, shared_stop), size, sink);
  }

  template <class Sink>
  void add_keys(const OpenKeys& open, int64_t first, int64_t stop, Sink& sink) const {
    for (int64_t i = first; i < stop; ++i) sink.add({open.keys[i], 1, i, queries(open.keys[i])}, count_);
  }

  // Add the part [first, stop) of the stack, which every query sees.
  template <class Sink>
  void add_runs(const OpenKeys& open, int64_t first, int64_t stop, Sink& sink) const {
    auto next = std::upper_bound(open.run_starts.begin(), open.run_starts.end(), first);
    while (first < stop) {
      const int64_t run_stop = next == open.run_starts.end() ? stop : std::min<int64_t>(*next++, stop);
      sink.add({open.keys[first], run_stop - first, first, (1u << count_) - 1}, count_);
      first = run_stop;
    }
  }

  // The first index in the stack whose position is above `position`. Positions ascend along a path.
  int64_t first_after(const std::vector<int32_t>& keys, int64_t position) const {
    if (!request_.positions) return 0;
    const auto before = [&](int32_t key) { return request_.positions[key] <= position; };
    return std::partition_point(keys.begin(), keys.end(), before) - keys.begin();
  }

  uint32_t queries(int64_t key) const {
    uint32_t bits = 0;
    for (int r = 0; r < count_; ++r) {
      bool sees = request_.first_of(key) <= rows_[r] && rows_[r] < request_.end[key];
      if (request_.positions) sees &= request_.positions[rows_[r]] - request_.positions[key] < request_.window;
      bits |= static_cast<uint32_t>(sees) << r;
    }
    return bits;
  }

  const Request& request_;
  const int64_t* rows_;
  const int count_;
  int64_t nearest_start_ = 0, farthest_start_ = 0;
};

}  // namespace
extern "C" TileLists* prefold_plan_rows(const int64_t* end, int64_t keys, const int64_t* first, const int64_t* rows,
                                        int64_t queries, const int64_t* positions, int64_t window, int32_t placed,
                                        int32_t* not_nested) {
  *not_nested = 0;
  TileLists* lists = nullptr;
  try {
    lists = new TileLists;
    const Request request{end, keys, first, positions, window};
    OpenKeys open(request);
    TileWriter writer(*lists);
    PlacedWriter placed_writer(*lists);
    for (int64_t first = 0; first < queries; first += kTile) {
      const int count = static_cast<int>(std::min<int64_t>(kTile, queries - first));
      const TilePlanner tile(request, rows + first, count);
      if (placed ? tile.plan(open, placed_writer) : tile.plan(open, writer)) continue;
      *not_nested = 1;
      delete lists;
      return nullptr;
    }
    return lists;
  } catch (const std::bad_alloc&) {
    delete lists;
    return nullptr;
  }
}

extern "C" void prefold_row_list_sizes(const TileLists* lists, int64_t* sizes) {
  sizes[0] = static_cast<int64_t>(lists->run_offsets.size()) - 1;
  sizes[1] = static_cast<int64_t>(lists->runs.size());
  sizes[2] = static_cast<int64_t>(lists->masked.size());
  sizes[3] = static_cast<int64_t>(lists->placed.size());
}

extern "C" void prefold_copy_row_lists(const TileLists* lists, int64_t* run_offsets, int64_t* mask_offsets, Run* runs,
                                       MaskedPair* masked, int64_t* placed_offsets, PlacedRun* placed) {
  std::copy(lists->run_offsets.begin(), lists->run_offsets.end(), run_offsets);
  std::copy(lists->mask_offsets.begin(), lists->mask_offsets.end(), mask_offsets);
  std::copy(lists->runs.begin(), lists->runs.end(), runs);
  std::copy(lists->masked.begin(), lists->masked.end(), masked);
  std::copy(lists->placed_offsets.begin(), lists->placed_offsets.end(), placed_offsets);
  std::copy(lists->placed.begin(), lists->placed.end(), placed);
}

extern "C" void prefold_free_row_lists(TileLists* lists) { delete lists; }

}  // namespace prefold
