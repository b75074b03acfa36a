/* Products of matrices with any strides. Each element is summed in the order of k in one variable, so that it has
   the same bits for all divisions into pieces. */
#ifndef PM_MM_H
#define PM_MM_H

#include "pm_update.h"

typedef struct {
    int32_t k;
    int32_t out_row;
    int32_t a_row;
    int32_t a_column;
    int32_t b_row;
    int32_t b_column;
    int32_t accumulate;
} pm_mm_form;

static PM_OUT_OF_LINE void pm_mm_put_four(pm_real *out, pm_real s0, pm_real s1, pm_real s2, pm_real s3,
                                          const pm_update *u)
{
    pm_put(out, s0, u), pm_put(out + 1, s1, u), pm_put(out + 2, s2, u), pm_put(out + 3, s3, u);
}

/* Adds products with four columns of b to the sums of a row. */
#define PM_ADD_FOUR(s, x)                                              \
    {                                                                  \
        const pm_real v = x;                                           \
        s##0 += v * w0, s##1 += v * w1, s##2 += v * w2, s##3 += v * w3; \
    }
#define PM_START_FOUR(s, row)                                                                      \
    pm_real s##0 = 0, s##1 = 0, s##2 = 0, s##3 = 0;                                                \
    if (f->accumulate) {                                                                           \
        const pm_real *o = out + (row) * f->out_row;                                               \
        s##0 = o[0], s##1 = o[1], s##2 = o[2], s##3 = o[3];                                        \
    }
#define PM_STORE_FOUR(s, row)                                                                      \
    {                                                                                              \
        pm_real *o = out + (row) * f->out_row;                                                     \
        o[0] = s##0, o[1] = s##1, o[2] = s##2, o[3] = s##3;                                        \
    }
#define PM_LOWER_FOUR(s, row)                                                                      \
    {                                                                                              \
        pm_real *o = out + (row) * f->out_row;                                                     \
        o[0] -= lr * s##0, o[1] -= lr * s##1, o[2] -= lr * s##2, o[3] -= lr * s##3;                \
    }

/* Four rows of a and four columns of b at once: 8 reads for 16 products. There are faster variants for a layer, the
   gradient of its input, and that of its weight; only the last can be an update. */
static PM_OUT_OF_LINE void pm_mm_4x4(pm_real *out, const pm_real *a, const pm_real *b, const pm_mm_form *f,
                                     const pm_update *u)
{
    const pm_real *a1 = a + f->a_row, *a2 = a1 + f->a_row, *a3 = a2 + f->a_row;
    const pm_real *b1 = b + f->b_column, *b2 = b1 + f->b_column, *b3 = b2 + f->b_column;
    PM_START_FOUR(p, 0)
    PM_START_FOUR(q, 1)
    PM_START_FOUR(r, 2)
    PM_START_FOUR(s, 3)
    if (!u && f->a_column == 1 && f->b_row == 1) {
        for (int32_t k = f->k; k > 0; k--) {
            const pm_real w0 = *b++, w1 = *b1++, w2 = *b2++, w3 = *b3++;
            PM_ADD_FOUR(p, *a++) PM_ADD_FOUR(q, *a1++) PM_ADD_FOUR(r, *a2++) PM_ADD_FOUR(s, *a3++)
        }
    } else if (!u && f->a_column == 1 && f->b_column == 1) {
        PM_UNROLL(2)
        for (int32_t k = f->k; k > 0; k--) {
            const pm_real w0 = b[0], w1 = b[1], w2 = b[2], w3 = b[3];
            PM_ADD_FOUR(p, *a++) PM_ADD_FOUR(q, *a1++) PM_ADD_FOUR(r, *a2++) PM_ADD_FOUR(s, *a3++)
            b += f->b_row;
        }
    } else if (f->a_row == 1 && f->b_column == 1) {
        for (int32_t k = f->k; k > 0; k--) {
            const pm_real w0 = b[0], w1 = b[1], w2 = b[2], w3 = b[3];
            PM_ADD_FOUR(p, a[0]) PM_ADD_FOUR(q, a[1]) PM_ADD_FOUR(r, a[2]) PM_ADD_FOUR(s, a[3])
            a += f->a_column, b += f->b_row;
        }
    } else {
        for (int32_t k = f->k; k > 0; k--) {
            const pm_real w0 = *b, w1 = *b1, w2 = *b2, w3 = *b3;
            PM_ADD_FOUR(p, *a) PM_ADD_FOUR(q, *a1) PM_ADD_FOUR(r, *a2) PM_ADD_FOUR(s, *a3)
            a += f->a_column, a1 += f->a_column, a2 += f->a_column, a3 += f->a_column;
            b += f->b_row, b1 += f->b_row, b2 += f->b_row, b3 += f->b_row;
        }
    }
    if (!u) {
        PM_STORE_FOUR(p, 0)
        PM_STORE_FOUR(q, 1)
        PM_STORE_FOUR(r, 2)
        PM_STORE_FOUR(s, 3)
    } else if (u->plain) {
        const pm_real lr = u->lr;
        PM_LOWER_FOUR(p, 0)
        PM_LOWER_FOUR(q, 1)
        PM_LOWER_FOUR(r, 2)
        PM_LOWER_FOUR(s, 3)
    } else {
        pm_mm_put_four(out, p0, p1, p2, p3, u);
        pm_mm_put_four(out + f->out_row, q0, q1, q2, q3, u);
        pm_mm_put_four(out + 2 * f->out_row, r0, r1, r2, r3, u);
        pm_mm_put_four(out + 3 * f->out_row, s0, s1, s2, s3, u);
    }
}

