// The keys that one query sees, but too few other queries of its tile. Dimensions lie on the lanes, and a task's heads
// are processed together, so each key is read once for all of them.
//
// The sums continue from the tile's lists, if it has lists. Scores, online softmax and values are computed chunk by
// chunk, as in tile_keys.h. A score is a sum across lanes. The scores of as many keys as a part has lanes are summed in
// one tree, which ends with one key per lane.
#pragma once

#include <cmath>

#include "formats.h"
#include "tile_keys.h"

namespace prefold {

constexpr int kOwnPairs = 32;  // per chunk
constexpr int64_t kLine = 64;  // bytes of a cache line

// Lane i of the result is x[i] + x[i ^ DISTANCE]. Lanes whose number has the bit DISTANCE use y instead of x.
template <int DISTANCE>
PREFOLD_INLINE Part<float> add_across(Part<float> x, Part<float> y) {
  const Part<int32_t> lane = lane_numbers(0);
  const Part<int32_t> upper = (lane & DISTANCE) != 0;
  return pick(x, y, upper ? lane + kPartLanes : lane) +
         pick(x, y, upper ? lane + (kPartLanes - DISTANCE) : lane + DISTANCE);
}

// One query and H heads, with their sums over the keys so far. Like TileQueries, it does not depend on how keys are
// stored.
template <class Format, int H>
class OneQuery {
  using Element = typename Format::Element;
  using Stored = typename Format::Stored;
  using Lane = typename Format::Lane;
  static constexpr int kWidth = Format::kWidth;

 protected:
  // Keys whose scores are summed at once, and parts of a result's dimensions that are.
  static constexpr int kKeys = power_of_two(std::min(kPartLanes, kAccumulators / H));
  static constexpr int kDimParts = power_of_two(kAccumulators / H);

 public:
  template <class F>
  OneQuery(const TileCall& call, const Packed<F>& packed, const Tile& tile)
      : call_(call),
        tile_(tile),
        dim_(packed.value_dim),
        value_row_(packed.value_row),
        key_bytes_(packed.key_size * sizeof(*packed.keys)),
        value_bytes_(packed.value_size * sizeof(*packed.keys)),
        steps_(static_cast<int>(packed.dim / kWidth)),
        dim_parts_(static_cast<int>(dim_ / kPartLanes)) {}

 protected:
  void begin(int query, const TileSums* sums) {
    for (int h = 0; h < H; ++h) {
      const int lane = h * tile_.stride + query;
      max_[h] = sums ? sums->max[lane] : -1e30f;
      sum_[h] = sums ? sums->sum[lane] : 0.0f;
      for (int b = 0; b < dim_ / kLanes; ++b) {
        Floats& out = out_[b * H + h];
        out = sums ? sums->out[(b * kLanes + lane % kLanes) * sums->vectors + lane / kLanes] : zeros();
      }
    }
  }

  void load_query(int query) {
    for (int h = 0; h < H; ++h) {
      const Element* row = tile_.template query<Element>(call_, query, h);
      for (int step = 0; step < steps_; step += kLanes) {
        query_at_[step / kLanes * H + h] = Format::load_row(row + step * kWidth, call_.dim - step * kWidth);
      }
    }
  }

  static PREFOLD_INLINE void fetch(const void* pair, int64_t bytes) {
    const char* at = static_cast<const char*>(pair);
    for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(at + i);
  }

  // scores_[head][key] = q . k
  void score() {
    for (int key = 0; key < 2 * pairs_; key += kPartLanes) score_part(key);
  }

  // Compute the scores of as many keys as a part has lanes. Skip blocks past the last key.
  PREFOLD_APART void score_part(int key) {
    for (int j = key / 2; j < std::min(key / 2 + kPartLanes / 2, pairs_); ++j) fetch(kept_value_at_[j], value_bytes_);
    constexpr int kBlocks = kPartLanes / kKeys;
    Part<float> block[kBlocks][H] = {};
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      if (key + b * kKeys < 2 * pairs_) score_block(key / 2 + b * kKeys / 2, block[b]);
    }
    for (int h = 0; h < H; ++h) {
      Part<float> column[kBlocks];
      for (int b = 0; b < kBlocks; ++b) column[b] = block[b][h];
      add_tree<kBlocks, kKeys>(column);
      memcpy(scores_ + h * 2 * kOwnPairs + key, column, sizeof column[0]);
    }
  }

