// A tile's lists dealt out in chunks: so many keys that their scores stay in the nearest cache.
#pragma once

#include <algorithm>

#include "attention.h"

namespace prefold {

constexpr int kChunkPairs = 32;

// Some keys of a tile. Pairs that need masks come after those that do not.
struct Chunk {
  int count = 0;     // pairs
  int unmasked = 0;  // the first so many need no mask
  int32_t pair[kChunkPairs];
  uint32_t mask[kChunkPairs];
};

// Deals out a tile's lists in chunks.
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
