/* Gradient descent of int8 weights with stochastic rounding (see pm_q8_gradients.h), for `count` of all, from
   `first` on; pointers are to these, except that to scales. Each of the `results` has a scale, and `inner`
   consecutive weights. `before` is the number of earlier weights of the layer. */
#define PM_Q8_STOCHASTIC
#include "pm_q8_gradients.h"
#include "pm_kernels.h"

void pm_q8_stochastic(int8_t *w, const pm_real *gradient, const pm_real *scale, int32_t results, int32_t inner,
                      int32_t first, int32_t count, int32_t site, int32_t seed, int32_t begun, int32_t steps,
                      int32_t before, pm_real lr, pm_real sign, pm_real decay)
{
    pm_q8_draws draws = pm_q8_draws_of(site, seed, begun, steps, before + first);
    const pm_q8_rate rate = {(float)lr, (float)sign, (float)decay};
    for (int32_t k = first; k < first + count;) {
        const float own = (float)scale[k / inner % results];
        const int32_t end = PM_MIN((k / inner + 1) * inner, first + count);
        for (; k < end; k++) {
            pm_q8_update(w++, (float)*gradient++, own, &rate, pm_q8_draw(&draws, k - first));
        }
    }
}
