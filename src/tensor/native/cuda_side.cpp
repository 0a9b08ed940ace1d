// Opens the CUDA side (`cuda_side.h`) when the process starts, before anything asks libtorch for a GPU: libtorch
// decides at its first use whether there is CUDA. Loading `libtorch_cuda.so` then has the same effect as linking it.
#include "cuda_side.h"

#include <ATen/Version.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <torch/version.h>
#include <unistd.h>

#include <string>

#include "native.h"

// written by build.rs; empty if torch's CUDA headers were missing
extern "C" const unsigned char prsmed_cuda_side_begin[], prsmed_cuda_side_end[];

namespace {

// As `CudaSide` of `tensor/cuda_side.rs` numbers them.
enum Status : int32_t { Open, NoDriver, TorchWithoutCuda, NotBuilt, CudaFails, SideFails };

struct State {
  Status status = NoDriver;
  std::string detail, folder;
  const PrsmedCudaSide* functions = nullptr;

  State() {
    Dl_info info;
    if (dladdr(reinterpret_cast<const void*>(&at::show_config), &info) && info.dli_fname) folder = info.dli_fname;
    folder.erase(std::min(folder.rfind('/'), folder.size()));
    status = open();
  }

  Status failed(Status status) {
    const char* text = dlerror();
    detail = text ? text : "an unknown reason";
    return status;
  }

  Status open() {
    if (!dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) return failed(NoDriver);
    const std::string cuda = folder + "/libtorch_cuda.so";
    if (access(cuda.c_str(), F_OK)) return TorchWithoutCuda;
    const auto size = static_cast<size_t>(prsmed_cuda_side_end - prsmed_cuda_side_begin);
    if (!size) return NotBuilt;
    if (!dlopen(cuda.c_str(), RTLD_NOW | RTLD_GLOBAL)) return failed(CudaFails);
    const int file = memfd_create("libprsmed_cuda.so", MFD_CLOEXEC);
    size_t written = 0;
    while (file >= 0 && written < size) {
      const ssize_t count = write(file, prsmed_cuda_side_begin + written, size - written);
      if (count <= 0) break;
      written += static_cast<size_t>(count);
    }
    void* side = dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (file >= 0) close(file);
    if (!side) return failed(SideFails);
    functions = static_cast<const PrsmedCudaSide*>(dlsym(side, "prsmed_cuda_side_functions"));
    return functions ? Open : failed(SideFails);
  }
};

const State& state() {
  static const State opened;
  return opened;
}

// Every function of this layer that can fail needs `prsmed_free_message`, so this file is in every program.
__attribute__((constructor)) void open_at_start() { state(); }

}  // namespace

namespace prsmed {

const PrsmedCudaSide& cuda_side() {
  if (state().status != Open) throw std::runtime_error("the CUDA side of this program is not open");
  return *state().functions;
}

}  // namespace prsmed

extern "C" {

void prsmed_free_message(char* message) noexcept { free(message); }

// Whether the CUDA side is open, or why not. `detail` and `folder` (that of libtorch) live as long as the process.
int32_t prsmed_cuda_side(const char** detail, const char** folder) noexcept {
  *detail = state().detail.c_str();
  *folder = state().folder.c_str();
  return state().status;
}

// How the loaded libtorch was built, in its own words. `out` must be freed by `prsmed_free_message`.
char* prsmed_torch_build(char** out) { PRSMED_TRY(*out = prsmed_message(at::show_config().c_str())) }

// The version of torch that this program was compiled for.
const char* prsmed_torch_version() noexcept { return TORCH_VERSION; }
}
