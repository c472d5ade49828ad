/* The best tokens of rows of logits, trees of drafts, and the target's walk through them: a few
 * numbers out of many, or few altogether, which would be a hundred small tensor operations.
 *
 * Shapes: R rows, V columns of logits, B slots, K depths, M candidates of each, N nodes of a tree.
 */

#include "kernels.h"
#include "vectors.h"

#include <math.h>
#include <stdatomic.h>

enum { BLOCK = 8 * LANES /* columns */, WORK_FOR_THREADS = 100000 /* columns */ };
enum { MOST_CANDIDATES = 8, MOST_DEPTHS = 64, MOST_NODES = 63 }; /* drafts.py sees to it */
enum { SQUARE = MOST_CANDIDATES * MOST_CANDIDATES, POOL = MOST_CANDIDATES + MOST_DEPTHS * SQUARE };

typedef int32_t ints __attribute__((vector_size(4 * LANES)));

/* The best so far, in falling order; of equal ones the first that came. */
typedef struct {
    int64_t count, *ids;
    float *values;
} ranking;

static void rank(ranking *r, int64_t id, float value) {
    int64_t place = r->count - 1;
    if (!(value > r->values[place])) return; /* nor is NaN */
    for (; place > 0 && value > r->values[place - 1]; place--) {
        r->values[place] = r->values[place - 1];
        r->ids[place] = r->ids[place - 1];
    }
    r->values[place] = value;
    r->ids[place] = id;
}

static void start(ranking *r) {
    for (int64_t i = 0; i < r->count; i++) {
        r->values[i] = -INFINITY;
        r->ids[i] = 0;
    }
}

/* -> whether any of them is NaN. Most blocks hold nothing that is good enough. */
static int rank_row(ranking *r, const float *logits, int64_t columns) {
    ints is_nan = {0};
    int64_t column = 0;
    for (; column + BLOCK <= columns; column += BLOCK) {
        lanes best = load(logits + column);
        is_nan |= best != best;
        for (int i = LANES; i < BLOCK; i += LANES) {
            lanes x = load(logits + column + i);
            ints larger = x > best;
            is_nan |= x != x;
            best = (lanes)((larger & (ints)x) | (~larger & (ints)best));
        }
        int is_good = 0; /* a NaN may hide one that is */
        for (int i = 0; i < LANES; i++) is_good |= !(best[i] <= r->values[r->count - 1]);
        for (int i = 0; is_good && i < BLOCK; i++) rank(r, column + i, logits[column + i]);
    }
    int found = 0;
    for (; column < columns; column++) {
        found |= logits[column] != logits[column];
        rank(r, column, logits[column]);
    }
    for (int i = 0; i < LANES; i++) found |= is_nan[i] != 0;
    return found;
}

typedef struct {
    const float *logits;
    int64_t rows, columns, stride, count;
    int64_t *ids;
    float *log_probs;
    uint8_t *usable;
    atomic_llong next; /* the first row that no thread has taken */
} search;

static void search_rows(void *shared) {
    search *s = shared;
    for (;;) {
        int64_t row = atomic_fetch_add(&s->next, 1);
        if (row >= s->rows) return;
        const float *logits = s->logits + row * s->stride;
        float values[MOST_CANDIDATES];
        ranking best = {s->count, s->ids + row * s->count, values};
        start(&best);
        int is_nan = rank_row(&best, logits, s->columns);
        if (s->usable) {
            s->usable[row] = !is_nan && isfinite(values[0]);
            if (!s->usable[row]) best.ids[0] = 0;
        }
        if (!s->log_probs) continue;
        double total = total_exponential(logits, s->columns, values[0]);
        for (int64_t i = 0; i < s->count; i++)
            s->log_probs[row * s->count + i] = values[i] - values[0] - (float)log(total);
    }
}

/* The `count` best columns of each row [R, count], in falling order, the lowest of equals first,
 * and their log-probabilities, if there is a place for these. `usable` [R], if there is one: 0
 * where nothing can be sampled, for a logit is NaN or +inf or all are -inf; the column is 0 then. */
