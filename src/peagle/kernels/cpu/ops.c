/* The small operations between a decoder's matrix products.
 *
 * Vectors are GNU C's (gcc, clang), which name the lanes of every sum: no reordering by the
 * compiler, so a row's result never depends on the rows around it, and NaN and infinity go
 * through as they must.
 */

#include "kernels.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

enum { LANES = 8, TILE = 32, IN_REGISTERS = 8 };
enum { ROWS_PER_TASK = 4, MOST_STATES = 256, WORK_FOR_THREADS = 100000 /* multiply-adds */ };

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

/* Rows `begin` .. `end` of a span and the heads `low` .. `high` of one key-value head: each row
 * over positions 0 .. its own. out and q are those of the span's first row. */
typedef struct {
    const int64_t *span;
    float *out;
    const float *q;
    int64_t begin, end, shared, low, high;
} attention_task;

typedef struct {
    float *out;
    const float *q;
    int64_t q_stride;
    const layer_cache *cache;
    const step_layout *step;
    atomic_llong next;
} attention_job;

/* The keys and values of positions base .. base + count - 1 as a row of a tree sees them: from
 * the tree's first row on, its own path. So its sums are those it would have in a chain. */
INLINE void tree_pointers(const attention_job *job, const attention_task *task,
                          const int64_t *path, int64_t base, int64_t count, const float **keys,
                          const float **values, int64_t dim) {
    const step_layout *step = job->step;
    const int64_t start = task->span[SPAN_START], *blocks = step->blocks + task->span[SPAN_BLOCKS];
    for (int64_t j = start > base ? start - base : 0; j < count; j++) {
        int64_t place = start + path[1 + base + j - start];
        int64_t offset = slot_of(blocks, step->block_size, place) * step->kv_heads + task->shared;
        keys[j] = job->cache->keys + offset * dim;
        values[j] = job->cache->values + offset * dim;
    }
}

INLINE void attend(const attention_job *job, const attention_task *task, int64_t dim) {
    const step_layout *step = job->step;
    const int64_t heads = step->heads, kv_heads = step->kv_heads, window = job->cache->window;
    const int64_t start = task->span[SPAN_START], *blocks = step->blocks + task->span[SPAN_BLOCKS];
    const int64_t *paths = NULL;
    if (task->span[SPAN_PATHS] >= 0) paths = step->paths + task->span[SPAN_PATHS] * step->path_size;
    const int64_t group = task->high - task->low;
    const float scale = 1.0f / sqrtf((float)dim);
    running states[MOST_STATES];
    for (int64_t i = 0; i < (task->end - task->begin) * group; i++)
        states[i] = (running){-INFINITY, 0.0f};
    for (int64_t row = task->begin; row < task->end; row++)
        memset(task->out + (row * heads + task->low) * dim, 0, sizeof(float) * group * dim);

    int64_t lowest_row = start + task->begin, limit = start + task->end;
    if (paths) {
        lowest_row = start;
        limit = start + 1;
        for (int64_t row = task->begin; row < task->end; row++) {
            int64_t end = start + paths[row * step->path_size] + 1;
            limit = end > limit ? end : limit;
        }
    }
    int64_t seen_first = window && lowest_row >= window ? lowest_row - window + 1 : 0;
    for (int64_t base = seen_first - seen_first % TILE; base < limit; base += TILE) {
        int64_t count = limit - base < TILE ? limit - base : TILE;
        const float *keys[TILE], *values[TILE];
        for (int64_t j = 0; j < count; j++) {
            int64_t slot = slot_of(blocks, step->block_size, base + j);
            keys[j] = job->cache->keys + (slot * kv_heads + task->shared) * dim;
            values[j] = job->cache->values + (slot * kv_heads + task->shared) * dim;
        }
        for (int64_t row = task->begin; row < task->end; row++) {
            const int64_t *path = paths ? paths + row * step->path_size : NULL;
            int64_t position = start + (path ? path[0] : row);
            int64_t lowest = window && position >= window ? position - window + 1 : 0;
            int64_t first = lowest > base ? lowest - base : 0;
            int64_t end = position - base + 1 < count ? position - base + 1 : count;
            if (first >= end) continue;
            if (path) tree_pointers(job, task, path, base, end, keys, values, dim);
            for (int64_t head = task->low; head < task->high; head++)
                add_tile(task->out + (row * heads + head) * dim,
                         states + (row - task->begin) * group + head - task->low,
                         task->q + row * job->q_stride + head * dim, keys, values, (int)first,
                         (int)end, scale, dim);
        }
    }
    for (int64_t row = task->begin; row < task->end; row++)
        for (int64_t head = task->low; head < task->high; head++) {
            float *place = task->out + (row * heads + head) * dim;
            lanes total = all(states[(row - task->begin) * group + head - task->low].total);
            for (int64_t d = 0; d < dim; d += LANES) store(place + d, load(place + d) / total);
        }
}

