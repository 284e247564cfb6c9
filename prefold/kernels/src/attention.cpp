// Interval attention: softmax(q k^T * scale) v, every query over the keys its tile's lists name.
//
// A task is one tile of sixteen queries and up to four heads that share a KV head. Queries lie on the
// lanes of vectors, a vector a head; numbers of keys and values are broadcast against them, so that no
// sum ever runs across lanes. Keys come in chunks: scores of a chunk, online softmax (Milakov and
// Gimelshein 2018), then the chunk's values. What a query does not see is chosen away, never multiplied
// by zero, so that a NaN of one sequence stays in that sequence.
#include "chunks.h"
#include "pack.h"

namespace prefold {
namespace {

constexpr int kMaxDim = 256;
constexpr int kMaxVectors = 4;  // heads of a task

// Vectors that one register block accumulates; the rest hold queries (or probabilities) and a broadcast.
constexpr int kAccumulators = kRegisters * 3 / 4;

// Keys of a register block of scores, for so many vectors of queries: whole pairs.
constexpr int key_block(int vectors) {
  return std::clamp(kAccumulators / vectors / 2 * 2, 2, kLanes);
}

// Dimensions of a register block of the result: a power of two, so that it divides the padded dimensions.
constexpr int dim_block(int vectors) {
  int size = 1;
  while (size * 2 * vectors <= kAccumulators && size < kLanes) size *= 2;
  return size;
}

// The state of one task. V: heads, a vector each.
template <class Format, int V>
class Task {
  using Element = typename Format::Element;
  using Stored = typename Format::Stored;
  using Lane = typename Format::Lane;
  using Vector = Vec<Lane>;
  static constexpr int kWidth = Format::kWidth;

 public:
  Task(const AttentionCall& call, const Packed<Format>& packed, int64_t tile, int64_t kv_head, int64_t first_head)
      : call_(call),
        packed_(packed),
        kv_head_(kv_head),
        first_head_(first_head),
        first_query_(tile * kLanes),
        queries_(static_cast<int>(std::min<int64_t>(kLanes, call.queries - tile * kLanes))),
        steps_(static_cast<int>(packed.dim / kWidth)) {}

  void run(int64_t tile) {
    load_queries();
    for (int g = 0; g < V; ++g) max_[g] = Floats(-1e30f), sum_[g] = zeros();
    ChunkReader reader(call_, tile);
    Chunk chunk;
    bool first = true;
    for (; reader.next(chunk); first = false) {
      find_pairs(chunk);
      score(chunk.count);
      soften(chunk);
      if (packed_.any_unsafe && has_unsafe(chunk)) {
        add_values_by_choice(chunk, first);
      } else {
        add_values(chunk.count, first);
      }
    }
    store_out();
  }

 private:
  // Queries as [step][head] vectors; lanes past the last query repeat it.
  void load_queries() {
    for (int g = 0; g < V; ++g) {
      const Element* rows =
          static_cast<const Element*>(call_.q) + first_query_ * call_.q_row + (first_head_ + g) * call_.q_head;
      for (int step = 0; step < steps_; step += kLanes) {
        Vector block[kLanes];
        for (int r = 0; r < kLanes; ++r) {
          const Element* row = rows + std::min(r, queries_ - 1) * call_.q_row;
          block[r] = Format::load_row(row + step * kWidth, call_.dim - step * kWidth);
        }
        transpose(block);
        for (int i = 0; i < kLanes && step + i < steps_; ++i) queries_at_[(step + i) * V + g] = block[i];
      }
    }
  }

  void find_pairs(const Chunk& chunk) {
    const Stored* keys = packed_.key_pairs(kv_head_);
    const Stored* values = packed_.value_pairs(kv_head_);
    for (int j = 0; j < chunk.count; ++j) {
      key_at_[j] = keys + chunk.pair[j] * packed_.pair_size;
      value_at_[j] = values + chunk.pair[j] * packed_.pair_size;
    }
  }

