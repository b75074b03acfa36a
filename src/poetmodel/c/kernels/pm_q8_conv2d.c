/* `count` results of a quantized convolution (see pm_q8.h, and pm_conv.h for `shape`, whose last number is unused;
   its results are those of a pixel of out). w has for each result rows, columns and channels of its window, those of
   its group. start is as for pm_q8_pointwise, and zero_x the zero of x, which is also the value outside of the
   image. Two results computed at once are in one group. */
#include "pm_q8_windows.h"
#include "pm_kernels.h"

/* One position. */
static PM_OUT_OF_LINE void pm_q8_seen(int8_t *to, const int8_t *x, const int8_t *w, int32_t rows, int32_t columns,
                                      int32_t first, const pm_q8_layer *layer)
{
    const pm_real *restrict const scale = layer->scale, *restrict const bias = layer->bias;
    const int32_t channels = layer->tap, results = layer->results, of_group = layer->of_group;
    const int32_t next = layer->next, down = layer->down, filter = layer->filter, zero_x = layer->zero_x;
    const float inverse = layer->inverse;
    const int32_t in_line = next == channels; /* a row of a window is contiguous */
    const int32_t runs = in_line ? columns > 0 : columns, length = in_line ? columns * channels : channels;
    for (int32_t c = first, e; c < results; c = e + 1) {
        e = c % of_group + 1 < of_group ? c + 1 : c;
        pm_q8_sums s = {0, 0, 0, 0};
        const int8_t *x_row = x + c / of_group * channels, *w_row = w + c * filter;
        for (int32_t r = rows; r > 0; r--) {
            const int8_t *p = x_row, *v = w_row;
            for (int32_t run = runs; run > 0; run--) {
                pm_q8_dots_of_one(&s, p, v, v + (e - c) * filter, length, zero_x, 1);
                p += next;
                v += channels;
            }
            x_row += down;
            w_row += layer->window_row;
        }
        to[c] = pm_q8_result(s.a, (float)scale[c], (float)bias[c], inverse, layer->zero);
        to[e] = pm_q8_result(s.c, (float)scale[e], (float)bias[e], inverse, layer->zero);
    }
}

/* Results c and c + other of a number of lines, two positions at once. */
static PM_OUT_OF_LINE void pm_q8_pair(int8_t *to, const int8_t *x, const int8_t *w, int32_t lines, int32_t places,
                                      int32_t c, int32_t other, const pm_q8_layer *layer)
{
    const float scale_0 = (float)layer->scale[c], scale_1 = (float)layer->scale[c + other];
    const float bias_0 = (float)layer->bias[c], bias_1 = (float)layer->bias[c + other], inverse = layer->inverse;
    const int32_t start_0 = layer->start[c], start_1 = layer->start[c + other], zero = layer->zero;
    const int32_t next = layer->next, channels = layer->tap, filter = other * layer->filter;
    const int32_t in_line = next == channels, runs = in_line ? 1 : layer->columns;
    const int32_t length = in_line ? layer->columns * channels : channels;
    /* With an odd number, the last two overlap with the two before; a single position is computed twice. */
    const int32_t step = places > 1 ? layer->step : 0, out_step = places > 1 ? layer->out_step : 0;
    for (; lines > 0; lines--) {
        for (int32_t k = 0; k < places; k += 2) {
            const int32_t place = k + 1 < places || k == 0 ? k : k - 1;
            const int8_t *x_row = x + place * step, *w_row = w;
            int8_t *const out = to + place * out_step;
            pm_q8_sums s = {start_0, start_0, start_1, start_1};
            for (int32_t r = layer->rows; r > 0; r--) {
                const int8_t *p = x_row, *v = w_row;
                for (int32_t run = runs; run > 0; run--) {
                    pm_q8_dots(&s, p, v, length, step, filter);
                    p += next;
                    v += channels;
                }
                x_row += layer->down;
                w_row += layer->window_row;
            }
            out[0] = pm_q8_result(s.a, scale_0, bias_0, inverse, zero);
            out[other] = pm_q8_result(s.c, scale_1, bias_1, inverse, zero);
            out[out_step] = pm_q8_result(s.b, scale_0, bias_0, inverse, zero);
            out[out_step + other] = pm_q8_result(s.d, scale_1, bias_1, inverse, zero);
        }
        to += layer->out_line;
        x += layer->line;
    }
}

static void pm_q8_whole(int8_t *to, const int8_t *x, const int8_t *w, int32_t lines, int32_t places,
                        const pm_q8_layer *layer)
{
    for (int32_t c = 0, other; c < layer->results; c += 1 + other) {
        other = c % layer->of_group + 1 < layer->of_group;
        pm_q8_pair(to + c, x + c / layer->of_group * layer->tap, w + c * layer->filter, lines, places, c, other, layer);
    }
}

void pm_q8_conv2d(int8_t *out, const int8_t *x, const int8_t *w, const int32_t *start, const pm_real *scale,
                  const pm_real *bias, const int32_t *shape, int32_t batch, int32_t count, int32_t zero_x,
                  pm_real inverse, int32_t zero, int32_t low, int32_t high)
{
    const int32_t channels = shape[PM_IN] / shape[PM_GROUPS];
    const pm_q8_layer layer = pm_q8_layer_of(shape, count, channels, start, scale, bias, zero_x, inverse, zero);
    pm_q8_convolve(out, x, w, shape, batch, &layer, layer.results, pm_q8_seen, pm_q8_whole);
    pm_q8_limit(out, batch * shape[PM_OUT_H] * shape[PM_OUT_W], count, layer.out_step, low, high);
}