void best_columns(int64_t *ids, float *log_probs, uint8_t *usable, const float *logits,
                  int64_t rows, int64_t columns, int64_t stride, int64_t count,
                  const threads *team) {
    search s = {.logits = logits, .rows = rows, .columns = columns, .stride = stride,
                .count = count, .ids = ids, .log_probs = log_probs, .usable = usable};
    if (team->count > 1 && rows > 1 && rows * columns > WORK_FOR_THREADS)
        team->run(search_rows, &s, (unsigned)team->count, 0);
    else
        search_rows(&s);
}

/* A slot's part of a lattice: speculation/trees.py. */
typedef struct {
    const int64_t *token_ids; /* [K, M] */
    const float *log_probs;   /* [K, M, M] */
    int64_t depth, beam;
} lattice;

/* Candidates for nodes: continuation j of path i of depth d stands at its place among all. */
typedef struct {
    int64_t count, tokens[POOL], parents[POOL]; /* places; -1: the newest token */
    float scores[POOL];
} pool;

static float usable_log_prob(float x) { return x > 0.0f ? 0.0f : x == x ? x : -INFINITY; }

static void add_candidate(pool *p, int64_t token, int64_t parent, float score) {
    p->tokens[p->count] = token;
    p->parents[p->count] = parent;
    p->scores[p->count++] = score;
}

/* All continuations of the best paths, depth by depth. */
static void fill(pool *p, const lattice *l) {
    const int64_t beam = l->beam;
    int64_t places[MOST_CANDIDATES], last[MOST_CANDIDATES], best[MOST_CANDIDATES];
    float scores[MOST_CANDIDATES], sums[MOST_CANDIDATES];
    p->count = 0;
    if (!l->depth) return;
    for (int64_t j = 0; j < beam; j++) {
        places[j] = last[j] = j;
        scores[j] = usable_log_prob(l->log_probs[j]);
        add_candidate(p, l->token_ids[j], -1, scores[j]);
    }
    for (int64_t d = 1; d < l->depth; d++) {
        const int64_t first = p->count;
        ranking next = {beam, best, sums};
        start(&next);
        for (int64_t i = 0; i < beam; i++)
            for (int64_t j = 0; j < beam; j++) {
                float own = l->log_probs[(d * beam + last[i]) * beam + j];
                float sum = scores[i] + usable_log_prob(own);
                rank(&next, i * beam + j, sum);
                add_candidate(p, l->token_ids[d * beam + j], places[i], sum);
            }
        for (int64_t i = 0; i < beam; i++) {
            places[i] = first + best[i];
            last[i] = best[i] % beam;
            scores[i] = sums[i];
        }
    }
}

/* Where a slot's tree is written: [N] and, from the newest token's row on, [N + 1]. */
typedef struct {
    int64_t *token_ids, *parents, *depths, *ancestors;
    float *scores; /* none: nobody reads them */
} tree;

/* -> how many of the `size` nodes there are; the others hang on the newest token. */
static int64_t choose_nodes(tree *t, const pool *p, int64_t size) {
    int64_t places[MOST_NODES], row_of[POOL], count = 0;
    float scores[MOST_NODES];
    ranking best = {size, places, scores};
    start(&best);
    for (int64_t i = 0; i < p->count; i++) rank(&best, i, p->scores[i]);
    t->depths[0] = 0;
    t->ancestors[0] = 1;
    for (int64_t n = 0; n < size; n++) {
        const int is_there = scores[n] > -INFINITY;
        const int64_t parent = is_there ? p->parents[places[n]] : -1;
        const int64_t row = parent < 0 ? 0 : row_of[parent]; /* before its children */
        if (is_there) row_of[places[n]] = n + 1;
        t->token_ids[n] = is_there ? p->tokens[places[n]] : 0;
        t->parents[n] = row;
        t->depths[n + 1] = t->depths[row] + 1;
        t->ancestors[n + 1] = t->ancestors[row] | (int64_t)1 << (n + 1);
        if (t->scores) t->scores[n] = scores[n];
        count += is_there;
    }
    return count;
}

