/* List the tokens that may win a draw, by the hash of each token's noise and its weight in float32.
 * The lists are longer than necessary by more than the error of float32, and the caller computes each
 * listed token exactly; so no result depends on this file's bits.
 *
 * Vectors have LANES numbers, whatever the machine has; the last vector of a row is padded with
 * -INFINITY.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define ROOM 1024 /* as in shortlist.py */
#define TURNS 4 /* vectors that are tested together */
#define SUMS 16 /* numbers that are summed in float32 */
#define HASHES 4294967295.0
#define SPREAD (4294967296.0 * (1 + 1e-4)) /* with a margin above the error of float32 */
#define LIGHT 1e-37f /* weights below this may be smaller than float32 can tell */

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef int64_t halves __attribute__((vector_size(4 * LANES)));

static const ints LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* LANES logits of a row from `first` on, padded if the row ends before. */
static inline vec logits_at(const float *row, int64_t first, int64_t vocab) {
    vec x = (vec){0} - INFINITY;
    if (first + LANES <= vocab)
        memcpy(&x, row + first, sizeof x);
    else if (first < vocab)
        memcpy(&x, row + first, (vocab - first) * sizeof *row);
    return x;
}

/* a where a lane of the mask is -1, b where it is 0. */
static inline vec either(ints mask, vec a, vec b) {
    return (vec)((mask & (ints)a) | (~mask & (ints)b));
}

static inline int any(ints mask) {
    halves h = (halves)mask;
    return (h[0] | h[1] | h[2] | h[3] | h[4] | h[5] | h[6] | h[7]) != 0;
}

/* The inputs of all draws: logits (rows, vocab); the others have one number per draw. */
typedef struct {
    const float *logits;
    const int64_t *rows; /* the draw's row of logits */
    const int32_t *tokens; /* a token of that row; for may_win the row's likeliest */
    const float *most; /* the row's highest logit */
    const float *per_heat; /* 1 / temperature */
    const uint64_t *seeds;
    const int64_t *positions;
    int64_t draws, vocab;
} Draws;

static inline words rotated(words x, int bits) { return x << bits | x >> (32 - bits); }

/* Hash one more word, as in noise.py: the seed's halves, the position, the token. */
static inline words turned(words state, words word) {
    return rotated(rotated(word * 0xCC9E2D51u, 15) * 0x1B873593u ^ state, 13) * 5 + 0xE6546B64u;
}

static inline words finished(words h) {
    h ^= 16;
    h = (h ^ h >> 16) * 0x85EBCA6Bu;
    h = (h ^ h >> 13) * 0xC2B2AE35u;
    return h ^ h >> 16;
}

/* e^x of numbers up to 0, within 2 units in the last place; e^-87 for x below -87. */
static inline vec exponential(vec x) {
    x = either(x > -87.0f, x, (vec){0} - 87.0f);
    ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, ints);
    vec k = __builtin_convertvector(n, vec);
    vec r = x - k * 0.693359375f + k * 2.12194440e-4f; /* ln 2 in two parts */
    vec p = (vec){0} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vec)((n + 127) << 23);
}

/* -log u of a hash, as in noise.py. */
static inline double waiting(uint32_t hash) {
    double log_u = log(hash / HASHES);
    return log_u < -0x1p-32 ? -log_u : 0x1p-32;
}

/* List the tokens of a draw that may have the highest noisy score; or, if `all`, those that may score
 * as high as the likeliest one. A token of weight w and -log u waits (-log u) / w, and the one that
 * waits least wins. Returns how many there are; if it is more than ROOM, only ROOM of them are
 * written. */
static int64_t may_win_one(
    const Draws *c, int64_t draw, int all, int32_t *tokens, uint32_t *token_hashes
) {
    const float *row = c->logits + c->rows[draw] * c->vocab;
    float most = c->most[draw], per_heat = c->per_heat[draw];
    int64_t vocab = c->vocab, count = 0;
    words state = turned((words){0}, (words){0} + (uint32_t)c->seeds[draw]);
    state = turned(state, (words){0} + (uint32_t)(c->seeds[draw] >> 32));
    state = turned(state, (words){0} + (uint32_t)c->positions[draw]);
    words likeliest = (words){0} + (uint32_t)c->tokens[draw];
    double least = waiting(finished(turned(state, likeliest))[0]);
    for (int64_t first = 0; first < vocab && count <= ROOM; first += TURNS * LANES) {
        words hashes[TURNS];
        vec weights[TURNS];
        ints near[TURNS], some = {0};
        float limit = (float)(SPREAD * least);
        for (int t = 0; t < TURNS; t++) {
            int64_t from = first + t * LANES;
            hashes[t] = finished(turned(state, (words)(LANE + (int32_t)from)));
            weights[t] = exponential((logits_at(row, from, vocab) - most) * per_heat);
            near[t] = __builtin_convertvector(~hashes[t], vec) <= weights[t] * limit;
            some |= near[t];
        }
        if (!any(some)) continue;
        for (int i = 0; i < TURNS * LANES && first + i < vocab; i++) {
            if (!near[i / LANES][i % LANES]) continue;
            uint32_t hash = hashes[i / LANES][i % LANES];
            if (count < ROOM) {
                tokens[count] = (int32_t)(first + i);
                token_hashes[count] = hash;
            }
            count++;
            double waits = waiting(hash) / weights[i / LANES][i % LANES];
            if (!all && waits < least && weights[i / LANES][i % LANES] > LIGHT) least = waits;
        }
    }
    return count;
}

/* may_win_one for all draws: tokens and their hashes (draws, ROOM), and counts (draws). */
void may_win(
    const Draws *c, const uint8_t *all, int32_t *tokens, uint32_t *hashes, int64_t *counts
) {
#pragma omp parallel for schedule(dynamic) if (c->draws * c->vocab > 1 << 16)
    for (int64_t draw = 0; draw < c->draws; draw++)
        counts[draw] =
            may_win_one(c, draw, all[draw], tokens + draw * ROOM, hashes + draw * ROOM);
}

/* For each draw, the sum of all weights, and of those before its token: the heavier ones, ties by id;
 * and whether another logit is within `near` of the token's, so that float64 may not tell them apart.
 * (draws) each. */
void weights_before(
    const Draws *c, const float *near, double *totals, double *before, uint8_t *unsure
) {
#pragma omp parallel for schedule(dynamic) if (c->draws * c->vocab > 1 << 16)
    for (int64_t draw = 0; draw < c->draws; draw++) {
        const float *row = c->logits + c->rows[draw] * c->vocab;
        float most = c->most[draw], per_heat = c->per_heat[draw], own = row[c->tokens[draw]];
        double total = 0, heavier = 0;
        ints others = {0};
        for (int64_t first = 0; first < c->vocab; first += SUMS * LANES) {
            vec all = {0}, more = {0};
            for (int64_t from = first; from < first + SUMS * LANES && from < c->vocab; from += LANES) {
                vec logits = logits_at(row, from, c->vocab), gap = logits - own;
                vec weights = exponential((logits - most) * per_heat);
                ints same = gap == 0, lower = LANE + (int32_t)from < c->tokens[draw];
                all += weights;
                more += either((gap > 0) | (same & lower), weights, (vec){0});
                others |= ~same & (gap <= near[draw]) & (-gap <= near[draw]);
            }
            for (int i = 0; i < LANES; i++) {
                total += all[i];
                heavier += more[i];
            }
        }
        totals[draw] = total;
        before[draw] = heavier;
        unsure[draw] = any(others);
    }
}
