// Says what the CPU and its system offer; compiled for any CPU of its kind, so that it runs on all of them.
#include <cstdint>

// Bits, by the numbers that `compile.py` names: 0 x86-64-v3 (AVX2, FMA), 1 x86-64-v4 and VNNI, 2 bfloat16 in AVX-512,
// 3 AMX's tiles with their bfloat16 and int8, 4 VNNI without AVX-512. The compiler's library asks CPUID, and by XGETBV whether the system keeps the
// registers; the permission for tiles, which Linux gives on request, is asked for by the kernels themselves (`amx.h`).
extern "C" uint32_t prefold_probe() {
  uint32_t bits = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("x86-64-v3")) bits |= 1 << 0;
  if (__builtin_cpu_supports("x86-64-v4") && __builtin_cpu_supports("avx512vnni")) bits |= 1 << 1;
  if (__builtin_cpu_supports("avx512bf16")) bits |= 1 << 2;
  if (__builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
      __builtin_cpu_supports("amx-int8")) {
    bits |= 1 << 3;
  }
  if (__builtin_cpu_supports("avxvnni")) bits |= 1 << 4;
#endif
  return bits;
}
