// Compiles the kernels with NVRTC and starts them through the driver. Both libraries are opened at run time: a machine
// without a card needs neither, and building needs no toolkit.
#include <dlfcn.h>
#include <unistd.h>

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <filesystem>
#include <fstream>
#include <atomic>
#include <map>
#include <mutex>

#include "kernels.h"
#include "native.h"

// Written by build.rs from `kernels/`.
struct PrsmedKernelSource { const char *name, *text; };
extern const PrsmedKernelSource prsmed_kernel_sources[];
extern const size_t prsmed_kernel_source_count;

namespace prsmed::kernels {

namespace {

std::string file_of(const void* symbol) {
  Dl_info info;
  return dladdr(symbol, &info) && info.dli_fname ? info.dli_fname : "";
}

template <class F> void find(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  TORCH_CHECK(function, "`", name, "` is missing from the library");
}

// ---- NVRTC

using Program = struct ProgramOpaque*;

struct Nvrtc {
  int (*version)(int*, int*);
  int (*num_archs)(int*);
  int (*archs)(int*);
  int (*create)(Program*, const char*, const char*, int, const char* const*, const char* const*);
  int (*compile)(Program, int, const char* const*);
  int (*destroy)(Program*);
  int (*log_size)(Program, size_t*);
  int (*log)(Program, char*);
  int (*cubin_size)(Program, size_t*);
  int (*cubin)(Program, char*);
  int (*ptx_size)(Program, size_t*);
  int (*ptx)(Program, char*);
  const char* (*error)(int);

  Nvrtc() {
    void* library = open();
    find(library, "nvrtcVersion", version);
    find(library, "nvrtcGetNumSupportedArchs", num_archs);
    find(library, "nvrtcGetSupportedArchs", archs);
    find(library, "nvrtcCreateProgram", create);
    find(library, "nvrtcCompileProgram", compile);
    find(library, "nvrtcDestroyProgram", destroy);
    find(library, "nvrtcGetProgramLogSize", log_size);
    find(library, "nvrtcGetProgramLog", log);
    find(library, "nvrtcGetCUBINSize", cubin_size);
    find(library, "nvrtcGetCUBIN", cubin);
    find(library, "nvrtcGetPTXSize", ptx_size);
    find(library, "nvrtcGetPTX", ptx);
    find(library, "nvrtcGetErrorString", error);
  }

  void check(int status, const char* what) const {
    TORCH_CHECK(status == 0, "NVRTC: ", what, ": ", error(status));
  }

