// Attention with the vectors of a target: a vector holds keys in the scores, which needs keys column by column, turned once a step for all
// lanes; in the sums it holds columns of a head. Numbers are float32.
//
// A score is one sum over the columns from the first to the last: its bits depend on nobody else. A code times its scale is exact in
// float32, so where that is done does not matter.
#pragma once
#include "attention.h"

static const int SOME = 4;  // vectors of columns at a time

// Lanes whose scores, and whose sums, stay in registers.
template <class Vector>
struct Most {
    static const int SCORED = sizeof(Vector) == OF_32_REGISTERS ? 8 : 6, SUMMED = sizeof(Vector) == OF_32_REGISTERS ? 6 : 3;
};

// Rows become columns: neighbours, pairs, then halves change places.
INLINE void turn(fours* x) {
    typedef Lanes<4>::ints at;
    fours a[4];
    for (int i = 0; i < 4; i += 2) {
        a[i] = __builtin_shuffle(x[i], x[i + 1], at{0, 4, 1, 5});
        a[i + 1] = __builtin_shuffle(x[i], x[i + 1], at{2, 6, 3, 7});
    }
    for (int i = 0; i < 2; i++) {
        x[2 * i] = __builtin_shuffle(a[i], a[i + 2], at{0, 1, 4, 5});
        x[2 * i + 1] = __builtin_shuffle(a[i], a[i + 2], at{2, 3, 6, 7});
    }
}
INLINE void turn(eights* x) {
    typedef Lanes<8>::ints at;
    eights a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = __builtin_shuffle(x[i], x[i + 1], at{0, 8, 1, 9, 4, 12, 5, 13});
        a[i + 1] = __builtin_shuffle(x[i], x[i + 1], at{2, 10, 3, 11, 6, 14, 7, 15});
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = __builtin_shuffle(a[i + j], a[i + j + 2], at{0, 1, 8, 9, 4, 5, 12, 13});
            b[i + 2 * j + 1] = __builtin_shuffle(a[i + j], a[i + j + 2], at{2, 3, 10, 11, 6, 7, 14, 15});
        }
    for (int i = 0; i < 4; i++) {
        x[i] = __builtin_shuffle(b[i], b[i + 4], at{0, 1, 2, 3, 8, 9, 10, 11});
        x[i + 4] = __builtin_shuffle(b[i], b[i + 4], at{4, 5, 6, 7, 12, 13, 14, 15});
    }
}
INLINE void turn(floats* x) {
    floats a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = __builtin_shuffle(x[i], x[i + 1], ints{0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29});
        a[i + 1] = __builtin_shuffle(x[i], x[i + 1], ints{2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31});
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = __builtin_shuffle(a[i + j], a[i + j + 2], ints{0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29});
            b[i + 2 * j + 1] = __builtin_shuffle(a[i + j], a[i + j + 2], ints{2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31});
        }
    const ints even = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}, odd = even + 4;
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 16; j += 8) {
            a[i + j] = __builtin_shuffle(b[i + j], b[i + j + 4], even);
            a[i + j + 4] = __builtin_shuffle(b[i + j], b[i + j + 4], odd);
        }
    for (int i = 0; i < 8; i++) {
        x[i] = __builtin_shuffle(a[i], a[i + 8], even);
        x[i + 8] = __builtin_shuffle(a[i], a[i + 8], odd);
    }
}

