// CPU side of the custom CUDA kernels: checks of their inputs, launch sizes, and the choice of the faster
// implementation.
#include "kernels.h"

#include "kernels/args.h"
#include "meta.h"
#include "native.h"
#include "optim.h"
#include "trace.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <map>
#include <mutex>
#include <set>

namespace prsmed::kernels {

namespace {

constexpr uint32_t threads = 256;
// More blocks than any GPU runs at once. Elementwise kernels loop over the rest.
constexpr int64_t most_blocks = 1 << 16;
constexpr int64_t weight_grad_chunks = 64;

std::atomic<int32_t> mode_now{static_cast<int32_t>(Mode::Off)};
thread_local Launcher launcher_now = nullptr;

// Operations whose kernels differ from libtorch on this machine, by their names in kernels_operations.cpp.
std::mutex refused_lock;
std::set<std::string> refused_names;
std::atomic<bool> refuses_some{false};

bool refused(const char* operation) {
  if (!refuses_some.load(std::memory_order_relaxed)) return false;
  std::lock_guard<std::mutex> guard(refused_lock);
  return refused_names.count(operation) > 0;
}

Mode mode() { return static_cast<Mode>(mode_now.load(std::memory_order_relaxed)); }

const char* suffix(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return "_fp32";
    case at::kBFloat16: return "_bf16";
    case at::kHalf: return "_fp16";
    default: return nullptr;
  }
}

// Elements per access of a thread in a wide kernel.
int64_t width(at::ScalarType dtype) { return dtype == at::kFloat ? 4 : 8; }

bool aligned(const Tensor& tensor) {
  return tensor.is_meta() || reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

uint32_t blocks(int64_t count, int64_t each) {
  return static_cast<uint32_t>(std::clamp<int64_t>((count + each * threads - 1) / (each * threads), 1, most_blocks));
}

// Kernels that divide indices count their elements with 31 bits.
bool countable(const Tensor& x) { return x.numel() <= std::numeric_limits<int32_t>::max(); }

Divider divider(int64_t value) {
  const auto d = static_cast<uint64_t>(value);
  unsigned shift = 0;
  while ((uint64_t{1} << shift) < d) ++shift;
  const uint64_t magic = ((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d)) / d + 1;
  return {static_cast<unsigned>(d), static_cast<unsigned>(magic), shift};
}

template <class Args>
void launch(const std::string& op, at::ScalarType dtype, bool wide, Grid grid, const Args& args, const Tensor& like) {
  if (like.is_meta()) return;
  const std::string name = op + suffix(dtype) + (wide ? "_wide" : "");
  (launcher_now ? launcher_now : launch_on_gpu)(name.c_str(), grid, threads, &args, sizeof(args), like);
}

bool same(const Tensor& a, const Tensor& b) { return a.device() == b.device() && a.scalar_type() == b.scalar_type(); }

uint32_t threshold_of(double p) { return static_cast<uint32_t>(std::min(p * 4294967296.0, 4294967295.0)); }

template <class T> T* pointer(const Tensor& tensor) {
  return tensor.defined() && !tensor.is_meta() ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
}

struct Rows {
  int64_t rows, dim;
  bool wide;
};

std::optional<Rows> rows_of(const Tensor& x, const Tensor& weight) {
  if (!usable(x) || !suffix(x.scalar_type()) || x.dim() < 1 || x.numel() == 0 || !same(x, weight)) return {};
  const int64_t dim = x.size(-1);
  if (weight.numel() != dim || !x.is_contiguous() || !weight.is_contiguous()) return {};
  return Rows{x.numel() / dim, dim, dim % width(x.scalar_type()) == 0 && aligned(x) && aligned(weight)};
}

// Stride of rows if all leading dimensions can be merged into one, else -1.
int64_t row_stride(const Tensor& x) {
  if (x.dim() == 0 || x.stride(-1) != 1) return -1;
  if (x.is_contiguous()) return x.size(-1);
  int64_t stride = -1, expected = -1;
  for (int64_t d = x.dim() - 2; d >= 0; --d) {
    if (x.size(d) == 1) continue;
    if (stride < 0) stride = x.stride(d);
    else if (x.stride(d) != expected) return -1;
    expected = x.stride(d) * x.size(d);
  }
  return stride < 0 ? x.size(-1) : stride;
}

std::optional<SwigluArgs> swiglu_args(const Tensor& gate, const Tensor& up) {
  if (!usable(gate) || !suffix(gate.scalar_type()) || !same(gate, up) || gate.sizes() != up.sizes()) return {};
  SwigluArgs args{};
  args.gate_row = row_stride(gate), args.up_row = row_stride(up);
  if (gate.numel() == 0 || !countable(gate) || args.gate_row < 0 || args.up_row < 0) return {};
  args.cols = divider(gate.size(-1)), args.count = static_cast<unsigned>(gate.numel());
  args.gate = pointer<void>(gate), args.up = pointer<void>(up);
  return args;
}

bool swiglu_wide(const SwigluArgs& a, const Tensor& gate, const Tensor& up) {
  const int64_t each = width(gate.scalar_type());
  return a.cols.divisor % each == 0 && a.gate_row % each == 0 && a.up_row % each == 0 && aligned(gate) && aligned(up);
}

}  // namespace

namespace {

// True if a kernel could run on `x`, regardless of the mode.
bool runs_on(const Tensor& x) {
  if (launcher_now) return x.is_cpu();
  return x.is_cuda() && unavailable().empty() && loaded(x);
}

}  // namespace

bool usable(const Tensor& x) {
  if (!launcher_now && mode() == Mode::Off) return false;
  if (x.is_meta()) return mode() == Mode::On && prsmed::for_cuda();
  return runs_on(x);
}

void use_launcher(Launcher launcher) { launcher_now = launcher; }

std::optional<std::pair<Tensor, Tensor>> rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  if (refused("rms_norm")) return {};
  const auto rows = rows_of(x, weight);
  if (!rows) return {};
  auto sizes = x.sizes().vec();
  sizes.back() = 1;
  auto y = at::empty(x.sizes(), x.options());
  auto rstd = at::empty(sizes, x.options().dtype(at::kFloat));
  RmsNormArgs args{};
  args.x = pointer<void>(x), args.weight = pointer<void>(weight), args.y = pointer<void>(y);
  args.rstd = pointer<float>(rstd);
  args.rows = rows->rows, args.dim = rows->dim, args.eps = static_cast<float>(eps);
  launch("rms_norm_forward", x.scalar_type(), rows->wide, {static_cast<uint32_t>(rows->rows)}, args, x);
  return std::pair(y, rstd);
}

