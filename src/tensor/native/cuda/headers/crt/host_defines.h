// Replaces the CUDA toolkit's file of this name, which the torch wheel lacks. For the host compiler the keywords of
// device code have no meaning.
#pragma once
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __align__(n) __attribute__((aligned(n)))
#define __location__(a)
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __builtin_align__(n) __align__(n)
