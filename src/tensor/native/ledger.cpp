// Memory ledger: an allocator for CPU tensors that counts bytes by category and caches large blocks for reuse. Every
// block has its size and category in a header, so that freeing needs no look-up.
//
// A training step allocates the same large blocks again and again. Without a cache each would cost page faults at its
// next use (a third of a step on the CPU). The cache never adds to the process's peak: before a new block is allocated,
// cached blocks are returned to the system until live and cached bytes are at most the peak of live bytes. Large blocks
// are mapped, not taken from malloc, so that their cost is their size in pages; src/replay/host.rs simulates this.
#include "native.h"
#include "trace.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <malloc.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <list>
#include <map>
#include <mutex>

namespace {

constexpr size_t kHeader = 64;  // c10::gAlignment: the data stays aligned as libtorch's kernels expect
constexpr int kCategories = 8;

constexpr size_t kLarge = 128 << 10;  // larger blocks are mapped and cached for reuse
constexpr size_t kCoarse = 1 << 20;   // larger blocks are multiples of kGranularity, smaller ones of a page
constexpr size_t kHuge = 8 << 20;     // larger blocks use 2 MiB pages
constexpr size_t kPage = 4 << 10;
constexpr size_t kHugePage = 2 << 20;
constexpr size_t kGranularity = 64 << 10;

struct Header {
  uint64_t bytes;
  uint64_t capacity;       // of a large block, including the header; 0 for others
  Header *before, *after;  // list of live large blocks, for reports
  int32_t category;
  uint32_t module;  // module that allocated it
  PrsmedTag tag;    // its block in a plan's trace
  uintptr_t mark;   // of this allocator's live blocks, see is_ours
};
static_assert(sizeof(Header) <= kHeader);

struct PrsmedBlock {
  uint64_t bytes;
  int32_t category;
  uint32_t module;
};

constexpr int kReported = 10;
// State of the ledger when an allocation failed, before anything is freed.
struct PrsmedFailure {
  uint64_t requested, allocated, reserved;
  uint64_t categories[kCategories];
  int32_t category;
  uint32_t module;
  int64_t num_largest;
  PrsmedBlock largest[kReported];
};

struct Ledger {
  std::mutex lock;
  uint64_t current[kCategories] = {};
  uint64_t peak[kCategories] = {};
  uint64_t total = 0;
  uint64_t total_peak = 0;
  uint64_t at_peak[kCategories] = {};
  // Peaks since `prsmed_ledger_begin_window`. A profile must not change the peaks above.
  uint64_t window_peak = 0;
  uint64_t at_window_peak[kCategories] = {};
  // Bytes taken from the system: live blocks with headers and rounding, and cached blocks.
  uint64_t reserved = 0, reserved_peak = 0, window_reserved_peak = 0;
  Header large = {0, 0, &large, &large, 0, 0, {}, 0};  // ends of the list of live large blocks
  bool failed = false;
  PrsmedFailure failure = {};
  uint64_t limit = UINT64_MAX;  // maximum of live bytes