std::optional<Tensor> rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd) {
  if (refused("rms_norm_backward")) return {};
  const auto rows = rows_of(x, weight);
  if (!rows || !same(dy, x) || dy.sizes() != x.sizes() || !rstd.is_contiguous()) return {};
  const auto grad = dy.contiguous();
  auto dx = at::empty(x.sizes(), x.options());
  RmsNormArgs args{};
  args.x = pointer<void>(x), args.weight = pointer<void>(weight), args.dy = pointer<void>(grad);
  args.y = pointer<void>(dx), args.rstd = pointer<float>(rstd);
  args.rows = rows->rows, args.dim = rows->dim;
  const bool wide = rows->wide && aligned(grad);
  launch("rms_norm_backward", x.scalar_type(), wide, {static_cast<uint32_t>(rows->rows)}, args, x);
  return dx;
}

std::optional<Tensor> rms_norm_weight_grad(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                           const Tensor& rstd) {
  if (refused("rms_norm_weight_grad")) return {};
  const auto rows = rows_of(x, weight);
  if (!rows || !same(dy, x) || dy.sizes() != x.sizes() || !rstd.is_contiguous()) return {};
  const auto grad = dy.contiguous();
  const int64_t chunks = std::min(rows->rows, weight_grad_chunks);
  auto partial = at::empty({chunks, rows->dim}, x.options().dtype(at::kFloat));
  RmsNormArgs args{};
  args.x = pointer<void>(x), args.dy = pointer<void>(grad), args.rstd = pointer<float>(rstd);
  args.partial = pointer<float>(partial), args.rows = rows->rows, args.dim = rows->dim;
  const bool wide = rows->wide && aligned(grad);
  const int64_t each = wide ? width(x.scalar_type()) : 1;
  const auto across = static_cast<uint32_t>((rows->dim + each * threads - 1) / (each * threads));
  launch("rms_norm_weight_grad", x.scalar_type(), wide, {across, static_cast<uint32_t>(chunks)}, args, x);
  return partial.sum(0).to(weight.scalar_type()).view_as(weight);
}

