// A mixture of experts: which of them compute a token, what each weighs, and their sum. The equation is that of experts.py.
//
// A step's pairs of a token and an expert are grouped by expert, so that each expert's matrices are read once. A token's sum runs in the order
// of the experts' numbers, in float32: it has the same bits whatever is computed beside it.
//
// Shapes: T tokens, E model width, X experts, C of them that a token goes to, G groups of experts. A shared expert, which every token goes
// to, is number X.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "tokens.h"

struct Mixture {
    i64 X = 0, C = 0, F = 0, S = 0;  // F, S: widths of an expert and of the shared one; S is 0 where there is none
    bool all = false;                // weights stay as they are, else they are divided by their sum
    bool gated = false, sigmoid = false;  // a shared expert with a gate; sigmoids of scores, else parts of their softmax
    i64 G = 1, best_groups = 1;           // a token's experts are from its best groups
    float eps = 0, floor = 0, scale = 1;  // what is added to the sum, the least of it, and what weights are multiplied by
    i64 experts() const { return X + (S > 0); }
    i64 scores() const { return X + gated; }   // rows of the router
    i64 calls() const { return C + (S > 0); }  // experts that compute a token
};

struct Group {  // of pairs that one expert computes
    i64 expert, first, count;        // the group's first pair
    i64 up_items = 0, down_items = 0;  // pieces of work up to its end
};

// Where each token of a step goes. Pairs with expert 0 come first; those with the shared one come last, in the order of the tokens.
struct Routing {
    std::vector<float> scores, weights;  // [T, scores], the last is the shared one's gate; [T, calls]
    std::vector<float> merits;           // [T, X + G]: what experts are chosen by, and groups of them
    std::vector<i64> experts, pairs;     // [T, calls], ascending, and the pair of each
    std::vector<i64> tokens, begin;      // [T * C], of each pair but the shared ones; [X + 1]
    std::vector<Group> groups;           // `used` of them
    i64 used = 0;
    void make_room(const Mixture& m, i64 T) {
        scores.resize(T * m.scores()), weights.resize(T * m.calls()), merits.resize(T * (m.X + m.G));
        experts.resize(T * m.calls()), pairs.resize(T * m.calls());
        tokens.resize(T * m.C), begin.resize(m.X + 1), groups.resize(m.experts());
    }
};

// The numbers of the `count` highest of n values, the highest one first; of equal ones the lower number.
static void best_of(const float* values, i64 n, i64 count, i64* best) {
    i64 known = 0;
    for (i64 number = 0; number < n; number++) {
        i64 at = known < count ? known++ : count;
        for (; at > 0 && values[best[at - 1]] < values[number]; at--)
            if (at < count) best[at] = best[at - 1];
        if (at < count) best[at] = number;
    }
}

static float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

// Sigmoids of X scores, or their softmax, in their place.
static void score(const Mixture& m, float* scores) {
    float highest = *std::max_element(scores, scores + m.X), sum = 0;
    for (i64 x = 0; x < m.X; x++) sum += scores[x] = m.sigmoid ? sigmoid(scores[x]) : std::exp(scores[x] - highest);
    for (i64 x = 0; x < m.X && !m.sigmoid; x++) scores[x] /= sum;
}

// Leaves the best groups of experts, by the sum of the two best in each; of equal ones the lower number. groups [G] are for use in between.
static void limit_groups(const Mixture& m, float* merits, float* groups) {
    i64 size = m.X / m.G;
    for (i64 g = 0; g < m.G; g++) {
        i64 two[2];
        best_of(merits + g * size, size, 2, two);
        groups[g] = merits[g * size + two[0]] + merits[g * size + two[1]];
    }
    for (i64 g = 0; g < m.G; g++) {
        i64 better = 0;
        for (i64 other = 0; other < m.G; other++) better += groups[other] > groups[g] || (groups[other] == groups[g] && other < g);
        if (better >= m.best_groups) std::fill_n(merits + g * size, size, -std::numeric_limits<float>::infinity());
    }
}

// The experts of token t, from its scores; `correction` [X] or null is added where they are chosen. Of a softmax over the chosen scores alone the
// others are not computed.
static void route_token(const Mixture& m, const float* correction, Routing& r, i64 t) {
    float *scores = r.scores.data() + t * m.scores(), *merits = r.merits.data() + t * (m.X + m.G);
    i64* experts = r.experts.data() + t * m.calls();
    float *weights = r.weights.data() + t * m.calls(), sum = m.eps;
    bool few = !m.all && !m.sigmoid && !correction && m.G == 1 && m.eps == 0 && m.floor == 0;
    if (!few) score(m, scores);
    for (i64 x = 0; x < m.X; x++) merits[x] = scores[x] + (correction ? correction[x] : 0);
    if (m.G > 1) limit_groups(m, merits, merits + m.X);
    best_of(merits, m.X, m.C, experts);
    float highest = merits[experts[0]];
    for (i64 c = 0; c < m.C; c++) {
        float& weight = scores[experts[c]];
        if (few) weight = std::exp(weight - highest);
        sum += weight;
    }
    sum = m.all ? 1 : std::max(sum, m.floor);
    std::sort(experts, experts + m.C);
    for (i64 c = 0; c < m.C; c++) weights[c] = scores[experts[c]] / sum * m.scale;
    if (m.S) experts[m.C] = m.X, weights[m.C] = m.gated ? sigmoid(scores[m.X]) : 1;
}

// Sorts the pairs of T tokens by expert, and then by token.
static void group_pairs(const Mixture& m, Routing& r, i64 T) {
    std::fill(r.begin.begin(), r.begin.end(), 0);
    for (i64 t = 0; t < T; t++)
        for (i64 c = 0; c < m.C; c++) r.begin[r.experts[t * m.calls() + c] + 1]++;
    r.used = 0;
    for (i64 expert = 0; expert < m.X; expert++) {
        i64 count = r.begin[expert + 1];
        r.begin[expert + 1] += r.begin[expert];
        if (count) r.groups[r.used++] = {expert, r.begin[expert], count};
    }
    if (m.S) r.groups[r.used++] = {m.X, T * m.C, T};
    for (i64 t = 0; t < T; t++) {
        for (i64 c = 0; c < m.C; c++) {
            i64 pair = r.begin[r.experts[t * m.calls() + c]]++;
            r.pairs[t * m.calls() + c] = pair, r.tokens[pair] = t;
        }
        if (m.S) r.pairs[t * m.calls() + m.C] = T * m.C + t;
    }
}

// The sum of a token's weighted updates, which lie in the rows `pairs`: times `scale` to the residual where there is one, else to y.
INLINE void sum_token(const bf16* updates, i64 stride, const i64* pairs, const float* weights, i64 calls, bf16* residual, bf16* y, float scale,
                      i64 E) {
    for (i64 i = 0; i < E; i += LANES) {
        floats sum = {};
        for (i64 c = 0; c < calls; c++) sum += get(updates + pairs[c] * stride + i, E - i) * weights[c];
        if (residual)
            put(residual + i, get(residual + i, E - i) + sum * scale, E - i);
        else
            put(y + i, sum, E - i);
    }
}
