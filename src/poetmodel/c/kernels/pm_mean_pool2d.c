/* out = mean of each window. `rows` and `columns` have, for each row and column of out (`height` x `width`), begin,
   end and counted length of the window; a divisor above 0 replaces the number of counted elements. `steps`: those of
   out and x (see pm_planes.h). */
#include "pm_planes.h"
#include "pm_kernels.h"

void pm_mean_pool2d(pm_real *out, const pm_real *x, const int32_t *rows, const int32_t *columns, const int32_t *steps,
                    int32_t batch, int32_t channels, int32_t height, int32_t width, int32_t divisor)
{
    const int32_t *x_steps = steps + 4;
    for (int32_t p = 0; p < batch * channels; p++) {
        const pm_real *plane = x + pm_plane_at(x_steps, p, channels);
        pm_real *to = out + pm_plane_at(steps, p, channels);
        for (int32_t i = 0; i < height; i++) {
            const int32_t *row = rows + 3 * i;
            for (int32_t j = 0; j < width; j++) {
                const int32_t *column = columns + 3 * j;
                pm_real sum = 0;
                for (int32_t y = row[0]; y < row[1]; y++) {
                    const pm_real *from = plane + y * x_steps[2] + column[0] * x_steps[3];
                    for (int32_t z = column[1] - column[0]; z > 0; z--) {
                        sum += *from;
                        from += x_steps[3];
                    }
                }
                to[i * steps[2] + j * steps[3]] = sum / (pm_real)(divisor > 0 ? divisor : row[2] * column[2]);
            }
        }
    }
}
