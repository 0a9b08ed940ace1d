// Turns cuDNN off in the process that preloads this library: libtorch's own convolutions need only the CUDA runtime.
#include <ATen/Context.h>
__attribute__((constructor)) static void switch_off() { at::globalContext().setUserEnabledCuDNN(false); }