  // Compute the sums of kKeys keys from pair `pair` on. Lane i has a partial sum for key i % kKeys.
  PREFOLD_INLINE void score_block(int pair, Part<float>* sums) {
    const Stored* const* keys = key_at_ + pair;
    const Part<Lane>* queries = reinterpret_cast<const Part<Lane>*>(query_at_);
    Part<float> acc[H][kKeys] = {};
    int d = 0, part = 0;
    for (; d + kPartLanes <= steps_; d += kPartLanes, ++part) {
      score_step<sizeof(Part<Lane>)>(keys, d, queries, part, acc);
    }
    if (d < steps_) score_step<sizeof(Part<Lane>) / 2>(keys, d, queries, part, acc);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      add_tree<kKeys, 1>(acc[h]);
      sums[h] = acc[h][0];
    }
  }

  // Multiply BYTES of each key from step `d` on. After them the query's numbers are zeros.
  template <size_t BYTES>
  PREFOLD_INLINE void score_step(const Stored* const* keys, int d, const Part<Lane>* queries, int part,
                                 Part<float> (*acc)[kKeys]) {
    Part<Lane> q[H];
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) q[h] = queries[(part / kParts * H + h) * kParts + part % kParts];
#pragma GCC unroll 16
    for (int i = 0; i < kKeys; ++i) {
      Part<Lane> k{};
      memcpy(&k, keys[i / 2] + (i & 1) * steps_ + d, BYTES);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) acc[h][i] = Format::mul_add(acc[h][i], q[h], k);
    }
  }

  // Sum COUNT vectors into the first one. Its lane i becomes a sum over vector i / SPAN % COUNT: of the COUNT lanes
  // whose distance from i is a multiple of SPAN, within the aligned group of SPAN * COUNT lanes. Both are powers of
  // two.
  template <int COUNT, int SPAN>
  static PREFOLD_INLINE void add_tree(Part<float>* x) {
    if constexpr (COUNT > 1) {
#pragma GCC unroll 8
      for (int i = 0; i < COUNT / 2; ++i) x[i] = add_across<COUNT / 2 * SPAN>(x[i], x[i + COUNT / 2]);
      add_tree<COUNT / 2, SPAN>(x);
    }
  }

  // See TileKeys; one head at a time.
  PREFOLD_APART void soften() {
    const Floats scale(call_.scale * 1.44269504f);  // exp(x) = 2^(x log2 e)
    for (int h = 0; h < H; ++h) {
      float* scores = scores_ + h * 2 * kOwnPairs;
      if (call_.cap > 0) {
        const Cap cap(call_);
        for (int i = 0; i < 2 * pairs_; i += kLanes) {
          const Floats capped = cap(load(scores + i));
          memcpy(scores + i, &capped, sizeof capped);
        }
      }
      Floats most(max_[h]);
      for (int i = 0; i < 2 * pairs_; i += kLanes) {
        most = choose(visible_ >> i, larger(load(scores + i), most), most);
      }
      const float top = max_of(most);
      const Floats rescale = exp2<true>(Floats(max_[h] - top) * scale);
      rescale_[h] = rescale.part[0][0];
      max_[h] = top;
      Floats sum = zeros();
      const Floats scaled_top = Floats(top) * scale;
      for (int i = 0; i < 2 * pairs_; i += kLanes) {
        const Floats p = choose(visible_ >> i, exp2<Format::kExactExp>(load(scores + i) * scale - scaled_top), zeros());
        sum += p;
        Format::store_in_order(probabilities(h) + i / kWidth, p);
      }
      sum_[h] = sum_[h] * rescale_[h] + sum_of(sum);
    }
  }

  Stored* probabilities(int head) { return probabilities_ + head * 2 * kOwnPairs / kWidth; }

  // out_ = out_ * rescale_ + p . v, for the dimensions from part `part` on: as many blocks of DIMS parts as fit, then
  // smaller blocks.
  template <int DIMS>
  PREFOLD_INLINE void add_values(int part) {
    for (; part + DIMS <= dim_parts_; part += DIMS) add_value_block<DIMS>(part);
    if constexpr (DIMS > 1) add_values<DIMS / 2>(part);
  }

  template <int DIMS>
  PREFOLD_APART void add_value_block(int first) {
    Part<float> acc[DIMS][H];
#pragma GCC unroll 16
    for (int i = 0; i < DIMS; ++i) {
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) acc[i][h] = out_part(first + i, h) * rescale_[h];
    }
    const Stored* p = probabilities_;
    for (int j = 0; j < pairs_; ++j) {
      if (first == 0) fetch(next_key_at_[j], key_bytes_);
      const Stored* v = value_at_[j] + first * kPartLanes;
#pragma GCC unroll 2
      for (int half = 0; half < 2 / kWidth; ++half, v += value_row_, ++p) {
        Stored weight[H];
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) weight[h] = p[h * 2 * kOwnPairs / kWidth];
#pragma GCC unroll 16
        for (int i = 0; i < DIMS; ++i) {
          Part<Lane> x;
          memcpy(&x, v + i * kPartLanes, sizeof x);
#pragma GCC unroll 4
          for (int h = 0; h < H; ++h) acc[i][h] = Format::mul_add(acc[i][h], x, weight[h]);
        }
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < DIMS; ++i) {
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) out_part(first + i, h) = acc[i][h];
    }
  }

  Part<float>& out_part(int part, int head) { return out_[part / kParts * H + head].part[part % kParts]; }

  // See TileKeys. For pairs in which the query does not see a value that is not finite.
  void add_values_by_choice() {
    for (int i = 0; i < dim_ / kLanes * H; ++i) out_[i] *= Floats(rescale_[i % H]);
    for (int key = 0; key < 2 * pairs_; ++key) {
      if (!(visible_ >> key & 1)) continue;
      const int pair = key / 2, half = key & 1;
      for (int h = 0; h < H; ++h) {
        const float p = Format::value(probabilities(h) + pair * (2 / kWidth), 1, 0, half);
        for (int64_t d = 0; d < dim_; ++d) {
          reinterpret_cast<float*>(&out_[d / kLanes * H + h])[d % kLanes] +=
              p * Format::value(value_at_[pair], value_row_, d, half);
        }
      }
    }
  }

  void store_out(int query) {
    for (int h = 0; h < H; ++h) {
      const float sink = call_.sinks ? std::exp(call_.sinks[tile_.first_head + h] - max_[h] * call_.scale) : 0.0f;
      const Floats inverse(1.0f / (sum_[h] + sink));
      Element* row = tile_.template result<Element>(call_, query, h);
      for (int d = 0; d < call_.value_dim; d += kLanes) {
        store_some(row + d, out_[d / kLanes * H + h] * inverse, call_.value_dim - d);
      }
    }
  }

  const TileCall& call_;
  const Tile& tile_;
  const int64_t dim_, value_row_, key_bytes_, value_bytes_;  // padded dimensions of values; value_row_: see Packed
  const int steps_, dim_parts_;
  int pairs_;
  uint64_t visible_;  // bit i: whether the query sees key i of the pairs
  const Stored *key_at_[kOwnPairs + kLanes], *value_at_[kOwnPairs];
  const void *kept_value_at_[kOwnPairs], *next_key_at_[kOwnPairs];  // to prefetch
  float max_[H], sum_[H], rescale_[H];
  float scores_[H * 2 * kOwnPairs];
  Stored probabilities_[H * 2 * kOwnPairs / kWidth];
  Vec<Lane> query_at_[kMaxDim / kWidth / kLanes * H];
  Floats out_[kMaxDim / kLanes * H];
};

