/* Computes the operations of a decode step between its matrix products: norms, rotary positions,
 * the gated activation, attention over the paged cache; and draws tokens. Called through ctypes by
 * cpu.py.
 *
 * On one thread, but for attention: waking others takes microseconds. All arrays are fp32, all
 * indices int64, all rows contiguous unless a stride is given. Rows are computed one by one and
 * summed in an order that depends on the size of a vector alone, not on addresses: a row's result
 * depends neither on the other rows nor on how the cache is paged.
 */
#include "cpu_kernels.h"

/* -- norms ------------------------------------------------------------------------------------ */

INLINE float squares(const float *x, int64_t size, float mean)
{
    vec total = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vec d = load(x + i) - mean;
        total += d * d;
    }
    for (; i < size; i++) rest += (x[i] - mean) * (x[i] - mean);
    return sum(total) + rest;
}

INLINE float mean_of(const float *x, int64_t size)
{
    vec total = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) total += load(x + i);
    for (; i < size; i++) rest += x[i];
    return (sum(total) + rest) / size;
}

/* One row, by weight + offset; may be in place. Layer norm with a bias, RMS norm without. */
INLINE void norm_row(
    const float *x, const float *weight, const float *bias, float *out, int64_t size, float eps,
    float offset)
{
    float mean = bias ? mean_of(x, size) : 0.0f;
    float scale = 1.0f / sqrtf(squares(x, size, mean) / size + eps);
    int64_t i = 0;
    if (bias) {
        for (; i + LANES <= size; i += LANES)
            store(
                out + i,
                (load(x + i) - mean) * scale * (load(weight + i) + offset) + load(bias + i));
        for (; i < size; i++) out[i] = (x[i] - mean) * scale * (weight[i] + offset) + bias[i];
    } else {
        for (; i + LANES <= size; i += LANES)
            store(out + i, load(x + i) * scale * (load(weight + i) + offset));
        for (; i < size; i++) out[i] = x[i] * scale * (weight[i] + offset);
    }
}

/* x (rows, size) += added, unless added is NULL; out (rows, size) = norm(x). */
void dschat_add_norm(
    float *x, const float *added, const float *weight, const float *bias, float *out,
    int64_t rows, int64_t size, float eps, float offset)
{
    for (int64_t row = 0; row < rows; row++, x += size, out += size) {
        if (added) {
            int64_t i = 0;
            for (; i + LANES <= size; i += LANES) store(x + i, load(x + i) + load(added + i));
            for (; i < size; i++) x[i] += added[i];
            added += size;
        }
        norm_row(x, weight, bias, out, size, eps, offset);
    }
}

/* -- gated activation ------------------------------------------------------------------------- */

INLINE vec silu(vec x) { return gated(x, x); }

/* gate_up (rows, 2 size) -> out (rows, size): silu(gate) * up. */
void dschat_silu_mul(const float *gate_up, float *out, int64_t rows, int64_t size)
{
    for (int64_t row = 0; row < rows; row++, gate_up += 2 * size, out += size) {
        const float *up = gate_up + size;
        int64_t i = 0, rest = size % LANES;
        for (; i + LANES <= size; i += LANES) store(out + i, silu(load(gate_up + i)) * load(up + i));
        if (rest)
            store_some(out + i, silu(load_some(gate_up + i, rest)) * load_some(up + i, rest), rest);
    }
}

/* -- heads ------------------------------------------------------------------------------------ */

/* The first num_q + num_k heads of each row, in place: normalised if there are weights (num_q with
 * q_weight, num_k with k_weight), then their first dim elements rotated by the row's position.
 *
 * heads: rows of `stride`. cos, sin (positions, dim): see Rotary in rotary.py; dim 0: none. */
