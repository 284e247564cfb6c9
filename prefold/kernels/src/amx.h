// AMX tiles: registers of up to sixteen rows with sixteen words of four bytes each. A product reads a row's bfloat16
// numbers in pairs along k.
#pragma once

#include <algorithm>
#include <cstdint>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define PREFOLD_TILES
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace prefold {

// Return whether AMX may be used. The first call asks Linux for permission, because Linux allows a process to use the
// registers only on request: https://docs.kernel.org/arch/x86/xstate.html
inline bool may_use_tiles() {
#ifdef PREFOLD_TILES
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool may = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return may;
#else
  return false;
#endif
}

#ifdef PREFOLD_TILES

constexpr int kTile = 16;  // rows, and words of a row
constexpr int64_t kTileBytes = kTile * sizeof(uint32_t);

// Configure the thread's tiles: 0 to 3 for sums, 4 and 5 for rows, 6 and 7 for the matrix. words: the extent of tiles 4
// to 7 along k. All tiles lose their contents.
inline void configure_tiles(int64_t rows, int64_t words) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } shape;
  for (int t = 0; t < 8; ++t) {
    shape.row_bytes[t] = t == 4 || t == 5 ? words * sizeof(uint32_t) : kTileBytes;
    shape.rows[t] = t < 6 ? std::min<int64_t>(rows, kTile) : words;
  }
  asm volatile("ldtilecfg %0" ::"m"(shape));  // GCC's intrinsic declares a read of only eight bytes
}

#endif

// A scope in which the thread may use tiles, if the CPU has them and `used` is true.
class TileScope {
 public:
  explicit TileScope([[maybe_unused]] bool used) : used_(used) {
#ifdef PREFOLD_TILES
    if (used_) configure_tiles(kTile, kTile);
#endif
  }
  TileScope(const TileScope&) = delete;
  ~TileScope() {
#ifdef PREFOLD_TILES
    if (used_) _tile_release();
#endif
  }

 private:
  bool used_;
};

}  // namespace prefold
