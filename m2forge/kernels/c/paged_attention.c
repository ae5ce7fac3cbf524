/* Attention over a paged cache; see paged_attention.py for the formula. Keys and values are read where they lie.
 *
 * A row is one query head of one token. Rows of one key head run together, ROWS at a time, so that each key is read once for
 * all of them. Their scores are kept whole; softmax and sums are in float32.
 */
#include "kernel.h"

enum { ROWS = 6, KEYS = 4 }; /* keys that meet the rows together */
enum { WIDTH = 4 }; /* vectors of a value that are summed together: with ROWS they fill the registers */
enum { AHEAD = 3 }; /* blocks of keys that are asked for before they are needed: scoring one takes less than memory does */

/* One call's tensors. q and out: B x Q x H x K, q_stride: numbers from one token of q to the next; k and v: blocks of T x G x K; table: B x S; position: B x Q. A token at
 * position p sees token l where l <= p and p - l < window or l < sinks. */
typedef struct {
    const void *q, *k, *v;
    const int64_t *table, *position;
    int64_t q_stride, s, t, h, g, dim, window, sinks;
    void *out;
} Paged;

/* What a thread works on. Row i is head `head[i]` of query `query[i]`, of which `query` counts all sequences. */
typedef struct {
    int64_t query[ROWS], head[ROWS], position[ROWS], end; /* end: behind the last token that any row sees */
    float *q, *score, *mixed;                             /* ROWS x dim, ROWS x tokens, ROWS x dim: both padded */
    int64_t wide, tokens;
} Group;

/* What the loops are compiled for besides the number of rows: bfloat16 or float32, and whether heads are whole vectors. */
typedef struct {
    int is_narrow, is_whole;
} Kind;

/* Two vectors of numbers that stand together. Of whole heads in bfloat16 the even and the odd ones, which takes no more
 * than a shift and a mask: sums do not mind the order, and `store_two` restores it. */
static inline void load_two(const void *x, int64_t at, int64_t left, Kind kind, vec out[2]) {
    if (kind.is_narrow && kind.is_whole) {
        uvec both = *(const uvec *)((const uint16_t *)x + at);
        out[0] = (vec)(both << 16), out[1] = (vec)(both & 0xFFFF0000);
        return;
    }
    for (int p = 0; p < 2; p++, at += LANES, left = kind.is_whole ? LANES : left - LANES)
        out[p] = kind.is_narrow ? load_narrow((const uint16_t *)x + at, left) : load_some((const float *)x + at, left);
}

static inline void store_two(void *x, int64_t at, int64_t left, Kind kind, const vec in[2]) {
    if (kind.is_narrow && kind.is_whole) {
        *(uvec *)((uint16_t *)x + at) = lengthen(narrow(in[0])) | lengthen(narrow(in[1])) << 16;
        return;
    }
    for (int p = 0; p < 2; p++, at += LANES, left -= LANES)
        if (kind.is_narrow) store_narrow((uint16_t *)x + at, in[p], left);
        else store_some((float *)x + at, in[p], left);
}

/* First token behind the sinks that the row sees. */
static inline int64_t lowest(const Paged *x, int64_t position) {
    int64_t from = position - x->window + 1;
    return from > x->sinks ? from : x->sinks;
}

/* Whether some row sees a token of the block that starts at `first`. */
static int is_seen(const Paged *x, const Group *group, int64_t first, int rows) {
    if (first < x->sinks) return 1;
    for (int i = 0; i < rows; i++)
        if (first + x->t > lowest(x, group->position[i]) && first <= group->position[i]) return 1;
    return 0;
}

#define INLINE static inline __attribute__((always_inline))

/* out[j] = sum of the lanes of sum[j] */
static inline void store_sums(const vec sum[KEYS], float *out) {
#if defined(__aarch64__)
    vst1q_f32(out, vpaddq_f32(vpaddq_f32(sum[0], sum[1]), vpaddq_f32(sum[2], sum[3])));
#elif defined(__AVX512F__)
    /* The four sums meet in every 128 bits of one register first, so that three additions serve all of them. */
    __m512 a = (__m512)sum[0], b = (__m512)sum[1], c = (__m512)sum[2], d = (__m512)sum[3];
    a = _mm512_add_ps(_mm512_unpacklo_ps(a, c), _mm512_unpackhi_ps(a, c));
    b = _mm512_add_ps(_mm512_unpacklo_ps(b, d), _mm512_unpackhi_ps(b, d));
    a = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m256 two = _mm256_add_ps(_mm512_castps512_ps256(a), _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)a, 1)));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
#elif defined(__AVX2__)
    __m256 two = _mm256_hadd_ps(_mm256_hadd_ps((__m256)sum[0], (__m256)sum[1]), _mm256_hadd_ps((__m256)sum[2], (__m256)sum[3]));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
