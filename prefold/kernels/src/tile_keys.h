// The keys that the queries of a tile share. Queries lie on the lanes of vectors, and numbers of keys and values are
// broadcast, so no sum runs across lanes. Keys come in chunks: the scores of a chunk, online softmax (Milakov and
// Gimelshein 2018), then the chunk's values. Keys that a query does not see are masked by selection, not multiplied by
// zero. So a NaN stays in its own sequence.
#pragma once

#include "amx.h"
#include "chunks.h"
#include "formats.h"
#include "pack.h"
#include "tile.h"

namespace prefold {

// The sums of a tile's lanes over the keys of its lists, from which OwnKeys continues. Lane i of the tile has the
// maximum max[i], the sum sum[i], and dimensions [16 b, 16 b + 16) in out[(16 b + i % 16) * vectors + i / 16].
struct TileSums {
  const float *max, *sum;
  const Floats* out;
  int vectors;
};

// The keys in a register block of scores, for `vectors` vectors of queries: whole pairs.
constexpr int key_block(int vectors) { return std::clamp(kAccumulators / vectors / 2 * 2, 2, kLanes); }

// The dimensions in a register block of the result: a power of two, so that it divides the padded dimensions.
constexpr int dim_block(int vectors) { return power_of_two(std::min(kAccumulators / vectors, kLanes)); }

// One tile of queries and some heads that share a KV head, with their sums over the keys so far. Lane i of its V
// vectors is query i % stride of head i / stride. In a tile with sixteen queries, a vector is one head. With fewer
// queries, a vector has several heads. This class does not depend on how keys are stored, so formats that differ only
// in storage share it.
template <class Format, int V>
class TileQueries {
  template <class, int>
  friend class TileQueries;
  using Element = typename Format::Element;
  using Stored = typename Format::Stored;
  using Lane = typename Format::Lane;
  using Vector = Vec<Lane>;
  static constexpr int kWidth = Format::kWidth;

 public:
  // dim, value_dim: padded; value_row: see Packed.
  TileQueries(const TileCall& call, int64_t dim, int64_t value_dim, int64_t value_row, const Tile& tile)
      : call_(call), tile_(tile), dim_(value_dim), value_row_(value_row), steps_(static_cast<int>(dim / kWidth)) {
    for (int h = 0; h < tile.heads; ++h) heads_ |= uint64_t{1} << (h * tile.stride);
  }

  // Start with empty sums.
  void begin() {
    load_queries();
    clear_sums();
    for (int i = 0; i < dim_ * V; ++i) out_[i] = zeros();
  }

  // Start with the sums of one query of another tile. This tile has only this query.
  template <int W>
  void begin(const TileQueries<Format, W>& tile, int query) {
    begin();
    for (int h = 0; h < tile_.heads; ++h) {
      const int lane = h * tile.tile_.stride + query;
      lane_of(max_[0], h) = lane_of(tile.max_[lane / kLanes], lane % kLanes);
      lane_of(sum_[0], h) = lane_of(tile.sum_[lane / kLanes], lane % kLanes);
      for (int64_t d = 0; d < dim_; ++d) {
        lane_of(out_[d], h) = lane_of(tile.out_[d * W + lane / kLanes], lane % kLanes);
      }
    }
  }

  // Store the results, if the lists have all keys of the tile.
  void store_out() {
    for (int g = 0; g < V; ++g) {
      const Floats inverse = Floats(1.0f) / (call_.sinks ? sum_[g] + sink_weights(g) : sum_[g]);
      const int steps = static_cast<int>(dim_ / kWidth);
      for (int step = 0; step < steps; step += kLanes) {
        Vector block[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          if (step + i >= steps) {  // padding, never stored
            block[i] = Vector(0);
            continue;
          }
          const Floats* o = out_ + (step + i) * kWidth * V + g;
          block[i] = Format::join(o[0] * inverse, o[(kWidth - 1) * V] * inverse);
        }
        transpose(block);
        LaneWalk lane(tile_, g);
        for (int r = 0; r < kLanes; ++r, lane.next()) {
          if (!lane.is_there()) continue;
          Element* row = tile_.template result<Element>(call_, lane.query, lane.head);
          Format::store_row(row + step * kWidth, block[r], call_.value_dim - step * kWidth);
        }
      }
    }
  }

