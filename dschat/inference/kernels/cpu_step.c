/* Runs a whole step of a small model in one call, and draws its tokens in another.
 *
 * A model of a million parameters decodes a batch in the time that launching a dozen operations per
 * layer takes. A call is one thread's; the caller cuts large steps into calls for several threads.
 */
#include "cpu_kernels.h"

/* -- matrix product ---------------------------------------------------------------------------- */

#define PANEL 32 /* outputs whose weights are adjacent: for each input, PANEL weights */
#if defined(__AVX512F__) || defined(__aarch64__)
#define TILE 8 /* rows whose sums of 2 vectors each stay in registers, of which there are 32 */
#else
#define TILE 6 /* of 16 */
#endif

/* out (num, n) = x (num, k) W^T + bias, for the n <= 2 LANES outputs whose weights start at
 * `weights` in each row of a panel (k, PANEL). A row's sum runs over k in order, for any num: a
 * row's result does not depend on the number of rows. */
INLINE void tile_product(
    int num, const float *x, int64_t k, const float *weights, const float *bias, float *out,
    int64_t stride, int64_t n)
{
    vec low[TILE], high[TILE];
    for (int r = 0; r < num; r++) low[r] = high[r] = (vec){0};
    for (int64_t i = 0; i < k; i++) {
        vec first = load(weights + i * PANEL), second = load(weights + i * PANEL + LANES);
        for (int r = 0; r < num; r++) {
            low[r] += x[r * k + i] * first;
            high[r] += x[r * k + i] * second;
        }
    }
    for (int r = 0; r < num; r++, out += stride) {
        float sums[2 * LANES];
        store(sums, low[r]);
        store(sums + LANES, high[r]);
        if (bias)
            for (int64_t j = 0; j < n; j++) sums[j] += bias[j];
        if (n == 2 * LANES) {
            store(out, load(sums));
            store(out + LANES, load(sums + LANES));
        } else
            for (int64_t j = 0; j < n; j++) out[j] = sums[j];
    }
}

/* weight: panels of (k, PANEL), zeros beyond the n outputs. */
struct linear {
    const float *weight, *bias; /* bias (n,) or NULL */
    int64_t k, n;
};

/* The products of the last rows, fewer than TILE: a case for each number, so that sums stay in
 * registers. */
INLINE void rest_product(
    int64_t num, const float *x, int64_t k, const float *weights, const float *bias, float *out,
    int64_t stride, int64_t n)
{
    switch (num) {
    case 1: tile_product(1, x, k, weights, bias, out, stride, n); break;
    case 2: tile_product(2, x, k, weights, bias, out, stride, n); break;
    case 3: tile_product(3, x, k, weights, bias, out, stride, n); break;
    case 4: tile_product(4, x, k, weights, bias, out, stride, n); break;
    case 5: tile_product(5, x, k, weights, bias, out, stride, n); break;
#if TILE > 6
    case 6: tile_product(6, x, k, weights, bias, out, stride, n); break;
    case 7: tile_product(7, x, k, weights, bias, out, stride, n); break;
#endif
    }
}

static void product(const struct linear *w, const float *x, int64_t rows, float *out)
{
    for (int64_t j = 0; j < w->n; j += 2 * LANES) {
        const float *weights = w->weight + j / PANEL * PANEL * w->k + j % PANEL;
        const float *bias = w->bias ? w->bias + j : 0;
        int64_t n = w->n - j < 2 * LANES ? w->n - j : 2 * LANES, r = 0;
        for (; r + TILE <= rows; r += TILE)
            tile_product(TILE, x + r * w->k, w->k, weights, bias, out + r * w->n + j, w->n, n);
        rest_product(rows - r, x + r * w->k, w->k, weights, bias, out + r * w->n + j, w->n, n);
    }
}

/* -- a step ------------------------------------------------------------------------------------ */

struct norm {
    const float *weight, *bias; /* weight NULL: no norm; bias NULL: RMS norm */
};

