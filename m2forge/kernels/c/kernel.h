/* What the float32 CPU kernels share: vectors, a small matrix product, and the memory a thread keeps between calls.
 *
 * Every kernel rests on the product: operands are packed into panels, a register block of MR x NR sums over them. Work is
 * split over threads by expert, tree or row, so that each product runs on one thread and no sum depends on the
 * number of threads. The torch twins stand beside the callers, in the Python files of this room.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

/* MR x NV vectors of sums fill the registers and leave room for one line of each operand. */
#if defined(__AVX512F__)
enum { LANES = 16, MR = 12, NV = 2 };
#elif defined(__AVX2__)
enum { LANES = 8, MR = 6, NV = 2 };
#else
enum { LANES = 4, MR = 12, NV = 2 };
#endif
enum { NR = LANES * NV };

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

/* Threads of the calling thread's next regions: torch's number, which a second OpenMP library would not know. */
extern _Thread_local int threads;

/* Element (i, k) of an operand is base[index_i * i_stride + index_k * k_stride], an index looked up where a map is given. */
typedef struct {
    const float *base;
    int64_t i_stride, k_stride;
    const int64_t *i_map, *k_map;
} Operand;

static inline Operand matrix(const float *base, int64_t i_stride, int64_t k_stride) {
    return (Operand){base, i_stride, k_stride, NULL, NULL};
}

/* c[i, j] (+)= sum over k of a(i, k) b(j, k); row i of c is c_map[i] where a map is given. */
void product_to(int64_t m, int64_t n, int64_t depth, const Operand *a, const Operand *b, float *c, int64_t c_stride,
                const int64_t *c_map, int add);

static inline void product(int64_t m, int64_t n, int64_t depth, const Operand *a, const Operand *b, float *c,
                           int64_t c_stride, int add) {
    product_to(m, n, depth, a, b, c, c_stride, NULL, add);
}

/* malloc that never returns NULL. */
void *take(int64_t bytes);

/* Memory of the calling thread, number 0 to KEPT - 1, kept until the thread ends: fresh pages would cost more than the
 * arithmetic on them. Attention takes 96 floats for every token of the longest path. */
enum { KEPT = 4 };
float *scratch(int which, int64_t count);

static inline vec splat(float x) { return x - (vec){0}; }

static inline vec most(vec x, vec y) { return (vec)(((ivec)x & (x > y)) | ((ivec)y & ~(x > y))); }

/* exp of x <= 88 to about one unit in the last place: 2^n times a polynomial in the remainder; 0 below -87. */
static inline vec exp_vec(vec x) {
    vec shifted = x * 1.44269504f + 12582912.0f; /* adding 1.5 * 2^23 rounds to a whole number */
    vec n = shifted - 12582912.0f;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = ((((r * 1.9875691500e-4f + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
             1.6666665459e-1f) * r + 5.0000001201e-1f;
    vec y = p * r * r + r + 1.0f;
    ivec power = (ivec)shifted + (127 - 0x4B400000);
    return (vec)((ivec)(y * (vec)(power << 23)) & ~(x < -87.0f)); /* a NaN is not below, and stays */
}

static inline vec sigmoid_vec(vec x) {
    vec e = exp_vec((vec)((ivec)x | INT32_MIN)); /* exp(-|x|) never overflows */
    vec one = splat(1.0f);
    ivec negative = x < 0.0f;
    return (vec)(((ivec)e & negative) | ((ivec)one & ~negative)) / (1.0f + e);
}

static inline float highest(const float *row, int64_t count) {
    float best = row[0];
    int64_t i = 0;
    if (count >= LANES) {
        vec top = *(const vec *)row;
        for (i = LANES; i + LANES <= count; i += LANES) top = most(top, *(const vec *)(row + i));
        for (int lane = 0; lane < LANES; lane++) best = top[lane] > best ? top[lane] : best;
    }
    for (; i < count; i++) best = row[i] > best ? row[i] : best;
    return best;
}

static inline float sum_lanes(vec x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

/* Loads and stores of at most `left` floats: the ragged end of a row. */
static inline vec load_some(const float *p, int64_t left) {
    if (left >= LANES) return *(const vec *)p;
    vec x = {0};
    for (int64_t i = 0; i < left; i++) x[i] = p[i];
    return x;
}
static inline void store_some(float *p, vec x, int64_t left) {
    if (left >= LANES) *(vec *)p = x;
    else
        for (int64_t i = 0; i < left; i++) p[i] = x[i];
}

/* bfloat16 numbers are the upper halves of float32 ones. Narrowing rounds to the nearest, ties to even. */
typedef uint32_t uvec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t nvec __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

#if defined(__aarch64__) /* GCC 12 converts vectors of 64 bits lane by lane */
static inline uvec lengthen(nvec x) { return (uvec)vmovl_u16((uint16x4_t)x); }
static inline nvec shorten(uvec x) { return (nvec)vmovn_u32((uint32x4_t)x); }
#else
static inline uvec lengthen(nvec x) { return __builtin_convertvector(x, uvec); }
static inline nvec shorten(uvec x) { return __builtin_convertvector(x, nvec); }
#endif

static inline vec widen(nvec x) { return (vec)(lengthen(x) << 16); }
static inline nvec narrow(vec x) {
    uvec bits = (uvec)x, odd = (bits >> 16) & 1;
    uvec rounded = (bits + 0x7FFF + odd) >> 16, is_number = (uvec)(x == x);
    return shorten((rounded & is_number) | (0x7FC0 & ~is_number));
}
static inline vec load_narrow(const uint16_t *p, int64_t left) {
    if (left >= LANES) return widen(*(const nvec *)p);
    nvec x = {0};
    for (int64_t i = 0; i < left; i++) x[i] = p[i];
    return widen(x);
}
static inline void store_narrow(uint16_t *p, vec x, int64_t left) {
    nvec y = narrow(x);
    if (left >= LANES) *(nvec *)p = y;
    else
        for (int64_t i = 0; i < left; i++) p[i] = y[i];
}

/* The norm of one row in bfloat16, computed in float32 and rounded once. */
static inline void norm_row(const uint16_t *x, const uint16_t *weight, int64_t d, float eps, uint16_t *y) {
    vec total = {0};
    for (int64_t i = 0; i < d; i += LANES) {
        vec v = load_narrow(x + i, d - i);
        total += v * v;
    }
    float scale = 1.0f / sqrtf(sum_lanes(total) / d + eps);
    for (int64_t i = 0; i < d; i += LANES)
        store_narrow(y + i, load_narrow(x + i, d - i) * scale * load_narrow(weight + i, d - i), d - i);
}

/* silu(a) * b */
static inline vec gate_vec(vec a, vec b) {
    return a * b / (1.0f + exp_vec(-most(a, splat(-88.0f)))); /* beyond, the gate is 0 in any case */
}
