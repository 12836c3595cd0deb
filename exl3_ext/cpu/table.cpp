#include "cpu/table.h"

namespace exl3 {
namespace {

using Fill = void (*)(KernelTable&);
#if defined(__x86_64__)
constexpr Fill kFill[kIsaLevels] = {fill_generic, fill_avx2, fill_avx512, fill_amx};
#else
constexpr Fill kFill[1] = {fill_generic};
#endif

struct Tables {
  KernelTable level[kIsaLevels];
  Tables() {
    for (int i = 0; i <= static_cast<int>(detect_isa()); ++i) {
      if (i > 0) level[i] = level[i - 1];
      kFill[i](level[i]);
    }
  }
};

}  // namespace

const KernelTable& kernels() {
  static const Tables tables;
  return tables.level[static_cast<int>(active_isa())];
}

}  // namespace exl3
