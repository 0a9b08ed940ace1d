// Every kernel and its equivalent of libtorch's operators, by name: to compare and time them.
#include "kernels.h"

#include "native.h"
#include "optim.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <map>
#include <string>
#include <vector>

namespace prsmed::kernels {

namespace {

using Way = std::function<std::vector<Tensor>(const std::vector<Tensor>&, double)>;

template <class T> std::vector<Tensor> required(std::optional<T> result) {
  TORCH_CHECK(result.has_value(), "the kernel does not support these tensors");
  if constexpr (std::is_same_v<T, Tensor>) return {*result};
  else if constexpr (std::is_same_v<T, std::vector<Tensor>>) return *result;
  else return {result->first, result->second};
}

std::vector<Tensor> listed(const Tensor& tensor) { return {tensor}; }
std::vector<Tensor> listed(const std::pair<Tensor, Tensor>& pair) { return {pair.first, pair.second}; }

// codes, the weight (for its sizes and dtype), absmax; with double quantization also nested and map, and the offset
Codes codes_of(const std::vector<Tensor>& in, double offset) {
  Codes weight{in.at(0), in.at(2), {}, {}, offset};
  if (in.size() > 3) weight.nested = in.at(3), weight.map = in.at(4);
  return weight;
}

using Inputs = const std::vector<Tensor>&;

std::vector<Tensor> turned(Inputs in, bool back, bool custom) {
  const auto xs = in.at(0).clone();
  if (!custom) composed::rotate_(xs, in.at(1), in.at(2), back);
  else TORCH_CHECK(rotate_(xs, in.at(1), in.at(2), back), "the kernel does not take these tensors");
  return {xs};
}

// Inputs: param, grad, codes and scales of both moments, their maps, the step. Outputs: the changed tensors, in this
// order. The number is the learning rate.
std::vector<Tensor> stepped(Inputs in, double rate, bool custom) {
  // clang-format off
  Adamw8 work{in.at(0).clone(), in.at(1), in.at(2).clone(), in.at(3).clone(), in.at(4).clone(), in.at(5).clone(),
              in.at(8), in.at(6), in.at(7), {}, {}, rate, 0.9, 0.99, 0.1, 1e-8};
  // clang-format on
  if (!custom) step8_composed(work);
  else TORCH_CHECK(adamw8(work), "the kernel does not take these tensors");
  return {work.param, work.first_codes, work.first_scales, work.second_codes, work.second_scales};
}

// `in[first..]` are matrices of adapters; the number is the probability of dropout.
Adapters adapters_of(Inputs in, size_t first, double p) {
  Adapters adapters{{in.begin() + static_cast<int64_t>(first), in.end()}, {}, p, 0.75};
  for (size_t i = 0; i < adapters.a.size(); ++i) adapters.seeds.push_back(7 + static_cast<int64_t>(i));
  return adapters;
}

// Half of the matrices after x are gradients, the others those of the adapters.
std::pair<std::vector<Tensor>, Adapters> grads_of(Inputs in, double p) {
  const size_t count = (in.size() - 1) / 2;
  return {{in.begin() + 1, in.begin() + 1 + static_cast<int64_t>(count)}, adapters_of(in, 1 + count, p)};
}

std::vector<Tensor> contiguous(std::vector<Tensor> tensors) {
  for (auto& tensor : tensors) tensor = tensor.contiguous();
  return tensors;
}

// Every operation, with its inputs in the order of its function above: kernel, libtorch's operators.
const std::map<std::string, std::pair<Way, Way>>& operations() {
  static const std::map<std::string, std::pair<Way, Way>> all = {
      {"rms_norm",
       {[](Inputs i, double eps) { return required(rms_norm(i.at(0), i.at(1), eps)); },
        [](Inputs i, double eps) { return listed(composed::rms_norm(i.at(0), i.at(1), eps)); }}},
      {"rms_norm_backward",
       {[](Inputs i, double) { return required(rms_norm_backward(i.at(0), i.at(1), i.at(2), i.at(3))); },
        [](Inputs i, double) { return listed(composed::rms_norm_backward(i.at(0), i.at(1), i.at(2), i.at(3))); }}},
      {"rms_norm_weight_grad",
       {[](Inputs i, double) { return required(rms_norm_weight_grad(i.at(0), i.at(1), i.at(2), i.at(3))); },
        [](Inputs i, double) { return listed(composed::rms_norm_weight_grad(i.at(0), i.at(1), i.at(2), i.at(3))); }}},
      {"rotary",
       {[](Inputs i, double) { return turned(i, false, true); },
        [](Inputs i, double) { return turned(i, false, false); }}},
      {"rotary_backward",
       {[](Inputs i, double) { return turned(i, true, true); },
        [](Inputs i, double) { return turned(i, true, false); }}},
      {"dropout",
       {[](Inputs i, double p) {
          auto y = at::empty_like(i.at(0));
          TORCH_CHECK(drop(i[0], y, p, 7), "the kernel does not take these tensors");
          return listed(y);
        },
        [](Inputs i, double p) { return listed(composed::drop(i.at(0), p, 7)); }}},
      {"low_rank",
       {[](Inputs i, double p) { return contiguous(required(low_rank(i.at(0), adapters_of(i, 1, p)))); },
        [](Inputs i, double p) { return composed::low_rank(i.at(0), adapters_of(i, 1, p)); }}},
      {"low_rank_weight_grad",
       {[](Inputs i, double p) {
          const auto [grads, adapters] = grads_of(i, p);
          return contiguous(required(low_rank_weight_grad(i.at(0), grads, adapters)));
        },
        [](Inputs i, double p) {
          const auto [grads, adapters] = grads_of(i, p);
          return composed::low_rank_weight_grad(i.at(0), grads, adapters);
        }}},
      {"low_rank_input_grad",
       {[](Inputs i, double p) {
          const auto [grads, adapters] = grads_of(i, p);
          return required(low_rank_input_grad(i.at(0), grads, adapters));
        },
        [](Inputs i, double p) {
          const auto [grads, adapters] = grads_of(i, p);
          return listed(composed::low_rank_input_grad(i.at(0), grads, adapters));
        }}},
      {"swiglu",
       {[](Inputs i, double) { return required(swiglu(i.at(0), i.at(1))); },
        [](Inputs i, double) { return listed(composed::swiglu(i.at(0), i.at(1))); }}},
      {"swiglu_backward",
       {[](Inputs i, double) { return required(swiglu_backward(i.at(0), i.at(1), i.at(2))); },
        [](Inputs i, double) { return listed(composed::swiglu_backward(i.at(0), i.at(1), i.at(2))); }}},
      {"nf4",
       {[](Inputs i, double offset) {
          auto out = at::empty_like(i.at(1));
          TORCH_CHECK(nf4(codes_of(i, offset), out), "the kernel does not take these tensors");
          return listed(out);
        },
        [](Inputs i, double offset) { return listed(composed::nf4(codes_of(i, offset), i.at(1))); }}},
      {"adamw8",
       {[](Inputs i, double rate) { return stepped(i, rate, true); },
        [](Inputs i, double rate) { return stepped(i, rate, false); }}},
      {"packed_bias",
       {[](Inputs i, double) {
          const auto bias = at::empty_like(i.at(1));
          TORCH_CHECK(packed_bias(i[0], bias), "the kernel does not take these tensors");
          return listed(bias);
        },
        [](Inputs i, double) {
          const auto bias = at::empty_like(i.at(1));
          composed::packed_bias(i[0], bias);
          return listed(bias);
        }}},
  };
  return all;
}

const std::pair<Way, Way>& operation(const char* name) {
  const auto found = operations().find(name);
  TORCH_CHECK(found != operations().end(), "there is no kernel `", name, "`");
  return found->second;
}

std::vector<Tensor> tensors(Tensor** inputs, int64_t count) {
  std::vector<Tensor> list;
  for (int64_t i = 0; i < count; ++i) list.push_back(*inputs[i]);
  return list;
}

}  // namespace

}  // namespace prsmed::kernels

