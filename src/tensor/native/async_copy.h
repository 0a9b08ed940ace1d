// The stream of asynchronous copies to a GPU.
#pragma once
#include <c10/core/impl/VirtualGuardImpl.h>

// One copy stream per GPU, taken from the pool once.
c10::Stream copy_stream(const c10::impl::VirtualGuardImpl& guard, c10::Device device);