struct layer {
    struct norm norm1, norm2;
    const float *q_norm, *k_norm; /* or NULL */
    struct linear qkv, out, up, down;
    float *cache;
    int64_t window; /* 0: all keys */
    float scale;
};

enum activation { SILU_GATED, RELU, TANH_GELU };

struct model {
    int64_t num_layers, num_heads, num_kv_heads, head_size, hidden_size, rotary_dim;
    int64_t activation, position_offset;
    const float *embed, *positions;   /* (V, E); learned positions (P, E) or NULL */
    const float *cos, *sin;           /* (P, rotary_dim) */
    struct norm embed_norm, final_norm;
    struct linear head;
    const struct layer *layers;
    float eps;
};

static void activate(int64_t kind, const float *inner, float *out, int64_t rows, int64_t size)
{
    if (kind == SILU_GATED) {
        dschat_silu_mul(inner, out, rows, size);
        return;
    }
    int64_t i = 0, count = rows * size;
    for (; i < count; i += LANES) {
        int64_t rest = count - i < LANES ? count - i : LANES;
        vec x = rest == LANES ? load(inner + i) : load_some(inner + i, rest), y;
        if (kind == RELU)
            y = choose(x < 0.0f, (vec){0}, x);
        else /* Hendrycks and Gimpel 2016: x / 2 (1 + tanh u) is x times the logistic of 2 u */
            y = gated(x, 1.59576912f * (x + 0.044715f * x * x * x));
        if (rest == LANES)
            store(out + i, y);
        else
            store_some(out + i, y, rest);
    }
}

static void embed(
    const struct model *m, const int64_t *tokens, const int64_t *positions, int64_t rows, float *h)
{
    int64_t size = m->hidden_size;
    for (int64_t r = 0; r < rows; r++) {
        const float *token = m->embed + tokens[r] * size;
        const float *place =
            m->positions ? m->positions + (positions[r] + m->position_offset) * size : 0;
        for (int64_t i = 0; i < size; i++)
            h[r * size + i] = place ? token[i] + place[i] : token[i];
    }
    if (m->embed_norm.weight)
        dschat_add_norm(
            h, 0, m->embed_norm.weight, m->embed_norm.bias, h, rows, size, m->eps);
}

/* tokens, positions (rows,) -> logits (num_ready, V) of the rows `ready`, in ascending order.
 * Pre-norm, attention and MLP one after the other. A row attends to what earlier rows of its
 * sequence write in the same call, so a prompt's tokens are rows too.
 *
 * scratch: rows * (3 E + max(E, H D) + (H + 2 K) D + up's outputs + down's inputs) floats. */
void dschat_step(
    const struct model *m, struct step *s, const int64_t *tokens, const int64_t *positions,
    const int64_t *ready, int64_t num_ready, float *scratch, float *logits)
{
    int64_t rows = s->rows, size = m->hidden_size, num_q = m->num_heads, num_k = m->num_kv_heads;
    int64_t heads_size = (num_q + 2 * num_k) * m->head_size, out_size = num_q * m->head_size;
    float *h = scratch, *added = h + rows * size, *x = added + rows * size;
    float *mixed = x + rows * size, *heads = mixed + rows * (size > out_size ? size : out_size);
    float *inner = heads + rows * heads_size;
    s->num_heads = num_q, s->num_kv_heads = num_k, s->head_size = m->head_size;
    embed(m, tokens, positions, rows, h);
    for (int64_t i = 0; i < m->num_layers; i++) {
        const struct layer *w = m->layers + i;
        dschat_add_norm(
            h, i ? added : 0, w->norm1.weight, w->norm1.bias, x, rows, size, m->eps);
        product(&w->qkv, x, rows, heads);
        if (w->q_norm || m->rotary_dim)
            dschat_norm_and_rotate(
                heads, rows, heads_size, num_q, num_k, m->head_size, w->q_norm, w->k_norm, m->eps,
                positions, m->cos, m->sin, m->rotary_dim);
        dschat_decode_attention(s, heads, w->cache, mixed, w->window, w->scale);
        product(&w->out, mixed, rows, added);
        dschat_add_norm(h, added, w->norm2.weight, w->norm2.bias, x, rows, size, m->eps);
        product(&w->up, x, rows, inner);
        float *activated = inner + rows * w->up.n;
        activate(m->activation, inner, activated, rows, w->down.k);
        product(&w->down, activated, rows, added);
    }
    for (int64_t i = 0; i < num_ready; i++) {
        int64_t r = ready[i] * size;
        dschat_add_norm(
            h + r, added + r, m->final_norm.weight, m->final_norm.bias, x + i * size, 1, size,
            m->eps);
    }
    product(&m->head, x, num_ready, logits);
}

