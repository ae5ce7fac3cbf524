/* float32 kernels for CPUs: the experts of a mixture layer, and causal attention over documents.
 *
 * Everything rests on one small matrix product: operands are packed into panels, a register block of MR x NR sums over
 * them. Work is split over threads by expert or by document and head, so that each product runs on one thread and no
 * sum depends on the number of threads. The torch twins stand beside the callers, in expert.py and attention.py.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* MR x NV vectors of sums fill the registers and leave room for one line of each operand. */
#if defined(__AVX512F__)
enum { LANES = 16, MR = 12, NV = 2 };
#elif defined(__AVX2__)
enum { LANES = 8, MR = 6, NV = 2 };
#else
enum { LANES = 4, MR = 12, NV = 2 };
#endif
enum { NR = LANES * NV, KC = 256, NC = 384, ROWS = 252, TILE = 96 };

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

/* Threads of the calling thread's next regions: torch's number, which a second OpenMP library would not know. */
static _Thread_local int threads = 1;
void use_threads(int64_t count) { threads = count; }

/* Element (i, k) of an operand is base[index_i * i_stride + index_k * k_stride], an index looked up where a map is given. */
typedef struct {
    const float *base;
    int64_t i_stride, k_stride;
    const int64_t *i_map, *k_map;
} Operand;

static Operand matrix(const float *base, int64_t i_stride, int64_t k_stride) {
    return (Operand){base, i_stride, k_stride, NULL, NULL};
}

static inline vec splat(float x) { return x - (vec){0}; }

/* ---- matrix product -------------------------------------------------------------------------------------------- */

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

static void block(int64_t depth, const float *restrict a, const float *restrict b, float *restrict c, int64_t c_stride,
                  int64_t rows, int64_t columns, int add) {
    vec sum[MR][NV];
#pragma GCC unroll 12
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 2
        for (int j = 0; j < NV; j++) sum[i][j] = (vec){0};
    for (int64_t k = 0; k < depth; k++, a += MR, b += NR) {
        vec line[NV];
#pragma GCC unroll 2
        for (int j = 0; j < NV; j++) line[j] = *(const vec *)(b + j * LANES);
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
            for (int j = 0; j < NV; j++) sum[i][j] += FACTOR(i) * line[j];
    }
    if (rows == MR && columns == NR) {
#pragma GCC unroll 12
        for (int i = 0; i < MR; i++)
#pragma GCC unroll 2
            for (int j = 0; j < NV; j++) {
                vec *out = (vec *)(c + i * c_stride + j * LANES);
                if (add) sum[i][j] += *out;
                *out = sum[i][j];
            }
        return;
    }
    float edge[MR * NR];
#pragma GCC unroll 12
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 2
        for (int j = 0; j < NV; j++) *(vec *)(edge + i * NR + j * LANES) = sum[i][j];
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++)
            c[i * c_stride + j] = (add ? c[i * c_stride + j] : 0) + edge[i * NR + j];
}

/* Kept by each thread between calls: fresh pages would cost more than the arithmetic on them. */
static _Thread_local struct {
    float a[MR * KC], b[NC * KC];
} packs;

/* c[i, j] (+)= sum over k of a(i, k) b(j, k). */
static void product(int64_t m, int64_t n, int64_t depth, const Operand *a, const Operand *b, float *c, int64_t c_stride,
                    int add) {
    if (depth == 0 && !add)
        for (int64_t i = 0; i < m; i++) memset(c + i * c_stride, 0, n * sizeof(float));
    for (int64_t k0 = 0; k0 < depth; k0 += KC) {
        int64_t k = depth - k0 < KC ? depth - k0 : KC;
        for (int64_t n0 = 0; n0 < n; n0 += NC) {
            int64_t width = n - n0 < NC ? n - n0 : NC;
            for (int64_t j = 0; j < width; j += NR)
                pack(b, n0 + j, width - j < NR ? width - j : NR, NR, k0, k, packs.b + j * k);
            for (int64_t i = 0; i < m; i += MR) {
                int64_t rows = m - i < MR ? m - i : MR;
                pack(a, i, rows, MR, k0, k, packs.a);
                for (int64_t j = 0; j < width; j += NR)
                    block(k, packs.a, packs.b + j * k, c + i * c_stride + n0 + j, c_stride, rows,
                          width - j < NR ? width - j : NR, add || k0 > 0);
            }
        }
    }
}

