/* The experts of a mixture layer: gather, multiply, activate, multiply, sum. See expert.py for the formula. */
#include "kernel.h"

enum { ROWS = 252 };              /* rows of one expert that are worked on together */
enum { KEPT_FLOATS = 1 << 24 };   /* results of up to 64 MiB lie in memory that is kept, larger ones are given back */

static float *take_rows(int64_t count) { return count <= KEPT_FLOATS ? scratch(0, count) : take(count * sizeof(float)); }
static void give_rows(float *rows, int64_t count) {
    if (count > KEPT_FLOATS) free(rows);
}

typedef struct {
    int64_t expert, start, end;
} Span;

/* At most ROWS rows of one expert each. */
static Span *split(const int32_t *ends, int64_t num_experts, int64_t rows, int64_t *count) {
    Span *spans = take((num_experts + ends[num_experts - 1] / rows + 1) * sizeof(Span));
    int64_t start = 0;
    *count = 0;
    for (int64_t e = 0; e < num_experts; start = ends[e++])
        for (int64_t s = start; s < ends[e]; s += rows)
            spans[(*count)++] = (Span){e, s, s + rows < ends[e] ? s + rows : ends[e]};
    return spans;
}

/* out[n] = sum over k of y[slot[n, k]], without negative slots */
static void collect(const float *y, const int64_t *slot, int64_t n, int64_t k, int64_t d, float *out) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t token = 0; token < n; token++)
        for (int64_t i = 0; i < d; i += LANES) {
            vec total = {0};
            for (int64_t j = 0; j < k; j++)
                if (slot[token * k + j] >= 0) total += load_some(y + slot[token * k + j] * d + i, d - i);
            store_some(out + token * d + i, total, d - i);
        }
}

/* token[s]: the token of row s; weight[s]: its weight. h receives both pre-activations. */
void expert_forward(const float *x, const float *w13, const float *w2, const float *weight, const int64_t *token,
                    const int64_t *slot, const int32_t *ends, int64_t n, int64_t k, int64_t e, int64_t d, int64_t f,
                    float *h, float *out) {
    int64_t count;
    float *y = take_rows(n * k * d);
    Span *spans = split(ends, e, ROWS, &count);
#pragma omp parallel num_threads(threads)
    {
        float *a = scratch(1, ROWS * f);
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
    }
    free(spans);
    collect(y, slot, n, k, d, out);
    give_rows(y, n * k * d);
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
    float *y = take_rows(n * k * d);
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
    give_rows(y, n * k * d);
}
