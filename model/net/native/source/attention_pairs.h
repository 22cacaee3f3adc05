// Attention with AVX-512-BF16, for up to MAX_ROWS queries that share a key/value head: scores = Q Kᵀ and sums = P V as products of pairs of bfloat16.
//
// A vector holds keys in the scores, which needs keys pair by pair, turned once a step for all queries; in the sums it holds columns, for which values
// lie as they are needed. Weights are rounded to bfloat16, and their total is the sum of the rounded ones.
//
// CODED: a cache in 8 bits, whose codes are exact in bfloat16. The scales of keys come after the products of a group of columns; those of values
// are part of the weights, of which each group has its own, rounded once, and the total is the sum of the unrounded ones.
#pragma once
#include "attention_vectors.h"

static const int TOGETHER = 8;    // queries whose scores stay in registers
static const int SUMMED = 4;      // queries whose sums do, and vectors of columns
static const i64 ASKED = 8;    // times a step asks for what comes next
static const i64 PAIRS = KEYS / 2;
static_assert(MAX_ROWS % TOGETHER == 0 && TOGETHER % SUMMED == 0, "");

typedef uint16_t shorts __attribute__((vector_size(KEYS * 2)));

// Rows become columns: 32-bit numbers, then pairs of them, then quarters of vectors change places.
OF(AVX512) INLINE void transpose(words* rows) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
            b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88), a[i + 4] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
        a[i + 8] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88), a[i + 12] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        rows[i] = (words)_mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
        rows[i + 8] = (words)_mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
    }
}

// Values of `known` keys, and zeros for the others: what an earlier owner of the block left there may be NaN.
INLINE const bf16* known_values(const Past& past, i64 D, bf16* copy) {
    if (past.known == KEYS) return past.values;
    for (i64 row = 0; row < PAIRS; row++) {
        uint32_t seen = 2 * row + 1 < past.known ? 0xffffffff : 2 * row < past.known ? 0xffff : 0;
        for (i64 i = 0; i < D; i += LANES) {
            words pair = {};
            if (seen) pair = load<words>(past.values + 2 * (row * D + i)) & seen;
            store(copy + 2 * (row * D + i), pair);
        }
    }
    return copy;
}

// Codes of 8 bits as bfloat16: the bytes of its numbers from 0 to 127.
struct Widener {
    alignas(64) uint8_t low[128], high[128];
    Widener() {
        for (int code = 0; code < 128; code++) low[code] = (uint8_t)narrow((float)code), high[code] = (uint8_t)(narrow((float)code) >> 8);
    }
    // Of each 16 codes the first 8 and the others.
    OF(AVX512_BF16) EACH void widen(__m512i codes, words& first, words& second) const {
        __m512i size = _mm512_abs_epi8(codes);
        __m512i ends = _mm512_permutex2var_epi8(load<__m512i>(low), size, load<__m512i>(low + 64));
        __m512i begins = _mm512_permutex2var_epi8(load<__m512i>(high), size, load<__m512i>(high + 64));
        begins = (__m512i)((words)begins | ((words)codes & 0x80808080));
        first = (words)_mm512_unpacklo_epi8(ends, begins), second = (words)_mm512_unpackhi_epi8(ends, begins);
    }
};
static const Widener WIDENER;

// Which bytes of two keys' codes come side by side, so that what `widen` gives are 16 columns and the next 16.
struct Sides {
    alignas(64) uint8_t at[2][64];
    Sides() {
        for (int half = 0; half < 2; half++)
            for (int i = 0; i < 64; i++) at[half][i] = (uint8_t)(half * 32 + i / 16 * 4 + i % 16 / 8 * 16 + i % 8 / 2 + i % 2 * 64);
    }
};
static const Sides SIDES;

OF(AVX512_BF16) INLINE const bf16* widened_values(const int8_t* codes, i64 D, bf16* to) {
    for (i64 row = 0; row < PAIRS; row++)
        for (i64 i = 0; i < D; i += 4 * LANES) {
            __m512i one = load<__m512i>(codes + 2 * row * D + i), other = load<__m512i>(codes + (2 * row + 1) * D + i);
            for (int half = 0; half < 2; half++) {
                words first, second;
                WIDENER.widen(_mm512_permutex2var_epi8(one, load<__m512i>(SIDES.at[half]), other), first, second);
                bf16* place = to + 2 * (row * D + i + half * 2 * LANES);
                store(place, first), store(place + 2 * LANES, second);
            }
        }
    return to;
}

