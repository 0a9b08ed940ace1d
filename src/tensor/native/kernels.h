// Custom CUDA kernels in place of sequences of libtorch's operators (`kernels/*.cu`, compiled at run time by NVRTC).
// A function returns nothing if its kernel cannot run (other device, dtype or layout, or switched off). The caller then
// uses libtorch's operators; `composed` has most of them. Both ways may be mixed between forward and backward pass.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <utility>
#include <vector>

namespace prsmed {
struct Adamw8;  // optim.h
}

namespace prsmed::kernels {

using at::Tensor;

enum class Mode : int32_t { Auto = 0, On = 1, Off = 2 };

// NF4 codes of a weight as bitsandbytes stores them: `codes` u8, two per byte, the first in the high half. `absmax` is
// fp32, one scale per 64 elements. With double quantization it is u8: a scale is map[absmax] * nested[block / 256] +
// offset.
struct Codes {
  Tensor codes, absmax, nested, map;
  double offset = 0.0;
};

// True if kernels may run on `x`. On the meta device: if they may run on the planned GPU.
bool usable(const Tensor& x);

// Returns y, and 1 / sqrt(mean(x^2) + eps) of each row (fp32, `[..., 1]`).
std::optional<std::pair<Tensor, Tensor>> rms_norm(const Tensor& x, const Tensor& weight, double eps);
// Gradient of x.
std::optional<Tensor> rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd);
// Gradient of the weight.
std::optional<Tensor> rms_norm_weight_grad(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd);
// Rotates `xs [b, t, h d]` in place, head by head. `cos`, `sin`: `[t, d / 2]` or `[b, t, d / 2]` (dimensions of size 1
// may be added), in its dtype. Returns true if it did.
bool rotate_(const Tensor& xs, const Tensor& cos, const Tensor& sin, bool back);
// True if `drop` supports contiguous tensors like `x`. It does not depend on the mode, because libtorch's operators
// cannot be captured with a new seed per replay.
bool drops(const Tensor& x);
// Dropout without scaling: writes `x` to `y`, with elements set to 0 with probability `p`. The mask depends only on the
// seed and the index of the element. Returns true if it did.
bool drop(const Tensor& x, const Tensor& y, double p, int64_t seed);
// Adapters that share an input and have one rank and one dropout probability `p` (`kernels/low_rank.cu`).
struct Adapters {
  std::vector<Tensor> a;       // [rank, dim] fp32 each, at most three
  std::vector<int64_t> seeds;  // of the dropout masks
  double p, factor;            // the factor of the products
};
// The products of `x [rows, dim]`, dropped out, with each a, times the factor: `[rows, rank]`, views of one tensor.
std::optional<std::vector<Tensor>> low_rank(const Tensor& x, const Adapters& adapters);
// From the gradients of those products: the gradients of each a, fp32 `[rank, dim]`, views of one tensor.
std::optional<std::vector<Tensor>> low_rank_weight_grad(const Tensor& x, const std::vector<Tensor>& grads,
                                                        const Adapters& adapters);
// ... and the gradient of an input like `x`.
std::optional<Tensor> low_rank_input_grad(const Tensor& x, const std::vector<Tensor>& grads, const Adapters& adapters);
// silu(gate) up.
std::optional<Tensor> swiglu(const Tensor& gate, const Tensor& up);
// Gradients of gate and up.
std::optional<std::pair<Tensor, Tensor>> swiglu_backward(const Tensor& dy, const Tensor& gate, const Tensor& up);
// Dequantizes the codes into `out` (bf16, fp16 or fp32, contiguous) without allocations. Returns true if it did. It
// does not depend on the mode, because libtorch's operators need more memory than plans count.
bool nf4(const Codes& weight, const Tensor& out);
// Writes the attention bias of `blocks [b, t]` i64 into `bias [b, 1, t, t or more]` (contiguous). It is 0 where the
// query of a row may attend to the key of a column: a key of block 0 or of the query's own block that is not after it.
// It is minus infinity elsewhere, and in the padding of rows. Returns true if it did.
bool packed_bias(const Tensor& blocks, const Tensor& bias);
// A step of 8-bit AdamW, bit-identical to the CPU's, without synchronisation or allocations. Returns true if it did.
// Like `nf4` it does not depend on the mode. Its equivalent is `step8_composed` (optim.h).
bool adamw8(const Adamw8& work);

// The same operations with libtorch's operators.
namespace composed {
std::pair<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps);
Tensor rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd);
Tensor rms_norm_weight_grad(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd);
void rotate_(const Tensor& xs, const Tensor& cos, const Tensor& sin, bool back);
Tensor drop(const Tensor& x, double p, int64_t seed);
std::vector<Tensor> low_rank(const Tensor& x, const Adapters& adapters);
std::vector<Tensor> low_rank_weight_grad(const Tensor& x, const std::vector<Tensor>& grads, const Adapters& adapters);
Tensor low_rank_input_grad(const Tensor& x, const std::vector<Tensor>& grads, const Adapters& adapters);
Tensor swiglu(const Tensor& gate, const Tensor& up);
std::pair<Tensor, Tensor> swiglu_backward(const Tensor& dy, const Tensor& gate, const Tensor& up);
Tensor nf4(const Codes& weight, const Tensor& like);
void packed_bias(const Tensor& blocks, const Tensor& bias);
}  // namespace composed

// ---- seeds of captured steps (seeds.cpp)
// A captured kernel cannot have its seed as an argument. It reads the seed from a buffer, which each replay fills with
// new seeds.
// Draws a seed from the CPU's generator; a capture notes it.
int64_t new_seed();
// Address from which a captured kernel reads `seed`; null outside of captures.
const int64_t* seed_on_device(int64_t seed);

// True if `custom` should run for `op` on tensors like `x`. With `Mode::Auto` both are timed the first time that this
// size occurs outside of a capture, and the faster one is used from then on. `custom` returns false if it cannot run.
bool prefer(const char* op, const Tensor& x, const std::function<bool()>& custom,
            const std::function<void()>& fallback);

// Runs `custom` (which returns nothing if it cannot run) or `fallback`, whichever `prefer` selects.
template <class Custom, class Fallback>
auto choose(const char* op, const Tensor& x, const Custom& custom, const Fallback& fallback) -> decltype(fallback()) {
  if (usable(x) && prefer(op, x, [&] { return custom().has_value(); }, [&] { (void)fallback(); })) {
    if (auto result = custom()) return *std::move(result);
  }
  return fallback();
}

// Launches a kernel: through the driver on the current stream, or in the emulation of a test.
struct Grid { uint32_t x = 1, y = 1; };
using Launcher = void (*)(const char* kernel, Grid grid, uint32_t threads, const void* args, size_t arg_bytes,
                          const Tensor& like);
void use_launcher(Launcher launcher);  // for this thread; null = the driver
void launch_on_gpu(const char* kernel, Grid grid, uint32_t threads, const void* args, size_t arg_bytes,
                   const Tensor& like);

// The reason why this machine cannot run kernels; empty if it can.
std::string unavailable();
// True if the kernels are compiled and loaded on the GPU of `like`. The first call compiles and loads them.
bool loaded(const Tensor& like);
// Mean time of one call, in seconds.
double seconds_on_gpu(const Tensor& like, const std::function<void()>& work);
bool capturing(const Tensor& like);

}  // namespace prsmed::kernels
