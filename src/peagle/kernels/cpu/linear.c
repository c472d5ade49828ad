/* out [N, O] = x [N, I] times weight [O, I], float32: the products of decoding and of prompts.
 *
 * One row must read the whole weight from memory; a few more rows should cost little on top. So the
 * weight is stored in panels of WIDTH outputs, each [I, WIDTH]: in the order in which it is read,
 * so that a thread has a single stream to prefetch and the sums of a panel stay in registers. Every
 * row is served while a strip of DEPTH inputs of the panel is in the first-level cache.
 *
 * A weight whose numbers all are bfloat16's is stored as such: half the bytes, the same products.
 *
 * Each output is the sum over strips of the sum over a strip's inputs, in rising order: it does
 * not depend on the rows around it or on the number of threads.
 */

#include "kernels.h"
#include "vectors.h"

#include <stdatomic.h>
#include <sys/mman.h>

#ifdef __AVX512F__
enum { ROWS = 8 }; /* 32 registers: 8 rows by 3 vectors of sums */
#else
enum { ROWS = 4 }; /* 16 registers: 4 rows by 3 vectors of sums */
#endif
enum { VECTORS = 3, WIDTH = VECTORS * LANES, DEPTH = 128, AHEAD = 32 /* inputs */ };
enum { TURNS = 4 /* of each thread at a product */, BLOCK = 16 /* inputs */, PAGE = 4096 };

typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint32_t word __attribute__((may_alias)); /* the bits of a number */
typedef uint16_t half __attribute__((may_alias));

/* How a weight is stored: `size` bytes for a number. */
enum { HALF = sizeof(half), WHOLE = sizeof(float) };

/* A bfloat16 is the upper half of the float that it stands for. */
INLINE lanes read(const char *place, int size) {
    if (size == WHOLE) return *(const lanes *)place;
    return (lanes)(__builtin_convertvector(*(const halves *)place, words) << 16);
}

/* Some rows by one strip of a panel, of which the first `width` outputs are wanted. With a constant
 * number of rows the compiler keeps the sums in registers. */
