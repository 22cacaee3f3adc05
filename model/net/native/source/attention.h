// softmax(Q Kᵀ * scale + mask) V over a paged cache, up to LANES or MAX_ROWS queries that share a key/value head at a time.
//
// The past is split every SPLIT keys, counted from the first token of the request. In a split a query's sums run over its keys in steps of
// KEYS from the first to the last; keys that it may not see add nothing. What the splits give is merged in their order, by one thread that
// computes all of them, or after several have. So a result has the same bits whichever queries are computed beside it, in which chunk, and on
// how many threads.
#pragma once
#include <algorithm>
#include <vector>

#include "tokens.h"

static const int KEYS = 32;  // what one tile of values holds
static const i64 MAX_ROWS = 64;  // queries of a tile
static const i64 SPLIT = 1024;   // keys; a whole number of steps
static const float LOWEST = -1e30f;  // below every score; finite, so that LOWEST - LOWEST is 0

struct Variant {
    float scale, softcap;  // scores become softcap * tanh(scores / softcap); 0 leaves them
    i64 window;            // keys that a query sees at most, itself included
    const float* sinks = nullptr;  // [H], scores without a value that take part in the softmax; null where there are none
};

// What some keys of a tile give: of each lane the highest score, the sum of the weights, and the sum of the weighted values.
struct Partial {
    float *highest = nullptr, *totals = nullptr, *sums = nullptr;  // [lanes], [lanes], [lanes, pitch]
    static i64 pitch(i64 D) { return ceiling(D, LANES) * LANES; }
    static i64 size(i64 lanes, i64 D) { return lanes * (pitch(D) + 2); }
    Partial() = default;
    Partial(float* room, i64 lanes) : highest(room), totals(room + lanes), sums(room + 2 * lanes) {}
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
    Partial partial;  // where the result goes; to `out` where this is not set
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

INLINE bf16* output(const Tile& t, i64 lane) { return t.out + lane / t.G * t.out_stride + lane % t.G * t.D; }

// What a lane's sums [D], filled up to whole vectors, become.
INLINE void keep_lane(const Tile& t, i64 lane, float highest, float total, const float* sums) {
    if (!t.partial.sums) {
        bf16* out = output(t, lane);
        for (i64 i = 0; i < t.D; i += LANES) put(out + i, load<floats>(sums + i) / total, t.D - i);
        return;
    }
    t.partial.highest[lane] = highest, t.partial.totals[lane] = total;
    memcpy(t.partial.sums + lane * Partial::pitch(t.D), sums, Partial::pitch(t.D) * 4);
}

// What the splits of a tile are merged into: a sink is a score without a value.
static void begin_partial(const Tile& t, const Partial& all) {
    for (i64 j = 0; j < t.lanes; j++) {
        all.highest[j] = t.variant.sinks ? t.variant.sinks[t.head * t.G + j % t.G] : LOWEST;
        all.totals[j] = t.variant.sinks ? 1.0f : 0.0f;
    }
    memset(all.sums, 0, t.lanes * Partial::pitch(t.D) * 4);
}

template <class Vector>
INLINE void merge_partials(const Tile& t, const Partial& all, const Partial& more) {
    const i64 P = Partial::pitch(t.D);
    for (i64 j = 0; j < t.lanes; j++) {
        float highest = std::max(all.highest[j], more.highest[j]);
        float before = exponential(::all<Vector>(all.highest[j] - highest))[0], after = exponential(::all<Vector>(more.highest[j] - highest))[0];
        all.highest[j] = highest, all.totals[j] = all.totals[j] * before + more.totals[j] * after;
        for (i64 i = j * P; i < (j + 1) * P; i += sizeof(Vector) / 4)
            store(all.sums + i, load<Vector>(all.sums + i) * before + load<Vector>(more.sums + i) * after);
    }
}

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

struct Attention {  // of one layer
    Heads heads;
    Cache cache;
    Variant variant;
    bf16* qkv;        // [T, (H + 2K) D]
    bf16* out;        // [T, H D], with a stride
    i64 out_stride;
    i64 rows;         // queries of a tile
    float* partials;  // room for those of a Plan
    i64 G() const { return heads.H / heads.K; }
    i64 tokens_of_tile() const { return rows / G(); }
};

struct Share {  // of the work: splits first .. last - 1 of a tile's keys, for one key/value head
    i64 tile, head, first, last;
    i64 place;  // of its partials in the room for them; -1 where one thread computes the whole tile
};

// How a layer's attention is shared. Tiles are whole shares, but those with so long a past that threads would be left without work.
struct Plan {
    std::vector<Work> tiles;
    std::vector<Share> shares, split;  // split: those whose partials are merged afterwards
    i64 room = 0;                    // floats of all partials
};

static const i64 MAX_ROOM = 1 << 24;  // floats; beyond it tiles stay whole
static const i64 SHARES = 2;           // of a thread: a tile that takes longer than one of them is split

static Plan plan_of(const Step& step, const Heads& heads, i64 window, i64 tokens_of_tile, i64 threads) {
    Plan plan;
    for (i64 row = 0, token = 0; row < step.rows; token += step.counts[row++])
        for (i64 first = 0; first < step.counts[row]; first += tokens_of_tile) plan.tiles.push_back({row, token + first, first});
    std::reverse(plan.tiles.begin(), plan.tiles.end());  // the longest first: of a prompt its end
    std::vector<Share> whole;
    i64 all = 0;
    for (const Work& work : plan.tiles) {
        i64 before = step.starts[work.row] + work.first, end = before + std::min(tokens_of_tile, step.counts[work.row] - work.first);
        whole.push_back({(i64)whole.size(), 0, std::max<i64>(0, before + 1 - window) / SPLIT, ceiling(end, SPLIT), -1});
        all += (whole.back().last - whole.back().first) * heads.K;
    }
    for (Share share : whole) {
        const Work& work = plan.tiles[share.tile];
        i64 lanes = std::min(tokens_of_tile, step.counts[work.row] - work.first) * heads.H / heads.K, size = Partial::size(lanes, heads.D);
        i64 splits = share.last - share.first;
        bool cut = splits > 1 && splits * SHARES * threads > all && plan.room + heads.K * splits * size <= MAX_ROOM;
        for (share.head = 0; share.head < heads.K; share.head++) {
            share.place = cut ? plan.room : -1;
            (cut ? plan.split : plan.shares).push_back(share);
            for (i64 n = share.first; cut && n < share.last; n++, plan.room += size) plan.shares.push_back({share.tile, share.head, n, n + 1, plan.room});
        }
    }
    return plan;
}

static Tile tile_of(const Step& step, const Work& work, const Attention& a, i64 head) {
    const Heads& heads = a.heads;
    Tile t;
    t.head = head;
    t.G = a.G(), t.D = heads.D, t.variant = a.variant;
    t.q_stride = heads.width(), t.out_stride = a.out_stride;
    t.q = a.qkv + work.token * t.q_stride + head * t.G * t.D;
    t.out = a.out + work.token * t.out_stride + head * t.G * t.D;
    i64 tokens = std::min(a.tokens_of_tile(), step.counts[work.row] - work.first), before = step.starts[work.row] + work.first;
    t.lanes = tokens * t.G;
    for (i64 j = 0, end = 0; j < std::max(LANES, t.lanes); j++) {
        if (j % t.G == 0) end = before + std::min(j / t.G, tokens - 1) + 1;
        t.to[j] = (int32_t)end, t.from[j] = (int32_t)std::max<i64>(0, end - a.variant.window);
    }
    t.begin = t.from[0] / KEYS * KEYS, t.end = before + tokens;
    t.blocks = step.blocks[work.row];
    return t;
}

// One split of a tile.
static void cut_tile(Tile& t, i64 split) { t.begin = std::max(t.begin, split * SPLIT), t.end = std::min(t.end, (split + 1) * SPLIT); }
