// Attention with the vectors of a target: a vector holds columns of a head, and in the softmax keys.
//
// Lanes take turns, a few at a time, at keys and values that have become float32. A score is a sum for each place in a vector, and then the
// sum of those: its bits depend on nobody else. A code times its scale is exact in float32, so where that is done does not matter.
#pragma once
#include "attention.h"

static const int AT_ONCE = 3;  // lanes whose sums stay in registers
static const int SOME = 4;     // keys at a time, and vectors of columns

typedef int32_t eight_places __attribute__((vector_size(32)));

INLINE eights folded(fours x) { return eights{x[0], x[1], x[2], x[3]}; }
INLINE eights folded(eights x) { return x; }
INLINE eights folded(floats x) {
    eights halves[2];
    memcpy(halves, &x, sizeof x);
    return halves[0] + halves[1];
}

// The sums of two neighbours each, of a and of b.
INLINE eights sums_of_pairs(eights a, eights b) {
    const eight_places even = {0, 2, 8, 10, 4, 6, 12, 14}, odd = {1, 3, 9, 11, 5, 7, 13, 15};
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
}

// The sums of four vectors' numbers.
template <class Vector>
INLINE fours sums_of(const Vector* x) {
    eights sums = sums_of_pairs(sums_of_pairs(folded(x[0]), folded(x[1])), sums_of_pairs(folded(x[2]), folded(x[3])));
    fours halves[2];
    memcpy(halves, &sums, sizeof sums);
    return halves[0] + halves[1];
}

template <class Vector>
INLINE float highest_of(Vector x) {
    float highest = x[0];
    for (size_t j = 1; j < sizeof x / 4; j++) highest = x[j] > highest ? x[j] : highest;
    return highest;
}

struct Room {  // of a tile; rows of a head's columns are P apart
    alignas(64) float q[LANES * MAX_HEAD], sums[LANES * MAX_HEAD], keys[KEYS * MAX_HEAD], values[KEYS * MAX_HEAD];
    alignas(64) float scales[2][KEYS * MAX_HEAD / GROUP];  // of keys and values in 8 bits
    alignas(64) float scores[LANES * KEYS], highest[LANES], factor[LANES];
    alignas(64) float totals[LANES * LANES];  // of the weights, by their keys' places in a vector
};

// The next codes as float32.
INLINE void widen(const int8_t* from, eights& to) {
    Lanes<8>::ints x;  // GCC 12 converts them one by one
    __asm__("vpmovsxbd %1, %0" : "=x"(x) : "m"(*(const int8_t(*)[8])from));
    to = __builtin_convertvector(x, eights);
}
#ifndef STAND_INS
INLINE void widen(const int8_t* from, floats& to) {
    ints x;
    __asm__("vpmovsxbd %1, %0" : "=v"(x) : "m"(*(const int8_t(*)[16])from));
    to = __builtin_convertvector(x, floats);
}
#endif
INLINE void widen(const int8_t* from, fours& to) {
    for (int j = 0; j < 4; j++) to[j] = from[j];
}

#define EACH __attribute__((always_inline))

// Rows of keys or values: as float32 in the room, or as they lie in a cache. Columns from i + more on, where i is a multiple of GROUP, or of
// all columns of SOME vectors, and more is less.
template <class Vector>
struct Wide {
    const float* rows;
    i64 P;
    EACH Vector at(i64 n, i64 i, i64 more) const { return load<Vector>(rows + n * P + i + more); }
};

template <class Vector>
struct Keys {
    const bf16* rows;
    i64 D;
    EACH Vector at(i64 n, i64 i, i64 more) const { return numbers<Vector>(rows + n * D + i + more, LANES); }
    EACH float one(i64 n, i64 i) const { return wide(rows[n * D + i]); }
};

template <class Vector>
struct Values {  // two keys' side by side
    const bf16* rows;
    i64 D;
    EACH Vector at(i64 n, i64 i, i64 more) const {
        Vector pairs = load<Vector>(rows + n / 2 * 2 * D + 2 * (i + more));
        return n % 2 ? second_of(pairs) : first_of(pairs);
    }
    EACH float one(i64 n, i64 i) const { return wide(rows[n / 2 * 2 * D + 2 * i + n % 2]); }
};

template <class Vector>
struct Coded {
    const int8_t* codes;
    const float* scales;
    i64 D, G;
    EACH Vector at(i64 n, i64 i, i64 more) const {
        Vector x;
        widen(codes + n * D + i + more, x);
        return x * scales[n * G + i / GROUP + more / GROUP];
    }
    EACH float one(i64 n, i64 i) const { return codes[n * D + i] * scales[n * G + i / GROUP]; }
};

// Those of KEYS tokens; their scales become float32.
template <class Vector>
INLINE Coded<Vector> coded(const Codes& from, i64 D, float* scales) {
    i64 G = ceiling(D, GROUP);
    for (i64 i = 0; i < KEYS * G; i += LANES) store(scales + i, numbers<floats>(from.scales + i, LANES));
    return {from.codes, scales, D, G};
}

