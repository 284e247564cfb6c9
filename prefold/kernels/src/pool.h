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
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "patience.h"
#include "system.h"

namespace prefold {

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether `ready` came true while spinning, for so long at most.
template <class Ready>
bool spin(Clock::duration most, const Ready& ready) {
  const auto until = Clock::now() + most;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      pause_briefly();
    }
  } while (Clock::now() < until);
  return ready();
}

inline void sleep_for_ever() {
  std::mutex mutex;
  std::condition_variable never;
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) never.wait(lock);
}

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
  template <class Body>
  void run(int threads, const Body& body) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn || threads < 2) return body(0);
    grow(threads < kMostThreads ? threads : kMostThreads);
    const auto started = Clock::now();
    patience_.begin(started);
    invoke_ = [](const void* given, int participant) { (*static_cast<const Body*>(given))(participant); };
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
      if (participant < participants_) invoke_(body_, participant);
      const uint64_t after = gate_.fetch_sub(1) - 1;
      if (!open(after) && working(after) == 0 && caller_sleeps_.load()) {
        std::lock_guard<std::mutex> lock(mutex_);
        done_.notify_one();
      }
    }
  }

  std::mutex turn_;  // of those who call `run`
  int threads_ = 0;
  void (*invoke_)(const void*, int) = nullptr;
  const void* body_ = nullptr;
  int participants_ = 0;
  alignas(64) std::atomic<uint64_t> gate_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  std::atomic<bool> caller_sleeps_{false};
  Patience patience_;
  std::mutex mutex_;  // of those who sleep
  std::condition_variable wake_, done_;
};

}  // namespace prefold
