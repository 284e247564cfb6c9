// Threads of our own, which neither wait for each other at a barrier nor keep a core busy that somebody else needs.
//
// A parallel loop in OpenMP ends when every thread of the team has come to its end, also one that the system has not
// let run at all because another process has its core. Here the calling thread begins at once, the threads that come
// in time help, and the caller waits only for threads that are in the middle of something.
//
// Waking a thread that sleeps costs as much as a short loop takes, on a virtual machine more. So threads spin from
// one loop to the next, for as long as the gaps between loops have lately been, and sleep when the next loop does not
// come by then. Spinning is free only while nobody else wants the core: the involuntary context switches of the
// threads tell when somebody does, and then threads sleep after microseconds (`patience.h`).
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>

#include "parallel.h"
#include "patience.h"
#include "system.h"

namespace prefold {
namespace {

// Pieces that a thread's share of a loop is cut into, so that others can take what it has not come to.
constexpr int64_t kPieces = 4;

class Pool {
  static constexpr int kMostThreads = 1024;

 public:
  // The pool of this process; one that was made before a fork is left to the parent.
  static Pool& of_process() {
    static std::once_flag registered;
    std::call_once(registered, in_forks, [] { current().store(nullptr); });
    Pool* pool = current().load(std::memory_order_acquire);
    if (pool) return *pool;
    Pool* fresh = new Pool;  // never deleted: threads sleep in it until the process ends
    if (current().compare_exchange_strong(pool, fresh)) return *fresh;
    delete fresh;
    return *pool;
  }

  // body(participant) in the calling thread, as participant 0, and in up to `threads - 1` others that come before it
  // is done. One call of body must be enough to do all the work. Where another thread is in `run`, it is.
  void run(int threads, const Body<int>& body) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn) return body(0);
    grow(threads < kMostThreads ? threads : kMostThreads);
    const auto started = Clock::now();
    patience_.begin(started);
    body_ = &body;
    participants_ = threads;
    gate_.store(((gate_.load(std::memory_order_relaxed) >> 32) + 1) << 32 | kOpen);
    if (sleeping_.load() > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    body(0);
    const auto finished = Clock::now();
    gate_.fetch_and(~uint64_t{kOpen});
    const auto left = [this] { return working(gate_.load()) == 0; };
    if (!spin(patience_.for_helpers(finished - started), left)) {
      std::unique_lock<std::mutex> lock(mutex_);
      caller_sleeps_.store(true);
      done_.wait(lock, left);
      caller_sleeps_.store(false);
    }
    const auto ended = Clock::now();
    patience_.look(callers_watch(), ended, involuntary_switches);
    patience_.end(ended);
  }

 private:
  // gate_: the number of the loop (upper half), whether it is open to who comes, and how many are in it.
  static constexpr uint32_t kOpen = 1u << 31;
  static uint32_t number(uint64_t gate) { return static_cast<uint32_t>(gate >> 32); }
  static bool open(uint64_t gate) { return gate & kOpen; }
  static uint32_t working(uint64_t gate) { return static_cast<uint32_t>(gate) & ~kOpen; }

  static Watch& callers_watch() {
    thread_local Watch watch;
    return watch;
  }

  static std::atomic<Pool*>& current() {
    static std::atomic<Pool*> pool{nullptr};
    return pool;
  }

  void grow(int threads) {
    if (threads_ + 1 >= threads) return;
    try {
      for (; threads_ + 1 < threads; ++threads_) start_thread([this, number = threads_ + 1] { work(number); });
    } catch (const std::system_error&) {  // as many as there are, then
    }
  }

  void work(int participant) {
    uint32_t seen = 0;
    Watch watch;
    for (;;) {
      const auto called = [&] {
        const uint64_t gate = gate_.load();
        return open(gate) && number(gate) != seen;
      };
      patience_.look(watch, Clock::now(), involuntary_switches);
      if (!spin(patience_.for_loop(), called)) {
        std::unique_lock<std::mutex> lock(mutex_);
        sleeping_.fetch_add(1);
        wake_.wait(lock, called);
        sleeping_.fetch_sub(1);
      }
      uint64_t gate = gate_.load();
      bool entered = false;
      while (open(gate) && number(gate) != seen && !entered) entered = gate_.compare_exchange_weak(gate, gate + 1);
      if (!entered) continue;
      seen = number(gate);
      if (participant < participants_) (*body_)(participant);
      const uint64_t after = gate_.fetch_sub(1) - 1;
      if (!open(after) && working(after) == 0 && caller_sleeps_.load()) {
        std::lock_guard<std::mutex> lock(mutex_);
        done_.notify_one();
      }
    }
  }

  std::mutex turn_;  // of those who call `run`
  int threads_ = 0;
  const Body<int>* body_ = nullptr;
  int participants_ = 0;
  alignas(64) std::atomic<uint64_t> gate_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  std::atomic<bool> caller_sleeps_{false};
  Patience patience_;
  std::mutex mutex_;  // of those who sleep
  std::condition_variable wake_, done_;
};

}  // namespace

void together(int threads, const Body<int>& body) { threads < 2 ? body(0) : Pool::of_process().run(threads, body); }

void parallel_tasks(int64_t n, int threads, const Body<int64_t>& body) {
  std::atomic<int64_t> next{0};
  together(static_cast<int>(std::min<int64_t>(threads, n)), [&](int) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) body(i);
  });
}

void parallel_shares(int64_t n, int threads, const Body<int64_t>& body, const Around& around) {
  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t stop;
  };
  constexpr int kMaxShares = 128;
  const int workers = static_cast<int>(std::min<int64_t>({threads, n, kMaxShares}));
  if (workers <= 1) {
    return around([&] {
      for (int64_t i = 0; i < n; ++i) body(i);
    });
  }
  Share shares[kMaxShares];
  for (int w = 0; w < workers; ++w) {
    shares[w].next.store(n * w / workers, std::memory_order_relaxed);
    shares[w].stop = n * (w + 1) / workers;
  }
  together(workers, [&](int participant) {
    around([&] {
      for (int other = 0; other < workers; ++other) {
        Share& share = shares[(participant + other) % workers];
        for (int64_t i; (i = share.next.fetch_add(1, std::memory_order_relaxed)) < share.stop;) body(i);
      }
    });
  });
}

void parallel_shares(int64_t n, int threads, const Body<int64_t>& body) {
  parallel_shares(n, threads, body, [](const Body<>& run) { run(); });
}

void parallel_ranges(int64_t n, int64_t size, int threads, const Body<int64_t, int64_t>& body) {
  const int64_t workers = std::min<int64_t>({threads, n, 1 + n * size / kNumbersPerThread});
  if (workers <= 1) {
    if (n > 0) body(int64_t{0}, n);
    return;
  }
  const int64_t pieces = std::min<int64_t>(n, workers * kPieces);
  parallel_shares(pieces, static_cast<int>(workers), [&](int64_t i) { body(n * i / pieces, n * (i + 1) / pieces); });
}

}  // namespace prefold