// What does not lie in whole vectors, or is read by many lanes, becomes float32 once.
template <class Vector, class Rows>
INLINE Wide<Vector> widened(const Rows& rows, i64 known, i64 D, i64 P, float* to) {
    const i64 WIDTH = sizeof(Vector) / 4;
    auto row = [&](i64 n) EACH {
        i64 i = 0;
        for (; i + GROUP <= D; i += GROUP)
            for (i64 more = 0; more < GROUP; more += WIDTH) store(to + n * P + i + more, rows.at(n, i, more));
        for (; i + WIDTH <= D; i += WIDTH) store(to + n * P + i, rows.at(n, i / GROUP * GROUP, i % GROUP));
        for (; i < D; i++) to[n * P + i] = rows.one(n, i);
    };
    for (i64 n = 0; n < known; n += 2) row(n), row(n + 1);
    return {to, P};
}

// The next keys and values, which come from far away: some of them are asked for at a time, while others are worked on.
struct Coming {
    const char *keys, *values;
    i64 bytes, at = 0;  // of the keys, and as many of the values
    EACH void ask() {
        for (i64 end = std::min(at + ceiling(bytes, KEYS / SOME), bytes); at < end; at += 64)
            __builtin_prefetch(keys + at), __builtin_prefetch(values + at);
    }
};

// What comes after the step at `from`: in this tile, or in the one that comes later.
INLINE Coming coming_after(const Tile& t, const Tile* later, const Cache& cache, i64 K, i64 from) {
    i64 next = from + KEYS;
    if (next >= t.end) {
        if (!later) return {nullptr, nullptr, 0};
        return coming_after(*later, nullptr, cache, K, later->begin - KEYS);
    }
    if (!cache.in_8_bits) {
        Past past = past_of(t, cache, K, next);
        return {(const char*)past.keys, (const char*)past.values, KEYS * t.D * 2};
    }
    CodedPast past = coded_past_of(t, cache, K, next);  // in blocks of KEYS the scales follow
    return {(const char*)past.keys.codes, (const char*)past.values.codes, KEYS * (t.D + 2 * ceiling(t.D, GROUP))};
}

// Products of COUNT lanes' queries, from `lane` on, with the keys.
template <class Vector, int COUNT, class Rows>
INLINE void score_lanes(Room& room, const Rows& keys, i64 lane, i64 known, i64 P, Coming& coming) {
    const i64 WIDTH = sizeof(Vector) / 4;
    const float* q = room.q + lane * P;
    for (i64 n = 0; n < known; n += SOME) {
        coming.ask();
        Vector sums[COUNT][SOME] = {};
        for (i64 i = 0; i < P; i += WIDTH)
            for (int key = 0; key < SOME; key++) {
                Vector k = keys.at(n + key, i / GROUP * GROUP, i % GROUP);
                for (int j = 0; j < COUNT; j++) sums[j][key] = add_product(sums[j][key], k, load<Vector>(q + j * P + i));
            }
        for (int j = 0; j < COUNT; j++) store(room.scores + (lane + j) * KEYS + n, sums_of(sums[j]));
    }
}

// Adds COUNT lanes' weighted values to their sums, which become smaller by `factor` before.
template <class Vector, int COUNT, class Rows>
INLINE void sum_lanes(Room& room, const Rows& values, i64 lane, i64 known, i64 P) {
    const i64 WIDTH = sizeof(Vector) / 4;
    const float* weights = room.scores + lane * KEYS;
    for (i64 i = 0; i < P; i += SOME * WIDTH) {
        Vector sums[COUNT][SOME];
        for (int j = 0; j < COUNT; j++)
            for (int v = 0; v < SOME; v++) sums[j][v] = load<Vector>(room.sums + (lane + j) * P + i + v * WIDTH) * room.factor[lane + j];
        auto add = [&](i64 n) EACH {
            for (int v = 0; v < SOME; v++) {
                Vector value = values.at(n, i, v * WIDTH);
                for (int j = 0; j < COUNT; j++) sums[j][v] = add_product(sums[j][v], value, weights[j * KEYS + n] - Vector{});
            }
        };
        for (i64 n = 0; n + 1 < known; n += 2) add(n), add(n + 1);
        if (known % 2) add(known - 1);
        for (int j = 0; j < COUNT; j++)
            for (int v = 0; v < SOME; v++) store(room.sums + (lane + j) * P + i + v * WIDTH, sums[j][v]);
    }
}

