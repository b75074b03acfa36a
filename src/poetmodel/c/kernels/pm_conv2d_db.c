/* The gradient of a convolution's bias, for `count` output channels: dy summed over batch and positions. The strides
   are those of dy for batch, channel, row and column. */
#include "pm_total.h"
#include "pm_kernels.h"

void pm_conv2d_db(pm_real *db, const pm_real *dy, int32_t batch, int32_t count, int32_t height, int32_t width,
                  int32_t dy_step, int32_t channel_step, int32_t row_step, int32_t column_step)
{
    for (int32_t c = 0; c < count; c++) {
        pm_total sum = {0, 0};
        for (int32_t n = 0; n < batch; n++) {
            for (int32_t i = 0; i < height; i++) {
                const pm_real *row = dy + c * channel_step + n * dy_step + i * row_step;
                for (int32_t j = 0; j < width; j++) {
                    pm_add_to(&sum, row[j * column_step]);
                }
            }
        }
        db[c] = sum.sum;
    }
}