  // scores_[key][head] = q . k
  void score(int pairs) { score_blocks<key_block(V)>(0, pairs); }

  // As many blocks of KEYS keys as fit, then smaller ones.
  template <int KEYS>
  PREFOLD_INLINE void score_blocks(int pair, int pairs) {
    for (; pair + KEYS / 2 <= pairs; pair += KEYS / 2) score_block<KEYS>(pair);
    if constexpr (KEYS > 2) score_blocks<KEYS / 4 * 2>(pair, pairs);
  }

  // KEYS keys from pair `pair` on, a part of the queries at a time.
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

  // Scores to probabilities (over the running maximum), in place; updates the maximum and the sum, and
  // leaves in rescale_ what earlier chunks' sums must be multiplied by.
  PREFOLD_APART void soften(const Chunk& chunk) {
    Floats top[V];
    for (int g = 0; g < V; ++g) top[g] = max_[g];
    for (int j = 0; j < 2 * chunk.unmasked; ++j) {
      for (int g = 0; g < V; ++g) top[g] = larger(scores_[j * V + g], top[g]);
    }
    for (int j = 2 * chunk.unmasked; j < 2 * chunk.count; ++j) {
      const uint32_t mask = chunk.mask[j / 2] >> (j & 1 ? 16 : 0);
      for (int g = 0; g < V; ++g) top[g] = choose(mask, larger(scores_[j * V + g], top[g]), top[g]);
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
#pragma GCC unroll 4
      for (int g = 0; g < V; ++g) {
        Floats a = exp2<Format::kExactExp>(scores_[2 * j * V + g] * scale - top[g]);
        Floats b = exp2<Format::kExactExp>(scores_[(2 * j + 1) * V + g] * scale - top[g]);
        if constexpr (MASKED) {
          a = choose(chunk.mask[j], a, zeros());
          b = choose(chunk.mask[j] >> 16, b, zeros());
        }
        sum[g] += a + b;
        Format::store_probabilities((float*)probabilities(j, g), V * kLanes, a, b);
      }
    }
    for (int g = 0; g < V; ++g) sum_[g] = sum[g];
  }

  // The probabilities take the place of scores already read: a pair's need at most the room of two keys.
  Floats* probabilities(int pair, int g) { return scores_ + pair * (2 / kWidth) * V + g; }

  // out_[dimension][head] = out_ * rescale_ + p . v
  PREFOLD_APART void add_values(int pairs, bool first) {
    for (int d = 0; d < packed_.dim; d += dim_block(V)) {
      for (int part = 0; part < kParts; ++part) add_value_block<dim_block(V)>(pairs, first, d, part);
    }
  }

