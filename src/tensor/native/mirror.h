// Runs an operator once on the CPU to record its allocations, and repeats them on the meta device.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <string>

// The ledger (ledger.cpp), which counts allocations of the CPU and the meta device.
extern "C" void prsmed_ledger_add(int32_t category, uint64_t bytes) noexcept;
extern "C" void prsmed_ledger_remove(int32_t category, uint64_t bytes) noexcept;
extern "C" int32_t prsmed_ledger_category() noexcept;

namespace prsmed {
c10::Allocator* meta_allocator();
// A boxed kernel of the Meta key that allocates exactly like the operator's CPU kernel.
void mirror(const c10::OperatorHandle& op, torch::jit::Stack* stack);
// Peak bytes that `run` allocates on the CPU in addition to those at its start; cached under `key`.
int64_t transient_peak(const std::string& key, const std::function<void()>& run);
// A CPU tensor without physical pages; reads give zeros.
at::Tensor ghost(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType type);
at::Tensor meta_tensor(c10::Storage storage, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset,
                       at::ScalarType type);
}  // namespace prsmed