// The keys in the own runs of one query, in packed memory.
template <class Format, int H>
class OwnKeys : public OneQuery<typename Format::Read, H> {
  using Base = OneQuery<typename Format::Read, H>;
  using Kept = typename Format::Kept;
  using Base::call_, Base::tile_, Base::pairs_, Base::visible_, Base::key_at_, Base::value_at_, Base::kept_value_at_,
      Base::next_key_at_, Base::kKeys, Base::kDimParts;

 public:
  OwnKeys(const TileCall& call, const Packed<Format>& packed, const Tile& tile)
      : Base(call, packed, tile), packed_(packed) {}

  // sums: of the tile's lists; null if the tile has no lists.
  void run(int query, const TileSums* sums) {
    const int64_t* offset = call_.own_offsets + tile_.first_query + query;
    run_ = call_.own + offset[0];
    run_stop_ = call_.own + offset[1];
    used_ = 0;
    this->begin(query, sums);
    if (run_ != run_stop_) {
      this->load_query(query);
      find_chunk(next_);
      while (next_.pairs) {
        take_chunk();
        this->score();
        this->soften();
        find_values();
        if (packed_.any_unsafe && has_unsafe()) {
          this->add_values_by_choice();
        } else {
          this->template add_values<kDimParts>(0);
        }
      }
    }
    this->store_out(query);
  }

