/* What the kernels share. Float32 throughout; shapes: N rows, H hidden, h heads, g key-value
 * heads, D head dimension, I intermediate. */

#pragma once

#include <stdint.h>

/* GOMP_parallel of the OpenMP runtime that torch uses: its threads are warm, and a second
 * runtime's would spin against them. Not called for one thread. */
typedef void (*run_on_threads)(void (*work)(void *), void *shared, unsigned threads, unsigned flags);

typedef struct {
    int64_t count;
    run_on_threads run;
} threads;

/* One step's rows: spans one after the other, each of one sequence. Mirrored in ops.py.
 *
 * Row i of a span is written behind the first one's position by i. So it stands there, unless the
 * span is a tree's: then a row of `paths` gives its depth d, which is its distance from the tree's
 * row 0, and the d + 1 rows from that one to itself. The span's first row is row SPAN_FIRST_ROW of
 * the tree, whose row 0 stands at SPAN_START; those before it are in the cache. */
typedef struct {
    int64_t num_spans;
    const int64_t *spans;  /* [num_spans, SPAN_COLUMNS] */
    const int64_t *blocks; /* the sequences' block tables */
    const int64_t *paths;  /* [rows of trees, path_size] */
    int64_t path_size;
    int64_t block_size, heads, kv_heads, dim;
} step_layout;

/* Columns of `spans`: first position, rows, first entry in `blocks`, first row in `paths` or -1,
 * first row of a tree. */
enum { SPAN_START, SPAN_ROWS, SPAN_BLOCKS, SPAN_PATHS, SPAN_FIRST_ROW, SPAN_COLUMNS };

/* One layer's cache [S, g, D]; a window of 0 is none. */
typedef struct {
    float *keys, *values;
    int64_t window;
} layer_cache;

/* A weight [O, I] in linear.c's order; `size` bytes for a number. Mirrored in linear.py. */
typedef struct {
    const void *panels;
    int64_t size;
} packed_weight;

void rms_norm(float *out, const float *x, const float *weight, int64_t rows, int64_t size,
              double eps);
void rotate(float *out, const float *x, int64_t stride, const float *cosine, const float *sine,
            int64_t rows, int64_t heads, int64_t dim);
void silu_mul(float *out, const float *gate_up, int64_t rows, int64_t size);
double total_exponential(const float *x, int64_t size, float shift);
void paged_attention(float *out, const float *q, int64_t q_stride, const float *k,
                     int64_t k_stride, const float *v, int64_t v_stride,
                     const layer_cache *cache, const step_layout *step, const threads *team);
void linear(float *out, const float *x, int64_t x_stride, packed_weight weight, int64_t rows,
            int64_t inputs, int64_t outputs, const threads *team);
