// What ranks of a split model exchange outside of programs.
#include "ranks.h"

#include "interface.h"

namespace prefold {

#define PREFOLD_EXPORT_SUM(name, E)                                                                                 \
  extern "C" int32_t prefold_sum_ranks_##name(RanksView* ranks, E* x, int64_t count, int32_t threads) {              \
    return Ranks{*ranks}.sum(x, count, threads, false);                                                              \
  }
PREFOLD_EXPORT_SUM(float32, float)
PREFOLD_EXPORT_SUM(bfloat16, Bf16)

extern "C" int32_t prefold_gather_ranks(RanksView* view, const char* piece, int64_t bytes, char* pieces) {
  Ranks ranks{*view};
  for (int64_t at = 0; at < bytes; at += view->part) {
    const int64_t some = std::min(view->part, bytes - at);
    if (view->rank) std::memcpy(ranks.part_of<char>(view->rank), piece + at, some);
    const int32_t unmet = ranks.meet(some, [&] {
      for (int64_t other = 0; pieces && other < view->size; ++other) {
        std::memcpy(pieces + other * bytes + at, other ? ranks.part_of<char>(other) : piece + at, some);
      }
    });
    if (unmet) return unmet;
  }
  return 0;
}

}  // namespace prefold
