// Emulation of CUDA C++ on the CPU, for tests. Every thread of a block is a fibre, and `__syncthreads` switches to the
// next one. Warp shuffles go through memory between two such barriers, so all threads of a block must take part. Blocks
// run one after another, on one CPU thread.
#pragma once
#define PRSMED_EMULATED

#include <c10/util/Half.h>
#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#define __device__
#define __shared__ static
#define __constant__ static const

namespace emulated {

struct Index { unsigned x = 0, y = 0, z = 0; };

inline Index thread_index, block_index, block_size, grid_size;
inline ucontext_t scheduler;
inline ucontext_t* running = nullptr;
inline float exchange[1024];
inline const std::function<void()>* work = nullptr;
inline bool finished = false;

inline void barrier() { swapcontext(running, &scheduler); }

inline void fibre() {
  (*work)();
  finished = true;
  swapcontext(running, &scheduler);
}

// Runs `body` in every thread of a block.
inline void run_block(const std::function<void()>& body) {
  constexpr size_t stack_bytes = 64 << 10;
  static std::vector<std::unique_ptr<char[]>> stacks;
  const unsigned threads = block_size.x;
  while (stacks.size() < threads) stacks.emplace_back(new char[stack_bytes]);
  std::vector<ucontext_t> fibres(threads);
  std::vector<bool> done(threads, false);
  work = &body;
  for (unsigned i = 0; i < threads; ++i) {
    getcontext(&fibres[i]);
    fibres[i].uc_stack.ss_sp = stacks[i].get();
    fibres[i].uc_stack.ss_size = stack_bytes;
    fibres[i].uc_link = nullptr;
    makecontext(&fibres[i], fibre, 0);
  }
  for (unsigned left = threads; left > 0;) {
    for (unsigned i = 0; i < threads; ++i) {
      if (done[i]) continue;
      thread_index = {i, 0, 0};
      running = &fibres[i];
      finished = false;
      swapcontext(&scheduler, &fibres[i]);
      if (finished) {
        done[i] = true;
        --left;
      }
    }
  }
}

inline float shuffle(float value, int lane) {
  const unsigned own = thread_index.x;
  exchange[own] = value;
  barrier();
  const float other = exchange[own ^ static_cast<unsigned>(lane)];
  barrier();
  return other;
}

inline std::map<std::string, void (*)(const void*)>& kernels() {
  static std::map<std::string, void (*)(const void*)> all;
  return all;
}

struct Register {
  Register(const char* name, void (*kernel)(const void*)) { kernels()[name] = kernel; }
};

}  // namespace emulated

#define threadIdx emulated::thread_index
#define blockIdx emulated::block_index
#define blockDim emulated::block_size
#define gridDim emulated::grid_size
#define __syncthreads emulated::barrier
#define __shfl_xor_sync(mask, value, lane) emulated::shuffle(value, lane)

inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<unsigned long long>(a) * b) >> 32);
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float emulated_half_to_float(unsigned short bits) { return c10::detail::fp16_ieee_to_fp32_value(bits); }
inline unsigned short emulated_float_to_half(float value) { return c10::detail::fp16_ieee_from_fp32_value(value); }

#define PRSMED_KERNEL(name, body, Args) \
  static emulated::Register register_##name(#name, [](const void* args) { body(*static_cast<const Args*>(args)); });