/* -- drawing ----------------------------------------------------------------------------------- */

#define CDF_BLOCK 128 /* logits whose exponentials are summed together, in fp32 */

/* exp((logits - best) / T) of up to CDF_BLOCK logits from `first`, before `end`, and their sum.
 * Exponents below -87 give zero. */
INLINE float block_masses(
    const float *logits, int64_t first, int64_t end, float best, float temperature, float *out)
{
    int64_t count = end - first < CDF_BLOCK ? end - first : CDF_BLOCK;
    vec total = {0};
    logits += first;
    for (int64_t i = 0; i < count; i += LANES) {
        int64_t rest = count - i < LANES ? count - i : LANES;
        vec x = rest == LANES ? load(logits + i) : load_some(logits + i, rest);
        x = (x - best) / temperature;
        vec e = choose(x < -87.0f, (vec){0}, exp_below_0(x));
        for (int64_t j = rest; j < LANES; j++) e[j] = 0;
        store(out + i, e);
        total += e;
    }
    return sum(total);
}

INLINE float highest(const float *x, int64_t size)
{
    vec top = (vec){0} - 3.4e38f;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vec y = load(x + i);
        top = choose(y > top, y, top);
    }
    float best = top[0];
    for (int64_t j = 1; j < LANES; j++) best = top[j] > best ? top[j] : best;
    for (; i < size; i++) best = x[i] > best ? x[i] : best;
    return best;
}

/* For each row of logits (rows, size): the token at which the cumulative mass of softmax(logits/T)
 * exceeds `uniform` times the mass of the first `count` tokens, the only ones that can be drawn,
 * and its log-probability among all tokens. Masses are summed in double over blocks and inside the
 * block that contains the target, as in sampling.py. A row of NaN gets the last token. */
void dschat_draw(
    const float *logits, int64_t rows, int64_t size, int64_t count, double temperature,
    const double *uniform, int64_t *ids, float *logprobs)
{
    int64_t blocks = (count + CDF_BLOCK - 1) / CDF_BLOCK;
    double before[blocks + 1];
    float masses[CDF_BLOCK] __attribute__((aligned(64)));
    for (int64_t row = 0; row < rows; row++, logits += size) {
        float best = highest(logits, size);
        before[0] = 0;
        for (int64_t b = 0; b < blocks; b++)
            before[b + 1] =
                before[b] + block_masses(logits, b * CDF_BLOCK, count, best, temperature, masses);
        double target = uniform[row] * before[blocks], total = before[blocks];
        for (int64_t first = count; first < size; first += CDF_BLOCK)
            total += block_masses(logits, first, size, best, temperature, masses);
        int64_t b = 0;
        while (b + 1 < blocks && !(before[b + 1] > target)) b++;
        int64_t first = b * CDF_BLOCK, token = -1;
        block_masses(logits, first, count, best, temperature, masses);
        double mass = before[b];
        for (int64_t j = 0; j < CDF_BLOCK && first + j < count; j++) {
            if (masses[j] > 0) token = j; /* the last with mass, should rounding lose the target */
            mass += masses[j];
            if (mass > target) break;
        }
        ids[row] = token < 0 ? count - 1 : first + token;
        logprobs[row] = ((double)logits[ids[row]] - best) / temperature - log(total);
    }
}
