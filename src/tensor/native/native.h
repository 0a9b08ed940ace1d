// C ABI between `src/tensor/*.rs` and libtorch. Tensors are passed as `at::Tensor*` (tch's `C_tensor*`).
// Include only what is used: `torch/torch.h` alone takes ten seconds and more than a gigabyte to compile.
// A function that can fail returns nullptr, or a message from `prsmed_message` that `prsmed_free_message` frees.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstring>

inline char* prsmed_message(const char* text) { return strdup(text); }

#define PRSMED_TRY(body) \
  try {                  \
    body;                \
    return nullptr;      \
  } catch (const std::exception& error) { return prsmed_message(error.what()); }
