// Cuts the lists of a tile, or of a query, into chunks. The scores of a chunk stay in the nearest cache.
#pragma once

#include <algorithm>

#include "attention.h"

namespace prefold {

constexpr int kChunkPairs = 32;

// Some keys of a tile. Pairs with masks come after pairs without.
struct Chunk {
  int count = 0;     // pairs
  int unmasked = 0;  // the first `unmasked` pairs need no mask
  int32_t pair[kChunkPairs];
  uint32_t mask[kChunkPairs];
};

// A chunk in which pair p has the keys of places 2p and 2p + 1.
struct PlacedChunk : Chunk {
  int32_t key[2 * kChunkPairs];  // -1: no key
};
static_assert(kPlaces == 2 * kChunkPairs);

// Reads placed runs, or a query's own runs, in chunks.
template <class R>
class PlacedReader {
 public:
  PlacedReader(const R* run, const R* stop) : run_(run), run_stop_(stop) {}

  bool next(PlacedChunk& chunk) {
    if (run_ == run_stop_) return false;
    std::fill(chunk.key, chunk.key + kPlaces, -1);
    std::fill(chunk.mask, chunk.mask + kChunkPairs, 0u);
    int end = 0;
    do {
      const int place = place_of(*run_, end);
      if (place < end) break;
      const int take = std::min<int>(run_->count - used_, kPlaces - place);
      if (run_->first >= 0) {
        for (int i = 0; i < take; ++i) {
          chunk.key[place + i] = run_->first + used_ + i;
          chunk.mask[(place + i) / 2] |= queries_of(*run_) << ((place + i) & 1 ? 16 : 0);
        }
      }
      end = place + take;
      used_ += take;
      if (used_ == run_->count) ++run_, used_ = 0;
    } while (run_ != run_stop_ && end < kPlaces);
    chunk.count = (end + 1) / 2;
    chunk.unmasked = 0;
    while (chunk.unmasked < chunk.count && chunk.mask[chunk.unmasked] == 0xffffffff) ++chunk.unmasked;
    return true;
  }

 private:
  int place_of(const PlacedRun& run, int) const { return used_ ? 0 : run.place; }
  int place_of(const OwnRun&, int end) const { return end; }  // own runs are contiguous
  static uint32_t queries_of(const PlacedRun& run) { return run.queries; }
  static uint32_t queries_of(const OwnRun&) { return 1; }

  const R *run_, *run_stop_;
  int used_ = 0;  // keys of the current run
};

// Reads a tile's lists in chunks.
class ChunkReader {
 public:
  ChunkReader(const TileCall& call, int64_t tile)
      : run_(call.runs + call.run_offsets[tile]),
        run_stop_(call.runs + call.run_offsets[tile + 1]),
        masked_(call.masked + call.mask_offsets[tile]),
        masked_stop_(call.masked + call.mask_offsets[tile + 1]) {}

  bool next(Chunk& chunk) {
    int n = 0;
    while (n < kChunkPairs && run_ != run_stop_) {
      const int take = std::min(kChunkPairs - n, run_->count - used_);
      for (int i = 0; i < take; ++i) chunk.pair[n + i] = run_->first + used_ + i;
      n += take;
      used_ += take;
      if (used_ == run_->count) ++run_, used_ = 0;
    }
    chunk.unmasked = n;
    for (; n < kChunkPairs && masked_ != masked_stop_; ++n, ++masked_) {
      chunk.pair[n] = masked_->pair;
      chunk.mask[n] = masked_->mask;
    }
    chunk.count = n;
    return n > 0;
  }

 private:
  const Run *run_, *run_stop_;
  const MaskedPair *masked_, *masked_stop_;
  int used_ = 0;  // pairs of the current run
};

}  // namespace prefold
