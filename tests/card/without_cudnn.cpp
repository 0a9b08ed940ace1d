// Switches cuDNN off in the process that it is preloaded into: libtorch's own convolutions need nothing but a runtime.
#include <ATen/Context.h>
__attribute__((constructor)) static void switch_off() { at::globalContext().setUserEnabledCuDNN(false); }
