// Attention with AMX: scores = K Qᵀ and sums = P V, with keys and values read as they lie in the cache. The weights' sum is P times ones.
#pragma once
#include "attention_pairs.h"
#include "tiles.h"

// What is read two steps after `from`: in this tile, or in the one that comes later.
INLINE Past second_next(const Tile& t, const Tile* later, const Cache& cache, i64 K, i64 from) {
    i64 next = from + 2 * KEYS;
    if (next < t.end) return past_of(t, cache, K, next);
    if (later) next += later->begin - t.begin - ceiling(t.end - t.begin, KEYS) * KEYS;
    return later && next < later->end ? past_of(*later, cache, K, next) : Past{};
}

// A decode step reads its past once, from far away: keys and values are asked for while others are worked on, a KB here and a KB
// there, since a core waits for some 16 lines at a time and lets the rest of a long row of requests fall.
struct Ahead {
    static const i64 SOME = 1024;
    const Past& past;
    i64 bytes, at = 0;  // of the keys, and as many of the values
    Ahead(const Past& past, i64 D) : past(past), bytes(ceiling(past.known * D * 2, SOME) * SOME) {}
    void fetch() {
        if (at == 2 * bytes) return;
        const char* from = at < bytes ? (const char*)past.keys + at : (const char*)past.values + at - bytes;
        for (i64 i = 0; i < SOME; i += 64) _mm_prefetch(from + i, _MM_HINT_T1);
        at += SOME;
    }
};

// Scores [KEYS][lanes] of 32 keys; those of keys that nobody knows are not finite in general.
template <int PITCH>
OF(AMX) INLINE void scores_amx(const Tile& t, const Past& past, const uint32_t* q, float* scores, Ahead& ahead) {
    written();
    _tile_zero(0);
    _tile_zero(3);
    for (i64 i = 0; i < t.D; i += 32) {
        ahead.fetch();
        _tile_loadd(2, q + i / 2 * PITCH, PITCH * 4);
        _tile_loadd(1, past.keys + i, t.D * 2);
        _tile_dpbf16ps(0, 1, 2);
        if (past.known <= 16) continue;
        _tile_loadd(6, past.keys + 16 * t.D + i, t.D * 2);
        _tile_dpbf16ps(3, 6, 2);
    }
    _tile_stored(0, scores, PITCH * 4);
    if (past.known > 16) _tile_stored(3, scores + 16 * PITCH, PITCH * 4);
}

struct Ones {
    alignas(64) bf16 all[KEYS * LANES];
    Ones() { std::fill_n(all, KEYS * LANES, 0x3f80); }
};
static const Ones ONES;

// sums [lanes][D] += P V and totals [lanes][16] += P times ones, with weights [lanes][KEYS]. Two tiles of values at a time hide their
// latency.
OF(AMX) INLINE void sums_amx(const Tile& t, const bf16* values, const bf16* weights, float* sums, float* totals, Ahead& ahead) {
    written();
    _tile_loadd(5, weights, KEYS * 2);
    _tile_loadd(4, totals, LANES * 4);
    _tile_loadd(1, ONES.all, KEYS * 2);
    _tile_dpbf16ps(4, 5, 1);
    _tile_stored(4, totals, LANES * 4);
    for (i64 i = 0; i < t.D; i += 32) {
        ahead.fetch();
        _tile_loadd(4, sums + i, t.D * 4);
        _tile_loadd(7, sums + i + 16, t.D * 4);
        _tile_loadd(1, values + 2 * i, t.D * 4);
        _tile_loadd(6, values + 2 * (i + 16), t.D * 4);
        _tile_dpbf16ps(4, 5, 1);
        _tile_dpbf16ps(7, 5, 6);
        _tile_stored(4, sums + i, t.D * 4);
        _tile_stored(7, sums + i + 16, t.D * 4);
    }
}

// Tiles 1 and 6 hold keys or values; 0, 2 and 3 a column for each lane; 4, 5 and 7 a row for each.
OF(AMX) INLINE void attention_tiles(i64 lanes) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; tile++) {
        bool by_row = tile == 4 || tile == 5 || tile == 7, by_column = tile == 0 || tile == 2 || tile == 3;
        shapes.rows[tile] = by_row ? (uint8_t)lanes : 16;
        shapes.row_bytes[tile] = by_column ? (uint16_t)(lanes * 4) : 64;
    }
    shape_tiles(shapes);
}

