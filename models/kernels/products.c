/* Matrix products of small steps: up to 8 rows side by side in a vector, each with a chain of its own. */
#include "kernels.h"

INLINE void chains(const product *p, const float *w, const lanes *x, lanes sum[LANES])
{
    for (i64 first = 0; first < p->inputs; first += p->block) {
        i64 last = first + p->block < p->inputs ? first + p->block : p->inputs;
        lanes part[LANES];
        for (int j = 0; j < LANES; j++)
            part[j] = (lanes){0};
        for (i64 i = first; i < last; i++) {
            lanes row = x[i];
#pragma GCC unroll 8
            for (int j = 0; j < LANES; j++)
                part[j] = multiply_add(w[j * p->w_stride + i], row, part[j]);
        }
        for (int j = 0; j < LANES; j++)
            sum[j] = first ? sum[j] + part[j] : part[j];
    }
}

CLONES void run_product(const product *p, const i64 *picked, i64 rows)
{
    lanes x[MOST_INPUTS], sum[LANES];
    for (i64 t = 0; t < rows; t += LANES) {
        i64 count = rows - t < LANES ? rows - t : LANES;
        for (i64 l = 0; l < LANES; l++) {
            i64 row = t + (l < count ? l : 0);
            const float *from = p->x + (picked ? picked[row] : row) * p->x_stride;
            for (i64 i = 0; i < p->inputs; i++)
                x[i][l] = from[i];
        }
        for (i64 o = 0; o < p->outputs; o += LANES) {
            /* The last few outputs are taken with some that are done already. */
            i64 first = o + LANES <= p->outputs ? o : p->outputs - LANES;
            chains(p, p->w + first * p->w_stride, x, sum);
            for (i64 l = 0; l < count; l++)
                for (i64 j = 0; j < LANES; j++)
                    p->y[(t + l) * p->y_stride + first + j] = sum[j][l];
        }
    }
}

EXPORT i64 ms_interface(void) { return INTERFACE; }

/* Whether this processor fuses multiplications with additions: without that, fmaf is slower than what it saves. */
EXPORT i64 ms_fused(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("fma") != 0;
#else
    return 1;
#endif
}

/* y [T, O] = x [T, I] w [O, I]^T */
EXPORT void ms_product(const float *x, const float *w, float *y, i64 T, i64 I, i64 O, i64 block)
{
    product p = {x, w, y, I, I, O, I, O, block};
    run_product(&p, NULL, T);
}

/* Of rows sorted by expert, `counts` for each: gate [R, W] clamped, its negative for the exponential, up [R, W]
 * clamped. The row behind sorted row r is picked[r] of x [.., H], or r. */
EXPORT void ms_experts_in(const float *x, const i64 *picked, const i64 *counts, i64 X, const float *w1, const float *w3,
                          float *gate, float *minus, float *up, i64 H, i64 W, i64 block, float limit)
{
    i64 first = 0;
    for (i64 e = 0; e < X; first += counts[e++]) {
        const i64 *rows = picked ? picked + first : NULL;
        const float *from = picked ? x : x + first * H;
        product g = {from, w1 + e * W * H, gate + first * W, H, H, W, H, W, block};
        product u = {from, w3 + e * W * H, up + first * W, H, H, W, H, W, block};
        run_product(&g, rows, counts[e]);
        run_product(&u, rows, counts[e]);
    }
    for (i64 i = 0; i < first * W; i++) {
        gate[i] = gate[i] > limit ? limit : gate[i];
        minus[i] = -gate[i];
        up[i] = up[i] < -limit ? -limit : up[i] > limit ? limit : up[i];
    }
}

/* y [R, H]: gate / (1 + exponential) * up, times the row's weight if there is one, through w2 [X, H, W]. Mutates
 * gate. */
EXPORT void ms_experts_out(float *gate, const float *exponential, const float *up, const float *weight,
                           const i64 *counts, i64 X, const float *w2, float *y, i64 H, i64 W, i64 block)
{
    i64 first = 0;
    for (i64 e = 0; e < X; first += counts[e++]) {
        for (i64 r = first; r < first + counts[e]; r++)
            for (i64 i = r * W; i < (r + 1) * W; i++) {
                float hidden = gate[i] / (exponential[i] + 1) * up[i];
                gate[i] = weight ? hidden * weight[r] : hidden;
            }
        product p = {gate + first * W, w2 + e * H * W, y + first * H, W, W, H, W, H, block};
        run_product(&p, NULL, counts[e]);
    }
}

static void tree(float *parts, i64 size, i64 low, i64 high)
{
    if (high - low == 1)
        return;
    i64 middle = (low + high) / 2;
    tree(parts, size, low, middle);
    tree(parts, size, middle, high);
    for (i64 i = 0; i < size; i++)
        parts[low * size + i] += parts[middle * size + i];
}

/* The grouped output projection of heads [S, G, K]: wo_a [G * O, K], wo_b [H, G * O]; latent [S, O] is scratch, and
 * parts [G, S, H] ends with the sum over the groups in front. */
EXPORT void ms_project_groups(const float *heads, const float *wo_a, const float *wo_b, float *latent, float *parts,
                              i64 S, i64 G, i64 K, i64 O, i64 H, i64 block_a, i64 block_b)
{
    for (i64 g = 0; g < G; g++) {
        product a = {heads + g * K, wo_a + g * O * K, latent, G * K, K, O, K, O, block_a};
        product b = {latent, wo_b + g * O, parts + g * S * H, O, G * O, H, O, H, block_b};
        run_product(&a, NULL, S);
        run_product(&b, NULL, S);
    }
    tree(parts, S * H, 0, G);
}
