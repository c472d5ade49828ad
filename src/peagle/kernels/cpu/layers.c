/* A stack of decoder layers in one call: between two products Python would take longer than the
 * small operations themselves, the more so as the weights that stream by evict it from the caches.
 * The sums are those of the single kernels, to the bit. */

#include "kernels.h"

#include <stddef.h>

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

static void add(float *out, const float *x, const float *y, int64_t size) {
    for (int64_t i = 0; i < size; i++) out[i] = x[i] + y[i];
}

/* qkv [N, (h + 2g) D] -> rotated queries and keys [N, (h + g) D] */
static void rotated(float *qk, const float *qkv, const layer *l, const step_state *s) {
    const step_layout *step = s->layouts[0];
    const int64_t dim = step->dim, heads = step->heads + step->kv_heads;
    const int64_t size = heads * dim, stride = size + step->kv_heads * dim;
    if (!l->q_norm) {
        rotate(qk, qkv, stride, s->cosine, s->sine, s->rows, heads, dim);
        return;
    }
    for (int64_t row = 0; row < s->rows; row++) {
        const float *from = qkv + row * stride;
        float *to = qk + row * size;
        int64_t queries = step->heads * dim;
        rms_norm(to, from, l->q_norm, step->heads, dim, l->eps);
        rms_norm(to + queries, from + queries, l->k_norm, step->kv_heads, dim, l->eps);
    }
    rotate(qk, qk, size, s->cosine, s->sine, s->rows, heads, dim); /* read before written */
}

/* x [N, H] -> out [N, H]; attention reads `inputs` [N, width]. */
static void decoder_layer(float *out, const float *x, const float *inputs, int64_t width,
                          const layer *l, const layer_cache *cache, const step_layout *layout,
                          const step_state *s, float *scratch) {
    const int64_t rows = s->rows, hidden = s->hidden, dim = layout->dim;
    const int64_t queries = layout->heads * dim, kv = layout->kv_heads * dim;
    const int64_t inner = l->intermediate;
    float *normed = scratch, *qkv = normed + rows * hidden;
    float *qk = qkv + rows * (queries + 2 * kv), *mixed = qk + rows * (queries + kv);
    float *gate_up = mixed + rows * queries, *activated = gate_up + rows * 2 * inner;

    project(qkv, inputs, l->qkv, rows, width, queries + 2 * kv, s->team);
    rotated(qk, qkv, l, s);
    paged_attention(mixed, qk, queries + kv, qk + queries, queries + kv, qkv + queries + kv,
                    queries + 2 * kv, cache, layout, s->team);
    project(normed, mixed, l->o, rows, queries, hidden, s->team);
    add(out, x, normed, rows * hidden);

    rms_norm(normed, out, l->post_norm, rows, hidden, l->eps);
    project(gate_up, normed, l->gate_up, rows, hidden, 2 * inner, s->team);
    silu_mul(activated, gate_up, rows, inner);
    project(normed, activated, l->down, rows, inner, hidden, s->team);
    add(out, out, normed, rows * hidden);
}

/* states [L, N, H]: every layer's output, from x [N, H]. `inputs` [N, width] is what the first
 * layer's attention reads if not its normed x: so it is in a drafter. scratch: see layers.py. */
void decoder_layers(float *states, const float *x, const float *inputs, int64_t width,
                    const layer *layers, int64_t count, const step_state *s, float *scratch) {
    for (int64_t i = 0; i < count; i++) {
        const layer *l = layers + i;
        layer_cache cache = {s->keys[i], s->values[i], l->window};
        if (!inputs) {
            rms_norm(scratch, x, l->input_norm, s->rows, s->hidden, l->eps);
            inputs = scratch;
            width = s->hidden;
        }
        const step_layout *layout = s->layouts[s->tables[i]];
        decoder_layer(states, x, inputs, width, l, &cache, layout, s, scratch);
        x = states;
        states += s->rows * s->hidden;
        inputs = NULL;
    }
}
