// How long the threads of PyTorch's OpenMP spin.
#ifdef __linux__
#include <dlfcn.h>
#endif

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>

#include "interface.h"
#include "system.h"

namespace prefold {
namespace {

[[maybe_unused]] void sleep_for_ever() {
  std::mutex mutex;
  std::condition_variable never;
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) never.wait(lock);
}

}  // namespace

// Makes OpenMP's threads, which some of PyTorch's operations run on, sleep soon after their work is done.
//
// By default those of libgomp spin for milliseconds, on cores that other threads need. How long is read from the
// environment when libgomp is loaded, and later nobody can say otherwise; but libgomp itself spins only for some
// microseconds (1,000 turns) while it has more threads than there are processors. So one thread of ours asks for a
// team that is too large, once, and sleeps: its team sleeps with it, and costs nothing from then on.
// https://github.com/gcc-mirror/gcc/blob/master/libgomp/config/linux/wait.h (do_spin), libgomp/env.c
extern "C" void prefold_calm_openmp() {
#ifdef __linux__
  if (std::getenv("OMP_WAIT_POLICY") || std::getenv("GOMP_SPINCOUNT")) return;  // the user has said
  // What GCC makes of a parallel region. LLVM's OpenMP has it too, beside functions of its own.
  using Parallel = void(void (*)(void*), void*, unsigned, unsigned);
  const auto parallel = reinterpret_cast<Parallel*>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  if (!parallel || dlsym(RTLD_DEFAULT, "__kmpc_fork_call")) return;
  static std::atomic<bool> done{false};
  if (done.exchange(true)) return;
  try {
    start_thread([parallel] {
      parallel([](void*) {}, nullptr, std::thread::hardware_concurrency() + 1, 0);
      sleep_for_ever();
    });
  } catch (const std::system_error&) {  // then they spin
  }
#endif
}

}  // namespace prefold
