// Result of a launcher. Torch-free.
#pragma once

namespace exl3 {

enum class Status : int {
  kOk = 0,
  kNoKernel,     // no instance for this (bits, codebook, shape) on this machine
  kBadArgument,  // sizes that the binding should have refused
  kOutOfMemory,  // workspace could not be allocated
  kDeviceError,  // the device runtime refused the launch
  kOutOfRange,   // an id, slot, length or page read at run time lies outside its table
};

constexpr const char* status_text(Status s) {
  switch (s) {
    case Status::kOk:
      return "ok";
    case Status::kNoKernel:
      return "no kernel for these bits, codebook and shape";
    case Status::kBadArgument:
      return "bad argument";
    case Status::kOutOfMemory:
      return "out of memory";
    case Status::kDeviceError:
      return "device error";
    case Status::kOutOfRange:
      return "an id, slot, length or page lies outside its table";
  }
  return "unknown status";
}

}  // namespace exl3
