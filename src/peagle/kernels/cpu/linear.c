/* out [N, O] = x [N, I] times weight [I, O], float32, for few rows: the products of decoding.
 *
 * One row must read the whole weight from memory; a few more rows should cost little on top. So
 * the weight is read once, in a strip of DEPTH inputs by a tile of outputs, and every row is
 * served while the strip is in cache. Strips run along the outputs, in which the weight lies
 * contiguous, so that the hardware prefetches DEPTH streams.
 *
 * Each output is the sum over strips of the sum over a strip's inputs, in rising order: it does
 * not depend on the rows around it, on the number of threads, or on the tile it fell into.
 */

#include "kernels.h"

#include <stdatomic.h>
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

#ifdef __AVX512F__
enum { LANES = 16, ROWS = 8 }; /* 32 registers: 8 rows by 3 vectors of sums */
#else
enum { LANES = 8, ROWS = 4 }; /* 16 registers: 4 rows by 2 vectors of sums */
#endif
enum { DEPTH = 16, AHEAD = 8 /* inputs */, MOST_VECTORS = 8, LARGEST_TILE = 4096 };

#define INLINE static inline __attribute__((always_inline))

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE lanes all(float x) { return x - (lanes){0}; }

/* a * b + c, rounded once where the CPU can, and everywhere alike: left to itself, gcc fuses the two
 * in one panel and not in another, as it deems fast, and a row's bits would tell its panel. */
INLINE lanes multiply_add(lanes a, lanes b, lanes c) {
#if defined(__AVX512F__)
    return (lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

INLINE float multiply_add_one(float a, float b, float c) {
#if defined(__AVX512F__) || defined(__FMA__) || defined(__FP_FAST_FMAF)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

/* rows by vectors of sums; with constant sizes the compiler keeps them in registers. */
INLINE void panel(int rows, int vectors, float *out, int64_t out_stride, const float *x,
                  int64_t x_stride, const float *weight, int64_t outputs, int depth, int first) {
    lanes sums[ROWS][MOST_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = all(0.0f);
    for (int k = 0; k < depth; k++) {
        lanes part[MOST_VECTORS];
        for (int v = 0; v < vectors; v++) {
            const float *place = weight + k * outputs + v * LANES;
            part[v] = *(const lanes *)place;
            /* One row asks too little of memory to be helped; past the end nothing traps. */
            if (rows > 1) __builtin_prefetch(place + AHEAD * outputs);
        }
        for (int r = 0; r < rows; r++) {
            lanes input = all(x[r * x_stride + k]);
            for (int v = 0; v < vectors; v++) sums[r][v] = multiply_add(input, part[v], sums[r][v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            lanes *place = (lanes *)(out + r * out_stride + v * LANES);
            if (!first) sums[r][v] += *place;
            *place = sums[r][v];
        }
}

/* Panels as wide as fit, then one vector wide, then single outputs. */
INLINE void strip(int rows, int vectors, float *out, int64_t out_stride, const float *x,
                  int64_t x_stride, const float *weight, int64_t outputs, int64_t width,
                  int depth, int first) {
    int64_t o = 0;
    if (depth == DEPTH)
        for (; o + vectors * LANES <= width; o += vectors * LANES)
            panel(rows, vectors, out + o, out_stride, x, x_stride, weight + o, outputs, DEPTH,
                  first);
    for (; o + LANES <= width; o += LANES)
        panel(rows, 1, out + o, out_stride, x, x_stride, weight + o, outputs, depth, first);
    for (; o < width; o++)
        for (int r = 0; r < rows; r++) {
            float sum = 0.0f;
            for (int k = 0; k < depth; k++)
                sum = multiply_add_one(x[r * x_stride + k], weight[k * outputs + o], sum);
            float *place = out + r * out_stride + o;
            *place = first ? sum : *place + sum;
        }
}

typedef struct {
    float *out;
    const float *x, *weight;
    int64_t rows, x_stride, inputs, outputs, tile;
    atomic_llong next; /* the first output that no thread has taken */
} product;

static void serve(const product *p, int64_t row, int64_t o, int64_t k, int64_t width, int depth) {
    int64_t left = p->rows - row;
    float *out = p->out + row * p->outputs + o;
    const float *x = p->x + row * p->x_stride + k, *weight = p->weight + k * p->outputs + o;
#define STRIP(rows, vectors)                                                                    \
    case rows:                                                                                  \
        strip(rows, vectors, out, p->outputs, x, p->x_stride, weight, p->outputs, width, depth, \
              k == 0);                                                                          \
        break
    switch (left < ROWS ? left : ROWS) {
        STRIP(1, 8);
#ifdef __AVX512F__
        STRIP(2, 4);
        STRIP(3, 4);
        STRIP(4, 4);
        STRIP(5, 4);
        STRIP(6, 4);
        STRIP(7, 3);
        STRIP(8, 3);
#else
        STRIP(2, 4);
        STRIP(3, 2);
        STRIP(4, 2);
#endif
    }
#undef STRIP
}

static void work(void *shared) {
    product *p = shared;
    for (;;) {
        int64_t o = atomic_fetch_add(&p->next, p->tile);
        if (o >= p->outputs) return;
        int64_t width = p->outputs - o < p->tile ? p->outputs - o : p->tile;
        for (int64_t k = 0; k < p->inputs; k += DEPTH) {
            int depth = p->inputs - k < DEPTH ? (int)(p->inputs - k) : DEPTH;
            for (int64_t row = 0; row < p->rows; row += ROWS) serve(p, row, o, k, width, depth);
        }
    }
}

void linear(float *out, const float *x, int64_t x_stride, const float *weight, int64_t rows,
            int64_t inputs, int64_t outputs, const threads *team) {
    int64_t share = (outputs + team->count - 1) / team->count, tile = (share + 47) / 48 * 48;
    product p = {.out = out, .x = x, .weight = weight, .rows = rows, .x_stride = x_stride,
                 .inputs = inputs, .outputs = outputs,
                 .tile = tile < LARGEST_TILE ? tile : LARGEST_TILE};
    if (team->count > 1)
        team->run(work, &p, (unsigned)team->count, 0);
    else
        work(&p);
}