/* Scratch memory of the calling thread, kept likewise. */
static float *scratch(int which, int64_t count) {
    static _Thread_local struct {
        float *memory;
        int64_t count;
    } kept[3];
    if (kept[which].count < count) {
        free(kept[which].memory);
        kept[which].memory = malloc(count * sizeof(float));
        kept[which].count = count;
    }
    return kept[which].memory;
}

/* ---- functions of a vector ------------------------------------------------------------------------------------- */

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

/* ---- norm and rotation ----------------------------------------------------------------------------------------- */

/* y = x * scale * weight, scale = 1 / sqrt(mean(x * x) + eps); x_stride: floats from one row to the next. */
void norm_forward(const float *x, const float *weight, int64_t x_stride, int64_t rows, int64_t d, float eps, float *y,
                  float *scale) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        const float *row = x + r * x_stride;
        vec total = {0};
        for (int64_t i = 0; i < d; i += LANES) {
            vec v = load_some(row + i, d - i);
            total += v * v;
        }
        scale[r] = 1.0f / sqrtf(sum_lanes(total) / d + eps);
        for (int64_t i = 0; i < d; i += LANES)
            store_some(y + r * d + i, load_some(row + i, d - i) * scale[r] * load_some(weight + i, d - i), d - i);
    }
}

/* grad_x = scale * (g - xhat * mean(g * xhat)), g = grad * weight, xhat = x * scale. partial receives the sums of
 * grad * xhat over ROWS rows each (ceil(rows / ROWS) x D). */
void norm_backward(const float *grad, const float *x, const float *weight, const float *scale, int64_t x_stride, int64_t rows,
                   int64_t d, float *grad_x, float *partial) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t first = 0; first < rows; first += ROWS) {
        float *sums = partial + first / ROWS * d;
        memset(sums, 0, d * sizeof(float));
        for (int64_t r = first; r < rows && r < first + ROWS; r++) {
            const float *row = x + r * x_stride;
            vec total = {0};
            for (int64_t i = 0; i < d; i += LANES) {
                vec g = load_some(grad + r * d + i, d - i), xhat = load_some(row + i, d - i) * scale[r];
                store_some(sums + i, load_some(sums + i, d - i) + g * xhat, d - i);
                total += g * load_some(weight + i, d - i) * xhat;
            }
            float mean = sum_lanes(total) / d;
            for (int64_t i = 0; i < d; i += LANES) {
                vec g = load_some(grad + r * d + i, d - i) * load_some(weight + i, d - i);
                vec xhat = load_some(row + i, d - i) * scale[r];
                store_some(grad_x + r * d + i, (g - xhat * mean) * scale[r], d - i);
            }
        }
    }
}

/* Rotates the leading 2 * half dimensions of each head by the token's angles, forwards (sign 1) or back (sign -1). */
void rotate(const float *x, const float *cos, const float *sin, int64_t x_stride, int64_t n, int64_t heads, int64_t dim,
            int64_t half, float sign, float *y) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t token = 0; token < n; token++)
        for (int64_t head = 0; head < heads; head++) {
            const float *from = x + token * x_stride + head * dim;
            float *to = y + (token * heads + head) * dim;
            for (int64_t i = 0; i < half; i += LANES) {
                vec a = load_some(from + i, half - i), b = load_some(from + half + i, half - i);
                vec c = load_some(cos + token * half + i, half - i), s = load_some(sin + token * half + i, half - i) * sign;
                store_some(to + i, a * c - b * s, half - i);
                store_some(to + half + i, b * c + a * s, half - i);
            }
            memcpy(to + 2 * half, from + 2 * half, (dim - 2 * half) * sizeof(float));
        }
}

