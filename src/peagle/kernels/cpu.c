/* The small operations between a decoder's matrix products, in float32, one call each.
 *
 * One thread: a second OpenMP runtime would spin against torch's. Vectors are GNU C's (gcc,
 * clang), which name the lanes of every sum: no reordering by the compiler, so a row's result
 * never depends on the rows around it, and NaN and infinity go through as they must.
 *
 * Shapes: N rows, H hidden, h heads, g key-value heads, D head dimension, I intermediate.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { LANES = 8, TILE = 32, IN_REGISTERS = 8 };

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef double doubles __attribute__((vector_size(8 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

/* gcc before 12 has only the one, clang only the other. */
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif
#define INLINE static inline __attribute__((always_inline))

INLINE lanes load(const float *p) {
    lanes x;
    memcpy(&x, p, sizeof x); /* unaligned */
    return x;
}

INLINE void store(float *p, lanes x) { memcpy(p, &x, sizeof x); }

INLINE lanes all(float x) { return (lanes){x, x, x, x, x, x, x, x}; }

INLINE lanes choose(ints mask, lanes yes, lanes no) {
    return (lanes)((mask & (ints)yes) | (~mask & (ints)no));
}

INLINE float sum(lanes x) {
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

INLINE float largest(lanes x) {
    float best = x[0];
    for (int i = 1; i < LANES; i++) best = x[i] > best ? x[i] : best;
    return best;
}

/* e^x to about one unit in the last place (Cephes' polynomial). The comparisons are false for
 * NaN, which so passes the clamp; beyond the clamp lie infinity and zero. */
INLINE lanes exponential(lanes x) {
    x = choose(x > all(89.0f), all(89.0f), x);
    x = choose(x < all(-104.5f), all(-104.5f), x);
    const lanes magic = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    lanes shifted = x * all(1.44269504088896341f) + magic;
    lanes n = shifted - magic;
    lanes r = x - n * all(0.693359375f) - n * all(-2.12194440e-4f);
    lanes p = all(1.9875691500e-4f);
    p = p * r + all(1.3981999507e-3f);
    p = p * r + all(8.3334519073e-3f);
    p = p * r + all(4.1665795894e-2f);
    p = p * r + all(1.6666665459e-1f);
    p = p * r + all(5.0000001201e-1f);
    p = p * r * r + r + all(1.0f);
    /* 2^n in two factors, since 2^128 and 2^-151 are no floats of their own. */
    ints whole = (ints)((bits)shifted - (bits)magic);
    ints half = whole >> 1;
    bits low = ((bits)half + 127u) << 23;
    bits high = ((bits)(whole - half) + 127u) << 23;
    return p * (lanes)low * (lanes)high;
}

/* out[n] = x[n] / sqrt(mean(x[n]^2) + eps) * weight; x [N, H] */
void rms_norm(float *out, const float *x, const float *weight, int64_t rows, int64_t size,
              double eps) {
    int64_t whole = size - size % LANES;
    for (int64_t row = 0; row < rows; row++, x += size, out += size) {
        doubles squares = {0};
        for (int64_t i = 0; i < whole; i += LANES) {
            doubles part = __builtin_convertvector(load(x + i), doubles);
            squares += part * part;
        }
        double total = 0.0;
        for (int i = 0; i < LANES; i++) total += squares[i];
        for (int64_t i = whole; i < size; i++) total += (double)x[i] * x[i];
        float scale = (float)(1.0 / sqrt(total / (double)size + eps));
        for (int64_t i = 0; i < whole; i += LANES)
            store(out + i, load(x + i) * all(scale) * load(weight + i));
        for (int64_t i = whole; i < size; i++) out[i] = x[i] * scale * weight[i];
    }
}

/* out = x * cos + (x with its halves swapped) * sin; x [N, heads, D], N rows `stride` apart */
void rotate(float *out, const float *x, int64_t stride, const float *cosine, const float *sine,
            int64_t rows, int64_t heads, int64_t dim) {
    int64_t half = dim / 2, whole = half - half % LANES;
    for (int64_t row = 0; row < rows; row++, x += stride, cosine += dim, sine += dim) {
        const float *head = x;
        for (int64_t h = 0; h < heads; h++, head += dim, out += dim) {
            for (int64_t i = 0, j = half; i < whole; i += LANES, j += LANES) {
                lanes a = load(head + i), b = load(head + j);
                store(out + i, a * load(cosine + i) + b * load(sine + i));
                store(out + j, b * load(cosine + j) + a * load(sine + j));
            }
            for (int64_t i = whole, j = half + whole; i < half; i++, j++) {
                float a = head[i], b = head[j];
                out[i] = a * cosine[i] + b * sine[i];
                out[j] = b * cosine[j] + a * sine[j];
            }
        }
    }
}

INLINE lanes silu(lanes x) { return x / (all(1.0f) + exponential(-x)); }

/* out = silu(gate) * up; gate_up [N, 2I] holds both, out [N, I] */
void silu_mul(float *out, const float *gate_up, int64_t rows, int64_t size) {
    int64_t whole = size - size % LANES, rest = size - whole;
    for (int64_t row = 0; row < rows; row++, gate_up += 2 * size, out += size) {
        const float *gate = gate_up, *up = gate_up + size;
        for (int64_t i = 0; i < whole; i += LANES)
            store(out + i, silu(load(gate + i)) * load(up + i));
        if (rest) {
            float g[LANES] = {0}, u[LANES] = {0}, last[LANES];
            memcpy(g, gate + whole, 4 * rest);
            memcpy(u, up + whole, 4 * rest);
            store(last, silu(load(g)) * load(u));
            memcpy(out + whole, last, 4 * rest);
        }
    }
}

/* One step's rows: spans one after the other, each of one sequence. Mirrored in cpu.py. */
typedef struct {
    int64_t num_spans;
    const int64_t *spans;  /* [num_spans, 3]: first position, rows, first entry in `blocks` */
    const int64_t *blocks; /* the sequences' block tables */
    int64_t block_size, heads, kv_heads, dim;
} step_layout;

INLINE int64_t slot_of(const int64_t *blocks, int64_t block_size, int64_t position) {
    return blocks[position / block_size] * block_size + position % block_size;
}

/* Running softmax of one query: the scores' maximum and the sum of e^(score - maximum). */
typedef struct {
    float highest, total;
} running;

/* Two vectors into one: each half of the lanes of a, then of b, summed pairwise. Three rounds
 * over eight vectors give the eight sums of their lanes, always in the same order. */
INLINE lanes pair(lanes a, lanes b) {
    return SHUFFLE(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + SHUFFLE(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
}

INLINE lanes pair_of_pairs(lanes a, lanes b) {
    return SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
}

INLINE lanes halves(lanes a, lanes b) {
    return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}

/* query . keys[j + i] for i = 0 .. 7. Keys that are not visible are not read: the first visible
 * one stands in, and the caller discards its score. */
INLINE lanes eight_scores(const float *query, const float *const *keys, int j, int first, int end,
                          int64_t dim) {
    const float *key[LANES];
    lanes p[LANES];
    for (int i = 0; i < LANES; i++) {
        key[i] = keys[j + i >= first && j + i < end ? j + i : first];
        p[i] = all(0.0f);
    }
    for (int64_t d = 0; d < dim; d += LANES) {
        lanes part = load(query + d);
        for (int i = 0; i < LANES; i++) p[i] += part * load(key[i] + d);
    }
    lanes low = pair_of_pairs(pair(p[0], p[1]), pair(p[2], p[3]));
    lanes high = pair_of_pairs(pair(p[4], p[5]), pair(p[6], p[7]));
    return halves(low, high);
}

/* Adds one tile of keys to one query. keys[j], values[j] for first <= j < end may be read; the
 * others may hold anything and are not touched. Each tile starts at a multiple of TILE, so the
 * order of a query's sums follows from its own position alone. */
INLINE void add_tile(float *out, running *state, const float *query, const float *const *keys,
                     const float *const *values, int first, int end, float scale, int64_t dim) {
    float scores[TILE];
    for (int j = 0; j < TILE; j += LANES) {
        lanes eight = all(-INFINITY);
        if (j < end && first < j + LANES) {
            eight = eight_scores(query, keys, j, first, end, dim) * all(scale);
            ints place = j + (ints){0, 1, 2, 3, 4, 5, 6, 7};
            eight = choose((place >= first) & (place < end), eight, all(-INFINITY));
        }
        store(scores + j, eight);
    }
    lanes best = load(scores);
    for (int j = LANES; j < TILE; j += LANES) {
        lanes x = load(scores + j);
        best = choose(x > best, x, best);
    }
    /* A NaN may lose its comparison; it still reaches the total, and so the result. */
    float highest = largest(best);
    highest = highest > state->highest ? highest : state->highest;
    float base = highest == -INFINITY ? 0.0f : highest; /* all -inf so far: weights of zero */
    lanes total = all(0.0f);
    for (int j = 0; j < TILE; j += LANES) {
        lanes weights = exponential(load(scores + j) - all(base));
        store(scores + j, weights);
        total += weights;
    }
    float kept = exponential(all(state->highest - base))[0];
    state->total = state->total * kept + sum(total);
    state->highest = highest;
    int64_t d = 0;
    for (; d + IN_REGISTERS * LANES <= dim; d += IN_REGISTERS * LANES) {
        lanes sums[IN_REGISTERS];
        for (int i = 0; i < IN_REGISTERS; i++) sums[i] = load(out + d + i * LANES) * all(kept);
        for (int j = first; j < end; j++)
            for (int i = 0; i < IN_REGISTERS; i++)
                sums[i] += all(scores[j]) * load(values[j] + d + i * LANES);
        for (int i = 0; i < IN_REGISTERS; i++) store(out + d + i * LANES, sums[i]);
    }
    for (; d < dim; d += LANES) {
        lanes sums = load(out + d) * all(kept);
        for (int j = first; j < end; j++) sums += all(scores[j]) * load(values[j] + d);
        store(out + d, sums);
    }
}

/* out and q of the span's rows -> attention of each row over positions 0 .. its own. */
INLINE void attend(float *out, const float *q, int64_t q_stride, const float *keys,
                   const float *values, const step_layout *step, const int64_t *span,
                   running *states, int64_t window, int64_t dim) {
    const int64_t heads = step->heads, kv_heads = step->kv_heads, group = heads / kv_heads;
    const int64_t start = span[0], rows = span[1], *blocks = step->blocks + span[2];
    const float scale = 1.0f / sqrtf((float)dim);
    for (int64_t i = 0; i < rows * heads; i++) states[i] = (running){-INFINITY, 0.0f};
    memset(out, 0, sizeof(float) * rows * heads * dim);

    int64_t seen_first = window && start >= window ? start - window + 1 : 0;
    for (int64_t base = seen_first - seen_first % TILE; base < start + rows; base += TILE) {
        int64_t count = start + rows - base < TILE ? start + rows - base : TILE;
        int64_t offsets[TILE];
        for (int64_t j = 0; j < count; j++)
            offsets[j] = slot_of(blocks, step->block_size, base + j) * kv_heads * dim;
        for (int64_t shared = 0; shared < kv_heads; shared++) {
            const float *tile_keys[TILE], *tile_values[TILE];
            for (int64_t j = 0; j < count; j++) {
                tile_keys[j] = keys + offsets[j] + shared * dim;
                tile_values[j] = values + offsets[j] + shared * dim;
            }
            for (int64_t row = 0; row < rows; row++) {
                int64_t position = start + row;
                int64_t lowest = window && position >= window ? position - window + 1 : 0;
                int64_t first = lowest > base ? lowest - base : 0;
                int64_t end = position - base + 1 < count ? position - base + 1 : count;
                if (first >= end) continue;
                for (int64_t head = shared * group; head < (shared + 1) * group; head++)
                    add_tile(out + (row * heads + head) * dim, states + row * heads + head,
                             q + row * q_stride + head * dim, tile_keys, tile_values, (int)first,
                             (int)end, scale, dim);
            }
        }
    }
    for (int64_t i = 0; i < rows * heads; i++)
        for (int64_t d = 0; d < dim; d += LANES)
            store(out + i * dim + d, load(out + i * dim + d) / all(states[i].total));
}

/* Writes k and v [N, g, D] to their slots of one layer's cache [S, g, D], then attends with
 * q [N, h, D] -> out [N, h, D]. A window of 0 is none. Returns 0, or 1 if memory is short. */
int paged_attention(float *out, const float *q, int64_t q_stride, const float *k,
                    int64_t k_stride, const float *v, int64_t v_stride, float *keys,
                    float *values, int64_t window, const step_layout *step) {
    const int64_t size = step->kv_heads * step->dim;
    int64_t most_rows = 0;
    for (int64_t s = 0, row = 0; s < step->num_spans; s++) {
        const int64_t *span = step->spans + 3 * s, *blocks = step->blocks + span[2];
        if (span[1] > most_rows) most_rows = span[1];
        for (int64_t i = 0; i < span[1]; i++, row++) {
            int64_t slot = slot_of(blocks, step->block_size, span[0] + i);
            memcpy(keys + slot * size, k + row * k_stride, sizeof(float) * size);
            memcpy(values + slot * size, v + row * v_stride, sizeof(float) * size);
        }
    }
    running *states = malloc(sizeof(running) * (most_rows * step->heads + 1));
    if (!states) return 1;
    for (int64_t s = 0; s < step->num_spans; s++) {
        const int64_t *span = step->spans + 3 * s;
        if (step->dim == 64)
            attend(out, q, q_stride, keys, values, step, span, states, window, 64);
        else if (step->dim == 128)
            attend(out, q, q_stride, keys, values, step, span, states, window, 128);
        else
            attend(out, q, q_stride, keys, values, step, span, states, window, step->dim);
        out += span[1] * step->heads * step->dim;
        q += span[1] * q_stride;
    }
    free(states);
    return 0;
}