  // Return the unfinished sums, with each lane's dimensions side by side.
  TileSums turn_out() {
    for (int g = 0; g < V; ++g) {
      for (int d = 0; d < dim_; d += kLanes) {
        Floats block[kLanes];
        for (int i = 0; i < kLanes; ++i) block[i] = out_[(d + i) * V + g];
        transpose(block);
        for (int i = 0; i < kLanes; ++i) out_[(d + i) * V + g] = block[i];
      }
    }
    return {reinterpret_cast<const float*>(max_), reinterpret_cast<const float*>(sum_), out_, V};
  }

 protected:
  static float& lane_of(Floats& x, int lane) { return reinterpret_cast<float*>(&x)[lane]; }
  static float lane_of(const Floats& x, int lane) { return reinterpret_cast<const float*>(&x)[lane]; }

  void clear_sums() {
    for (int g = 0; g < V; ++g) max_[g] = Floats(-1e30f), sum_[g] = zeros();
  }

  // Load the queries as [step][vector]. Lanes past the last query or head repeat another lane.
  void load_queries() {
    for (int g = 0; g < V; ++g) {
      const Element* rows[kLanes];
      LaneWalk lane(tile_, g);
      for (int r = 0; r < kLanes; ++r, lane.next()) {
        rows[r] = tile_.template query<Element>(call_, std::min(lane.query, tile_.queries - 1),
                                                std::min(lane.head, tile_.heads - 1));
      }
      for (int step = 0; step < steps_; step += kLanes) {
        Vector block[kLanes];
        for (int r = 0; r < kLanes; ++r) {
          block[r] = Format::load_row(rows[r] + step * kWidth, call_.dim - step * kWidth);
        }
        transpose(block);
        for (int i = 0; i < kLanes && step + i < steps_; ++i) queries_at_[(step + i) * V + g] = block[i];
      }
    }
  }

  // The weights of the sinks, for the heads of the lanes of vector g.
  Floats sink_weights(int g) const {
    float of_lane[kLanes] = {};
    LaneWalk lane(tile_, g);
    for (int r = 0; r < kLanes; ++r, lane.next()) {
      if (lane.is_there()) of_lane[r] = call_.sinks[tile_.first_head + lane.head];
    }
    return exp2<true>((load(of_lane) - max_[g] * Floats(call_.scale)) * Floats(1.44269504f));
  }

  // Turn a mask of queries into a mask of lanes, with sixteen bits per vector.
  uint64_t lanes(uint32_t queries) const { return (queries & ((1u << tile_.stride) - 1)) * heads_; }

  // scores_[key][head] = q . k
  void score(int pairs) {
    int pair = 0;
#ifdef PREFOLD_TILES
    if constexpr (kWidth == 2) {
      if (in_tiles_) {
        for (; pair + kTile / 2 <= pairs; pair += kTile / 2) score_tile(pair);
      }
    }
#endif
    score_blocks<key_block(V)>(pair, pairs);
  }

  // As many blocks of KEYS keys as fit, then smaller blocks.
  template <int KEYS>
  PREFOLD_INLINE void score_blocks(int pair, int pairs) {
    for (; pair + KEYS / 2 <= pairs; pair += KEYS / 2) score_block<KEYS>(pair);
    if constexpr (KEYS > 2) score_blocks<KEYS / 4 * 2>(pair, pairs);
  }

  // Score KEYS keys from pair `pair` on, one part of the queries at a time.
  template <int KEYS>
  PREFOLD_APART void score_block(int pair) {
    const Stored* keys[KEYS / 2];
    for (int i = 0; i < KEYS / 2; ++i) keys[i] = key_at_[pair + i];
    for (int part = 0; part < kParts; ++part) {
      Part<float> acc[KEYS][V] = {};
      for (int d = 0; d < steps_; ++d) {
        Part<Lane> q[V];
#pragma GCC unroll 4
        for (int g = 0; g < V; ++g) q[g] = queries_at_[d * V + g].part[part];
#pragma GCC unroll 16
        for (int i = 0; i < KEYS; ++i) {
          const Stored k = keys[i / 2][(i & 1) * steps_ + d];
#pragma GCC unroll 4
          for (int g = 0; g < V; ++g) acc[i][g] = Format::mul_add(acc[i][g], q[g], k);
        }
      }
#pragma GCC unroll 16
      for (int i = 0; i < KEYS; ++i) {
#pragma GCC unroll 4
        for (int g = 0; g < V; ++g) scores_[(2 * pair + i) * V + g].part[part] = acc[i][g];
      }
    }
  }

