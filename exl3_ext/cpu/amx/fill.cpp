#include "cpu/amx/linear.h"
#include "cpu/table.h"

namespace exl3 {

void fill_amx(KernelTable& t) {
  t.linear_tiles = amx::linear_tiles;
  t.linear_many = amx::linear_many;
}

}  // namespace exl3
