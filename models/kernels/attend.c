/* Attention of small steps over tiles of rows, the keys straight from where they are.
 *
 * A lane's source is a fresh row (0 or more), nothing (-1: zeros), or the pool's row -2 - source. Rows attend `shared`
 * lanes where admitted, then `entries` lanes where selected or, without a selection, the first `visible` ones. */
#include "kernels.h"

#define MOST_LANES 2048
#define MOST_COLUMNS 512

typedef struct {
    const float *fresh, *pool;
    const i64 *source;
    i64 count;
} lane_set;

typedef struct {
    i64 tiles, rows, heads, columns;
    const i64 *row; /* [N, R] into q and y, below 0 for none */
    lane_set shared, entries;
    const uint8_t *admitted, *selected; /* [N, R, shared.count], [N, R, entries.count] */
    const i64 *visible;                 /* [N, R] */
    float scale;
    i64 block_scores, block_values;
} task;

static const float zeros[MOST_COLUMNS];

static void find_keys(const task *p, i64 tile, const float **key)
{
    for (int set = 0; set < 2; set++) {
        const lane_set *from = set ? &p->entries : &p->shared;
        for (i64 i = 0; i < from->count; i++) {
            i64 source = from->source[tile * from->count + i];
            *key++ = source >= 0 ? from->fresh + source * p->columns
                     : source == -1 ? zeros : from->pool + (-2 - source) * p->columns;
        }
    }
}

INLINE int attends(const task *p, i64 row, i64 lane)
{
    i64 entry = lane - p->shared.count;
    if (entry < 0)
        return p->admitted[row * p->shared.count + lane];
    return p->selected ? p->selected[row * p->entries.count + entry] : entry < p->visible[row];
}

/* Scores y [N, R, A, lanes + 1] of queries q [T, A, D], minus infinity where a row does not attend, the sink behind. */
EXPORT CLONES void ms_scores(const task *p, const float *q, const float *sink, float *y)
{
    i64 A = p->heads, D = p->columns, all = p->shared.count + p->entries.count, need[MOST_LANES + LANES];
    const float *key[MOST_LANES];
    lanes query[MOST_COLUMNS];
    for (i64 tile = 0; tile < p->tiles; tile++) {
        find_keys(p, tile, key);
        const i64 *row = p->row + tile * p->rows;
        for (i64 i = 0; i < p->rows * A; i++) {
            float *to = y + (tile * p->rows * A + i) * (all + 1);
            for (i64 lane = 0; lane < all; lane++)
                to[lane] = -INFINITY;
            to[all] = sink[i % A];
        }
        for (i64 pair = 0; pair < p->rows * A; pair += LANES) {
            i64 pairs = p->rows * A - pair < LANES ? p->rows * A - pair : LANES, count = 0;
            i64 first = tile * p->rows + pair / A, last = tile * p->rows + (pair + pairs - 1) / A;
            for (i64 l = 0; l < LANES; l++) {
                i64 i = pair + (l < pairs ? l : 0);
                const float *from = q + ((row[i / A] < 0 ? 0 : row[i / A]) * A + i % A) * D;
                for (i64 d = 0; d < D; d++)
                    query[d][l] = from[d] * p->scale;
            }
            for (i64 lane = 0; lane < all; lane++)
                for (i64 r = first; r <= last; r++)
                    if (attends(p, r, lane)) {
                        need[count++] = lane;
                        break;
                    }
            for (i64 j = 0; count && j < LANES; j++)
                need[count + j] = need[count - 1];
            for (i64 n = 0; n < count; n += LANES) {
                lanes sum[LANES];
                const float *of[LANES];
                for (int j = 0; j < LANES; j++) {
                    sum[j] = (lanes){0};
                    of[j] = key[need[n + j]];
                }
                for (i64 d = 0; d < D; d++) {
                    lanes column = query[d];
#pragma GCC unroll 8
                    for (int j = 0; j < LANES; j++)
                        sum[j] = multiply_add(of[j][d], column, sum[j]);
                }
                for (i64 l = 0; l < pairs; l++) {
                    i64 r = tile * p->rows + (pair + l) / A;
                    float *to = y + (tile * p->rows * A + pair + l) * (all + 1);
                    for (int j = 0; j < LANES; j++)
                        if (attends(p, r, need[n + j]))
                            to[need[n + j]] = sum[j][l];
                }
            }
        }
    }
}

#define TOGETHER 4

/* y [T, A, D]: the keys that each row attends, mixed by probabilities x [N, R, A, lanes + 1]. */
EXPORT CLONES void ms_mix(const task *p, const float *x, float *y)
{
    i64 A = p->heads, D = p->columns, all = p->shared.count + p->entries.count, need[MOST_LANES];
    const float *key[MOST_LANES];
    for (i64 tile = 0; tile < p->tiles; tile++) {
        find_keys(p, tile, key);
        for (i64 r = tile * p->rows; r < (tile + 1) * p->rows; r++) {
            i64 count = 0;
            if (p->row[r] < 0)
                continue;
            for (i64 lane = 0; lane < all; lane++)
                if (attends(p, r, lane))
                    need[count++] = lane;
            for (i64 a = 0; a < A; a += TOGETHER)
                for (i64 d = 0; d < D; d += LANES) {
                    lanes sum[TOGETHER], part[TOGETHER];
                    const float *of[TOGETHER];
                    for (int j = 0; j < TOGETHER; j++) {
                        of[j] = x + (r * A + (a + j < A ? a + j : A - 1)) * (all + 1);
                        sum[j] = part[j] = (lanes){0};
                    }
                    i64 border = p->block_values;
                    for (i64 n = 0; n < count; n++) {
                        i64 lane = need[n];
                        lanes values;
                        if (lane >= border) {
                            for (int j = 0; j < TOGETHER; j++) {
                                sum[j] += part[j];
                                part[j] = (lanes){0};
                            }
                            border = (lane / p->block_values + 1) * p->block_values;
                        }
                        memcpy(&values, key[lane] + d, sizeof values);
#pragma GCC unroll 4
                        for (int j = 0; j < TOGETHER; j++)
                            part[j] = multiply_add(of[j][lane], values, part[j]);
                    }
                    for (int j = 0; j < TOGETHER && a + j < A; j++) {
                        lanes total = sum[j] + part[j];
                        memcpy(y + (p->row[r] * A + a + j) * D + d, &total, sizeof total);
                    }
                }
        }
    }
}
