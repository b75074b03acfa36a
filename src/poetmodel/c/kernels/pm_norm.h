/* Common code of norms: mean and variance of `outer` sequences of `inner` elements, in two passes of compensated
   sums. */
#ifndef PM_NORM_H
#define PM_NORM_H

#include "pm_total.h"

static inline pm_real pm_mean_of(const pm_real *x, int32_t outer, int32_t outer_step, int32_t inner, int32_t step)
{
    pm_total total = {0, 0};
    for (int32_t i = 0; i < outer; i++) {
        const pm_real *p = x + i * outer_step;
        PM_UNROLL(4)
        for (int32_t j = inner; j > 0; j--) {
            pm_add_to(&total, *p);
            p += step;
        }
    }
    return total.sum / (pm_real)(outer * inner);
}

static inline pm_real pm_variance_of(const pm_real *x, int32_t outer, int32_t outer_step, int32_t inner, int32_t step,
                                     pm_real mean)
{
    pm_total total = {0, 0};
    for (int32_t i = 0; i < outer; i++) {
        const pm_real *p = x + i * outer_step;
        PM_UNROLL(4)
        for (int32_t j = inner; j > 0; j--) {
            const pm_real off = *p - mean;
            pm_add_to(&total, off * off);
            p += step;
        }
    }
    return total.sum / (pm_real)(outer * inner);
}

/* Adds dy, and dy times x minus its mean, to two totals. */
static inline void pm_add_gradients(pm_total *plain, pm_total *moment, const pm_real *dy, int32_t dy_step,
                                    const pm_real *x, int32_t x_step, int32_t n, pm_real mean)
{
    PM_UNROLL(4)
    for (; n > 0; n--) {
        pm_add_to(plain, *dy);
        pm_add_to(moment, *dy * (*x - mean));
        dy += dy_step;
        x += x_step;
    }
}

#endif
