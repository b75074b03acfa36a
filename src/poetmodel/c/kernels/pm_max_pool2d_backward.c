/* The gradient of pm_max_pool2d: sums, from 0 on, at the position of each largest element. dx has x_height x
   x_width, dy and indices height x width. `steps`: those of dx, dy and indices (see pm_planes.h). */
#include "pm_planes.h"
#include "pm_kernels.h"

void pm_max_pool2d_backward(pm_real *dx, const pm_real *dy, const int32_t *indices, const int32_t *steps,
                            int32_t batch, int32_t channels, int32_t x_height, int32_t x_width, int32_t height,
                            int32_t width)
{
    const int32_t *y_steps = steps + 4, *index_steps = steps + 8;
    for (int32_t p = 0; p < batch * channels; p++) {
        pm_real *to = dx + pm_plane_at(steps, p, channels);
        const pm_real *from = dy + pm_plane_at(y_steps, p, channels);
        const int32_t *places = indices + pm_plane_at(index_steps, p, channels);
        pm_clear_plane(to, steps, x_height, x_width);
        for (int32_t i = 0; i < height; i++) {
            for (int32_t j = 0; j < width; j++) {
                const int32_t place = places[i * index_steps[2] + j * index_steps[3]];
                to[place / x_width * steps[2] + place % x_width * steps[3]] += from[i * y_steps[2] + j * y_steps[3]];
            }
        }
    }
}