  void hold(uint64_t bytes) {
    reserved += bytes;
    reserved_peak = std::max(reserved_peak, reserved);
    window_reserved_peak = std::max(window_reserved_peak, reserved);
  }
};

Ledger& ledger() {
  static Ledger* instance = new Ledger;  // never destroyed: tensors may outlive static destructors
  return *instance;
}

thread_local int32_t current_category = 0;

// The block takes `held` bytes from the system.
void add(int32_t category, uint64_t bytes, uint64_t held = 0) {
  auto& l = ledger();
  std::lock_guard<std::mutex> guard(l.lock);
  l.current[category] += bytes;
  l.total += bytes;
  if (l.current[category] > l.peak[category]) l.peak[category] = l.current[category];
  if (l.total > l.total_peak) {
    l.total_peak = l.total;
    std::copy(l.current, l.current + kCategories, l.at_peak);
  }
  if (l.total > l.window_peak) {
    l.window_peak = l.total;
    std::copy(l.current, l.current + kCategories, l.at_window_peak);
  }
  if (held > 0) l.hold(held);
}

void remove(int32_t category, uint64_t bytes, uint64_t held = 0) {
  auto& l = ledger();
  std::lock_guard<std::mutex> guard(l.lock);
  l.current[category] -= bytes;
  l.total -= bytes;
  l.reserved -= held;
}

void hold(uint64_t bytes) {
  std::lock_guard<std::mutex> guard(ledger().lock);
  ledger().hold(bytes);
}
void give_back(uint64_t bytes) {
  std::lock_guard<std::mutex> guard(ledger().lock);
  ledger().reserved -= bytes;
}

// The `count` largest live large blocks, largest first, without allocating. The caller holds the lock.
int64_t largest_of(const Ledger& l, PrsmedBlock* out, int64_t count) {
  int64_t found = 0;
  for (const Header* header = l.large.after; header != &l.large; header = header->after) {
    int64_t at = found;
    while (at > 0 && out[at - 1].bytes < header->bytes) --at;
    if (at == count) continue;
    found = std::min(found + 1, count);
    std::copy_backward(out + at, out + found - 1, out + found);
    out[at] = {header->bytes, header->category, header->module};
  }
  return found;
}

// The first failure stays until it is cleared; later ones are ignored.
void note_failure(uint64_t requested) {
  auto& l = ledger();
  std::lock_guard<std::mutex> guard(l.lock);
  if (l.failed) return;
  l.failed = true;
  auto& f = l.failure;
  f.requested = requested;
  f.allocated = l.total;
  f.reserved = l.reserved;
  std::copy(l.current, l.current + kCategories, f.categories);
  f.category = current_category;
  f.module = prsmed_module();
  f.num_largest = largest_of(l, f.largest, kReported);
}

// Pages from the system, at a multiple of 2 MiB for huge blocks; null if there are none.
void* map(size_t capacity) {
  const size_t slack = capacity >= kHuge ? kHugePage - kPage : 0;
  void* mapped = mmap(nullptr, capacity + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  if (slack == 0) return mapped;
  char* first = static_cast<char*>(mapped);
  char* base = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(first) + slack) & ~(uintptr_t{kHugePage} - 1));
  if (base > first) munmap(first, base - first);
  if (base < first + slack) munmap(base + capacity, first + slack - base);
  madvise(base, capacity, MADV_HUGEPAGE);
  return base;
}

// Cached large blocks, by capacity; `order` lists them oldest first.
struct Kept {
  struct Block {
    void* base;
    std::list<std::multimap<size_t, Block>::iterator>::iterator place;
  };
  using ByCapacity = std::multimap<size_t, Block>;

  std::mutex lock;
  ByCapacity blocks;
  std::list<ByCapacity::iterator> order;
  size_t kept = 0, live = 0, live_peak = 0;

  void* take(size_t& capacity) {
    std::lock_guard<std::mutex> guard(lock);
    void* base = nullptr;
    auto found = blocks.lower_bound(capacity);
    if (found != blocks.end() && found->first <= capacity + capacity / 8) {
      capacity = found->first;
      base = found->second.base;
      forget(found);
    }
    live += capacity;
    live_peak = std::max(live_peak, live);
    if (base == nullptr) {
      while (!order.empty() && live + kept > live_peak) release_oldest();
    }
    return base;
  }

  void put(void* base, size_t capacity) {
    std::lock_guard<std::mutex> guard(lock);
    live -= capacity;
    auto block = blocks.emplace(capacity, Block{base, {}});
    block->second.place = order.insert(order.end(), block);
    kept += capacity;
  }

  // Corrects the count of `take` for a block that could not be allocated.
  void give_up(size_t capacity) {
    std::lock_guard<std::mutex> guard(lock);
    live -= capacity;
  }

  // Returns all cached blocks to the system. Returns their bytes.
  size_t release_all() {
    std::lock_guard<std::mutex> guard(lock);
    const size_t before = kept;
    while (!order.empty()) release_oldest();
    return before;
  }

 private:
  void forget(ByCapacity::iterator block) {
    kept -= block->first;
    order.erase(block->second.place);
    blocks.erase(block);
  }
  void release_oldest() {
    auto block = order.front();
    void* base = block->second.base;
    const size_t capacity = block->first;
    give_back(capacity);
    forget(block);
    munmap(base, capacity);
  }
};

