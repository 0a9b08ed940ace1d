// Replaces the header of this name: libtorch's headers name these types, and the CUDA side does not use them.
#pragma once
typedef struct cublasLtContext* cublasLtHandle_t;
