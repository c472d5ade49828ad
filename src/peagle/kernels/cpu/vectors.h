/* Vectors in GNU C (gcc, clang), which names the lanes of every sum: the compiler reorders nothing,
 * and NaN and infinity go through as they must. */

#pragma once

#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

#ifdef __AVX512F__
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE lanes load(const float *p) { return *(const lanes *)p; }

INLINE void store(float *p, lanes x) { *(lanes *)p = x; }

INLINE lanes all(float x) { return x - (lanes){0}; }

/* a * b + c, rounded once where the CPU can, and everywhere alike: left to itself, gcc fuses the two
 * for one number of rows and not for another, as it deems fast, and a row's bits would tell. So
 * library.py forbids it to fuse what is not written so. */
INLINE lanes multiply_add(lanes a, lanes b, lanes c) {
#if defined(__AVX512F__)
    return (lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}
