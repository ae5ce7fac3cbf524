/* y = x W^T of bfloat16 matrices: what a step of decoding is made of; with it, in one pass, what stands before and behind it
 * in a layer: the norm of x, the gate of y, the sum with what came before. All but y is computed in float32.
 *
 * Each row of either operand becomes a row of elements and a factor: x[i, k] = factor[i] * element[i, k]. Four rows lie
 * together, a vector of each after the other, so that a tile of 4 x 4 outputs reads both operands in one stream. W may be
 * laid out so once (`pack_bfloat16`); else each thread does it for the rows it is about to multiply.
 *
 * Elements are float32 (factor 1, exact), or float16 where the machine multiplies twice as many of them: a bfloat16
 * number has 8 significant bits and float16 11, so an entry is exact, or off by at most 2^-28 of its row's largest. Sums of
 * float16 go over CHUNK terms a lane, then pairwise over the 8 lanes; these sums add up in float32. For terms of random
 * sign the error is half of that of rounding the sum to bfloat16.
 *
 * x86 processors with AVX2 have kernels of their own: linear_x86.c.
 */
#include "linear.h"

#if !defined(__AVX2__)

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

/* Rows of W as elements. */
typedef struct {
    const element *rows;
    const float *factor;
} Panel;

/* All rows of x with `count` of W from `first` on, or of both its halves. A line of sums is kept until it fills vectors. */
static void multiply(const Linear *call, const element *xs, const float *x_factor, const Panel panel[2], int64_t first,
                     int64_t count) {
    const Linear y = *call; /* which no store below can change */
    int64_t full = padded(y.d);
    float line[2][TILE][ROWS];
    for (int64_t i = 0; i < y.m; i += TILE) {
        for (int half = 0; half <= y.is_gated; half++)
            for (int64_t j = 0; j < count; j += TILE)
                tile(full, xs + i * full, panel[half].rows + j * full, ROWS, line[half][0] + j);
        for (int64_t r = i; r < y.m && r < i + TILE; r++)
            for (int64_t j = 0; j < count; j += LANES) {
                int64_t left = count - j;
                vec sum = *(vec *)(line[0][r - i] + j) * x_factor[r] * load_some(panel[0].factor + j, left), up = {0};
                if (y.is_gated) up = *(vec *)(line[1][r - i] + j) * x_factor[r] * load_some(panel[1].factor + j, left);
                finish(&y, r, first + j, left, sum, up);
            }
    }
}

/* W as elements, padded to whole tiles, and its factors. */
int64_t packed_bytes(int64_t o, int64_t d) { return (o + TILE - 1) / TILE * TILE * padded(d) * sizeof(element); }
void pack_bfloat16(const uint16_t *w, int64_t o, int64_t d, void *packed, float *factor) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t j = 0; j < o; j++) factor[j] = convert(w + j * d, d, place(packed, j, d));
}

/* W comes as it is, or packed with its factors; `norm`: the weights of the norm that x, its rows `stride` apart, goes
 * through first, or NULL. `kind` is for linear_x86.c. */
void linear_bfloat16(const uint16_t *x, const uint16_t *norm, float eps, const uint16_t *w, const void *packed,
                     const float *factor, int64_t stride, int64_t m, int64_t o, int64_t d, int64_t is_gated,
                     const uint16_t *onto, float *wide, uint16_t *narrow, int64_t kind) {
    (void)kind;
    Linear y = {m, o, d, is_gated, onto, wide, narrow};
    int64_t full = padded(d), rows = (m + TILE - 1) / TILE * TILE;
    int64_t width = is_gated ? o / 2 : o, step = is_gated ? ROWS / 2 : ROWS;
    if (width % TILE && is_gated) packed = NULL; /* the second half begins within a tile */
    element *xs = (element *)scratch(0, rows * full);
    float *x_factor = scratch(1, rows);
    for (int64_t i = m; i < rows; i++)
        for (int64_t k = 0; k < full; k += WIDE) memset(place(xs, i, d) + k * TILE, 0, WIDE * sizeof(element));
#pragma omp parallel num_threads(threads)
    {
        element *some = packed ? NULL : (element *)scratch(2, ROWS * full);
        uint16_t *normed = norm ? (uint16_t *)scratch(3, d) : NULL;
        float some_factor[ROWS];
#pragma omp for schedule(static)
        for (int64_t i = 0; i < m; i++) {
            if (norm) norm_row(x + i * stride, norm, d, eps, normed);
            x_factor[i] = convert(norm ? normed : x + i * stride, d, place(xs, i, d));
        }
#pragma omp for schedule(dynamic)
        for (int64_t first = 0; first < width; first += step) {
            int64_t count = width - first < step ? width - first : step;
            Panel panel[2];
            for (int half = 0; half <= is_gated; half++) {
                int64_t row = half * width + first, kept = half * step;
                for (int64_t j = 0; !packed && j < count; j++)
                    some_factor[kept + j] = convert(w + (row + j) * d, d, place(some, kept + j, d));
                panel[half] = packed ? (Panel){(const element *)packed + row * full, factor + row}
                                     : (Panel){some + kept * full, some_factor + kept};
            }
            multiply(&y, xs, x_factor, panel, first, count);
        }
    }
}

/* Bit 0: there is one kernel. */
int64_t linear_kinds(void) { return 1; }

#endif
