/* Start values of the sums of a layer: for each of n results, minus the zero of x times the sum of its weights,
   which are `step` apart; those of the next result are `next` elements behind. */
#include "pm_q8.h"
#include "pm_kernels.h"

void pm_q8_start(int32_t *out, const int8_t *w, int32_t n, int32_t terms, int32_t next, int32_t step, int32_t zero_x)
{
    for (; n > 0; n--, w += next) {
        const int8_t *from = w;
        int32_t sum = 0;
        for (int32_t k = terms; k > 0; k--) {
            sum += *from;
            from += step;
        }
        *out++ = -zero_x * sum;
    }
}