// The scales of `known` keys or values group by group, and zeros for the others.
OF(AVX512_BF16) INLINE void turn_scales(const bf16* scales, i64 G, i64 known, float* to) {
    for (i64 g = 0; g < G; g += 2)
        for (i64 n = 0; n < KEYS; n += LANES) {
            ints key = COUNT + (int32_t)n;
            floats two = (floats)_mm512_i32gather_ps((__m512i)(key * (int32_t)G + (int32_t)g), scales, 2);
            two = choose(key < (int32_t)known, two, floats{});
            store(to + g * KEYS + n, first_of(two)), store(to + (g + 1) * KEYS + n, second_of(two));
        }
}

struct PairRoom {  // of a tile; a row is a query
    alignas(64) uint32_t q[MAX_ROWS * MAX_HEAD / 2];      // pairs of TOGETHER rows side by side
    alignas(64) uint32_t keys[KEYS * MAX_HEAD / 2];   // pairs of KEYS keys side by side
    i64 rows;
    alignas(64) uint32_t weights[MAX_ROWS * PAIRS * MAX_HEAD / GROUP];  // [rows][PAIRS], of two keys each; CODED: of each group
    alignas(64) float key_scales[KEYS * MAX_HEAD / GROUP], value_scales[KEYS * MAX_HEAD / GROUP];
    alignas(64) float scores[MAX_ROWS * KEYS], sums[MAX_ROWS * MAX_HEAD], totals[MAX_ROWS * LANES];
    alignas(64) float highest[MAX_ROWS], factor[MAX_ROWS];
    alignas(64) bf16 copy[KEYS * MAX_HEAD];
};

OF(AVX512_BF16) INLINE void turn_keys(const bf16* keys, i64 D, uint32_t* to, Coming& coming) {
    for (i64 n = 0; n < KEYS; n += LANES)
        for (i64 i = 0; i < D; i += 2 * LANES) {
            words rows[LANES];
            coming.ask<3>(ASKED);
            for (i64 j = 0; j < LANES; j++) rows[j] = load<words>(keys + (n + j) * D + i);
            transpose(rows);
            for (i64 j = 0; j < LANES; j++) store(to + (i / 2 + j) * KEYS + n, rows[j]);
        }
}

// The same with codes, four columns of a key in 32 bits.
OF(AVX512_BF16) INLINE void turn_codes(const int8_t* keys, i64 D, uint32_t* to, Coming& coming) {
    const shorts two_and_two = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15, 16, 18, 20, 22, 17, 19, 21, 23, 24, 26, 28, 30, 25, 27, 29, 31};
    for (i64 n = 0; n < KEYS; n += LANES)
        for (i64 i = 0; i < D; i += 4 * LANES) {
            words rows[LANES];
            coming.ask<3>(ASKED / 2);
            for (i64 j = 0; j < LANES; j++) rows[j] = load<words>(keys + (n + j) * D + i);
            transpose(rows);
            for (i64 j = 0; j < LANES; j++) {
                words first, second;
                WIDENER.widen(_mm512_permutexvar_epi16((__m512i)two_and_two, (__m512i)rows[j]), first, second);
                uint32_t* place = to + (i / 2 + 2 * j) * KEYS + n;
                store(place, first), store(place + KEYS, second);
            }
        }
}

// Products of COUNT rows' queries with KEYS keys.
template <bool CODED, int COUNT>
OF(AVX512_BF16) INLINE void score_rows(const uint32_t* q, const PairRoom& room, i64 D, float* scores) {
    const i64 step = CODED ? GROUP / 2 : D / 2;
    for (i64 begin = 0; begin < D / 2; begin += step) {
        __m512 sums[COUNT][2] = {};
        for (i64 pair = begin; pair < begin + step; pair++) {
            const uint32_t* keys = room.keys + pair * KEYS;
            __m512bh first = (__m512bh)_mm512_load_si512(keys), second = (__m512bh)_mm512_load_si512(keys + LANES);
            for (int j = 0; j < COUNT; j++) {
                __m512bh own = (__m512bh)_mm512_set1_epi32((int)q[pair * TOGETHER + j]);
                sums[j][0] = _mm512_dpbf16_ps(sums[j][0], own, first);
                sums[j][1] = _mm512_dpbf16_ps(sums[j][1], own, second);
            }
        }
        for (int half = 0; half < 2; half++) {
            floats scales = {};
            if (CODED) scales = load<floats>(room.key_scales + begin / step * KEYS + half * LANES);
            for (int j = 0; j < COUNT; j++) {
                float* to = scores + j * KEYS + half * LANES;
                store(to, CODED ? add_product(begin ? load<floats>(to) : floats{}, scales, (floats)sums[j][half]) : (floats)sums[j][half]);
            }
        }
    }
}

