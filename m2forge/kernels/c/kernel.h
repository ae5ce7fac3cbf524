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
#elif defined(__AVX2__)
#include <immintrin.h>
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

/* The ragged end of a row: loads and stores of at most `left` floats, and a vector whose lanes from `left` on become `rest`. */
#if defined(__AVX512F__)
static inline __mmask16 first_lanes(int64_t left) { return left >= LANES ? 0xFFFF : left > 0 ? (1 << left) - 1 : 0; }
static inline vec load_some(const float *p, int64_t left) { return (vec)_mm512_maskz_loadu_ps(first_lanes(left), p); }
static inline void store_some(float *p, vec x, int64_t left) { _mm512_mask_storeu_ps(p, first_lanes(left), (__m512)x); }
static inline vec fill_rest(vec x, int64_t left, float rest) {
    return (vec)_mm512_mask_mov_ps(_mm512_set1_ps(rest), first_lanes(left), (__m512)x);
}
static inline float sum_lanes(vec x) { return _mm512_reduce_add_ps((__m512)x); }
static inline float highest_lane(vec x) { return _mm512_reduce_max_ps((__m512)x); }
#elif defined(__AVX2__)
static inline __m256i first_lanes(int64_t left) {
    static const int32_t mask[2 * LANES] = {-1, -1, -1, -1, -1, -1, -1, -1};
    return _mm256_loadu_si256((const __m256i *)(mask + LANES - (left >= LANES ? LANES : left > 0 ? left : 0)));
}
static inline vec load_some(const float *p, int64_t left) {
    return left >= LANES ? *(const vec *)p : (vec)_mm256_maskload_ps(p, first_lanes(left));
}
static inline void store_some(float *p, vec x, int64_t left) {
    if (left >= LANES) *(vec *)p = x;
    else _mm256_maskstore_ps(p, first_lanes(left), (__m256)x);
}
static inline vec fill_rest(vec x, int64_t left, float rest) {
    return (vec)_mm256_blendv_ps(_mm256_set1_ps(rest), (__m256)x, (__m256)first_lanes(left));
}
static inline float sum_lanes(vec x) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
static inline float highest_lane(vec x) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#else
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
static inline vec fill_rest(vec x, int64_t left, float rest) {
    for (int64_t lane = left > 0 ? left : 0; lane < LANES; lane++) x[lane] = rest;
    return x;
}
static inline float sum_lanes(vec x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}
static inline float highest_lane(vec x) {
    float best = x[0];
    for (int lane = 1; lane < LANES; lane++) best = x[lane] > best ? x[lane] : best;
    return best;
}
#endif

static inline float highest(const float *row, int64_t count) {
    float best = row[0];
    int64_t i = 0;
    if (count >= LANES) {
        vec top = *(const vec *)row;
        for (i = LANES; i + LANES <= count; i += LANES) top = most(top, *(const vec *)(row + i));
        best = highest_lane(top);
    }
    for (; i < count; i++) best = row[i] > best ? row[i] : best;
    return best;
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
