/* Causal attention over documents laid end to end. See attention.py for the formula. */
#include "kernel.h"

enum { TILE = 96 }; /* query rows that meet the keys together */

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
