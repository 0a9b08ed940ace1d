// Runs an operator once on the CPU to learn what it allocates, and repeats that on meta ever after.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <string>

// The ledger (ledger.cpp): allocations and releases of both devices end here.
extern "C" void prsmed_ledger_add(int32_t category, uint64_t bytes);
extern "C" void prsmed_ledger_remove(int32_t category, uint64_t bytes);
extern "C" int32_t prsmed_ledger_category();

namespace prsmed {
c10::Allocator* meta_allocator();
// A boxed kernel of the Meta key for any operator whose CPU kernel is worth copying to the byte.
void mirror(const c10::OperatorHandle& op, torch::jit::Stack* stack);
// Most that `run` holds at once on the CPU above what it held when it began; remembered under `key`.
int64_t transient_peak(const std::string& key, const std::function<void()>& run);
// A CPU tensor whose pages are never made: reads give zeros.
at::Tensor ghost(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType type);
at::Tensor meta_tensor(c10::Storage storage, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset, at::ScalarType type);
}  // namespace prsmed
