/* out = sums, means or maxima of bags of rows of w; `most`, if not 0, gets the rows of the maxima, -1 for none */
#include "pm_embedding_bag.h"
#include "pm_kernels.h"

void pm_embedding_bag(pm_real *out, int32_t *most, const pm_real *w, const int32_t *index, const int32_t *offset,
                      const pm_real *weights, int32_t bags, int32_t offsets, int32_t count, int32_t n, int32_t mode,
                      int32_t padding)
{
    for (int32_t b = 0; b < bags; b++) {
        const int32_t end = pm_bag_end(offset, b, offsets, count);
        const int32_t size = pm_bag_size(index, offset[b], end, padding);
        for (int32_t k = 0; k < n; k++) {
            pm_real result = PM_C(0.0);
            int32_t row = -1;
            for (int32_t e = offset[b]; e < end; e++) {
                if (index[e] == padding) {
                    continue;
                }
                const pm_real value = w[index[e] * n + k];
                if (mode != PM_BAG_MAX) {
                    result += weights ? weights[e] * value : value;
                } else if (row < 0 || value > result) {
                    result = value;
                    row = index[e];
                }
            }
            out[b * n + k] = mode == PM_BAG_MEAN && size ? result / (pm_real)size : result;
            if (most) {
                most[b * n + k] = row;
            }
        }
    }
}