  // Turn scores into probabilities relative to the running maximum, in place. Update the maximum and the sum. Set
  // rescale_ to the factor for the sums of earlier chunks.
  PREFOLD_APART void soften(const Chunk& chunk) {
    if (call_.cap > 0) {
      const Cap cap(call_);
      for (int i = 0; i < 2 * chunk.count * V; ++i) scores_[i] = cap(scores_[i]);
    }
    Floats top[V];
    for (int g = 0; g < V; ++g) top[g] = max_[g];
    for (int j = 0; j < 2 * chunk.unmasked; ++j) {
      for (int g = 0; g < V; ++g) top[g] = larger(scores_[j * V + g], top[g]);
    }
    for (int j = 2 * chunk.unmasked; j < 2 * chunk.count; ++j) {
      const uint64_t mask = lanes(chunk.mask[j / 2] >> (j & 1 ? 16 : 0));
      for (int g = 0; g < V; ++g) top[g] = choose(mask >> (16 * g), larger(scores_[j * V + g], top[g]), top[g]);
    }
    const Floats scale(call_.scale * 1.44269504f);  // exp(x) = 2^(x log2 e)
    for (int g = 0; g < V; ++g) {
      rescale_[g] = exp2<true>((max_[g] - top[g]) * scale);
      sum_[g] *= rescale_[g];
      max_[g] = top[g];
      top[g] *= scale;
    }
    soften_pairs<false>(chunk, 0, chunk.unmasked, top, scale);
    soften_pairs<true>(chunk, chunk.unmasked, chunk.count, top, scale);
  }

  template <bool MASKED>
  PREFOLD_INLINE void soften_pairs(const Chunk& chunk, int first, int stop, const Floats* top, Floats scale) {
    Floats sum[V];
    for (int g = 0; g < V; ++g) sum[g] = sum_[g];
    for (int j = first; j < stop; ++j) {
      const uint64_t mask_a = MASKED ? lanes(chunk.mask[j]) : 0, mask_b = MASKED ? lanes(chunk.mask[j] >> 16) : 0;
#pragma GCC unroll 4
      for (int g = 0; g < V; ++g) {
        Floats a = exp2<Format::kExactExp>(scores_[2 * j * V + g] * scale - top[g]);
        Floats b = exp2<Format::kExactExp>(scores_[(2 * j + 1) * V + g] * scale - top[g]);
        if constexpr (MASKED) {
          a = choose(mask_a >> (16 * g), a, zeros());
          b = choose(mask_b >> (16 * g), b, zeros());
        }
        sum[g] += a + b;
        Format::store_probabilities((float*)probabilities(j, g), V * kLanes, a, b);
      }
    }
    for (int g = 0; g < V; ++g) sum_[g] = sum[g];
  }

  // The memory of a pair's probabilities. They overwrite scores that were already read: at most the scores of two keys.
  Floats* probabilities(int pair, int g) { return scores_ + pair * (2 / kWidth) * V + g; }

#ifdef PREFOLD_TILES
  // Score sixteen keys from pair `pair` on.
  PREFOLD_APART void score_tile(int pair) {
    Words copies[kTile * kMaxDim / 2 / kLanes];  // of keys that are not contiguous
    const Stored* keys = key_at_[pair];
    for (int i = 1; i < kTile / 2; ++i) {
      if (key_at_[pair + i] == keys + i * 2 * steps_) continue;
      auto* to = reinterpret_cast<Stored*>(copies);
      for (int j = 0; j < kTile / 2; ++j) memcpy(to + j * 2 * steps_, key_at_[pair + j], 2 * steps_ * sizeof(Stored));
      keys = to;
      break;
    }
    asm volatile("" ::: "memory");  // GCC does not know that loading a tile reads memory
    for (int g = 0; g < V; ++g) {
      _tile_zero(0);
      for (int step = 0; step < steps_; step += kTile) {
        _tile_loadd(4, keys + step, steps_ * sizeof(Stored));
        _tile_loadd(6, queries_at_ + step * V + g, sizeof(Vector) * V);
        _tile_dpbf16ps(0, 4, 6);
      }
      _tile_stored(0, scores_ + 2 * pair * V + g, sizeof(Floats) * V);
    }
  }