Kept& kept() {
  static Kept* instance = new Kept;
  return *instance;
}

void* large_block(size_t& capacity) {
  const size_t unit = capacity >= kCoarse ? kGranularity : kPage;
  capacity = (capacity + unit - 1) / unit * unit;
  if (void* base = kept().take(capacity)) return base;
  void* base = map(capacity);
  if (base == nullptr) {
    kept().release_all();
    base = map(capacity);
  }
  if (base == nullptr) {
    kept().give_up(capacity);
    TORCH_CHECK(false, "DefaultCPUAllocator: not enough memory: you tried to allocate ", capacity, " bytes.");
  }
  hold(capacity);
  return base;
}

// Fails like a full machine if `bytes` more would exceed the limit.
void check_limit(size_t bytes) {
  auto& l = ledger();
  std::lock_guard<std::mutex> guard(l.lock);
  TORCH_CHECK(l.total + bytes <= l.limit, "DefaultCPUAllocator: not enough memory: you tried to allocate ", bytes,
              " bytes where ", l.total, " of ", l.limit, " are in use.");
}

// Allocates a block of `bytes` with a header; `capacity` is 0 for a small one.
char* block(size_t bytes, size_t& capacity) {
  try {
    check_limit(bytes);
    return static_cast<char*>(capacity > 0 ? large_block(capacity) : c10::alloc_cpu(bytes + kHeader));
  } catch (...) {
    note_failure(bytes);
    throw;
  }
}

void enlist(Header* header) {
  auto& l = ledger();
  std::lock_guard<std::mutex> guard(l.lock);
  header->before = l.large.before;
  header->after = &l.large;
  l.large.before->after = header;
  l.large.before = header;
}
void delist(Header* header) {
  std::lock_guard<std::mutex> guard(ledger().lock);
  header->before->after = header->after;
  header->after->before = header->before;
}

Header* header_of(void* data) { return reinterpret_cast<Header*>(static_cast<char*>(data) - kHeader); }

uintptr_t mark_of(const Header* header) { return reinterpret_cast<uintptr_t>(header) ^ 0x5afe1ed6e5b10c45; }

// oneDNN takes scratch memory from libtorch's allocator of that moment and returns it to that of a later one, so blocks
// that were allocated before `prsmed_ledger_install` come here too. libtorch's own blocks begin at a multiple of 64
// bytes behind malloc's bookkeeping, so the bytes of a header before them can be read.
__attribute__((no_sanitize("address"))) bool is_ours(const Header* header) { return header->mark == mark_of(header); }

void release(void* data) {
  if (data == nullptr) return;
  Header* header = header_of(data);
  if (!is_ours(header)) return c10::free_cpu(data);
  header->mark = 0;
  remove(header->category, header->bytes, header->capacity > 0 ? 0 : header->bytes + kHeader);
  if (header->tag.trace != 0) prsmed_trace_release(header->tag);
  if (header->capacity > 0) {
    delist(header);
    kept().put(header, header->capacity);
  } else {
    c10::free_cpu(header);
  }
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = c10::Device(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    size_t capacity = bytes + kHeader >= kLarge ? bytes + kHeader : 0;
    char* base = block(bytes, capacity);
    auto* header = reinterpret_cast<Header*>(base);
    header->bytes = bytes;
    header->capacity = capacity;
    header->category = current_category;
    header->module = prsmed_module();
    header->mark = mark_of(header);
    header->tag = prsmed_trace_counts_host() ? prsmed_trace_allocate(bytes, header->category) : PrsmedTag{};
    add(header->category, bytes, capacity > 0 ? 0 : bytes + kHeader);
    if (capacity > 0) enlist(header);
    char* data = base + kHeader;
    return {data, data, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dest, const void* src, size_t count) const override { default_copy_data(dest, src, count); }
};

CountingAllocator allocator;

}  // namespace

