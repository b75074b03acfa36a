/* Increments a counter modulo `most` */
#include "pm_real.h"
#include "pm_kernels.h"

void pm_count_to(int32_t *counter, int32_t n, int32_t most)
{
    for (int32_t i = 0; i < n; i++) {
        counter[i] = counter[i] + 1 < most ? counter[i] + 1 : 0;
    }
}
