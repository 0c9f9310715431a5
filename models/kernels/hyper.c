/* Hyper-connections between h streams of H columns, with M = (2 + h) * h mixing logits a row. */
#include "kernels.h"

#define MOST_STREAMS 8

/* From the products of the streams with fn, raw [T, M], what the exponential is taken of, y [T, M]: the negative of
 * the gates' logits, and the mixing logits less the highest of their row of the matrix. */
EXPORT CLONES void ms_mixing(const float *streams, const float *raw, const float *base, const float *scale, float *y,
                             i64 T, i64 h, i64 H, float eps)
{
    i64 gates = 2 * h, M = gates + h * h;
    for (i64 t = 0; t < T; t++, raw += M, y += M) {
        float inverse = mean_square_rsqrt(streams + t * h * H, h * H, eps);
        for (i64 m = 0; m < M; m++)
            y[m] = __builtin_fmaf(raw[m] * inverse, scale[m < gates ? m / h : 2], base[m]);
        for (i64 m = 0; m < gates; m++)
            y[m] = -y[m];
        for (i64 i = gates; i < M; i += h) {
            float most = y[i];
            for (i64 j = 1; j < h; j++)
                most = y[i + j] > most || isnan(y[i + j]) ? y[i + j] : most;
            for (i64 j = 0; j < h; j++)
                y[i + j] -= most;
        }
    }
}

/* Each line of `count` numbers, `step` apart, over its sum and eps. */
INLINE void normalise(float *x, i64 count, i64 step, float eps)
{
    float sum = x[0];
    for (i64 i = 1; i < count; i++)
        sum += x[i * step];
    sum += eps;
    for (i64 i = 0; i < count; i++)
        x[i * step] /= sum;
}

/* From those exponentials: x [T, H], the streams collapsed by their gates; post [T, h]; mix [T, h, h] by Sinkhorn. */
EXPORT CLONES void ms_gates(const float *exponential, const float *streams, float *x, float *post, float *mix, i64 T,
                            i64 h, i64 H, i64 iterations, float eps)
{
    for (i64 t = 0; t < T; t++, streams += h * H, x += H, post += h, mix += h * h, exponential += (2 + h) * h) {
        float pre[MOST_STREAMS];
        for (i64 j = 0; j < h; j++) {
            pre[j] = eps + 1 / (exponential[j] + 1);
            post[j] = 2 / (exponential[h + j] + 1);
        }
        memcpy(mix, exponential + 2 * h, h * h * sizeof(float));
        for (i64 i = 0; i < h; i++)
            normalise(mix + i * h, h, 1, 0);
        for (i64 i = 0; i < h * h; i++)
            mix[i] += eps;
        for (i64 turn = 0; turn < iterations; turn++) {
            for (i64 i = 0; turn && i < h; i++)
                normalise(mix + i * h, h, 1, eps);
            for (i64 j = 0; j < h; j++)
                normalise(mix + j, h, h, eps);
        }
        for (i64 i = 0; i < H; i++)
            x[i] = pre[0] * streams[i];
        for (i64 j = 1; j < h; j++)
            for (i64 i = 0; i < H; i++)
                x[i] += pre[j] * streams[j * H + i];
    }
}

/* z [T, h, H]: stream k is post[k] * y + the sum over j of mix[j, k] * streams[j]. */
EXPORT CLONES void ms_spread(const float *y, const float *streams, const float *post, const float *mix, float *z, i64 T,
                             i64 h, i64 H)
{
    for (i64 t = 0; t < T; t++, y += H, streams += h * H, post += h, mix += h * h)
        for (i64 k = 0; k < h; k++, z += H) {
            for (i64 i = 0; i < H; i++)
                z[i] = mix[k] * streams[i];
            for (i64 j = 1; j < h; j++)
                for (i64 i = 0; i < H; i++)
                    z[i] = __builtin_fmaf(mix[j * h + k], streams[j * H + i], z[i]);
            for (i64 i = 0; i < H; i++)
                z[i] = post[k] * y[i] + z[i];
        }
}