/* ---- cross-entropy --------------------------------------------------------------------------------------------- */

/* nll = logsumexp(z) - z[target] of each row of V logits; z becomes weight * (softmax(z) - one-hot(target)). */
void nll_and_grad(float *z, const int64_t *target, const float *weight, int64_t rows, int64_t v, float *nll) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        float *row = z + r * v, top = highest(row, v), goal = row[target[r]];
        vec total = {0};
        for (int64_t i = 0; i < v; i += LANES) {
            vec e = exp_vec(load_some(row + i, v - i) - top);
            for (int64_t lane = v - i; lane < LANES; lane++) e[lane] = 0;
            store_some(row + i, e, v - i);
            total += e;
        }
        float sum = sum_lanes(total), scale = weight[r] / sum;
        nll[r] = top + logf(sum) - goal;
        for (int64_t i = 0; i < v; i += LANES) store_some(row + i, load_some(row + i, v - i) * scale, v - i);
        row[target[r]] -= weight[r];
    }
}

/* ---- experts --------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t expert, start, end;
} Span;

/* At most ROWS rows of one expert each. */
static Span *split(const int32_t *ends, int64_t num_experts, int64_t rows, int64_t *count) {
    Span *spans = malloc((num_experts + ends[num_experts - 1] / rows + 1) * sizeof(Span));
    int64_t start = 0;
    *count = 0;
    for (int64_t e = 0; e < num_experts; start = ends[e++])
        for (int64_t s = start; s < ends[e]; s += rows)
            spans[(*count)++] = (Span){e, s, s + rows < ends[e] ? s + rows : ends[e]};
    return spans;
}

/* out[n] = sum over k of y[slot[n, k]] */
static void collect(const float *y, const int64_t *slot, int64_t n, int64_t k, int64_t d, float *out) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t token = 0; token < n; token++)
        for (int64_t i = 0; i < d; i += LANES) {
            vec total = {0};
            for (int64_t j = 0; j < k; j++) total += load_some(y + slot[token * k + j] * d + i, d - i);
            store_some(out + token * d + i, total, d - i);
        }
}

/* token[s]: the token of row s; weight[s]: its weight. h receives both pre-activations. */
void expert_forward(const float *x, const float *w13, const float *w2, const float *weight, const int64_t *token,
                    const int64_t *slot, const int32_t *ends, int64_t n, int64_t k, int64_t e, int64_t d, int64_t f,
                    float *h, float *out) {
    int64_t count;
    float *y = scratch(0, n * k * d);
    Span *spans = split(ends, e, ROWS, &count);
#pragma omp parallel num_threads(threads)
    {
        float *a = malloc(ROWS * f * sizeof(float));
#pragma omp for schedule(dynamic)
        for (int64_t t = 0; t < count; t++) {
            Span span = spans[t];
            int64_t rows = span.end - span.start;
            Operand xs = {x, d, 1, token + span.start, NULL};
            Operand up = matrix(w13 + span.expert * 2 * f * d, d, 1), down = matrix(w2 + span.expert * d * f, f, 1);
            product(rows, 2 * f, d, &xs, &up, h + span.start * 2 * f, 2 * f, 0);
            for (int64_t s = 0; s < rows; s++) {
                const float *row = h + (span.start + s) * 2 * f;
                for (int64_t i = 0; i < f; i += LANES) {
                    vec gate = load_some(row + i, f - i), other = load_some(row + f + i, f - i);
                    store_some(a + s * f + i, gate * sigmoid_vec(gate) * other * weight[span.start + s], f - i);
                }
            }
            Operand as = matrix(a, f, 1);
            product(rows, d, f, &as, &down, y + span.start * d, d, 0);
        }
        free(a);
    }
    free(spans);
    collect(y, slot, n, k, d, out);
}

