/* A stack of decoder layers in one call: between two products Python would take longer than the
 * small operations themselves, the more so as the weights that stream by evict it from the caches.
 * The sums are those of the single kernels, to the bit. */

#include "kernels.h"

#include <stdatomic.h>
#include <stddef.h>

enum { ROWS_AT_ONCE = 8, MOST_FOR_ONE_THREAD = 32768 /* elements of the hidden states */ };

/* bias [O] or none. Mirrored in layers.py, as is `layer`. */
typedef struct {
    packed_weight weight;
    const float *bias;
} projection;

typedef struct {
    const float *input_norm, *post_norm;
    const float *q_norm, *k_norm; /* both or none */
    projection qkv, o, gate_up, down;
    int64_t intermediate, window; /* 0: none */
    double eps;
} layer;

typedef struct {
    const float *cosine, *sine; /* [N, D] */
    float *const *keys, *const *values; /* of each layer */
    const int64_t *tables;              /* of each layer: its place in `layouts` */
    int64_t rows, hidden;
    const step_layout *const *layouts; /* the step's rows by each block table */
    const threads *team;
} step_state;

static void project(float *out, const float *x, projection p, int64_t rows, int64_t inputs,
                    int64_t outputs, const threads *team) {
    linear(out, x, inputs, p.weight, rows, inputs, outputs, team);
    if (!p.bias) return;
    for (int64_t row = 0; row < rows; row++, out += outputs)
        for (int64_t o = 0; o < outputs; o++) out[o] += p.bias[o];
}

/* One layer's pass: x [N, H] -> out [N, H], and what lies between, in scratch. */
typedef struct {
    float *out, *normed, *qkv, *qk, *mixed, *gate_up, *activated;
    const float *x;
    const layer *l;
    const layer *behind; /* the layer that reads `out`, or none */
    const step_state *s;
} pass;

typedef void (*row_work)(const pass *p, int64_t begin, int64_t end);

typedef struct {
    row_work work;
    const pass *p;
    atomic_llong next;
} shared_rows;

static void work_on_rows(void *shared) {
    shared_rows *r = shared;
    for (;;) {
        int64_t begin = atomic_fetch_add(&r->next, ROWS_AT_ONCE), end = begin + ROWS_AT_ONCE;
        if (begin >= r->p->s->rows) return;
        r->work(r->p, begin, end < r->p->s->rows ? end : r->p->s->rows);
    }
}

/* What lies between two products is done row by row. For few rows waking a thread takes longer. */
static void for_rows(const pass *p, row_work work) {
    const step_state *s = p->s;
    shared_rows r = {.work = work, .p = p};
    if (s->team->count > 1 && s->rows * s->hidden > MOST_FOR_ONE_THREAD)
        s->team->run(work_on_rows, &r, (unsigned)s->team->count, 0);
    else
        work(p, 0, s->rows);
}

static void add(float *out, const float *x, const float *y, int64_t size) {
    for (int64_t i = 0; i < size; i++) out[i] = x[i] + y[i];
}

static void add_attention(const pass *p, int64_t begin, int64_t end) {
    const int64_t size = p->s->hidden, first = begin * size, rows = end - begin;
    add(p->out + first, p->x + first, p->normed + first, rows * size);
    rms_norm(p->normed + first, p->out + first, p->l->post_norm, rows, size, p->l->eps);
}

static void add_mlp(const pass *p, int64_t begin, int64_t end) {
    const int64_t size = p->s->hidden, first = begin * size, rows = end - begin;
    const layer *next = p->behind;
    add(p->out + first, p->out + first, p->normed + first, rows * size);
    if (next) rms_norm(p->normed + first, p->out + first, next->input_norm, rows, size, next->eps);
}

static void activate(const pass *p, int64_t begin, int64_t end) {
    const int64_t inner = p->l->intermediate;
    silu_mul(p->activated + begin * inner, p->gate_up + begin * 2 * inner, end - begin, inner);
}

