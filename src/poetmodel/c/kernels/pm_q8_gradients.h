/* Common code of the backward pass of int8 layers.

   Gradients are real numbers with the layout of activations, channels last. They are those of the real numbers that
   int8 represents (see pm_q8.h): of an input the sum of (gradient * scale of the result) * weight, of a weight the
   sum of gradient * (x - zero), times the scale of x. Sums of integers below 2^24 are exact; other sums have a fixed
   order.

   A trained weight has 16 bits: 256 * weight + residual, both int8. Its update is in single precision, with each
   operation rounded separately, ties to even:

       change = (sign * gradient + (256 * weight + residual) * (scale / 256) * decay) * lr / scale, 0 if it is NaN
       256 * weight + residual = clamp(rint(256 * weight + residual - 256 * change), -127 * 256, 127 * 256)

   where the residual is from -128 to 127. With PM_Q8_STOCHASTIC, a weight has 8 bits, and no residual:

       weight = clamp(floor((weight - change) + u), -127, 127)

   For element e of the weights of layer `site`, u is 2^-24 times the upper 24 bits of word e % 4 of Philox (see
   pm_random.h) with the counter (e / 4, site, 1, 0) and the key (earlier updates, seed ^ PM_SEED). */
#ifndef PM_Q8_GRADIENTS_H
#define PM_Q8_GRADIENTS_H

#include "pm_conv.h"
#include "pm_q8.h"
#ifdef PM_Q8_STOCHASTIC
#include "pm_random.h"
#endif

/* Parameters of an update. */
typedef struct {
    float lr, sign, decay;
} pm_q8_rate;

/* Returns the change of a weight in steps of int8, 0 if it is NaN; `parts` is the weight in steps of 1/256. */
static inline float pm_q8_change(int32_t parts, float gradient, float scale, const pm_q8_rate *rate)
{
    gradient *= rate->sign;
    if (rate->decay != 0.0f) {
        float own = (float)parts * (scale * 0.00390625f) * rate->decay;
        PM_Q8_TERM(own);
        gradient += own;
    }
    const float change = gradient * rate->lr / scale;
    return change == change ? change : 0.0f;
}

#ifdef PM_Q8_STOCHASTIC
/* Random numbers of the update of a layer, from element `first` on. */
typedef struct {
    uint32_t site, update, seed;
    int32_t first, block;
    pm_random_block words;
} pm_q8_draws;

/* Returns the random numbers of this update: `begun` is the number of updates before step 0, and `steps` the number of
   steps per update. `first` is the index of the first weight in its layer. */
static inline pm_q8_draws pm_q8_draws_of(int32_t site, int32_t seed, int32_t begun, int32_t steps, int32_t first)
{
    const uint32_t update = pm_random_step / (uint32_t)steps + (uint32_t)begun;
    return (pm_q8_draws){(uint32_t)site, update, (uint32_t)seed ^ PM_SEED, first, -1, {{0}}};
}

static inline float pm_q8_draw(pm_q8_draws *draws, int32_t at)
{
    const int32_t element = draws->first + at, block = element / 4;
    if (block != draws->block) {
        draws->words = pm_random_of((uint32_t)block, draws->site, 1, draws->update, draws->seed);
        draws->block = block;
    }
    return (float)(draws->words.word[element % 4] >> 8) * 0x1p-24f;
}

static inline void pm_q8_update(int8_t *weight, float gradient, float scale, const pm_q8_rate *rate, float u)
{
    float moved = (float)*weight - pm_q8_change(*weight * 256, gradient, scale, rate) + u;
    moved = moved < -127.0f ? -127.0f : moved > 127.0f ? 127.0f : moved;
    const int32_t whole = (int32_t)moved;
    *weight = (int8_t)(whole - ((float)whole > moved));
}
#else
static inline void pm_q8_update(int8_t *weight, int8_t *residual, float gradient, float scale, const pm_q8_rate *rate)
{
    const int32_t parts = *weight * 256 + *residual;
    const float most = 127.0f * 256.0f;
    float moved = (float)parts - pm_q8_change(parts, gradient, scale, rate) * 256.0f;
    moved = moved < -most ? -most : moved > most ? most : moved;
    /* Beyond 2^23 floats are integers: the sum is rounded to one. */
    const float rounded = moved + 12582912.0f;
    const int32_t all = (int32_t)(rounded - 12582912.0f);
    const int32_t high = ((all + 128 + 32768) >> 8) - 128;
    *weight = (int8_t)high;
    *residual = (int8_t)(all - 256 * high);
}
#endif

