/* Causal attention over token trees; documents laid end to end are trees of one node each. See tree_attention.py for the
 * formula. */
#include "kernel.h"

enum { TILE = 96 };      /* query rows that meet the keys together */
enum { PACK_ROWS = 16 }; /* rows whose arithmetic takes as long as laying out the keys once */

/* One call's tensors. q and out: N x H x K; k and v: N x G x K; x_stride: floats from one token to the next. lse (N x H):
 * log-sum-exp of each query's scores. Nodes stand depth-first: node t from start[t] to start[t + 1], below parent[t] (-1
 * for a root), its last descendant before exit[t]. Token k is seen by q where k <= q < exit of k's node. */
typedef struct {
    const float *q, *k, *v;
    int64_t q_stride, k_stride, v_stride;
    const int64_t *start, *parent, *exit;
    int64_t nodes, h, g, dim;
    float scale;
} Attention;

/* Consecutive tokens of one tree that ask together. What they see is among the `above` ancestors of the first and the run
 * itself: what lies before the first and has a later token below it has the first below it too. */
typedef struct {
    int64_t first, queries, above, node, last_node;
} Run;

typedef struct {
    Run *run;
    int64_t count, longest; /* longest: keys of the run that has most */
    int64_t *end, trees;    /* end[i]: number of runs up to the end of tree i */
    int64_t *depth;         /* of each node's first token */
} Runs;

/* A node of few tokens goes along with the run before it where the keys it does not see cost less than a run of its own. */
static Runs cut(const Attention *x, int64_t heads) {
    int64_t most = TILE / heads, num_tokens = x->start[x->nodes];
    Runs runs = {.run = take((x->nodes + num_tokens / most) * sizeof(Run)),
                 .end = take(x->nodes * sizeof(int64_t)),
                 .depth = take(x->nodes * sizeof(int64_t))};
    for (int64_t t = 0; t < x->nodes; t++) {
        int64_t parent = x->parent[t], start = x->start[t], end = x->start[t + 1];
        int64_t depth = parent < 0 ? 0 : runs.depth[parent] + x->start[parent + 1] - x->start[parent];
        runs.depth[t] = depth;
        for (int64_t at = start, taken; at < end; at += taken) {
            Run *last = runs.run + runs.count - 1;
            int64_t room = at > start || parent < 0 ? 0 : most - last->queries;
            taken = end - at < room ? end - at : room;
            if (taken && heads * taken * (last->above + last->queries - depth) < PACK_ROWS * depth) {
                last->queries += taken;
                last->last_node = t;
            } else {
                taken = end - at < most ? end - at : most;
                last = runs.run + runs.count++;
                *last = (Run){at, taken, depth + at - start, t, t};
            }
            if (last->above + last->queries > runs.longest) runs.longest = last->above + last->queries;
        }
        if (parent < 0) runs.trees++;
        runs.end[runs.trees - 1] = runs.count;
    }
    return runs;
}

static void drop(Runs *runs) {
    free(runs->run);
    free(runs->end);
    free(runs->depth);
}

/* Tokens that a run's columns stand for: the ancestors of its first token from the root down, then the run itself. */
static void climb(const Attention *x, const Run *run, int64_t *key) {
    int64_t at = run->above + run->queries, end = run->first + run->queries;
    for (; end > run->first;) key[--at] = --end;
    for (int64_t node = run->node; at > 0; end = x->start[node + 1]) {
        while (end > x->start[node]) key[--at] = --end;
        node = at > 0 ? x->parent[node] : node;
    }
}

/* Queries of all the heads (up to TILE of both) that share a key head: they meet the same keys, so one product serves them
 * all. Row i of a tile is query i % queries of its run, column j is token key[j]. */
typedef struct {
    int64_t rows, queries, above, keys;
    const int64_t *key;
    int64_t q_at[TILE], out_at[TILE], lse_at[TILE];
} Tile;

