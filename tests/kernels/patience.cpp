// Drives what a pool knows of its cores by a clock and a count of switches that this program sets.
#include "patience.h"

#include <cstdio>

using namespace prefold;
using std::chrono::microseconds;
using std::chrono::milliseconds;

static Clock::time_point now = Clock::time_point{} + std::chrono::hours(1);
static Patience patience;

static long spins() { return std::chrono::duration_cast<microseconds>(patience.for_loop()).count(); }
static long waits() {
  return std::chrono::duration_cast<microseconds>(patience.for_helpers(microseconds(100))).count();
}

// Loops of 100 microseconds with gaps of so many; the core is taken `taken` times in each 20 ms.
static void loops(int count, microseconds gap, int taken, Watch& watch) {
  static long done = 0;
  for (int i = 0; i < count; ++i) {
    now += gap;
    patience.begin(now);
    now += microseconds(100);
    patience.look(watch, now, [&] { return done += taken; });
    patience.end(now);
  }
}

int main() {
  Watch watch;
  std::printf("new %ld %ld\n", spins(), waits());
  loops(100, microseconds(300), 0, watch);
  std::printf("gaps of 300: %ld %ld\n", spins(), waits());
  loops(1, microseconds(1500), 0, watch);
  std::printf("a gap of 1500: %ld\n", spins());
  loops(20000, microseconds(300), 1, watch);
  std::printf("gaps of 300 again, and one switch a window: %ld %ld\n", spins(), waits());
  loops(1, milliseconds(30), 0, watch);
  std::printf("idle for 30000: %ld\n", spins());
  int wanted = 0;
  for (int i = 0; i < 25; ++i) {  // 25 s in which the core is taken again and again
    for (int j = 0; j < 2500; ++j) {
      loops(1, microseconds(300), 2, watch);
      wanted += spins() == 50 && waits() == 20;
    }
  }
  std::printf("wanted: %s\n", wanted > 60000 ? "nearly always" : "no");
  loops(5000, microseconds(300), 0, watch);
  std::printf("free again: %ld %ld\n", spins(), waits());
}
