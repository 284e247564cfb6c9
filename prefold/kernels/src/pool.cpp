// prefold's own threads. They do not wait for each other at a barrier, and do not keep a core busy that another process
// needs.
//
// A parallel loop in OpenMP ends when every thread of the team has reached its end, even a thread that never ran
// because another process has its core. Here the calling thread starts at once, and threads that arrive in time help.
// The caller waits only for threads that are in the middle of some work.
//
// Waking a sleeping thread costs as much as a short loop, and more on a virtual machine. So threads spin from one loop
// to the next, for about as long as recent gaps between loops, and sleep if the next loop has not come by then.
// Spinning is free only while no other process wants the core. The involuntary context switches of the threads show
// when one does. Then threads sleep after microseconds (`patience.h`).
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

// Pieces of each thread's share of a loop. Other threads can run the pieces that the thread has not started.
constexpr int64_t kPieces = 4;

class Pool {
  static constexpr int kMostThreads = 1024;

 public:
  // The pool of this process. A pool from before a fork belongs to the parent.
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

  // Run body(participant) on the calling thread, as participant 0, and on up to `threads - 1` other threads that arrive
  // before it is done. One call of body must be able to do all the work: if another thread is in `run`, only the
  // calling thread runs it.
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
  // gate_: the number of the loop (upper half), whether threads may still enter, and how many threads are in it.
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
    } catch (const std::system_error&) {  // continue with the threads that exist
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

  std::mutex turn_;  // held by the thread that calls `run`
  int threads_ = 0;
  const Body<int>* body_ = nullptr;
  int participants_ = 0;
  alignas(64) std::atomic<uint64_t> gate_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  std::atomic<bool> caller_sleeps_{false};
  Patience patience_;
  std::mutex mutex_;  // of wake_ and done_
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
