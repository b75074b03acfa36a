/* The gradient of a weight, fused with its update: w -= lr (sign a b + decay w); a is m times k, b is k times n

   The gradient is not stored. Elements are summed as in pm_mm, and updated as in pm_sgd. */
#include "pm_mm.h"
#include "pm_kernels.h"

/* The same at batch size 1, for a contiguous row b and the plain update. */
static void pm_outer_sgd(pm_real *restrict w, const pm_real *restrict a, const pm_real *restrict b, int32_t m,
                         int32_t n, int32_t w_row, int32_t a_row, pm_real lr)
{
    for (; m > 0; m--) {
        const pm_real v = *a;
        const pm_real *from = b;
        pm_real *to = w;
        int32_t j = n;
        for (; j >= 4; j -= 4) {
            const pm_real s0 = PM_C(0.0) + v * from[0], s1 = PM_C(0.0) + v * from[1];
            const pm_real s2 = PM_C(0.0) + v * from[2], s3 = PM_C(0.0) + v * from[3];
            const pm_real w0 = to[0], w1 = to[1], w2 = to[2], w3 = to[3];
            to[0] = w0 - lr * s0;
            to[1] = w1 - lr * s1;
            to[2] = w2 - lr * s2;
            to[3] = w3 - lr * s3;
            to += 4;
            from += 4;
        }
        for (; j > 0; j--) {
            *to -= lr * (PM_C(0.0) + v * *from);
            to++;
            from++;
        }
        a += a_row;
        w += w_row;
    }
}

void pm_mm_sgd(pm_real *w, const pm_real *a, const pm_real *b, int32_t m, int32_t k, int32_t n, int32_t w_row,
               int32_t a_row, int32_t a_column, int32_t b_row, int32_t b_column, pm_real lr, pm_real sign,
               pm_real decay)
{
    const pm_mm_form form = {k, w_row, a_row, a_column, b_row, b_column, 0};
    const pm_update update = {lr, sign, decay, sign == PM_C(1.0) && decay == PM_C(0.0)};
    if (k == 1 && b_column == 1 && update.plain) {
        pm_outer_sgd(w, a, b, m, n, w_row, a_row, lr);
    } else {
        pm_mm_all(w, a, b, m, n, form, &update);
    }
}
