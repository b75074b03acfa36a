/* Common code of quantized convolutions. Positions with complete windows are computed separately: their sums begin
   with `start`, so that no zero is subtracted from inputs, and several are computed at once. */
#ifndef PM_Q8_WINDOWS_H
#define PM_Q8_WINDOWS_H

#include "pm_conv.h"
#include "pm_q8.h"

/* A layer; strides in elements. */
typedef struct {
    int32_t rows, columns;        /* size of a window */
    int32_t down, next;           /* strides between rows of taps, and between taps, in x */
    int32_t window_row, tap;      /* strides between rows of taps, and between taps, in w */
    int32_t step, line;           /* strides between positions, and between lines, in x */
    int32_t results;              /* number of results per position */
    int32_t out_step, out_line;   /* strides between positions, and between lines, in out */
    int32_t of_group, filter;     /* results of a group; stride between them in w */
    const int32_t *start;
    const pm_real *scale, *bias;
    float inverse;
    int32_t zero_x, zero;
} pm_q8_layer;

/* Returns a layer of `results`, whose weights have `channels` per tap; `shape` has the channels of a pixel of x and
   of out. */
static inline pm_q8_layer pm_q8_layer_of(const int32_t *shape, int32_t results, int32_t channels,
                                         const int32_t *start, const pm_real *scale, const pm_real *bias,
                                         int32_t zero_x, pm_real inverse, int32_t zero)
{
    const int32_t all = shape[PM_IN], in_row = shape[PM_IN_W] * all;
    return (pm_q8_layer){
        .rows = shape[PM_WINDOW_H],
        .columns = shape[PM_WINDOW_W],
        .down = shape[PM_DILATION_H] * in_row,
        .next = shape[PM_DILATION_W] * all,
        .window_row = shape[PM_WINDOW_W] * channels,
        .tap = channels,
        .step = shape[PM_STRIDE_W] * all,
        .line = shape[PM_STRIDE_H] * in_row,
        .results = results,
        .out_step = shape[PM_OUT],
        .out_line = shape[PM_OUT_W] * shape[PM_OUT],
        .of_group = results / shape[PM_GROUPS],
        .filter = shape[PM_WINDOW_H] * shape[PM_WINDOW_W] * channels,
        .start = start,
        .scale = scale,
        .bias = bias,
        .inverse = (float)inverse,
        .zero_x = zero_x,
        .zero = zero,
    };
}

/* Computes results of a position from `first` on, with a range of rows and columns of its window. */
typedef void pm_q8_edge(int8_t *to, const int8_t *x, const int8_t *w, int32_t rows, int32_t columns, int32_t first,
                        const pm_q8_layer *layer);
/* Computes results of a number of lines of positions with complete windows. */
typedef void pm_q8_inside(int8_t *to, const int8_t *x, const int8_t *w, int32_t lines, int32_t places,
                          const pm_q8_layer *layer);

/* Computes a layer; `inside` computes the first `most` results of a position. */
static inline void pm_q8_convolve(int8_t *out, const int8_t *x, const int8_t *w, const int32_t *shape, int32_t batch,
                                  const pm_q8_layer *layer, int32_t most, pm_q8_edge *edge, pm_q8_inside *inside)
{
    const pm_axis rows = {shape[PM_OUT_H], 0, 0, shape[PM_IN_H], shape[PM_WINDOW_H], shape[PM_DILATION_H]};
    const pm_axis columns = {shape[PM_OUT_W], 0, 0, shape[PM_IN_W], shape[PM_WINDOW_W], shape[PM_DILATION_W]};
    const int32_t in_row = shape[PM_IN_W] * shape[PM_IN], tall = (rows.taps - 1) * rows.tap_step;
    const int32_t wide = (columns.taps - 1) * columns.tap_step;
    int32_t bottom, right;
    const int32_t top = pm_places(-shape[PM_PAD_H], shape[PM_STRIDE_H], rows.size - tall, rows.places, &bottom);
    const int32_t left = pm_places(-shape[PM_PAD_W], shape[PM_STRIDE_W], columns.size - wide, columns.places, &right);
    for (int32_t n = 0; n < batch; n++) {
        for (int32_t row = 0; row < rows.places; row++) {
            const int32_t i = row * shape[PM_STRIDE_H] - shape[PM_PAD_H];
            int32_t until, last;
            const int32_t first = pm_taps(&rows, i, &until);
            for (int32_t place = 0; place < columns.places; place++) {
                const int whole = top <= row && row < bottom && left <= place && place < right;
                if (whole && most == layer->results) {
                    place = right - 1;
                    continue;
                }
                const int32_t j = place * shape[PM_STRIDE_W] - shape[PM_PAD_W];
                const int32_t across = pm_taps(&columns, j, &last);
                edge(out + row * layer->out_line + place * layer->out_step,
                     x + (i * in_row + first * layer->down + j * shape[PM_IN] + across * layer->next),
                     w + first * layer->window_row + across * layer->tap, until - first, last - across,
                     whole ? most : 0, layer);
            }
        }
        if (top < bottom && left < right) {
            const int32_t i = top * shape[PM_STRIDE_H] - shape[PM_PAD_H];
            const int32_t j = left * shape[PM_STRIDE_W] - shape[PM_PAD_W];
            inside(out + top * layer->out_line + left * layer->out_step, x + i * in_row + j * shape[PM_IN], w,
                   bottom - top, right - left, layer);
        }
        x += rows.size * in_row;
        out += rows.places * layer->out_line;
    }
}

#endif
