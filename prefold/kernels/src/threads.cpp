// Shortens the time that PyTorch's OpenMP threads spin.
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

// Let the threads of OpenMP, which some operations of PyTorch run on, sleep soon after their work is done.
//
// By default the threads of libgomp spin for milliseconds on cores that other threads need. libgomp reads this time
// from the environment when it is loaded, and offers no way to change it later. But it spins only for some microseconds
// (1,000 turns) while it has more threads than there are processors. So one thread of ours starts a team that is too
// large, once, and then sleeps. The team sleeps as well and costs nothing from then on.
// https://github.com/gcc-mirror/gcc/blob/master/libgomp/config/linux/wait.h (do_spin), libgomp/env.c
extern "C" void prefold_calm_openmp() {
#ifdef __linux__
  if (std::getenv("OMP_WAIT_POLICY") || std::getenv("GOMP_SPINCOUNT")) return;  // the user has chosen
  // GCC compiles a parallel region to a call of GOMP_parallel. LLVM's OpenMP has this function, and its own as well.
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
  } catch (const std::system_error&) {  // no thread: OpenMP keeps spinning
  }
#endif
}

}  // namespace prefold
