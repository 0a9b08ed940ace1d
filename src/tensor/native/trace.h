// The trace: what one thread allocates and computes, for plans. The allocators of ledger.cpp (CPU) and meta.cpp report to it.
#pragma once
#include <cstdint>

// A block of the thread's trace; `trace` 0 means that it belongs to none.
struct PrsmedTag { uint32_t trace = 0, block = 0; };

extern "C" {
bool prsmed_trace_active();        // a trace runs on this thread
bool prsmed_trace_counts_host();   // ... and CPU tensors are part of it
PrsmedTag prsmed_trace_allocate(uint64_t bytes, int32_t category);
void prsmed_trace_release(PrsmedTag tag);
void prsmed_trace_move(PrsmedTag tag, int32_t category);
uint32_t prsmed_scope();           // module scope of this thread
// What a loop of our own costs (libtorch's operators are counted by themselves); `name` lives for ever.
void prsmed_trace_cost(const char* name, double flops, double bytes, uint8_t element_bytes);
}
