// softmax(Q Kᵀ * scale + mask) V over a paged cache, up to LANES queries that share a key/value head at a time.
//
// A query's sums run over its keys in steps of KEYS from the first to the last. Keys that it may not see add nothing, so its
// result has the same bits whichever queries are computed beside it.
#pragma once
#include <immintrin.h>

#include "matrix.h"
#include "tokens.h"

static const int KEYS = 32;  // what one tile of values holds
static const i64 MAX_HEAD = 256;
static const ints COUNT = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
static const float LOWEST = -1e30f;  // below every score; finite, so that LOWEST - LOWEST is 0

struct Variant {
    float scale, softcap;  // scores become softcap * tanh(scores / softcap); 0 leaves them
    i64 window;            // keys that a query sees at most, itself included
};

struct Tile {  // lane j is query head j % G of token first + j / G
    const bf16* q;  // of the first token and the first of the group's heads
    bf16* out;
    i64 q_stride, out_stride, lanes, G, D;
    int32_t from[LANES], to[LANES];  // keys that each lane sees
    i64 begin, end;                  // keys that any lane sees, from a whole step on
    const i64* blocks;
    Variant variant;
};

INLINE const bf16* query(const Tile& t, i64 lane) { return t.q + lane / t.G * t.q_stride + lane % t.G * t.D; }

// From products of queries and keys to scores.
INLINE floats scaled(floats x, const Variant& variant) {
    x *= variant.scale;
    if (variant.softcap > 0) {
        floats e = exponential(magnitude(x / variant.softcap) * -2.0f), tanh = (1.0f - e) / (1.0f + e);
        x = variant.softcap * choose(x < 0.0f, -tanh, tanh);
    }
    return x;
}

INLINE floats scored(floats x, const Variant& variant, ints seen) { return choose(seen, scaled(x, variant), all(-INFINITY)); }

INLINE floats weight(floats score, floats highest) {
    return choose(score != -INFINITY, exponential(score - highest), floats{});
}

INLINE void finish(const Tile& t, const float* sum, const float* sums, i64 pitch) {  // sum [lanes], sums [D][pitch]
    for (i64 j = 0; j < t.lanes; j++) {
        bf16* to = t.out + j / t.G * t.out_stride + j % t.G * t.D;
        float share = 1.0f / sum[j];
        for (i64 i = 0; i < t.D; i += LANES) {
            floats column;
            for (i64 n = 0; n < LANES; n++) column[n] = sums[(i + n) * pitch + j];
            store(to + i, narrow(column * share));
        }
    }
}

struct Past {  // KEYS keys and values as they lie in one block; `known` of them are seen by a lane
    const bf16 *keys, *values;
    i64 stride, known;  // values of one dimension to the next
};

INLINE Past past_of(const Tile& t, const Cache& cache, i64 head, i64 K, i64 from, bf16* copy) {
    i64 B = cache.block_size, block = t.blocks[from / B] * K + head, at = from % B;
    Past past = {cache.keys + (block * B + at) * t.D, cache.values + block * t.D * B + at, B, std::min<i64>(KEYS, t.end - from)};
    if (past.known == KEYS) return past;
    // Values that no lane sees are not read: what an earlier owner of the block left there may be NaN.
    for (i64 i = 0; i < t.D; i++)
        for (int n = 0; n < KEYS; n++) copy[i * KEYS + n] = n < past.known ? past.values[i * B + n] : 0;
    return {past.keys, copy, KEYS, past.known};
}

// A decode step reads its past once, from far away: ask for the next keys and values while these are worked on.
INLINE void fetch(const Tile& t, const Cache& cache, i64 head, i64 K, i64 from) {
    if (from >= t.end) return;
    i64 B = cache.block_size, block = t.blocks[from / B] * K + head, at = from % B;
    const char *keys = (const char*)(cache.keys + (block * B + at) * t.D), *values = (const char*)(cache.values + block * t.D * B + at);
    for (i64 i = 0; i < KEYS * t.D * 2; i += 64) _mm_prefetch(keys + i, _MM_HINT_T0);
    for (i64 i = 0; i < t.D; i++) _mm_prefetch(values + i * B * 2, _MM_HINT_T0);
}

