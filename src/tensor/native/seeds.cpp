// Seeds of captured steps. Outside of captures a kernel gets its seed as an argument. During a capture each seed that
// the CPU draws gets an index in a buffer on the GPU. Before a replay the CPU draws the same number of new seeds, in
// the same order, and copies them there. The same seed twice has one index, because a checkpointed segment draws its
// seeds twice.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include <mutex>
#include <unordered_map>

#include "kernels.h"
#include "native.h"

namespace {

struct SeedBuffer {
  at::Tensor buffer;  // i64, on the device
  std::unordered_map<int64_t, int64_t> index_of;
};

std::mutex lock;  // the backward pass runs on another thread
SeedBuffer* capture = nullptr;

int64_t random_number() {
  auto generator = at::detail::getDefaultCPUGenerator();
  auto* numbers = at::check_generator<at::CPUGeneratorImpl>(generator);
  std::lock_guard<std::mutex> guard(numbers->mutex_);
  return static_cast<int64_t>(numbers->random64());
}

}  // namespace

namespace prsmed::kernels {

int64_t new_seed() {
  const int64_t seed = random_number();
  std::lock_guard<std::mutex> guard(lock);
  if (!capture) return seed;
  const auto next = static_cast<int64_t>(capture->index_of.size());
  TORCH_CHECK(next < capture->buffer.numel(), "a captured step draws more seeds than its buffer holds");
  capture->index_of.emplace(seed, next);
  return seed;
}

const int64_t* seed_on_device(int64_t seed) {
  std::lock_guard<std::mutex> guard(lock);
  if (!capture) return nullptr;
  const auto found = capture->index_of.find(seed);
  TORCH_CHECK(found != capture->index_of.end(), "a captured kernel has a seed that was not noted");
  return capture->buffer.const_data_ptr<int64_t>() + found->second;
}

}  // namespace prsmed::kernels

extern "C" {

// Notes seeds into `buffer` (i64) from now on; null ends this. Returns the number of seeds since it began.
int64_t prsmed_seeds_capture(at::Tensor* buffer) noexcept {
  std::lock_guard<std::mutex> guard(lock);
  const int64_t noted = capture ? static_cast<int64_t>(capture->index_of.size()) : 0;
  delete capture;
  capture = buffer ? new SeedBuffer{*buffer, {}} : nullptr;
  return noted;
}

// Draws a number of the CPU's generator and notes it. `*index` is its index for a captured kernel, -1 outside of
// captures.
int64_t prsmed_seeds_example(int64_t* index) noexcept {
  const int64_t seed = prsmed::kernels::new_seed();
  const int64_t* at = prsmed::kernels::seed_on_device(seed);
  *index = at ? at - capture->buffer.const_data_ptr<int64_t>() : -1;
  return seed;
}

// Draws `count` numbers of the CPU's generator, like the captured step, into the first elements.
char* prsmed_seeds_draw(at::Tensor* buffer, int64_t count) {
  PRSMED_TRY({
    if (count == 0) return nullptr;
    auto drawn = at::empty({count}, at::TensorOptions(at::kLong).pinned_memory(buffer->is_cuda()));
    for (int64_t i = 0; i < count; ++i) drawn.mutable_data_ptr<int64_t>()[i] = random_number();
    buffer->narrow(0, 0, count).copy_(drawn, /*non_blocking=*/true);
  })
}
}