#else
    for (int j = 0; j < KEYS; j++) out[j] = sum_lanes(sum[j]);
#endif
}

/* score[i, l] = q[i] . key[l] for `count` tokens of one block, whose first key stands at `at`; up to KEYS - 1 places behind
 * them are written too. */
INLINE void score(const Paged *x, const Group *group, int64_t at, int64_t first, int64_t count, int rows, Kind kind) {
    for (int64_t l = 0; l < count; l += KEYS) {
        vec sum[ROWS][KEYS];
        int64_t key_at[KEYS];
#pragma GCC unroll 4
        for (int j = 0; j < KEYS; j++) key_at[j] = at + (l + j < count ? l + j : count - 1) * x->g * x->dim;
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int j = 0; j < KEYS; j++) sum[i][j] = (vec){0};
        for (int64_t d = 0; d < x->dim; d += 2 * LANES) {
            vec key[KEYS][2];
#pragma GCC unroll 4
            for (int j = 0; j < KEYS; j++) load_two(x->k, key_at[j] + d, x->dim - d, kind, key[j]);
#pragma GCC unroll 2
            for (int p = 0; p < 2; p++)
#pragma GCC unroll 6
                for (int i = 0; i < rows; i++) {
                    vec q = *(const vec *)(group->q + i * group->wide + d + p * LANES);
#pragma GCC unroll 4
                    for (int j = 0; j < KEYS; j++) sum[i][j] += q * key[j][p];
                }
        }
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) store_sums(sum[i], group->score + i * group->tokens + first + l);
    }
}

/* mixed[i] += sum over l of score[i, l] value[l] for the tokens of one block. */
INLINE void mix(const Paged *x, const Group *group, int64_t at, int64_t first, int64_t count, int rows, Kind kind) {
    for (int64_t d = 0; d < x->dim; d += WIDTH * LANES) {
        vec sum[ROWS][WIDTH];
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int j = 0; j < WIDTH; j++) sum[i][j] = *(vec *)(group->mixed + i * group->wide + d + j * LANES);
        for (int64_t l = 0; l < count; l++) {
            vec value[WIDTH];
#pragma GCC unroll 2
            for (int j = 0; j < WIDTH; j += 2)
                load_two(x->v, at + l * x->g * x->dim + d + j * LANES, x->dim - d - j * LANES, kind, value + j);
#pragma GCC unroll 6
            for (int i = 0; i < rows; i++) {
                float share = group->score[i * group->tokens + first + l];
#pragma GCC unroll 4
                for (int j = 0; j < WIDTH; j++) sum[i][j] += share * value[j];
            }
        }
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int j = 0; j < WIDTH; j++) *(vec *)(group->mixed + i * group->wide + d + j * LANES) = sum[i][j];
    }
}

/* Makes row[from .. to) exponentials below `top`; their sum. */
static float soften(float *row, int64_t from, int64_t to, float top) {
    vec total = {0};
    for (int64_t l = from; l < to; l += LANES) {
        vec e = exp_vec(load_some(row + l, to - l) - top);
        e = fill_rest(e, to - l, 0);
        store_some(row + l, e, to - l);
        total += e;
    }
    return sum_lanes(total);
}

/* The softmax of a row over what it sees, 0 elsewhere, but for the division by its sum, which is returned. */
static float share(const Paged *x, float *row, int64_t position, int64_t end) {
    int64_t low = lowest(x, position), sinks = x->sinks < position + 1 ? x->sinks : position + 1;
    if (low > position + 1) low = position + 1;
    float top = -INFINITY;
    if (sinks) top = highest(row, sinks);
    if (low <= position) {
        float other = highest(row + low, position + 1 - low);
        top = other > top ? other : top;
    }
    float sum = soften(row, 0, sinks, top) + soften(row, low, position + 1, top);
    for (int64_t l = sinks; l < low; l++) row[l] = 0;
    for (int64_t l = position + 1; l < end; l++) row[l] = 0;
    return sum;
}

/* Asks for one head's rows of block number `block`, if the group sees so far: blocks lie anywhere, where no hardware looks
 * ahead. */
INLINE void fetch(const Paged *x, const Group *group, const void *rows, const int64_t *table, int64_t block, int64_t kv,
                  Kind kind) {
    if (block * x->t >= group->end) return;
    int64_t at = (table[block] * x->t * x->g + kv) * x->dim;
    int64_t size = kind.is_narrow ? sizeof(uint16_t) : sizeof(float);
    for (int64_t l = 0; l < x->t; l++, at += x->g * x->dim)
        for (int64_t byte = 0; byte < x->dim * size; byte += 64) __builtin_prefetch((const char *)rows + at * size + byte);
}