/* Destination of summed gradients of weights: memory `out`, or an update of the weights. */
typedef struct {
    pm_real *out;
    int8_t *weight;
#ifdef PM_Q8_STOCHASTIC
    pm_q8_draws *draws;
#else
    int8_t *residual;
#endif
    const pm_real *scale;
    pm_real scale_x;
    pm_q8_rate rate;
} pm_q8_sink;

/* Returns the sink that updates weights, in single precision. */
#ifdef PM_Q8_STOCHASTIC
static inline pm_q8_sink pm_q8_into(int8_t *w, pm_q8_draws *draws, const pm_real *scale, pm_real scale_x, pm_real lr,
                                    pm_real sign, pm_real decay)
{
    return (pm_q8_sink){0, w, draws, scale, (pm_real)(float)scale_x, {(float)lr, (float)sign, (float)decay}};
}
#else
static inline pm_q8_sink pm_q8_into(int8_t *w, int8_t *residual, const pm_real *scale, pm_real scale_x, pm_real lr,
                                    pm_real sign, pm_real decay)
{
    return (pm_q8_sink){0, w, residual, scale, (pm_real)(float)scale_x, {(float)lr, (float)sign, (float)decay}};
}
#endif

static inline void pm_q8_put(const pm_q8_sink *to, int32_t at, int32_t result, pm_real sum)
{
    const pm_real gradient = sum * to->scale_x;
    if (to->out) {
        to->out[at] = gradient;
    } else {
        const float scale = (float)to->scale[result];
#ifdef PM_Q8_STOCHASTIC
        pm_q8_update(to->weight + at, (float)gradient, scale, &to->rate, pm_q8_draw(to->draws, at));
#else
        pm_q8_update(to->weight + at, to->residual + at, (float)gradient, scale, &to->rate);
#endif
    }
}

/* Positions of a sum: their number, and strides in the gradient and in x. */
typedef struct {
    int32_t images, rows, columns;
    int32_t image, row, column;
    int32_t x_image, x_row, x_column;
} pm_q8_places;