  // `add_values` in tiles of sixteen dimensions and sixteen pairs. Missing pairs are zeros.
  PREFOLD_APART void add_value_tiles(int pairs, bool first) {
    const int whole = (pairs + kTile - 1) / kTile * kTile;
    for (int j = pairs; j < whole; ++j) {
      for (int g = 0; g < V; ++g) *probabilities(j, g) = zeros();
    }
    for (int i = 0; i < dim_ * V; ++i) out_[i] = first ? zeros() : out_[i] * rescale_[i % V];
    for (int d = 0; d < dim_; d += kTile) {
      Words values[kChunkPairs];  // [pairs / 16][dimension][pair]
      for (int j = 0; j < whole; ++j) values[j] = Words(0);
      for (int j = 0; j < pairs; ++j) memcpy(values + j, value_at_[j] + d, sizeof(Words));
      for (int j = 0; j < whole; j += kTile) transpose(values + j);
      asm volatile("" ::: "memory");
      for (int g = 0; g < V; ++g) {
        _tile_loadd(0, out_ + d * V + g, sizeof(Floats) * V);
        for (int j = 0; j < whole; j += kTile) {
          _tile_loadd(4, values + j, sizeof(Words));
          _tile_loadd(6, probabilities(j, g), sizeof(Floats) * V);
          _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, out_ + d * V + g, sizeof(Floats) * V);
      }
    }
  }
#endif

  // out_[dimension][head] = out_ * rescale_ + p . v
  PREFOLD_APART void add_values(int pairs, bool first, [[maybe_unused]] bool placed = false) {
#ifdef PREFOLD_TILES
    if constexpr (kWidth == 2) {
      if (in_tiles_ && (placed || pairs > kTile / 2)) return add_value_tiles(pairs, first);
    }
#endif
    for (int d = 0; d < dim_; d += dim_block(V)) {
      for (int part = 0; part < kParts; ++part) add_value_block<dim_block(V)>(pairs, first, d, part);
    }
  }

