// The kernels as C++ for the CPU, to test their arithmetic without a card. Linked only where a test names it.
#include "kernels/emulate.h"

#include <mutex>

#include "kernels.h"
// the kernels, after everything that the words of device code could confuse
#include "kernels/adamw8.cu"
#include "kernels/dropout.cu"
#include "kernels/nf4.cu"
#include "kernels/packed_bias.cu"
#include "kernels/rms_norm.cu"
#include "kernels/rotary.cu"
#include "kernels/swiglu.cu"

namespace {

void launch_emulated(const char* kernel, prsmed::kernels::Grid grid, uint32_t threads, const void* args, size_t,
                     const at::Tensor&) {
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> guard(one_at_a_time);
  const auto found = emulated::kernels().find(kernel);
  TORCH_CHECK(found != emulated::kernels().end(), "there is no kernel `", kernel, "`");
  emulated::block_size = {threads, 1, 1};
  emulated::grid_size = {grid.x, grid.y, 1};
  for (uint32_t y = 0; y < grid.y; ++y) {
    for (uint32_t x = 0; x < grid.x; ++x) {
      emulated::block_index = {x, y, 0};
      emulated::run_block([&] { found->second(args); });
    }
  }
}

}  // namespace

// From now on this thread's CPU tensors are taken by the emulated kernels, or no longer.
extern "C" void prsmed_kernels_emulate(bool on) { prsmed::kernels::use_launcher(on ? launch_emulated : nullptr); }
