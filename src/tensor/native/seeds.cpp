// Seeds of captured steps. Outside captures a kernel is given its seed as a number. A capture gives each seed that the host
// draws a place on a tape on the device; before a replay the host draws as many new ones, in the same order, and writes them
// there. Two draws of one number are one place: a checkpointed segment draws its seeds twice.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include <mutex>
#include <unordered_map>

#include "kernels.h"
#include "native.h"

namespace {

struct Tape {
  at::Tensor places;  // i64, on the device
  std::unordered_map<int64_t, int64_t> place_of;
};

std::mutex lock;  // the backward pass runs on a thread of its own
Tape* recording = nullptr;

}  // namespace

namespace prsmed::kernels {

void note_seed(int64_t seed) {
  std::lock_guard<std::mutex> guard(lock);
  if (!recording) return;
  const auto next = static_cast<int64_t>(recording->place_of.size());
  TORCH_CHECK(next < recording->places.numel(), "a captured step draws more seeds than its tape holds");
  recording->place_of.emplace(seed, next);
}

const int64_t* seed_on_device(int64_t seed) {
  std::lock_guard<std::mutex> guard(lock);
  if (!recording) return nullptr;
  const auto found = recording->place_of.find(seed);
  TORCH_CHECK(found != recording->place_of.end(), "a captured kernel has a seed that no one noted");
  return recording->places.const_data_ptr<int64_t>() + found->second;
}

}  // namespace prsmed::kernels

extern "C" {

// Seeds noted from now on go to `places` (i64); null ends it. Returns how many were noted since it began.
int64_t prsmed_seeds_record(at::Tensor* places) {
  std::lock_guard<std::mutex> guard(lock);
  const int64_t noted = recording ? static_cast<int64_t>(recording->place_of.size()) : 0;
  delete recording;
  recording = places ? new Tape{*places, {}} : nullptr;
  return noted;
}

// A number of the host's generator, noted; `*place` is where a captured kernel would look for it, -1 outside captures.
int64_t prsmed_seeds_example(int64_t* place) {
  auto generator = at::detail::getDefaultCPUGenerator();
  auto* numbers = at::check_generator<at::CPUGeneratorImpl>(generator);
  int64_t seed = 0;
  {
    std::lock_guard<std::mutex> guard(numbers->mutex_);
    seed = static_cast<int64_t>(numbers->random64());
  }
  prsmed::kernels::note_seed(seed);
  const int64_t* at = prsmed::kernels::seed_on_device(seed);
  *place = at ? at - recording->places.const_data_ptr<int64_t>() : -1;
  return seed;
}

// Draws `count` numbers of the host's generator, as the recorded step would, into the first places.
char* prsmed_seeds_draw(at::Tensor* places, int64_t count) {
  PRSMED_TRY({
    if (count == 0) return nullptr;
    auto generator = at::detail::getDefaultCPUGenerator();
    auto* numbers = at::check_generator<at::CPUGeneratorImpl>(generator);
    auto drawn = at::empty({count}, at::TensorOptions(at::kLong).pinned_memory(places->is_cuda()));
    {
      std::lock_guard<std::mutex> guard(numbers->mutex_);
      for (int64_t i = 0; i < count; ++i) drawn.mutable_data_ptr<int64_t>()[i] = static_cast<int64_t>(numbers->random64());
    }
    places->narrow(0, 0, count).copy_(drawn, /*non_blocking=*/true);
  })
}
}
