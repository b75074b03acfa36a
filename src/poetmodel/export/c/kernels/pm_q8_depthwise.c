/* A quantized convolution in which each result sees the channel of its number; arguments as for pm_q8_conv2d, but
weights lie with the channels last, too: rows and columns of the window, channels. */
#include "pm_conv.h"
#include "pm_q8.h"
#include "pm_kernels.h"

/* Adds a tap to the sums of four channels; if it is `moved`, less the zero of x. */
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

/* How places see the input and the window, and what becomes of their sums. */
typedef struct {
    int32_t down, next;           /* in x, from one tap to the next */
    int32_t window_row, channels; /* the same in w */
    int32_t step, line, out_line; /* from one place to the next in x, from one line of them to the next in x and out */
    const int32_t *start;
    const pm_real *scale, *bias;
    float inverse;
    int32_t zero_x, zero;
} pm_q8_seeing;

/* Adds the taps in so many rows and columns to the sums of four channels. */
static inline void pm_q8_window(pm_q8_sums *sums, const int8_t *x, const int8_t *w, int32_t rows, int32_t columns,
                                const pm_q8_seeing *seeing, const int moved)
{
    const int32_t next = seeing->next, channels = seeing->channels, zero = seeing->zero_x;
    pm_q8_sums s = *sums;
    for (; rows > 0; rows--) {
        const int8_t *p = x, *v = w;
        for (int32_t t = columns; t > 0; t--) {
            pm_q8_tap(&s, p, v, zero, moved);
            p += next;
            v += channels;
        }
        x += seeing->down;
        w += seeing->window_row;
    }
    *sums = s;
}

#if PM_Q8_SIMD
/* Four channels of weights as halves. */
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

/* Adds the taps of a window of 3 x 3; row by row, for which the core has registers. */
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

/* Four channels of all places that see whole windows: so many lines of so many. */
static PM_OUT_OF_LINE void pm_q8_inside(int8_t *to, const int8_t *x, const int8_t *w, int32_t c, int32_t lines,
                                        int32_t places, int32_t rows, int32_t columns, const pm_q8_seeing *seeing)
{
    const int32_t channels = seeing->channels, step = seeing->step, zero = seeing->zero;
    const float inverse = seeing->inverse;
    const pm_q8_sums begin = {seeing->start[c], seeing->start[c + 1], seeing->start[c + 2], seeing->start[c + 3]};
    const float scale[4] = {(float)seeing->scale[c], (float)seeing->scale[c + 1], (float)seeing->scale[c + 2],
                            (float)seeing->scale[c + 3]};
    const float bias[4] = {(float)seeing->bias[c], (float)seeing->bias[c + 1], (float)seeing->bias[c + 2],
                           (float)seeing->bias[c + 3]};
#if PM_Q8_SIMD
    const int32_t next = seeing->next, down = seeing->down;
    pm_q8_weights weights[9];
    const int quick = rows == 3 && columns == 3;
    for (int32_t k = 0; quick && k < 9; k++) {
        const uint32_t word = pm_q8_word(w + c + k * channels);
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
                pm_q8_window(&s, from, w + c, rows, columns, seeing, 0);
            }
            out[0] = pm_q8_result(s.a, scale[0], bias[0], inverse, zero);
            out[1] = pm_q8_result(s.b, scale[1], bias[1], inverse, zero);
            out[2] = pm_q8_result(s.c, scale[2], bias[2], inverse, zero);
            out[3] = pm_q8_result(s.d, scale[3], bias[3], inverse, zero);
            out += channels;
            from += step;
        }
        to += seeing->out_line;
        x += seeing->line;
    }
}