/* Gradients of `rows` rows of one expert. grad_h (rows x 2F) and a (rows x F) are scratch and stay in the cache. */
static void activation_backward(const float *h, const float *grad_a, const float *weight, int64_t rows, int64_t f,
                                float *grad_h, float *a, float *grad_weight) {
    for (int64_t s = 0; s < rows; s++) {
        vec total = {0};
        for (int64_t i = 0; i < f; i += LANES) {
            vec gate = load_some(h + s * 2 * f + i, f - i), other = load_some(h + s * 2 * f + f + i, f - i);
            vec g = load_some(grad_a + s * f + i, f - i);
            vec sigmoid = sigmoid_vec(gate), silu = gate * sigmoid;
            total += g * silu * other;
            g *= weight[s];
            store_some(grad_h + s * 2 * f + i, g * other * sigmoid * (1.0f + gate * (1.0f - sigmoid)), f - i);
            store_some(grad_h + s * 2 * f + f + i, g * silu, f - i);
            store_some(a + s * f + i, silu * other * weight[s], f - i);
        }
        grad_weight[s] = sum_lanes(total);
    }
}

/* One expert at a time, ROWS rows at a time; grad_w13 and grad_w2 may be NULL. */
void expert_backward(const float *grad, const float *x, const float *w13, const float *w2, const float *weight,
                     const int64_t *token, const int64_t *slot, const int32_t *ends, const float *h, int64_t n, int64_t k,
                     int64_t e, int64_t d, int64_t f, float *grad_x, float *grad_w13, float *grad_w2,
                     float *grad_weight) {
    float *y = scratch(0, n * k * d);
#pragma omp parallel num_threads(threads)
    {
        float *grad_h = scratch(1, ROWS * 4 * f), *a = grad_h + ROWS * 2 * f, *grad_a = a + ROWS * f;
#pragma omp for schedule(dynamic)
        for (int64_t expert = 0; expert < e; expert++) {
            int64_t begin = expert ? ends[expert - 1] : 0, end = ends[expert];
            float *to_w13 = grad_w13 ? grad_w13 + expert * 2 * f * d : NULL;
            float *to_w2 = grad_w2 ? grad_w2 + expert * d * f : NULL;
            Operand down = matrix(w2 + expert * d * f, 1, f), up = matrix(w13 + expert * 2 * f * d, 1, d);
            if (begin == end && grad_w13) {
                memset(to_w13, 0, 2 * f * d * sizeof(float));
                memset(to_w2, 0, d * f * sizeof(float));
            }
            for (int64_t s = begin; s < end; s += ROWS) {
                int64_t rows = end - s < ROWS ? end - s : ROWS;
                Operand gs = {grad, d, 1, token + s, NULL}, hs = matrix(grad_h, 2 * f, 1);
                product(rows, f, d, &gs, &down, grad_a, f, 0);
                activation_backward(h + s * 2 * f, grad_a, weight + s, rows, f, grad_h, a, grad_weight + s);
                product(rows, d, 2 * f, &hs, &up, y + s * d, d, 0);
                if (grad_w13) {
                    Operand ht = matrix(grad_h, 1, 2 * f), xt = {x, 1, d, NULL, token + s};
                    Operand gt = {grad, 1, d, NULL, token + s}, at = matrix(a, 1, f);
                    product(2 * f, d, rows, &ht, &xt, to_w13, d, s > begin);
                    product(d, f, rows, &gt, &at, to_w2, f, s > begin);
                }
            }
        }
    }
    collect(y, slot, n, k, d, grad_x);
}

/* ---- attention ------------------------------------------------------------------------------------------------- */

/* One call's tensors. Documents lie end to end, document t from start[t] to start[t + 1]. q and out: N x H x K; k and v:
 * N x G x K; x_stride: floats from one token to the next. lse (N x H): log-sum-exp of each query's scores. */
typedef struct {
    const float *q, *k, *v;
    int64_t q_stride, k_stride, v_stride;
    const int64_t *start;
    int64_t documents, h, g, dim;
    float scale;
} Attention;

