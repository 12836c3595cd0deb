// Which instruction level this machine may use: cpuid, operating-system support and, for AMX, the
// kernel's permission. Levels are ordered; a table entry that a level leaves empty falls to the one
// below.
#pragma once

namespace exl3 {

enum class Isa : int { kGeneric = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3 };
constexpr int kIsaLevels = 4;

// avx2:   AVX2, FMA, F16C, BMI2
// avx512: F, BW, DQ, VL, CD, VBMI, VBMI2, VNNI (Ice Lake and Zen 4 on)
// amx:    avx512 with AMX-TILE, AMX-INT8, permission granted
Isa detect_isa();

Isa isa_cap();
void set_isa_cap(Isa cap);  // for settings and tests; the active level is min(cap, detected)
Isa active_isa();

}  // namespace exl3
