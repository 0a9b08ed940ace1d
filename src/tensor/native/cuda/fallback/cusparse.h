// Replaces the header of this name: libtorch's headers name these types, and the CUDA side does not use them.
#pragma once
typedef struct cusparseContext* cusparseHandle_t;
typedef enum { CUSPARSE_STATUS_SUCCESS = 0 } cusparseStatus_t;
