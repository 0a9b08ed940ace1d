// The C ABI between `src/tensor/*.rs` and libtorch. Tensors cross as `at::Tensor*` (tch's `C_tensor*`).
// Include what is used: reading `torch/torch.h` alone takes ten seconds and more than a gigabyte.
// A function that can fail returns nullptr on success or a message from `prsmed_message`, freed by `prsmed_free_message`.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstring>

inline char* prsmed_message(const char* text) { return strdup(text); }

#define PRSMED_TRY(body)                        \
  try {                                         \
    body;                                       \
    return nullptr;                             \
  } catch (const std::exception& error) {       \
    return prsmed_message(error.what());        \
  }
