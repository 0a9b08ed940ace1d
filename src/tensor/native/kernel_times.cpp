// Time of each kernel of a GPU, or of each operator of the CPU, by libtorch's own profiler (Kineto, and CUPTI for a GPU).
#include "native.h"

#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <vector>

namespace {

namespace profiler = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;

struct Sum {
  uint64_t count = 0;
  int64_t ns = 0;
};

// Events of one thread of the CPU are nested: each gets its own time without that of the events inside it.
void add_operators(std::vector<const profiler::KinetoEvent*> events, std::map<std::string, Sum>& sums) {
  std::sort(events.begin(), events.end(), [](const auto* a, const auto* b) {
    return std::make_pair(a->startNs(), b->durationNs()) < std::make_pair(b->startNs(), a->durationNs());
  });
  std::vector<const profiler::KinetoEvent*> open;
  for (const auto* event : events) {
    const auto start = static_cast<uint64_t>(event->startNs());
    while (!open.empty() && static_cast<uint64_t>(open.back()->startNs()) + open.back()->durationNs() <= start) open.pop_back();
    auto& sum = sums[event->name()];
    sum.count += 1;
    sum.ns += static_cast<int64_t>(event->durationNs());
    if (!open.empty()) sums[open.back()->name()].ns -= static_cast<int64_t>(event->durationNs());
    open.push_back(event);
  }
}

std::string ended(bool on_gpu) {
  const auto result = profiler::disableProfiler();
  std::map<std::string, Sum> sums;
  std::map<uint64_t, std::vector<const profiler::KinetoEvent*>> threads;
  for (const auto& event : result->events()) {
    const bool is_gpus = event.deviceType() == c10::DeviceType::CUDA;
    if (is_gpus != on_gpu) continue;
    if (!on_gpu) {
      threads[event.startThreadId()].push_back(&event);
      continue;
    }
    auto& sum = sums[event.name()];
    sum.count += 1;
    sum.ns += static_cast<int64_t>(event.durationNs());
  }
  for (auto& [_, events] : threads) add_operators(std::move(events), sums);
  std::ostringstream text;
  for (const auto& [name, sum] : sums) text << sum.count << ' ' << sum.ns << ' ' << name << '\n';
  return text.str();
}

}  // namespace

extern "C" {

// Starts to record on this thread, and on those that compute its backward passes.
char* prsmed_kernel_times_begin(bool on_gpu) {
  PRSMED_TRY({
    const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
    std::set<ActivityType> activities;
    activities.insert(ActivityType::CPU);
    if (on_gpu) activities.insert(ActivityType::CUDA);
    profiler::prepareProfiler(config, activities);
    profiler::enableProfiler(config, activities);
  })
}

// Ends it. `out` has a line for each kernel: count, nanoseconds, name. It must be freed by `prsmed_free_message`.
char* prsmed_kernel_times_end(bool on_gpu, char** out) {
  PRSMED_TRY(*out = prsmed_message(ended(on_gpu).c_str()))
}
}