/* One row of a and four columns of b. */
static PM_OUT_OF_LINE void pm_mm_1x4(pm_real *out, const pm_real *a, const pm_real *b, const pm_mm_form *f,
                                     const pm_update *u)
{
    const pm_real *b1 = b + f->b_column, *b2 = b1 + f->b_column, *b3 = b2 + f->b_column;
    int32_t k = f->k;
    PM_START_FOUR(s, 0)
    if (!u && f->a_column == 1 && f->b_row == 1) {
        PM_UNROLL(2)
        for (; k > 0; k--) {
            const pm_real w0 = *b++, w1 = *b1++, w2 = *b2++, w3 = *b3++;
            PM_ADD_FOUR(s, *a++)
        }
    } else if (f->b_column == 1) {
        PM_UNROLL(2)
        for (; k > 0; k--) {
            const pm_real w0 = b[0], w1 = b[1], w2 = b[2], w3 = b[3];
            PM_ADD_FOUR(s, *a)
            a += f->a_column, b += f->b_row;
        }
    }
    for (; k > 0; k--) {
        const pm_real w0 = *b, w1 = *b1, w2 = *b2, w3 = *b3;
        PM_ADD_FOUR(s, *a)
        a += f->a_column;
        b += f->b_row, b1 += f->b_row, b2 += f->b_row, b3 += f->b_row;
    }
    if (!u) {
        PM_STORE_FOUR(s, 0)
    } else {
        pm_mm_put_four(out, s0, s1, s2, s3, u);
    }
}

static inline void pm_mm_1x1(pm_real *out, const pm_real *a, const pm_real *b, const pm_mm_form *f,
                             const pm_update *u)
{
    pm_real s = f->accumulate ? *out : PM_C(0.0);
    for (int32_t k = f->k; k > 0; k--) {
        s += *a * *b;
        a += f->a_column;
        b += f->b_row;
    }
    pm_put(out, s, u);
}

/* The product of a column and a row: the gradient of a weight at batch size 1. */
static inline void pm_mm_outer(pm_real *out, const pm_real *a, const pm_real *b, int32_t m, int32_t n,
                               const pm_mm_form *f, const pm_update *u)
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
                if (!u) {
                    to[0] = s0, to[1] = s1, to[2] = s2, to[3] = s3;
                } else {
                    pm_mm_put_four(to, s0, s1, s2, s3, u);
                }
                to += 4;
                w = w2 + 2 * f->b_column;
            }
            for (; j > 0; j--) {
                pm_put(to++, PM_C(0.0) + v * *w, u);
                w += f->b_column;
            }
        }
        a += f->a_row;
        out += f->out_row;
    }
}

static inline void pm_mm_all(pm_real *out, const pm_real *a, const pm_real *b, int32_t m, int32_t n, pm_mm_form f,
                             const pm_update *update)
{
    int32_t row = 0;
    if (f.k == 1) {
        pm_mm_outer(out, a, b, m, n, &f, update);
        return;
    }
    while (row < m) {
        const int32_t rows = m - row >= 4 ? 4 : 1;
        const pm_real *column = b;
        int32_t j = 0;
        for (; j + 4 <= n; j += 4) {
            if (rows == 4) {
                pm_mm_4x4(out + j, a, column, &f, update);
            } else {
                pm_mm_1x4(out + j, a, column, &f, update);
            }
            column += 4 * f.b_column;
        }
        for (; j < n; j++) {
            for (int32_t i = 0; i < rows; i++) {
                pm_mm_1x1(out + i * f.out_row + j, a + i * f.a_row, column, &f, update);
            }
            column += f.b_column;
        }
        row += rows;
        out += rows * f.out_row;
        a += rows * f.a_row;
    }
}

#endif