#define PM_Q8_EACH_LINE(p, g, x)                                  \
    for (int32_t image_ = 0; image_ < (p)->images; image_++)      \
        for (int32_t row_ = 0, g##_ = image_ * (p)->image, x##_ = image_ * (p)->x_image; row_ < (p)->rows; \
             row_++, g##_ += (p)->row, x##_ += (p)->x_row)

/* Sums of 4 results and 4 channels, results outermost. */
static PM_OUT_OF_LINE void pm_q8_dw_4x4(pm_real *sums, const pm_real *gradient, const int8_t *x, int32_t zero,
                                        const pm_q8_places *p)
{
    pm_real a0 = 0, a1 = 0, a2 = 0, a3 = 0, b0 = 0, b1 = 0, b2 = 0, b3 = 0;
    pm_real c0 = 0, c1 = 0, c2 = 0, c3 = 0, d0 = 0, d1 = 0, d2 = 0, d3 = 0;
    PM_Q8_EACH_LINE(p, g, x)
    {
        const pm_real *from = gradient + g_;
        const int8_t *q = x + x_;
        for (int32_t n = p->columns; n > 0; n--) {
            const pm_real x0 = (pm_real)(q[0] - zero), x1 = (pm_real)(q[1] - zero);
            const pm_real x2 = (pm_real)(q[2] - zero), x3 = (pm_real)(q[3] - zero);
            pm_real g = from[0];
            a0 += g * x0, a1 += g * x1, a2 += g * x2, a3 += g * x3;
            g = from[1];
            b0 += g * x0, b1 += g * x1, b2 += g * x2, b3 += g * x3;
            g = from[2];
            c0 += g * x0, c1 += g * x1, c2 += g * x2, c3 += g * x3;
            g = from[3];
            d0 += g * x0, d1 += g * x1, d2 += g * x2, d3 += g * x3;
            from += p->column, q += p->x_column;
        }
    }
    sums[0] = a0, sums[1] = a1, sums[2] = a2, sums[3] = a3;
    sums[4] = b0, sums[5] = b1, sums[6] = b2, sums[7] = b3;
    sums[8] = c0, sums[9] = c1, sums[10] = c2, sums[11] = c3;
    sums[12] = d0, sums[13] = d1, sums[14] = d2, sums[15] = d3;
}

/* Sums of 4 results and one channel. */
static PM_OUT_OF_LINE void pm_q8_dw_4x1(pm_real *sums, const pm_real *gradient, const int8_t *x, int32_t zero,
                                        const pm_q8_places *p)
{
    pm_real a = 0, b = 0, c = 0, d = 0;
    PM_Q8_EACH_LINE(p, g, x)
    {
        const pm_real *from = gradient + g_;
        const int8_t *q = x + x_;
        for (int32_t n = p->columns; n > 0; n--) {
            const pm_real x0 = (pm_real)(*q - zero);
            a += from[0] * x0, b += from[1] * x0, c += from[2] * x0, d += from[3] * x0;
            from += p->column, q += p->x_column;
        }
    }
    sums[0] = a, sums[1] = b, sums[2] = c, sums[3] = d;
}

/* Sums of one result and 4 channels. */
static PM_OUT_OF_LINE void pm_q8_dw_1x4(pm_real *sums, const pm_real *gradient, const int8_t *x, int32_t zero,
                                        const pm_q8_places *p)
{
    pm_real a = 0, b = 0, c = 0, d = 0;
    PM_Q8_EACH_LINE(p, g, x)
    {
        const pm_real *from = gradient + g_;
        const int8_t *q = x + x_;
        for (int32_t n = p->columns; n > 0; n--) {
            const pm_real g = *from;
            a += g * (pm_real)(q[0] - zero), b += g * (pm_real)(q[1] - zero);
            c += g * (pm_real)(q[2] - zero), d += g * (pm_real)(q[3] - zero);
            from += p->column, q += p->x_column;
        }
    }
    sums[0] = a, sums[1] = b, sums[2] = c, sums[3] = d;
}

/* Sum of one result and one channel. */
static inline pm_real pm_q8_dw_one(const pm_real *gradient, const int8_t *x, int32_t zero, const pm_q8_places *p)
{
    pm_real sum = 0;
    PM_Q8_EACH_LINE(p, g, x)
    {
        const pm_real *from = gradient + g_;
        const int8_t *q = x + x_;
        for (int32_t n = p->columns; n > 0; n--) {
            sum += *from * (pm_real)(*q - zero);
            from += p->column, q += p->x_column;
        }
    }
    return sum;
}

/* Gradients of the weights between results and channels with the same positions: the first is that of `result`, at
   `at`; those of the next result are `filter` behind. */
static inline void pm_q8_dw(const pm_q8_sink *to, const pm_real *gradient, const int8_t *x, int32_t zero,
                            const pm_q8_places *p, int32_t results, int32_t channels, int32_t result, int32_t at,
                            int32_t filter)
{
    pm_real sums[16];
    for (; results >= 4; results -= 4, gradient += 4, result += 4, at += 4 * filter) {
        int32_t c = 0;
        for (; c + 4 <= channels; c += 4) {
            pm_q8_dw_4x4(sums, gradient, x + c, zero, p);
            for (int32_t k = 0; k < 16; k++) {
                pm_q8_put(to, at + (k >> 2) * filter + c + (k & 3), result + (k >> 2), sums[k]);
            }
        }
        for (; c < channels; c++) {
            pm_q8_dw_4x1(sums, gradient, x + c, zero, p);
            for (int32_t k = 0; k < 4; k++) {
                pm_q8_put(to, at + k * filter + c, result + k, sums[k]);
            }
        }
    }
    for (; results > 0; results--, gradient++, result++, at += filter) {
        int32_t c = 0;
        for (; c + 4 <= channels; c += 4) {
            pm_q8_dw_1x4(sums, gradient, x + c, zero, p);
            for (int32_t k = 0; k < 4; k++) {
                pm_q8_put(to, at + c + k, result, sums[k]);
            }
        }
        for (; c < channels; c++) {
            pm_q8_put(to, at + c, result, pm_q8_dw_one(gradient, x + c, zero, p));
        }
    }
}

/* Returns the positions at which tap (h, v) is inside the image, without images if there are none. *first and *first_x
   are the offsets of the first of them in gradient and in x, then 0. */
static inline pm_q8_places pm_q8_places_of(const int32_t *shape, int32_t batch, int32_t h, int32_t v, int32_t *first,
                                           int32_t *first_x)
{
    const int32_t down = h * shape[PM_DILATION_H] - shape[PM_PAD_H], channels = shape[PM_IN], results = shape[PM_OUT];
    const int32_t across = v * shape[PM_DILATION_W] - shape[PM_PAD_W];
    const int32_t x_row = shape[PM_IN_W] * channels, row = shape[PM_OUT_W] * results;
    int32_t bottom, right;
    const int32_t top = pm_places(down, shape[PM_STRIDE_H], shape[PM_IN_H], shape[PM_OUT_H], &bottom);
    const int32_t left = pm_places(across, shape[PM_STRIDE_W], shape[PM_IN_W], shape[PM_OUT_W], &right);
    const int any = top < bottom && left < right;
    *first = any ? top * row + left * results : 0;
    *first_x = any ? (top * shape[PM_STRIDE_H] + down) * x_row + (left * shape[PM_STRIDE_W] + across) * channels : 0;
    return (pm_q8_places){.images = any ? batch : 0,
                          .rows = bottom - top,
                          .columns = right - left,
                          .image = shape[PM_OUT_H] * row,
                          .row = row,
                          .column = results,
                          .x_image = shape[PM_IN_H] * x_row,
                          .x_row = shape[PM_STRIDE_H] * x_row,
                          .x_column = shape[PM_STRIDE_W] * channels};
}

/* Gradients of `count` weights of a layer of pixels, from `first` on; pixels of the gradient have `results`
   elements. */
static inline void pm_q8_pointwise_dw_to(const pm_q8_sink *to, const pm_real *gradient, const int8_t *x, int32_t pixels,
                                         int32_t in, int32_t results, int32_t zero, int32_t first, int32_t count)
{
    const pm_q8_places all = {.images = 1, .rows = 1, .columns = pixels, .column = results, .x_column = in};
    for (int32_t at = first, left = count; left > 0;) {
        const int32_t result = at / in, channel = at % in;
        if (channel == 0 && left >= in) {
            const int32_t rows = left / in;
            pm_q8_dw(to, gradient + result, x, zero, &all, rows, in, result, at - first, in);
            at += rows * in, left -= rows * in;
        } else {
            const int32_t n = PM_MIN(in - channel, left);
            pm_q8_dw(to, gradient + result, x + channel, zero, &all, 1, n, result, at - first, in);
            at += n, left -= n;
        }
    }
}

/* Gradients of `count` weights of a convolution, from `first` on: tap by tap of each result. */
static inline void pm_q8_conv2d_dw_part(const pm_q8_sink *to, const pm_real *gradient, const int8_t *x,
                                        const int32_t *shape, int32_t batch, int32_t zero, int32_t first, int32_t count)
{
    const int32_t groups = shape[PM_GROUPS], channels = shape[PM_IN] / groups, results = shape[PM_OUT] / groups;
    const int32_t window = shape[PM_WINDOW_H] * shape[PM_WINDOW_W];
    for (int32_t at = first, n = 0; at < first + count; at += n) {
        const int32_t channel = at % channels, tap = at / channels % window, result = at / channels / window;
        int32_t begin, begin_x;
        const pm_q8_places p =
            pm_q8_places_of(shape, batch, tap / shape[PM_WINDOW_W], tap % shape[PM_WINDOW_W], &begin, &begin_x);
        n = PM_MIN(channels - channel, first + count - at);
        pm_q8_dw(to, gradient + begin + result, x + begin_x + result / results * channels + channel, zero, &p, 1, n,
                 result, at - first, 0);
    }
}

/* Gradients of all weights of the first results; of all results if there are groups. */
static inline void pm_q8_conv2d_dw_whole(const pm_q8_sink *to, const pm_real *gradient, const int8_t *x,
                                         const int32_t *shape, int32_t batch, int32_t zero, int32_t results)
{
    const int32_t groups = shape[PM_GROUPS], channels = shape[PM_IN] / groups;
    const int32_t window = shape[PM_WINDOW_H] * shape[PM_WINDOW_W], filter = window * channels;
    results /= groups;
    for (int32_t tap = 0; tap < window; tap++) {
        int32_t first, first_x;
        const pm_q8_places p =
            pm_q8_places_of(shape, batch, tap / shape[PM_WINDOW_W], tap % shape[PM_WINDOW_W], &first, &first_x);
        for (int32_t g = 0; g < groups; g++) {
            pm_q8_dw(to, gradient + first + g * results, x + first_x + g * channels, zero, &p, results, channels,
                     g * results, g * results * filter + tap * channels, filter);
        }
    }
}

/* Gradients of `count` weights of a convolution, from `first` on; `shape` has the results of a pixel of the
   gradient. */
static inline void pm_q8_conv2d_dw_to(const pm_q8_sink *to, const pm_real *gradient, const int8_t *x,
                                      const int32_t *shape, int32_t batch, int32_t zero, int32_t first, int32_t count)
{
    const int32_t groups = shape[PM_GROUPS];
    const int32_t filter = shape[PM_IN] / groups * shape[PM_WINDOW_H] * shape[PM_WINDOW_W];
    if (groups == 1 ? first == 0 && count % filter == 0 : count == shape[PM_OUT] * filter) {
        pm_q8_conv2d_dw_whole(to, gradient, x, shape, batch, zero, count / filter);
    } else {
        pm_q8_conv2d_dw_part(to, gradient, x, shape, batch, zero, first, count);
    }
}

/* Sums of 4 channels of a depthwise convolution. */
static PM_OUT_OF_LINE void pm_q8_dw_each(pm_real *sums, const pm_real *gradient, const int8_t *x, int32_t zero,
                                         const pm_q8_places *p)
{
    pm_real a = 0, b = 0, c = 0, d = 0;
    PM_Q8_EACH_LINE(p, g, x)
    {
        const pm_real *from = gradient + g_;
        const int8_t *q = x + x_;
        for (int32_t n = p->columns; n > 0; n--) {
            a += from[0] * (pm_real)(q[0] - zero);
            b += from[1] * (pm_real)(q[1] - zero);
            c += from[2] * (pm_real)(q[2] - zero);
            d += from[3] * (pm_real)(q[3] - zero);
            from += p->column, q += p->x_column;
        }
    }
    sums[0] = a, sums[1] = b, sums[2] = c, sums[3] = d;
}

/* Gradients of the weights of a tap of a depthwise convolution: of channels from c to below `end`, from `at` on. */
static inline void pm_q8_depthwise_dw_tap(const pm_q8_sink *to, const pm_real *gradient, const int8_t *x,
                                          const int32_t *shape, int32_t batch, int32_t zero, int32_t tap, int32_t c,
                                          int32_t end, int32_t at)
{
    int32_t begin, begin_x;
    const pm_q8_places p =
        pm_q8_places_of(shape, batch, tap / shape[PM_WINDOW_W], tap % shape[PM_WINDOW_W], &begin, &begin_x);
    for (; c + 4 <= end; at += 4, c += 4) {
        pm_real sums[4];
        pm_q8_dw_each(sums, gradient + begin + c, x + begin_x + c, zero, &p);
        for (int32_t k = 0; k < 4; k++) {
            pm_q8_put(to, at + k, c + k, sums[k]);
        }
    }
    for (; c < end; at++, c++) {
        pm_q8_put(to, at, c, pm_q8_dw_one(gradient + begin + c, x + begin_x + c, zero, &p));
    }
}

/* Gradients of `count` weights of a depthwise convolution, from `first` on, with channels last. */
static inline void pm_q8_depthwise_dw_to(const pm_q8_sink *to, const pm_real *gradient, const int8_t *x,
                                         const int32_t *shape, int32_t batch, int32_t zero, int32_t first,
                                         int32_t count)
{
    const int32_t channels = shape[PM_IN], end = first + count;
    for (int32_t at = first, last; at < end; at = last) {
        const int32_t tap = at / channels, c = at % channels;
        last = PM_MIN(end, (tap + 1) * channels);
        pm_q8_depthwise_dw_tap(to, gradient, x, shape, batch, zero, tap, c, c + last - at, at - first);
    }
}

/* The taps that use a row or column of the image, and the positions of their windows. */
typedef struct {
    int32_t tap, taps, tap_step;
    int32_t place, place_step;
} pm_q8_reach;

/* Returns the taps and positions for row or column i; successive taps are `between` taps of a window apart, as
   strides require. */
static inline pm_q8_reach pm_q8_reached(int32_t i, int32_t window, int32_t stride, int32_t dilation, int32_t pad,
                                        int32_t places, int32_t between)
{
    int32_t tap = 0, end = 0;
    while (tap < between && tap < window && (i + pad - tap * dilation) % stride != 0) {
        tap++;
    }
    if (tap == between || tap >= window) {
        return (pm_q8_reach){0, 0, 0, 0, 0};
    }
    const int32_t place = (i + pad - tap * dilation) / stride, step = -(between * dilation) / stride;
    const pm_axis axis = {1, 0, 1, places, (window - tap + between - 1) / between, step};
    const int32_t first = pm_taps(&axis, place, &end);
    return (pm_q8_reach){tap + first * between, end - first, between, place + first * step, step};
}

/* Returns the distance between taps that use the same row or column. */
static inline int32_t pm_q8_between(int32_t stride, int32_t dilation)
{
    int32_t between = 1;
    while (between * dilation % stride != 0) {
        between++;
    }
    return between;
}

static inline pm_q8_reach pm_q8_rows_reached(const int32_t *shape, int32_t i, int32_t between)
{
    return pm_q8_reached(i, shape[PM_WINDOW_H], shape[PM_STRIDE_H], shape[PM_DILATION_H], shape[PM_PAD_H],
                         shape[PM_OUT_H], between);
}

static inline pm_q8_reach pm_q8_columns_reached(const int32_t *shape, int32_t j, int32_t between)
{
    return pm_q8_reached(j, shape[PM_WINDOW_W], shape[PM_STRIDE_W], shape[PM_DILATION_W], shape[PM_PAD_W],
                         shape[PM_OUT_W], between);
}

/* The windows that use a pixel: their rows and columns, and the first element and the strides in the gradient and in
   w. */
typedef struct {
    int32_t rows, columns;
    int32_t first, down, across;
    int32_t w_first, w_down, w_across;
} pm_q8_seen;

/* Returns the windows for rows and columns; positions of the gradient are `step` elements apart, taps of w `tap`. */
static inline pm_q8_seen pm_q8_seen_by(const int32_t *shape, const pm_q8_reach *down, const pm_q8_reach *across,
                                       int32_t step, int32_t tap)
{
    const int32_t line = shape[PM_OUT_W] * step, window_row = shape[PM_WINDOW_W] * tap;
    return (pm_q8_seen){.rows = across->taps ? down->taps : 0,
                        .columns = across->taps,
                        .first = down->place * line + across->place * step,
                        .down = down->place_step * line,
                        .across = across->place_step * step,
                        .w_first = down->tap * window_row + across->tap * tap,
                        .w_down = down->tap_step * window_row,
                        .w_across = across->tap_step * tap};
}

#endif