  // Add the values of DIMS dimensions from d on, for one part of the queries.
  template <int DIMS>
  PREFOLD_INLINE void add_value_block(int pairs, bool first, int d, int part) {
    Part<float> acc[DIMS][V];
#pragma GCC unroll 16
    for (int i = 0; i < DIMS; ++i) {
#pragma GCC unroll 4
      for (int g = 0; g < V; ++g) {
        acc[i][g] = first ? Part<float>{} : out_[(d + i) * V + g].part[part] * rescale_[g].part[part];
      }
    }
    for (int j = 0; j < pairs; ++j) {
      const Stored* v = value_at_[j] + d;
#pragma GCC unroll 2
      for (int half = 0; half < 2 / kWidth; ++half, v += value_row_) {
        Part<Lane> p[V];
#pragma GCC unroll 4
        for (int g = 0; g < V; ++g) p[g] = ((const Part<Lane>*)probabilities(j, half * V + g))[part];
#pragma GCC unroll 16
        for (int i = 0; i < DIMS; ++i) {
#pragma GCC unroll 4
          for (int g = 0; g < V; ++g) acc[i][g] = Format::mul_add(acc[i][g], p[g], v[i]);
        }
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < DIMS; ++i) {
#pragma GCC unroll 4
      for (int g = 0; g < V; ++g) out_[(d + i) * V + g].part[part] = acc[i][g];
    }
  }

  // The version of `add_values` for an infinite or NaN value that not all queries see. Zero times this value is NaN, so
  // each product is selected by the key's mask. Slow, and rare.
  void add_values_by_choice(const Chunk& chunk, bool first) {
    for (int i = 0; i < dim_ * V; ++i) out_[i] = first ? zeros() : out_[i] * rescale_[i % V];
    for (int j = 0; j < chunk.count; ++j) {
      const uint32_t mask = j < chunk.unmasked ? 0xffffffff : chunk.mask[j];
      for (int half = 0; half < 2; ++half) {
        const uint64_t half_mask = lanes(mask >> (16 * half));
        for (int64_t d = 0; d < dim_; ++d) {
          const float v = Format::value(value_at_[j], value_row_, d, half);
          for (int g = 0; g < V; ++g) {
            const Floats p = Format::probability((float*)probabilities(j, g), V * kLanes, half);
            Floats& o = out_[d * V + g];
            o = choose(half_mask >> (16 * g), o + p * Floats(v), o);
          }
        }
      }
    }
  }

  const TileCall& call_;
  const Tile& tile_;
  const int64_t dim_, value_row_;  // of values: padded; see Packed
  const int steps_;                // Stored per key
  const bool in_tiles_ = kWidth == 2 && steps_ % kLanes == 0 && may_use_tiles();
  uint64_t heads_ = 0;  // the first lane of each head
  const Stored *key_at_[kChunkPairs], *value_at_[kChunkPairs];
  Floats max_[V], sum_[V], rescale_[V];
  Vector queries_at_[kMaxDim / kWidth * V];
  Floats scores_[2 * kChunkPairs * V];
  Floats out_[kMaxDim * V];
};

// A tile, and its keys in packed memory.
template <class Format, int V>
class TileKeys : public TileQueries<typename Format::Read, V> {
  using Base = TileQueries<typename Format::Read, V>;
  using Kept = typename Format::Kept;
  using Base::call_, Base::tile_, Base::in_tiles_, Base::key_at_, Base::value_at_, Base::out_, Base::lanes,
      Base::lane_of, Base::probabilities, Base::load_queries, Base::clear_sums, Base::score, Base::soften,
      Base::add_values, Base::add_values_by_choice;

 public:
  TileKeys(const TileCall& call, const Packed<Format>& packed, const Tile& tile)
      : Base(call, packed.dim, packed.value_dim, packed.value_row, tile), packed_(packed) {}

  void run() {
    load_queries();
    clear_sums();
    ChunkReader reader(call_, tile_.number);
    Chunk chunk;
    const TileScope scope(in_tiles_);
    for (bool first = true; reader.next(chunk); first = false) {
      find_pairs(chunk);
      score(chunk.count);
      soften(chunk);
      if (packed_.any_unsafe && has_unsafe(chunk)) {
        add_values_by_choice(chunk, first);
      } else {
        add_values(chunk.count, first);
      }
    }
  }

  // Add keys that have places. A lane's numbers, and the portions in which they are summed, do not depend on other
  // lanes.
  template <class R>
  void go_on(PlacedReader<R> reader) {
    PlacedChunk chunk;
    const TileScope scope(in_tiles_);
    while (reader.next(chunk)) {
      const bool unsafe = find_places(chunk);
      int pairs = chunk.count;
      if (in_tiles_) {  // tiles read eight pairs at a time; the results of the additional pairs are not used
        for (; pairs % 8; ++pairs) key_at_[pairs] = key_at_[chunk.count - 1];
      }
      score(pairs);
      soften(chunk);
      add_values(chunk.count, false, true);
      if (unsafe) add_not_finite(chunk);
    }
  }

 private:
  void find_pairs(const Chunk& chunk) {
    const auto* keys = packed_.key_pairs(tile_.kv_head);
    const auto* values = packed_.value_pairs(tile_.kv_head);
    for (int j = 0; j < chunk.count; ++j) {
      key_at_[j] = chunk_keys_.at(j, keys + chunk.pair[j] * packed_.key_size, packed_.key_size);
      value_at_[j] = chunk_values_.at(j, values + chunk.pair[j] * packed_.value_size, packed_.value_size);
    }
  }