INLINE float highest_of(fours x) {
    typedef Lanes<4>::ints at;
    x = larger(x, __builtin_shuffle(x, at{2, 3, 0, 1}));
    return larger(x, __builtin_shuffle(x, at{1, 0, 3, 2}))[0];
}
INLINE float highest_of(eights x) {
    typedef Lanes<8>::ints at;
    x = larger(x, __builtin_shuffle(x, at{4, 5, 6, 7, 0, 1, 2, 3}));
    x = larger(x, __builtin_shuffle(x, at{2, 3, 0, 1, 6, 7, 4, 5}));
    return larger(x, __builtin_shuffle(x, at{1, 0, 3, 2, 5, 4, 7, 6}))[0];
}
INLINE float highest_of(floats x) {
    x = larger(x, __builtin_shuffle(x, ints{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
    x = larger(x, __builtin_shuffle(x, ints{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
    x = larger(x, __builtin_shuffle(x, ints{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
    return larger(x, __builtin_shuffle(x, ints{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}))[0];
}

struct Room {  // of a tile; rows of a head's columns are P apart
    alignas(64) float q[MAX_ROWS * MAX_HEAD], sums[MAX_ROWS * MAX_HEAD];
    alignas(64) float keys[MAX_HEAD * KEYS], values[KEYS * MAX_HEAD];  // keys column by column
    alignas(64) float scales[2][KEYS * MAX_HEAD / GROUP];              // of keys and values in 8 bits
    alignas(64) float scores[MAX_ROWS * KEYS], highest[MAX_ROWS], factor[MAX_ROWS];
    alignas(64) float totals[MAX_ROWS * LANES];  // of the weights, by their keys' places in a vector
};

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
    static const i64 COLUMNS = 2;  // in a number of 32 bits
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
    static const i64 COLUMNS = 1;
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
    template <int LEVEL>  // 3: of the first level of the cache on, 2: of the second
    EACH void ask(i64 steps) {
        for (i64 end = std::min(at + ceiling(bytes, steps), bytes); at < end; at += 64)
            __builtin_prefetch(keys + at, 0, LEVEL), __builtin_prefetch(values + at, 0, LEVEL);
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

// A row of some keys, from a column on, as what takes turns with other rows: pairs of columns, or columns.
template <class Vector>
INLINE Vector row_of(const Keys<Vector>& keys, i64 n, i64 i) {
    return load<Vector>(keys.rows + n * keys.D + i);
}
template <class Vector>
INLINE Vector row_of(const Coded<Vector>& keys, i64 n, i64 i) {
    return keys.at(n, i / GROUP * GROUP, i % GROUP);
}
template <class Vector>
INLINE void keep_column(const Keys<Vector>&, Vector x, float* to) {
    store(to, first_of(x)), store(to + KEYS, second_of(x));
}
template <class Vector>
INLINE void keep_column(const Coded<Vector>&, Vector x, float* to) {
    store(to, x);
}

// All keys column by column, as float32.
template <class Vector, class Rows>
INLINE void turn_keys(const Rows& keys, i64 D, float* to, Coming& coming) {
    const i64 WIDTH = sizeof(Vector) / 4, EACH_ROW = Rows::COLUMNS, steps = KEYS / WIDTH * std::max<i64>(1, D / (WIDTH * EACH_ROW));
    for (i64 n = 0; n < KEYS; n += WIDTH) {
        i64 i = 0;
        for (; i + WIDTH * EACH_ROW <= D; i += WIDTH * EACH_ROW) {
            Vector x[WIDTH];
            coming.ask<2>(steps);
            for (i64 j = 0; j < WIDTH; j++) x[j] = row_of(keys, n + j, i);
            turn(x);
            for (i64 j = 0; j < WIDTH; j++) keep_column(keys, x[j], to + (i + j * EACH_ROW) * KEYS + n);
        }
        for (; i < D; i++)
            for (i64 j = n; j < n + WIDTH; j++) to[i * KEYS + j] = keys.one(j, i);
    }
}

// Products of COUNT lanes' queries, from `lane` on, with the keys, VECTORS vectors of them at a time.
template <class Vector, int COUNT, int VECTORS>
INLINE void score_lanes(Room& room, i64 lane, i64 D, i64 P) {
    const i64 WIDTH = sizeof(Vector) / 4;
    const float* q = room.q + lane * P;
    for (i64 n = 0; n < KEYS; n += VECTORS * WIDTH) {
        Vector sums[COUNT][VECTORS] = {};
        for (i64 i = 0; i < D; i++) {
            Vector keys[VECTORS];
            for (int v = 0; v < VECTORS; v++) keys[v] = load<Vector>(room.keys + i * KEYS + n + v * WIDTH);
            for (int j = 0; j < COUNT; j++)
                for (int v = 0; v < VECTORS; v++) sums[j][v] = add_product(sums[j][v], keys[v], q[j * P + i] - Vector{});
        }
        for (int j = 0; j < COUNT; j++)
            for (int v = 0; v < VECTORS; v++) store(room.scores + (lane + j) * KEYS + n + v * WIDTH, sums[j][v]);
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

// Scores become weights. WHOLE: each lane sees all of these keys.
template <class Vector, bool WHOLE>
INLINE void weigh(const Tile& t, i64 from, Room& room) {
    typedef typename Like<Vector>::ints Places;
    const int WIDTH = sizeof(Vector) / 4;
    float before[MAX_ROWS];
    memcpy(before, room.highest, sizeof before);
    for (i64 j = 0; j < t.lanes; j++) {
        Vector highest = all<Vector>(before[j]);
        Places places = load<Places>(&COUNT) + (int32_t)from;
        for (int n = 0; n < KEYS; n += WIDTH, places += WIDTH) {
            float* scores = room.scores + j * KEYS + n;
            Vector x = scaled(load<Vector>(scores), t.variant);
            if (!WHOLE) x = choose((t.from[j] <= places) & (places < t.to[j]), x, all<Vector>(-INFINITY));
            highest = larger(highest, x);
            store(scores, x);
        }
        room.highest[j] = highest_of(highest);
    }
    for (i64 j = 0; j < t.lanes; j += WIDTH)
        store(room.factor + j, exponential(load<Vector>(before + j) - load<Vector>(room.highest + j)));
    for (i64 j = 0; j < t.lanes; j++) {
        Vector total = load<Vector>(room.totals + j * LANES) * room.factor[j], highest = all<Vector>(room.highest[j]);
        for (int n = 0; n < KEYS; n += WIDTH) {
            Vector x = load<Vector>(room.scores + j * KEYS + n), weights = WHOLE ? exponential(x - highest) : weight(x, highest);
            total += weights;
            store(room.scores + j * KEYS + n, weights);
        }
        store(room.totals + j * LANES, total);
    }
}

static const i64 FEW_LANES = 6;  // which read values as they lie in a cache

// The weighted values of all lanes.
template <class Vector, class Rows>
INLINE void sum_rows(const Tile& t, i64 known, i64 P, Room& room, const Rows& values) {
    const int MOST = Most<Vector>::SUMMED;
    for (i64 j = 0, left; (left = t.lanes - j) > 0; j += left) {
        if (left >= MOST) left = MOST, sum_lanes<Vector, MOST>(room, values, j, known, P);
        else if (left > 2) left = 3, sum_lanes<Vector, 3>(room, values, j, known, P);
        else if (left == 2) sum_lanes<Vector, 2>(room, values, j, known, P);
        else sum_lanes<Vector, 1>(room, values, j, known, P);
    }
}

// All lanes, with up to KEYS keys and their values.
template <class Vector, class SomeKeys, class SomeValues>
INLINE void attend_keys(const Tile& t, i64 from, i64 known, i64 P, Room& room, Coming& coming, const SomeKeys& keys, const SomeValues& values) {
    const int MOST = Most<Vector>::SCORED, WIDE = std::min<int>(KEYS / (sizeof(Vector) / 4), 4);
    turn_keys<Vector>(keys, t.D, room.keys, coming);
    for (i64 j = 0, left; (left = t.lanes - j) > 0; j += left) {  // of 3, and of 5 or more, some are computed for nothing
        if (left > 4) left = MOST, score_lanes<Vector, MOST, 2>(room, j, t.D, P);
        else if (left > 2) left = 4, score_lanes<Vector, 4, 2>(room, j, t.D, P);
        else if (left == 2) score_lanes<Vector, 2, WIDE>(room, j, t.D, P);
        else score_lanes<Vector, 1, WIDE>(room, j, t.D, P);
    }
    bool whole = t.from[t.lanes - 1] <= from && from + KEYS <= t.to[0];
    whole ? weigh<Vector, true>(t, from, room) : weigh<Vector, false>(t, from, room);
    if (t.lanes <= FEW_LANES && P == t.D) return sum_rows<Vector>(t, known, P, room, values);
    sum_rows<Vector>(t, known, P, room, widened<Vector>(values, known, t.D, P, room.values));
}

template <class Vector>
INLINE void attend_tile(const Tile& t, const Tile* later, const Cache& cache, i64 K) {
    Room room;
    const i64 UNIT = SOME * sizeof(Vector) / 4, P = ceiling(t.D, UNIT) * UNIT;
    memset(room.sums, 0, t.lanes * P * 4), memset(room.totals, 0, t.lanes * LANES * 4);
    if (P != t.D) memset(room.values, 0, KEYS * P * 4);  // what fills up a row stays zero
    for (i64 j = 0; j < ceiling(t.lanes, 8) * 8; j++) {
        const bf16* own = query(t, std::min(j, t.lanes - 1));  // of a row too many nobody reads what comes
        for (i64 i = 0; i < P; i += LANES) store(room.q + j * P + i, i < t.D ? get(own + i, t.D - i) : floats{});
    }
    std::fill_n(room.highest, MAX_ROWS, LOWEST);
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
    for (i64 j = 0; j < t.lanes; j++) keep_lane(t, j, room.highest[j], sum_of(load<floats>(room.totals + j * LANES)), room.sums + j * P);
}