namespace kernels = prsmed::kernels;

extern "C" {

// Runs an operation (kernel or libtorch's operators). `out` has room for five results; `out_count` receives their
// number.
char* prsmed_kernels_run(const char* name, bool custom, at::Tensor** inputs, int64_t count, double number,
                         at::Tensor** out, int64_t* out_count) {
  PRSMED_TRY({
    at::NoGradGuard no_grad;
    const auto& ways = kernels::operation(name);
    const auto results = (custom ? ways.first : ways.second)(kernels::tensors(inputs, count), number);
    *out_count = static_cast<int64_t>(results.size());
    for (size_t i = 0; i < results.size(); ++i) out[i] = new at::Tensor(results[i]);
  })
}

// Seconds of one call on a GPU, for both implementations.
char* prsmed_kernels_time(const char* name, at::Tensor** inputs, int64_t count, double number, double* seconds) {
  PRSMED_TRY({
    at::NoGradGuard no_grad;
    const auto& ways = kernels::operation(name);
    const auto list = kernels::tensors(inputs, count);
    seconds[0] = kernels::seconds_on_gpu(list.at(0), [&] { ways.first(list, number); });
    seconds[1] = kernels::seconds_on_gpu(list.at(0), [&] { ways.second(list, number); });
  })
}
}