bool rotate_(const Tensor& xs, const Tensor& cos, const Tensor& sin, bool back) {
  if (refused(back ? "rotary_backward" : "rotary")) return false;
  const auto dtype = xs.scalar_type();
  if (!usable(xs) || !suffix(dtype) || xs.dim() != 3 || xs.numel() == 0 || !countable(xs) || xs.stride(2) != 1)
    return false;
  const int64_t b = xs.size(0), t = xs.size(1), half = cos.size(-1), each = width(dtype);
  const bool shared = cos.numel() == t * half;
  const bool fits = same(cos, xs) && same(sin, xs) && cos.is_contiguous() && sin.is_contiguous() &&
                    cos.sizes() == sin.sizes() && (shared || cos.numel() == b * t * half) &&
                    xs.size(2) % (2 * half) == 0;
  if (!fits) return false;
  RotaryArgs args{};
  args.x = pointer<void>(xs), args.cos = pointer<void>(cos), args.sin = pointer<void>(sin);
  args.half = divider(half), args.heads = divider(xs.size(2) / (2 * half)), args.tokens = divider(t);
  args.pairs = static_cast<unsigned>(xs.numel() / 2);
  args.x_batch = xs.stride(0), args.x_token = xs.stride(1), args.table_batch = shared ? 0 : t * half,
  args.backward = back;
  const bool wide = half % each == 0 && args.x_batch % each == 0 && args.x_token % each == 0 && aligned(xs) &&
                    aligned(cos) && aligned(sin);
  launch("rotary", dtype, wide, {blocks(args.pairs, wide ? each : 1)}, args, xs);
  return true;
}

bool drops(const Tensor& x) {
  if (refused("dropout")) return false;
  if (!suffix(x.scalar_type()) || !countable(x)) return false;
  return x.is_meta() ? prsmed::for_cuda() : runs_on(x);
}

bool drop(const Tensor& x, const Tensor& y, double p, int64_t seed) {
  const auto dtype = x.scalar_type();
  if (!drops(x) || !same(x, y) || x.sizes() != y.sizes() || !x.is_contiguous() || !y.is_contiguous()) return false;
  if (x.numel() == 0) return true;
  DropoutArgs args{};
  args.x = pointer<void>(x), args.y = pointer<void>(y), args.count = static_cast<unsigned>(x.numel());
  args.dim = divider(x.size(-1));
  args.seed = seed, args.seed_at = reinterpret_cast<const long long*>(x.is_meta() ? nullptr : seed_on_device(seed));
  args.threshold = threshold_of(p);
  const bool wide = args.dim.divisor % width(dtype) == 0 && aligned(x) && aligned(y);
  launch("dropout", dtype, wide, {blocks(args.count, wide ? width(dtype) : 1)}, args, x);
  return true;
}

