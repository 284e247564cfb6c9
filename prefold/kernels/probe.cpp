// Reports the features of the CPU and its system. It is compiled for the most basic CPU of its kind, so it runs on all.
#include <cstdint>
#include <initializer_list>

#if defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>

static bool offers(const char* name) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
}
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>

// The result of CPUID (Intel's Software Developer's Manual, volume 2A), and XCR0, the registers that the system saves.
// Compilers offer `__builtin_cpu_supports` for this. It reports no feature at all if Clang comes without GCC's library.
struct Cpu {
  uint32_t basic = 0, extended = 0, b = 0, c = 0, d = 0, more = 0, kept = 0;

  Cpu() {
    uint32_t eax, ebx, ecx, edx;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx)) basic = ecx;
    if (__get_cpuid(0x80000001, &eax, &ebx, &ecx, &edx)) extended = ecx;
    if (__get_cpuid_count(7, 0, &eax, &b, &c, &d) && eax > 0) __get_cpuid_count(7, 1, &more, &ebx, &ecx, &edx);
    if (has(basic, {27})) __asm__("xgetbv" : "=a"(kept), "=d"(edx) : "c"(0));
  }

  static bool has(uint32_t word, std::initializer_list<int> bits) {
    for (const int bit : bits) {
      if (!(word >> bit & 1)) return false;
    }
    return true;
  }

  // AVX2, FMA, F16C, BMI, LZCNT and MOVBE.
  bool v3() const {
    return has(kept, {1, 2}) && has(basic, {12, 22, 28, 29}) && has(b, {3, 5, 8}) && has(extended, {5});
  }
  // Four extensions of AVX-512 beside its foundation.
  bool v4() const { return v3() && has(kept, {5, 6, 7}) && has(b, {16, 17, 28, 30, 31}); }
  bool vnni() const { return has(c, {11}); }
  bool bf16() const { return has(more, {5}); }
  bool tiles() const { return has(kept, {17, 18}) && has(d, {22, 24, 25}); }
  bool avx_vnni() const { return has(more, {4}); }
};
#endif

// Return the features as bits, with the numbers that `compile.py` uses:
//   0  x86-64-v3 (AVX2, FMA)
//   1  x86-64-v4 and VNNI
//   2  bfloat16 in AVX-512
//   3  AMX tiles with bfloat16 and int8
//   4  VNNI without AVX-512
//   5  ARM: sums of four int8 products
//   6  ARM: products of int8 matrices
// Linux also requires a permission to use tiles. The kernels themselves ask for it (`amx.h`).
// (`amx.h`).
extern "C" uint32_t prefold_probe() {
  uint32_t bits = 0;
#if defined(__x86_64__)
  const Cpu cpu;
  if (cpu.v3()) bits |= 1 << 0;
  if (cpu.v4() && cpu.vnni()) bits |= 1 << 1;
  if (cpu.v4() && cpu.bf16()) bits |= 1 << 2;
  if (cpu.tiles()) bits |= 1 << 3;
  if (cpu.v3() && cpu.avx_vnni()) bits |= 1 << 4;
#elif defined(__aarch64__) && defined(__APPLE__)
  if (offers("hw.optional.arm.FEAT_DotProd")) bits |= 1 << 5;
  if (offers("hw.optional.arm.FEAT_I8MM")) bits |= 1 << 6;
#elif defined(__aarch64__) && defined(__linux__)
  if (getauxval(AT_HWCAP) >> 20 & 1) bits |= 1 << 5;   // ASIMDDP
  if (getauxval(AT_HWCAP2) >> 13 & 1) bits |= 1 << 6;  // I8MM
#endif
  return bits;
}
