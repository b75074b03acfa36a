/* The gradient of pm_max_pool2d_places: sums, from 0 on, at the position of each largest element. dx has x_height x
   x_width, dy and places height x width, and `rows`, `columns` and their steps are those of pm_max_pool2d_places.
   `steps`: those of dx, dy and places (see pm_planes.h). */
#include "pm_planes.h"
#include "pm_kernels.h"

void pm_max_pool2d_places_backward(pm_real *dx, const pm_real *dy, const uint8_t *places, const int32_t *rows,
                                   const int32_t *columns, const int32_t *steps, int32_t batch, int32_t channels,
                                   int32_t x_height, int32_t x_width, int32_t height, int32_t width, int32_t row_step,
                                   int32_t column_step)
{
    const int32_t *y_steps = steps + 4, *place_steps = steps + 8;
    for (int32_t p = 0; p < batch * channels; p++) {
        pm_real *to = dx + pm_plane_at(steps, p, channels);
        const pm_real *from = dy + pm_plane_at(y_steps, p, channels);
        const uint8_t *place = places + pm_plane_at(place_steps, p, channels);
        pm_clear_plane(to, steps, x_height, x_width);
        for (int32_t i = 0; i < height; i++) {
            for (int32_t j = 0; j < width; j++) {
                const int32_t at = place[i * place_steps[2] + j * place_steps[3]];
                const int32_t wide = (columns[2 * j + 1] - columns[2 * j] + column_step - 1) / column_step;
                const int32_t y = rows[2 * i] + at / wide * row_step, z = columns[2 * j] + at % wide * column_step;
                to[y * steps[2] + z * steps[3]] += from[i * y_steps[2] + j * y_steps[3]];
            }
        }
    }
}