namespace {

std::vector<Tensor> rows_of_each(const Tensor& all, int64_t rank) { return all.split(rank, 0); }
std::vector<Tensor> columns_of_each(const Tensor& all, int64_t rank) { return all.split(rank, 1); }

// The arguments that all three passes share. `rows [rows, dim]` is x, or a gradient of its sizes.
std::optional<LowRankArgs> low_rank_args(const Tensor& x, const Adapters& adapters) {
  if (!usable(x) || !suffix(x.scalar_type()) || x.dim() != 2 || x.numel() == 0 || !x.is_contiguous() || !aligned(x))
    return {};
  const int64_t rank = adapters.a.at(0).size(0), dim = x.size(1);
  const int64_t most = std::numeric_limits<int32_t>::max();
  // the masks must be those of the dropout kernel, which may compute the other pass
  if (dim % 64 != 0 || rank > 32 || adapters.a.size() > 3 || x.size(0) > most || (adapters.p > 0 && !drops(x)))
    return {};
  LowRankArgs args{};
  for (size_t i = 0; i < adapters.a.size(); ++i) {
    const auto& a = adapters.a[i];
    if (a.scalar_type() != at::kFloat || a.device() != x.device() || !a.is_contiguous() || a.size(0) != rank ||
        a.size(1) != dim)
      return {};
    args.a[i] = pointer<float>(a), args.seed[i] = adapters.seeds.at(i);
    if (adapters.p > 0 && !x.is_meta()) args.seed_at[i] = reinterpret_cast<const long long*>(seed_on_device(args.seed[i]));
  }
  args.x = pointer<void>(x), args.threshold = adapters.p > 0 ? threshold_of(adapters.p) : 0;
  args.rows = static_cast<unsigned>(x.size(0)), args.dim = static_cast<unsigned>(dim);
  args.rank = static_cast<unsigned>(rank), args.adapters = static_cast<unsigned>(adapters.a.size());
  args.factor = static_cast<float>(adapters.factor);
  return args;
}

// Adds gradients of the products with a. Returns false if a kernel cannot read them.
bool add_grads(LowRankArgs& args, const Tensor& x, const std::vector<Tensor>& grads) {
  for (size_t i = 0; i < grads.size(); ++i) {
    const auto& g = grads[i];
    if (!same(g, x) || !g.is_contiguous() || g.numel() != static_cast<int64_t>(args.rows) * args.rank) return false;
    args.g[i] = pointer<void>(g);
  }
  return grads.size() == args.adapters;
}

// Splits that give a GPU enough blocks.
uint32_t splits_of(int64_t tiles, int64_t steps) {
  return static_cast<uint32_t>(std::clamp<int64_t>(512 / tiles, 1, std::min<int64_t>(8, steps)));
}

uint32_t tiles_of(int64_t count) { return static_cast<uint32_t>((count + 63) / 64); }

Tensor sum_of(const Tensor& partial, const Tensor& y, double factor) {
  LowRankSumArgs args{};
  args.partial = pointer<float>(partial), args.y = pointer<void>(y), args.count = y.numel();
  args.splits = static_cast<unsigned>(partial.size(0)), args.factor = static_cast<float>(factor);
  launch("low_rank_sum", y.scalar_type(), false, {blocks(args.count, 1)}, args, y);
  return y;
}

// A multiply-add is two operations; x is read, and as many bytes may be written.
void count_low_rank(const char* name, const Tensor& x, const LowRankArgs& args, double passes, int64_t others) {
  const double products = 2.0 * static_cast<double>(x.numel()) * args.rank * args.adapters;
  prsmed_trace_cost(name, products, passes * static_cast<double>(x.nbytes()) + static_cast<double>(others),
                    static_cast<uint8_t>(x.element_size()));
}

}  // namespace

std::optional<std::vector<Tensor>> low_rank(const Tensor& x, const Adapters& adapters) {
  if (refused("low_rank")) return {};
  const auto args = low_rank_args(x, adapters);
  if (!args) return {};
  const int64_t all = static_cast<int64_t>(args->adapters) * args->rank;
  const auto across = tiles_of(x.size(0));
  const auto splits = splits_of(across, x.size(1) / 32);
  auto low = at::empty({x.size(0), all}, x.options());
  auto partial = at::empty({splits, x.size(0), all}, x.options().dtype(at::kFloat));
  auto call = *args;
  call.partial = pointer<float>(partial);
  launch("low_rank_forward", x.scalar_type(), false, {across, splits}, call, x);
  sum_of(partial, low, adapters.factor);
  count_low_rank("prsmed::low_rank", x, *args, 1, 2 * partial.nbytes() + low.nbytes());
  return columns_of_each(low, args->rank);
}

std::optional<std::vector<Tensor>> low_rank_weight_grad(const Tensor& x, const std::vector<Tensor>& grads,
                                                        const Adapters& adapters) {
  if (refused("low_rank_weight_grad")) return {};
  auto args = low_rank_args(x, adapters);
  if (!args || !add_grads(*args, x, grads)) return {};
  const int64_t all = static_cast<int64_t>(args->adapters) * args->rank;
  const auto across = tiles_of(x.size(1));
  const auto splits = splits_of(across, (x.size(0) + 31) / 32);
  auto sums = at::empty({all, x.size(1)}, x.options().dtype(at::kFloat));
  auto partial = at::empty({splits, all, x.size(1)}, sums.options());
  args->partial = pointer<float>(partial);
  launch("low_rank_weight_grad", x.scalar_type(), false, {across, splits}, *args, x);
  sum_of(partial, sums, 1.0);
  count_low_rank("prsmed::low_rank_weight_grad", x, *args, 1, 2 * partial.nbytes() + sums.nbytes());
  return rows_of_each(sums, args->rank);
}