void dschat_norm_and_rotate(
    float *heads, int64_t rows, int64_t stride, int64_t num_q, int64_t num_k, int64_t head_size,
    const float *q_weight, const float *k_weight, float eps, float offset,
    const int64_t *positions, const float *cos, const float *sin, int64_t dim)
{
    int64_t half_dim = dim / 2;
    for (int64_t row = 0; row < rows; row++) {
        const float *c = dim ? cos + positions[row] * dim : 0;
        const float *s = dim ? sin + positions[row] * dim : 0;
        for (int64_t head = 0; head < num_q + num_k; head++) {
            float *restrict low = heads + row * stride + head * head_size;
            float *restrict high = low + half_dim;
            const float *weight = head < num_q ? q_weight : k_weight;
            if (weight) norm_row(low, weight, 0, low, head_size, eps, offset);
            for (int64_t i = 0; i < half_dim; i++) {
                float a = low[i], b = high[i];
                low[i] = a * c[i] + b * s[i];
                high[i] = b * c[half_dim + i] + a * s[half_dim + i];
            }
        }
    }
}

/* -- attention of decoding rows --------------------------------------------------------------- */

INLINE float dot(const float *a, const float *b, int64_t size)
{
    vec total = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) total += load(a + i) * load(b + i);
    for (; i < size; i++) rest += a[i] * b[i];
    return sum(total) + rest;
}

/* out (size) = out * keep + sum over keys of weights[t] * (tokens[t] + offset) */
INLINE void add_values(
    float *out, float keep, const float *weights, const float *const *tokens, int64_t count,
    int64_t offset, int64_t size)
{
    int64_t i = 0;
    for (; i + WIDE <= size; i += WIDE) {
        vec sums[WIDE / LANES];
        for (int v = 0; v < WIDE / LANES; v++) sums[v] = load(out + i + v * LANES) * keep;
        for (int64_t t = 0; t < count; t++)
            for (int v = 0; v < WIDE / LANES; v++)
                sums[v] += weights[t] * load(tokens[t] + offset + i + v * LANES);
        for (int v = 0; v < WIDE / LANES; v++) store(out + i + v * LANES, sums[v]);
    }
    for (; i + LANES <= size; i += LANES) {
        vec a = load(out + i) * keep;
        for (int64_t t = 0; t < count; t++) a += weights[t] * load(tokens[t] + offset + i);
        store(out + i, a);
    }
    for (; i < size; i++) {
        float a = out[i] * keep;
        for (int64_t t = 0; t < count; t++) a += weights[t] * tokens[t][offset + i];
        out[i] = a;
    }
}

/* One head and one block of keys: out, *top and *total are the running softmax (Milakov and
 * Gimelshein 2018, "Online normalizer calculation for softmax"). age: of the first key. */
INLINE void attend_block(
    const float *q, const float *const *tokens, int64_t count, int64_t key, int64_t value,
    int64_t size, float scale, float slope, int64_t age, float *out, float *top, float *total)
{
    float weights[BLOCK] __attribute__((aligned(64)));
    float highest = *top;
    for (int64_t t = 0; t < count; t++) {
        weights[t] = dot(q, tokens[t] + key, size) * scale - slope * (float)(age - t);
        highest = weights[t] > highest ? weights[t] : highest;
    }
    for (int64_t t = count; t % LANES; t++) weights[t] = highest;
    ivec lanes;
    for (int j = 0; j < LANES; j++) lanes[j] = j;
    vec sums = {0};
    for (int64_t t = 0; t < count; t += LANES) {
        vec e = exp_below_0(load(weights + t) - highest);
        store(weights + t, e);
        sums += choose(lanes < (int32_t)(count - t), e, (vec){0});
    }
    vec change = (vec){0} + (*top - highest);
    float keep = exp_below_0(change)[0];
    *total = *total * keep + sum(sums);
    *top = highest;
    add_values(out, keep, weights, tokens, count, value, size);
}

