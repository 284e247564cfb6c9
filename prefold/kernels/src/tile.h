// A task of the attention kernels: a tile of queries, and some heads that share a KV head.
#pragma once

#include <algorithm>

#include "attention.h"
#include "vectors.h"

namespace prefold {

constexpr int kMaxDim = 576;
constexpr int kMaxHeads = 4;  // of a task

// Vectors of sums in a register block. The remaining registers hold the factors.
constexpr int kAccumulators = kRegisters * 3 / 4;

// The largest power of two that is at most n.
constexpr int power_of_two(int n) {
  int size = 1;
  while (size * 2 <= n) size *= 2;
  return size;
}

struct Tile {
  int64_t number, first_query, kv_head, first_head;
  int queries, heads;
  int stride;  // lanes from one head to the next; at least `queries`

  template <class Element>
  const Element* query(const TileCall& call, int query, int head) const {
    return static_cast<const Element*>(call.q) + (first_query + query) * call.q_row + (first_head + head) * call.q_head;
  }

  template <class Element>
  Element* result(const TileCall& call, int query, int head) const {
    return static_cast<Element*>(call.out) + ((first_query + query) * call.heads + first_head + head) * call.value_dim;
  }
};

// Walks through the lanes of vector `g`, with the query and the head of each.
struct LaneWalk {
  LaneWalk(const Tile& tile, int g) : query(g * kLanes % tile.stride), head(g * kLanes / tile.stride), tile_(tile) {}

  bool is_there() const { return query < tile_.queries && head < tile_.heads; }

  void next() {
    if (++query == tile_.stride) query = 0, ++head;
  }

  int query, head;

 private:
  const Tile& tile_;
};

}  // namespace prefold