INLINE void serve(int rows, int size, float *out, int64_t out_stride, int64_t width,
                  const float *x, int64_t x_stride, const char *strip, int64_t depth, int first) {
    lanes sums[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = all(0.0f);
    for (int64_t k = 0; k < depth; k++) {
        lanes part[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            const char *place = strip + (k * WIDTH + v * LANES) * size;
            part[v] = read(place, size);
            __builtin_prefetch(place + AHEAD * WIDTH * size); /* past the end nothing traps */
        }
        for (int r = 0; r < rows; r++) {
            lanes input = all(x[r * x_stride + k]);
            for (int v = 0; v < VECTORS; v++) sums[r][v] = multiply_add(input, part[v], sums[r][v]);
        }
    }
    for (int r = 0; r < rows; r++, out += out_stride) {
        float last[WIDTH], *to = width < WIDTH ? last : out;
        if (width < WIDTH && !first) memcpy(last, out, 4 * width);
        for (int v = 0; v < VECTORS; v++) {
            lanes *place = (lanes *)(to + v * LANES);
            if (!first) sums[r][v] += *place;
            *place = sums[r][v];
        }
        if (width < WIDTH) memcpy(out, last, 4 * width);
    }
}

typedef struct {
    float *out;
    const float *x;
    const char *weight;
    int64_t size, rows, x_stride, inputs, outputs, turn; /* panels */
    atomic_llong next; /* the first panel that no thread has taken */
} product;

static void serve_strip(const product *p, int64_t panel, int64_t k) {
    const int64_t o = panel * WIDTH, width = p->outputs - o < WIDTH ? p->outputs - o : WIDTH;
    const int64_t depth = p->inputs - k < DEPTH ? p->inputs - k : DEPTH;
    const char *strip = p->weight + (o * p->inputs + k * WIDTH) * p->size;
    for (int64_t row = 0; row < p->rows; row += ROWS) {
        float *out = p->out + row * p->outputs + o;
        const float *x = p->x + row * p->x_stride + k;
#define CASE(rows)                                                                               \
    case rows:                                                                                   \
        if (p->size == HALF)                                                                     \
            serve(rows, HALF, out, p->outputs, width, x, p->x_stride, strip, depth, k == 0);     \
        else                                                                                     \
            serve(rows, WHOLE, out, p->outputs, width, x, p->x_stride, strip, depth, k == 0);    \
        break
        switch (p->rows - row < ROWS ? p->rows - row : ROWS) {
            CASE(1);
            CASE(2);
            CASE(3);
            CASE(4);
#ifdef __AVX512F__
            CASE(5);
            CASE(6);
            CASE(7);
            CASE(8);
#endif
        }
#undef CASE
    }
}

static int64_t panels(int64_t outputs) { return (outputs + WIDTH - 1) / WIDTH; }

static void multiply(void *shared) {
    product *p = shared;
    const int64_t count = panels(p->outputs);
    for (;;) {
        int64_t panel = atomic_fetch_add(&p->next, p->turn), end = panel + p->turn;
        if (panel >= count) return;
        for (; panel < (end < count ? end : count); panel++)
            for (int64_t k = 0; k < p->inputs; k += DEPTH) serve_strip(p, panel, k);
    }
}

static int64_t turn_of(int64_t outputs, const threads *team) {
    int64_t turn = panels(outputs) / (TURNS * team->count);
    return turn ? turn : 1;
}

static void run(void (*work)(void *), void *shared, const threads *team) {
    if (team->count > 1)
        team->run(work, shared, (unsigned)team->count, 0);
    else
        work(shared);
}

void linear(float *out, const float *x, int64_t x_stride, packed_weight weight, int64_t rows,
            int64_t inputs, int64_t outputs, const threads *team) {
    product p = {.out = out, .x = x, .weight = weight.panels, .size = weight.size, .rows = rows,
                 .x_stride = x_stride, .inputs = inputs, .outputs = outputs,
                 .turn = turn_of(outputs, team)};
    run(multiply, &p, team);
}

int64_t panel_width(void) { return WIDTH; }

/* Whether all numbers are bfloat16's. */
int64_t fits_half(const float *weight, int64_t count) {
    const word *bits = (const word *)weight;
    for (int64_t i = 0; i < count; i++)
        if (bits[i] & 0xffff) return 0;
    return 1;
}

typedef struct {
    char *packed;
    const word *weight;
    int64_t size, inputs, outputs;
    atomic_llong next;
} packing;

INLINE void pack_panel(const packing *p, int64_t o, int64_t width, int size) {
    const word *from = p->weight + o * p->inputs;
    word *whole = (word *)p->packed + o * p->inputs;
    half *upper = (half *)p->packed + o * p->inputs;
    for (int64_t k = 0; k < p->inputs; k += BLOCK) {
        int64_t end = k + BLOCK < p->inputs ? k + BLOCK : p->inputs;
        for (int64_t i = 0; i < width; i++)
            for (int64_t j = k; j < end; j++) {
                word bits = from[i * p->inputs + j];
                if (size == HALF)
                    upper[j * WIDTH + i] = bits >> 16;
                else
                    whole[j * WIDTH + i] = bits;
            }
    }
}

static void pack_panels(void *shared) {
    packing *p = shared;
    for (;;) {
        int64_t o = WIDTH * atomic_fetch_add(&p->next, 1), panel = WIDTH * p->inputs * p->size;
        if (o >= p->outputs) return;
        const int64_t width = p->outputs - o < WIDTH ? p->outputs - o : WIDTH;
        if (width < WIDTH) memset(p->packed + o * p->inputs * p->size, 0, panel);
        if (p->size == HALF)
            pack_panel(p, o, width, HALF);
        else
            pack_panel(p, o, width, WHOLE);
    }
}

/* Where the system grants them: a prefetched stream ends with its page. */
static void ask_for_huge_pages(void *start, int64_t size) {
#ifdef MADV_HUGEPAGE
    uintptr_t begin = ((uintptr_t)start + PAGE - 1) / PAGE * PAGE, end = (uintptr_t)start + size;
    if (end >= begin + PAGE) madvise((void *)begin, (end - begin) / PAGE * PAGE, MADV_HUGEPAGE);
#endif
}

/* weight [O, I] -> packed [panels, I, WIDTH], memory that nobody has touched; the outputs that are
 * missing in the last panel are 0. */
void pack(void *packed, int64_t size, const float *weight, int64_t inputs, int64_t outputs,
          const threads *team) {
    ask_for_huge_pages(packed, panels(outputs) * WIDTH * inputs * size);
    packing p = {.packed = packed, .weight = (const word *)weight, .size = size,
                 .inputs = inputs, .outputs = outputs};
    run(pack_panels, &p, team);
}

/* The rows `ids` [N] of a packed weight -> out [N, I]; 0 if one of them is not there. */
int64_t packed_rows(float *out, packed_weight weight, const int64_t *ids, int64_t rows,
                    int64_t inputs, int64_t outputs) {
    word *bits = (word *)out;
    for (int64_t row = 0; row < rows; row++, bits += inputs) {
        if (ids[row] < 0 || ids[row] >= outputs) return 0;
        const int64_t first = ids[row] / WIDTH * WIDTH * inputs + ids[row] % WIDTH;
        const word *whole = (const word *)weight.panels + first;
        const half *upper = (const half *)weight.panels + first;
        for (int64_t k = 0; k < inputs; k++)
            bits[k] = weight.size == HALF ? (word)upper[k * WIDTH] << 16 : whole[k * WIDTH];
    }
    return 1;
}
