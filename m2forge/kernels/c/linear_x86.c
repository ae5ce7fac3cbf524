/* y = x W^T of bfloat16 matrices on x86: see linear.c for what is computed besides.
 *
 * W lies in panels of COLUMNS of its rows. A panel is a matrix of words, one for each column and each two consecutive k: the
 * lower half of word (k / 2, column) is W[column, k], the upper half W[column, k + 1]. Sums are outer products, so none
 * crosses the lanes of a register, and W is read at two bytes an entry. Three kernels read that layout:
 *
 *     WIDEN  widens both halves of a word to float32 by a shift or a mask and multiplies in float32: AVX2, AVX-512
 *     DOT    multiplies two pairs of bfloat16 and adds both products in float32 at once:       AVX-512-bf16
 *     TILES  multiplies 16 x 32 by 32 x 16 numbers an instruction, sums in float32:            AMX
 *
 * x is laid out for the kernel in tiles of rows: word by word with the rows of a tile side by side (WIDEN as float32), or, for
 * TILES, row by row. Rows and k are padded with zeros.
 */
#include "linear.h"

#if defined(__AVX2__)
#include <sys/syscall.h>
#include <unistd.h>

enum { WIDEN = 0, DOT = 1, TILES = 2 };
enum { COLUMNS = 2 * LANES, STEP = 32 };        /* STEP: what k is padded to a multiple of */
enum { SHORT = LANES == 16 ? 12 : 5, TALL = 32 }; /* rows of a tile of x: WIDEN and DOT, TILES */
enum { GROUP = 4 };                             /* panels that meet each tile of x in turn: they fit a second-level cache */
enum { AHEAD = 48 };                            /* lines of a panel that are asked for before they are needed */

#define INLINE static inline __attribute__((always_inline))

static inline int64_t padded(int64_t d) { return (d + STEP - 1) / STEP * STEP; }
static inline int64_t panels(int64_t columns) { return (columns + COLUMNS - 1) / COLUMNS; }
static inline int64_t panel_words(int64_t d) { return padded(d) / 2 * COLUMNS; }

/* The words of one row of W or x; of an odd d the last one has no upper half. */
static inline uint32_t word_of(const uint16_t *row, int64_t pair, int64_t d) {
    return 2 * pair + 1 < d ? row[2 * pair] | (uint32_t)row[2 * pair + 1] << 16 : 2 * pair < d ? row[2 * pair] : 0;
}

/* Panel of `count` rows of W. Columns that are not there hold zeros. */
static void pack_panel(const uint16_t *w, int64_t count, int64_t d, uint32_t *panel) {
    if (count > COLUMNS) count = COLUMNS;
    for (int64_t pair = 0; pair < padded(d) / 2; pair++)
        for (int64_t c = 0; c < COLUMNS; c++) panel[pair * COLUMNS + c] = c < count ? word_of(w + c * d, pair, d) : 0;
}

int64_t packed_bytes(int64_t o, int64_t d) { return panels(o) * panel_words(d) * (int64_t)sizeof(uint32_t); }
void pack_bfloat16(const uint16_t *w, int64_t o, int64_t d, void *packed, float *factor) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t p = 0; p < panels(o); p++)
        pack_panel(w + p * COLUMNS * d, o - p * COLUMNS, d, (uint32_t *)packed + p * panel_words(d));
    for (int64_t j = 0; j < o; j++) factor[j] = 1;
}

/* A step of decode waits for memory, and the hardware's own prefetching ends with each page; of a prefill, a panel comes from
 * the second-level cache for every tile of x. */
INLINE void fetch(const uint32_t *w, int lines) {
    for (int i = 0; i < lines; i++) __builtin_prefetch((const char *)w + (AHEAD + i) * 64);
}

/* -- the kernels: sums of `rows` rows of a tile with one panel, COLUMNS to a row of `out` --------------------------------- */

INLINE void widen_rows(int64_t pairs, const float *x, const uint32_t *w, float *out, int rows) {
    vec sum[SHORT][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = (vec){0};
    for (; pairs > 0; pairs--, x += 2 * rows, w += COLUMNS) {
        fetch(w, COLUMNS / 16);
        vec a = (vec)(*(const uvec *)w << 16), b = (vec)(*(const uvec *)(w + LANES) << 16);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) sum[i][0] += x[i] * a, sum[i][1] += x[i] * b;
        a = (vec)(*(const uvec *)w & 0xFFFF0000), b = (vec)(*(const uvec *)(w + LANES) & 0xFFFF0000);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) sum[i][0] += x[rows + i] * a, sum[i][1] += x[rows + i] * b;
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) *(vec *)(out + i * COLUMNS) = sum[i][0], *(vec *)(out + i * COLUMNS + LANES) = sum[i][1];
}

