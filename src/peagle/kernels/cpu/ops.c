/* The small operations between a decoder's matrix products. A row's result never depends on the
 * rows around it, nor on the number of threads. */

#include "kernels.h"
#include "vectors.h"

#include <math.h>
#include <stdatomic.h>

#ifdef __AVX512F__
enum { QUERIES = 4 }; /* 32 registers: 4 queries by 4 vectors of sums */
#else
enum { QUERIES = 2 }; /* 16 registers: 2 queries by 4 vectors of sums */
#endif
enum { TILE = 64 /* positions */, LINE = 16 /* floats of a cache's line */ };
enum { TASKS_PER_THREAD = 2, MOST_ROWS = 16, MOST_QUERIES = 256 /* of a task */ };
enum { CROWDED = 512 /* floats */, WORTH_A_COPY = 12 /* queries */ };
enum { WORK_FOR_THREADS = 100000 /* multiply-adds */ };

enum { NARROW = 8 }; /* lanes of a vector that fits one of doubles */
typedef float narrow __attribute__((vector_size(4 * NARROW)));
typedef double doubles __attribute__((vector_size(8 * NARROW)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

/* gcc before 12 has only the one, clang only the other. */
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif

INLINE lanes choose(ints mask, lanes yes, lanes no) {
    return (lanes)((mask & (ints)yes) | (~mask & (ints)no));
}

/* a > b ? a : b, so b where one of them is NaN; smaller alike. */
INLINE lanes larger(lanes a, lanes b) {
#if defined(__AVX512F__)
    return (lanes)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__FMA__)
    return (lanes)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

INLINE lanes smaller(lanes a, lanes b) {
#if defined(__AVX512F__)
    return (lanes)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__FMA__)
    return (lanes)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return choose(a < b, a, b);
#endif
}

/* After each step a lane holds the result of twice as many. */
#ifdef __AVX512F__
#define FOLDED(x, op)                                                                       \
    x = op(x, SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));         \
    x = op(x, SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));         \
    x = op(x, SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));         \
    x = op(x, SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14))
#else
#define FOLDED(x, op)                                                                       \
    x = op(x, SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3));                                       \
    x = op(x, SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5));                                       \
    x = op(x, SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6))
#endif

INLINE lanes plus(lanes a, lanes b) { return a + b; }

/* Of all lanes, in every lane. */
INLINE lanes largest(lanes x) {
    FOLDED(x, larger);
    return x;
}

INLINE lanes sum(lanes x) {
    FOLDED(x, plus);
    return x;
}

/* e^x to about one unit in the last place (Cephes' polynomial). NaN passes the clamp; beyond the
 * clamp lie infinity and zero. */
INLINE lanes exponential(lanes x) {
    x = smaller(all(89.0f), x);
    x = larger(all(-104.5f), x);
    const lanes magic = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    lanes shifted = multiply_add(x, all(1.44269504088896341f), magic);
    lanes n = shifted - magic;
    lanes r = multiply_add(n, all(-0.693359375f), x);
    r = multiply_add(n, all(2.12194440e-4f), r);
    lanes p = all(1.9875691500e-4f);
    p = multiply_add(p, r, all(1.3981999507e-3f));
    p = multiply_add(p, r, all(8.3334519073e-3f));
    p = multiply_add(p, r, all(4.1665795894e-2f));
    p = multiply_add(p, r, all(1.6666665459e-1f));
    p = multiply_add(p, r, all(5.0000001201e-1f));
    p = multiply_add(p * r, r, r) + all(1.0f);
#ifdef __AVX512F__
    return (lanes)_mm512_scalef_ps((__m512)p, (__m512)n); /* p * 2^n */
#else
    /* 2^n in two factors, since 2^128 and 2^-151 are no floats of their own. */
    ints whole = (ints)((bits)shifted - (bits)magic);
    ints half = whole >> 1;
    bits low = ((bits)half + 127u) << 23;
    bits high = ((bits)(whole - half) + 127u) << 23;
    return p * (lanes)low * (lanes)high;
#endif
}

INLINE doubles to_double(const float *x) {
    narrow part;
    memcpy(&part, x, sizeof part);
    return __builtin_convertvector(part, doubles);
}