/* qkv [N, (h + 2g) D] -> rotated queries and keys [N, (h + g) D] */
static void rotate_all(const pass *p, int64_t begin, int64_t end) {
    const step_layout *step = p->s->layouts[0];
    const layer *l = p->l;
    const int64_t dim = step->dim, heads = step->heads + step->kv_heads;
    const int64_t size = heads * dim, stride = size + step->kv_heads * dim;
    const float *cosine = p->s->cosine + begin * dim, *sine = p->s->sine + begin * dim;
    const float *from = p->qkv + begin * stride;
    float *qk = p->qk + begin * size;
    if (!l->q_norm) {
        rotate(qk, from, stride, cosine, sine, end - begin, heads, dim);
        return;
    }
    float *to = qk;
    for (int64_t row = begin; row < end; row++, from += stride, to += size) {
        int64_t queries = step->heads * dim;
        rms_norm(to, from, l->q_norm, step->heads, dim, l->eps);
        rms_norm(to + queries, from + queries, l->k_norm, step->kv_heads, dim, l->eps);
    }
    rotate(qk, qk, size, cosine, sine, end - begin, heads, dim); /* read before written */
}

/* Attention reads `inputs` [N, width]. */
static void decoder_layer(const pass *p, const float *inputs, int64_t width,
                          const layer_cache *cache, const step_layout *layout) {
    const layer *l = p->l;
    const threads *team = p->s->team;
    const int64_t rows = p->s->rows, hidden = p->s->hidden, inner = l->intermediate;
    const int64_t queries = layout->heads * layout->dim, kv = layout->kv_heads * layout->dim;

    project(p->qkv, inputs, l->qkv, rows, width, queries + 2 * kv, team);
    for_rows(p, rotate_all);
    paged_attention(p->mixed, p->qk, queries + kv, p->qk + queries, queries + kv,
                    p->qkv + queries + kv, queries + 2 * kv, cache, layout, team);
    project(p->normed, p->mixed, l->o, rows, queries, hidden, team);
    for_rows(p, add_attention);

    project(p->gate_up, p->normed, l->gate_up, rows, hidden, 2 * inner, team);
    for_rows(p, activate);
    project(p->normed, p->activated, l->down, rows, inner, hidden, team);
    for_rows(p, add_mlp);
}

/* states: where each layer's output [N, H] goes, from x [N, H]; one place may serve several, which
 * leaves that of the last. `inputs` [N, width] is what the first layer's attention reads if not its
 * normed x: so it is in a drafter. scratch: see layers.py. */
void decoder_layers(float *const *states, const float *x, const float *inputs, int64_t width,
                    const layer *layers, int64_t count, const step_state *s, float *scratch) {
    const step_layout *step = s->layouts[0];
    const int64_t rows = s->rows, queries = step->heads * step->dim, kv = step->kv_heads * step->dim;
    pass p = {.x = x, .s = s, .normed = scratch};
    p.qkv = p.normed + rows * s->hidden;
    p.qk = p.qkv + rows * (queries + 2 * kv);
    p.mixed = p.qk + rows * (queries + kv);
    p.gate_up = p.mixed + rows * queries;
    if (!inputs) rms_norm(p.normed, x, layers->input_norm, rows, s->hidden, layers->eps);
    for (int64_t i = 0; i < count; i++) {
        layer_cache cache = {s->keys[i], s->values[i], layers[i].window};
        p.l = layers + i;
        p.out = states[i];
        p.behind = i + 1 < count ? p.l + 1 : NULL;
        p.activated = p.gate_up + rows * 2 * p.l->intermediate;
        decoder_layer(&p, inputs ? inputs : p.normed, inputs ? width : s->hidden, &cache,
                      s->layouts[s->tables[i]]);
        inputs = NULL;
        p.x = p.out;
    }
}
