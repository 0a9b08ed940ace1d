// Opens the CUDA side (`cuda_side.h`) when the process starts, before anything asks libtorch for a GPU: libtorch
// decides at its first use whether there is CUDA. Loading `libtorch_cuda.so` then has the same effect as linking it.
#include "cuda_side.h"

#include <ATen/Version.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <torch/version.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "native.h"

// written by build.rs; empty if torch's CUDA headers were missing
extern "C" const unsigned char prsmed_cuda_side_begin[], prsmed_cuda_side_end[];

namespace {

// As `CudaSide` of `tensor/cuda_side.rs` numbers them.
enum Status : int32_t { Open, NoDriver, TorchWithoutCuda, NotBuilt, CudaFails, SideFails, NoFile };

bool write_all(int file, const unsigned char* bytes, size_t size) {
  while (size) {
    const ssize_t count = write(file, bytes, size);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    bytes += count, size -= static_cast<size_t>(count);
  }
  return true;
}

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
    // Collective operations of two groups start in the order in which this process asked for them: a sum and a
    // gathering of layers cannot keep each other from starting on different GPUs. NCCL reads it at its first use.
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
    // memory, or where that is refused (a sandbox, no /proc) a file that has no name once it is open
    void* side = loaded(memfd_create("libprsmed_cuda.so", MFD_CLOEXEC), "", size);
    if (!side) {
      const char* folder = getenv("TMPDIR");
      std::string path = std::string(folder && *folder ? folder : "/tmp") + "/libprsmed_cuda.XXXXXX";
      const int file = mkostemp(path.data(), O_CLOEXEC);
      side = loaded(file, path, size);
      if (file >= 0) unlink(path.c_str());
    }
    if (!side) return status;
    functions = static_cast<const PrsmedCudaSide*>(dlsym(side, "prsmed_cuda_side_functions"));
    return functions ? Open : failed(SideFails);
  }

  // The CUDA side, written to `file` (closed here) and opened by its path, or by that of the descriptor. Null with
  // status and reason.
  void* loaded(int file, const std::string& path, size_t size) {
    void* side = nullptr;
    if (file < 0 || !write_all(file, prsmed_cuda_side_begin, size)) {
      detail = (path.empty() ? "memory" : path) + ": " + strerror(errno);
      status = NoFile;
    } else {
      const std::string name = path.empty() ? "/proc/self/fd/" + std::to_string(file) : path;
      side = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (!side) status = failed(SideFails);
    }
    if (file >= 0) close(file);
    return side;
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
