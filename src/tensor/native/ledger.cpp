// The allocation ledger: an allocator for CPU tensors that counts bytes by category.
// Every block carries its size and category in a header, so that releasing needs no look-up.
#include "native.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <sys/mman.h>

#include <cstdint>
#include <mutex>

namespace {

constexpr size_t kHeader = 64;  // c10::gAlignment: the data stays aligned as libtorch's kernels expect
constexpr int kCategories = 8;

struct Header {
  uint64_t bytes;
  int32_t category;
};

struct Ledger {
  std::mutex lock;
  uint64_t current[kCategories] = {};
  uint64_t peak[kCategories] = {};
  uint64_t total = 0;
  uint64_t total_peak = 0;
  uint64_t at_peak[kCategories] = {};
};

Ledger& ledger() {
  static Ledger* instance = new Ledger;  // never destroyed: tensors may outlive static destructors
  return *instance;
}

thread_local int32_t current_category = 0;

void add(int32_t category, uint64_t bytes) {
  auto& l = ledger();
  std::lock_guard<std::mutex> guard(l.lock);
  l.current[category] += bytes;
  l.total += bytes;
  if (l.current[category] > l.peak[category]) l.peak[category] = l.current[category];
  if (l.total > l.total_peak) {
    l.total_peak = l.total;
    std::copy(l.current, l.current + kCategories, l.at_peak);
  }
}

void remove(int32_t category, uint64_t bytes) {
  auto& l = ledger();
  std::lock_guard<std::mutex> guard(l.lock);
  l.current[category] -= bytes;
  l.total -= bytes;
}

Header* header_of(void* data) { return reinterpret_cast<Header*>(static_cast<char*>(data) - kHeader); }

void release(void* data) {
  if (data == nullptr) return;
  Header* header = header_of(data);
  remove(header->category, header->bytes);
  c10::free_cpu(header);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = c10::Device(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    char* base = static_cast<char*>(c10::alloc_cpu(bytes + kHeader));
    auto* header = reinterpret_cast<Header*>(base);
    header->bytes = bytes;
    header->category = current_category;
    add(header->category, bytes);
    char* data = base + kHeader;
    return {data, data, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dest, const void* src, size_t count) const override { default_copy_data(dest, src, count); }
};

CountingAllocator allocator;

}  // namespace

extern "C" {

void prsmed_ledger_install() { c10::SetCPUAllocator(&allocator, 255); }

int32_t prsmed_ledger_enter(int32_t category) {
  int32_t before = current_category;
  current_category = category;
  return before;
}

// out: total current, total peak, then kCategories each of current, own peak, share at the total peak
void prsmed_ledger_read(uint64_t* out) {
  auto& l = ledger();
  std::lock_guard<std::mutex> guard(l.lock);
  out[0] = l.total;
  out[1] = l.total_peak;
  for (int i = 0; i < kCategories; ++i) {
    out[2 + i] = l.current[i];
    out[2 + kCategories + i] = l.peak[i];
    out[2 + 2 * kCategories + i] = l.at_peak[i];
  }
}

void prsmed_ledger_reset_peak() {
  auto& l = ledger();
  std::lock_guard<std::mutex> guard(l.lock);
  l.total_peak = l.total;
  for (int i = 0; i < kCategories; ++i) l.peak[i] = l.at_peak[i] = l.current[i];
}

// Moves a tensor's storage to another category; true when the ledger owns that storage.
bool prsmed_ledger_move(torch::Tensor* tensor, int32_t category) {
  const auto& pointer = tensor->storage().data_ptr();
  if (pointer.get_deleter() != &release || pointer.get_context() == nullptr) return false;
  Header* header = header_of(pointer.get_context());
  if (header->category == category) return true;
  const uint64_t bytes = header->bytes;
  remove(header->category, bytes);
  header->category = category;
  auto& l = ledger();
  std::lock_guard<std::mutex> guard(l.lock);
  l.current[category] += bytes;
  l.total += bytes;
  if (l.current[category] > l.peak[category]) l.peak[category] = l.current[category];
  return true;
}
}
