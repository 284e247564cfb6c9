// Short waits for another thread or process.
#pragma once

#include <chrono>

namespace prefold {

using Clock = std::chrono::steady_clock;

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spin until ready() is true, or for the time `most`. Return the last value of ready().
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

}  // namespace prefold