// Scores become weights.
template <class Vector>
INLINE void weigh(const Tile& t, i64 from, Room& room) {
    typedef typename Like<Vector>::ints Places;
    const int WIDTH = sizeof(Vector) / 4;
    float before[LANES];
    memcpy(before, room.highest, sizeof before);
    for (i64 j = 0; j < t.lanes; j++) {
        Vector highest = all<Vector>(before[j]);
        Places places = load<Places>(&COUNT) + (int32_t)from;
        for (int n = 0; n < KEYS; n += WIDTH, places += WIDTH) {
            float* scores = room.scores + j * KEYS + n;
            Vector x = scored(load<Vector>(scores), t.variant, (t.from[j] <= places) & (places < t.to[j]));
            highest = larger(highest, x);
            store(scores, x);
        }
        room.highest[j] = highest_of(highest);
    }
    for (i64 j = 0; j < LANES; j += WIDTH)
        store(room.factor + j, exponential(load<Vector>(before + j) - load<Vector>(room.highest + j)));
    for (i64 j = 0; j < t.lanes; j++) {
        Vector total = load<Vector>(room.totals + j * LANES) * room.factor[j], highest = all<Vector>(room.highest[j]);
        for (int n = 0; n < KEYS; n += WIDTH) {
            Vector weights = weight(load<Vector>(room.scores + j * KEYS + n), highest);
            total += weights;
            store(room.scores + j * KEYS + n, weights);
        }
        store(room.totals + j * LANES, total);
    }
}

// How many of the lanes that are left come next.
INLINE i64 next_lanes(i64 left) { return left == AT_ONCE + 1 ? 2 : std::min<i64>(left, AT_ONCE); }

static const i64 FEW_LANES = 2 * AT_ONCE;  // which read a cache as it lies

// All lanes, with up to KEYS keys and their values.
template <class Vector, class SomeKeys, class SomeValues>
INLINE void attend_rows(const Tile& t, i64 from, i64 known, i64 P, Room& room, Coming& coming, const SomeKeys& keys, const SomeValues& values) {
    for (i64 j = 0, count; j < t.lanes; j += count) {
        count = next_lanes(t.lanes - j);
        if (count == 1) score_lanes<Vector, 1>(room, keys, j, known, P, coming);
        else if (count == 2) score_lanes<Vector, 2>(room, keys, j, known, P, coming);
        else score_lanes<Vector, AT_ONCE>(room, keys, j, known, P, coming);
    }
    weigh<Vector>(t, from, room);
    for (i64 j = 0, count; j < t.lanes; j += count) {
        count = next_lanes(t.lanes - j);
        if (count == 1) sum_lanes<Vector, 1>(room, values, j, known, P);
        else if (count == 2) sum_lanes<Vector, 2>(room, values, j, known, P);
        else sum_lanes<Vector, AT_ONCE>(room, values, j, known, P);
    }
}

template <class Vector, class SomeKeys, class SomeValues>
INLINE void attend_keys(const Tile& t, i64 from, i64 known, i64 P, Room& room, Coming& coming, const SomeKeys& keys, const SomeValues& values) {
    if (t.lanes <= FEW_LANES && P == t.D) return attend_rows<Vector>(t, from, known, P, room, coming, keys, values);
    Wide<Vector> wide_keys = widened<Vector>(keys, known, t.D, P, room.keys);
    attend_rows<Vector>(t, from, known, P, room, coming, wide_keys, widened<Vector>(values, known, t.D, P, room.values));
}

template <class Vector>
INLINE void attend_tile(const Tile& t, const Tile* later, const Cache& cache, i64 K) {
    Room room;
    const i64 UNIT = SOME * sizeof(Vector) / 4, P = ceiling(t.D, UNIT) * UNIT;
    memset(room.sums, 0, t.lanes * P * 4);
    if (P != t.D) memset(room.keys, 0, KEYS * P * 4), memset(room.values, 0, KEYS * P * 4);  // what fills up a row stays zero
    memset(room.scores, 0, sizeof room.scores), memset(room.totals, 0, sizeof room.totals);
    for (i64 j = 0; j < t.lanes; j++) {
        for (i64 i = 0; i < P; i += LANES) store(room.q + j * P + i, i < t.D ? get(query(t, j) + i, t.D - i) : floats{});
        room.totals[j * LANES] = first_sum(t);
    }
    store(room.highest, first_scores(t));
    for (i64 from = t.begin; from < t.end; from += KEYS) {
        i64 known = std::min<i64>(KEYS, t.end - from);
        Coming coming = coming_after(t, later, cache, K, from);
        if (cache.in_8_bits) {
            CodedPast past = coded_past_of(t, cache, K, from);
            Coded<Vector> keys = coded<Vector>(past.keys, t.D, room.scales[0]), values = coded<Vector>(past.values, t.D, room.scales[1]);
            attend_keys<Vector>(t, from, known, P, room, coming, keys, values);
        } else {
            Past past = past_of(t, cache, K, from);
            attend_keys<Vector>(t, from, known, P, room, coming, Keys<Vector>{past.keys, t.D}, Values<Vector>{past.values, t.D});
        }
    }
    for (i64 j = 0; j < t.lanes; j++) {
        float total = sum_of(load<floats>(room.totals + j * LANES));
        for (i64 i = 0; i < t.D; i += LANES) put(output(t, j) + i, load<floats>(room.sums + j * P + i) / total, t.D - i);
    }
}