/* A place, from channel c on; the zero of x is taken from what it sees, which need not be a whole window. */
static PM_OUT_OF_LINE void pm_q8_place(int8_t *to, const int8_t *x, const int8_t *w, int32_t rows, int32_t columns,
                                       int32_t c, const pm_q8_seeing *seeing)
{
    const pm_real *restrict const scale = seeing->scale, *restrict const bias = seeing->bias;
    const int32_t channels = seeing->channels, zero = seeing->zero;
    const float inverse = seeing->inverse;
    for (; c + 4 <= channels; c += 4) {
        pm_q8_sums s = {0, 0, 0, 0};
        pm_q8_window(&s, x + c, w + c, rows, columns, seeing, 1);
        to[c] = pm_q8_result(s.a, (float)scale[c], (float)bias[c], inverse, zero);
        to[c + 1] = pm_q8_result(s.b, (float)scale[c + 1], (float)bias[c + 1], inverse, zero);
        to[c + 2] = pm_q8_result(s.c, (float)scale[c + 2], (float)bias[c + 2], inverse, zero);
        to[c + 3] = pm_q8_result(s.d, (float)scale[c + 3], (float)bias[c + 3], inverse, zero);
    }
    for (; c < channels; c++) {
        int32_t sum = 0;
        for (int32_t r = 0; r < rows; r++) {
            const int8_t *p = x + c + r * seeing->down, *v = w + c + r * seeing->window_row;
            for (int32_t t = columns; t > 0; t--) {
                sum += (*p - seeing->zero_x) * *v;
                p += seeing->next;
                v += channels;
            }
        }
        to[c] = pm_q8_result(sum, (float)scale[c], (float)bias[c], inverse, zero);
    }
}

void pm_q8_depthwise(int8_t *out, const int8_t *x, const int8_t *w, const int32_t *start, const pm_real *scale,
                     const pm_real *bias, const int32_t *shape, int32_t batch, int32_t zero_x, pm_real inverse,
                     int32_t zero, int32_t low, int32_t high)
{
    const int32_t channels = shape[PM_IN], in_row = shape[PM_IN_W] * channels, out_row = shape[PM_OUT_W] * channels;
    const int32_t wide = (shape[PM_WINDOW_W] - 1) * shape[PM_DILATION_W];
    const int32_t tall = (shape[PM_WINDOW_H] - 1) * shape[PM_DILATION_H];
    int8_t *to = out;
    const pm_axis rows = {shape[PM_OUT_H], 0, 0, shape[PM_IN_H], shape[PM_WINDOW_H], shape[PM_DILATION_H]};
    const pm_axis columns = {shape[PM_OUT_W], 0, 0, shape[PM_IN_W], shape[PM_WINDOW_W], shape[PM_DILATION_W]};
    const pm_q8_seeing seeing = {
        .down = shape[PM_DILATION_H] * in_row,
        .next = shape[PM_DILATION_W] * channels,
        .window_row = shape[PM_WINDOW_W] * channels,
        .channels = channels,
        .step = shape[PM_STRIDE_W] * channels,
        .line = shape[PM_STRIDE_H] * in_row,
        .out_line = out_row,
        .start = start,
        .scale = scale,
        .bias = bias,
        .inverse = (float)inverse,
        .zero_x = zero_x,
        .zero = zero,
    };
    /* Places whose windows are whole: of these, four channels at a time are made apart from the others. */
    int32_t bottom, right;
    const int32_t left = pm_places(-shape[PM_PAD_W], shape[PM_STRIDE_W], columns.size - wide, columns.places, &right);
    const int32_t top = pm_places(-shape[PM_PAD_H], shape[PM_STRIDE_H], rows.size - tall, rows.places, &bottom);
    const int32_t fours = left < right ? channels & ~3 : 0;
    for (int32_t n = 0; n < batch; n++, x += rows.size * in_row, to += rows.places * out_row) {
        for (int32_t row = 0; row < rows.places; row++) {
            const int32_t i = row * shape[PM_STRIDE_H] - shape[PM_PAD_H];
            int32_t until, last;
            const int32_t first = pm_taps(&rows, i, &until);
            for (int32_t place = 0; place < columns.places; place++) {
                const int whole = top <= row && row < bottom && left <= place && place < right;
                const int32_t done = whole ? fours : 0, j = place * shape[PM_STRIDE_W] - shape[PM_PAD_W];
                if (done < channels) {
                    const int32_t across = pm_taps(&columns, j, &last);
                    const int32_t from = i * in_row + first * seeing.down + j * channels + across * seeing.next;
                    pm_q8_place(to + row * out_row + place * channels, x + from,
                                w + first * seeing.window_row + across * channels, until - first, last - across, done,
                                &seeing);
                }
            }
        }
        for (int32_t c = 0; c < fours && top < bottom; c += 4) {
            const int32_t i = top * shape[PM_STRIDE_H] - shape[PM_PAD_H];
            const int32_t j = left * shape[PM_STRIDE_W] - shape[PM_PAD_W];
            pm_q8_inside(to + top * out_row + left * channels, x + i * in_row + j * channels, w, c, bottom - top,
                         right - left, rows.taps, columns.taps, &seeing);
        }
    }
    pm_q8_limit(out, batch * rows.places * out_row, low, high);
}
