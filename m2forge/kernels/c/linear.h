/* What the products of bfloat16 matrices share (linear.c, linear_x86.c): what becomes of the sums of x W^T. */
#pragma once
#include "kernel.h"

/* y = x W^T, x: m x d, W: o x d. y is float32 where `wide` is given, else bfloat16. */
typedef struct {
    int64_t m, o, d;
    int is_gated;         /* y = silu(a) * b, a and b the two halves of x W^T */
    const uint16_t *onto; /* what y is added to, or NULL */
    float *wide;
    uint16_t *narrow;
} Linear;

/* Writes at most LANES sums of row `row` of y from `column` on; `up`: the sums of the second half where y is gated. */
static inline void finish(const Linear *y, int64_t row, int64_t column, int64_t left, vec sum, vec up) {
    int64_t at = row * (y->is_gated ? y->o / 2 : y->o) + column;
    if (y->is_gated) sum = gate_vec(sum, up);
    if (y->onto) sum += load_narrow(y->onto + at, left);
    if (y->wide) store_some(y->wide + at, sum, left);
    else store_narrow(y->narrow + at, sum, left);
}
