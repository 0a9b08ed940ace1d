// The dry run's kernels: one set that allocates what libtorch's CPU allocates, one that allocates what its CUDA does.
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

// Whose allocations this thread's meta tensors repeat.
bool for_cuda();
// What the planned card is, as far as kernels choose by it: compute capability (80 for 8.0) and multiprocessors.
struct Card {
  int32_t capability = 80;
  int32_t multiprocessors = 108;
};
const Card& card();

// ---- shared by both targets (meta.cpp)
// Allocates on meta and lets go at once.
void hold(int64_t bytes);
at::TensorOptions meta_of(std::optional<at::ScalarType> t);
bool reduced(const Tensor& t);
// The engine adds gradients in place where it may; on meta tensors it never does, so the kernel of its out-of-place
// addition gives back the operand that would have been changed. The conditions are those of libtorch's
// torch/csrc/autograd/input_buffer.cpp, which asks for no device.
bool reusable(const Tensor& t);
bool accumulating();
// libtorch's formula of the node being evaluated works in place on real devices and out of place on meta.
bool in_place_node();
// Composite functions that add in place on real devices and out of place on meta ("tensor subclass like"): inside them
// an addition gives back its first operand where nobody else holds it.
bool in_place_sums();
struct InPlaceSums {
  InPlaceSums();
  ~InPlaceSums();
};

// ---- attention.cpp, on real tensors and meta tensors alike: transformers/attention.cpp of libtorch
// A mask of bools as one to add, of the dtype and device of `q`; others as they are.
OptT added_mask(const OptT& mask, const Tensor& q);
// The bias in a form whose rows start at multiples of 8 numbers, expanded to every head and query.
Tensor aligned_bias(const Tensor& bias, const Tensor& q, const Tensor& k);

using Three = std::tuple<Tensor, Tensor, Tensor>;
using Mask3 = std::array<bool, 3>;
using Format = std::optional<at::MemoryFormat>;
using Kind = std::optional<at::ScalarType>;

#define PRSMED_SHARED_KERNELS                                                                                         \
  Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptT& mask, double dropout, bool causal,  \
                   std::optional<double> scale, bool gqa);                                                            \
  Three layer_norm(const Tensor& x, c10::SymIntArrayRef ns, const OptT& w, const OptT& b, double eps);                \
  Three layer_norm_backward(const Tensor& g, const Tensor& x, c10::SymIntArrayRef ns, const Tensor& mean,             \
                            const Tensor& rstd, const OptT& w, const OptT& b, Mask3 m);                               \
  Tensor add(const Tensor& a, const Tensor& b, const at::Scalar& alpha);                                              \
  Tensor& add_(Tensor& a, const Tensor& b, const at::Scalar& alpha);                                                  \
  Tensor sub(const Tensor& a, const Tensor& b, const at::Scalar& alpha);                                              \
  Tensor& sub_(Tensor& a, const Tensor& b, const at::Scalar& alpha);                                                  \
  Tensor mul(const Tensor& a, const Tensor& b);                                                                       \
  Tensor& mul_(Tensor& a, const Tensor& b);                                                                           \
  Tensor& mul_out(const Tensor& a, const Tensor& b, Tensor& out);                                                     \
  Tensor div(const Tensor& a, const Tensor& b);                                                                       \
  Tensor& div_(Tensor& a, const Tensor& b);                                                                           \
  Tensor gelu_backward(const Tensor& g, const Tensor& x, std::string_view form);                                      \
  Tensor sum(const Tensor& x, at::OptionalIntArrayRef dims, bool keep, Kind t);                                       \
  Tensor mm(const Tensor& a, const Tensor& b);                                                                        \
  Tensor bmm(const Tensor& a, const Tensor& b);                                                                       \
  Tensor addmm(const Tensor& c, const Tensor& a, const Tensor& b, const at::Scalar& beta, const at::Scalar& alpha);    \
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
// Whether attention without dropout is the memory-efficient kernel's.
bool takes_efficient(const Tensor& q, const Tensor& k, const Tensor& v, const OptT& mask, bool causal);
Tensor dropout(const Tensor& x, double p, bool train);
// Kernels of operators that the CPU target mirrors, and of those that only CUDA has.
void install(torch::Library& meta);
bool describes(const c10::OperatorName& name);
}  // namespace cuda
#undef PRSMED_SHARED_KERNELS
}  // namespace prsmed
