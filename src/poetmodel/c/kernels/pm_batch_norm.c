/* Batch norm in training: out from the statistics of x; also mean and inverse deviation of each channel, and new
   running statistics: the old ones, moved by the fraction `momentum` towards the mean and the unbiased variance of
   x. Pointers to optional or missing tensors are 0: mean, inverse, new running statistics, w, bias. out may be x.
   `steps`: strides of batch, channel and element, in out, then in x. */
#include "pm_norm.h"
#include "pm_kernels.h"

void pm_batch_norm(pm_real *out, pm_real *mean, pm_real *inverse, pm_real *new_mean, pm_real *new_variance,
                   const pm_real *x, const pm_real *w, const pm_real *bias, const pm_real *old_mean,
                   const pm_real *old_variance, const int32_t *steps, int32_t batch, int32_t channels, int32_t plane,
                   pm_real momentum, pm_real epsilon)
{
    const int32_t n = batch * plane;
    /* Planes of one element are merged into one sequence. */
    const int32_t one = plane == 1, runs = one ? 1 : batch, places = n / runs;
    const int32_t to_step = steps[one ? 0 : 2], step = steps[one ? 3 : 5];
    for (int32_t c = 0; c < channels; c++) {
        const pm_real *from = x + c * steps[4];
        const pm_real middle = pm_mean_of(from, runs, steps[3], places, step);
        const pm_real variance = pm_variance_of(from, runs, steps[3], places, step, middle);
        const pm_real scale = 1 / PM_SQRT(variance + epsilon);
        if (mean) {
            mean[c] = middle;
        }
        if (inverse) {
            inverse[c] = scale;
        }
        if (new_mean) {
            new_mean[c] = momentum * middle + (1 - momentum) * old_mean[c];
        }
        if (new_variance) {
            const pm_real unbiased = variance * ((pm_real)n / (pm_real)(n - 1));
            new_variance[c] = momentum * unbiased + (1 - momentum) * old_variance[c];
        }
        const pm_real weight = w ? w[c] : 1, start = bias ? bias[c] : 0;
        for (int32_t i = 0; i < runs; i++) {
            pm_real *to = out + c * steps[1] + i * steps[0];
            const pm_real *p = from + i * steps[3];
            PM_UNROLL(4)
            for (int32_t j = places; j > 0; j--) {
                *to = (*p - middle) * scale * weight + start;
                to += to_step;
                p += step;
            }
        }
    }
}
