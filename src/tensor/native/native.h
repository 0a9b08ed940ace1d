// C ABI between `src/tensor/*.rs` and libtorch. Tensors are passed as `at::Tensor*` (tch's `C_tensor*`).
// Include only what is used: `torch/torch.h` alone takes ten seconds and more than a gigabyte to compile.
// A function that can fail returns nullptr, or a message from `prsmed_message` that `prsmed_free_message` frees.
// No exception may leave a function of the C ABI: its body is in `PRSMED_TRY`, or it is `noexcept`, so that an
// exception ends the process. `tests/native.rs` checks this.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>

// A copy of `text`. Null would mean success, so the process ends if there is no memory for the copy.
inline char* prsmed_message(const char* text) noexcept {
  char* copy = strdup(text);
  if (copy == nullptr) std::abort();
  return copy;
}

#define PRSMED_TRY(body) \
  try {                  \
    body;                \
    return nullptr;      \
  } catch (const c10::Error& error) { return prsmed_message(error.what_without_backtrace()); } \
  catch (const std::exception& error) { return prsmed_message(error.what()); } \
  catch (...) { return prsmed_message("an exception of an unknown type"); }
