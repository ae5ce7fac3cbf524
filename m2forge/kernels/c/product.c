/* The matrix product, and the memory and thread count that a thread keeps. */
#include "kernel.h"

#include <pthread.h>
#include <stdio.h>

enum { KC = 256, NC = 384 }; /* depth and width of a packed block: it fits a second-level cache */

_Thread_local int threads = 1;
void use_threads(int64_t count) { threads = count; }

void *take(int64_t bytes) {
    void *memory = malloc(bytes);
    if (!memory) {
        fprintf(stderr, "m2forge: the native kernels cannot have %lld bytes of memory\n", (long long)bytes);
        abort();
    }
    return memory;
}

typedef struct {
    float *memory[KEPT];
    int64_t count[KEPT];
} Kept;

static pthread_key_t kept_key;
static pthread_once_t kept_once = PTHREAD_ONCE_INIT;

static void drop_kept(void *of_thread) {
    Kept *kept = of_thread;
    for (int i = 0; i < KEPT; i++) free(kept->memory[i]);
    free(kept);
}

static void make_key(void) { pthread_key_create(&kept_key, drop_kept); }

float *scratch(int which, int64_t count) {
    pthread_once(&kept_once, make_key);
    Kept *kept = pthread_getspecific(kept_key);
    if (!kept) {
        kept = take(sizeof(Kept));
        memset(kept, 0, sizeof(Kept));
        pthread_setspecific(kept_key, kept);
    }
    if (kept->count[which] < count) {
        free(kept->memory[which]);
        kept->memory[which] = take(count * sizeof(float));
        kept->count[which] = count;
    }
    return kept->memory[which];
}

typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t iquad __attribute__((vector_size(16)));

/* Four rows of four floats each, stored as four columns `full` apart. */
static inline void transpose(const float *const row[4], float *out, int64_t full) {
    quad a = *(const quad *)row[0], b = *(const quad *)row[1], c = *(const quad *)row[2], d = *(const quad *)row[3];
    quad ab = __builtin_shuffle(a, b, (iquad){0, 4, 1, 5}), cd = __builtin_shuffle(c, d, (iquad){0, 4, 1, 5});
    quad AB = __builtin_shuffle(a, b, (iquad){2, 6, 3, 7}), CD = __builtin_shuffle(c, d, (iquad){2, 6, 3, 7});
    *(quad *)out = __builtin_shuffle(ab, cd, (iquad){0, 1, 4, 5});
    *(quad *)(out + full) = __builtin_shuffle(ab, cd, (iquad){2, 3, 6, 7});
    *(quad *)(out + 2 * full) = __builtin_shuffle(AB, CD, (iquad){0, 1, 4, 5});
    *(quad *)(out + 3 * full) = __builtin_shuffle(AB, CD, (iquad){2, 3, 6, 7});
}

/* Panel of `width` indices i (padded with zeros to `full`), all k of the block: out[k * full + i]. */
static void pack(const Operand *x, int64_t i0, int64_t width, int64_t full, int64_t k0, int64_t depth, float *out) {
    if (!x->k_map && x->k_stride == 1) { /* rows contiguous along k */
        static const float zeros[KC] = {0};
        for (int64_t i = 0; i < full; i += 4) {
            const float *row[4];
            for (int64_t j = 0; j < 4; j++) {
                int64_t at = i0 + i + j;
                row[j] = i + j < width ? x->base + (x->i_map ? x->i_map[at] : at) * x->i_stride + k0 : zeros;
            }
            int64_t k = 0, lines = full - i < 4 ? full - i : 4;
            for (; lines == 4 && k + 4 <= depth; k += 4) {
                const float *here[4] = {row[0] + k, row[1] + k, row[2] + k, row[3] + k};
                transpose(here, out + k * full + i, full);
            }
            for (; k < depth; k++)
                for (int64_t j = 0; j < lines; j++) out[k * full + i + j] = row[j][k];
        }
        return;
    }
    for (int64_t k = 0; k < depth; k++) {
        const float *line = x->base + (x->k_map ? x->k_map[k0 + k] : k0 + k) * x->k_stride;
        if (x->i_stride == 1 && width == full)
            memcpy(out + k * full, line + i0, full * sizeof(float));
        else
            for (int64_t i = 0; i < full; i++) out[k * full + i] = i < width ? line[(i0 + i) * x->i_stride] : 0;
    }
}

