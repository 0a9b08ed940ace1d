// Trace of one thread's allocations and operators, for plans. The allocators of ledger.cpp (CPU) and meta.cpp report to
// it.
#pragma once
#include <cstdint>

// A block in the thread's trace. `trace` is 0 if it belongs to none.
struct PrsmedTag { uint32_t trace = 0, block = 0; };

extern "C" {
bool prsmed_trace_active() noexcept;       // a trace runs on this thread
bool prsmed_trace_counts_host() noexcept;  // ... and CPU tensors are part of it
PrsmedTag prsmed_trace_allocate(uint64_t bytes, int32_t category) noexcept;
void prsmed_trace_release(PrsmedTag tag) noexcept;
void prsmed_trace_move(PrsmedTag tag, int32_t category) noexcept;
uint32_t prsmed_module() noexcept;  // module path of this thread
// Adds the cost of a loop of this library (libtorch's operators are counted automatically). `name` must be static.
void prsmed_trace_cost(const char* name, double flops, double bytes, uint8_t element_bytes) noexcept;
}
