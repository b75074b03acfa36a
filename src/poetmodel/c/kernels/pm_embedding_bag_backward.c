/* dw += gradient of bags, distributed to their rows; `most` as from pm_embedding_bag */
#include "pm_embedding_bag.h"
#include "pm_kernels.h"

void pm_embedding_bag_backward(pm_real *dw, const pm_real *gradient, const int32_t *most, const int32_t *index,
                               const int32_t *offset, const pm_real *weights, int32_t bags, int32_t offsets,
                               int32_t count, int32_t n, int32_t mode, int32_t padding)
{
    for (int32_t b = 0; b < bags; b++, gradient += n) {
        const int32_t end = pm_bag_end(offset, b, offsets, count);
        const int32_t size = pm_bag_size(index, offset[b], end, padding);
        if (mode == PM_BAG_MAX) {
            for (int32_t k = 0; size && k < n; k++) {
                dw[most[b * n + k] * n + k] += gradient[k];
            }
            continue;
        }
        for (int32_t e = offset[b]; e < end; e++) {
            if (index[e] == padding) {
                continue;
            }
            const pm_real factor = weights ? weights[e] : PM_C(1.0);
            for (int32_t k = 0; k < n; k++) {
                dw[index[e] * n + k] += mode == PM_BAG_MEAN ? gradient[k] / (pm_real)size : factor * gradient[k];
            }
        }
    }
}