/* Some queries of all the heads (up to TILE of both) that share a key head: they meet the same keys, so one product
 * serves them all. Row i of a tile is query first + i % queries. */
typedef struct {
    int64_t rows, queries, first, keys, base;
    int64_t q_at[TILE], out_at[TILE], lse_at[TILE];
} Tile;

static void place(Tile *tile, const Attention *x, int64_t document, int64_t head, int64_t heads, int64_t first) {
    int64_t base = x->start[document], length = x->start[document + 1] - base, queries = TILE / heads;
    tile->queries = length - first < queries ? length - first : queries;
    tile->rows = heads * tile->queries;
    tile->first = first;
    tile->keys = first + tile->queries;
    tile->base = base;
    for (int64_t i = 0; i < tile->rows; i++) {
        int64_t token = base + first + i % tile->queries, at = head + i / tile->queries;
        tile->q_at[i] = token * x->q_stride + at * x->dim;
        tile->lse_at[i] = token * x->h + at;
        tile->out_at[i] = tile->lse_at[i] * x->dim;
    }
}

/* p[i, j] = exp(scale * s[i, j] - shift[i]), zero where key j lies after the query; total[i] sums row i. */
static void causal_exp(const Tile *tile, float *s, float scale, const float *shift, float *total) {
    int64_t keys = tile->keys;
    for (int64_t i = 0; i < tile->rows; i++) {
        float *row = s + i * keys;
        int64_t seen = tile->first + i % tile->queries + 1;
        vec sum = {0};
        for (int64_t j = 0; j < seen; j += LANES) {
            vec p = exp_vec(load_some(row + j, keys - j) * scale - shift[i]);
            for (int64_t lane = seen - j; lane < LANES; lane++) p[lane] = 0;
            store_some(row + j, p, keys - j);
            sum += p;
        }
        for (int64_t j = seen; j < keys; j++) row[j] = 0;
        total[i] = sum_lanes(sum);
    }
}

static void forward_tile(const Attention *x, const Tile *tile, int64_t kv, float *s, float *mixed, float *out, float *lse) {
    int64_t rows = tile->rows, keys = tile->keys, dim = x->dim;
    Operand qs = {x->q, 1, 1, tile->q_at, NULL}, ps = matrix(s, keys, 1);
    Operand ks = matrix(x->k + tile->base * x->k_stride + kv * dim, x->k_stride, 1);
    Operand vs = matrix(x->v + tile->base * x->v_stride + kv * dim, 1, x->v_stride);
    float top[TILE], total[TILE];
    product(rows, keys, dim, &qs, &ks, s, keys, 0);
    for (int64_t i = 0; i < rows; i++) top[i] = x->scale * highest(s + i * keys, tile->first + i % tile->queries + 1);
    causal_exp(tile, s, x->scale, top, total);
    product(rows, dim, keys, &ps, &vs, mixed, dim, 0);
    for (int64_t i = 0; i < rows; i++) {
        lse[tile->lse_at[i]] = top[i] + logf(total[i]);
        for (int64_t j = 0; j < dim; j++) out[tile->out_at[i] + j] = mixed[i * dim + j] / total[i];
    }
}