INLINE void attend_row(
    const struct step *s, int64_t row, const float *q, const float *cache, float *out,
    int64_t window, float scale, int64_t size)
{
    int64_t group = s->num_heads / s->num_kv_heads, kv = s->num_kv_heads * size;
    int64_t length = s->lengths[row];
    float top[s->num_heads], total[s->num_heads];
    const float *tokens[BLOCK];
    for (int64_t h = 0; h < s->num_heads; h++) top[h] = -3e38f, total[h] = 0;
    memset(out, 0, sizeof(float) * s->num_heads * size);
    int64_t first = window > 0 && window < length ? length - window : 0;
    for (; first < length; first += BLOCK) {
        int64_t count = length - first < BLOCK ? length - first : BLOCK;
        for (int64_t t = 0; t < count; t++) {
            int64_t page = row, offset = first + t;
            if (s->table) {
                page = s->table[row * s->table_stride + offset / s->page_size];
                offset %= s->page_size;
            }
            tokens[t] = cache + (page * s->page_size + offset) * 2 * kv;
        }
        for (int64_t h = 0; h < s->num_heads; h++) {
            int64_t key = h / group * size;
            attend_block(
                q + h * size, tokens, count, key, kv + key, size, scale,
                s->slopes ? s->slopes[h] : 0.0f, length - 1 - first, out + h * size, top + h,
                total + h);
        }
    }
    for (int64_t h = 0; h < s->num_heads; h++) {
        float share = 1.0f / total[h];
        for (int64_t i = 0; i < size; i++) out[h * size + i] *= share;
    }
}

struct attention {
    const struct step *s;
    const float *heads, *cache;
    float *out;
    int64_t window;
    float scale;
    int64_t next; /* row that no thread has taken yet */
};

static void attend_rows(void *data)
{
    struct attention *a = data;
    int64_t size = a->s->head_size, q_size = a->s->num_heads * size, row;
    int64_t stride = q_size + 2 * a->s->num_kv_heads * size;
    while ((row = __atomic_fetch_add(&a->next, 1, __ATOMIC_RELAXED)) < a->s->rows) {
        const float *q = a->heads + row * stride;
        float *out = a->out + row * q_size;
        switch (size) { /* sizes the compiler unrolls for */
        case 32: attend_row(a->s, row, q, a->cache, out, a->window, a->scale, 32); break;
        case 64: attend_row(a->s, row, q, a->cache, out, a->window, a->scale, 64); break;
        case 128: attend_row(a->s, row, q, a->cache, out, a->window, a->scale, 128); break;
        default: attend_row(a->s, row, q, a->cache, out, a->window, a->scale, size);
        }
    }
}

/* heads (rows, H + 2 K, D) -> out (rows, H D): softmax(scale q k + slope * -distance) v, over the
 * newest `window` keys (0: all). A cache slot holds K keys, then K values, of D each. Rows are taken
 * by `threads` threads, after all keys and values are written: rows may be of one sequence. */
void dschat_decode_attention(
    const struct step *s, const float *heads, float *cache, float *out, int64_t window,
    float scale, int64_t threads)
{
    int64_t q_size = s->num_heads * s->head_size, kv_size = 2 * s->num_kv_heads * s->head_size;
    int64_t keys = 0;
    for (int64_t row = 0; row < s->rows; row++) {
        keys += window > 0 ? smaller(window, s->lengths[row]) : s->lengths[row];
        if (s->slot_mapping)
            memcpy(
                cache + s->slot_mapping[row] * kv_size, heads + row * (q_size + kv_size) + q_size,
                sizeof(float) * kv_size);
    }
    struct attention a = {s, heads, cache, out, window, scale, 0};
    threads = smaller(threads, smaller(s->rows, 2 * keys * q_size / MIN_WORK));
    dschat_on_team(attend_rows, &a, threads);
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
        float best = highest(logits, count);
        before[0] = 0;
        for (int64_t b = 0; b < blocks; b++)
            before[b + 1] =
                before[b] + block_masses(logits, b * CDF_BLOCK, count, best, temperature, masses);
        double target = uniform[row] * before[blocks], log_total = log(before[blocks]);
        if (size > count) { /* in a scale of its own: it may be of any size beside the others */
            float top = highest(logits + count, size - count);
            double rest = 0;
            for (int64_t first = count; first < size; first += CDF_BLOCK)
                rest += block_masses(logits, first, size, top, temperature, masses);
            double more = ((double)top - best) / temperature + log(rest) - log_total;
            log_total += log1p(exp(-fabs(more))) + (more > 0 ? more : 0);
        }
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
        logprobs[row] = ((double)logits[ids[row]] - best) / temperature - log_total;
    }
}
