/* Kernels that take one row at a time: norm, rotation, cross-entropy. */
#include "kernel.h"

enum { ROWS = 252 }; /* rows of one partial sum */

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

/* nll = logsumexp(z) - z[target] of each row of V logits; z becomes weight * (softmax(z) - one-hot(target)). */
void nll_and_grad(float *z, const int64_t *target, const float *weight, int64_t rows, int64_t v, float *nll) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        float *row = z + r * v, top = highest(row, v), goal = row[target[r]];
        vec total = {0};
        for (int64_t i = 0; i < v; i += LANES) {
            vec e = exp_vec(load_some(row + i, v - i) - top);
            e = fill_rest(e, v - i, 0);
            store_some(row + i, e, v - i);
            total += e;
        }
        float sum = sum_lanes(total), scale = weight[r] / sum;
        nll[r] = top + logf(sum) - goal;
        for (int64_t i = 0; i < v; i += LANES) store_some(row + i, load_some(row + i, v - i) * scale, v - i);
        row[target[r]] -= weight[r];
    }
}

/* The same rows in bfloat16, without gradients: computed in float32, rounded once. Few of them are not worth a second
 * thread. */
enum { FEW = 1 << 15 };

void norm_bfloat16(const uint16_t *x, const uint16_t *weight, int64_t x_stride, int64_t rows, int64_t d, float eps,
                   uint16_t *y) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * d > FEW)
    for (int64_t r = 0; r < rows; r++) norm_row(x + r * x_stride, weight, d, eps, y + r * d);
}

static void turn_heads(const uint16_t *from, const float *cos, const float *sin, int64_t heads, int64_t dim, int64_t half,
                       uint16_t *to) {
    for (int64_t head = 0; head < heads; head++, from += dim, to += dim) {
        for (int64_t i = 0; i < half; i += LANES) {
            vec a = load_narrow(from + i, half - i), b = load_narrow(from + half + i, half - i);
            vec c = load_some(cos + i, half - i), s = load_some(sin + i, half - i);
            store_narrow(to + i, a * c - b * s, half - i);
            store_narrow(to + half + i, b * c + a * s, half - i);
        }
        memcpy(to + 2 * half, from + 2 * half, (dim - 2 * half) * sizeof(uint16_t));
    }
}

void rotate_bfloat16(const uint16_t *x, const float *cos, const float *sin, int64_t x_stride, int64_t n, int64_t heads,
                     int64_t dim, int64_t half, uint16_t *y) {
#pragma omp parallel for schedule(static) num_threads(threads) if (n * heads * dim > FEW)
    for (int64_t token = 0; token < n; token++)
        turn_heads(x + token * x_stride, cos + token * half, sin + token * half, heads, dim, half, y + token * heads * dim);
}

/* Each row of qkv holds h heads of q, g of k and g of v. q and k are normed where there are weights, each head or
 * all of them together, and rotated; k and v go to the places `slot` of the cache. */
void rotate_into_cache(const uint16_t *qkv, const uint16_t *q_norm, const uint16_t *k_norm, float eps, int64_t is_flat,
                       const float *cos, const float *sin, const int64_t *slot, int64_t n, int64_t h, int64_t g, int64_t dim,
                       int64_t half, uint16_t *q, uint16_t *k_cache, uint16_t *v_cache) {
#pragma omp parallel num_threads(threads) if (n * h * dim > FEW)
    {
        uint16_t *normed = (uint16_t *)scratch(0, (h + g) * dim);
#pragma omp for schedule(static)
        for (int64_t token = 0; token < n; token++) {
            const uint16_t *row = qkv + token * (h + 2 * g) * dim, *heads = row;
            const float *c = cos + token * half, *s = sin + token * half;
            if (q_norm && is_flat) {
                norm_row(row, q_norm, h * dim, eps, normed);
                norm_row(row + h * dim, k_norm, g * dim, eps, normed + h * dim);
            } else if (q_norm)
                for (int64_t i = 0; i < h + g; i++) norm_row(row + i * dim, i < h ? q_norm : k_norm, dim, eps, normed + i * dim);
            if (q_norm) heads = normed;
            turn_heads(heads, c, s, h, dim, half, q + token * h * dim);
            turn_heads(heads + h * dim, c, s, g, dim, half, k_cache + slot[token] * g * dim);
            memcpy(v_cache + slot[token] * g * dim, row + (h + g) * dim, g * dim * sizeof(uint16_t));
        }
    }
}

/* y = silu(gate) * up, gate and up the two halves of each row of h. */
void gate_bfloat16(const uint16_t *h, int64_t rows, int64_t f, uint16_t *y) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * f > FEW / 4)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < f; i += LANES) {
            vec gate = load_narrow(h + r * 2 * f + i, f - i), up = load_narrow(h + r * 2 * f + f + i, f - i);
            store_narrow(y + r * f + i, gate_vec(gate, up), f - i);
        }
}
