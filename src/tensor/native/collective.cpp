// Process groups of torch.distributed (c10d): the rendezvous store, and collective operations over Gloo (CPU) and NCCL
// (GPUs).
#include "native.h"

#include <ATen/ops/from_blob.h>
#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <c10/core/StreamGuard.h>

#include "async_copy.h"
#include "cuda_side.h"

namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000.0));
}

c10d::ReduceOp operation(int code) {
  return code == 0 ? c10d::ReduceOp::SUM : c10d::ReduceOp::MAX;
}

// `tensor` for a group. Gloo's thread may hold a tensor for a moment after its operation is complete; so it gets one that
// does not own the memory, which the caller keeps until then. NCCL's group needs the owner, for its streams.
std::vector<at::Tensor> lent(const at::Tensor& tensor) {
  if (!tensor.is_cpu()) return {tensor};
  return {at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options())};
}

void keep(const WorkPtr& work, void** out) { *out = new WorkPtr(work); }

WorkPtr all_reduce(BackendPtr& group, const at::Tensor& tensor, int code) {
  std::vector<at::Tensor> tensors = lent(tensor);
  c10d::AllreduceOptions options;
  options.reduceOp = operation(code);
  return group->allreduce(tensors, options);
}

}  // namespace

extern "C" {

// `listener`: the listening socket of the server, which takes it over; -1 for a client. `connect_seconds` for the
// connection, `seconds` for what is waited for later.
char* prsmed_store_open(const char* host, int port, int listener, double connect_seconds, double seconds,
    const char* prefix, void** out) {
  PRSMED_TRY({
    // libtorch warns with 20 lines of its own code's addresses of each lost connection, which comes back as an error
    // too. Errors stay: only they have NCCL's own words, and those of its watchdog.
    if (std::getenv("TORCH_CPP_LOG_LEVEL") == nullptr) FLAGS_caffe2_log_level = c10::GLOG_ERROR;
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(port);
    options.isServer = listener >= 0;
    if (listener >= 0) options.masterListenFd = listener;
    options.waitWorkers = false;
    // several stores of one process share its server
    options.multiTenant = true;
    options.timeout = milliseconds(connect_seconds);
    StorePtr store = c10::make_intrusive<c10d::TCPStore>(std::string(host), options);
    store->setTimeout(milliseconds(seconds));
    *out = new StorePtr(c10::make_intrusive<c10d::PrefixStore>(std::string(prefix), store));
  })
}

void prsmed_store_close(void* store) noexcept { delete static_cast<StorePtr*>(store); }

char* prsmed_store_set(void* store, const char* key, const char* text) {
  PRSMED_TRY({
    const std::string value(text);
    (*static_cast<StorePtr*>(store))->set(key, std::vector<uint8_t>(value.begin(), value.end()));
  })
}

// Waits up to `seconds` for `key`. `out` must be freed by `prsmed_free_message`.
char* prsmed_store_get(void* store, const char* key, double seconds, char** out) {
  PRSMED_TRY({
    StorePtr& opened = *static_cast<StorePtr*>(store);
    opened->wait({std::string(key)}, milliseconds(seconds));
    const std::vector<uint8_t> value = opened->get(key);
    *out = prsmed_message(std::string(value.begin(), value.end()).c_str());
  })
}

char* prsmed_store_has(void* store, const char* key, bool* out) {
  PRSMED_TRY(*out = (*static_cast<StorePtr*>(store))->check({std::string(key)}))
}

char* prsmed_store_add(void* store, const char* key, int64_t amount, int64_t* out) {
  PRSMED_TRY(*out = (*static_cast<StorePtr*>(store))->add(key, amount))
}

// A group over Gloo. `interface` may be null: the interface of the host name, else loopback.
char* prsmed_group_gloo(void* store, const char* name, int rank, int size, double seconds, const char* interface,
    void** out) {
  PRSMED_TRY({
    StorePtr own = c10::make_intrusive<c10d::PrefixStore>(std::string(name), *static_cast<StorePtr*>(store));
    auto options = c10d::ProcessGroupGloo::Options::create(milliseconds(seconds));
    options->devices.push_back(interface == nullptr ? c10d::ProcessGroupGloo::createDefaultDevice()
                                                    : c10d::ProcessGroupGloo::createDeviceForInterface(interface));
    *out = new BackendPtr(c10::make_intrusive<c10d::ProcessGroupGloo>(own, rank, size, options));
  })
}

// A group over NCCL on the current GPU.
char* prsmed_group_nccl(void* store, const char* name, int rank, int size, double seconds, void** out) {
  PRSMED_TRY(return prsmed::cuda_side().group_nccl(store, name, rank, size, seconds, out))
}

// Ends a group whose operations are complete on all ranks.
char* prsmed_group_shutdown(void* group) { PRSMED_TRY((*static_cast<BackendPtr*>(group))->shutdown()) }

// Frees a group. One that was not shut down is aborted, because another rank may never answer.
void prsmed_group_close(void* group, bool is_shut_down) noexcept {
  const std::unique_ptr<BackendPtr> owned(static_cast<BackendPtr*>(group));
  if (!is_shut_down) (*owned)->abort();
}

// Starts to reduce `tensor` in place over all ranks. `code`: 0 sum, 1 maximum.
char* prsmed_all_reduce(void* group, at::Tensor* tensor, int code, void** out) {
  PRSMED_TRY(keep(all_reduce(*static_cast<BackendPtr*>(group), *tensor, code), out))
}

// Starts to sum `tensor` over all ranks; only `root` has the sum, and the values of the others are undefined.
char* prsmed_reduce(void* group, at::Tensor* tensor, int root, void** out) {
  PRSMED_TRY({
    std::vector<at::Tensor> tensors = lent(*tensor);
    c10d::ReduceOptions options;
    options.rootRank = root;
    keep((*static_cast<BackendPtr*>(group))->reduce(tensors, options), out);
  })
}

// Sends `tensor` to `other`, or receives it from there, and waits.
char* prsmed_transfer(void* group, at::Tensor* tensor, int other, bool sends) {
  PRSMED_TRY({
    std::vector<at::Tensor> tensors = lent(*tensor);
    BackendPtr& opened = *static_cast<BackendPtr*>(group);
    (sends ? opened->send(tensors, other, 0) : opened->recv(tensors, other, 0))->wait();
  })
}

// Starts to copy `tensor` of `root` to all ranks.
char* prsmed_broadcast(void* group, at::Tensor* tensor, int root, void** out) {
  PRSMED_TRY({
    std::vector<at::Tensor> tensors = lent(*tensor);
    c10d::BroadcastOptions options;
    options.rootRank = root;
    keep((*static_cast<BackendPtr*>(group))->broadcast(tensors, options), out);
  })
}

// Starts to collect `part` of each rank in `whole`, in the order of the ranks. Only for groups over NCCL.
// `after_copies`: the operation follows the asynchronous copies, instead of the work of the compute stream.
char* prsmed_all_gather(void* group, at::Tensor* part, at::Tensor* whole, bool after_copies, void** out) {
  PRSMED_TRY({
    c10d::AllgatherOptions options;
    c10::OptionalStreamGuard on;
    if (after_copies) on.reset_stream(copy_stream(c10::impl::VirtualGuardImpl(whole->device().type()), whole->device()));
    keep((*static_cast<BackendPtr*>(group))->_allgather_base(*whole, *part, options), out);
  })
}

// Waits for an operation (on a GPU: the current stream waits) and frees `work`.
char* prsmed_work_wait(void* work) {
  PRSMED_TRY({
    std::unique_ptr<WorkPtr> owned(static_cast<WorkPtr*>(work));
    (*owned)->wait();
  })
}

// Reduces numbers of the host in place, and waits. Only for groups over Gloo.
char* prsmed_reduce_numbers(void* group, double* values, int64_t count, int code) {
  PRSMED_TRY({
    at::Tensor tensor = at::from_blob(values, {count}, at::TensorOptions(at::kDouble));
    all_reduce(*static_cast<BackendPtr*>(group), tensor, code)->wait();
  })
}
}
