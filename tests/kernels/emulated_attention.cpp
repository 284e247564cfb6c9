// Attention over rows and over slots by a compiled library, beside sums in float64; a program of its own for
// test_emulated.py, since PyTorch takes minutes to load in emulation.
//
//     emulated_attention LIBRARY SEED CASES
//
// Each case is a random trie, of which the queries are some rows: over the keys as they lie, the first ones as a path,
// and over slots that they are written into, in float32, in bfloat16, and in float32 that is kept as bfloat16. Every
// other case has keys with places, so that results do not depend on the other queries.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "../../prefold/kernels/src/attention.h"
#include "emulated.h"

namespace {

using namespace prefold;

float number(float x) { return x; }
float number(Bf16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}
template <class E>
E as_element(float x) {
  if constexpr (std::is_same_v<E, float>) return x;
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  Bf16 half;
  half.bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  if constexpr (std::is_same_v<E, Bf16>) return half;
}

struct Case {
  int64_t heads, kv_heads, dim, value_dim, tail, keys, path, window;
  bool placed, in_keys;  // in_keys: whether values are the first numbers of keys
  float scale, cap;
  std::vector<int64_t> end, position, rows, at;  // at: the positions of the queries
  std::vector<float> sinks;
};

Case random_case(std::mt19937_64& rng) {
  Case made;
  made.kv_heads = 1 + rng() % 2, made.heads = made.kv_heads * (1 + rng() % 5), made.dim = 1 + rng() % 80;
  if (rng() % 9 == 0) made.dim = 500 + rng() % 77;
  made.in_keys = rng() % 4 == 0, made.value_dim = made.in_keys ? 1 + rng() % made.dim : 1 + rng() % 80;
  made.tail = rng() % 3 ? 0 : rng() % made.dim;
  made.keys = 1 + rng() % 120, made.path = rng() % made.keys, made.window = rng() % 3 ? 0 : 1 + rng() % 40;
  made.placed = rng() % 2;
  made.scale = 1 / std::sqrt(float(made.dim)), made.cap = rng() % 4 ? 0 : 2;
  std::vector<int64_t> parent;
  for (int64_t j = 0; j < made.keys; ++j) {  // the path is a chain, above all others
    int64_t above = j - 1;
    while (j > made.path && above >= made.path && rng() % 5 == 0) above = parent[above];
    parent.push_back(above);
    made.position.push_back(above < 0 ? 0 : made.position[above] + 1);
    made.end.push_back(j + 1);
    for (int64_t a = above; a >= 0; a = parent[a]) made.end[a] = j + 1;
  }
  for (int64_t j = made.path; j < made.keys; ++j) {
    if (rng() % 3 == 0 && j + 1 < made.keys) continue;
    made.rows.push_back(j), made.at.push_back(made.position[j]);
  }
  if (rng() % 2) {
    for (int64_t h = 0; h < made.heads; ++h) made.sinks.push_back(float(rng() % 5) - 2);
  }
  return made;
}

struct Count {
  int64_t sums = 0, wrong = 0;
  double most = 0;
};

// Compares a result [queries, heads, value_dim] with attention by its definition.
template <class E>
void compare(const Case& one, const std::vector<E>& q, const std::vector<E>& k, const std::vector<E>& v,
             const std::vector<E>& out, double tolerance, const char* what, Count& count) {
  for (size_t i = 0; i < one.rows.size(); ++i) {
    for (int64_t h = 0; h < one.heads; ++h) {
      const int64_t of = h / (one.heads / one.kv_heads);
      std::vector<double> sum(one.value_dim);
      double whole = one.sinks.empty() ? 0 : std::exp(one.sinks[h]);
      for (int64_t j = 0; j <= one.rows[i]; ++j) {
        if (one.end[j] <= one.rows[i] || (one.window && one.at[i] - one.position[j] >= one.window)) continue;
        double score = 0;
        for (int64_t d = 0; d < one.dim; ++d) {
          score +=
              double(number(q[(i * one.heads + h) * one.dim + d])) * number(k[(j * one.kv_heads + of) * one.dim + d]);
        }
        score *= one.scale;
        const double weight = std::exp(one.cap ? one.cap * std::tanh(score / one.cap) : score);
        whole += weight;
        const E* value = v.data() + (j * one.kv_heads + of) * one.value_dim;
        for (int64_t d = 0; d < one.value_dim; ++d) sum[d] += weight * number(value[d]);
      }
      for (int64_t d = 0; d < one.value_dim; ++d, ++count.sums) {
        const double got = number(out[(i * one.heads + h) * one.value_dim + d]),
                     error = std::fabs(got - sum[d] / whole);
        count.most = std::max(count.most, error);
        if (error < tolerance) continue;
        if (count.wrong++ < 5) printf("%s, query %zu, head %ld: %g for %g\n", what, i, long(h), got, sum[d] / whole);
      }
    }
  }
}

TileCall tiles_of(const Case& one, const void* q, void* out) {
  TileCall call{};
  call.q = q, call.out = out, call.q_row = one.heads * one.dim, call.q_head = one.dim;
  call.queries = one.rows.size(), call.heads = one.heads, call.kv_heads = one.kv_heads, call.dim = one.dim;
  call.value_dim = one.value_dim;
  call.sinks = one.sinks.empty() ? nullptr : one.sinks.data();
  call.scale = one.scale, call.cap = one.cap, call.threads = 1;
  return call;
}

void make_room(TileLists& lists, const int64_t* sizes) {
  for (auto* offsets : {&lists.run_offsets, &lists.mask_offsets, &lists.placed_offsets}) offsets->resize(sizes[0] + 1);
  lists.runs.resize(sizes[1]), lists.masked.resize(sizes[2]), lists.placed.resize(sizes[3]);
}

void name_lists(TileCall& call, const TileLists& lists, int64_t tiles, bool placed) {
  call.tiles = tiles, call.run_offsets = lists.run_offsets.data(), call.mask_offsets = lists.mask_offsets.data();
  call.runs = lists.runs.data(), call.masked = lists.masked.data();
  if (placed) call.placed_offsets = lists.placed_offsets.data(), call.placed = lists.placed.data();
}

template <class E>
void over_rows(const Case& one, const std::vector<E>& q, const std::vector<E>& k, const std::vector<E>& v,
               double tolerance, Count& count) {
  int32_t not_nested = 0;
  TileLists* handle =
      FUNCTION(prefold_plan_rows)(one.end.data(), one.keys, nullptr, one.rows.data(), one.rows.size(),
                                  one.window ? one.position.data() : nullptr, one.window, one.placed, &not_nested);
  if (!handle || not_nested) exit(3);
  int64_t sizes[5];
  FUNCTION(prefold_row_list_sizes)(handle, sizes);
  TileLists lists;
  make_room(lists, sizes);
  FUNCTION(prefold_copy_row_lists)(handle, lists.run_offsets.data(), lists.mask_offsets.data(), lists.runs.data(),
                                   lists.masked.data(), lists.placed_offsets.data(), lists.placed.data());
  FUNCTION(prefold_free_row_lists)(handle);
  std::vector<E> out(one.rows.size() * one.heads * one.value_dim);
  RowCall call{};
  call.tiles = tiles_of(one, q.data(), out.data());
  name_lists(call.tiles, lists, sizes[0], one.placed);
  const int64_t row = one.kv_heads * one.dim, value_row = one.kv_heads * one.value_dim;
  call.path_k = k.data(), call.k = k.data() + one.path * row;
  call.path_v = v.data(), call.v = v.data() + one.path * value_row;
  call.k_row = call.path_k_row = call.tail_row = call.path_tail_row = row, call.v_row = call.path_v_row = value_row;
  call.k_head = call.path_k_head = one.dim, call.v_head = call.path_v_head = one.value_dim;
  call.tail_dim = one.tail;
  call.path_tail = k.data() + one.dim - one.tail, call.tail = k.data() + one.path * row + one.dim - one.tail;
  call.path = one.path, call.rows = one.keys - one.path;
  if (FUNCTION(prefold_row_attention)(&call, sizeof(E) == 2)) exit(3);
  compare(one, q, k, v, out, tolerance, "rows", count);
}

template <class E>
void over_slots(const Case& one, const std::vector<E>& q, const std::vector<E>& k, const std::vector<E>& v,
                bool rounded, double tolerance, std::mt19937_64& rng, Count& count) {
  std::vector<int64_t> slots, start, size, position, first, last;
  int64_t free_slot = 1;
  for (int64_t j = 0; j < one.keys; ++j) {
    free_slot += rng() % 4 == 0 ? rng() % 5 : 0;
    slots.push_back(free_slot++);
    const auto query = [&](int64_t row) {
      return std::lower_bound(one.rows.begin(), one.rows.end(), row) - one.rows.begin();
    };
    const int64_t from = query(j), to = query(one.end[j]);
    if (from == to) continue;
    if (!start.empty() && start.back() + size.back() == slots[j] && position.back() + size.back() == one.position[j] &&
        first.back() == from && last.back() == to) {
      ++size.back();
      continue;
    }
    start.push_back(slots[j]), size.push_back(1), position.push_back(one.position[j]);
    first.push_back(from), last.push_back(to);
  }
  SlotLists* handle = FUNCTION(prefold_plan_slots)(
      start.data(), size.data(), position.data(), first.data(), last.data(), start.size(), one.rows.size(),
      one.window ? one.at.data() : nullptr, one.window, one.heads / one.kv_heads, one.placed);
  if (!handle) exit(3);
  int64_t sizes[5];
  FUNCTION(prefold_slot_list_sizes)(handle, sizes);
  SlotLists lists;
  make_room(lists, sizes);
  lists.tile_starts.resize(sizes[0] + 1), lists.own.resize(sizes[4]);
  lists.own_offsets.resize(one.rows.size() + 1);
  FUNCTION(prefold_copy_slot_lists)(handle, lists.run_offsets.data(), lists.mask_offsets.data(), lists.runs.data(),
                                    lists.masked.data(), lists.placed_offsets.data(), lists.placed.data(),
                                    lists.tile_starts.data(), lists.own_offsets.data(), lists.own.data());
  FUNCTION(prefold_free_slot_lists)(handle);
  // Room for float32, which is enough for any format; zeros at first.
  const auto padded = [](int64_t dim) { return (dim + 15) / 16 * 16; };
  const int64_t pairs = (free_slot + 1) / 2, row = one.kv_heads * one.dim, value_row = one.kv_heads * one.value_dim;
  const bool in_keys = one.in_keys && !(sizeof(E) == 2 && FUNCTION(prefold_stores_bf16_pairs)());
  const auto memory = [](int64_t bytes) { return memset(pages(bytes).release(), 0, bytes); };
  SlotPlane plane{};
  plane.keys = memory(one.kv_heads * pairs * 2 * padded(one.dim) * 4);
  plane.values = in_keys ? plane.keys : memory(one.kv_heads * pairs * 2 * padded(one.value_dim) * 4);
  plane.unsafe = static_cast<uint8_t*>(memory(one.kv_heads * pairs + 1));
  plane.slots = free_slot, plane.kv_heads = one.kv_heads, plane.dim = one.dim;
  plane.value_dim = one.value_dim, plane.rounded = rounded;
  const WriteCall write{plane, slots.data(), k.data(), v.data(), row, one.dim, value_row, one.value_dim, one.keys, 1};
  if (FUNCTION(prefold_write_slots)(&write, sizeof(E) == 2)) exit(3);
  std::vector<E> out(one.rows.size() * one.heads * one.value_dim);
  SlotCall call{tiles_of(one, q.data(), out.data()), plane};
  name_lists(call.tiles, lists, sizes[0], one.placed);
  call.tiles.tile_starts = lists.tile_starts.data();
  call.tiles.own_offsets = lists.own_offsets.data(), call.tiles.own = lists.own.data();
  if (FUNCTION(prefold_slot_attention)(&call, sizeof(E) == 2)) exit(3);
  compare(one, q, k, v, out, tolerance, rounded ? "rounded slots" : "slots", count);
  for (void* made : {plane.keys, static_cast<void*>(plane.unsafe)}) free(made);
  if (!in_keys) free(plane.values);
}

template <class E>
void run(const Case& one, bool rounded, double tolerance, std::mt19937_64& rng, Count& count) {
  std::normal_distribution<float> normal;
  const auto numbers = [&](int64_t size) {
    std::vector<E> made(size);
    for (auto& x : made) {
      const float any = normal(rng);
      x = as_element<E>(rounded ? number(as_element<Bf16>(any)) : any);
    }
    return made;
  };
  const auto q = numbers(one.rows.size() * one.heads * one.dim);
  auto k = numbers(one.keys * one.kv_heads * one.dim), v = numbers(one.keys * one.kv_heads * one.value_dim);
  for (int64_t i = 0; i < one.keys * one.kv_heads; ++i) {
    const E* first = k.data() + i / one.kv_heads * one.kv_heads * one.dim;  // the tail that all heads of a key share
    for (int64_t d = one.dim - one.tail; d < one.dim; ++d) k[i * one.dim + d] = first[d];
    for (int64_t d = 0; one.in_keys && d < one.value_dim; ++d) v[i * one.value_dim + d] = k[i * one.dim + d];
  }
  over_rows(one, q, k, v, tolerance, count);
  over_slots(one, q, k, v, rounded, tolerance, rng, count);
}

}  // namespace

int main(int, char** arguments) {
  open_library(arguments[1]);
  std::mt19937_64 rng(atoi(arguments[2]));
  Count exact, halves;
  for (int i = 0; i < atoi(arguments[3]); ++i) {
    const Case one = random_case(rng);
    run<float>(one, i % 2, 2e-5, rng, exact);
    run<Bf16>(one, false, 4e-2, rng, halves);
  }
  printf("%ld sums, %ld wrong; largest error in float32 %.2g, in bfloat16 %.2g\n", long(exact.sums + halves.sums),
         long(exact.wrong + halves.wrong), exact.most, halves.most);
  return exact.wrong || halves.wrong;
}