// The scores of all rows become weights. WHOLE: each row sees all of these keys.
template <bool CODED, bool WHOLE>
OF(AVX512_BF16) INLINE void weigh_rows(const Tile& t, i64 from, PairRoom& room) {
    float highest[MAX_ROWS] = {};
    for (i64 j = 0; j < t.lanes; j++) {
        float* scores = room.scores + j * KEYS;
        floats x[2];
        for (int half = 0; half < 2; half++) {
            x[half] = scaled(load<floats>(scores + half * LANES), t.variant);
            if (!WHOLE) {
                ints place = COUNT + (int32_t)(from + half * LANES);
                x[half] = choose((t.from[j] <= place) & (place < t.to[j]), x[half], all(-INFINITY));
            }
            store(scores + half * LANES, x[half]);
        }
        highest[j] = std::max(room.highest[j], _mm512_reduce_max_ps((__m512)larger(x[0], x[1])));
    }
    for (i64 j = 0; j < t.lanes; j += LANES) {
        floats higher = load<floats>(highest + j);
        store(room.factor + j, exponential(load<floats>(room.highest + j) - higher));
        store(room.highest + j, higher);
    }
    for (i64 j = 0; j < t.lanes; j++) {
        const float* scores = room.scores + j * KEYS;
        floats x[2];
        for (int half = 0; half < 2; half++) {
            x[half] = load<floats>(scores + half * LANES);
            x[half] = WHOLE ? exponential(x[half] - highest[j]) : weight(x[half], all(highest[j]));
        }
        floats sum = x[0] + x[1];
        for (i64 g = 0; g < (CODED ? t.D / GROUP : 1); g++) {
            floats y[2] = {x[0], x[1]};
            for (int half = 0; half < 2 && CODED; half++) y[half] *= load<floats>(room.value_scales + g * KEYS + half * LANES);
            floats pairs = (floats)_mm512_cvtne2ps_pbh((__m512)y[1], (__m512)y[0]);
            store(room.weights + (g * room.rows + j) * PAIRS, pairs);
            if (!CODED) sum = first_of(pairs) + second_of(pairs);
        }
        store(room.totals + j * LANES, load<floats>(room.totals + j * LANES) * room.factor[j] + sum);
    }
}

// Adds the weighted values of COUNT rows to their sums, VECTORS vectors of columns, which become smaller by their factors before.
template <int COUNT, int VECTORS>
OF(AVX512_BF16) INLINE void sum_rows(const uint32_t* weights, const bf16* values, i64 D, const float* factor, float* to) {
    __m512 sums[COUNT][VECTORS];
    for (int j = 0; j < COUNT; j++)
        for (int v = 0; v < VECTORS; v++) sums[j][v] = (__m512)(load<floats>(to + j * D + v * LANES) * factor[j]);
    for (i64 pair = 0; pair < PAIRS; pair++) {
        __m512bh value[VECTORS];
        for (int v = 0; v < VECTORS; v++) value[v] = load<__m512bh>(values + 2 * (pair * D + v * LANES));
        for (int j = 0; j < COUNT; j++) {
            __m512bh own = (__m512bh)_mm512_set1_epi32((int)weights[j * PAIRS + pair]);
            for (int v = 0; v < VECTORS; v++) sums[j][v] = _mm512_dpbf16_ps(sums[j][v], own, value[v]);
        }
    }
    for (int j = 0; j < COUNT; j++)
        for (int v = 0; v < VECTORS; v++) store(to + j * D + v * LANES, sums[j][v]);
}

template <bool CODED, int COUNT>
OF(AVX512_BF16) INLINE void sum_rows(PairRoom& room, const bf16* values, i64 j, i64 D) {
    const uint32_t* weights = room.weights + j * PAIRS;
    i64 i = 0;
    for (; !CODED && i + SUMMED * LANES <= D; i += SUMMED * LANES)
        sum_rows<COUNT, SUMMED>(weights, values + 2 * i, D, room.factor + j, room.sums + j * D + i);
    for (; i < D; i += 2 * LANES, weights += CODED ? room.rows * PAIRS : 0)
        sum_rows<COUNT, 2>(weights, values + 2 * i, D, room.factor + j, room.sums + j * D + i);
}