#if defined(__AVX512BF16__)
INLINE void dot_rows(int64_t pairs, const uint32_t *x, const uint32_t *w, float *out, int rows) {
    __m512 sum[SHORT][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (; pairs > 0; pairs--, x += rows, w += COLUMNS) {
        fetch(w, COLUMNS / 16);
        __m512bh a = (__m512bh)_mm512_loadu_si512(w), b = (__m512bh)_mm512_loadu_si512(w + LANES);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            __m512bh both = (__m512bh)_mm512_set1_epi32(x[i]);
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], both, a);
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], both, b);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        _mm512_storeu_ps(out + i * COLUMNS, sum[i][0]), _mm512_storeu_ps(out + i * COLUMNS + LANES, sum[i][1]);
}
#endif

/* Compiled for each number of rows, which keeps the sums in registers. */
#if defined(__AVX512BF16__)
#define RUN(n) (kind == DOT ? dot_rows(pairs, x, w, out, n) : widen_rows(pairs, x, w, out, n))
#else
#define RUN(n) widen_rows(pairs, x, w, out, n)
#endif
static void multiply_short(int kind, int64_t pairs, const void *x, const uint32_t *w, float *out, int rows) {
    (void)kind;
    switch (rows) {
    case 1: RUN(1); break;
    case 2: RUN(2); break;
    case 3: RUN(3); break;
    case 4: RUN(4); break;
    case 5: RUN(5); break;
#if defined(__AVX512F__)
    case 6: RUN(6); break;
    case 7: RUN(7); break;
    case 8: RUN(8); break;
    case 9: RUN(9); break;
    case 10: RUN(10); break;
    case 11: RUN(11); break;
    case 12: RUN(12); break;
#endif
    }
}

#if defined(__AMX_BF16__)
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Shapes;

/* Sums are tiles 0 to 3, x tiles 4 and 5, W tiles 6 and 7. */
static void set_tiles(int64_t m) {
    Shapes shapes = {.palette = 1};
    int few = m < 16 ? m : 16;
    for (int i = 0; i < 8; i++) shapes.bytes[i] = 64, shapes.rows[i] = i < 6 ? few : 16;
    /* Some releases of GCC declare that the instruction reads 8 bytes, and drop the other stores. */
    __asm__ volatile("" ::"r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
}

/* `rows` is at most 16, or else 17 to 32 with x padded to 32. The intrinsics are statements. */
static void multiply_tall(int64_t d, const uint16_t *x, const uint32_t *w, float *out, int rows) {
    int64_t stride = d * sizeof(uint16_t), line = COLUMNS * sizeof(uint32_t);
    __asm__ volatile("" ::: "memory"); /* tile loads need not say what they read */
    _tile_zero(0);
    _tile_zero(1);
    if (rows <= 16) {
        for (int64_t k = 0; k < d; k += STEP, w += STEP / 2 * COLUMNS) {
            fetch(w, STEP / 2 * COLUMNS / 16);
            _tile_loadd(4, x + k, stride);
            _tile_loadd(6, w, line);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, w + 16, line);
            _tile_dpbf16ps(1, 4, 7);
        }
    } else {
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < d; k += STEP, w += STEP / 2 * COLUMNS) {
            fetch(w, STEP / 2 * COLUMNS / 16);
            _tile_loadd(4, x + k, stride);
            _tile_loadd(6, w, line);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, w + 16, line);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, x + 16 * d + k, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, out + 16 * COLUMNS, line);
        _tile_stored(3, out + 16 * COLUMNS + 16, line);
    }
    _tile_stored(0, out, line);
    _tile_stored(1, out + 16, line);
}
#endif

/* Bit i: kernel i serves. The system is asked for the tile registers, which it may refuse. */
int64_t linear_kinds(void) {
    int64_t kinds = 1 << WIDEN;
#if defined(__AVX512BF16__)
    kinds |= 1 << DOT;
#endif
#if defined(__AMX_BF16__)
    if (syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0) kinds |= 1 << TILES;
#endif
    return kinds;
}

/* -- a call --------------------------------------------------------------------------------------------------------------- */

static inline int64_t tile_height(int kind) { return kind == TILES ? TALL : SHORT; }
static inline int64_t tile_words(int kind, int64_t d) {
    return kind == TILES ? TALL * padded(d) / 2 : SHORT * padded(d) / (kind == WIDEN ? 1 : 2);
}

