// Kernels of the meta device for dry runs: one set allocates like libtorch's CPU kernels, one like its CUDA kernels.
#pragma once
#include <ATen/core/Tensor.h>

namespace c10 {
struct OperatorName;
}
namespace torch {
class Library;
}

namespace prsmed {
using at::Tensor;
using OptT = std::optional<Tensor>;

// True if this thread's meta tensors simulate CUDA tensors.
bool for_cuda();
// The simulated GPU, as far as kernels depend on it: compute capability (80 for 8.0) and multiprocessors.
struct Gpu {
  int32_t capability = 80;
  int32_t multiprocessors = 108;
};
const Gpu& gpu();

// ---- shared by both targets (meta.cpp)
// Allocates on the meta device and frees at once.
void hold(int64_t bytes);
at::TensorOptions meta_of(std::optional<at::ScalarType> t);
bool reduced(const Tensor& t);
// Autograd adds gradients in place if it can. On meta tensors it never does, so the kernel of its out-of-place addition
// returns the operand that would be changed. The conditions are those of libtorch's
// torch/csrc/autograd/input_buffer.cpp, which do not depend on the device.
bool reusable(const Tensor& t);
bool accumulating();
// True if libtorch's formula of the current backward node works in place on real devices and out of place on meta.
bool in_place_node();
// Composite functions that add in place on real devices and out of place on meta ("tensor subclass like"). Inside them
// an addition returns its first operand if nothing else uses it.
bool in_place_sums();
struct InPlaceSums {
  InPlaceSums();
  ~InPlaceSums();
};

// ---- attention.cpp, for real and meta tensors: like libtorch's transformers/attention.cpp
// Converts a bool mask to a bias in the dtype and on the device of `q`. Other masks stay unchanged.
OptT added_mask(const OptT& mask, const Tensor& q);
// The bias with rows that start at multiples of 8 elements, expanded to every head and query.
Tensor aligned_bias(const Tensor& bias, const Tensor& q, const Tensor& k);

using Three = std::tuple<Tensor, Tensor, Tensor>;
using Mask3 = std::array<bool, 3>;
using Format = std::optional<at::MemoryFormat>;
using Kind = std::optional<at::ScalarType>;

#define PRSMED_SHARED_KERNELS                                                                                        \
  Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptT& mask, double dropout, bool causal, \
                   std::optional<double> scale, bool gqa);                                                           \
  Three layer_norm(const Tensor& x, c10::SymIntArrayRef ns, const OptT& w, const OptT& b, double eps);               \
  Three layer_norm_backward(const Tensor& g, const Tensor& x, c10::SymIntArrayRef ns, const Tensor& mean,            \
                            const Tensor& rstd, const OptT& w, const OptT& b, Mask3 m);                              \
  Tensor add(const Tensor& a, const Tensor& b, const at::Scalar& alpha);                                             \
  Tensor& add_(Tensor& a, const Tensor& b, const at::Scalar& alpha);                                                 \
  Tensor sub(const Tensor& a, const Tensor& b, const at::Scalar& alpha);                                             \
  Tensor& sub_(Tensor& a, const Tensor& b, const at::Scalar& alpha);                                                 \
  Tensor mul(const Tensor& a, const Tensor& b);                                                                      \
  Tensor& mul_(Tensor& a, const Tensor& b);                                                                          \
  Tensor& mul_out(const Tensor& a, const Tensor& b, Tensor& out);                                                    \
  Tensor div(const Tensor& a, const Tensor& b);                                                                      \
  Tensor& div_(Tensor& a, const Tensor& b);                                                                          \
  Tensor gelu_backward(const Tensor& g, const Tensor& x, std::string_view form);                                     \
  Tensor sum(const Tensor& x, at::OptionalIntArrayRef dims, bool keep, Kind t);                                      \
  Tensor mm(const Tensor& a, const Tensor& b);                                                                       \
  Tensor bmm(const Tensor& a, const Tensor& b);                                                                      \
  Tensor addmm(const Tensor& c, const Tensor& a, const Tensor& b, const at::Scalar& beta, const at::Scalar& alpha);  \
  Tensor& addmm_(Tensor& c, const Tensor& a, const Tensor& b, const at::Scalar& beta, const at::Scalar& alpha);

namespace cpu {
PRSMED_SHARED_KERNELS
std::tuple<Tensor, Tensor> flash(const Tensor& q, const Tensor& k, const Tensor& v, double p, bool causal,
                                 const OptT& mask, std::optional<double> scale);
Three flash_backward(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                     const Tensor& lse, double p, bool causal, const OptT& mask, std::optional<double> scale);
}  // namespace cpu

namespace cuda {
PRSMED_SHARED_KERNELS
// True if attention without dropout uses the memory-efficient kernel.
bool takes_efficient(const Tensor& q, const Tensor& k, const Tensor& v, const OptT& mask, bool causal);
// True if attention without a mask and without dropout uses the flash kernel.
bool takes_flash(const Tensor& q, const Tensor& k, const Tensor& v);
Tensor dropout(const Tensor& x, double p, bool train);
// Registers kernels of operators that the CPU target mirrors, and of operators that only CUDA has.
void install(torch::Library& meta);
bool describes(const c10::OperatorName& name);
}  // namespace cuda
#undef PRSMED_SHARED_KERNELS
}  // namespace prsmed
