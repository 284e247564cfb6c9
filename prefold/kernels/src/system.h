// What is asked of the system beside the C++ library, and how it differs between systems.
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

// Starts a thread that gets no signals: those are for the threads that the program knows of.
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

// Calls a function in every process that is forked from this one from now on.
inline void in_forks([[maybe_unused]] void (*call)()) {
#ifndef _WIN32
  pthread_atfork(nullptr, nullptr, call);
#endif
}

// How often the system has taken this thread's core for another thread. Where no system call says so, each call
// reports enough of them for threads to sleep early, as is right where nothing is known.
inline long involuntary_switches() {
#ifdef RUSAGE_THREAD
  rusage usage;
  if (getrusage(RUSAGE_THREAD, &usage) == 0) return usage.ru_nivcsw;
#endif
  static std::atomic<long> unknown{0};
  return unknown += 100;
}

// Whether the other end of a pipe is closed. Windows has no such pipes, and no ranks that share memory.
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
