// What the current device and the compiled code have; what a kernel may be chosen by.
#pragma once

namespace exl3 {

// Compute capability, 90 for 9.0: of the device, and at most that of the PTX its code was made from
// and the cap. 0: the library has no code for the device.
int capability();

// Bytes of shared memory: at most in a thread block, and in a multiprocessor.
struct SharedMemory {
  int block, processor;
};
SharedMemory shared_memory();

// For checking: go by a lower capability and its shared memory. Before the first launch.
void set_capability_cap(int cap);

}  // namespace exl3
