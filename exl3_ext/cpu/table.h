// The table of CPU kernels. Each level of instructions fills the entries it has; an empty entry
// falls to the level below; `generic` is complete. Entries work on a range of rows or tiles and run
// inside one task; launchers (cpu/<op>.cpp) split the work and call them.
#pragma once
#include "cpu/isa.h"
#include "exl3/types.h"

namespace exl3 {

struct HadamardParams;

struct KernelTable {
  // Rows [begin, end) of a block-diagonal Hadamard transform.
  void (*hadamard_rows)(const HadamardParams& p, int64_t begin, int64_t end) = nullptr;
};

void fill_generic(KernelTable& t);
#if defined(__x86_64__)
void fill_avx2(KernelTable& t);
void fill_avx512(KernelTable& t);
void fill_amx(KernelTable& t);
#endif

const KernelTable& kernels();  // of the active level

}  // namespace exl3