static void place(Tile *tile, const Attention *x, const Run *run, const int64_t *key, int64_t head, int64_t heads) {
    tile->queries = run->queries;
    tile->rows = heads * run->queries;
    tile->above = run->above;
    tile->keys = run->above + run->queries;
    tile->key = key;
    for (int64_t i = 0; i < tile->rows; i++) {
        int64_t token = run->first + i % run->queries, at = head + i / run->queries;
        tile->q_at[i] = token * x->q_stride + at * x->dim;
        tile->lse_at[i] = token * x->h + at;
        tile->out_at[i] = tile->lse_at[i] * x->dim;
    }
}

/* Minus infinity for the keys up to a query that are none of its ancestors; only a run of several nodes has any. */
static void hide(const Attention *x, const int64_t *depth, const Run *run, const Tile *tile, float *s) {
    if (run->node == run->last_node) return;
    int64_t exit[TILE], above[TILE]; /* of each query; above: how many of the first one's ancestors it has too */
    for (int64_t i = 0, node = run->node; i < run->queries; i++) {
        if (run->first + i == x->start[node + 1]) {
            int64_t parent = x->start[x->parent[++node] + 1] - 1 - run->first;
            above[i] = parent < 0 ? depth[node] : above[parent];
        } else
            above[i] = i ? above[i - 1] : run->above;
        exit[i] = x->exit[node];
    }
    for (int64_t i = 0; i < tile->rows; i++) {
        float *row = s + i * tile->keys;
        int64_t query = i % tile->queries;
        for (int64_t j = above[query]; j < tile->above; j++) row[j] = -INFINITY;
        for (int64_t j = 0; j < query; j++)
            if (exit[j] <= run->first + query) row[tile->above + j] = -INFINITY;
    }
}

/* p[i, j] = exp(scale * s[i, j] - shift[i]), zero where key j lies after the query; total[i] sums row i. */
static void causal_exp(const Tile *tile, float *s, float scale, const float *shift, float *total) {
    int64_t keys = tile->keys;
    for (int64_t i = 0; i < tile->rows; i++) {
        float *row = s + i * keys;
        int64_t seen = tile->above + i % tile->queries + 1;
        vec sum = {0};
        for (int64_t j = 0; j < seen; j += LANES) {
            vec p = exp_vec(load_some(row + j, keys - j) * scale - shift[i]);
            p = fill_rest(p, seen - j, 0);
            store_some(row + j, p, keys - j);
            sum += p;
        }
        for (int64_t j = seen; j < keys; j++) row[j] = 0;
        total[i] = sum_lanes(sum);
    }
}

/* The scores of a tile's queries with its keys, hidden ones at minus infinity. */
static void score(const Attention *x, const int64_t *depth, const Run *run, const Tile *tile, int64_t kv, float *s) {
    Operand qs = {x->q, 1, 1, tile->q_at, NULL}, ks = {x->k + kv * x->dim, x->k_stride, 1, tile->key, NULL};
    product(tile->rows, tile->keys, x->dim, &qs, &ks, s, tile->keys, 0);
    hide(x, depth, run, tile, s);
}

static void forward_tile(const Attention *x, const Tile *tile, int64_t kv, float *s, float *mixed, float *out, float *lse) {
    int64_t rows = tile->rows, keys = tile->keys, dim = x->dim;
    Operand ps = matrix(s, keys, 1), vs = {x->v + kv * dim, 1, x->v_stride, NULL, tile->key};
    float top[TILE], total[TILE];
    for (int64_t i = 0; i < rows; i++) top[i] = x->scale * highest(s + i * keys, tile->above + i % tile->queries + 1);
    causal_exp(tile, s, x->scale, top, total);
    product(rows, dim, keys, &ps, &vs, mixed, dim, 0);
    for (int64_t i = 0; i < rows; i++) {
        lse[tile->lse_at[i]] = top[i] + logf(total[i]);
        for (int64_t j = 0; j < dim; j += LANES)
            store_some(out + tile->out_at[i] + j, load_some(mixed + i * dim + j, dim - j) / total[i], dim - j);
    }
}