std::optional<Tensor> low_rank_input_grad(const Tensor& x, const std::vector<Tensor>& grads,
                                          const Adapters& adapters) {
  if (refused("low_rank_input_grad")) return {};
  auto args = low_rank_args(x, adapters);
  if (!args || !add_grads(*args, x, grads)) return {};
  auto dx = at::empty(x.sizes(), x.options());
  args->y = pointer<void>(dx);
  launch("low_rank_input_grad", x.scalar_type(), false, {tiles_of(x.size(0)), tiles_of(x.size(1))}, *args, x);
  count_low_rank("prsmed::low_rank_input_grad", x, *args, 1, 0);
  return dx;
}

std::optional<Tensor> swiglu(const Tensor& gate, const Tensor& up) {
  if (refused("swiglu")) return {};
  auto args = swiglu_args(gate, up);
  if (!args) return {};
  auto y = at::empty(gate.sizes(), gate.options());
  args->y = pointer<void>(y);
  const bool wide = swiglu_wide(*args, gate, up);
  const auto grid = blocks(gate.numel(), wide ? width(gate.scalar_type()) : 1);
  launch("swiglu_forward", gate.scalar_type(), wide, {grid}, *args, gate);
  return y;
}

std::optional<std::pair<Tensor, Tensor>> swiglu_backward(const Tensor& dy, const Tensor& gate, const Tensor& up) {
  if (refused("swiglu_backward")) return {};
  auto args = swiglu_args(gate, up);
  if (!args || !same(dy, gate) || dy.sizes() != gate.sizes()) return {};
  const auto grad = dy.contiguous();
  auto dgate = at::empty(gate.sizes(), gate.options()), dup = at::empty(up.sizes(), up.options());
  args->dy = pointer<void>(grad), args->dgate = pointer<void>(dgate), args->dup = pointer<void>(dup);
  const bool wide = swiglu_wide(*args, gate, up) && aligned(grad);
  const auto grid = blocks(gate.numel(), wide ? width(gate.scalar_type()) : 1);
  launch("swiglu_backward", gate.scalar_type(), wide, {grid}, *args, gate);
  return std::pair(dgate, dup);
}

bool nf4(const Codes& weight, const Tensor& out) {
  if (refused("nf4")) return false;
  if (!runs_on(out) || !suffix(out.scalar_type()) || !weight.codes.is_contiguous() || !out.is_contiguous())
    return false;
  Nf4Args args{};
  args.codes = pointer<unsigned char>(weight.codes), args.y = pointer<void>(out), args.count = out.numel();
  args.block_bits = 6;
  if (weight.nested.defined()) {
    args.scales = pointer<unsigned char>(weight.absmax), args.map = pointer<float>(weight.map);
    args.nested = pointer<float>(weight.nested), args.offset = static_cast<float>(weight.offset);
  } else {
    args.absmax = pointer<float>(weight.absmax);
  }
  const int64_t each = width(out.scalar_type());
  const bool wide = args.count % each == 0 && aligned(out) && aligned(weight.codes);
  if (args.count > 0) launch("nf4", out.scalar_type(), wide, {blocks(args.count, wide ? 32 : 2)}, args, out);
  return true;
}

bool packed_bias(const Tensor& blocks, const Tensor& bias) {
  if (refused("packed_bias")) return false;
  const auto dtype = bias.scalar_type();
  if (!usable(bias) || !suffix(dtype) || blocks.scalar_type() != at::kLong || blocks.device() != bias.device())
    return false;
  if (!blocks.is_contiguous() || !bias.is_contiguous() || blocks.numel() != bias.size(0) * bias.size(2)) return false;
  if (!countable(bias)) return false;
  PackedBiasArgs args{};
  args.blocks = reinterpret_cast<const long long*>(pointer<int64_t>(blocks)), args.bias = pointer<void>(bias);
  args.tokens = divider(bias.size(2)), args.row = divider(bias.size(3));
  args.count = static_cast<unsigned>(bias.numel());
  const bool wide = args.row.divisor % width(dtype) == 0 && aligned(bias);
  if (args.count > 0)
    launch("packed_bias", dtype, wide, {kernels::blocks(args.count, wide ? width(dtype) : 1)}, args, bias);
  return true;
}

