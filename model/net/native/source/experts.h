// A mixture of experts: which of them compute a token, what each weighs, and their sum. The equation is that of experts.py.
//
// A step's pairs of a token and an expert are grouped by expert, so that each expert's matrices are read once. A token's sum runs in the order
// of the experts' numbers, in float32: it has the same bits whatever is computed beside it.
//
// Shapes: T tokens, E model width, X experts, C of them that a token goes to. A shared expert, which every token goes to, is number X.
#pragma once
#include <algorithm>
#include <vector>

#include "tokens.h"

struct Mixture {
    i64 X = 0, C = 0, F = 0, S = 0;  // F, S: widths of an expert and of the shared one; S is 0 where there is none
    bool all = false;                // weights are parts of the softmax over all scores, else over the chosen ones
    bool beside = false;             // beside an MLP, which is the last of a layer's
    i64 experts() const { return X + (S > 0); }
    i64 mlps() const { return experts() + beside; }
    i64 calls() const { return C + (S > 0); }  // experts that compute a token
};

struct Group {  // of pairs that one expert computes
    i64 expert, first, count;        // the group's first pair
    i64 up_items = 0, down_items = 0;  // pieces of work up to its end
};

// Where each token of a step goes. Pairs with expert 0 come first; those with the shared one come last, in the order of the tokens.
struct Routing {
    std::vector<float> scores, weights;  // [T, experts], the last is the shared one's gate; [T, calls]
    std::vector<i64> experts, pairs;     // [T, calls], ascending, and the pair of each
    std::vector<i64> tokens, begin;      // [T * C], of each pair but the shared ones; [X + 1]
    std::vector<Group> groups;           // `used` of them
    i64 used = 0;
    void make_room(const Mixture& m, i64 T) {
        scores.resize(T * m.experts()), weights.resize(T * m.calls());
        experts.resize(T * m.calls()), pairs.resize(T * m.calls());
        tokens.resize(T * m.C), begin.resize(m.X + 1), groups.resize(m.experts());
    }
};

// The experts of token t, from its scores.
static void route_token(const Mixture& m, Routing& r, i64 t) {
    const float* scores = r.scores.data() + t * m.experts();
    i64 *experts = r.experts.data() + t * m.calls(), known = 0;
    float *weights = r.weights.data() + t * m.calls(), sum = 0;
    for (i64 expert = 0; expert < m.X; expert++) {  // the best so far, the best one first
        i64 at = known < m.C ? known++ : m.C;
        for (; at > 0 && scores[experts[at - 1]] < scores[expert]; at--)
            if (at < m.C) experts[at] = experts[at - 1];
        if (at < m.C) experts[at] = expert;
    }
    float highest = scores[experts[0]];
    for (i64 n = 0; n < (m.all ? m.X : m.C); n++) sum += std::exp(scores[m.all ? n : experts[n]] - highest);
    std::sort(experts, experts + m.C);
    for (i64 c = 0; c < m.C; c++) weights[c] = std::exp(scores[experts[c]] - highest) / sum;
    if (m.S) experts[m.C] = m.X, weights[m.C] = 1 / (1 + std::exp(-scores[m.X]));
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
