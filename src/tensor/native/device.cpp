// What the caching allocator of a device says; nothing of CUDA's headers is needed for it.
#include "native.h"

#include <c10/core/CachingDeviceAllocator.h>

// out: bytes of live blocks now and at most since the last reset. `reset` begins a new maximum after reading.
extern "C" char* prsmed_device_usage(int32_t index, bool reset, uint64_t* out) {
  PRSMED_TRY({
    auto* allocator = c10::getDeviceAllocator(c10::kCUDA);
    const auto device = static_cast<c10::DeviceIndex>(index);
    const auto stats = allocator->getDeviceStats(device);
    const auto& bytes = stats.allocated_bytes[0];  // of both pools
    out[0] = static_cast<uint64_t>(bytes.current);
    out[1] = static_cast<uint64_t>(bytes.peak);
    if (reset) allocator->resetPeakStats(device);
  })
}