extern "C" {

// Buffers of 128 KiB and more that are not tensors return to the system when they are freed. By default malloc keeps
// them from the second time on, up to 32 MiB each, in as many arenas as threads compete.
void prsmed_ledger_install() noexcept {
  mallopt(M_MMAP_THRESHOLD, kLarge);
  mallopt(M_TRIM_THRESHOLD, 1 << 20);
  mallopt(M_ARENA_MAX, 2);
  c10::SetCPUAllocator(&allocator, 255);
}

// Sets the maximum of live bytes.
void prsmed_ledger_set_limit(uint64_t bytes) noexcept {
  std::lock_guard<std::mutex> guard(ledger().lock);
  ledger().limit = bytes;
}

// For the meta device's allocator.
void prsmed_ledger_add(int32_t category, uint64_t bytes) noexcept { add(category, bytes); }
void prsmed_ledger_remove(int32_t category, uint64_t bytes) noexcept { remove(category, bytes); }
int32_t prsmed_ledger_category() noexcept { return current_category; }

int32_t prsmed_ledger_enter(int32_t category) noexcept {
  int32_t before = current_category;
  current_category = category;
  return before;
}

// out: current total, peak total, then kCategories each of current, own peak, share at the peak of the total
void prsmed_ledger_read(uint64_t* out) noexcept {
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

void prsmed_ledger_reset_peak() noexcept {
  auto& l = ledger();
  std::lock_guard<std::mutex> guard(l.lock);
  l.total_peak = l.total;
  for (int i = 0; i < kCategories; ++i) l.peak[i] = l.at_peak[i] = l.current[i];
}

// Moves a tensor's storage to another category. Returns true if the ledger owns that storage.
bool prsmed_ledger_move(at::Tensor* tensor, int32_t category) noexcept {
  const auto& pointer = tensor->storage().data_ptr();
  if (pointer.get_deleter() != &release || pointer.get_context() == nullptr) return false;
  Header* header = header_of(pointer.get_context());
  if (header->category == category) return true;
  const uint64_t bytes = header->bytes;
  if (header->tag.trace != 0) prsmed_trace_move(header->tag, category);
  auto& l = ledger();
  std::lock_guard<std::mutex> guard(l.lock);
  l.current[header->category] -= bytes;
  l.current[category] += bytes;
  header->category = category;
  if (l.current[category] > l.peak[category]) l.peak[category] = l.current[category];
  return true;
}

// The `count` largest live blocks of at least 128 KiB, largest first. Returns their number.
int64_t prsmed_ledger_largest(PrsmedBlock* out, int64_t count) noexcept {
  std::lock_guard<std::mutex> guard(ledger().lock);
  return largest_of(ledger(), out, count);
}

// out: reserved now, its peak, its peak in the window, the allocated peak in the window, kCategories at that peak
void prsmed_ledger_read_window(uint64_t* out) noexcept {
  auto& l = ledger();
  std::lock_guard<std::mutex> guard(l.lock);
  out[0] = l.reserved;
  out[1] = l.reserved_peak;
  out[2] = l.window_reserved_peak;
  out[3] = l.window_peak;
  std::copy(l.at_window_peak, l.at_window_peak + kCategories, out + 4);
}

// Resets the window's peaks to the current bytes. The overall peaks stay.
void prsmed_ledger_begin_window() noexcept {
  auto& l = ledger();
  std::lock_guard<std::mutex> guard(l.lock);
  l.window_peak = l.total;
  l.window_reserved_peak = l.reserved;
  std::copy(l.current, l.current + kCategories, l.at_window_peak);
}

// Returns cached blocks to the system. Returns their bytes.
uint64_t prsmed_ledger_release_cached() noexcept {
  const uint64_t released = kept().release_all();
  malloc_trim(0);
  return released;
}

// The first failure since the last `prsmed_ledger_clear_failure`; false if there was none.
bool prsmed_ledger_failure(PrsmedFailure* out) noexcept {
  auto& l = ledger();
  std::lock_guard<std::mutex> guard(l.lock);
  if (l.failed) *out = l.failure;
  return l.failed;
}
void prsmed_ledger_clear_failure() noexcept {
  std::lock_guard<std::mutex> guard(ledger().lock);
  ledger().failed = false;
}
}
