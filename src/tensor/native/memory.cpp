// Memory of a GPU's caching allocator, through c10's interface, which needs no CUDA headers.
#include "native.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <sstream>

namespace {

c10::DeviceAllocator& allocator() {
  auto* found = c10::getDeviceAllocator(c10::DeviceType::CUDA);
  TORCH_CHECK(found->initialized(), "no GPU is in use");
  return *found;
}

struct PrsmedDeviceMemory {
  uint64_t allocated, allocated_peak, reserved, reserved_peak, requested, requested_peak, free, total;
};

PrsmedDeviceMemory memory_of(c10::DeviceIndex device, bool asks_driver) {
  const auto stats = allocator().getDeviceStats(device);
  const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto& allocated = stats.allocated_bytes[all];
  const auto& reserved = stats.reserved_bytes[all];
  const auto& requested = stats.requested_bytes[all];
  auto bytes = [](int64_t count) { return static_cast<uint64_t>(count); };
  PrsmedDeviceMemory out = {
      bytes(allocated.current), bytes(allocated.peak), bytes(reserved.current), bytes(reserved.peak),
      bytes(requested.current), bytes(requested.peak), 0, 0};
  if (!asks_driver) return out;
  try {
    std::tie(out.free, out.total) = allocator().getMemoryInfo(device);
  } catch (const c10::Error&) {  // not every allocator can ask the driver
  }
  return out;
}

}  // namespace

extern "C" {

// Makes a GPU the current one of this thread.
char* prsmed_set_device(int32_t index) {
  PRSMED_TRY(c10::impl::VirtualGuardImpl(at::kCUDA).setDevice({at::kCUDA, static_cast<c10::DeviceIndex>(index)}))
}

// `free` and `total` are the driver's, for all processes; 0 if the allocator cannot ask the driver, or without
// `asks_driver`. The driver's answer can take long.
char* prsmed_device_memory(int32_t index, bool asks_driver, PrsmedDeviceMemory* out) {
  PRSMED_TRY(*out = memory_of(static_cast<c10::DeviceIndex>(index), asks_driver))
}

char* prsmed_device_reset_peaks(int32_t index) {
  PRSMED_TRY(allocator().resetPeakStats(static_cast<c10::DeviceIndex>(index)))
}

// Sets the fraction of the GPU's memory that the caching allocator may take. Call it before the first use of the GPU.
// Earlier settings, such as those of the environment (`PYTORCH_ALLOC_CONF`), are set again, because libtorch drops
// some.
char* prsmed_device_limit(double fraction) {
  PRSMED_TRY({
    std::ostringstream text;
    const auto before = c10::CachingAllocator::getAllocatorSettings();
    if (!before.empty()) text << before << ",";
    text << "per_process_memory_fraction:" << fraction;
    c10::CachingAllocator::setAllocatorSettings(text.str());
  })
}

// cuDNN's version at run time as a number, such as 90100; 0 without it.
char* prsmed_cudnn_version(int64_t* out) {
  PRSMED_TRY({
    const auto& hooks = at::detail::getCUDAHooks();
    *out = hooks.compiledWithCuDNN() && hooks.hasCUDA() ? hooks.versionCuDNN() : 0;
  })
}

char* prsmed_device_release_cache() { PRSMED_TRY(allocator().emptyCache()) }
}