// Both as bfloat16, the first in the low halves.
OF(AMX) INLINE words paired(floats first, floats second) {
    const __m512i turns = (__m512i)(shorts){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (words)_mm512_permutexvar_epi16(turns, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
}

// Many lanes: a vector holds the lanes, one for each key. WHOLE: each lane sees all of these keys.
template <bool WHOLE>
OF(AMX) INLINE void weights_of_lanes(const Tile& t, const Past& past, i64 from, float* scores, bf16* weights, float* highest,
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
    words pairs[LANES];  // two keys' weights in each 32-bit lane
    for (int n = 0; n < KEYS; n += 2) {
        words pair = {};
        if (n < known) {
            floats first = load<floats>(scores + n * LANES), second = load<floats>(scores + (n + 1) * LANES);
            first = WHOLE ? exponential(first - high) : weight(first, high);
            second = WHOLE ? exponential(second - high) : weight(second, high);
            pair = paired(first, second);
        }
        pairs[n / 2] = pair;
    }
    transpose(pairs);
    for (int j = 0; j < LANES; j++) store(weights + j * KEYS, pairs[j]);
}

// The numbers at from, from + PITCH, ..
template <int PITCH>
OF(AMX) INLINE floats column_of(const float* from) {
    return PITCH == 1 ? load<floats>(from) : (floats)_mm512_i32gather_ps((__m512i)(COUNT * PITCH), from, 4);
}

// Few lanes: a vector holds 16 keys of one lane.
template <int PITCH>
OF(AMX) INLINE void weights_of_keys(const Tile& t, const Past& past, i64 from, const float* scores, bf16* weights, float* highest,
                                    float* factor, Ahead& ahead) {
    int parts = past.known > 16 ? 2 : 1;
    for (i64 j = 0; j < PITCH; j++) {
        ahead.fetch();
        floats x[2] = {all(-INFINITY), all(-INFINITY)};
        for (int part = 0; part < parts; part++) {
            ints place = COUNT + (int32_t)(from + part * 16);
            x[part] = scored(column_of<PITCH>(scores + part * 16 * PITCH + j), t.variant, (t.from[j] <= place) & (place < t.to[j]));
        }
        float high = std::max(highest[j], _mm512_reduce_max_ps((__m512)larger(x[0], x[1])));
        factor[j] = exponential(all(highest[j] - high))[0];
        highest[j] = high;
        for (int part = 0; part < 2; part++) store(weights + j * KEYS + part * LANES, narrow(weight(x[part], all(high))));
    }
}

// PITCH lanes, or as many as there are where that is LANES.
template <int PITCH>
OF(AMX) INLINE void attend_lanes(const Tile& t, const Tile* later, const Cache& cache, i64 K) {
    alignas(64) float sums[MAX_HEAD * PITCH], totals[LANES * PITCH], both[2][KEYS * PITCH], highest[LANES], factor[LANES];
    alignas(64) uint32_t q[MAX_HEAD / 2 * PITCH + LANES];
    alignas(64) bf16 weights[KEYS * PITCH], copy[MAX_HEAD * KEYS];
    attention_tiles(PITCH);
    memset(sums, 0, t.D * PITCH * 4);
    memset(totals, 0, sizeof totals);
    store(highest, all(LOWEST));
    if (PITCH == 1) {
        memcpy(q, t.q, t.D * 2);
    } else {
        ints places = {};  // of each lane's query
        for (i64 j = 0; j < t.lanes; j++) places[j] = (int32_t)((query(t, j) - t.q) * 2);
        for (i64 i = 0; i < t.D / 2; i++)
            store(q + i * PITCH, (words)_mm512_mask_i32gather_epi32(_mm512_setzero_si512(), (1 << t.lanes) - 1, (__m512i)places, t.q + 2 * i, 1));
    }
    const Past nothing = {};
    Ahead none(nothing, t.D);
    bool once = t.lanes <= t.G;  // no other tile reads this past soon
    Past past, next = past_of(t, cache, K, t.begin);
    scores_amx<PITCH>(t, next, q, both[0], none);
    for (i64 from = t.begin, turn = 0; from < t.end; from += KEYS, turn ^= 1) {
        float* scores = both[turn];
        past = next;
        Past far = once ? second_next(t, later, cache, K, from) : nothing;
        Ahead ahead(far, t.D);
        ahead.fetch();
        if (from + KEYS < t.end) {  // the matrix units score the next keys while the vector units weigh these
            next = past_of(t, cache, K, from + KEYS);
            scores_amx<PITCH>(t, next, q, both[turn ^ 1], ahead);
        }
        ahead.fetch();
        bool whole = t.from[LANES - 1] <= from && from + KEYS <= t.to[0];
        if (PITCH < LANES)
            weights_of_keys<PITCH>(t, past, from, scores, weights, highest, factor, ahead);
        else if (whole)
            weights_of_lanes<true>(t, past, from, scores, weights, highest, factor);
        else
            weights_of_lanes<false>(t, past, from, scores, weights, highest, factor);
        ahead.fetch();
        for (int j = 0; j < PITCH; j++)
            if (factor[j] != 1.0f) {
                for (i64 i = 0; i < t.D; i += LANES) store(sums + j * t.D + i, load<floats>(sums + j * t.D + i) * factor[j]);
                store(totals + j * LANES, load<floats>(totals + j * LANES) * factor[j]);
            }
        sums_amx(t, known_values(past, t.D, copy), weights, sums, totals, ahead);
        ahead.fetch();
    }
    for (i64 j = 0; j < t.lanes; j++) keep_lane(t, j, highest[j], totals[j * LANES], sums + j * t.D);
}

// `later` is what comes after this tile, or null: its first keys and values are asked for already. Heads that are no whole tiles, and caches
// in 8 bits, are left to the vector units.
OF(AMX) static void attend_tile_amx(const Tile& t, const Tile* later, const Cache& cache, i64 K) {
    if (t.D % 32 || cache.in_8_bits) return attend_tile<floats>(t, later, cache, K);
    switch (t.lanes) {
        case 1: return attend_lanes<1>(t, later, cache, K);
        case 2: return attend_lanes<2>(t, later, cache, K);
        case 3: return attend_lanes<3>(t, later, cache, K);
        case 4: return attend_lanes<4>(t, later, cache, K);
        default: return attend_lanes<LANES>(t, later, cache, K);
    }
}
