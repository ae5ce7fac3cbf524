/* y = x W^T of bfloat16 matrices: what a step of decoding is made of.
 *
 * Each row of either operand becomes a row of elements and a factor: x[i, k] = factor[i] * element[i, k]. Four rows lie
 * together, a vector of each after the other, so that a tile of 4 x 4 outputs reads both operands in one stream. W may be
 * laid out so once (`pack_bfloat16`); else each thread does it for the rows it is about to multiply.
 *
 * Elements are float32 (factor 1, exact), or float16 where the machine multiplies twice as many of them: a bfloat16
 * number has 8 significant bits and float16 11, so an entry is exact, or off by at most 2^-28 of its row's largest. Sums of
 * float16 go over CHUNK terms a lane, then pairwise over the 8 lanes; these sums add up in float32. For terms of random
 * sign the error is half of that of rounding the sum to bfloat16.
 */
#include "kernel.h"

#if defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
typedef float16_t element;
enum { WIDE = 8, CHUNK = 24 };
#else
typedef float element;
enum { WIDE = LANES };
#endif

enum { TILE = 4 };
enum { ROWS = 32 }; /* rows of W that a thread multiplies at a time: with a tile of x they fit the caches */

static inline int64_t padded(int64_t d) { return (d + WIDE - 1) / WIDE * WIDE; }

/* Where row i begins; its vectors are TILE * WIDE elements apart. */
static inline element *place(element *rows, int64_t i, int64_t d) {
    return rows + i / TILE * TILE * padded(d) + i % TILE * WIDE;
}

#if defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)

static inline uint16x8_t load_eight(const uint16_t *p, int64_t left) {
    if (left >= 8) return vld1q_u16(p);
    uint16_t some[8] = {0};
    memcpy(some, p, left * sizeof(uint16_t));
    return vld1q_u16(some);
}

/* A power of two brings the row's largest entry between 2^3 and 2^4: sums of CHUNK * 8 products stay below 65504. */
static float convert(const uint16_t *from, int64_t d, element *to) {
    uint16x8_t top = vdupq_n_u16(0);
    for (int64_t k = 0; k < d; k += 8) {
        uint16x8_t x = load_eight(from + k, d - k);
        top = vmaxq_u16(top, vaddq_u16(x, x)); /* without the sign */
    }
    int exponent = vmaxvq_u16(top) >> 8; /* 127 is that of 1 */
    if (exponent < 4) exponent = 4;      /* whose power below is the largest of float32; entries stay small */
    float by = ldexpf(1.0f, 130 - exponent);
    for (int64_t k = 0; k < d; k += 8) {
        uint16x8_t x = load_eight(from + k, d - k);
        float16x4_t low = vcvt_f16_f32(widen((nvec)vget_low_u16(x)) * by);
        vst1q_f16(to + k * TILE, vcvt_high_f16_f32(low, widen((nvec)vget_high_u16(x)) * by));
    }
    return exponent == 255 ? NAN : ldexpf(1.0f, exponent - 130); /* a row that holds no number gives none */
}

/* total[i][j] += the sum of the lanes of sum[i][j]. */
static inline void reduce(float16x8_t sum[TILE][TILE], float32x4_t total[TILE]) {
#pragma GCC unroll 2
    for (int i = 0; i < TILE; i += 2) {
        float16x8_t a = vpaddq_f16(vpaddq_f16(sum[i][0], sum[i][1]), vpaddq_f16(sum[i][2], sum[i][3]));
        float16x8_t b = vpaddq_f16(vpaddq_f16(sum[i + 1][0], sum[i + 1][1]), vpaddq_f16(sum[i + 1][2], sum[i + 1][3]));
        float16x8_t both = vpaddq_f16(a, b);
        total[i] += vcvt_f32_f16(vget_low_f16(both));
        total[i + 1] += vcvt_high_f32_f16(both);
    }
}

static void tile(int64_t d, const element *x, const element *w, int64_t stride, float *out) {
    float32x4_t total[TILE] = {{0}};
    const element *end = x + TILE * d;
    while (x < end) {
        const element *until = end - x < CHUNK * TILE * 8 ? end : x + CHUNK * TILE * 8;
        float16x8_t sum[TILE][TILE];
#pragma GCC unroll 4
        for (int i = 0; i < TILE; i++)
#pragma GCC unroll 4
            for (int j = 0; j < TILE; j++) sum[i][j] = vld1q_f16(x + i * 8) * vld1q_f16(w + j * 8);
        for (x += TILE * 8, w += TILE * 8; x < until; x += TILE * 8, w += TILE * 8) {
            float16x8_t a[TILE], b[TILE];
#pragma GCC unroll 4
            for (int i = 0; i < TILE; i++) a[i] = vld1q_f16(x + i * 8), b[i] = vld1q_f16(w + i * 8);
#pragma GCC unroll 4
            for (int i = 0; i < TILE; i++)
#pragma GCC unroll 4
                for (int j = 0; j < TILE; j++) sum[i][j] = vfmaq_f16(sum[i][j], a[i], b[j]);
        }
        reduce(sum, total);
    }
    for (int i = 0; i < TILE; i++) vst1q_f32(out + i * stride, total[i]);
}

