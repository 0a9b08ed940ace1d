// Replaces the header of this name: libtorch's headers name these types, and the CUDA side does not use them.
#pragma once
#include "cusolver_common.h"
typedef struct cusolverDnContext* cusolverDnHandle_t;
