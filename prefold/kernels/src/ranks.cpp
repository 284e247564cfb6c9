// What ranks of a split model exchange outside of programs.
#include "ranks.h"

using prefold::Bf16;
using prefold::Ranks;

// x [count] = the sum of every rank's, on every rank. Returns 0, or an Unmet.
extern "C" int32_t prefold_sum_ranks_float32(Ranks* ranks, float* x, int64_t count, int32_t threads) {
  return ranks->sum(x, count, threads, false);
}
extern "C" int32_t prefold_sum_ranks_bfloat16(Ranks* ranks, Bf16* x, int64_t count, int32_t threads) {
  return ranks->sum(x, count, threads, false);
}

// pieces [ranks, bytes] = every rank's piece [bytes], on rank 0; elsewhere null. Returns 0, or an Unmet.
extern "C" int32_t prefold_gather_ranks(Ranks* ranks, const char* piece, int64_t bytes, char* pieces) {
  for (int64_t at = 0; at < bytes; at += ranks->part) {
    const int64_t some = std::min(ranks->part, bytes - at);
    if (ranks->rank) std::memcpy(ranks->part_of<char>(ranks->rank), piece + at, some);
    const int32_t unmet = ranks->meet(some, [&] {
      for (int64_t other = 0; pieces && other < ranks->size; ++other) {
        std::memcpy(pieces + other * bytes + at, other ? ranks->part_of<char>(other) : piece + at, some);
      }
    });
    if (unmet) return unmet;
  }
  return 0;
}
