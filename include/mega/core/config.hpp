/// @file  The few macros of the library. Every public constexpr function that a kernel may call is
/// MEGA_HD.
#pragma once

#if defined(__CUDACC__)
#define MEGA_HD __host__ __device__
#else
#define MEGA_HD
#endif

/// Restrict-qualified pointer: the pointee is reached through no other pointer in this scope.
#define MEGA_RESTRICT __restrict__
