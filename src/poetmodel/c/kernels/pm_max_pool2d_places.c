/* As pm_max_pool2d, but places = number of the largest element in its window, row by row, below 256, for
   pm_max_pool2d_places_backward. `steps`: those of out, places and x (see pm_planes.h). */
#include "pm_planes.h"
#include "pm_kernels.h"

void pm_max_pool2d_places(pm_real *out, uint8_t *places, const pm_real *x, const int32_t *rows, const int32_t *columns,
                          const int32_t *steps, int32_t batch, int32_t channels, int32_t height, int32_t width,
                          int32_t row_step, int32_t column_step)
{
    const int32_t *place_steps = steps + 4, *x_steps = steps + 8;
    for (int32_t p = 0; p < batch * channels; p++) {
        const pm_real *plane = x + pm_plane_at(x_steps, p, channels);
        pm_real *to = out + pm_plane_at(steps, p, channels);
        uint8_t *place = places + pm_plane_at(place_steps, p, channels);
        for (int32_t i = 0; i < height; i++) {
            for (int32_t j = 0; j < width; j++) {
                pm_real best = -PM_INFINITY;
                int32_t number = 0, at = 0;
                for (int32_t y = rows[2 * i]; y < rows[2 * i + 1]; y += row_step) {
                    const pm_real *row = plane + y * x_steps[2];
                    for (int32_t z = columns[2 * j]; z < columns[2 * j + 1]; z += column_step) {
                        const pm_real v = row[z * x_steps[3]];
                        if (v > best || v != v) {
                            best = v;
                            at = number;
                        }
                        number++;
                    }
                }
                to[i * steps[2] + j * steps[3]] = best;
                place[i * place_steps[2] + j * place_steps[3]] = (uint8_t)at;
            }
        }
    }
}
