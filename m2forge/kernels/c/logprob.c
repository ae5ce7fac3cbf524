/* The two passes of log-probabilities over rows of logits z, each row scaled by its own factor (NULL: 1); and the likeliest
 * token of each row. */
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
            below = fill_rest(below, v - i, NOTHING);
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

static inline vec load_logits(const void *row, int64_t i, int64_t v, int is_narrow) {
    return is_narrow ? load_narrow((const uint16_t *)row + i, v - i) : load_some((const float *)row + i, v - i);
}

/* The place of the largest of v logits, the first of several, and its log-softmax; of the first NaN if there is one. */
static inline __attribute__((always_inline)) void greedy_row(const void *row, int64_t v, int is_narrow, int64_t *token,
                                                             float *logprob) {
    vec best = splat(-INFINITY), total = {0};
    ivec at = {0}, is_nan = {0}; /* at: where each lane has seen its best */
    for (int64_t i = 0; i < v; i += LANES) {
        vec z = load_logits(row, i, v, is_narrow);
        z = fill_rest(z, v - i, -INFINITY);
        ivec is_better = z > best;
        at = (is_better & (int32_t)i) | (~is_better & at);
        best = most(z, best);
        is_nan |= z != z;
    }
    float top = -INFINITY;
    int64_t place = v;
    int has_nan = 0;
    for (int lane = 0; lane < LANES; lane++) {
        int64_t here = at[lane] + lane;
        if (best[lane] > top || (best[lane] == top && here < place)) place = here, top = best[lane];
        has_nan |= is_nan[lane];
    }
    for (int64_t i = 0; i < v; i += LANES) {
        vec below = most(load_logits(row, i, v, is_narrow) - top, splat(NOTHING));
        below = fill_rest(below, v - i, NOTHING);
        total += exp_vec(below);
    }
    *logprob = has_nan || isinf(top) ? NAN : -logf(sum_lanes(total));
    for (int64_t i = 0; has_nan; i++)
        if (isnan(load_logits(row, i, v, is_narrow)[0])) {
            place = i;
            break;
        }
    *token = place;
}

void greedy(const void *z, int64_t rows, int64_t v, int64_t is_narrow, int64_t *token, float *logprob) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++)
        if (is_narrow) greedy_row((const uint16_t *)z + r * v, v, 1, token + r, logprob + r);
        else greedy_row((const float *)z + r * v, v, 0, token + r, logprob + r);
}
