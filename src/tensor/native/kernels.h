// Kernels of our own in place of chains of libtorch's (`kernels/*.cu`, compiled at run time by NVRTC). Every function gives
// nothing where they cannot be used (another device, dtype or layout, switched off): the caller then runs the chain, which
// `composed` holds for most. Results of both are interchangeable between forward and backward.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <utility>

namespace prsmed {
struct Adamw8;  // optim.h
}

namespace prsmed::kernels {

using at::Tensor;

enum class Mode : int32_t { Auto = 0, On = 1, Off = 2 };

// Four bits to a weight, as bitsandbytes stores them: `codes` u8, two to a byte, the first in the high half. `absmax` is fp32,
// one to 64 elements, or with double quantization u8: it stands for map[absmax] * nested[block / 256] + offset then.
struct Codes {
  Tensor codes, absmax, nested, map;
  double offset = 0.0;
};

// Whether kernels may run on `x`; on the meta device, whether those of the card that is planned for would.
bool usable(const Tensor& x);

// y and 1 / sqrt(mean(x^2) + eps) of each row (fp32, `[..., 1]`).
std::optional<std::pair<Tensor, Tensor>> rms_norm(const Tensor& x, const Tensor& weight, double eps);
// The gradient of x.
std::optional<Tensor> rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd);
// The gradient of the weight.
std::optional<Tensor> rms_norm_weight_grad(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd);
// Turns `xs [b, t, h d]` in place, head by head; `cos`, `sin` `[t, d / 2]` or `[b, t, d / 2]` (ones between allowed) in its
// dtype. Whether it did.
bool rotate_(const Tensor& xs, const Tensor& cos, const Tensor& sin, bool back);
// Whether `drop` takes tensors like `x`, laid out without gaps: wherever it can, whatever the mode, since only a kernel of
// ours can be recorded with another seed for each replay.
bool drops(const Tensor& x);
// `y` = `x` with elements set to 0 with probability `p`; nothing is scaled. The mask follows from the seed and the place
// alone. Whether it did.
bool drop(const Tensor& x, const Tensor& y, double p, int64_t seed);
// silu(gate) up.
std::optional<Tensor> swiglu(const Tensor& gate, const Tensor& up);
// The gradients of gate and up.
std::optional<std::pair<Tensor, Tensor>> swiglu_backward(const Tensor& dy, const Tensor& gate, const Tensor& up);
// Writes the weight that the codes stand for into `out` (bf16, fp16 or fp32, contiguous). Allocates nothing. Whether it did:
// wherever it can, whatever the mode, since libtorch's operators need more memory than plans count.
bool nf4(const Codes& weight, const Tensor& out);
// Writes what `blocks [b, t]` i64 mean for attention into `bias [b, 1, t, t or more]` (contiguous): 0 where the query of a row
// sees the key of a column, that is one of block 0 or of its own block, up to itself; minus infinity elsewhere, also where
// no key is. Whether it did.
bool packed_bias(const Tensor& blocks, const Tensor& bias);
// A step of AdamW with moments in 8 bits, with the numbers of the CPU's; waits for nothing. Allocates nothing. Whether it did:
// wherever it can, whatever the mode, as `nf4`. Its twin is `step8_composed` (optim.h).
bool adamw8(const Adamw8& work);

// The same by libtorch's operators.
namespace composed {
std::pair<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps);
Tensor rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd);
Tensor rms_norm_weight_grad(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd);
void rotate_(const Tensor& xs, const Tensor& cos, const Tensor& sin, bool back);
Tensor drop(const Tensor& x, double p, int64_t seed);
Tensor swiglu(const Tensor& gate, const Tensor& up);
std::pair<Tensor, Tensor> swiglu_backward(const Tensor& dy, const Tensor& gate, const Tensor& up);
Tensor nf4(const Codes& weight, const Tensor& like);
void packed_bias(const Tensor& blocks, const Tensor& bias);
}  // namespace composed

// ---- seeds of captured steps (seeds.cpp)
// A captured kernel cannot be given a seed as a number: it reads it from the tape, where each replay finds new ones.
// Everything that draws a seed on the host for kernels above says so here.
void note_seed(int64_t seed);
// Where a captured kernel finds `seed`; null outside captures.
const int64_t* seed_on_device(int64_t seed);

// Whether `own` is to run for `op` on tensors like `x`. With `Mode::Auto` both are timed the first time that such a size is
// met, outside of captures, and the faster one is kept. `own` says whether it could run.
bool prefer(const char* op, const Tensor& x, const std::function<bool()>& own, const std::function<void()>& chain);

// `own` (which gives nothing where it cannot run) or `chain`, whichever is preferred. Where a layer of ours chooses.
template <class Own, class Chain>
auto choose(const char* op, const Tensor& x, const Own& own, const Chain& chain) -> decltype(chain()) {
  if (usable(x) && prefer(op, x, [&] { return own().has_value(); }, [&] { (void)chain(); })) {
    if (auto result = own()) return *std::move(result);
  }
  return chain();
}

// How a kernel is started: by the driver on the current stream, or by the emulation of a test.
struct Grid { uint32_t x = 1, y = 1; };
using Launcher = void (*)(const char* kernel, Grid grid, uint32_t threads, const void* args, size_t arg_bytes, const Tensor& like);
void use_launcher(Launcher launcher);  // of this thread; null = the driver
void launch_on_card(const char* kernel, Grid grid, uint32_t threads, const void* args, size_t arg_bytes, const Tensor& like);

// What keeps this machine from running kernels; empty where it can.
std::string unavailable();
// Whether the kernels are compiled and loaded on the card of `like`; tries it the first time.
bool loaded(const Tensor& like);
// Seconds of one call, the mean of several.
double seconds_on_card(const Tensor& like, const std::function<void()>& work);
bool capturing(const Tensor& like);

}  // namespace prsmed::kernels