/* Lays out `rows` rows of x, normed where there is a norm. */
static void lay_out(int kind, const uint16_t *x, int64_t stride, const uint16_t *norm, float eps, int64_t d, int64_t rows,
                    uint16_t *normed, uint32_t *tile) {
    int64_t full = padded(d);
    if (kind == TILES) memset(tile, 0, (rows <= 16 ? rows : TALL) * full * sizeof(uint16_t));
    for (int64_t i = 0; i < rows; i++, x += stride) {
        const uint16_t *row = x;
        if (norm) norm_row(x, norm, d, eps, normed), row = normed;
        if (kind == TILES) memcpy((uint16_t *)tile + i * full, row, d * sizeof(uint16_t));
        else
            for (int64_t pair = 0; pair < full / 2; pair++) {
                uint32_t word = word_of(row, pair, d);
                if (kind == DOT) tile[pair * rows + i] = word;
                else tile[2 * pair * rows + i] = word << 16, tile[(2 * pair + 1) * rows + i] = word & 0xFFFF0000;
            }
    }
}

static void multiply(int kind, int64_t d, const uint32_t *tile, const uint32_t *panel, float *out, int rows) {
#if defined(__AMX_BF16__)
    if (kind == TILES) {
        multiply_tall(padded(d), (const uint16_t *)tile, panel, out, rows);
        return;
    }
#endif
    multiply_short(kind, padded(d) / 2, tile, panel, out, rows);
}

/* All tiles of x with `count` panels of W from number `first` on, those of the second half behind them where y is gated. */
static void multiply_panels(int kind, const Linear *y, const uint32_t *xs, const uint32_t *const panel[2], int64_t first,
                            int64_t count) {
    int64_t height = tile_height(kind), width = y->is_gated ? y->o / 2 : y->o;
    float sums[2][TALL * COLUMNS];
    for (int64_t i = 0; i < y->m; i += height) {
        int rows = y->m - i < height ? y->m - i : height;
        const uint32_t *tile = xs + i / height * tile_words(kind, y->d);
        for (int64_t p = 0; p < count; p++) {
            for (int half = 0; half <= y->is_gated; half++)
                multiply(kind, y->d, tile, panel[half] + p * panel_words(y->d), sums[half], rows);
            for (int r = 0; r < rows; r++)
                for (int64_t j = 0, at = (first + p) * COLUMNS; j < COLUMNS && at + j < width; j += LANES) {
                    vec sum = *(vec *)(sums[0] + r * COLUMNS + j), up = *(vec *)(sums[y->is_gated] + r * COLUMNS + j);
                    finish(y, i + r, at + j, width - at - j, sum, up);
                }
        }
    }
}

/* W comes as it is, or packed; `norm`: the weights of the norm that x, its rows `stride` apart, goes through first, or
 * NULL. `factor` is for the layout of linear.c. `kind`: the kernel. */
void linear_bfloat16(const uint16_t *x, const uint16_t *norm, float eps, const uint16_t *w, const void *packed,
                     const float *factor, int64_t stride, int64_t m, int64_t o, int64_t d, int64_t is_gated,
                     const uint16_t *onto, float *wide, uint16_t *narrow, int64_t kind) {
    (void)factor;
    if (!m) return;
    Linear y = {m, o, d, is_gated, onto, wide, narrow};
    int64_t width = is_gated ? o / 2 : o, height = tile_height(kind), words = panel_words(d);
    if (width % COLUMNS && is_gated) packed = NULL; /* the second half begins within a panel */
    int64_t group = m > height ? GROUP / (1 + is_gated) : 1, tiles = (m + height - 1) / height;
    uint32_t *xs = (uint32_t *)scratch(0, tiles * tile_words(kind, d));
#pragma omp parallel num_threads(threads)
    {
        uint32_t *some = packed ? NULL : (uint32_t *)scratch(2, GROUP * words);
        uint16_t *normed = norm ? (uint16_t *)scratch(3, d) : NULL;
#if defined(__AMX_BF16__)
        if (kind == TILES) set_tiles(m);
#endif
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tiles; t++) {
            int64_t rows = m - t * height < height ? m - t * height : height;
            lay_out(kind, x + t * height * stride, stride, norm, eps, d, rows, normed, xs + t * tile_words(kind, d));
        }
#pragma omp for schedule(dynamic)
        for (int64_t first = 0; first < panels(width); first += group) {
            int64_t count = panels(width) - first < group ? panels(width) - first : group;
            const uint32_t *panel[2] = {NULL, NULL};
            for (int half = 0; half <= is_gated; half++) {
                int64_t column = half * width + first * COLUMNS, end = half * width + width;
                uint32_t *own = some + half * group * words;
                panel[half] = packed ? (const uint32_t *)packed + column / COLUMNS * words : own;
                for (int64_t p = 0; !packed && p < count; p++)
                    pack_panel(w + (column + p * COLUMNS) * d, end - column - p * COLUMNS, d, own + p * words);
            }
            multiply_panels(kind, &y, xs, panel, first, count);
        }
#if defined(__AMX_BF16__)
        if (kind == TILES) _tile_release();
#endif
    }
}

#endif
