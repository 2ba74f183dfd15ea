/* What a pass does between its products, above all attention over key blocks where they lie, for a
 * C compiler to turn into what this machine does fastest. A row's result follows from its own numbers,
 * keys and position alone, in a fixed order: neither the rest of the call nor the number of threads
 * changes a bit of it.
 *
 * (a, b, c): the extents of an array that lies row by row. Rows and heads have a multiple of LANES
 * numbers.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#error "processors without AVX2 are left to torch"
#endif

#define BLOCK 32 /* keys of a block, as in batch_plan.py */
#define PARTS (BLOCK / LANES)
#define CHAINS (8 / PARTS) /* sums at once, so that none waits for the one before it */
#define MOST 256 /* numbers of a head, at most */
#define HIDDEN -3e38f

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

/* Of two vectors, the lanes whose number lacks a bit, next to each other; and those that have it. */
#if LANES == 16
static const ints LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#define LOW_8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH_8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LOW_4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HIGH_4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOW_2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH_2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LOW_1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define HIGH_1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#else
static const ints LANE = {0, 1, 2, 3, 4, 5, 6, 7};
#define LOW_4 0, 1, 2, 3, 8, 9, 10, 11
#define HIGH_4 4, 5, 6, 7, 12, 13, 14, 15
#define LOW_2 0, 1, 8, 9, 4, 5, 12, 13
#define HIGH_2 2, 3, 10, 11, 6, 7, 14, 15
#define LOW_1 0, 8, 2, 10, 4, 12, 6, 14
#define HIGH_1 1, 9, 3, 11, 5, 13, 7, 15
#endif

static inline vec load(const float *from) { return *(const loose *)from; }
static inline void store(float *to, vec what) { *(loose *)to = what; }
static inline vec all(float x) { return (vec){0} + x; }

/* a where a lane of the mask is -1, b where it is 0. */
static inline vec either(ints mask, vec a, vec b) {
    return (vec)((mask & (ints)a) | (~mask & (ints)b));
}

/* Exchange rows and columns of LANES x LANES numbers: of the rows that are so far apart, the blocks
 * of as many columns. */
#define EXCHANGE(apart)                                                \
    for (int i = 0; i < LANES; i++)                                    \
        if (!(i & apart)) {                                            \
            vec a = t[i], b = t[i + apart];                            \
            t[i] = __builtin_shufflevector(a, b, LOW_##apart);         \
            t[i + apart] = __builtin_shufflevector(a, b, HIGH_##apart); \
        }

static inline void transpose(vec *t) {
#if LANES == 16
    EXCHANGE(8)
#endif
    EXCHANGE(4)
    EXCHANGE(2)
    EXCHANGE(1)
}

/* What all lanes come to, two and two. */
#define HALVE(with, x, apart) x = with(x, __builtin_shufflevector(x, x, HIGH_##apart));
#if LANES == 16
#define FOLD(with, x) HALVE(with, x, 8) HALVE(with, x, 4) HALVE(with, x, 2) HALVE(with, x, 1)
#else
#define FOLD(with, x) HALVE(with, x, 4) HALVE(with, x, 2) HALVE(with, x, 1)
#endif

static inline vec larger(vec a, vec b) { return either(a > b, a, b); }
static inline vec sum(vec a, vec b) { return a + b; }
static inline float highest(vec x) {
    FOLD(larger, x)
    return x[0];
}

static inline float total(vec x) {
    FOLD(sum, x)
    return x[0];
}

/* e^x of numbers up to 0, within 2 units in the last place; e^-87 for what is below -87. */
static inline vec exponential(vec x) {
    x = either(x > all(-87.0f), x, all(-87.0f));
    ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, ints);
    vec k = __builtin_convertvector(n, vec);
    vec r = x - k * 0.693359375f + k * 2.12194440e-4f; /* ln 2 in two parts */
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vec)((n + 127) << 23);
}

/* 1 / the root of the mean square of a row, which eps is added to. */
static inline float one_over_norm(const float *row, int64_t width, float eps) {
    vec s[4] = {{0}};
    int64_t k = 0;
    for (; k + 4 * LANES <= width; k += 4 * LANES)
        for (int c = 0; c < 4; c++) s[c] += load(row + k + c * LANES) * load(row + k + c * LANES);
    for (; k < width; k += LANES) s[0] += load(row + k) * load(row + k);
    return 1.0f / sqrtf(total((s[0] + s[1]) + (s[2] + s[3])) / (float)width + eps);
}

typedef struct {
    float *stream; /* (rows, width): the residual stream */
    const float *added; /* (rows, width): added to it first; NULL for nothing */
    float *out; /* (rows, width): the stream's rows at root mean square 1 */
    int64_t rows, width;
    float eps;
} Norm;

