/* The macros that CUDA's public headers need of a host compiler. The wheels do not bring this file. */
#pragma once
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __cluster_dims__(...)
#define __constant__
#define __cudart_builtin__
#define __device__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __host__
#define __inline_hint__
#define __location__(a)
#define __managed__
#define __maxnreg__(a)
#define __no_return__ __attribute__((noreturn))
#define __shared__
#define __specialization_static static
#define __thread__ __thread
#define __CUDA_ARCH_HAS_FEATURE__(x) 0
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDA_STUB
