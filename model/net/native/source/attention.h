// softmax(Q Kᵀ * scale + mask) V over a paged cache, up to LANES or MAX_ROWS queries that share a key/value head at a time.
//
// A query's sums run over its keys in steps of KEYS from the first to the last. Keys that it may not see add nothing, so its
// result has the same bits whichever queries are computed beside it.
#pragma once
#include <algorithm>
#include <vector>

#include "tokens.h"

static const int KEYS = 32;  // what one tile of values holds
static const i64 MAX_ROWS = 64;  // queries of a tile
static const float LOWEST = -1e30f;  // below every score; finite, so that LOWEST - LOWEST is 0

struct Variant {
    float scale, softcap;  // scores become softcap * tanh(scores / softcap); 0 leaves them
    i64 window;            // keys that a query sees at most, itself included
    const float* sinks = nullptr;  // [H], scores without a value that take part in the softmax; null where there are none
};

struct Tile {  // lane j is query head j % G of token first + j / G
    const bf16* q;  // of the first token and the first of the group's heads
    bf16* out;
    i64 q_stride, out_stride, lanes, G, D;
    int32_t from[MAX_ROWS], to[MAX_ROWS];  // keys that each lane sees
    i64 begin, end;                  // keys that any lane sees, from a whole step on
    const i64* blocks;
    i64 head;
    Variant variant;
};

INLINE const bf16* query(const Tile& t, i64 lane) { return t.q + lane / t.G * t.q_stride + lane % t.G * t.D; }

// From products of queries and keys to scores.
template <class Vector>
INLINE Vector scaled(Vector x, const Variant& variant) {
    x *= variant.scale;
    if (variant.softcap > 0) {
        Vector e = exponential(magnitude(x) * (-2.0f / variant.softcap)), tanh = (1.0f - e) / (1.0f + e);
        x = variant.softcap * choose(x < 0.0f, -tanh, tanh);
    }
    return x;
}

template <class Vector, class Bits>
INLINE Vector scored(Vector x, const Variant& variant, Bits seen) {
    return choose(seen, scaled(x, variant), all<Vector>(-INFINITY));
}

template <class Vector>
INLINE Vector weight(Vector score, Vector highest) {
    return choose(score != -INFINITY, exponential(score - highest), Vector{});
}

// What a query's softmax begins with: its highest score so far, and the sum of the weights.
INLINE float first_score(const Tile& t, i64 lane) { return t.variant.sinks ? t.variant.sinks[t.head * t.G + lane % t.G] : LOWEST; }
INLINE floats first_scores(const Tile& t) {
    floats highest;
    for (i64 j = 0; j < LANES; j++) highest[j] = first_score(t, j);
    return highest;
}
INLINE float first_sum(const Tile& t) { return t.variant.sinks ? 1.0f : 0.0f; }

INLINE bf16* output(const Tile& t, i64 lane) { return t.out + lane / t.G * t.out_stride + lane % t.G * t.D; }

// The outputs of a tile times the sigmoid of what gates them, which lies `distance` behind their queries.
template <class Vector>
INLINE void gate_tile(const Tile& t, i64 distance) {
    for (i64 j = 0; j < t.lanes; j++) {
        bf16* out = output(t, j);
        const bf16* gate = query(t, j) + distance;
        for (i64 i = 0; i < t.D; i += sizeof(Vector) / 4)
            keep_numbers(out + i, gated_by(numbers<Vector>(out + i, t.D - i), numbers<Vector>(gate + i, t.D - i)), t.D - i);
    }
}

// A token's heads [H, D], each times the sigmoid of its gate.
template <class Vector>
INLINE void gate_token(bf16* token, const float* gates, i64 H, i64 D) {
    for (i64 head = 0; head < H; head++, token += D) {
        float open = 1 / (1 + std::exp(-gates[head]));
        for (i64 i = 0; i < D; i += sizeof(Vector) / 4) keep_numbers(token + i, numbers<Vector>(token + i, D - i) * open, D - i);
    }
}

struct Past {  // KEYS keys and values as they lie in one block; `known` of them are seen by a lane
    const bf16 *keys, *values;
    i64 known;
};

INLINE i64 place_of(const Tile& t, const Cache& cache, i64 K, i64 from) {
    i64 B = cache.block_size;
    return ((t.blocks[from / B] * K + t.head) * B + from % B) * t.D;
}

INLINE Past past_of(const Tile& t, const Cache& cache, i64 K, i64 from) {
    i64 place = place_of(t, cache, K, from);
    return {cache.keys + place, cache.values + place, std::min<i64>(KEYS, t.end - from)};
}

struct CodedPast {  // the same in a cache of 8 bits
    Codes keys, values;
};

INLINE CodedPast coded_past_of(const Tile& t, const Cache& cache, i64 K, i64 from) {
    i64 B = cache.block_size, piece = t.blocks[from / B] * K + t.head;
    return {codes_of(cache.keys, B, piece, from % B, t.D), codes_of(cache.values, B, piece, from % B, t.D)};
}

// --- a step's tokens: `rows` requests, each with tokens start .. start + count - 1

struct Step {
    const i64 *starts, *counts;
    const i64* const* blocks;  // of each request
    i64 rows;
};

struct Work {
    i64 row, token, first;  // the row, the tile's first token in the step and in the row
};

static std::vector<Work> work_of(const Step& step, i64 tokens_of_tile) {
    std::vector<Work> all;
    for (i64 row = 0, token = 0; row < step.rows; token += step.counts[row++])
        for (i64 first = 0; first < step.counts[row]; first += tokens_of_tile) all.push_back({row, token + first, first});
    std::reverse(all.begin(), all.end());  // the longest first: of a prompt its end
    return all;
}

struct Attention {  // of one layer
    Heads heads;
    Cache cache;
    Variant variant;
    bf16* qkv;        // [T, (H + 2K) D]
    bf16* out;        // [T, H D], with a stride
    i64 out_stride;
    i64 rows;         // queries of a tile
    i64 tokens_of_tile() const { return rows / (heads.H / heads.K); }
};

static Tile tile_of(const Step& step, const Work& work, const Attention& a, i64 head) {
    const Heads& heads = a.heads;
    Tile t;
    t.head = head;
    t.G = heads.H / heads.K, t.D = heads.D, t.variant = a.variant;
    t.q_stride = heads.width(), t.out_stride = a.out_stride;
    t.q = a.qkv + work.token * t.q_stride + head * t.G * t.D;
    t.out = a.out + work.token * t.out_stride + head * t.G * t.D;
    i64 tokens = std::min(a.tokens_of_tile(), step.counts[work.row] - work.first), before = step.starts[work.row] + work.first;
    t.lanes = tokens * t.G;
    for (i64 j = 0; j < std::max(LANES, t.lanes); j++) {
        t.to[j] = (int32_t)(before + std::min(j / t.G, tokens - 1) + 1);
        t.from[j] = (int32_t)std::max<i64>(0, t.to[j] - a.variant.window);
    }
    t.begin = t.from[0] / KEYS * KEYS, t.end = before + tokens;
    t.blocks = step.blocks[work.row];
    return t;
}