  // DIMS dimensions from d on, a part of the queries.
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
      for (int half = 0; half < 2 / kWidth; ++half, v += packed_.dim) {
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

  bool has_unsafe(const Chunk& chunk) const {
    for (int j = chunk.unmasked; j < chunk.count; ++j) {
      if (packed_.is_unsafe(kv_head_, chunk.pair[j])) return true;
    }
    return false;
  }

  // The same where a value that not all queries see is infinite or NaN: zero times that is NaN, so each
  // product is chosen by the key's mask. Slow, and rare.
  void add_values_by_choice(const Chunk& chunk, bool first) {
    for (int i = 0; i < packed_.dim * V; ++i) out_[i] = first ? zeros() : out_[i] * rescale_[i % V];
    for (int j = 0; j < chunk.count; ++j) {
      const uint32_t mask = j < chunk.unmasked ? 0xffffffff : chunk.mask[j];
      for (int half = 0; half < 2; ++half) {
        for (int64_t d = 0; d < packed_.dim; ++d) {
          const float v = Format::value(value_at_[j], packed_.dim, d, half);
          for (int g = 0; g < V; ++g) {
            const Floats p = Format::probability((float*)probabilities(j, g), V * kLanes, half);
            Floats& o = out_[d * V + g];
            o = choose(mask >> (16 * half), o + p * Floats(v), o);
          }
        }
      }
    }
  }

  void store_out() {
    Element* rows = static_cast<Element*>(call_.out) + (first_query_ * call_.heads + first_head_) * call_.dim;
    for (int g = 0; g < V; ++g) {
      const Floats inverse = Floats(1.0f) / sum_[g];
      for (int step = 0; step < steps_; step += kLanes) {
        Vector block[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          if (step + i >= steps_) {  // the lanes of dimensions that are not there; never stored
            block[i] = Vector(0);
            continue;
          }
          const Floats* o = out_ + (step + i) * kWidth * V + g;
          block[i] = Format::join(o[0] * inverse, o[(kWidth - 1) * V] * inverse);
        }
        transpose(block);
        for (int r = 0; r < queries_; ++r) {
          Format::store_row(rows + (r * call_.heads + g) * call_.dim + step * kWidth, block[r],
                            call_.dim - step * kWidth);
        }
      }
    }
  }

  const AttentionCall& call_;
  const Packed<Format>& packed_;
  const int64_t kv_head_, first_head_, first_query_;
  const int queries_, steps_;
  const Stored *key_at_[kChunkPairs], *value_at_[kChunkPairs];
  Floats max_[V], sum_[V], rescale_[V];
  Vector queries_at_[kMaxDim / kWidth * V];
  Floats scores_[2 * kChunkPairs * V];
  Floats out_[kMaxDim * V];
};

template <class Format, int V>
void run_task(const AttentionCall& call, const Packed<Format>& packed, int64_t tile, int64_t kv_head,
              int64_t first_head) {
  Task<Format, V>(call, packed, tile, kv_head, first_head).run(tile);
}

// No more threads than the work is worth.
int useful_threads(const AttentionCall& call, int64_t tiles) {
  int64_t pairs = call.mask_offsets[tiles];
  for (int64_t i = 0; i < call.run_offsets[tiles]; ++i) pairs += call.runs[i].count;
  const int64_t products = pairs * 2 * kLanes * call.heads * call.dim * 2;
  return static_cast<int>(std::min<int64_t>(call.threads, 1 + products / kProductsPerThread));
}

template <class Format>
void attend(const AttentionCall& call, Workspace& workspace) {
  const Packed<Format> packed = pack<Format>(call, workspace);
  using TaskFunction = void (*)(const AttentionCall&, const Packed<Format>&, int64_t, int64_t, int64_t);
  constexpr TaskFunction kTasks[kMaxVectors] = {run_task<Format, 1>, run_task<Format, 2>, run_task<Format, 3>,
                                                run_task<Format, 4>};
  // The heads of a group in parts of up to four, as equal as can be.
  const int64_t group = call.heads / call.kv_heads;
  const int64_t parts = (group + kMaxVectors - 1) / kMaxVectors;
  const int64_t tiles = (call.queries + kLanes - 1) / kLanes;
  const int64_t tile_tasks = call.kv_heads * parts;
  // Late tiles see the most keys: they go first, so that no thread is left with a long task at the end.
  parallel_tasks(tiles * tile_tasks, useful_threads(call, tiles), [&](int64_t i) {
    const int64_t tile = tiles - 1 - i / tile_tasks;
    const int64_t kv_head = i % tile_tasks / parts, part = i % parts;
    const int64_t first = part * group / parts, stop = (part + 1) * group / parts;
    kTasks[stop - first - 1](call, packed, tile, kv_head, kv_head * group + first);
  });
}

}  // namespace
}  // namespace prefold

// 0, or 1 where memory is short.
extern "C" int32_t prefold_attention(const prefold::AttentionCall* call, int32_t is_bf16) {
  using namespace prefold;
  if (call->queries == 0) return 0;
  thread_local Workspace workspace;
  try {
    if (is_bf16) {
      attend<InBf16>(*call, workspace);
    } else {
      attend<InFloat32<float>>(*call, workspace);
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
