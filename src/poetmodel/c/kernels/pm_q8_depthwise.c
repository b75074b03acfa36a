/* A quantized depthwise convolution: each result uses the channel with its number. Arguments are as for
   pm_q8_conv2d, but weights also have channels last: rows and columns of the window, channels; their number is the
   last number of `shape` if it differs from `count`. */
#include "pm_q8_windows.h"
#include "pm_kernels.h"

/* Adds a tap to the sums of four channels; if it is `moved`, minus the zero of x. */
static inline void pm_q8_tap(pm_q8_sums *s, const int8_t *x, const int8_t *w, int32_t zero, const int moved)
{
#if PM_Q8_SIMD
    const uint32_t word = pm_q8_word(x), weights = pm_q8_word(w);
    int16x2_t even = pm_q8_even(word), odd = pm_q8_odd(word);
    if (moved) {
        even = __ssub16(even, pm_q8_halves(zero)), odd = __ssub16(odd, pm_q8_halves(zero));
    }
    const int16x2_t w_even = pm_q8_even(weights), w_odd = pm_q8_odd(weights);
    s->a = __smlabb(even, w_even, s->a);
    s->b = __smlabb(odd, w_odd, s->b);
    s->c = __smlatt(even, w_even, s->c);
    s->d = __smlatt(odd, w_odd, s->d);
#else
    zero = moved ? zero : 0;
    s->a += (x[0] - zero) * w[0];
    s->b += (x[1] - zero) * w[1];
    s->c += (x[2] - zero) * w[2];
    s->d += (x[3] - zero) * w[3];
#endif
}

/* Adds the taps in a number of rows and columns to the sums of four channels. */
static inline void pm_q8_window(pm_q8_sums *sums, const int8_t *x, const int8_t *w, int32_t rows, int32_t columns,
                                const pm_q8_layer *layer, const int moved)
{
    const int32_t next = layer->next, channels = layer->tap, zero = layer->zero_x;
    pm_q8_sums s = *sums;
    for (; rows > 0; rows--) {
        const int8_t *p = x, *v = w;
        for (int32_t t = columns; t > 0; t--) {
            pm_q8_tap(&s, p, v, zero, moved);
            p += next;
            v += channels;
        }
        x += layer->down;
        w += layer->window_row;
    }
    *sums = s;
}

#if PM_Q8_SIMD
/* Four channels of weights as halves of words. */
typedef struct {
    int16x2_t even, odd;
} pm_q8_weights;

static inline void pm_q8_weighted(pm_q8_sums *s, const int8_t *x, const pm_q8_weights *w)
{
    const uint32_t word = pm_q8_word(x);
    const int16x2_t even = pm_q8_even(word), odd = pm_q8_odd(word);
    s->a = __smlabb(even, w->even, s->a);
    s->b = __smlabb(odd, w->odd, s->b);
    s->c = __smlatt(even, w->even, s->c);
    s->d = __smlatt(odd, w->odd, s->d);
}

/* Adds the taps of a 3 x 3 window row by row, for which the core has enough registers. */
static inline void pm_q8_3x3(pm_q8_sums *s, const int8_t *x, const pm_q8_weights *w, int32_t next, int32_t down)
{
    for (const pm_q8_weights *end = w + 9; w != end; w += 3) {
        pm_q8_weighted(s, x, w);
        pm_q8_weighted(s, x + next, w + 1);
        pm_q8_weighted(s, x + 2 * next, w + 2);
        x += down;
    }
}
#endif

