// Random number offsets of CUDA graph captures. `kernels::capturing` says whether a capture runs.
#pragma once
#include <c10/core/Device.h>

#include <cstdint>

namespace prsmed {

// Number of random numbers that the capture has used so far. Restoring it makes a recomputed segment draw the same
// numbers. (During a capture the generator's state, which serves this purpose otherwise, cannot be read.)
uint64_t captured_offset(c10::DeviceIndex device);
void set_captured_offset(c10::DeviceIndex device, uint64_t offset);

}  // namespace prsmed
