// The C ABI between `src/tensor/*.rs` and libtorch. Tensors cross as `torch::Tensor*` (tch's `C_tensor*`).
// A function that can fail returns nullptr on success or a message from `prsmed_message`, freed by `prsmed_free_message`.
#pragma once
#include <torch/torch.h>

#include <cstring>

inline char* prsmed_message(const char* text) { return strdup(text); }

#define PRSMED_TRY(body)                        \
  try {                                         \
    body;                                       \
    return nullptr;                             \
  } catch (const std::exception& error) {       \
    return prsmed_message(error.what());        \
  }