namespace {

// True if a kernel can read `x` as `count` contiguous elements of `dtype` on the device of `like`.
bool flat(const Tensor& x, at::ScalarType dtype, int64_t count, const Tensor& like) {
  return x.scalar_type() == dtype && x.device() == like.device() && x.is_contiguous() && x.numel() == count;
}

bool fits(const Adamw8& w) {
  const auto numbers = [&](const Tensor& x, int64_t count) { return flat(x, at::kFloat, count, w.param); };
  const auto codes = [&](const Tensor& x) { return flat(x, at::kByte, w.param.numel(), w.param); };
  const int64_t count = w.param.numel(), blocks = (count + 255) / 256;
  return numbers(w.param, count) && numbers(w.grad, count) && codes(w.first_codes) && codes(w.second_codes) &&
         numbers(w.first_scales, blocks) && numbers(w.second_scales, blocks) && numbers(w.step, 1) &&
         numbers(w.signed_map, 256) && numbers(w.unsigned_map, 256) && (!w.rate.defined() || numbers(w.rate, 1)) &&
         (!w.found_inf.defined() || numbers(w.found_inf, 1));
}

}  // namespace

bool adamw8(const Adamw8& w) {
  if (refused("adamw8")) return false;
  // a thread block prepares numbers and maps, then processes many blocks of 256 elements, one per warp; in the
  // emulation two thread blocks run, so that small tensors test this
  const int64_t most = launcher_now ? 2 : 1024, each = 256 * threads / 32;
  if (!runs_on(w.param) || !fits(w)) return false;
  Adamw8Args args{};
  args.param = pointer<float>(w.param), args.grad = pointer<float>(w.grad), args.count = w.param.numel();
  args.codes[0] = pointer<unsigned char>(w.first_codes), args.codes[1] = pointer<unsigned char>(w.second_codes);
  args.scales[0] = pointer<float>(w.first_scales), args.scales[1] = pointer<float>(w.second_scales);
  args.map[0] = pointer<float>(w.signed_map), args.map[1] = pointer<float>(w.unsigned_map);
  args.step = pointer<float>(w.step), args.rate_at = pointer<float>(w.rate),
  args.found_inf = pointer<float>(w.found_inf);
  args.rate = w.learning_rate, args.weight_decay = w.weight_decay, args.beta1_exact = w.beta1,
  args.beta2_exact = w.beta2;
  args.beta1 = static_cast<float>(w.beta1), args.rest1 = static_cast<float>(1 - w.beta1);
  args.beta2 = static_cast<float>(w.beta2), args.rest2 = static_cast<float>(1 - w.beta2);
  args.epsilon = static_cast<float>(w.epsilon);
  const auto grid = static_cast<uint32_t>(std::min<int64_t>((args.count + each - 1) / each, most));
  if (args.count > 0) launch("adamw8", at::kFloat, false, {grid}, args, w.param);
  return true;
}

namespace composed {

std::pair<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const auto wide = x.to(at::kFloat);
  const auto rstd = (wide.square().mean({-1}, true) + eps).rsqrt();
  return {(wide * rstd).to(x.scalar_type()) * weight, rstd};
}

Tensor rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd) {
  const auto g = (dy * weight).to(at::kFloat);
  const auto n = x.to(at::kFloat) * rstd;
  return (rstd * (g - n * (g * n).mean({-1}, true))).to(x.scalar_type());
}

Tensor rms_norm_weight_grad(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd) {
  const auto n = (x.to(at::kFloat) * rstd).to(x.scalar_type()).to(at::kFloat);
  return (dy.to(at::kFloat) * n).reshape({-1, weight.numel()}).sum(0).to(weight.scalar_type()).view_as(weight);
}

