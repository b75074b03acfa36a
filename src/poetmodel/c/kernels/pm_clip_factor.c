/* out = factor, at most 1, by which gradients are multiplied to limit their norm to `most`

   Before the call, out has the square of the norm. */
#include "pm_real.h"
#include "pm_kernels.h"

void pm_clip_factor(pm_real *out, pm_real most)
{
    const pm_real factor = most / (PM_SQRT(out[0]) + PM_C(1e-6));
    out[0] = factor > PM_C(1.0) ? PM_C(1.0) : factor;
}
