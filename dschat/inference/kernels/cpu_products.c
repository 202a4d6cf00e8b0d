/* Computes products with packed weights: y = x weight^T + bias.
 *
 * A weight of few rows' products is read at the speed of memory, one of many at that of the
 * arithmetic: on an AMD EPYC 1.3 to 2 times as fast as oneDNN's. A packed weight is cut into blocks
 * of DEPTH inputs, those into panels of NR outputs; a panel holds its NR weights of each input
 * together. The accumulators of MR rows and NR outputs fill the registers, and while a panel is
 * multiplied the next one is fetched. A row's sums have one order: they depend neither on the
 * other rows nor on the number of threads.
 */
#include "cpu_kernels.h"

#define NR (2 * LANES)
#if defined(__AVX512F__) || defined(__aarch64__) /* 32 registers */
#define MR 12
#else
#define MR 6
#endif
#define DEPTH 512 /* a panel is then as large as L1 */
#define ROWS 120  /* whose inputs stay in L2; a multiple of MR */

struct product {
    const float *x;      /* (rows, size), rows of stride */
    const float *weight; /* packed */
    const float *bias;   /* (outs,) or NULL */
    float *y;            /* (rows, outs) */
    int64_t rows, stride, outs, size, threads;
};

/* OpenMP's functions: run on a team of threads; its size; which of them this one is. */
static void (*run_on_team)(void (*)(void *), void *, unsigned, unsigned);
static int (*team_size)(void), (*team_number)(void);

void dschat_use_openmp(void *run, void *size, void *number)
{
    run_on_team = (void (*)(void (*)(void *), void *, unsigned, unsigned))run;
    team_size = (int (*)(void))size;
    team_number = (int (*)(void))number;
}

void dschat_on_team(void (*work)(void *), void *data, int64_t threads)
{
    if (threads > 1 && run_on_team) run_on_team(work, data, threads, 0);
    else work(data);
}

INLINE int64_t panels_of(int64_t outs) { return (outs + NR - 1) / NR; }

int64_t dschat_packed_size(int64_t outs, int64_t size) { return panels_of(outs) * NR * size; }

/* weight (outs, size) -> packed */
void dschat_pack(const float *weight, float *packed, int64_t outs, int64_t size)
{
    for (int64_t panel = 0; panel < panels_of(outs); panel++)
        for (int64_t k0 = 0; k0 < size; k0 += DEPTH) {
            int64_t depth = smaller(size - k0, DEPTH);
            float *to = packed + NR * (k0 * panels_of(outs) + panel * depth);
            for (int64_t k = 0; k < depth; k++)
                for (int64_t o = 0; o < NR; o++) {
                    int64_t out = panel * NR + o;
                    *to++ = out < outs ? weight[out * size + k0 + k] : 0;
                }
        }
}

/* The sums (num_rows, NR) of the block at input k0 join those of earlier blocks. */
static __attribute__((noinline)) void add_to_outputs(
    const struct product *p, const float *sums, int64_t row, int64_t num_rows, int64_t k0,
    int64_t out, int is_last)
{
    for (int64_t r = 0; r < num_rows; r++)
        for (int64_t o = out; o < smaller(p->outs, out + NR); o += LANES) {
            float *y = p->y + (row + r) * p->outs + o;
            vec sum = load(sums + r * NR + o - out);
            int64_t n = smaller(p->outs - o, LANES);
            if (n == LANES) {
                if (k0) sum += load(y);
                if (is_last && p->bias) sum += load(p->bias + o);
                store(y, sum);
            } else {
                if (k0) sum += load_some(y, n);
                if (is_last && p->bias) sum += load_some(p->bias + o, n);
                store_some(y, sum, n);
            }
        }
}

/* num_rows rows of x from input k0 on times a panel, added to what earlier blocks gave. In every
 * step `ahead` moves on by `stride` weights, which are fetched. */