INLINE int64_t tasks_of(const int64_t *span, int64_t kv_heads) {
    return (span[SPAN_ROWS] + ROWS_PER_TASK - 1) / ROWS_PER_TASK * kv_heads;
}

/* Takes tasks until none is left; each row's sums are one task's, whoever does it. */
static void attend_all(void *shared) {
    attention_job *job = shared;
    const step_layout *step = job->step;
    const int64_t kv_heads = step->kv_heads, group = step->heads / kv_heads;
    int64_t before = 0, s = 0, row = 0; /* tasks and rows of the spans before s */
    for (;;) {
        int64_t number = atomic_fetch_add(&job->next, 1);
        const int64_t *span = step->spans + SPAN_COLUMNS * s;
        for (; s < step->num_spans && number - before >= tasks_of(span, kv_heads); s++) {
            before += tasks_of(span, kv_heads);
            row += span[SPAN_ROWS];
            span += SPAN_COLUMNS;
        }
        if (s == step->num_spans) return;
        int64_t begin = (number - before) / kv_heads * ROWS_PER_TASK;
        int64_t kv_head = (number - before) % kv_heads, end = begin + ROWS_PER_TASK;
        attention_task task = {
            .span = span,
            .out = job->out + row * step->heads * step->dim,
            .q = job->q + row * job->q_stride,
            .begin = begin,
            .end = end < span[SPAN_ROWS] ? end : span[SPAN_ROWS],
            .shared = kv_head,
            .low = kv_head * group,
            .high = (kv_head + 1) * group,
        };
        if (step->dim == 64)
            attend(job, &task, 64);
        else if (step->dim == 128)
            attend(job, &task, 128);
        else
            attend(job, &task, step->dim);
    }
}

/* Writes k and v [N, g, D] to their slots of the cache, then attends with q [N, h, D] -> out
 * [N, h, D]. Needs h / g <= MOST_STATES / ROWS_PER_TASK. */
void paged_attention(float *out, const float *q, int64_t q_stride, const float *k,
                     int64_t k_stride, const float *v, int64_t v_stride,
                     const layer_cache *cache, const step_layout *step, const threads *team) {
    const int64_t size = step->kv_heads * step->dim;
    int64_t seen = 0;
    for (int64_t s = 0, row = 0; s < step->num_spans; s++) {
        const int64_t *span = step->spans + SPAN_COLUMNS * s;
        const int64_t *blocks = step->blocks + span[SPAN_BLOCKS];
        seen += span[SPAN_ROWS] * (span[SPAN_START] + span[SPAN_ROWS]);
        for (int64_t i = 0; i < span[SPAN_ROWS]; i++, row++) {
            int64_t place = span[SPAN_START] + span[SPAN_FIRST_ROW] + i;
            int64_t slot = slot_of(blocks, step->block_size, place);
            memcpy(cache->keys + slot * size, k + row * k_stride, sizeof(float) * size);
            memcpy(cache->values + slot * size, v + row * v_stride, sizeof(float) * size);
        }
    }
    attention_job job = {.out = out, .q = q, .q_stride = q_stride, .cache = cache, .step = step};
    if (team->count > 1 && seen * step->heads * step->dim > WORK_FOR_THREADS)
        team->run(attend_all, &job, (unsigned)team->count, 0);
    else
        attend_all(&job);
}

/* The sum of e^(x - shift). */
double total_exponential(const float *x, int64_t size, float shift) {
    int64_t whole = size - size % LANES;
    doubles sums = {0};
    for (int64_t i = 0; i < whole; i += LANES)
        sums += __builtin_convertvector(exponential(load(x + i) - all(shift)), doubles);
    double total = 0.0;
    for (int i = 0; i < LANES; i++) total += sums[i];
    for (int64_t i = whole; i < size; i++) total += exponential(all(x[i] - shift))[0];
    return total;
}