/* The best nodes of each slot's lattice, as `store_tree` writes them into the state of the slots,
 * which is [L, D] and [L, D + 1] (`stride` D and D + 1). num_drafts [L] falls to what is there. */
void grow_trees(const tree *state, int64_t stride, int64_t *num_drafts, const int64_t *slots,
                int64_t batch, const int64_t *token_ids, const float *log_probs,
                const int64_t *num_depths, int64_t depth, int64_t beam, int64_t size) {
    pool candidates;
    for (int64_t b = 0; b < batch; b++) {
        const int64_t slot = slots[b], first = slot * stride, first_row = slot * (stride + 1);
        lattice own = {token_ids + b * depth * beam, log_probs + b * depth * beam * beam,
                       num_depths[b] < depth ? num_depths[b] : depth, beam};
        tree place = {state->token_ids + first, state->parents + first, state->depths + first_row,
                      state->ancestors + first_row, state->scores ? state->scores + first : NULL};
        fill(&candidates, &own);
        int64_t count = choose_nodes(&place, &candidates, size);
        if (count < num_drafts[slot]) num_drafts[slot] = count;
    }
}

/* Rows as `walk_tree` of kernels/reference/trees.py has them. token_ids and parents [B, N] and
 * sampled and usable [B, N + 1] whose slots lie `stride` and `row_stride` apart. */
void walk_trees(const int64_t *token_ids, const int64_t *parents, int64_t stride,
                const int64_t *num_nodes, const int64_t *sampled, const uint8_t *usable,
                int64_t row_stride, int64_t batch, int64_t depth, int64_t *drafts,
                int64_t *path_sampled, uint8_t *path_usable, int64_t *rows, int64_t *num_accepted,
                int64_t *report) {
    for (int64_t b = 0; b < batch; b++) {
        int64_t row = 0, accepted = 0, is_leaf = 0;
        for (int64_t k = 0; k <= depth; k++) {
            rows[k] = row;
            path_sampled[k] = sampled[row];
            path_usable[k] = usable[row];
            int64_t next = 0; /* the first child that carries the target's token */
            is_leaf = 1;
            for (int64_t n = 0; n < num_nodes[b] && !next; n++) {
                if (parents[n] != row) continue;
                is_leaf = 0;
                if (token_ids[n] == sampled[row]) next = n + 1;
            }
            if (k == depth) break;
            drafts[k] = next ? token_ids[next - 1] : -1;
            report[k] = row = next ? next : row;
            accepted += next > 0;
        }
        report[depth] = is_leaf;
        num_accepted[b] = accepted;
        token_ids += stride;
        parents += stride;
        sampled += row_stride;
        usable += row_stride;
        drafts += depth;
        path_sampled += depth + 1;
        path_usable += depth + 1;
        rows += depth + 1;
        report += depth + 1;
    }
}

/* Where a position of a sequence lies in a cache [layers, S, row], by its blocks. */
static int64_t slot_of(const int32_t *blocks, int64_t block_size, int64_t position) {
    return blocks[position / block_size] * block_size + position % block_size;
}

/* Brings the rows [B, K + 1] of accepted nodes to where a chain's would be. A row's place is never
 * behind its node's, so nothing is overwritten that is still to be moved. */
void move_rows(float *cache, int64_t layers, int64_t layer_stride, int64_t row_size,
               const int32_t *block_tables, int64_t table_stride, int64_t block_size,
               const int64_t *slots, const int64_t *starts, int64_t batch, const int64_t *rows,
               const int64_t *num_accepted, int64_t depth) {
    for (int64_t b = 0; b < batch; b++, rows += depth + 1)
        for (int64_t k = 1; k <= num_accepted[b]; k++) {
            if (rows[k] == k) continue;
            const int32_t *blocks = block_tables + slots[b] * table_stride;
            int64_t from = slot_of(blocks, block_size, starts[b] + rows[k]) * row_size;
            int64_t to = slot_of(blocks, block_size, starts[b] + k) * row_size;
            for (int64_t layer = 0; layer < layers; layer++) {
                float *own = cache + layer * layer_stride;
                memcpy(own + to, own + from, sizeof(float) * row_size);
            }
        }
}