  // Find the pairs of a chunk whose keys have places: in packed memory if two keys are neighbours there, else in a
  // copy. Return whether any value that not all queries see is not finite. The copy has zeros in place of such values.
  bool find_places(const PlacedChunk& chunk) {
    bool unsafe = false;
    for (int j = 0; j < chunk.count; ++j) {
      const int32_t a = chunk.key[2 * j], b = chunk.key[2 * j + 1];
      const bool together = a < 0 ? b >= 0 && b & 1 : !(a & 1) && (b < 0 || b == a + 1);
      const bool quiet = packed_.any_unsafe && chunk.mask[j] != 0xffffffff && (is_unsafe(a) || is_unsafe(b));
      unsafe |= quiet;
      if (together && !quiet) {
        const int64_t pair = (a < 0 ? b : a) / 2;
        key_at_[j] = chunk_keys_.at(j, packed_.key_pairs(tile_.kv_head) + pair * packed_.key_size, packed_.key_size);
        value_at_[j] =
            chunk_values_.at(j, packed_.value_pairs(tile_.kv_head) + pair * packed_.value_size, packed_.value_size);
        continue;
      }
      Kept *key = copied_keys_ + j * packed_.key_size, *value = copied_values_ + j * packed_.value_size;
      for (int half = 0; half < 2; ++half) copy(chunk.key[2 * j + half], key, value, half, quiet);
      key_at_[j] = chunk_keys_.at(j, key, packed_.key_size);
      value_at_[j] = chunk_values_.at(j, value, packed_.value_size);
    }
    return unsafe;
  }

  bool is_unsafe(int32_t key) const { return key >= 0 && packed_.is_unsafe(tile_.kv_head, key / 2); }

  // Copy a key and its value, or zeros, into one half of a pair. quiet: replace numbers that are not finite by zeros.
  void copy(int32_t from, Kept* key, Kept* value, int half, bool quiet) const {
    const int64_t size = packed_.key_size / 2;
    if (from < 0) {
      memset(static_cast<void*>(key + half * size), 0, size * sizeof(Kept));
    } else {
      memcpy(static_cast<void*>(key + half * size),
             packed_.key_pairs(tile_.kv_head) + from / 2 * packed_.key_size + (from & 1) * size, size * sizeof(Kept));
    }
    const Kept* source = packed_.value_pairs(tile_.kv_head) + from / 2 * packed_.value_size;
    for (int64_t d = 0; d < packed_.value_dim; d += kLanes) {
      Floats x = from < 0 ? zeros() : Format::load_half(source + d, packed_.value_row, from & 1);
      if (quiet) x = finite_or_zero(x);
      Format::store_half(value + d, packed_.value_row, x, half);
    }
  }

  // Add the values that `find_places` replaced by zeros, in the lanes that see them. Those become infinite or NaN.
  void add_not_finite(const PlacedChunk& chunk) {
    for (int key = 0; key < 2 * chunk.count; ++key) {
      const int j = key / 2, half = key & 1;
      if (!is_unsafe(chunk.key[key]) || chunk.mask[j] == 0xffffffff) continue;
      const uint64_t mask = lanes(chunk.mask[j] >> (16 * half));
      const Kept* source = packed_.value_pairs(tile_.kv_head) + chunk.key[key] / 2 * packed_.value_size;
      for (int64_t d = 0; d < packed_.value_dim; ++d) {
        const Floats at = Format::load_half(source + d / kLanes * kLanes, packed_.value_row, chunk.key[key] & 1);
        const float v = lane_of(at, d % kLanes);
        if (lane_of(finite_or_zero(at), d % kLanes) == v) continue;
        for (int g = 0; g < V; ++g) {
          const Floats p = Format::probability((float*)probabilities(j, g), V * kLanes, half);
          Floats& o = out_[d * V + g];
          o = choose(mask >> (16 * g), o + p * Floats(v), o);
        }
      }
    }
  }

  bool has_unsafe(const Chunk& chunk) const {
    for (int j = chunk.unmasked; j < chunk.count; ++j) {
      if (packed_.is_unsafe(tile_.kv_head, chunk.pair[j])) return true;
    }
    return false;
  }

  const Packed<Format>& packed_;
  ChunkPairs<Format, kChunkPairs, kMaxDim> chunk_keys_, chunk_values_;
  alignas(64) Kept copied_keys_[kChunkPairs * 2 * kMaxDim / Format::kWidth];
  alignas(64) Kept copied_values_[kChunkPairs * 2 * kMaxDim / Format::kWidth];
};

}  // namespace prefold
