// The best token of a row, or a draw: the best of (score - highest) / temperature plus Gumbel noise, as `draw` of
// sampling.py has it. The noise is a hash of the row's key and the token.
#pragma once
#include "numbers.h"

typedef uint64_t longs __attribute__((vector_size(LANES * 8)));

INLINE floats logarithm(floats x) {  // of normal numbers above 0 (Cephes' logf); relative error below 1e-6
    words bits = (words)x;
    floats exponent = __builtin_convertvector((ints)(bits >> 23) - 126, floats);
    floats m = (floats)((bits & 0x7fffff) | 0x3f000000);  // 0.5 <= m < 1
    ints low = m < 0.707106781186547524f;
    exponent = choose(low, exponent - 1.0f, exponent);
    m = choose(low, m + m, m) - 1.0f;
    floats square = m * m, p = m * 7.0376836292e-2f - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    p = p * m * square - exponent * 2.12194440e-4f - square * 0.5f;
    return m + p + exponent * 0.693359375f;
}

INLINE floats noise(longs tokens, uint64_t key) {
    longs hash = key ^ (tokens * 0x9E3779B97F4A7C15u);
    hash = (hash ^ (hash >> 30)) * 0xBF58476D1CE4E5B9u;
    hash = (hash ^ (hash >> 27)) * 0x94D049BB133111EBu;
    hash = (hash ^ (hash >> 31)) >> 41;
    floats uniform = (__builtin_convertvector(hash, floats) + 0.5f) * 0x1p-23f;
    return -logarithm(-logarithm(uniform));
}

// The token whose `value(scores, tokens)` is largest, of equals the first; -1 where a value is NaN or the largest is not finite.
template <class Value>
INLINE i64 largest(const float* scores, i64 V, Value value) {
    longs tokens = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    floats highest = all(-INFINITY);
    ints where = {}, strange = {};
    auto look = [&](i64 n, floats score) __attribute__((always_inline)) {
        score = value(score, tokens);
        ints higher = score > highest;
        strange |= score != score;
        highest = choose(higher, score, highest);
        where = (where & ~higher) | ((int32_t)n & higher);
        tokens += LANES;
    };
    i64 whole = V / LANES * LANES;
    for (i64 n = 0; n < whole; n += LANES) look(n, load<floats>(scores + n));
    if (whole < V) {
        floats rest = all(-INFINITY);
        memcpy(&rest, scores + whole, (V - whole) * 4);
        look(whole, rest);
    }
    i64 token = where[0];
    float best = highest[0];
    for (int j = 0; j < LANES; j++) {
        i64 other = where[j] + j;
        if (strange[j]) return -1;
        if (highest[j] > best || (highest[j] == best && other < token)) best = highest[j], token = other;
    }
    return best - best == 0.0f ? token : -1;
}

INLINE i64 draw_token(const float* scores, i64 V, float temperature, uint64_t key) {
    i64 best = largest(scores, V, [](floats score, longs) __attribute__((always_inline)) { return score; });
    if (temperature <= 0.0f || best < 0) return best;
    float highest = scores[best];
    return largest(scores, V, [=](floats score, longs tokens) __attribute__((always_inline)) {
        return (score - highest) / temperature + noise(tokens, key);
    });
}