void norm(const Norm *c) {
#pragma omp parallel for schedule(static) if (c->rows > 32)
    for (int64_t row = 0; row < c->rows; row++) {
        float *stream = c->stream + row * c->width, *out = c->out + row * c->width;
        if (c->added)
            for (int64_t k = 0; k < c->width; k += LANES)
                store(stream + k, load(stream + k) + load(c->added + row * c->width + k));
        float scale = one_over_norm(stream, c->width, c->eps);
        for (int64_t k = 0; k < c->width; k += LANES) store(out + k, load(stream + k) * scale);
    }
}

/* Queries, keys and values as a layer projects them, and where they go. */
typedef struct {
    float *projected; /* (rows, heads + 2 kv_heads, size); changed */
    const float *bias; /* (heads + 2 kv_heads, size), or NULL */
    const float *scales; /* (heads + kv_heads, size): of the norms over heads; NULL without these */
    const float *cosine, *sine; /* (rows, size): of a row's position; sine's first half negated */
    const int64_t *slots; /* (rows): where keys and values are stored */
    float *query; /* (rows, heads, size) */
    float *keys, *values; /* (kv_heads, store_rows, size) each */
    int64_t rows, heads, kv_heads, size, store_rows;
    float eps;
} Projection;

/* A head turned by its row's position (RoPE, halves paired as in Llama). */
static inline void turn(
    const float *restrict head, const float *restrict cosine, const float *restrict sine,
    int64_t size, float *restrict out
) {
    int64_t half = size / 2;
    for (int64_t i = 0; i < half; i++) {
        out[i] = head[i] * cosine[i] + head[half + i] * sine[i];
        out[half + i] = head[half + i] * cosine[half + i] + head[i] * sine[half + i];
    }
}

void project(const Projection *c) {
    int64_t size = c->size, turned = c->heads + c->kv_heads, all_heads = turned + c->kv_heads;
#pragma omp parallel for schedule(static) if (c->rows > 32)
    for (int64_t row = 0; row < c->rows; row++)
        for (int64_t head = 0; head < all_heads; head++) {
            float *from = c->projected + (row * all_heads + head) * size;
            if (c->bias)
                for (int64_t k = 0; k < size; k++) from[k] += c->bias[head * size + k];
            if (c->scales && head < turned) {
                float scale = one_over_norm(from, size, c->eps);
                for (int64_t k = 0; k < size; k++) from[k] *= scale * c->scales[head * size + k];
            }
            int64_t kv = (head - c->heads) % c->kv_heads;
            float *kept = head < turned ? c->keys : c->values;
            float *to = head < c->heads ? c->query + (row * c->heads + head) * size
                                        : kept + (kv * c->store_rows + c->slots[row]) * size;
            if (head < turned)
                turn(from, c->cosine + row * size, c->sine + row * size, size, to);
            else
                for (int64_t k = 0; k < size; k += LANES) store(to + k, load(from + k));
        }
}

/* What attention has: its arrays, and what they are laid out by. */
typedef struct {
    const float *query; /* (rows, heads, size), scaled */
    const float *keys, *values; /* (kv_heads, store_rows, size) each */
    float *out; /* (rows, heads, size) */
    const int32_t *slots; /* (blocks, BLOCK): the store row of every key */
    const int32_t *starts; /* (blocks + 1): each block's first item */
    const int32_t *row, *low, *high; /* (items): the row, which sees its keys above low up to high */
    const int32_t *row_starts; /* (rows + 1): each row's first place in row_items */
    const int32_t *row_items; /* (items): every row's items in the order of its blocks */
    float *highest, *sums; /* (items, heads): scratch */
    float *mixed; /* (items, heads, size): scratch */
    int64_t rows, blocks, kv_heads, group, size, store_rows;
} Attention;

/* The scores of a query with the keys of a block, transposed, each in CHAINS sums. */
static inline void score(const float *query, const float *keys, int64_t size, vec *out) {
    vec s[CHAINS][PARTS] = {{{0}}};
    for (int64_t k = 0; k < size; k += CHAINS)
        for (int c = 0; c < CHAINS; c++)
            for (int p = 0; p < PARTS; p++)
                s[c][p] += query[k + c] * load(keys + (k + c) * BLOCK + p * LANES);
    for (int p = 0; p < PARTS; p++) {
        out[p] = s[0][p];
        for (int c = 1; c < CHAINS; c++) out[p] += s[c][p];
    }
}

