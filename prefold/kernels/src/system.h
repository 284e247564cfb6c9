// Calls to the operating system that the C++ library lacks.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#ifndef _WIN32
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#endif

namespace prefold {

// Start a detached thread with all signals blocked. The program's own threads handle the signals.
template <class Body>
void start_thread(Body body) {
#ifdef _WIN32
  std::thread(std::move(body)).detach();
#else
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread(std::move(body)).detach();
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
}

// Register a function to be called in every process that is forked from this one from now on.
inline void in_forks([[maybe_unused]] void (*call)()) {
#ifndef _WIN32
  pthread_atfork(nullptr, nullptr, call);
#endif
}

// Return how often the system has taken this thread's core for another thread. Without a system call that counts this,
// the result rises by 100 with each call, so that threads sleep early.
inline long involuntary_switches() {
#ifdef RUSAGE_THREAD
  rusage usage;
  if (getrusage(RUSAGE_THREAD, &usage) == 0) return usage.ru_nivcsw;
#endif
  static std::atomic<long> unknown{0};
  return unknown += 100;
}

// Return whether the other end of any pipe is closed. False on Windows, which has neither these pipes nor ranks.
inline bool has_ended([[maybe_unused]] const int32_t* pipes, [[maybe_unused]] int64_t count) {
#ifdef _WIN32
  return false;
#else
  std::vector<pollfd> ends;
  for (int64_t i = 0; i < count; ++i) ends.push_back({pipes[i], 0, 0});
  return poll(ends.data(), ends.size(), 0) > 0;
#endif
}

}  // namespace prefold