static void backward_tile(const Attention *x, const Tile *tile, int64_t kv, const float *grad, const float *out,
                          const float *lse, float *p, float *dp, float *mixed, float *grad_q, float *grad_k, float *grad_v) {
    int64_t rows = tile->rows, keys = tile->keys, dim = x->dim;
    Operand gs = {grad, 1, 1, tile->out_at, NULL}, vs = {x->v + kv * dim, x->v_stride, 1, tile->key, NULL};
    float shift[TILE], total[TILE];
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
    Operand pt = matrix(p, 1, keys), st = matrix(dp, 1, keys), ss = matrix(dp, keys, 1);
    Operand gt = {grad, 1, 1, NULL, tile->out_at}, qt = {x->q, 1, 1, NULL, tile->q_at};
    Operand kt = {x->k + kv * dim, 1, x->k_stride, NULL, tile->key};
    product_to(keys, dim, rows, &pt, &gt, grad_v + kv * dim, x->g * dim, tile->key, 1);
    product_to(keys, dim, rows, &st, &qt, grad_k + kv * dim, x->g * dim, tile->key, 1);
    product(rows, dim, keys, &ss, &kt, mixed, dim, 0);
    for (int64_t i = 0; i < rows; i++) memcpy(grad_q + tile->out_at[i], mixed + i * dim, dim * sizeof(float));
}

/* Runs every tile of every tree and key head; forwards where grad is NULL. Trees go to threads whole, so that gradients of
 * keys add up in one order. grad_k and grad_v arrive zeroed. */
static void attend(Attention x, float *out, float *lse, const float *grad, float *grad_q, float *grad_k, float *grad_v) {
    int64_t group = x.h / x.g;
    Runs runs = cut(&x, group < TILE ? group : TILE);
#pragma omp parallel num_threads(threads)
    {
        float *p = scratch(0, TILE * runs.longest), *dp = grad ? scratch(1, TILE * runs.longest) : NULL;
        float *mixed = scratch(2, TILE * x.dim);
        int64_t *key = (int64_t *)scratch(3, 2 * runs.longest);
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t tree = 0; tree < runs.trees; tree++)
            for (int64_t kv = 0; kv < x.g; kv++)
                for (int64_t i = tree ? runs.end[tree - 1] : 0; i < runs.end[tree]; i++) {
                    const Run *run = runs.run + i;
                    climb(&x, run, key);
                    for (int64_t some = 0; some < group; some += TILE) {
                        Tile tile;
                        place(&tile, &x, run, key, kv * group + some, group - some < TILE ? group - some : TILE);
                        score(&x, runs.depth, run, &tile, kv, p);
                        if (grad)
                            backward_tile(&x, &tile, kv, grad, out, lse, p, dp, mixed, grad_q, grad_k, grad_v);
                        else
                            forward_tile(&x, &tile, kv, p, mixed, out, lse);
                    }
                }
    }
    drop(&runs);
}

void attention_forward(const float *q, const float *k, const float *v, int64_t q_stride, int64_t k_stride, int64_t v_stride,
                       const int64_t *start, const int64_t *parent, const int64_t *exit, int64_t nodes, int64_t h,
                       int64_t g, int64_t dim, float scale, float *out, float *lse) {
    Attention x = {q, k, v, q_stride, k_stride, v_stride, start, parent, exit, nodes, h, g, dim, scale};
    attend(x, out, lse, NULL, NULL, NULL, NULL);
}

void attention_backward(const float *grad, const float *q, const float *k, const float *v, float *out, float *lse,
                        int64_t q_stride, int64_t k_stride, int64_t v_stride, const int64_t *start, const int64_t *parent,
                        const int64_t *exit, int64_t nodes, int64_t h, int64_t g, int64_t dim, float scale, float *grad_q,
                        float *grad_k, float *grad_v) {
    Attention x = {q, k, v, q_stride, k_stride, v_stride, start, parent, exit, nodes, h, g, dim, scale};
    attend(x, out, lse, grad, grad_q, grad_k, grad_v);
}
