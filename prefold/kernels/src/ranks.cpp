// Meetings of ranks, and exchanges outside of programs.
#include "ranks.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "interface.h"
#include "spin.h"
#include "system.h"
#include "vectors.h"

namespace prefold {
namespace {

void in_pieces(int64_t count, int threads, const Body<int64_t, int64_t>& body) {
  constexpr int64_t kPiece = 1024;
  parallel_ranges((count + kPiece - 1) / kPiece, kPiece, threads,
                  [&](int64_t begin, int64_t stop) { body(begin * kPiece, std::min(stop * kPiece, count)); });
}

}  // namespace

// Wait until another rank comes to the next meeting: spin, then yield the core to other threads, then sleep. Return 0,
// or a Failure.
int32_t Ranks::wait_for(int64_t other) const {
  const auto is_there = [&] { return line(other).met.load(std::memory_order_acquire) > view.met; };
  constexpr Clock::duration kSpin = std::chrono::microseconds(30), kYield = std::chrono::milliseconds(2);
  constexpr double kLook = 0.01;  // seconds between two checks of the pipes
  if (is_there() || spin(kSpin, is_there)) return 0;
  const auto begun = Clock::now();
  double waited = 0;  // without the time while this process was stopped
  auto looked = begun;
  while (!is_there()) {
    const auto now = Clock::now();
    if (now - begun < kYield) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    const double since = std::chrono::duration<double>(now - looked).count();
    if (since < kLook) continue;
    looked = now;
    waited += std::min(since, 1.0);
    if (has_ended(view.pipes, view.num_pipes) && !is_there()) return kGone;
    if (waited > view.patience) return kLate;
  }
  return 0;
}

int32_t Ranks::meet(int64_t bytes, const Body<>& read) {
  line(view.rank).bytes[view.met & 1].store(bytes, std::memory_order_relaxed);
  line(view.rank).met.store(view.met + 1, std::memory_order_release);
  for (int64_t other = 0; other < view.size; ++other) {
    if (const int32_t unmet = wait_for(other)) return unmet;
    const auto theirs = line(other).bytes[view.met & 1].load(std::memory_order_relaxed);
    if (theirs != static_cast<uint64_t>(bytes)) return kApart;
  }
  read();
  ++view.met;
  return 0;
}

template <class E>
int32_t Ranks::sum(E* x, int64_t count, int threads, bool is_given) {
  const int64_t most = view.part / static_cast<int64_t>(sizeof(E));
  for (int64_t at = 0; at < count; at += most) {
    const int64_t some = std::min(most, count - at);
    if (!is_given) {
      E* own = part_of<E>(view.rank);
      in_pieces(some, threads, [&](int64_t begin, int64_t stop) {
        std::memcpy(own + begin, x + at + begin, (stop - begin) * sizeof(E));
      });
    }
    const int32_t unmet = meet(some * sizeof(E), [&] {
      in_pieces(some, threads, [&](int64_t begin, int64_t stop) {
        for (int64_t i = begin; i < stop; i += kLanes) {
          const int64_t lanes = std::min<int64_t>(kLanes, stop - i);
          Floats total = load_some(part_of<E>(0) + i, lanes);
          for (int64_t other = 1; other < view.size; ++other) total += load_some(part_of<E>(other) + i, lanes);
          store_some(x + at + i, total, lanes);
        }
      });
    });
    if (unmet) return unmet;
  }
  return 0;
}

template int32_t Ranks::sum(float* x, int64_t count, int threads, bool is_given);
template int32_t Ranks::sum(Bf16* x, int64_t count, int threads, bool is_given);

int32_t Ranks::most(uint64_t* x, int64_t count) {
  const int64_t most = view.part / static_cast<int64_t>(sizeof *x);
  for (int64_t at = 0; at < count; at += most) {
    const int64_t some = std::min(most, count - at);
    std::memcpy(part_of<char>(view.rank), x + at, some * sizeof *x);
    const int32_t unmet = meet(some * sizeof *x, [&] {
      for (int64_t other = 0; other < view.size; ++other) {
        const uint64_t* theirs = part_of<uint64_t>(other);
        for (int64_t i = 0; i < some; ++i) x[at + i] = std::max(x[at + i], theirs[i]);
      }
    });
    if (unmet) return unmet;
  }
  return 0;
}

#define PREFOLD_EXPORT_SUM(name, E)                                                                     \
  extern "C" int32_t prefold_sum_ranks_##name(RanksView* ranks, E* x, int64_t count, int32_t threads) { \
    return Ranks{*ranks}.sum(x, count, threads, false);                                                 \
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
