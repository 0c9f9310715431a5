/* Norms, turns and copies of rows, and the hyper-connections between them. */
#include "kernels.h"

/* y = x [R, W], normed (eps >= 0) with or without a gain [W], then turned (cos, sin not NULL) by the angles of row
 * r / heads, `stride` apart; sign -1 turns back. y may be x. */
EXPORT CLONES void ms_norm_turn(const float *x, float *y, i64 rows, i64 width, const float *gain, float eps,
                                const float *cos, const float *sin, i64 stride, i64 heads, float sign)
{
    for (i64 r = 0; r < rows; r++, x += width, y += width) {
        float scale = eps >= 0 ? mean_square_rsqrt(x, width, eps) : 1;
        if (gain)
            for (i64 i = 0; i < width; i++)
                y[i] = x[i] * scale * gain[i];
        else
            for (i64 i = 0; i < width; i++)
                y[i] = x[i] * scale;
        if (!cos)
            continue;
        const float *c = cos + r / heads * stride, *s = sin + r / heads * stride;
        for (i64 i = 0; i < width; i += 2) {
            float even = y[i], odd = y[i + 1];
            y[i] = even * c[i] + sign * (odd * s[i]);
            y[i + 1] = odd * c[i + 1] + sign * (even * s[i + 1]);
        }
    }
}

/* What a compressor's state stores: y [G, 2C] = [value | score + ape [ratio, C] of the position]. */
EXPORT CLONES void ms_state_rows(const float *value, const float *score, const float *ape, const i64 *position,
                                 float *y, i64 rows, i64 columns, i64 ratio)
{
    for (i64 r = 0; r < rows; r++, value += columns, score += columns, y += 2 * columns) {
        const float *add = ape + position[r] % ratio * columns;
        memcpy(y, value, columns * sizeof(float));
        for (i64 i = 0; i < columns; i++)
            y[columns + i] = score[i] + add[i];
    }
}

/* pool[slot[i]] = rows[source[i]]; the number of i that name a row beyond either, which are left out. */
EXPORT i64 ms_write_rows(char *pool, i64 slots, const char *rows, i64 sources, const i64 *source, const i64 *slot,
                         i64 count, i64 row_bytes)
{
    i64 wrong = 0;
    for (i64 i = 0; i < count; i++)
        if (slot[i] >= 0 && slot[i] < slots && source[i] >= 0 && source[i] < sources)
            memcpy(pool + slot[i] * row_bytes, rows + source[i] * row_bytes, row_bytes);
        else
            wrong++;
    return wrong;
}

/* y [T, H] = shared + the outputs of a row's routes, in route order; sorted row s of outputs is route order[s]. */
EXPORT CLONES void ms_add_routes(const float *shared, const float *outputs, const i64 *order, i64 sent, float *y,
                                 i64 rows, i64 routes, i64 H)
{
    for (i64 t = 0; t < rows; t++, y += H) {
        memcpy(y, shared + t * H, H * sizeof(float));
        for (i64 k = 0; k < routes; k++) {
            i64 s = 0;
            while (s < sent && order[s] != t * routes + k)
                s++;
            for (i64 i = 0; i < H; i++)
                y[i] += s < sent ? outputs[s * H + i] : 0;
        }
    }
}

/* Gate logits [T, E] on their way to softplus: y = -|x|, and positive = max(x, 0). Mutates x into y. */
EXPORT void ms_softplus_parts(float *x, float *positive, i64 count)
{
    for (i64 i = 0; i < count; i++) {
        positive[i] = x[i] < 0 ? 0 : x[i];
        x[i] = -fabsf(x[i]);
    }
}

INLINE int before(float a, float b)
{
    /* NaN comes first. */
    return isnan(a) ? !isnan(b) : a > b;
}

INLINE i64 best_left(const float *scores, const float *bias, i64 E, const i64 *chosen, i64 taken)
{
    i64 best = -1;
    for (i64 e = 0; e < E; e++) {
        int left = 1;
        for (i64 j = 0; j < taken; j++)
            left &= chosen[j] != e;
        if (left && (best < 0 || before(scores[e] + bias[e], scores[best] + bias[best])))
            best = e;
    }
    return best;
}

/* Of scores [T, E] for each row the experts, `routes` of them: with a bias [E] those of the highest score + bias, ties
 * to the lowest, without one as chosen says; and their share of the sum of their scores. 1 where there is no such
 * expert, else 0. */
EXPORT i64 ms_route(const float *scores, const float *bias, i64 T, i64 E, i64 routes, float floor, float factor,
                    i64 *chosen, float *weight)
{
    for (i64 t = 0; t < T; t++, scores += E, chosen += routes, weight += routes) {
        float sum = 0;
        for (i64 k = 0; k < routes; k++) {
            if (bias)
                chosen[k] = best_left(scores, bias, E, chosen, k);
            else if (chosen[k] < 0 || chosen[k] >= E)
                return 1;
            sum = k ? sum + scores[chosen[k]] : scores[chosen[k]];
        }
        for (i64 k = 0; k < routes; k++)
            weight[k] = scores[chosen[k]] / (sum + floor) * factor;
    }
    return 0;
}

/* Routes chosen [T * k] of rows that are valid (NULL: all), sorted by expert and then by route: the route, row and
 * weight of each, and their number by expert. Their number; -1 where there is no such expert. */
EXPORT i64 ms_sort_routes(const i64 *chosen, const float *weights, const uint8_t *valid, i64 T, i64 routes, i64 E,
                          i64 *order, i64 *row, float *weight, i64 *counts)
{
    i64 sent = 0;
    for (i64 r = 0; r < T * routes; r++)
        if (chosen[r] >= E)
            return -1;
    for (i64 e = 0; e < E; e++) {
        i64 first = sent;
        for (i64 r = 0; r < T * routes; r++)
            if (chosen[r] == e && (!valid || valid[r / routes])) {
                order[sent] = r;
                row[sent] = r / routes;
                weight[sent++] = weights[r];
            }
        counts[e] = sent - first;
    }
    return sent;
}