Tensor nf4(const Codes& weight, const Tensor& like) {
  // clang-format off
  static constexpr float values[16] = {
      -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
      -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
      0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
  // clang-format on
  const int64_t count = like.numel();
  const auto high = weight.codes.bitwise_right_shift(4), low = weight.codes.bitwise_and(15);
  const auto codes = at::stack({high, low}, -1).reshape({-1}).narrow(0, 0, count);
  auto absmax = weight.absmax;
  if (weight.nested.defined()) {
    const auto scales = weight.map.index_select(0, absmax.to(at::kLong));
    absmax = scales * weight.nested.repeat_interleave(256).narrow(0, 0, scales.numel()) + weight.offset;
  }
  const auto table = at::tensor(at::ArrayRef<float>(values), at::kFloat).to(like.device());
  const auto dense = table.index_select(0, codes.to(at::kLong)) * absmax.repeat_interleave(64).narrow(0, 0, count);
  return dense.to(like.scalar_type()).view(like.sizes());
}

void packed_bias(const Tensor& blocks, const Tensor& bias) {
  constexpr double hidden = -std::numeric_limits<double>::infinity();
  const int64_t t = blocks.size(1);
  const auto keys = blocks.unsqueeze(1), queries = blocks.unsqueeze(2);
  const auto custom = keys.ne(0), other = keys.ne(queries).logical_and_(custom);
  bias.fill_(hidden).triu_(1).narrow(3, 0, t).masked_fill_(other.unsqueeze(1), hidden);
}

}  // namespace composed

namespace {

struct Choice { double custom, fallback; };
std::mutex choices_lock;
std::map<std::string, Choice> choices;

// Sizes within a factor of two share one choice.
std::string class_of(const char* op, const Tensor& x) {
  int64_t class_size = 1;
  while (class_size < x.numel()) class_size *= 2;
  return std::string(op) + (suffix(x.scalar_type()) ? suffix(x.scalar_type()) : "") + " of " +
         std::to_string(class_size);
}

}  // namespace

bool prefer(const char* op, const Tensor& x, const std::function<bool()>& custom,
            const std::function<void()>& fallback) {
  if (launcher_now || x.is_meta() || mode() == Mode::On) return true;
  const auto key = class_of(op, x);
  {
    std::lock_guard<std::mutex> guard(choices_lock);
    const auto known = choices.find(key);
    if (known != choices.end()) return known->second.custom < known->second.fallback;
  }
  if (capturing(x)) return true;
  if (!custom()) return false;  // it does not support these tensors, but may support others of this size
  const Choice choice{seconds_on_gpu(x, [&] { (void)custom(); }), seconds_on_gpu(x, fallback)};
  std::lock_guard<std::mutex> guard(choices_lock);
  choices[key] = choice;
  return choice.custom < choice.fallback;
}

}  // namespace prsmed::kernels

namespace kernels = prsmed::kernels;

extern "C" {

// Runs the kernels of this thread by `launcher` (a `Launcher`) instead of the driver; null = the driver again.
void prsmed_kernels_use_launcher(const void* launcher) noexcept {
  prsmed::kernels::use_launcher(reinterpret_cast<prsmed::kernels::Launcher>(launcher));
}


// The kernel of this operation does not run from now on; an empty name allows all of them again.
void prsmed_kernels_refuse(const char* operation) noexcept {
  std::lock_guard<std::mutex> guard(kernels::refused_lock);
  if (*operation) kernels::refused_names.insert(operation);
  else kernels::refused_names.clear();
  kernels::refuses_some = !kernels::refused_names.empty();
}

void prsmed_kernels_mode(int32_t mode) noexcept { kernels::mode_now.store(mode, std::memory_order_relaxed); }

// The measured choices, one per line: name, microseconds of the kernel, microseconds of libtorch, separated by tabs.
char* prsmed_kernels_choices() noexcept {
  std::lock_guard<std::mutex> guard(kernels::choices_lock);
  std::string text;
  for (const auto& [key, choice] : kernels::choices)
    text += key + "\t" + std::to_string(choice.custom * 1e6) + "\t" + std::to_string(choice.fallback * 1e6) + "\n";
  return prsmed_message(text.c_str());
}
}
