// Which threads the parallel loops run on, and how long OpenMP's threads spin.
#include <cstdlib>

#include "parallel.h"

namespace prefold {

std::atomic<bool> use_own_threads{false};

}  // namespace prefold

extern "C" void prefold_use_own_threads(int32_t own) { prefold::use_own_threads.store(own != 0); }

// Makes OpenMP's threads, which some of PyTorch's operations run on, sleep soon after their work is done.
//
// By default those of libgomp spin for milliseconds, on cores that other threads need. How long is read from the
// environment when libgomp is loaded, and later nobody can say otherwise; but libgomp itself spins only for some
// microseconds (1,000 turns) while it has more threads than there are processors. So one thread of ours asks for a
// team that is too large, once, and sleeps: its team sleeps with it, and costs nothing from then on.
// https://github.com/gcc-mirror/gcc/blob/master/libgomp/config/linux/wait.h (do_spin), libgomp/env.c
extern "C" void prefold_calm_openmp() {
#if defined(_OPENMP) && defined(__GNUC__) && !defined(__clang__)
  if (std::getenv("OMP_WAIT_POLICY") || std::getenv("GOMP_SPINCOUNT")) return;  // the user has said
  static std::atomic<bool> done{false};
  if (done.exchange(true)) return;
  try {
    prefold::start_thread([] {
      std::atomic<int> started{0};
#pragma omp parallel num_threads(omp_get_num_procs() + 1)
      started.fetch_add(1, std::memory_order_relaxed);
      prefold::sleep_for_ever();
    });
  } catch (const std::system_error&) {  // then they spin
  }
#endif
}