 private:
  // Pairs of slots. Bit i of `visible`: the query sees key i of the pairs.
  struct Chunk {
    int pairs;
    uint64_t visible;
    int32_t pair[kOwnPairs];
  };

  // Find the next pairs of the query's runs. There are 0 pairs at the end.
  void find_chunk(Chunk& chunk) {
    chunk.pairs = 0;
    chunk.visible = 0;
    while (chunk.pairs < kOwnPairs && run_ != run_stop_) {
      const int first = run_->first + used_;
      const int take = std::min(2 * (kOwnPairs - chunk.pairs) - (first & 1), run_->count - used_);
      const int pairs = (first + take + 1) / 2 - first / 2;
      for (int i = 0; i < pairs; ++i) chunk.pair[chunk.pairs + i] = first / 2 + i;
      chunk.visible |= (~uint64_t{0} >> (64 - take)) << (2 * chunk.pairs + (first & 1));
      chunk.pairs += pairs;
      used_ += take;
      if (used_ == run_->count) ++run_, used_ = 0;
    }
  }

  // Move on to the chunk that was found, and find the next one. Its keys are prefetched while the values of this chunk
  // are summed: the hardware does not prefetch across the end of a page or a run.
  void take_chunk() {
    const Kept* keys = packed_.key_pairs(tile_.kv_head);
    const Kept* values = packed_.value_pairs(tile_.kv_head);
    pairs_ = next_.pairs;
    visible_ = next_.visible;
    for (int j = 0; j < pairs_; ++j) {
      pair_[j] = next_.pair[j];
      key_at_[j] = chunk_keys_.at(j, keys + pair_[j] * packed_.key_size, packed_.key_size);
      kept_value_at_[j] = values + pair_[j] * packed_.value_size;
    }
    // A register block of scores needs a whole number of keys.
    for (int j = pairs_; j % (kKeys / 2) != 0; ++j) key_at_[j] = key_at_[pairs_ - 1];
    find_chunk(next_);
    for (int j = 0; j < next_.pairs; ++j) next_key_at_[j] = keys + next_.pair[j] * packed_.key_size;
    for (int j = next_.pairs; j < pairs_; ++j) next_key_at_[j] = kept_value_at_[j];
  }

  // Find the values of the chunk, which were prefetched while its keys were scored.
  void find_values() {
    for (int j = 0; j < pairs_; ++j) {
      value_at_[j] = chunk_values_.at(j, static_cast<const Kept*>(kept_value_at_[j]), packed_.value_size);
    }
  }

  bool has_unsafe() const {
    for (int j = 0; j < pairs_; ++j) {
      if ((visible_ >> (2 * j) & 3) != 3 && packed_.is_unsafe(tile_.kv_head, pair_[j])) return true;
    }
    return false;
  }

  const Packed<Format>& packed_;
  const OwnRun *run_, *run_stop_;
  int used_;  // keys of the current run
  Chunk next_;
  int32_t pair_[kOwnPairs];
  ChunkPairs<Format, kOwnPairs, kMaxDim> chunk_keys_, chunk_values_;
};

}  // namespace prefold