// With whatever vectors the target has: a vector holds the lanes.
INLINE void attend_tile(const Tile& t, const Cache& cache, i64 head, i64 K) {
    alignas(64) float q[MAX_HEAD * LANES] = {};
    alignas(64) bf16 copy[MAX_HEAD * KEYS];
    floats sums[MAX_HEAD] = {}, scores[KEYS], highest = all(LOWEST), sum = {};
    ints begin = load<ints>(t.from), end = load<ints>(t.to);
    for (i64 j = 0; j < t.lanes; j++)
        for (i64 i = 0; i < t.D; i++) q[i * LANES + j] = wide(query(t, j)[i]);
    for (i64 from = t.begin; from < t.end; from += KEYS) {
        Past past = past_of(t, cache, head, K, from, copy);
        floats before = highest;
        for (i64 n = 0; n < KEYS; n++) {
            floats x = {};
            for (i64 i = 0; i < (n < past.known ? t.D : 0); i++) x += load<floats>(q + i * LANES) * wide(past.keys[n * t.D + i]);
            int32_t place = (int32_t)(from + n);
            scores[n] = scored(x, t.variant, (begin <= place) & (place < end));
            highest = larger(highest, scores[n]);
        }
        floats factor = exponential(before - highest);
        sum *= factor;
        for (int n = 0; n < KEYS; n++) sum += scores[n] = weight(scores[n], highest);
        for (i64 i = 0; i < t.D; i++) {
            floats total = sums[i] * factor;
            for (int n = 0; n < KEYS; n++) total += scores[n] * wide(past.values[i * past.stride + n]);
            sums[i] = total;
        }
    }
    finish(t, (const float*)&sum, (const float*)sums, LANES);
}

// With AMX: scores = K Qᵀ and sums = Vᵀ P, both read as they lie in the cache. The weights' sum is one more row of Vᵀ, of ones.

// Scores [KEYS][lanes] of 32 keys; those of keys that nobody knows are not finite in general.
OF(AMX) INLINE void scores_amx(const Tile& t, const Past& past, const uint32_t* q, i64 pitch, float* scores) {
    written();
    _tile_zero(0);
    _tile_zero(3);
    for (i64 i = 0; i < t.D; i += 32) {
        _tile_loadd(2, q + i / 2 * pitch, pitch * 4);
        _tile_loadd(1, past.keys + i, t.D * 2);
        _tile_dpbf16ps(0, 1, 2);
        if (past.known <= 16) continue;
        _tile_loadd(6, past.keys + 16 * t.D + i, t.D * 2);
        _tile_dpbf16ps(3, 6, 2);
    }
    _tile_stored(0, scores, pitch * 4);
    if (past.known > 16) _tile_stored(3, scores + 16 * pitch, pitch * 4);
}

// sums [D + 16][pitch] += (Vᵀ and ones) P, with weights [KEYS / 2][pitch] in pairs. Two rows of tiles at a time hide their latency.
OF(AMX) INLINE void sums_amx(const Tile& t, const Past& past, const uint32_t* weights, const bf16* ones, i64 pitch, float* sums) {
    float* total = sums + t.D * pitch;
    written();
    _tile_loadd(2, weights, pitch * 4);
    _tile_loadd(5, total, pitch * 4);
    _tile_loadd(7, ones, 64);
    _tile_dpbf16ps(5, 7, 2);
    for (i64 i = 0; i < t.D; i += 32) {
        float *first = sums + i * pitch, *second = first + 16 * pitch;
        _tile_loadd(0, first, pitch * 4);
        _tile_loadd(3, second, pitch * 4);
        _tile_loadd(1, past.values + i * past.stride, past.stride * 2);
        _tile_loadd(6, past.values + (i + 16) * past.stride, past.stride * 2);
        _tile_dpbf16ps(0, 1, 2);
        _tile_dpbf16ps(3, 6, 2);
        _tile_stored(0, first, pitch * 4);
        _tile_stored(3, second, pitch * 4);
    }
    _tile_stored(5, total, pitch * 4);
}

