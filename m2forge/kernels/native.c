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
enum { NR = LANES * NV, KC = 256, NC = 384, ROWS = 252, QUERIES = 72 };

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

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
        int64_t i = 0;
        for (; i + 4 <= full; i += 4) {
            const float *row[4];
            for (int64_t j = 0; j < 4; j++) {
                int64_t at = i0 + i + j;
                row[j] = i + j < width ? x->base + (x->i_map ? x->i_map[at] : at) * x->i_stride + k0 : zeros;
            }
            int64_t k = 0;
            for (; k + 4 <= depth; k += 4) {
                const float *here[4] = {row[0] + k, row[1] + k, row[2] + k, row[3] + k};
                transpose(here, out + k * full + i, full);
            }
            for (; k < depth; k++)
                for (int64_t j = 0; j < 4; j++) out[k * full + i + j] = row[j][k];
        }
        for (; i < full; i++) {
            int64_t at = i0 + i;
            const float *row = i < width ? x->base + (x->i_map ? x->i_map[at] : at) * x->i_stride + k0 : zeros;
            for (int64_t k = 0; k < depth; k++) out[k * full + i] = row[k];
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

typedef struct {
    float a[MR * KC], b[NC * KC];
} Packs;

/* c[i, j] (+)= sum over k of a(i, k) b(j, k). */
static void product(int64_t m, int64_t n, int64_t depth, const Operand *a, const Operand *b, float *c, int64_t c_stride,
                    int add, Packs *packs) {
    if (depth == 0 && !add)
        for (int64_t i = 0; i < m; i++) memset(c + i * c_stride, 0, n * sizeof(float));
    for (int64_t k0 = 0; k0 < depth; k0 += KC) {
        int64_t k = depth - k0 < KC ? depth - k0 : KC;
        for (int64_t n0 = 0; n0 < n; n0 += NC) {
            int64_t width = n - n0 < NC ? n - n0 : NC;
            for (int64_t j = 0; j < width; j += NR)
                pack(b, n0 + j, width - j < NR ? width - j : NR, NR, k0, k, packs->b + j * k);
            for (int64_t i = 0; i < m; i += MR) {
                int64_t rows = m - i < MR ? m - i : MR;
                pack(a, i, rows, MR, k0, k, packs->a);
                for (int64_t j = 0; j < width; j += NR)
                    block(k, packs->a, packs->b + j * k, c + i * c_stride + n0 + j, c_stride, rows,
                          width - j < NR ? width - j : NR, add || k0 > 0);
            }
        }
    }
}

/* ---- functions of a vector ------------------------------------------------------------------------------------- */

static inline vec least(vec x, vec y) { return (vec)(((ivec)x & (x < y)) | ((ivec)y & ~(x < y))); }
static inline vec most(vec x, vec y) { return (vec)(((ivec)x & (x > y)) | ((ivec)y & ~(x > y))); }

/* exp to about one unit in the last place: 2^n times a polynomial in the remainder. */
static inline vec exp_vec(vec x) {
    x = most(least(x, splat(88.0f)), splat(-87.0f));
    vec shifted = x * 1.44269504f + 12582912.0f; /* adding 1.5 * 2^23 rounds to a whole number */
    vec n = shifted - 12582912.0f;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = ((((r * 1.9875691500e-4f + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
             1.6666665459e-1f) * r + 5.0000001201e-1f;
    vec y = p * r * r + r + 1.0f;
    ivec power = (((ivec)shifted - 0x4B400000) + 127) << 23;
    return y * (vec)power;
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
#pragma omp parallel for schedule(static)
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
#pragma omp parallel for schedule(static)
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
#pragma omp parallel for schedule(static)
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
#pragma omp parallel for schedule(static)
    for (int64_t token = 0; token < n; token++)
        for (int64_t i = 0; i < d; i += LANES) {
            vec total = {0};
            for (int64_t j = 0; j < k; j++) total += load_some(y + slot[token * k + j] * d + i, d - i);
            store_some(out + token * d + i, total, d - i);
        }
}

/* token[s]: the token of row s; weight[s]: its weight. h receives both pre-activations, y is scratch of S x D. */
void expert_forward(const float *x, const float *w13, const float *w2, const float *weight, const int64_t *token,
                    const int64_t *slot, const int32_t *ends, int64_t n, int64_t k, int64_t e, int64_t d, int64_t f,
                    float *h, float *y, float *out) {
    int64_t count;
    Span *spans = split(ends, e, ROWS, &count);
#pragma omp parallel
    {
        Packs *packs = malloc(sizeof(Packs));
        float *a = malloc(ROWS * f * sizeof(float));
#pragma omp for schedule(dynamic)
        for (int64_t t = 0; t < count; t++) {
            Span span = spans[t];
            int64_t rows = span.end - span.start;
            Operand xs = {x, d, 1, token + span.start, NULL};
            Operand up = matrix(w13 + span.expert * 2 * f * d, d, 1), down = matrix(w2 + span.expert * d * f, f, 1);
            product(rows, 2 * f, d, &xs, &up, h + span.start * 2 * f, 2 * f, 0, packs);
            for (int64_t s = 0; s < rows; s++) {
                const float *row = h + (span.start + s) * 2 * f;
                for (int64_t i = 0; i < f; i += LANES) {
                    vec gate = load_some(row + i, f - i), other = load_some(row + f + i, f - i);
                    store_some(a + s * f + i, gate / (1.0f + exp_vec(-gate)) * other * weight[span.start + s], f - i);
                }
            }
            Operand as = matrix(a, f, 1);
            product(rows, d, f, &as, &down, y + span.start * d, d, 0, packs);
        }
        free(a);
        free(packs);
    }
    free(spans);
    collect(y, slot, n, k, d, out);
}

/* grad_h (S x 2F), a (S x F) and y (S x D) are scratch; grad_w13 and grad_w2 may be NULL. */
void expert_backward(const float *grad, const float *x, const float *w13, const float *w2, const float *weight,
                     const int64_t *token, const int64_t *slot, const int32_t *ends, const float *h, int64_t n, int64_t k,
                     int64_t e, int64_t d, int64_t f, float *grad_h, float *a, float *y, float *grad_x, float *grad_w13,
                     float *grad_w2, float *grad_weight) {
    int64_t count;
    Span *spans = split(ends, e, ROWS, &count);
#pragma omp parallel
    {
        Packs *packs = malloc(sizeof(Packs));
        float *grad_a = malloc(ROWS * f * sizeof(float));
#pragma omp for schedule(dynamic)
        for (int64_t t = 0; t < count; t++) {
            Span span = spans[t];
            int64_t rows = span.end - span.start;
            Operand gs = {grad, d, 1, token + span.start, NULL};
            Operand down = matrix(w2 + span.expert * d * f, 1, f), up = matrix(w13 + span.expert * 2 * f * d, 1, d);
            product(rows, f, d, &gs, &down, grad_a, f, 0, packs);
            for (int64_t s = 0; s < rows; s++) {
                int64_t row = span.start + s;
                vec total = {0};
                for (int64_t i = 0; i < f; i += LANES) {
                    vec gate = load_some(h + row * 2 * f + i, f - i), other = load_some(h + row * 2 * f + f + i, f - i);
                    vec g = load_some(grad_a + s * f + i, f - i);
                    vec sigmoid = 1.0f / (1.0f + exp_vec(-gate)), silu = gate * sigmoid;
                    total += g * silu * other;
                    g *= weight[row];
                    store_some(grad_h + row * 2 * f + i, g * other * sigmoid * (1.0f + gate * (1.0f - sigmoid)), f - i);
                    store_some(grad_h + row * 2 * f + f + i, g * silu, f - i);
                    store_some(a + row * f + i, silu * other * weight[row], f - i);
                }
                grad_weight[row] = sum_lanes(total);
            }
            Operand hs = matrix(grad_h + span.start * 2 * f, 2 * f, 1);
            product(rows, d, 2 * f, &hs, &up, y + span.start * d, d, 0, packs);
        }
        free(grad_a);
        if (grad_w13)
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < 2 * e; task++) { /* W13 of every expert, then W2 of every expert */
                int64_t expert = task % e, start = expert ? ends[expert - 1] : 0, rows = ends[expert] - start;
                if (task < e) {
                    Operand hs = matrix(grad_h + start * 2 * f, 1, 2 * f), xs = {x, 1, d, NULL, token + start};
                    product(2 * f, d, rows, &hs, &xs, grad_w13 + expert * 2 * f * d, d, 0, packs);
                } else {
                    Operand gs = {grad, 1, d, NULL, token + start}, as = matrix(a + start * f, 1, f);
                    product(d, f, rows, &gs, &as, grad_w2 + expert * d * f, f, 0, packs);
                }
            }
        free(packs);
    }
    free(spans);
    collect(y, slot, n, k, d, grad_x);
}

/* ---- attention ------------------------------------------------------------------------------------------------- */

/* p[i, j] = exp(scale * s[i, j] - shift[i]), zero where key j lies after query first + i. */
static void causal_exp(float *s, int64_t rows, int64_t keys, int64_t first, float scale, const float *shift) {
    for (int64_t i = 0; i < rows; i++) {
        float *row = s + i * keys;
        int64_t seen = first + i + 1;
        for (int64_t j = 0; j < seen; j += LANES)
            store_some(row + j, exp_vec(load_some(row + j, keys - j) * scale - shift[i]), keys - j);
        for (int64_t j = seen; j < keys; j++) row[j] = 0;
    }
}

/* Documents laid end to end, document t from start[t] to start[t + 1]. q, out: N x H x K; k, v: N x G x K; x_stride: floats
 * from one token to the next. lse (H x N) receives the log-sum-exp of each query's scores. */
void attention_forward(const float *q, const float *k, const float *v, int64_t q_stride, int64_t k_stride, int64_t v_stride,
                       const int64_t *start, int64_t documents, int64_t h, int64_t g, int64_t dim, float scale, float *out,
                       float *lse) {
    int64_t n = start[documents], longest = 0;
    for (int64_t t = 0; t < documents; t++)
        longest = start[t + 1] - start[t] > longest ? start[t + 1] - start[t] : longest;
#pragma omp parallel
    {
        Packs *packs = malloc(sizeof(Packs));
        float *s = malloc(QUERIES * longest * sizeof(float)), *mixed = malloc(QUERIES * dim * sizeof(float));
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t t = 0; t < documents; t++)
            for (int64_t head = 0; head < h; head++) {
                int64_t base = start[t], length = start[t + 1] - base, kv = head / (h / g);
                for (int64_t first = 0; first < length; first += QUERIES) {
                    int64_t rows = length - first < QUERIES ? length - first : QUERIES, keys = first + rows;
                    Operand qs = matrix(q + (base + first) * q_stride + head * dim, q_stride, 1);
                    Operand ks = matrix(k + base * k_stride + kv * dim, k_stride, 1);
                    Operand vs = matrix(v + base * v_stride + kv * dim, 1, v_stride);
                    Operand ps = matrix(s, keys, 1);
                    float top[QUERIES], total[QUERIES];
                    product(rows, keys, dim, &qs, &ks, s, keys, 0, packs);
                    for (int64_t i = 0; i < rows; i++) {
                        top[i] = scale * highest(s + i * keys, first + i + 1);
                    }
                    causal_exp(s, rows, keys, first, scale, top);
                    for (int64_t i = 0; i < rows; i++) {
                        vec sum = {0};
                        for (int64_t j = 0; j < keys; j += LANES) sum += load_some(s + i * keys + j, keys - j);
                        total[i] = sum_lanes(sum);
                        lse[head * n + base + first + i] = top[i] + logf(total[i]);
                    }
                    product(rows, dim, keys, &ps, &vs, mixed, dim, 0, packs);
                    for (int64_t i = 0; i < rows; i++)
                        for (int64_t j = 0; j < dim; j++)
                            out[((base + first + i) * h + head) * dim + j] = mixed[i * dim + j] / total[i];
                }
            }
        free(mixed);
        free(s);
        free(packs);
    }
}

/* grad_q: N x H x K, grad_k and grad_v: N x G x K, zeroed by the caller; grad and out: N x H x K. */
void attention_backward(const float *grad, const float *q, const float *k, const float *v, const float *out,
                        const float *lse, int64_t q_stride, int64_t k_stride, int64_t v_stride, const int64_t *start,
                        int64_t documents, int64_t h, int64_t g, int64_t dim, float scale, float *grad_q, float *grad_k,
                        float *grad_v) {
    int64_t n = start[documents], longest = 0;
    for (int64_t t = 0; t < documents; t++)
        longest = start[t + 1] - start[t] > longest ? start[t + 1] - start[t] : longest;
#pragma omp parallel
    {
        Packs *packs = malloc(sizeof(Packs));
        float *p = malloc(QUERIES * longest * sizeof(float)), *dp = malloc(QUERIES * longest * sizeof(float));
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t t = 0; t < documents; t++)
            for (int64_t kv = 0; kv < g; kv++)
                for (int64_t head = kv * (h / g); head < (kv + 1) * (h / g); head++) {
                    int64_t base = start[t], length = start[t + 1] - base;
                    for (int64_t first = 0; first < length; first += QUERIES) {
                        int64_t rows = length - first < QUERIES ? length - first : QUERIES, keys = first + rows;
                        int64_t at = ((base + first) * h + head) * dim;
                        const float *q_at = q + (base + first) * q_stride + head * dim;
                        Operand qs = matrix(q_at, q_stride, 1), gs = matrix(grad + at, h * dim, 1);
                        Operand ks = matrix(k + base * k_stride + kv * dim, k_stride, 1);
                        Operand vs = matrix(v + base * v_stride + kv * dim, v_stride, 1);
                        product(rows, keys, dim, &qs, &ks, p, keys, 0, packs);
                        product(rows, keys, dim, &gs, &vs, dp, keys, 0, packs);
                        causal_exp(p, rows, keys, first, scale, lse + head * n + base + first);
                        for (int64_t i = 0; i < rows; i++) {
                            float delta = 0;
                            for (int64_t j = 0; j < dim; j++)
                                delta += grad[at + i * h * dim + j] * out[at + i * h * dim + j];
                            for (int64_t j = 0; j < keys; j += LANES) {
                                vec d = load_some(dp + i * keys + j, keys - j) - delta;
                                store_some(dp + i * keys + j, load_some(p + i * keys + j, keys - j) * d * scale, keys - j);
                            }
                        }
                        Operand pt = matrix(p, 1, keys), st = matrix(dp, 1, keys), ss = matrix(dp, keys, 1);
                        Operand gt = matrix(grad + at, 1, h * dim), qt = matrix(q_at, 1, q_stride);
                        Operand kt = matrix(k + base * k_stride + kv * dim, 1, k_stride);
                        product(keys, dim, rows, &pt, &gt, grad_v + (base * g + kv) * dim, g * dim, 1, packs);
                        product(keys, dim, rows, &st, &qt, grad_k + (base * g + kv) * dim, g * dim, 1, packs);
                        product(rows, dim, keys, &ss, &kt, grad_q + at, h * dim, 0, packs);
                    }
                }
        free(dp);
        free(p);
        free(packs);
    }
}