/* Scores into weights, e^(score - the highest) or 0 for a key that is not seen; their sum. */
static inline float weigh(vec *scores, int low, int high, float *most) {
    vec top = all(HIDDEN), whole = all(0.0f);
    for (int p = 0; p < PARTS; p++) {
        ints key = LANE + p * LANES;
        scores[p] = either((key > low) & (key <= high), scores[p], all(HIDDEN));
        top = larger(top, scores[p]);
    }
    *most = highest(top);
    for (int p = 0; p < PARTS; p++) {
        ints key = LANE + p * LANES;
        vec weight = exponential(scores[p] - *most);
        scores[p] = either((key > low) & (key <= high), weight, all(0.0f));
        whole += scores[p];
    }
    return total(whole);
}

/* The sum of the values first .. last by their weights. */
static inline void mix(
    const float *weights, const float **values, int first, int last, int64_t size, float *out
) {
    int64_t k = 0;
    for (; k + 4 * LANES <= size; k += 4 * LANES) {
        vec m[4] = {{0}};
        for (int j = first; j <= last; j++)
            for (int c = 0; c < 4; c++) m[c] += weights[j] * load(values[j] + k + c * LANES);
        for (int c = 0; c < 4; c++) store(out + k + c * LANES, m[c]);
    }
    for (; k < size; k += LANES) {
        vec m = {0};
        for (int j = first; j <= last; j++) m += weights[j] * load(values[j] + k);
        store(out + k, m);
    }
}

/* All items of a block, for the query heads of one key head. */
static void attend_block(const Attention *c, int64_t block, int64_t kv_head) {
    float turned[MOST * BLOCK], weights[BLOCK];
    const float *keys[BLOCK], *values[BLOCK];
    int64_t size = c->size, heads = c->kv_heads * c->group;
    for (int j = 0; j < BLOCK; j++) {
        int64_t at = (kv_head * c->store_rows + c->slots[block * BLOCK + j]) * size;
        keys[j] = c->keys + at;
        values[j] = c->values + at;
    }
    for (int64_t k = 0; k < size; k += LANES)
        for (int half = 0; half < BLOCK; half += LANES) {
            vec t[LANES];
            for (int j = 0; j < LANES; j++) t[j] = load(keys[half + j] + k);
            transpose(t);
            for (int i = 0; i < LANES; i++) store(turned + (k + i) * BLOCK + half, t[i]);
        }
    for (int64_t item = c->starts[block]; item < c->starts[block + 1]; item++) {
        int low = c->low[item] < 0 ? -1 : c->low[item];
        int high = c->high[item] < BLOCK - 1 ? c->high[item] : BLOCK - 1;
        for (int64_t head = kv_head * c->group; head < (kv_head + 1) * c->group; head++) {
            int64_t to = item * heads + head;
            vec scores[PARTS];
            score(c->query + (c->row[item] * heads + head) * size, turned, size, scores);
            c->sums[to] = weigh(scores, low, high, c->highest + to);
            for (int p = 0; p < PARTS; p++) store(weights + p * LANES, scores[p]);
            mix(weights, values, low + 1, high, size, c->mixed + to * size);
        }
    }
}

/* A row's items together, in the order of its blocks. */
static void merge(const Attention *c, int64_t row) {
    int64_t heads = c->kv_heads * c->group, size = c->size;
    for (int64_t head = 0; head < heads; head++) {
        float *out = c->out + (row * heads + head) * size, most = HIDDEN, whole = 0.0f;
        for (int64_t i = c->row_starts[row]; i < c->row_starts[row + 1]; i++) {
            float here = c->highest[c->row_items[i] * heads + head];
            most = here > most ? here : most;
        }
        for (int64_t k = 0; k < size; k += LANES) store(out + k, all(0.0f));
        for (int64_t i = c->row_starts[row]; i < c->row_starts[row + 1]; i++) {
            int64_t at = c->row_items[i] * heads + head;
            float weight = exponential(all(c->highest[at] - most))[0];
            whole += weight * c->sums[at];
            for (int64_t k = 0; k < size; k += LANES)
                store(out + k, load(out + k) + weight * load(c->mixed + at * size + k));
        }
        for (int64_t k = 0; k < size; k += LANES) store(out + k, load(out + k) / whole);
    }
}

/* softmax(query keys) values of every row over the keys that it sees, into out. */
void attend(const Attention *c) {
#pragma omp parallel
    {
#pragma omp for schedule(dynamic, 8)
        for (int64_t pair = 0; pair < c->blocks * c->kv_heads; pair++)
            attend_block(c, pair / c->kv_heads, pair % c->kv_heads);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < c->rows; row++) merge(c, row);
    }
}