INLINE void attend(const Paged *x, Group *group, const int64_t *table, int64_t kv, int rows, Kind kind) {
    int64_t dim = x->dim, wide = group->wide;
    float scale = 1.0f / sqrtf(dim), sum[ROWS];
    memset(group->q, 0, rows * wide * sizeof(float));
    memset(group->mixed, 0, rows * wide * sizeof(float));
    for (int i = 0; i < rows; i++)
        for (int64_t d = 0; d < dim; d += 2 * LANES) {
            vec q[2];
            load_two(x->q, group->query[i] * x->q_stride + group->head[i] * dim + d, dim - d, kind, q);
            for (int p = 0; p < 2; p++) *(vec *)(group->q + i * wide + d + p * LANES) = q[p] * scale;
        }
    for (int64_t block = 0; block < AHEAD; block++) fetch(x, group, x->k, table, block, kv, kind);
    for (int64_t first = 0; first < group->end; first += x->t)
        if (is_seen(x, group, first, rows)) {
            int64_t at = (table[first / x->t] * x->t * x->g + kv) * dim;
            fetch(x, group, x->k, table, first / x->t + AHEAD, kv, kind);
            fetch(x, group, x->v, table, first / x->t, kv, kind);
            score(x, group, at, first, group->end - first < x->t ? group->end - first : x->t, rows, kind);
        }
    for (int i = 0; i < rows; i++) sum[i] = share(x, group->score + i * group->tokens, group->position[i], group->end);
    for (int64_t first = 0; first < group->end; first += x->t)
        if (is_seen(x, group, first, rows))
            mix(x, group, (table[first / x->t] * x->t * x->g + kv) * dim, first,
                group->end - first < x->t ? group->end - first : x->t, rows, kind);
    for (int i = 0; i < rows; i++) {
        int64_t at = (group->query[i] * x->h + group->head[i]) * dim;
        for (int64_t d = 0; d < dim; d += 2 * LANES) {
            const vec *sums = (const vec *)(group->mixed + i * wide + d), y[2] = {sums[0] / sum[i], sums[1] / sum[i]};
            store_two(x->out, at + d, dim - d, kind, y);
        }
    }
}

/* The loops of few rows are compiled for their number, which keeps the sums in registers. */
INLINE void attend_some(const Paged *x, Group *group, const int64_t *table, int64_t kv, int rows, Kind kind) {
    switch (rows) {
    case 1: attend(x, group, table, kv, 1, kind); break;
    case 2: attend(x, group, table, kv, 2, kind); break;
    case 3: attend(x, group, table, kv, 3, kind); break;
    case 4: attend(x, group, table, kv, 4, kind); break;
    case 5: attend(x, group, table, kv, 5, kind); break;
    default: attend(x, group, table, kv, 6, kind);
    }
}

void paged_attention(const void *q, const void *k, const void *v, const int64_t *table, const int64_t *position,
                     int64_t q_stride, int64_t sequences, int64_t queries, int64_t s, int64_t t, int64_t h, int64_t g, int64_t dim,
                     int64_t window, int64_t sinks, int64_t is_narrow, void *out) {
    Paged x = {q, k, v, table, position, q_stride, s, t, h, g, dim, window, sinks, out};
    int64_t repeats = h / g, all = repeats * queries;
    int64_t wide = (dim + WIDTH * LANES - 1) / (WIDTH * LANES) * WIDTH * LANES, tokens = s * t + KEYS;
    int is_whole = dim % (WIDTH * LANES) == 0;
#pragma omp parallel num_threads(threads)
    {
        Group group = {.q = scratch(0, ROWS * wide), .score = scratch(1, ROWS * tokens), .mixed = scratch(2, ROWS * wide)};
        group.wide = wide, group.tokens = tokens;
#pragma omp for collapse(3) schedule(dynamic)
        for (int64_t b = 0; b < sequences; b++)
            for (int64_t kv = 0; kv < g; kv++)
                for (int64_t first = 0; first < all; first += ROWS) {
                    int rows = all - first < ROWS ? all - first : ROWS;
                    group.end = 0;
                    for (int i = 0; i < rows; i++) {
                        group.query[i] = b * queries + (first + i) / repeats;
                        group.head[i] = kv * repeats + (first + i) % repeats;
                        group.position[i] = position[group.query[i]];
                        if (group.position[i] >= group.end) group.end = group.position[i] + 1;
                    }
                    const int64_t *blocks = table + b * s;
                    if (is_narrow && is_whole) attend_some(&x, &group, blocks, kv, rows, (Kind){1, 1});
                    else if (is_narrow) attend_some(&x, &group, blocks, kv, rows, (Kind){1, 0});
                    else if (is_whole) attend_some(&x, &group, blocks, kv, rows, (Kind){0, 1});
                    else attend_some(&x, &group, blocks, kv, rows, (Kind){0, 0});
                }
    }
}
