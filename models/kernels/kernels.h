/* What the kernels share. Numbers are FP32 and matrices row-major, indices int64.
 *
 * Every sum has one order, written out in the source, and products are fused with additions only where fmaf says so:
 * the bits of a row depend on that row alone, and they are the same whatever the compiler makes of it. */
#ifndef MESHSPARK_KERNELS_H
#define MESHSPARK_KERNELS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if !defined(__GNUC__)
#error "the kernels are written for GCC and Clang; without them the library runs in its plain form"
#endif

/* One binary for all processors of a kind: those with wide vectors and fused multiply-add run code made for them. */
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("fma", "default")))
#else
#define CLONES
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define LANES 8

/* Changes with every prototype of an exported function, so that no library is called with another one's arguments. */
#define INTERFACE 839950197

typedef int64_t i64;
typedef float lanes __attribute__((vector_size(4 * LANES)));

INLINE lanes multiply_add(float a, lanes b, lanes c)
{
    lanes sum;
    for (int l = 0; l < LANES; l++)
        sum[l] = __builtin_fmaf(a, b[l], c[l]);
    return sum;
}

/* 1 / sqrt(mean of squares + eps): squares in 8 running sums, these in order, then what is left of
 * the row: four more, and the last ones fused. */
INLINE float mean_square_rsqrt(const float *x, i64 width, float eps)
{
    float part[LANES] = {0}, sum, inverse = (float)(1.0 / (double)width);
    i64 even = width - width % LANES;
    for (i64 i = 0; i < even; i += LANES)
        for (int l = 0; l < LANES; l++)
            part[l] += x[i + l] * x[i + l];
    sum = part[0];
    for (int l = 1; l < LANES; l++)
        sum += part[l];
    for (i64 i = even; i < width; i++)
        sum = i < width - width % 4 ? sum + x[i] * x[i] : __builtin_fmaf(x[i], x[i], sum);
    float norm = sqrtf(sum);
    return 1 / sqrtf(__builtin_fmaf(inverse * norm, norm, eps));
}

/* Rows of x times a matrix w [outputs, inputs], to y; strides between rows are in numbers. A sum is a chain of fused
 * multiply-adds over each block of inputs in turn, blocks added in order. picked: which row of x each row is, or NULL.
 * At least LANES outputs, at most MOST_INPUTS inputs. */
#define MOST_INPUTS 1024
typedef struct {
    const float *x, *w;
    float *y;
    i64 x_stride, w_stride, y_stride, inputs, outputs, block;
} product;

void run_product(const product *p, const i64 *picked, i64 rows);

#endif