OF(AMX) INLINE void attention_tiles(i64 lanes) {  // tiles 1, 6 and 7 hold rows of the cache, the others a column for each lane
    TileShapes shapes;
    for (int tile = 0; tile < 8; tile++)
        shapes.rows[tile] = 16, shapes.row_bytes[tile] = tile == 1 || tile > 5 ? 64 : (uint16_t)(lanes * 4);
    shape_tiles(shapes);
}

typedef uint16_t shorts __attribute__((vector_size(LANES * 4)));

// Both as bfloat16, the first in the low halves.
OF(AMX) INLINE words paired(floats first, floats second) {
    const __m512i turns = (__m512i)(shorts){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (words)_mm512_permutexvar_epi16(turns, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
}

// Many lanes: a vector holds the lanes, one for each key. WHOLE: each lane sees all of these keys.
template <bool WHOLE>
OF(AMX) static void weights_of_lanes(const Tile& t, const Past& past, i64 from, float* scores, uint32_t* weights, float* highest,
                                     float* factor) {
    floats before = load<floats>(highest), high = before;
    ints begin = load<ints>(t.from), end = load<ints>(t.to);
    int known = past.known > 16 ? 32 : 16;
    for (int n = 0; n < known; n++) {
        int32_t place = (int32_t)from + n;
        floats x = scaled(load<floats>(scores + n * LANES), t.variant);
        if (!WHOLE) x = choose((begin <= place) & (place < end), x, all(-INFINITY));
        high = larger(high, x);
        store(scores + n * LANES, x);
    }
    store(highest, high), store(factor, exponential(before - high));
    for (int n = 0; n < KEYS; n += 2) {  // two keys' weights in one 32-bit lane: the order that the matrix unit wants
        words pair = {};
        if (n < known) {
            floats first = load<floats>(scores + n * LANES), second = load<floats>(scores + (n + 1) * LANES);
            first = WHOLE ? exponential(first - high) : weight(first, high);
            second = WHOLE ? exponential(second - high) : weight(second, high);
            pair = paired(first, second);
        }
        store(weights + n / 2 * LANES, pair);
    }
}

// Few lanes: a vector holds 16 keys of one lane.
OF(AMX) static void weights_of_keys(const Tile& t, const Past& past, i64 from, const float* scores, uint32_t* weights, float* highest,
                                    float* factor) {
    const ints places = COUNT * (int32_t)t.lanes;
    int parts = past.known > 16 ? 2 : 1;
    for (i64 j = 0; j < t.lanes; j++) {
        floats x[2] = {all(-INFINITY), all(-INFINITY)};
        for (int part = 0; part < parts; part++) {
            ints place = COUNT + (int32_t)(from + part * 16);
            floats products = (floats)_mm512_i32gather_ps((__m512i)places, scores + part * 16 * t.lanes + j, 4);
            x[part] = scored(products, t.variant, (t.from[j] <= place) & (place < t.to[j]));
        }
        float high = std::max(highest[j], _mm512_reduce_max_ps((__m512)larger(x[0], x[1])));
        factor[j] = exponential(all(highest[j] - high))[0];
        highest[j] = high;
        for (int part = 0; part < 2; part++) {
            alignas(64) uint32_t pairs[LANES / 2];
            store(pairs, narrow(weight(x[part], all(high))));
            for (int pair = 0; pair < LANES / 2; pair++) weights[(part * LANES / 2 + pair) * t.lanes + j] = pairs[pair];
        }
    }
}

static const i64 FEW = 4;

OF(AMX) static void attend_tile_amx(const Tile& t, const Cache& cache, i64 head, i64 K) {
    alignas(64) float sums[(MAX_HEAD + 16) * LANES], both[2][KEYS * LANES], highest[LANES], factor[LANES];
    alignas(64) uint32_t q[MAX_HEAD / 2 * LANES + LANES], weights[KEYS / 2 * LANES];
    alignas(64) bf16 copy[MAX_HEAD * KEYS], ones[16 * KEYS];
    i64 pitch = t.lanes <= FEW ? t.lanes : LANES;
    attention_tiles(pitch);
    memset(sums, 0, (t.D + 16) * pitch * 4);
    for (int i = 0; i < 16 * KEYS; i++) ones[i] = 0x3f80;
    for (int j = 0; j < LANES; j++) highest[j] = LOWEST;
    ints places = {};  // of each lane's query
    for (i64 j = 0; j < t.lanes; j++) places[j] = (int32_t)((query(t, j) - t.q) * 2);
    for (i64 i = 0; i < t.D / 2; i++)
        store(q + i * pitch, (words)_mm512_mask_i32gather_epi32(_mm512_setzero_si512(), (1 << t.lanes) - 1, (__m512i)places, t.q + 2 * i, 1));
    Past past, next = past_of(t, cache, head, K, t.begin, copy);
    scores_amx(t, next, q, pitch, both[0]);
    for (i64 from = t.begin, turn = 0; from < t.end; from += KEYS, turn ^= 1) {
        float* scores = both[turn];
        past = next;
        if (from + KEYS < t.end) {  // the matrix units score the next keys while the vector units weigh these
            next = past_of(t, cache, head, K, from + KEYS, copy);
            scores_amx(t, next, q, pitch, both[turn ^ 1]);
        }
        if (pitch < LANES) fetch(t, cache, head, K, from + 2 * KEYS);
        bool whole = t.from[LANES - 1] <= from && from + KEYS <= t.to[0];
        if (pitch == LANES && whole)
            weights_of_lanes<true>(t, past, from, scores, weights, highest, factor);
        else if (pitch == LANES)
            weights_of_lanes<false>(t, past, from, scores, weights, highest, factor);
        else
            weights_of_keys(t, past, from, scores, weights, highest, factor);
        bool same = true;
        for (i64 j = 0; j < t.lanes; j++) same &= factor[j] == 1.0f;
        for (i64 i = 0; i <= (same ? -1 : t.D); i++)
            if (pitch == LANES)
                store(sums + i * LANES, load<floats>(sums + i * LANES) * load<floats>(factor));
            else
                for (i64 j = 0; j < t.lanes; j++) sums[i * pitch + j] *= factor[j];
        sums_amx(t, past, weights, ones, pitch, sums);
    }
    finish(t, sums + t.D * pitch, sums, pitch);
}

// --- a step's tokens: `rows` requests, each with tokens start .. start + count - 1

struct Step {
    const i64 *starts, *counts, *blocks;
    i64 rows, width;  // the block table is [rows, width]
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
    const bf16* qkv;  // [T, (H + 2K) D], rotated
    bf16* out;        // [T, H D], with a stride
    i64 out_stride;
    i64 tokens_of_tile() const { return LANES / (heads.H / heads.K); }
};

static Tile tile_of(const Step& step, const Work& work, const Attention& a, i64 head) {
    const Heads& heads = a.heads;
    Tile t;
    t.G = heads.H / heads.K, t.D = heads.D, t.variant = a.variant;
    t.q_stride = heads.width(), t.out_stride = a.out_stride;
    t.q = a.qkv + work.token * t.q_stride + head * t.G * t.D;
    t.out = a.out + work.token * t.out_stride + head * t.G * t.D;
    i64 tokens = std::min(a.tokens_of_tile(), step.counts[work.row] - work.first), before = step.starts[work.row] + work.first;
    t.lanes = tokens * t.G;
    for (i64 j = 0; j < LANES; j++) {
        t.to[j] = (int32_t)(before + std::min(j / t.G, tokens - 1) + 1);
        t.from[j] = (int32_t)std::max<i64>(0, t.to[j] - a.variant.window);
    }
    t.begin = t.from[0] / KEYS * KEYS, t.end = before + tokens;
    t.blocks = step.blocks + work.row * step.width;
    return t;
}
