/* The two passes of log-probabilities over rows of logits z, each row scaled by its own factor (NULL: 1). */
#include "kernel.h"

static const float NOTHING = -1e30f; /* whose exponential is 0, and which times 0 is 0, as minus infinity is not */

/* lse = logsumexp(scale * z) and mean = sum of softmax * scale * z, of each row. */
void row_statistics(const float *z, const float *scale, int64_t rows, int64_t v, float *lse, float *mean) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        const float *row = z + r * v;
        float factor = scale ? scale[r] : 1.0f, top = highest(row, v) * factor;
        vec total = {0}, weighted = {0};
        for (int64_t i = 0; i < v; i += LANES) {
            vec below = most(splat(NOTHING), load_some(row + i, v - i) * factor - top); /* a NaN stays one */
            for (int64_t lane = v - i; lane < LANES; lane++) below[lane] = NOTHING;
            vec e = exp_vec(below);
            total += e;
            weighted += e * below;
        }
        float sum = sum_lanes(total);
        lse[r] = top + logf(sum);
        mean[r] = top + sum_lanes(weighted) / sum;
    }
}

/* z becomes factor * (exp(scale * z - lse) - one-hot(target)); target may be NULL. */
void softmax_grad(float *z, const float *scale, const float *lse, const float *factor, const int64_t *target, int64_t rows,
                  int64_t v) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        float *row = z + r * v, by = scale ? scale[r] : 1.0f;
        for (int64_t i = 0; i < v; i += LANES)
            store_some(row + i, exp_vec(load_some(row + i, v - i) * by - lse[r]) * factor[r], v - i);
        if (target) row[target[r]] -= factor[r];
    }
}