INLINE void multiply(
    const struct product *p, int64_t row, int64_t k0, int64_t out, const float *panel,
    const float *ahead, int64_t stride, int num_rows)
{
    int64_t depth = smaller(p->size - k0, DEPTH);
    const float *x = p->x + row * p->stride + k0;
    vec sums[MR][2];
#pragma GCC unroll 12
    for (int r = 0; r < num_rows; r++) sums[r][0] = sums[r][1] = (vec){0};
    for (int64_t k = 0; k < depth; k++, ahead += stride) {
        __builtin_prefetch(ahead, 0, 2);
        vec a = load(panel + k * NR), b = load(panel + k * NR + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < num_rows; r++) {
            float input = x[r * p->stride + k];
            sums[r][0] += input * a;
            sums[r][1] += input * b;
        }
    }
    float tile[MR * NR] __attribute__((aligned(64)));
#pragma GCC unroll 12
    for (int r = 0; r < num_rows; r++) {
        store(tile + r * NR, sums[r][0]);
        store(tile + r * NR + LANES, sums[r][1]);
    }
    add_to_outputs(p, tile, row, num_rows, k0, out, k0 + depth == p->size);
}

/* Rows `row` to `end` times the panels from `first` to `last` of the block at input k0. */
INLINE void multiply_panels(
    const struct product *p, int64_t row, int64_t end, int64_t k0, int64_t first, int64_t last)
{
    int64_t depth = smaller(p->size - k0, DEPTH);
    int64_t passes = (end - row + MR - 1) / MR;
    int64_t stride = (NR + passes - 1) / passes; /* the next panel, over all passes */
    const float *panel = p->weight + NR * (k0 * panels_of(p->outs) + first * depth);
    for (int64_t out = first * NR; out < last * NR; out += NR, panel += NR * depth) {
        const float *ahead = panel + NR * depth;
        int64_t r = row;
        for (int64_t left = passes; left; left--, ahead += stride * depth) {
            int64_t count = (end - r + left - 1) / left;
            switch (count) { /* the compiler keeps a constant number of sums in registers */
#define CASE(n) \
    case n: multiply(p, r, k0, out, panel, ahead, stride, n); break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if MR == 12
            CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
            }
            r += count;
        }
    }
}

static void multiply_share(void *data)
{
    const struct product *p = data;
    int64_t count = p->threads > 1 ? team_size() : 1, number = p->threads > 1 ? team_number() : 0;
    int64_t panels = panels_of(p->outs);
    int64_t first = panels * number / count, last = panels * (number + 1) / count;
    for (int64_t row = 0; row < p->rows; row += ROWS)
        for (int64_t k0 = 0; k0 < p->size; k0 += DEPTH)
            multiply_panels(p, row, smaller(p->rows, row + ROWS), k0, first, last);
}

/* x (rows, size), rows of `stride`, times a packed weight -> y (rows, outs) */
void dschat_product(
    const float *x, const float *weight, const float *bias, float *y, int64_t rows,
    int64_t stride, int64_t outs, int64_t size, int64_t threads)
{
    threads = run_on_team ? smaller(threads, rows * outs * size / MIN_WORK) : 1;
    struct product p = {x, weight, bias, y, rows, stride, outs, size, threads};
    dschat_on_team(multiply_share, &p, threads);
}

struct products {
    struct product *each;
    int64_t count;
};

static void multiply_shares(void *data)
{
    const struct products *p = data;
    for (int64_t i = 0; i < p->count; i++) multiply_share(p->each + i);
}

/* The first counts[0] rows of x (rows, size) times weights[0], the next ones times weights[1], and
 * so on, for `num` weights of equal shapes -> y (rows, outs). Biases: as weights; or NULL. */
void dschat_products(
    const float *x, const float *const *weights, const float *const *biases, float *y,
    const int64_t *counts, int64_t num, int64_t outs, int64_t size, int64_t threads)
{
    struct product each[num];
    int64_t rows = 0;
    for (int64_t i = 0; i < num; rows += counts[i++])
        each[i] = (struct product){
            x + rows * size, weights[i], biases ? biases[i] : 0, y + rows * outs,
            counts[i], size, outs, size, 1};
    threads = run_on_team ? smaller(threads, rows * outs * size / MIN_WORK) : 1;
    for (int64_t i = 0; i < num; i++) each[i].threads = threads;
    struct products p = {each, num};
    dschat_on_team(multiply_shares, &p, threads);
}
