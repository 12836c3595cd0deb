// From a bit rate to the instance for it.
#pragma once
#include "exl3/status.h"

namespace exl3::cuda {

// launch.template operator()<bits>(), whose result is a Status.
template <class Launch>
Status for_bits(int bits, const Launch& launch) {
  switch (bits) {
    case 1:
      return launch.template operator()<1>();
    case 2:
      return launch.template operator()<2>();
    case 3:
      return launch.template operator()<3>();
    case 4:
      return launch.template operator()<4>();
    case 5:
      return launch.template operator()<5>();
    case 6:
      return launch.template operator()<6>();
    case 7:
      return launch.template operator()<7>();
    case 8:
      return launch.template operator()<8>();
  }
  return Status::kNoKernel;
}

}  // namespace exl3::cuda
