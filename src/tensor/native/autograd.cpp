// Autograd functions that save less for the backward pass than libtorch's: checkpointed segments, which call back into
// Rust, and convolutions and linear layers of a GELU that recompute the GELU.
#include "graph.h"
#include "kernels.h"
#include "native.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/linear.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// Runs the segment: reads `count` inputs, returns a new output tensor, or nullptr with `*error` set (by strdup).
using Segment = at::Tensor* (*)(void* closure, at::Tensor** inputs, int64_t count, char** error);
using Drop = void (*)(void* closure);

struct Closure : torch::CustomClassHolder {
  Closure(void* data, Segment run, Drop drop) : data(data), run(run), drop(drop) {}
  ~Closure() override { drop(data); }
  at::Tensor call(variable_list inputs) {
    std::vector<at::Tensor*> pointers;
    for (auto& input : inputs) pointers.push_back(&input);
    char* error = nullptr;
    at::Tensor* out = run(data, pointers.data(), static_cast<int64_t>(pointers.size()), &error);
    if (out == nullptr) {
      std::string text = error ? error : "the checkpointed segment failed";
      free(error);
      throw std::runtime_error(text);
    }
    at::Tensor result = std::move(*out);
    delete out;
    return result;
  }
  void* data;
  Segment run;
  Drop drop;
};

// Takes `data`, also if it fails.
c10::intrusive_ptr<Closure> owned_closure(void* data, Segment run, Drop drop) {
  try {
    return c10::make_intrusive<Closure>(data, run, drop);
  } catch (...) {
    drop(data);
    throw;
  }
}

// Restores the generator, so that dropout in the segment draws the same numbers twice.
struct Rng {
  at::Tensor cpu = at::detail::getDefaultCPUGenerator().get_state();
  at::Tensor device;
  // in a capture: the number of used random numbers, because the GPU's generator cannot be read
  std::optional<uint64_t> captured;
  int64_t index = -1;

  explicit Rng(const variable_list& inputs) {
    for (const auto& input : inputs) {
      if (input.is_cuda()) {
        index = input.get_device();
        if (prsmed::kernels::capturing(input)) captured = prsmed::captured_offset(input.device().index());
        else device = generator().get_state();
        return;
      }
    }
  }
  at::Generator generator() const {
    return at::globalContext().defaultGenerator(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(index)));
  }
  void restore() const {
    at::Generator host = at::detail::getDefaultCPUGenerator();
    host.set_state(cpu);
    if (index < 0) return;
    if (captured) {
      prsmed::set_captured_offset(static_cast<c10::DeviceIndex>(index), *captured);
      return;
    }
    at::Generator other = generator();
    other.set_state(device);
  }
};

struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static Variable forward(AutogradContext* ctx, c10::intrusive_ptr<Closure> closure, Variable anchor,
                          at::TensorList inputs) {
    (void)anchor;  // makes the output require a gradient even if no input does (frozen embeddings before LoRA)
    variable_list list(inputs.begin(), inputs.end());
    Rng rng(list);
    ctx->saved_data["closure"] = c10::IValue::make_capsule(closure);
    ctx->saved_data["cpu"] = rng.cpu;
    ctx->saved_data["index"] = rng.index;
    if (rng.captured) ctx->saved_data["captured"] = static_cast<int64_t>(*rng.captured);
    else if (rng.index >= 0) ctx->saved_data["device"] = rng.device;
    ctx->save_for_backward(list);
    return closure->call(list);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    auto inputs = ctx->get_saved_variables();
    variable_list leaves;
    for (auto& input : inputs) {
      auto leaf = input.detach();
      leaf.set_requires_grad(input.requires_grad());
      leaves.push_back(leaf);
    }
    auto closure = c10::static_intrusive_pointer_cast<Closure>(ctx->saved_data["closure"].toCapsule());
    Rng now(inputs);
    Rng then = now;
    then.cpu = ctx->saved_data["cpu"].toTensor();
    if (then.captured) then.captured = static_cast<uint64_t>(ctx->saved_data["captured"].toInt());
    else if (then.index >= 0) then.device = ctx->saved_data["device"].toTensor();
    at::Tensor out;
    then.restore();
    try {
      at::AutoGradMode enable(true);
      out = closure->call(leaves);
    } catch (...) {
      now.restore();
      throw;
    }
    now.restore();
    if (out.requires_grad()) torch::autograd::backward({out}, {grads[0]});
    variable_list result = {Variable(), Variable()};  // closure, anchor
    for (auto& leaf : leaves) result.push_back(leaf.grad());
    return result;
  }
};