static void backward_tile(const Attention *x, const Tile *tile, int64_t kv, const float *grad, const float *out,
                          const float *lse, float *p, float *dp, float *mixed, float *grad_q, float *grad_k, float *grad_v) {
    int64_t rows = tile->rows, keys = tile->keys, dim = x->dim;
    const float *k = x->k + tile->base * x->k_stride + kv * dim, *v = x->v + tile->base * x->v_stride + kv * dim;
    Operand qs = {x->q, 1, 1, tile->q_at, NULL}, gs = {grad, 1, 1, tile->out_at, NULL};
    Operand ks = matrix(k, x->k_stride, 1), vs = matrix(v, x->v_stride, 1);
    float shift[TILE], total[TILE];
    product(rows, keys, dim, &qs, &ks, p, keys, 0);
    product(rows, keys, dim, &gs, &vs, dp, keys, 0);
    for (int64_t i = 0; i < rows; i++) shift[i] = lse[tile->lse_at[i]];
    causal_exp(tile, p, x->scale, shift, total);
    for (int64_t i = 0; i < rows; i++) {
        vec dot = {0};
        for (int64_t j = 0; j < dim; j += LANES)
            dot += load_some(grad + tile->out_at[i] + j, dim - j) * load_some(out + tile->out_at[i] + j, dim - j);
        float delta = sum_lanes(dot);
        for (int64_t j = 0; j < keys; j += LANES) {
            vec d = (load_some(dp + i * keys + j, keys - j) - delta) * x->scale;
            store_some(dp + i * keys + j, load_some(p + i * keys + j, keys - j) * d, keys - j);
        }
    }
    Operand pt = matrix(p, 1, keys), st = matrix(dp, 1, keys), ss = matrix(dp, keys, 1), kt = matrix(k, 1, x->k_stride);
    Operand gt = {grad, 1, 1, NULL, tile->out_at}, qt = {x->q, 1, 1, NULL, tile->q_at};
    int64_t at = (tile->base * x->g + kv) * dim;
    product(keys, dim, rows, &pt, &gt, grad_v + at, x->g * dim, 1);
    product(keys, dim, rows, &st, &qt, grad_k + at, x->g * dim, 1);
    product(rows, dim, keys, &ss, &kt, mixed, dim, 0);
    for (int64_t i = 0; i < rows; i++) memcpy(grad_q + tile->out_at[i], mixed + i * dim, dim * sizeof(float));
}

/* Runs every tile of every document and key head; forwards where grad is NULL. grad_k and grad_v arrive zeroed. */
static void attend(Attention x, float *out, float *lse, const float *grad, float *grad_q, float *grad_k, float *grad_v) {
    int64_t longest = 0, group = x.h / x.g;
    for (int64_t t = 0; t < x.documents; t++)
        longest = x.start[t + 1] - x.start[t] > longest ? x.start[t + 1] - x.start[t] : longest;
#pragma omp parallel num_threads(threads)
    {
        float *p = scratch(0, TILE * longest), *dp = grad ? scratch(1, TILE * longest) : NULL;
        float *mixed = scratch(2, TILE * x.dim);
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t t = 0; t < x.documents; t++)
            for (int64_t kv = 0; kv < x.g; kv++)
                for (int64_t some = 0; some < group; some += TILE) {
                    int64_t heads = group - some < TILE ? group - some : TILE;
                    for (int64_t first = 0; first < x.start[t + 1] - x.start[t]; first += TILE / heads) {
                        Tile tile;
                        place(&tile, &x, t, kv * group + some, heads, first);
                        if (grad)
                            backward_tile(&x, &tile, kv, grad, out, lse, p, dp, mixed, grad_q, grad_k, grad_v);
                        else
                            forward_tile(&x, &tile, kv, p, mixed, out, lse);
                    }
                }
    }
}

void attention_forward(const float *q, const float *k, const float *v, int64_t q_stride, int64_t k_stride, int64_t v_stride,
                       const int64_t *start, int64_t documents, int64_t h, int64_t g, int64_t dim, float scale, float *out,
                       float *lse) {
    Attention x = {q, k, v, q_stride, k_stride, v_stride, start, documents, h, g, dim, scale};
    attend(x, out, lse, NULL, NULL, NULL, NULL);
}

void attention_backward(const float *grad, const float *q, const float *k, const float *v, float *out, float *lse,
                        int64_t q_stride, int64_t k_stride, int64_t v_stride, const int64_t *start, int64_t documents,
                        int64_t h, int64_t g, int64_t dim, float scale, float *grad_q, float *grad_k, float *grad_v) {
    Attention x = {q, k, v, q_stride, k_stride, v_stride, start, documents, h, g, dim, scale};
    attend(x, out, lse, grad, grad_q, grad_k, grad_v);
}
