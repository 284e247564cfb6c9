// Writes rows into the slots of a KV store, in the layout that the attention kernel reads. So a step that attends over
// many keys and adds a few packs only these few. Keys can be read back.
#include "attention.h"
#include "formats.h"
#include "interface.h"
#include "pack.h"
#include "parallel.h"

namespace prefold {
namespace {

template <class Format>
void write_row(const Packed<Format>& packed, const WriteCall& call, int64_t row, int64_t head) {
  using E = typename Format::Element;
  const int64_t slot = call.slots[row], pair = slot / 2, at = head * packed.pairs + pair;
  const int half = slot & 1;
  pack_key<Format>(packed.keys + at * packed.key_size + half * packed.key_size / 2,
                   static_cast<const E*>(call.k) + row * call.k_row + head * call.k_head, call.plane.dim, packed.dim);
  auto* out = packed.values + at * packed.value_size;
  const E* v = static_cast<const E*>(call.v) + row * call.v_row + head * call.v_head;
  Words unsafe(0);
  for (int64_t d = 0; d < packed.value_dim; d += kLanes) {
    const Floats x = load_some(v + d, call.plane.value_dim - d);
    unsafe |= not_finite(x);
    if (packed.values != packed.keys) Format::store_half(out + d, packed.value_row, x, half);
  }
  const uint8_t bit = 1 << half, before = packed.unsafe[at];
  const uint8_t after = any_bit(unsafe) ? before | bit : before & ~bit;
  if (after == before) return;
  packed.unsafe[at] = after;
  if (after & bit) __atomic_store_n(&packed.unsafe[call.plane.kv_heads * packed.pairs], 1, __ATOMIC_RELAXED);
}

template <class Format>
void write(const WriteCall& call) {
  const Packed<Format> packed = prefold::packed<Format>(call.plane);
  const int64_t numbers = call.rows * call.plane.kv_heads * (call.plane.dim + call.plane.value_dim) * 2;
  const int64_t workers = std::min<int64_t>(call.threads, 1 + numbers / kNumbersPerThread);
  // Each piece has whole pairs, whatever their rows, because the two slots of a pair share words.
  parallel_tasks(workers, static_cast<int>(workers), [&](int64_t w) {
    for (int64_t row = 0; row < call.rows; ++row) {
      if (call.slots[row] / 2 % workers != w) continue;
      for (int64_t head = 0; head < call.plane.kv_heads; ++head) write_row(packed, call, row, head);
    }
  });
}

template <class Format>
void read_keys(const SlotPlane& plane, const int64_t* slots, int64_t rows, typename Format::Element* out,
               int32_t threads) {
  using Stored = std::conditional_t<std::is_same_v<typename Format::Kept, float>, float, Bf16>;
  const Packed<Format> packed = prefold::packed<Format>(plane);
  parallel_ranges(rows, 2 * plane.kv_heads * plane.dim, threads, [&](int64_t begin, int64_t stop) {
    for (int64_t row = begin; row < stop; ++row) {
      for (int64_t head = 0; head < plane.kv_heads; ++head) {
        const auto* pair = packed.keys + (head * packed.pairs + slots[row] / 2) * packed.key_size;
        const auto* key = reinterpret_cast<const Stored*>(pair + (slots[row] & 1) * packed.key_size / 2);
        auto* to = out + (row * plane.kv_heads + head) * plane.dim;
        for (int64_t d = 0; d < plane.dim; d += kLanes) store_some(to + d, load(key + d), plane.dim - d);
      }
    }
  });
}

}  // namespace
extern "C" void prefold_read_keys(const SlotPlane* plane, const int64_t* slots, int64_t rows, void* out,
                                  int32_t threads, int32_t is_bf16) {
  if (is_bf16) {
    read_keys<InBf16Slots>(*plane, slots, rows, static_cast<Bf16*>(out), threads);
  } else if (plane->rounded) {
    read_keys<InFloat32<float, Bf16>>(*plane, slots, rows, static_cast<float*>(out), threads);
  } else {
    read_keys<InFloat32<float>>(*plane, slots, rows, static_cast<float*>(out), threads);
  }
}

extern "C" int32_t prefold_write_slots(const WriteCall* call, int32_t is_bf16) {
  for (int64_t i = 0; i < call->rows; ++i) {
    if (call->slots[i] < 0 || call->slots[i] >= call->plane.slots) return kNoSlot;
  }
  if (is_bf16) {
    write<InBf16Slots>(*call);
  } else if (call->plane.rounded) {
    write<InFloat32<float, Bf16>>(*call);
  } else {
    write<InFloat32<float>>(*call);
  }
  return 0;
}

extern "C" int32_t prefold_stores_bf16_pairs() { return InBf16Slots::kWidth == 2; }

}  // namespace prefold