INLINE double sum_of_doubles(doubles x) {
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

/* Sum of squares, in double: squares of float32 are exact there. */
INLINE double squares(const float *x, int64_t size) {
    doubles sums[2] = {{0}, {0}};
    int64_t i = 0;
    for (; i + 2 * NARROW <= size; i += 2 * NARROW)
        for (int j = 0; j < 2; j++) {
            doubles wide = to_double(x + i + j * NARROW);
            sums[j] += wide * wide;
        }
    double total = sum_of_doubles(sums[0] + sums[1]);
    for (; i < size; i++) total += (double)x[i] * x[i];
    return total;
}

/* out[n] = x[n] / sqrt(mean(x[n]^2) + eps) * weight; x [N, H] */
void rms_norm(float *out, const float *x, const float *weight, int64_t rows, int64_t size,
              double eps) {
    for (int64_t row = 0; row < rows; row++, x += size, out += size) {
        float scale = (float)(1.0 / sqrt(squares(x, size) / (double)size + eps));
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES)
            store(out + i, load(x + i) * all(scale) * load(weight + i));
        for (; i < size; i++) out[i] = x[i] * scale * weight[i];
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
                store(out + i, multiply_add(b, load(sine + i), a * load(cosine + i)));
                store(out + j, multiply_add(a, load(sine + j), b * load(cosine + j)));
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

/* A query and its softmax so far: the scores' maximum, the sums of e^(score - maximum) and, in
 * out, of these times the values. */
typedef struct {
    const float *query;
    float *out;
    float highest;
    lanes total;
} running;

/* Keys and values of TILE positions in order; only those of first <= j < end may be read. */
typedef struct {
    const float *keys[TILE], *values[TILE];
    int first, end;
} tile;

/* Lane i of the result is the sum of the lanes of x[i], in the same order for each i. */
INLINE lanes sums_of(lanes *x) {
#ifdef __AVX512F__
#define LOW(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HIGH(a, b) SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define LOW_PAIRS(a, b) SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH_PAIRS(a, b) SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#else
#define LOW(a, b) SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define HIGH(a, b) SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define LOW_PAIRS(a, b) SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define HIGH_PAIRS(a, b) SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#endif
    for (int i = 0; i < LANES; i += 2) x[i] = LOW(x[i], x[i + 1]) + HIGH(x[i], x[i + 1]);
    for (int i = 0; i < LANES; i += 4)
        x[i] = LOW_PAIRS(x[i], x[i + 2]) + HIGH_PAIRS(x[i], x[i + 2]);
#ifdef __AVX512F__
    for (int i = 0; i < LANES; i += 8) {
        lanes a = x[i], b = x[i + 4];
        x[i] = SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    return SHUFFLE(x[0], x[8], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           SHUFFLE(x[0], x[8], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
#else
    return SHUFFLE(x[0], x[4], 0, 1, 2, 3, 8, 9, 10, 11) +
           SHUFFLE(x[0], x[4], 4, 5, 6, 7, 12, 13, 14, 15);
#endif
}

/* Head dimensions are whole vectors of 8 lanes: of 16, the last may be half of one. */
INLINE lanes load_half(const float *p) {
    lanes x = {0};
    memcpy(&x, p, 32);
    return x;
}

/* query . key of one or two queries and as many keys, from key j on, as there are lanes for. For
 * keys that may not be read the first visible one stands in; the caller discards its score. */
INLINE void score(const running *states, int count, float (*scores)[TILE], const tile *t, int j,
                  int64_t dim) {
    const int number = LANES / count;
    const float *visible[LANES], *const *keys = t->keys + j;
    if (j < t->first || j + number > t->end) {
        for (int i = 0; i < number; i++)
            visible[i] = t->keys[j + i >= t->first && j + i < t->end ? j + i : t->first];
        keys = visible;
    }
    lanes sums[LANES], query[2];
    for (int i = 0; i < LANES; i++) sums[i] = all(0.0f);
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
        for (int q = 0; q < count; q++) query[q] = load(states[q].query + d);
        for (int i = 0; i < number; i++) {
            lanes key = load(keys[i] + d);
            for (int q = 0; q < count; q++)
                sums[q * number + i] = multiply_add(query[q], key, sums[q * number + i]);
        }
    }
    if (d < dim) {
        for (int q = 0; q < count; q++) query[q] = load_half(states[q].query + d);
        for (int i = 0; i < number; i++) {
            lanes key = load_half(keys[i] + d);
            for (int q = 0; q < count; q++)
                sums[q * number + i] = multiply_add(query[q], key, sums[q * number + i]);
        }
    }
    lanes products = sums_of(sums) * all(1.0f / sqrtf((float)dim));
    for (int q = 0; q < count; q++)
        memcpy(scores[q] + j, (char *)&products + 4 * number * q, 4 * number);
}

INLINE void score_visible(const running *states, int count, float (*scores)[TILE], const tile *t,
                          int64_t dim) {
    const int number = LANES / count;
    for (int j = t->first - t->first % number; j < t->end; j += number)
        score(states, count, scores, t, j, dim);
}

/* A tile's scores become weights e^(score - maximum). Returns what becomes of earlier sums. */
INLINE float weigh(running *state, float *weights, const tile *t) {
    const int begin = t->first - t->first % LANES;
    ints place;
    for (int i = 0; i < LANES; i++) place[i] = i;
    lanes best = all(-INFINITY);
    for (int j = begin; j < t->end; j += LANES) {
        lanes scores = load(weights + j);
        if (j < t->first || j + LANES > t->end) {
            ints visible = (place + j >= t->first) & (place + j < t->end);
            scores = choose(visible, scores, all(-INFINITY));
            store(weights + j, scores);
        }
        best = larger(scores, best);
    }
    /* A NaN may lose its comparison; it still reaches the total, and so the result. */
    lanes before = all(state->highest), highest = larger(largest(best), before);
    /* all -inf so far: weights of zero */
    lanes base = choose(highest == all(-INFINITY), all(0.0f), highest);
    lanes kept = exponential(before - base);
    lanes total = state->total * kept;
    for (int j = begin; j < t->end; j += LANES) {
        lanes weight = exponential(load(weights + j) - base);
        store(weights + j, weight);
        total += weight;
    }
    state->total = total;
    state->highest = highest[0];
    return kept[0];
}

/* Adds weighted values, from element d of the head on, of some queries; with constant numbers the
 * sums stay in registers. */
INLINE void add_values(running *states, int count, int vectors, float (*weights)[TILE],
                       const float *kept, const tile *t, int64_t d) {
    lanes sums[QUERIES][8];
    for (int q = 0; q < count; q++)
        for (int i = 0; i < vectors; i++)
            sums[q][i] = load(states[q].out + d + i * LANES) * all(kept[q]);
    for (int j = t->first; j < t->end; j++) {
        lanes value[8];
        for (int i = 0; i < vectors; i++) value[i] = load(t->values[j] + d + i * LANES);
        for (int q = 0; q < count; q++) {
            lanes weight = all(weights[q][j]);
            for (int i = 0; i < vectors; i++)
                sums[q][i] = multiply_add(weight, value[i], sums[q][i]);
        }
    }
    for (int q = 0; q < count; q++)
        for (int i = 0; i < vectors; i++) store(states[q].out + d + i * LANES, sums[q][i]);
}

INLINE void add_all_values(running *states, int count, float (*weights)[TILE], const float *kept,
                           const tile *t, int64_t dim) {
    int64_t d = 0;
    if (count * 2 <= QUERIES)
        for (; d + 8 * LANES <= dim; d += 8 * LANES)
            add_values(states, count, 8, weights, kept, t, d);
    for (; d + 4 * LANES <= dim; d += 4 * LANES)
        add_values(states, count, 4, weights, kept, t, d);
    for (; d + LANES <= dim; d += LANES) add_values(states, count, 1, weights, kept, t, d);
    for (; d < dim; d++) /* the half of a vector that may be left */
        for (int q = 0; q < count; q++) {
            float sum = states[q].out[d] * kept[q];
            for (int j = t->first; j < t->end; j++) sum += weights[q][j] * t->values[j][d];
            states[q].out[d] = sum;
        }
}

/* Adds one tile to queries that see the same part of it. Each tile starts at a multiple of TILE,
 * so the order of a query's sums follows from its own position alone. */
INLINE void add_tile(running *states, int64_t count, const tile *t, int64_t dim) {
    float weights[QUERIES][TILE], kept[QUERIES];
    for (int64_t some, q; count; states += some, count -= some) {
        some = count < QUERIES ? count : QUERIES;
        for (q = 0; q + 1 < some; q += 2) score_visible(states + q, 2, weights + q, t, dim);
        if (q < some) score_visible(states + q, 1, weights + q, t, dim);
        for (q = 0; q < some; q++) kept[q] = weigh(states + q, weights[q], t);
#define CASE(number)                                            \
    case number:                                                \
        add_all_values(states, number, weights, kept, t, dim);  \
        break
        switch (some) {
            CASE(1);
            CASE(2);
#ifdef __AVX512F__
            CASE(3);
            CASE(4);
#endif
        }
#undef CASE
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
    int64_t most_rows;
    atomic_llong next;
} attention_job;

INLINE void set_place(tile *t, int64_t j, const attention_job *job, const attention_task *task,
                      int64_t position, int64_t dim) {
    const step_layout *step = job->step;
    const int64_t *blocks = step->blocks + task->span[SPAN_BLOCKS];
    int64_t slot = slot_of(blocks, step->block_size, position);
    int64_t offset = (slot * step->kv_heads + task->shared) * dim;
    t->keys[j] = job->cache->keys + offset;
    t->values[j] = job->cache->values + offset;
    /* Values are wanted after all scores: their lines have time to come. */
    for (int64_t d = 0; d < dim; d += LINE) __builtin_prefetch(t->values[j] + d);
}

/* The keys and values of positions base .. base + count - 1 as a row of a tree sees them: from
 * the tree's first row on, its own path. So its sums are those it would have in a chain. */
INLINE void set_path(tile *t, const attention_job *job, const attention_task *task,
                     const int64_t *path, int64_t base, int64_t count, int64_t dim) {
    const int64_t start = task->span[SPAN_START], first = start > base ? start - base : 0;
    for (int64_t j = first; j < count; j++)
        set_place(t, j, job, task, start + path[1 + base + j - start], dim);
}

/* Moves a tile together. Positions that lie a multiple of CROWDED apart share few sets of the
 * first-level cache, so a tile would not stay there for all queries. */
INLINE void copy_tile(tile *t, float *copies, int64_t dim) {
    for (int j = 0; j < TILE; j++, copies += dim)
        t->keys[j] = memcpy(copies, t->keys[j], sizeof(float) * dim);
    for (int j = 0; j < TILE; j++, copies += dim)
        t->values[j] = memcpy(copies, t->values[j], sizeof(float) * dim);
}

INLINE void attend(const attention_job *job, const attention_task *task, int64_t dim) {
    const step_layout *step = job->step;
    const int64_t heads = step->heads, window = job->cache->window;
    const int64_t start = task->span[SPAN_START], group = task->high - task->low;
    const int64_t *paths = NULL;
    if (task->span[SPAN_PATHS] >= 0) paths = step->paths + task->span[SPAN_PATHS] * step->path_size;
    running states[MOST_QUERIES], *state = states;
    for (int64_t row = task->begin; row < task->end; row++)
        for (int64_t head = task->low; head < task->high; head++, state++) {
            state->query = task->q + row * job->q_stride + head * dim;
            state->out = task->out + (row * heads + head) * dim;
            state->highest = -INFINITY;
            state->total = all(0.0f);
            memset(state->out, 0, sizeof(float) * dim);
        }

    int64_t lowest_row = start + task->begin, limit = start + task->end;
    if (paths) {
        lowest_row = start;
        limit = start + 1;
        for (int64_t row = task->begin; row < task->end; row++) {
            int64_t end = start + paths[row * step->path_size] + 1;
            limit = end > limit ? end : limit;
        }
    }
    const int64_t stride = step->kv_heads * dim;
    const int copied = stride % CROWDED == 0 && state - states >= WORTH_A_COPY;
    float copies[copied ? 2 * TILE * dim : 1] __attribute__((aligned(4 * LINE)));
    int64_t seen_first = window && lowest_row >= window ? lowest_row - window + 1 : 0;
    for (int64_t base = seen_first - seen_first % TILE; base < limit; base += TILE) {
        int64_t count = limit - base < TILE ? limit - base : TILE;
        tile t = {.first = 0, .end = TILE};
        for (int64_t j = 0; j < count; j++) set_place(&t, j, job, task, base + j, dim);
        /* Before a tree's second row, where paths part, all may see the whole tile. */
        const int whole = base + TILE <= lowest_row + 1 && (!window || base >= limit - window);
        const int64_t together = whole ? task->end - task->begin : 1;
        if (whole && copied) copy_tile(&t, copies, dim);
        for (int64_t row = task->begin; row < task->end; row += together) {
            const int64_t *path = paths ? paths + row * step->path_size : NULL;
            int64_t position = start + (path ? path[0] : row);
            int64_t lowest = window && position >= window ? position - window + 1 : 0;
            if (!whole) {
                t.first = (int)(lowest > base ? lowest - base : 0);
                t.end = (int)(position - base + 1 < count ? position - base + 1 : count);
                if (t.first >= t.end) continue;
                if (path) set_path(&t, job, task, path, base, t.end, dim);
            }
            add_tile(states + (row - task->begin) * group, together * group, &t, dim);
        }
    }
    for (running *end = state, *s = states; s < end; s++) {
        float total = sum(s->total)[0];
        for (int64_t d = 0; d < dim; d++) s->out[d] /= total;
    }
}

/* A task's rows share what is read of the cache; but each thread wants some tasks. */
static int64_t most_rows_of_tasks(int64_t rows, const step_layout *step, int64_t threads) {
    int64_t most = MOST_QUERIES / (step->heads / step->kv_heads);
    if (most > MOST_ROWS) most = MOST_ROWS;
    if (threads == 1) return most;
    int64_t size = rows * step->kv_heads / (threads * TASKS_PER_THREAD);
    return size < 1 ? 1 : size < most ? size : most;
}

INLINE int64_t parts_of(const int64_t *span, const attention_job *job) {
    return (span[SPAN_ROWS] + job->most_rows - 1) / job->most_rows;
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
        for (; s < step->num_spans && number - before >= parts_of(span, job) * kv_heads; s++) {
            before += parts_of(span, job) * kv_heads;
            row += span[SPAN_ROWS];
            span += SPAN_COLUMNS;
        }
        if (s == step->num_spans) return;
        int64_t part = (number - before) / kv_heads, parts = parts_of(span, job);
        int64_t kv_head = (number - before) % kv_heads;
        attention_task task = {
            .span = span,
            .out = job->out + row * step->heads * step->dim,
            .q = job->q + row * job->q_stride,
            .begin = span[SPAN_ROWS] * part / parts,
            .end = span[SPAN_ROWS] * (part + 1) / parts,
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
 * [N, h, D]. Needs h / g <= MOST_QUERIES. */
void paged_attention(float *out, const float *q, int64_t q_stride, const float *k,
                     int64_t k_stride, const float *v, int64_t v_stride,
                     const layer_cache *cache, const step_layout *step, const threads *team) {
    const int64_t size = step->kv_heads * step->dim;
    int64_t seen = 0, row = 0;
    for (int64_t s = 0; s < step->num_spans; s++) {
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
    int worth = team->count > 1 && seen * step->heads * step->dim > WORK_FOR_THREADS;
    int64_t most_rows = most_rows_of_tasks(row, step, worth ? team->count : 1);
    attention_job job = {.out = out, .q = q, .q_stride = q_stride, .cache = cache, .step = step,
                         .most_rows = most_rows};
    if (worth)
        team->run(attend_all, &job, (unsigned)team->count, 0);
    else
        attend_all(&job);
}

/* The sum of e^(x - shift). */
double total_exponential(const float *x, int64_t size, float shift) {
    doubles sums = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        float terms[LANES];
        store(terms, exponential(load(x + i) - all(shift)));
        for (int j = 0; j < LANES; j += NARROW) sums += to_double(terms + j);
    }
    double total = sum_of_doubles(sums);
    for (; i < size; i++) total += exponential(all(x[i] - shift))[0];
    return total;
}
