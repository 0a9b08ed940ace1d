// The kernels compiled as C++ for the CPU, to test their arithmetic without a GPU. A shared library that
// `src/tensor/kernels_tests.rs` compiles and opens.
#include "emulate.h"

#include <mutex>

#include "kernels.h"
// after all other includes, because the keywords of device code could confuse them
#include "kernels/adamw8.cu"
#include "kernels/dropout.cu"
#include "kernels/low_rank.cu"
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

// For `prsmed_kernels_use_launcher`.
extern "C" const void* prsmed_emulated_launcher() noexcept { return reinterpret_cast<const void*>(&launch_emulated); }