// conv(gelu(x)): saves only x. libtorch would save x for the GELU's gradient and gelu(x) for the weight's.
struct GeluConv : torch::autograd::Function<GeluConv> {
  static Variable forward(AutogradContext* ctx, Variable x, Variable weight, Variable bias, int64_t stride,
                          int64_t padding, int64_t groups) {
    ctx->save_for_backward({x, weight});
    ctx->saved_data["stride"] = stride;
    ctx->saved_data["padding"] = padding;
    ctx->saved_data["groups"] = groups;
    return at::conv2d(at::gelu(x), weight, bias, stride, padding, 1, groups);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1];
    const int64_t stride = ctx->saved_data["stride"].toInt(), padding = ctx->saved_data["padding"].toInt();
    const std::array<bool, 3> needs = {ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2)};
    auto [gx, gw, gb] =
        at::convolution_backward(grads[0], at::gelu(x), weight, at::IntArrayRef{weight.size(0)}, {stride, stride},
                                 {padding, padding}, {1, 1}, false, {0, 0}, ctx->saved_data["groups"].toInt(), needs);
    if (gx.defined()) gx = at::gelu_backward(gx, x);
    return {gx, gw, gb, Variable(), Variable(), Variable()};
  }
};

// linear(gelu(x)), in the same way.
struct GeluLinear : torch::autograd::Function<GeluLinear> {
  static Variable forward(AutogradContext* ctx, Variable x, Variable weight, Variable bias) {
    ctx->save_for_backward({x, weight});
    return at::linear(at::gelu(x), weight, bias);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1];
    const auto grad = grads[0].reshape({-1, weight.size(0)});
    Variable gx, gw, gb;
    if (ctx->needs_input_grad(1)) gw = grad.t().mm(at::gelu(x).reshape({-1, weight.size(1)}));
    if (ctx->needs_input_grad(2)) gb = grad.sum(0);
    if (ctx->needs_input_grad(0)) gx = at::gelu_backward(grad.mm(weight).view(x.sizes()), x);
    return {gx, gw, gb};
  }
};

at::Generator generator_of(int32_t gpu) {
  if (gpu < 0) return at::detail::getDefaultCPUGenerator();
  return at::globalContext().defaultGenerator(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(gpu)));
}

}  // namespace

extern "C" {

char* prsmed_gelu_conv(at::Tensor* x, at::Tensor* weight, at::Tensor* bias, int64_t stride, int64_t padding,
                       int64_t groups, at::Tensor** out) {
  PRSMED_TRY(*out = new at::Tensor(GeluConv::apply(*x, *weight, *bias, stride, padding, groups)))
}

char* prsmed_gelu_linear(at::Tensor* x, at::Tensor* weight, at::Tensor* bias, at::Tensor** out) {
  PRSMED_TRY(*out = new at::Tensor(GeluLinear::apply(*x, *weight, *bias)))
}

char* prsmed_checkpoint(void* data, Segment run, Drop drop, at::Tensor** inputs, int64_t count, at::Tensor** out) {
  PRSMED_TRY({
    const auto closure = owned_closure(data, run, drop);
    variable_list list;
    for (int64_t i = 0; i < count; ++i) list.push_back(*inputs[i]);
    auto anchor = at::empty({0}).set_requires_grad(true);
    *out = new at::Tensor(Checkpoint::apply(closure, anchor, at::TensorList(list)));
  })
}

bool prsmed_grad_enabled() noexcept { return at::GradMode::is_enabled(); }

void prsmed_flash_attention() noexcept { at::globalContext().setSDPUseCuDNN(false); }

char* prsmed_allow_tf32(bool is_allowed) {
  PRSMED_TRY({
    const auto precision = is_allowed ? at::Float32Precision::TF32 : at::Float32Precision::IEEE;
    for (const auto op : {at::Float32Op::CONV, at::Float32Op::RNN, at::Float32Op::MATMUL})
      at::globalContext().setFloat32Precision(at::Float32Backend::CUDA, op, precision);
  })
}

// Operators of a GPU add in a fixed order or throw. cuBLAS does so with a workspace of its own choice only, which libtorch
// reads from the environment before the first product.
char* prsmed_set_deterministic(bool is_on) {
  PRSMED_TRY({
    if (is_on) setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
    at::globalContext().setDeterministicAlgorithms(is_on, /*warn_only=*/false);
    at::globalContext().setDeterministicFillUninitializedMemory(false);
  })
}

bool prsmed_is_deterministic() noexcept { return at::globalContext().deterministicAlgorithms(); }

// True if fp32 convolutions and matrix products of a GPU round nothing to TF32.
char* prsmed_is_ieee_fp32(bool* out) {
  PRSMED_TRY({
    *out = true;
    for (const auto op : {at::Float32Op::CONV, at::Float32Op::RNN, at::Float32Op::MATMUL})
      *out &= at::globalContext().float32Precision(at::Float32Backend::CUDA, op) == at::Float32Precision::IEEE;
  })
}

// State of a generator: the CPU's if `gpu` is -1, else that GPU's.
char* prsmed_rng_state(int32_t gpu, at::Tensor** out) {
  PRSMED_TRY(*out = new at::Tensor(generator_of(gpu).get_state()))
}

char* prsmed_set_rng_state(int32_t gpu, at::Tensor* state) { PRSMED_TRY(generator_of(gpu).set_state(*state)) }

}