/* Four channels, from c on, of a number of lines. */
static PM_OUT_OF_LINE void pm_q8_four(int8_t *to, const int8_t *x, const int8_t *w, int32_t lines, int32_t places,
                                      int32_t c, const pm_q8_layer *layer)
{
    const int32_t step = layer->step, out_step = layer->out_step, zero = layer->zero;
    const float inverse = layer->inverse;
    const pm_q8_sums begin = {layer->start[c], layer->start[c + 1], layer->start[c + 2], layer->start[c + 3]};
    const float scale[4] = {(float)layer->scale[c], (float)layer->scale[c + 1], (float)layer->scale[c + 2],
                            (float)layer->scale[c + 3]};
    const float bias[4] = {(float)layer->bias[c], (float)layer->bias[c + 1], (float)layer->bias[c + 2],
                           (float)layer->bias[c + 3]};
#if PM_Q8_SIMD
    const int32_t next = layer->next, down = layer->down;
    pm_q8_weights weights[9];
    const int quick = layer->rows == 3 && layer->columns == 3;
    for (int32_t k = 0; quick && k < 9; k++) {
        const uint32_t word = pm_q8_word(w + c + k * layer->tap);
        weights[k] = (pm_q8_weights){pm_q8_even(word), pm_q8_odd(word)};
    }
#endif
    for (; lines > 0; lines--) {
        const int8_t *from = x + c;
        int8_t *out = to + c;
        for (int32_t left = places; left > 0; left--) {
            pm_q8_sums s = begin;
#if PM_Q8_SIMD
            if (quick) {
                pm_q8_3x3(&s, from, weights, next, down);
            } else
#endif
            {
                pm_q8_window(&s, from, w + c, layer->rows, layer->columns, layer, 0);
            }
            out[0] = pm_q8_result(s.a, scale[0], bias[0], inverse, zero);
            out[1] = pm_q8_result(s.b, scale[1], bias[1], inverse, zero);
            out[2] = pm_q8_result(s.c, scale[2], bias[2], inverse, zero);
            out[3] = pm_q8_result(s.d, scale[3], bias[3], inverse, zero);
            out += out_step;
            from += step;
        }
        to += layer->out_line;
        x += layer->line;
    }
}

static void pm_q8_whole(int8_t *to, const int8_t *x, const int8_t *w, int32_t lines, int32_t places,
                        const pm_q8_layer *layer)
{
    for (int32_t c = 0; c + 4 <= layer->results; c += 4) {
        pm_q8_four(to, x, w, lines, places, c, layer);
    }
}

/* One position; the channels after the last multiple of four are always computed here. */
static PM_OUT_OF_LINE void pm_q8_seen(int8_t *to, const int8_t *x, const int8_t *w, int32_t rows, int32_t columns,
                                      int32_t first, const pm_q8_layer *layer)
{
    const pm_real *restrict const scale = layer->scale, *restrict const bias = layer->bias;
    const int32_t channels = layer->results, zero = layer->zero;
    const float inverse = layer->inverse;
    int32_t c = first;
    for (; c + 4 <= channels; c += 4) {
        pm_q8_sums s = {0, 0, 0, 0};
        pm_q8_window(&s, x + c, w + c, rows, columns, layer, 1);
        to[c] = pm_q8_result(s.a, (float)scale[c], (float)bias[c], inverse, zero);
        to[c + 1] = pm_q8_result(s.b, (float)scale[c + 1], (float)bias[c + 1], inverse, zero);
        to[c + 2] = pm_q8_result(s.c, (float)scale[c + 2], (float)bias[c + 2], inverse, zero);
        to[c + 3] = pm_q8_result(s.d, (float)scale[c + 3], (float)bias[c + 3], inverse, zero);
    }
    for (; c < channels; c++) {
        int32_t sum = 0;
        for (int32_t r = 0; r < rows; r++) {
            const int8_t *p = x + c + r * layer->down, *v = w + c + r * layer->window_row;
            for (int32_t t = columns; t > 0; t--) {
                sum += (*p - layer->zero_x) * *v;
                p += layer->next;
                v += layer->tap;
            }
        }
        to[c] = pm_q8_result(sum, (float)scale[c], (float)bias[c], inverse, zero);
    }
}

void pm_q8_depthwise(int8_t *out, const int8_t *x, const int8_t *w, const int32_t *start, const pm_real *scale,
                     const pm_real *bias, const int32_t *shape, int32_t batch, int32_t count, int32_t zero_x,
                     pm_real inverse, int32_t zero, int32_t low, int32_t high)
{
    const int32_t channels = shape[PM_FILTER] ? shape[PM_FILTER] : count;
    const pm_q8_layer layer = pm_q8_layer_of(shape, count, channels, start, scale, bias, zero_x, inverse, zero);
    pm_q8_convolve(out, x, w, shape, batch, &layer, layer.results & ~3, pm_q8_seen, pm_q8_whole);
    pm_q8_limit(out, batch * shape[PM_OUT_H] * shape[PM_OUT_W], count, layer.out_step, low, high);
}
