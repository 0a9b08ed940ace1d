// Replaces the header of this name: libtorch's headers name these types, and the CUDA side does not use them.
#pragma once
typedef struct cublasContext* cublasHandle_t;
typedef enum { CUBLAS_STATUS_SUCCESS = 0 } cublasStatus_t;