#else

static float convert(const uint16_t *from, int64_t d, element *to) {
    for (int64_t k = 0; k < d; k += LANES) *(vec *)(to + k * TILE) = load_narrow(from + k, d - k);
    return 1.0f;
}

static void tile(int64_t d, const element *x, const element *w, int64_t stride, float *out) {
    vec sum[TILE][TILE] = {{{0}}};
    for (const element *end = x + TILE * d; x < end; x += TILE * LANES, w += TILE * LANES) {
        vec a[TILE], b[TILE];
#pragma GCC unroll 4
        for (int i = 0; i < TILE; i++) a[i] = *(const vec *)(x + i * LANES), b[i] = *(const vec *)(w + i * LANES);
#pragma GCC unroll 4
        for (int i = 0; i < TILE; i++)
#pragma GCC unroll 4
            for (int j = 0; j < TILE; j++) sum[i][j] += a[i] * b[j];
    }
    for (int i = 0; i < TILE; i++)
        for (int j = 0; j < TILE; j++) out[i * stride + j] = sum_lanes(sum[i][j]);
}

#endif

/* One call's tensors: x is m x d, its rows `stride` apart; W is o x d, y m x o: float32 where `wide` is given, else
 * bfloat16. */
typedef struct {
    const uint16_t *x;
    int64_t stride, m, o, d;
    float *wide;
    uint16_t *narrow;
} Linear;

/* All rows of x with `count` of W. A line of sums is kept until it fills vectors. */
static void multiply(const Linear *y, const element *xs, const float *x_factor, const element *ws, const float *w_factor,
                     int64_t first, int64_t count) {
    int64_t full = padded(y->d);
    float line[TILE][ROWS];
    for (int64_t i = 0; i < y->m; i += TILE) {
        for (int64_t j = 0; j < count; j += TILE) tile(full, xs + i * full, ws + j * full, ROWS, line[0] + j);
        for (int64_t r = i; r < y->m && r < i + TILE; r++)
            for (int64_t j = 0; j < count; j += LANES) {
                vec sum = *(vec *)(line[r - i] + j) * x_factor[r] * load_some(w_factor + j, count - j);
                int64_t at = r * y->o + first + j;
                if (y->wide) store_some(y->wide + at, sum, count - j);
                else store_narrow(y->narrow + at, sum, count - j);
            }
    }
}

/* W as elements, padded to whole tiles, and its factors. */
int64_t packed_bytes(int64_t o, int64_t d) { return (o + TILE - 1) / TILE * TILE * padded(d) * sizeof(element); }
void pack_bfloat16(const uint16_t *w, int64_t o, int64_t d, void *packed, float *factor) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t j = 0; j < o; j++) factor[j] = convert(w + j * d, d, place(packed, j, d));
}

/* W comes as it is, or packed with its factors. */
void linear_bfloat16(const uint16_t *x, const uint16_t *w, const void *packed, const float *factor, int64_t stride,
                     int64_t m, int64_t o, int64_t d, float *wide, uint16_t *narrow) {
    Linear y = {x, stride, m, o, d, wide, narrow};
    int64_t full = padded(d), rows = (m + TILE - 1) / TILE * TILE;
    element *xs = (element *)scratch(0, rows * full);
    float *x_factor = scratch(1, rows);
    for (int64_t i = m; i < rows; i++)
        for (int64_t k = 0; k < full; k += WIDE) memset(place(xs, i, d) + k * TILE, 0, WIDE * sizeof(element));
#pragma omp parallel num_threads(threads)
    {
        element *some = packed ? NULL : (element *)scratch(2, ROWS * full);
        float some_factor[ROWS];
#pragma omp for schedule(static)
        for (int64_t i = 0; i < m; i++) x_factor[i] = convert(x + i * stride, d, place(xs, i, d));
#pragma omp for schedule(dynamic)
        for (int64_t first = 0; first < o; first += ROWS) {
            int64_t count = o - first < ROWS ? o - first : ROWS;
            for (int64_t j = 0; !packed && j < count; j++)
                some_factor[j] = convert(w + (first + j) * d, d, place(some, j, d));
            multiply(&y, xs, x_factor, packed ? (const element *)packed + first * full : some,
                     packed ? factor + first : some_factor, first, count);
        }
    }
}