/* Sums of row i go to row[i] + from. A panel of b is `vectors` vectors wide. */
static inline __attribute__((always_inline)) void sum_block(int64_t depth, const float *restrict a, const float *restrict b,
                                                            float *const row[MR], int64_t from, int64_t rows,
                                                            int64_t columns, int add, int vectors) {
    int wide = vectors * LANES;
    vec sum[MR][NV];
#pragma GCC unroll 12
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++) sum[i][j] = (vec){0};
    for (int64_t k = 0; k < depth; k++, a += MR, b += wide) {
        vec line[NV];
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++) line[j] = *(const vec *)(b + j * LANES);
#if defined(__aarch64__) /* multiplies by a lane: three registers hold the whole column of a */
        vec column[MR / LANES];
#pragma GCC unroll 3
        for (int i = 0; i < MR / LANES; i++) column[i] = *(const vec *)(a + i * LANES);
#define FACTOR(i) column[(i) / LANES][(i) % LANES]
#else /* broadcasts while loading */
#define FACTOR(i) a[i]
#endif
#pragma GCC unroll 12
        for (int i = 0; i < MR; i++)
#pragma GCC unroll 2
            for (int j = 0; j < vectors; j++) sum[i][j] += FACTOR(i) * line[j];
    }
    if (rows == MR && columns == wide) {
#pragma GCC unroll 12
        for (int i = 0; i < MR; i++)
#pragma GCC unroll 2
            for (int j = 0; j < vectors; j++) {
                vec *out = (vec *)(row[i] + from + j * LANES);
                if (add) sum[i][j] += *out;
                *out = sum[i][j];
            }
        return;
    }
    float edge[MR * NR];
#pragma GCC unroll 12
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++) *(vec *)(edge + i * wide + j * LANES) = sum[i][j];
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++)
            row[i][from + j] = (add ? row[i][from + j] : 0) + edge[i * wide + j];
}

/* The last panel of a product is half as wide where that holds its columns: heads and experts of small networks are
 * narrower than two vectors of AVX-512. */
static void block(int64_t depth, const float *a, const float *b, float *const row[MR], int64_t from, int64_t rows,
                  int64_t columns, int add) {
    if (columns > LANES) sum_block(depth, a, b, row, from, rows, columns, add, NV);
    else sum_block(depth, a, b, row, from, rows, columns, add, 1);
}

/* Kept by each thread between calls: fresh pages would cost more than the arithmetic on them. */
static _Thread_local struct {
    float a[MR * KC], b[NC * KC];
} packs;

void product_to(int64_t m, int64_t n, int64_t depth, const Operand *a, const Operand *b, float *c, int64_t c_stride,
                const int64_t *c_map, int add) {
    if (depth == 0 && !add)
        for (int64_t i = 0; i < m; i++) memset(c + (c_map ? c_map[i] : i) * c_stride, 0, n * sizeof(float));
    for (int64_t k0 = 0; k0 < depth; k0 += KC) {
        int64_t k = depth - k0 < KC ? depth - k0 : KC;
        for (int64_t n0 = 0; n0 < n; n0 += NC) {
            int64_t width = n - n0 < NC ? n - n0 : NC;
            for (int64_t j = 0; j < width; j += NR)
                pack(b, n0 + j, width - j < NR ? width - j : NR, width - j > LANES ? NR : LANES, k0, k, packs.b + j * k);
            for (int64_t i = 0; i < m; i += MR) {
                int64_t rows = m - i < MR ? m - i : MR;
                float *row[MR] = {0};
                for (int64_t r = 0; r < rows; r++) row[r] = c + (c_map ? c_map[i + r] : i + r) * c_stride + n0;
                pack(a, i, rows, MR, k0, k, packs.a);
                for (int64_t j = 0; j < width; j += NR)
                    block(k, packs.a, packs.b + j * k, row, j, rows, width - j < NR ? width - j : NR, add || k0 > 0);
            }
        }
    }
}