// How many of the rows that are left come next: of 3 and of 5 to 7 some are computed for nothing.
INLINE i64 next_rows(i64 left, i64 most) { return left >= most ? most : left > 4 ? 8 : left > 2 ? 4 : left; }

static_assert(GROUP == 2 * LANES, "the columns of sum_rows");

// The keys from `from` on in the room, and their values: those that lie in the cache, or in the room.
template <bool CODED>
OF(AVX512_BF16) INLINE const bf16* turn_past(const Tile& t, const Cache& cache, i64 K, i64 from, PairRoom& room, Coming& coming) {
    if (!CODED) {
        Past past = past_of(t, cache, K, from);
        turn_keys(past.keys, t.D, room.keys, coming);
        return known_values(past, t.D, room.copy);
    }
    CodedPast past = coded_past_of(t, cache, K, from);
    i64 known = std::min<i64>(KEYS, t.end - from);
    turn_scales(past.keys.scales, t.D / GROUP, known, room.key_scales), turn_scales(past.values.scales, t.D / GROUP, known, room.value_scales);
    turn_codes(past.keys.codes, t.D, room.keys, coming);
    return widened_values(past.values.codes, t.D, room.copy);
}

template <bool CODED>
OF(AVX512_BF16) static void attend_pairs(const Tile& t, const Tile* later, const Cache& cache, i64 K) {
    PairRoom room;
    const i64 D = t.D, rows = room.rows = ceiling(t.lanes, TOGETHER) * TOGETHER;
    memset(room.sums, 0, rows * D * 4), memset(room.totals, 0, rows * LANES * 4), memset(room.weights, 0, rows * PAIRS * 4 * (CODED ? D / GROUP : 1));
    memset(room.factor, 0, sizeof room.factor), memset(room.highest, 0, sizeof room.highest);
    for (i64 j = 0; j < rows; j++) {
        uint32_t* to = room.q + j / TOGETHER * TOGETHER * D / 2 + j % TOGETHER;
        const uint32_t* own = (const uint32_t*)query(t, std::min(j, t.lanes - 1));  // of a row too many nobody reads what comes
        for (i64 pair = 0; pair < D / 2; pair++) to[pair * TOGETHER] = load<uint32_t>(own + pair);
        room.highest[j] = LOWEST;
    }
    for (i64 from = t.begin; from < t.end; from += KEYS) {
        Coming coming = coming_after(t, later, cache, K, from);
        const bf16* values = turn_past<CODED>(t, cache, K, from, room, coming);
        for (i64 j = 0, count; j < t.lanes; j += count) {
            count = next_rows(t.lanes - j, TOGETHER);
            const uint32_t* q = room.q + j * D / 2;
            float* scores = room.scores + j * KEYS;
            coming.ask<3>(ASKED);
            if (count == 1) score_rows<CODED, 1>(q, room, D, scores);
            else if (count == 2) score_rows<CODED, 2>(q, room, D, scores);
            else if (count == 4) score_rows<CODED, 4>(q, room, D, scores);
            else score_rows<CODED, TOGETHER>(q, room, D, scores);
        }
        bool whole = t.from[t.lanes - 1] <= from && from + KEYS <= t.to[0];
        whole ? weigh_rows<CODED, true>(t, from, room) : weigh_rows<CODED, false>(t, from, room);
        for (i64 j = 0, count; j < t.lanes; j += count) {
            count = next_rows(t.lanes - j, SUMMED);
            coming.ask<3>(ASKED);
            if (count == 1) sum_rows<CODED, 1>(room, values, j, D);
            else if (count == 2) sum_rows<CODED, 2>(room, values, j, D);
            else sum_rows<CODED, SUMMED>(room, values, j, D);
        }
    }
    for (i64 j = 0; j < t.lanes; j++) {
        keep_lane(t, j, room.highest[j], sum_of(load<floats>(room.totals + j * LANES)), room.sums + j * D);
    }
}

// Heads that are no whole vectors of pairs, or of codes, are multiplied as float32.
OF(AVX512_BF16) static void attend_tile_pairs(const Tile& t, const Tile* later, const Cache& cache, i64 K) {
    if (t.D % (cache.in_8_bits ? 4 * LANES : 2 * LANES)) return attend_tile<floats>(t, later, cache, K);
    cache.in_8_bits ? attend_pairs<true>(t, later, cache, K) : attend_pairs<false>(t, later, cache, K);
}
