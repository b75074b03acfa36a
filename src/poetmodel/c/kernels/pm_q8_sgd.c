/* Gradient descent of int8 weights with residuals (see pm_q8_gradients.h), for `count` of all, from `first` on;
   pointers are to these, except that to scales. Each of the `results` has a scale, and `inner` consecutive weights. */
#include "pm_q8_gradients.h"
#include "pm_kernels.h"

void pm_q8_sgd(int8_t *w, int8_t *residual, const pm_real *gradient, const pm_real *scale, int32_t results,
               int32_t inner, int32_t first, int32_t count, pm_real lr, pm_real sign, pm_real decay)
{
    const pm_q8_rate rate = {(float)lr, (float)sign, (float)decay};
    for (int32_t k = first; k < first + count;) {
        const float own = (float)scale[k / inner % results];
        const int32_t end = PM_MIN((k / inner + 1) * inner, first + count);
        for (; k < end; k++) {
            pm_q8_update(w++, residual++, (float)*gradient++, own, &rate);
        }
    }
}
