/* Defines what the kernels share: vectors, their sums and exponentials, struct step.
 *
 * A vector is one register of the processor. Compilers keep wider ones in memory: 16 floats on AVX2
 * were ten times slower.
 */
#ifndef DSCHAT_CPU_KERNELS_H
#define DSCHAT_CPU_KERNELS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else /* SSE, NEON */
#define LANES 4
#endif
#define WIDE 32  /* floats that a loop advances together, so that its sums do not wait for another */
#define BLOCK 32 /* keys a step of the running softmax; 32 keys of 4 heads of 32 fill half of L1 */

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef float half __attribute__((vector_size(2 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const float *p) { return *(const loose *)p; }
INLINE void store(float *p, vec x) { *(loose *)p = x; }

/* The first n lanes; zeros in the others. */
INLINE vec load_some(const float *p, int64_t n)
{
    vec x = {0};
    for (int64_t i = 0; i < n; i++) x[i] = p[i];
    return x;
}

INLINE void store_some(float *p, vec x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) p[i] = x[i];
}

INLINE float sum(vec x)
{
    union { vec whole; half halves[2]; } a = {x};
    half b = a.halves[0] + a.halves[1];
    for (int64_t n = LANES / 4; n; n /= 2)
        for (int64_t i = 0; i < n; i++) b[i] += b[i + n];
    return b[0];
}

/* mask (all bits or none, a lane) ? a : b */
INLINE vec choose(ivec mask, vec a, vec b)
{
    return (vec)((mask & (ivec)a) | (~mask & (ivec)b));
}

/* exp(x) for x <= 0, relative error 2e-7; e^-87 for smaller x. NaN stays NaN.
 *
 * x = n ln 2 + r with |r| <= ln 2 / 2; the series of e^r to r^7 is 6e-9 short there. */
INLINE vec exp_below_0(vec x)
{
    x = choose(x < -87.0f, (vec){0} - 87.0f, x);
    ivec n = __builtin_convertvector(x * 1.44269504f - 0.5f, ivec); /* truncates: the nearest */
    vec m = __builtin_convertvector(n, vec);
    vec r = (x - m * 0.693145752f) - m * 1.42860677e-6f; /* ln 2: its first 15 bits, the rest */
    vec y = 1.98412698e-4f * r + 1.38888889e-3f;
    y = y * r + 8.33333333e-3f;
    y = y * r + 4.16666667e-2f;
    y = y * r + 1.66666667e-1f;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    return y * (vec)((n + 127) << 23);
}

/* x times the logistic function of z */
INLINE vec gated(vec x, vec z)
{
    vec e = exp_below_0(choose(z > 0.0f, -z, z));
    vec share = 1.0f / (1.0f + e);
    return x * choose(z < 0.0f, e * share, share);
}

/* State that the layers of one step share. Row b's newest token has index lengths[b] - 1. Its token
 * with index t is in cache slot table[b][t / page_size] * page_size + t % page_size, or in slot
 * b * page_size + t without a table. */
struct step {
    int64_t rows, num_heads, num_kv_heads, head_size, page_size, table_stride;
    const int64_t *lengths; /* (rows,) */
    const int64_t *table;   /* (rows, pages), rows of table_stride; or NULL */
    const int64_t *slot_mapping; /* (rows,) slots to write new keys and values to; or NULL */
    const float *slopes;    /* (num_heads,) ALiBi's; or NULL */
};

/* Runs work(data) on so many threads, or fewer; on this one alone without OpenMP. */
void dschat_on_team(void (*work)(void *), void *data, int64_t threads);

#define MIN_WORK (1 << 18) /* multiplications that are worth a thread: microseconds, as its waking */

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

void dschat_add_norm(
    float *x, const float *added, const float *weight, const float *bias, float *out,
    int64_t rows, int64_t size, float eps, float offset);
void dschat_silu_mul(const float *gate_up, float *out, int64_t rows, int64_t size);
void dschat_norm_and_rotate(
    float *heads, int64_t rows, int64_t stride, int64_t num_q, int64_t num_k, int64_t head_size,
    const float *q_weight, const float *k_weight, float eps, float offset,
    const int64_t *positions, const float *cos, const float *sin, int64_t dim);
void dschat_decode_attention(
    const struct step *s, const float *heads, float *cache, float *out, int64_t window,
    float scale, int64_t threads);

#endif