  // Beside libtorch, as its wheel has it, else where the system looks.
  static void* open() {
    const auto torch = std::filesystem::path(file_of(reinterpret_cast<const void*>(&at::detail::getDefaultCPUGenerator)));
    const auto beside = torch.parent_path() / ".." / ".." / "nvidia" / "cu13" / "lib";
    std::error_code ignored;
    if (std::filesystem::exists(beside / "libnvrtc.so.13", ignored)) {
      // NVRTC opens this one by its bare name
      for (const auto& entry : std::filesystem::directory_iterator(beside, ignored))
        if (entry.path().filename().string().rfind("libnvrtc-builtins.so.", 0) == 0) dlopen(entry.path().c_str(), RTLD_NOW | RTLD_GLOBAL);
      if (void* library = dlopen((beside / "libnvrtc.so.13").c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    }
    for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"})
      if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
    TORCH_CHECK(false, "NVRTC (libnvrtc.so.13) is neither beside libtorch, in ", beside.string(), ", nor installed");
  }
};

const Nvrtc& nvrtc() {
  static const Nvrtc library;
  return library;
}

// The best that NVRTC can make for a card of compute capability `capability` (80 for 8.0): its own code, or PTX of the
// latest architecture before it, which the driver compiles.
std::string architecture(int capability) {
  int count = 0;
  nvrtc().check(nvrtc().num_archs(&count), "architectures");
  std::vector<int> archs(static_cast<size_t>(count));
  nvrtc().check(nvrtc().archs(archs.data()), "architectures");
  int best = 0;
  for (const int arch : archs) {
    if (arch == capability) return "sm_" + std::to_string(arch);
    if (arch < capability) best = std::max(best, arch);
  }
  TORCH_CHECK(best > 0, "NVRTC makes no code for compute capability ", capability);
  return "compute_" + std::to_string(best);
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

std::string main_source() {
  std::string text;
  for (size_t i = 0; i < prsmed_kernel_source_count; ++i) {
    const std::string name = prsmed_kernel_sources[i].name;
    if (ends_with(name, ".cu")) text += "#include \"" + name + "\"\n";
  }
  return text;
}

std::string compile(const std::string& arch) {
  std::vector<const char*> names, texts;
  for (size_t i = 0; i < prsmed_kernel_source_count; ++i) {
    names.push_back(prsmed_kernel_sources[i].name);
    texts.push_back(prsmed_kernel_sources[i].text);
  }
  const auto& n = nvrtc();
  Program program = nullptr;
  n.check(n.create(&program, main_source().c_str(), "prsmed.cu", static_cast<int>(names.size()), texts.data(), names.data()), "program");
  const std::string wanted = "--gpu-architecture=" + arch;
  // products and sums are rounded one by one, as between libtorch's kernels
  const char* options[] = {wanted.c_str(), "--std=c++17", "--fmad=false"};
  const int status = n.compile(program, 3, options);
  std::string log, code;
  size_t size = 0;
  if (status != 0 && n.log_size(program, &size) == 0) {
    log.resize(size);
    n.log(program, log.data());
  } else if (status == 0) {
    const bool binary = arch.rfind("sm_", 0) == 0;
    n.check((binary ? n.cubin_size : n.ptx_size)(program, &size), "size of the code");
    code.resize(size);
    n.check((binary ? n.cubin : n.ptx)(program, code.data()), "code");
  }
  n.destroy(&program);
  TORCH_CHECK(status == 0, "NVRTC cannot compile the kernels for ", arch, ": ", log);
  return code;
}

std::mutex folder_lock;
std::string folder;  // of compiled kernels; empty = compiled by every process

std::string cached_name(const std::string& arch) {
  uint64_t hash = 1469598103934665603u;  // FNV-1a
  const auto add = [&hash](const char* text) {
    for (; *text; ++text) hash = (hash ^ static_cast<unsigned char>(*text)) * 1099511628211u;
  };
  for (size_t i = 0; i < prsmed_kernel_source_count; ++i) add(prsmed_kernel_sources[i].text);
  int major = 0, minor = 0;
  nvrtc().check(nvrtc().version(&major, &minor), "version");
  char name[96];
  snprintf(name, sizeof(name), "kernels-%016lx-nvrtc%d.%d-%s.bin", hash, major, minor, arch.c_str());
  return name;
}

// From the folder, or compiled and put there; a folder that cannot be written costs time only.
std::string code_for(const std::string& arch) {
  std::lock_guard<std::mutex> guard(folder_lock);
  if (folder.empty()) return compile(arch);
  const auto path = std::filesystem::path(folder) / cached_name(arch);
  if (std::ifstream file(path, std::ios::binary); file) {
    std::string code((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    if (!code.empty()) return code;
  }
  const auto code = compile(arch);
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  const auto staged = path.string() + "." + std::to_string(getpid());
  if (std::ofstream file(staged, std::ios::binary); file && file.write(code.data(), static_cast<std::streamsize>(code.size())).flush())
    std::filesystem::rename(staged, path, failed);
  else
    std::filesystem::remove(staged, failed);
  return code;
}

// ---- the driver

struct Driver {
  using Handle = struct HandleOpaque*;
  int (*init)(unsigned);
  int (*error_name)(int, const char**);
  int (*device)(int*, int);
  int (*attribute)(int*, int, int);
  int (*current)(Handle*);
  int (*retain)(Handle*, int);
  int (*set_current)(Handle);
  int (*load)(Handle*, const void*);
  int (*function)(Handle*, Handle, const char*);
  int (*launch)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  int (*is_capturing)(void*, int*);
  int (*event_create)(Handle*, unsigned);
  int (*event_record)(Handle, void*);
  int (*event_wait)(Handle);
  int (*event_elapsed)(float*, Handle, Handle);
  int (*event_destroy)(Handle);

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    TORCH_CHECK(library, "there is no CUDA driver (libcuda.so.1)");
    find(library, "cuInit", init);
    find(library, "cuGetErrorName", error_name);
    find(library, "cuDeviceGet", device);
    find(library, "cuDeviceGetAttribute", attribute);
    find(library, "cuCtxGetCurrent", current);
    find(library, "cuDevicePrimaryCtxRetain", retain);
    find(library, "cuCtxSetCurrent", set_current);
    find(library, "cuModuleLoadData", load);
    find(library, "cuModuleGetFunction", function);
    find(library, "cuLaunchKernel", launch);
    find(library, "cuStreamIsCapturing", is_capturing);
    find(library, "cuEventCreate", event_create);
    find(library, "cuEventRecord", event_record);
    find(library, "cuEventSynchronize", event_wait);
    find(library, "cuEventElapsedTime", event_elapsed);
    find(library, "cuEventDestroy_v2", event_destroy);
    check(init(0), "cuInit");
  }

  void check(int status, const char* what) const {
    if (status == 0) return;
    const char* name = nullptr;
    error_name(status, &name);
    TORCH_CHECK(false, "CUDA driver: ", what, ": ", name ? name : std::to_string(status).c_str());
  }
};

const Driver& driver() {
  static const Driver library;
  return library;
}

void* stream_of(const Tensor& like) {
  const c10::impl::VirtualGuardImpl cuda(at::kCUDA);
  return cuda.getStream(like.device()).native_handle();
}

// Kernels of one card, loaded into its primary context, the one libtorch uses.
struct Module {
  Driver::Handle module = nullptr, context = nullptr;
  std::map<std::string, Driver::Handle> functions;

  explicit Module(int index) {
    int device = 0, major = 0, minor = 0;
    const auto& d = driver();
    d.check(d.device(&device, index), "cuDeviceGet");
    d.check(d.attribute(&major, 75, device), "compute capability");
    d.check(d.attribute(&minor, 76, device), "compute capability");
    d.check(d.retain(&context, device), "cuDevicePrimaryCtxRetain");
    const auto code = code_for(architecture(10 * major + minor));
    enter();
    d.check(d.load(&module, code.data()), "cuModuleLoadData");
  }

  void enter() const {
    Driver::Handle now = nullptr;
    driver().check(driver().current(&now), "cuCtxGetCurrent");
    if (now != context) driver().check(driver().set_current(context), "cuCtxSetCurrent");
  }

  Driver::Handle named(const char* name) {
    auto& function = functions[name];
    if (!function) driver().check(driver().function(&function, module, name), name);
    return function;
  }
};

std::mutex modules_lock;

Module& module_on(int index) {
  static std::map<int, std::unique_ptr<Module>> modules;
  auto& module = modules[index];
  if (!module) module = std::make_unique<Module>(index);
  return *module;
}

}  // namespace

void launch_on_card(const char* kernel, Grid grid, uint32_t threads, const void* args, size_t, const Tensor& like) {
  Driver::Handle function = nullptr;
  {
    std::lock_guard<std::mutex> guard(modules_lock);
    auto& module = module_on(like.get_device());
    module.enter();
    function = module.named(kernel);
  }
  void* parameters[] = {const_cast<void*>(args)};
  driver().check(driver().launch(function, grid.x, grid.y, 1, threads, 1, 1, 0, stream_of(like), parameters, nullptr), kernel);
}

// Why kernels must not run though they could; empty where they may.
std::mutex refusal_lock;
std::string refusal;
std::atomic<bool> refused{false};

std::string unavailable() {
  if (refused.load(std::memory_order_relaxed)) {
    std::lock_guard<std::mutex> guard(refusal_lock);
    return refusal;
  }
  static const std::string reason = []() -> std::string {
    try {
      driver();
      nvrtc();
      return "";
    } catch (const std::exception& error) {
      return error.what();
    }
  }();
  return reason;
}

bool loaded(const Tensor& like) {
  static std::map<int, bool> known;
  std::lock_guard<std::mutex> guard(modules_lock);
  const int index = like.get_device();
  const auto found = known.find(index);
  if (found != known.end()) return found->second;
  try {
    module_on(index);
    return known[index] = true;
  } catch (const std::exception& error) {
    TORCH_WARN("kernels of our own are off: ", error.what());
    return known[index] = false;
  }
}

bool capturing(const Tensor& like) {
  int status = 0;
  if (!like.is_cuda()) return false;
  driver().check(driver().is_capturing(stream_of(like), &status), "cuStreamIsCapturing");
  return status != 0;
}

double seconds_on_card(const Tensor& like, const std::function<void()>& work) {
  TORCH_CHECK(like.is_cuda(), "only kernels of a card are timed");
  constexpr int warm = 3, counted = 10;
  const auto& d = driver();
  void* stream = stream_of(like);
  Driver::Handle begin = nullptr, end = nullptr;
  for (int i = 0; i < warm; ++i) work();
  d.check(d.event_create(&begin, 0), "cuEventCreate");
  d.check(d.event_create(&end, 0), "cuEventCreate");
  d.check(d.event_record(begin, stream), "cuEventRecord");
  for (int i = 0; i < counted; ++i) work();
  d.check(d.event_record(end, stream), "cuEventRecord");
  d.check(d.event_wait(end), "cuEventSynchronize");
  float milliseconds = 0.0f;
  d.check(d.event_elapsed(&milliseconds, begin, end), "cuEventElapsedTime");
  d.event_destroy(begin);
  d.event_destroy(end);
  return static_cast<double>(milliseconds) / 1000.0 / counted;
}

}  // namespace prsmed::kernels

extern "C" {

// Compiles all kernels for a compute capability (80 for 8.0); needs no card. `*bytes`: size of the code; `*binary`: whether
// it is the card's own, and not PTX.
char* prsmed_kernels_compile(int32_t capability, uint64_t* bytes, bool* binary) {
  PRSMED_TRY({
    const auto arch = prsmed::kernels::architecture(capability);
    *binary = arch.rfind("sm_", 0) == 0;
    *bytes = prsmed::kernels::code_for(arch).size();
  })
}

// Where compiled kernels are kept between processes.
void prsmed_kernels_folder(const char* path) {
  std::lock_guard<std::mutex> guard(prsmed::kernels::folder_lock);
  prsmed::kernels::folder = path;
}

// From now on no kernel runs, for this reason; an empty one ends that.
void prsmed_kernels_refuse(const char* reason) {
  std::lock_guard<std::mutex> guard(prsmed::kernels::refusal_lock);
  prsmed::kernels::refusal = reason;
  prsmed::kernels::refused = !prsmed::kernels::refusal.empty();
}

// Why kernels cannot run here, empty where they can.
char* prsmed_kernels_unavailable() { return prsmed_message(prsmed::kernels::unavailable().c_str()); }
}
