// Says what the CPU and its system offer; compiled for any CPU of its kind, so that it runs on all of them.
#include <cstdint>

#if defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>

static bool offers(const char* name) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
}
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

// Bits, by the numbers that `compile.py` names: 0 x86-64-v3 (AVX2, FMA), 1 x86-64-v4 and VNNI, 2 bfloat16 in AVX-512,
// 3 AMX's tiles with their bfloat16 and int8, 4 VNNI without AVX-512; 5 ARM's sums of four products of int8, 6 its products
// of matrices of int8. On x86 the compiler's library asks CPUID, and by XGETBV whether the system keeps the registers; the
// permission for tiles, which Linux gives on request, is asked for by the kernels themselves (`amx.h`).
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
#elif defined(__aarch64__) && defined(__APPLE__)
  if (offers("hw.optional.arm.FEAT_DotProd")) bits |= 1 << 5;
  if (offers("hw.optional.arm.FEAT_I8MM")) bits |= 1 << 6;
#elif defined(__aarch64__) && defined(__linux__)
  if (getauxval(AT_HWCAP) >> 20 & 1) bits |= 1 << 5;   // ASIMDDP
  if (getauxval(AT_HWCAP2) >> 13 & 1) bits |= 1 << 6;  // I8MM
#endif
  return bits;
}
