/* Products of matrices that lie in any way; each element is summed in the order of k, in one number,
   so that it has the same bits however the product is cut into pieces. */
#ifndef PM_MM_H
#define PM_MM_H

#include "pm_real.h"

typedef struct {
    int32_t k;
    int32_t out_row;
    int32_t a_row;
    int32_t a_column;
    int32_t b_row;
    int32_t b_column;
    int32_t accumulate;
} pm_mm_form;

/* What becomes of a sum that is a gradient: a weight is updated, as by pm_sgd. */
typedef struct {
    pm_real lr;
    pm_real sign;
    pm_real decay;
    int32_t plain; /* the sign is 1, and there is no decay */
} pm_mm_update;

static inline void pm_mm_put(pm_real *out, pm_real s, const pm_mm_update *u)
{
    if (!u) {
        *out = s;
    } else if (u->plain) {
        *out -= u->lr * s;
    } else {
        *out -= u->lr * (u->sign * s + u->decay * *out);
    }
}

static inline void pm_mm_put_four(pm_real *out, pm_real s0, pm_real s1, pm_real s2, pm_real s3, const pm_mm_update *u)
{
    if (u && u->plain) {
        const pm_real lr = u->lr, w0 = out[0], w1 = out[1], w2 = out[2], w3 = out[3];
        out[0] = w0 - lr * s0, out[1] = w1 - lr * s1, out[2] = w2 - lr * s2, out[3] = w3 - lr * s3;
    } else {
        pm_mm_put(out, s0, u), pm_mm_put(out + 1, s1, u), pm_mm_put(out + 2, s2, u), pm_mm_put(out + 3, s3, u);
    }
}

/* Two rows of a and four columns of b at once: 6 reads for 8 products. */
static inline void pm_mm_2x4(pm_real *out, const pm_real *a, const pm_real *b, const pm_mm_form *f,
                             const pm_mm_update *u)
{
    pm_real *const below = out + f->out_row;
    const pm_real *a1 = a + f->a_row;
    const pm_real *b1 = b + f->b_column;
    const pm_real *b2 = b1 + f->b_column;
    const pm_real *b3 = b2 + f->b_column;
    pm_real s00 = 0, s01 = 0, s02 = 0, s03 = 0, s10 = 0, s11 = 0, s12 = 0, s13 = 0;
    if (f->accumulate) {
        s00 = out[0], s01 = out[1], s02 = out[2], s03 = out[3];
        s10 = below[0], s11 = below[1], s12 = below[2], s13 = below[3];
    }
    for (int32_t k = f->k; k > 0; k--) {
        const pm_real v0 = *a, v1 = *a1;
        const pm_real w0 = *b, w1 = *b1, w2 = *b2, w3 = *b3;
        s00 += v0 * w0, s01 += v0 * w1, s02 += v0 * w2, s03 += v0 * w3;
        s10 += v1 * w0, s11 += v1 * w1, s12 += v1 * w2, s13 += v1 * w3;
        a += f->a_column, a1 += f->a_column;
        b += f->b_row, b1 += f->b_row, b2 += f->b_row, b3 += f->b_row;
    }
    pm_mm_put_four(out, s00, s01, s02, s03, u);
    pm_mm_put_four(below, s10, s11, s12, s13, u);
}

static inline void pm_mm_1x4(pm_real *out, const pm_real *a, const pm_real *b, const pm_mm_form *f,
                             const pm_mm_update *u)
{
    const pm_real *b1 = b + f->b_column;
    const pm_real *b2 = b1 + f->b_column;
    const pm_real *b3 = b2 + f->b_column;
    pm_real s0 = 0, s1 = 0, s2 = 0, s3 = 0;
    if (f->accumulate) {
        s0 = out[0], s1 = out[1], s2 = out[2], s3 = out[3];
    }
    for (int32_t k = f->k; k > 0; k--) {
        const pm_real v = *a;
        s0 += v * *b, s1 += v * *b1, s2 += v * *b2, s3 += v * *b3;
        a += f->a_column;
        b += f->b_row, b1 += f->b_row, b2 += f->b_row, b3 += f->b_row;
    }
    pm_mm_put_four(out, s0, s1, s2, s3, u);
}

static inline void pm_mm_1x1(pm_real *out, const pm_real *a, const pm_real *b, const pm_mm_form *f,
                             const pm_mm_update *u)
{
    pm_real s = f->accumulate ? *out : PM_C(0.0);
    for (int32_t k = f->k; k > 0; k--) {
        s += *a * *b;
        a += f->a_column;
        b += f->b_row;
    }
    pm_mm_put(out, s, u);
}

/* The product of a column and a row: the gradient of a weight at batch size 1. */
static inline void pm_mm_outer(pm_real *out, const pm_real *a, const pm_real *b, int32_t m, int32_t n,
                               const pm_mm_form *f, const pm_mm_update *u)
{
    for (int32_t i = 0; i < m; i++) {
        const pm_real v = *a;
        const pm_real *w = b;
        pm_real *to = out;
        if (f->accumulate) {
            for (int32_t j = n; j > 0; j--) {
                *to++ += v * *w;
                w += f->b_column;
            }
        } else {
            int32_t j = n;
            for (; j >= 4; j -= 4) {
                const pm_real *w2 = w + 2 * f->b_column;
                const pm_real s0 = PM_C(0.0) + v * w[0], s1 = PM_C(0.0) + v * w[f->b_column];
                const pm_real s2 = PM_C(0.0) + v * w2[0], s3 = PM_C(0.0) + v * w2[f->b_column];
                pm_mm_put_four(to, s0, s1, s2, s3, u);
                to += 4;
                w = w2 + 2 * f->b_column;
            }
            for (; j > 0; j--) {
                pm_mm_put(to++, PM_C(0.0) + v * *w, u);
                w += f->b_column;
            }
        }
        a += f->a_row;
        out += f->out_row;
    }
}

static inline void pm_mm_all(pm_real *out, const pm_real *a, const pm_real *b, int32_t m, int32_t n, pm_mm_form f,
                             const pm_mm_update *update)
{
    int32_t row = 0;
    if (f.k == 1) {
        pm_mm_outer(out, a, b, m, n, &f, update);
        return;
    }
    while (row < m) {
        const int32_t rows = m - row > 1 ? 2 : 1;
        const pm_real *column = b;
        int32_t j = 0;
        for (; j + 4 <= n; j += 4) {
            if (rows == 2) {
                pm_mm_2x4(out + j, a, column, &f, update);
            } else {
                pm_mm_1x4(out + j, a, column, &f, update);
            }
            column += 4 * f.b_column;
        }
        for (; j < n; j++) {
            pm_mm_1x1(out + j, a, column, &f, update);
            if (rows == 2) {
                pm_mm_1x1(out + f.out_row + j, a + f.a_row, column, &f, update);
            }
            column += f.b_column;
        }
        row += rows;
        out += rows * f.out_row;
        a += rows * f.a_row;
    }
}

#endif
