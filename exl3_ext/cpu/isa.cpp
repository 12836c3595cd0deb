#include "cpu/isa.h"

#include <atomic>
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace exl3 {
namespace {

#if defined(__x86_64__)

struct Regs {
  uint32_t a = 0, b = 0, c = 0, d = 0;
};

Regs cpuid(uint32_t leaf, uint32_t sub) {
  Regs r;
  if (!__get_cpuid_count(leaf, sub, &r.a, &r.b, &r.c, &r.d)) return Regs{};
  return r;
}

uint64_t xcr0() {
  uint32_t lo, hi;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return (static_cast<uint64_t>(hi) << 32) | lo;
}

constexpr bool all_bits(uint32_t reg, uint32_t mask) { return (reg & mask) == mask; }
constexpr uint32_t bit(int i) { return 1u << i; }

// The tile registers are off until the process asks for them; without permission the first tile
// instruction ends the process.
bool request_amx() {
#if defined(__linux__)
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr long kXfeatureXtiledata = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
#else
  return false;
#endif
}

Isa detect() {
  const Regs l1 = cpuid(1, 0);
  constexpr uint32_t kOsxsave = bit(27), kFma = bit(12), kF16c = bit(29), kAvx = bit(28);
  if (!all_bits(l1.c, kOsxsave | kFma | kF16c | kAvx)) return Isa::kGeneric;
  const uint64_t os = xcr0();
  constexpr uint64_t kYmm = 0x6, kZmm = 0xE6, kTiles = 0x60000;
  if ((os & kYmm) != kYmm) return Isa::kGeneric;
  const Regs l7 = cpuid(7, 0);
  if (!all_bits(l7.b, bit(5) | bit(8))) return Isa::kGeneric;  // AVX2, BMI2
  // EBX: F 16, DQ 17, CD 28, BW 30, VL 31. ECX: VBMI 1, VBMI2 6, VNNI 11.
  const bool avx512 = (os & kZmm) == kZmm &&
                      all_bits(l7.b, bit(16) | bit(17) | bit(28) | bit(30) | bit(31)) &&
                      all_bits(l7.c, bit(1) | bit(6) | bit(11));
  if (!avx512) return Isa::kAvx2;
  // EDX: AMX-TILE 24, AMX-INT8 25.
  const bool amx = (os & kTiles) == kTiles && all_bits(l7.d, bit(24) | bit(25)) && request_amx();
  return amx ? Isa::kAmx : Isa::kAvx512;
}

#else
Isa detect() { return Isa::kGeneric; }
#endif

std::atomic<int> g_cap{static_cast<int>(Isa::kAmx)};

}  // namespace

Isa detect_isa() {
  static const Isa isa = detect();
  return isa;
}

Isa isa_cap() { return static_cast<Isa>(g_cap.load(std::memory_order_relaxed)); }
void set_isa_cap(Isa cap) { g_cap.store(static_cast<int>(cap), std::memory_order_relaxed); }

Isa active_isa() {
  const Isa cap = isa_cap(), have = detect_isa();
  return cap < have ? cap : have;
}

}  // namespace exl3
