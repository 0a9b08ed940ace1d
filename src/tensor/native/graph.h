// What other files ask about captures of CUDA graphs; whether there is one, `kernels::capturing` says.
#pragma once
#include <c10/core/Device.h>

#include <cstdint>

namespace prsmed {

// How many random numbers the capture has handed out so far: the place to go back to, so that a segment that runs twice
// draws the same ones. (A generator's state, which does this outside captures, cannot be read inside.)
uint64_t captured_offset(c10::DeviceIndex device);
void set_captured_offset(c10::DeviceIndex device, uint64_t offset);

}  // namespace prsmed
