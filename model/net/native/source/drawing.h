// The best token of a row, or a draw: the best of (score - highest) / temperature plus Gumbel noise, as `sample` of sampling.py
// has it. The noise is a hash of the row's key and the token. And the log probabilities of a row.
//
// Limits keep the tokens up to a border, a distance below the best. It is found without sorting: the distances between which it lies are
// halved, by the number or the weight of the tokens up to the middle. Weights are whole numbers: their sums have no order.
// Only tokens near the best are looked at, where these are enough, as they mostly are.
#pragma once
#include <cfloat>

#include "numbers.h"

#define LAMBDA __attribute__((always_inline))

// What becomes of a row's scores before its token is drawn, in this order. Tables of V have a byte for each token.
struct Changes {
    const uint8_t* refused;  // 1: not among the tokens that are allowed; null: all are
    const i64* biased;
    const float* biases;  // added to the scores of these tokens
    i64 num_biased;
    const i64* seen;  // tokens of the prompt or the output, each once
    i64 num_seen;
    const i64* drawn;  // tokens of the output, each once
    const i64* counts;
    i64 num_drawn;
    const i64* banned;
    i64 num_banned;
    const uint8_t* allowed;  // 0: against the grammar; null: there is none
    float repetition, frequency, presence;
};

struct Draw {
    const Changes* changes;  // null: none
    uint64_t key;
    i64 top_k;          // 0: no limit
    float temperature;  // 0: the best token
    float top_p;        // 1: no limit
    float reach;        // how far below the best a score over the temperature may be, as min_p has it; infinite: no limit
};

template <class Vector>
INLINE Vector logarithm(Vector x) {  // of normal numbers above 0 (Cephes' logf); relative error below 1e-6
    typedef typename Like<Vector>::words words;
    typedef typename Like<Vector>::ints ints;
    words bits = (words)x;
    Vector exponent = __builtin_convertvector((ints)(bits >> 23) - 126, Vector);
    Vector m = (Vector)((bits & 0x7fffff) | 0x3f000000);  // 0.5 <= m < 1
    ints low = m < 0.707106781186547524f;
    exponent = choose(low, exponent - 1.0f, exponent);
    m = choose(low, m + m, m) - 1.0f;
    Vector square = m * m, p = m * 7.0376836292e-2f - 1.1514610310e-1f;
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

template <class Vector>
INLINE Vector noise(typename Like<Vector>::longs tokens, uint64_t key) {
    typedef typename Like<Vector>::longs longs;
    longs hash = key ^ (tokens * 0x9E3779B97F4A7C15u);
    hash = (hash ^ (hash >> 30)) * 0xBF58476D1CE4E5B9u;
    hash = (hash ^ (hash >> 27)) * 0x94D049BB133111EBu;
    hash = (hash ^ (hash >> 31)) >> 41;
    Vector uniform = (__builtin_convertvector(__builtin_convertvector(hash, typename Like<Vector>::ints), Vector) + 0.5f) * 0x1p-23f;
    return -logarithm(-logarithm(uniform));
}

template <class Vector, class Look>
INLINE void each(const float* scores, i64 V, Look look) {  // look(first token, scores), behind the last one -infinity
    const i64 WIDTH = sizeof(Vector) / 4, whole = V / WIDTH * WIDTH;
    for (i64 n = 0; n < whole; n += WIDTH) look(n, load<Vector>(scores + n));
    if (whole < V) {
        Vector rest = all<Vector>(-INFINITY);
        memcpy(&rest, scores + whole, (V - whole) * 4);
        look(whole, rest);
    }
}

// The token whose `value(scores, first token)` is largest, of equals the first; -1 where a value is NaN or the largest is not finite.
template <class Vector, class Value>
INLINE i64 largest(const float* scores, i64 V, Value value) {
    typedef typename Like<Vector>::ints ints;
    Vector highest = all<Vector>(-INFINITY);
    ints where = {}, strange = {};
    each<Vector>(scores, V, [&](i64 n, Vector score) LAMBDA {
        score = value(score, n);
        ints higher = score > highest;
        strange |= score != score;
        highest = choose(higher, score, highest);
        where = choose(higher, ints{} + (int32_t)n, where);
    });
    i64 token = where[0];
    float best = highest[0];
    for (size_t j = 0; j < sizeof(Vector) / 4; j++) {
        i64 other = where[j] + j;
        if (strange[j]) return -1;
        if (highest[j] > best || (highest[j] == best && other < token)) best = highest[j], token = other;
    }
    return best - best == 0.0f ? token : -1;
}

template <class Ints>
INLINE bool any(Ints where) {  // as a comparison sets it
    i64 parts[sizeof where / 8], found = 0;
    memcpy(parts, &where, sizeof where);
    for (i64 part : parts) found |= part;
    return found;
}

template <class Vector>
INLINE typename Like<Vector>::longs weight(Vector x) {  // 2^44 e^x for x <= 0, rounded: 0 below -32. 2^19 of them have a sum
    typedef typename Like<Vector>::longs longs;
    typedef typename Like<Vector>::doubles doubles;
    static const double TERMS[] = {1, 1, 1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320,
                                   1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600};
    const double shift = 0x1.8p52;  // adding it rounds to a whole number
    doubles y = __builtin_convertvector(larger(all<Vector>(-32.0f), x), doubles), shifted = y * 1.4426950408889634 + shift;
    doubles whole = shifted - shift, rest = y - whole * 0x1.62e42feep-1 - whole * 0x1.a39ef35793c76p-33;  // log(2) in two parts
    doubles p = rest * TERMS[12] + TERMS[11];
    for (int term = 10; term >= 0; term--) p = p * rest + TERMS[term];  // e^rest, where |rest| <= log(2) / 2
    doubles power = (doubles)((longs)p + ((longs)shifted << 52));
    return (longs)(power * 0x1p44 + 0x1p52) & 0xfffffffffffff;
}

template <class Vector>
INLINE typename Like<Vector>::ints distance(Vector scaled) {  // from 0 or less: these bits have the same order
    return (typename Like<Vector>::ints)magnitude(scaled);
}

// Scores become softcap * tanh(scores * scale / softcap), or scores * scale where softcap is 0. NaN stays NaN.
template <class Vector>
INLINE void cap_scores(float* scores, i64 V, float scale, float softcap) {
    each<Vector>(scores, V, [&](i64 n, Vector score) LAMBDA {
        score *= scale;
        if (softcap > 0) {
            Vector far = magnitude(score) * (2 / softcap), e = exponential(-far), small = far * 0.5f;
            // near 0 the quotient would lose digits: there tanh x is x - x^3 / 3 + 2 x^5 / 15 - 17 x^7 / 315
            Vector square = small * small, series = small * (1.0f - square * (0.33333333f - square * (0.13333333f - square * 0.053968254f)));
            Vector tanh = choose(far < 0.25f, series, (1.0f - e) / (1.0f + e));
            score = softcap * choose(score < 0.0f, -tanh, tanh);
        }
        if (n + (i64)sizeof(Vector) / 4 <= V) store(scores + n, score);
        else memcpy(scores + n, &score, (V - n) * 4);
    });
}

static const float LARGEST = 1e9f;  // a penalty makes no score larger

INLINE void change(const float* scores, i64 V, const Changes& changes, float* to) {
    const float nothing = -INFINITY;
    if (changes.refused)
        for (i64 n = 0; n < V; n++) to[n] = changes.refused[n] ? nothing : scores[n];
    else
        memcpy(to, scores, V * sizeof *to);
    for (i64 n = 0; n < changes.num_biased; n++) to[changes.biased[n]] += changes.biases[n];
    for (i64 n = 0; changes.repetition != 1.0f && n < changes.num_seen; n++) {
        float& score = to[changes.seen[n]];
        if (score - score == 0.0f) {
            score = score > 0.0f ? score / changes.repetition : score * changes.repetition;
            score = std::min(std::max(score, -LARGEST), LARGEST);
        }
    }
    if (changes.frequency != 0.0f || changes.presence != 0.0f)
        for (i64 n = 0; n < changes.num_drawn; n++)
            to[changes.drawn[n]] -= rounded(changes.frequency * (float)changes.counts[n]) + changes.presence;
    for (i64 n = 0; n < changes.num_banned; n++)
        if (changes.banned[n] < V) to[changes.banned[n]] = nothing;
    if (changes.allowed)
        for (i64 n = 0; n < V; n++) to[n] = changes.allowed[n] ? to[n] : nothing;
}

static const float HOPELESS = 19.5f;  // further below the best no token is drawn: the noise of two differs by less

template <class Vector>
INLINE i64 best_token(const float* scores, i64 V) {
    return largest<Vector>(scores, V, [](Vector score, i64) LAMBDA { return score; });
}

static const float INFINITE_REACH = FLT_MAX;
static const float CANDIDATE_REACH = 12.0f;  // below the best: further tokens are looked at where those are not enough
static const int HALVINGS = 8;  // after so many few tokens are left in question

struct Candidates {  // tokens that limits may keep, in their order
    i64 count;
    int32_t farthest;    // distance
    int32_t* distances;  // below the best, see `distance`; none reaches INT32_MAX, which fills up the last vector
    uint64_t* weights;
    int32_t* tokens;
};

// Room for the draw of a row of V scores, in one thread: for each token, and a vector more.
struct DrawRoom {
    float* changed;
    Candidates found, left;  // `left` needs no tokens
    static size_t bytes(i64 V) { return ceiling((V + LANES) * 32, 64) * 64; }  // whole cache lines
    static DrawRoom at(void* memory, i64 V) {
        uint64_t* weights = (uint64_t*)memory;
        int32_t* numbers = (int32_t*)(weights + 2 * (V + LANES));
        auto part = [&](i64 n) { return numbers + n * (V + LANES); };
        return {(float*)part(0), {0, 0, part(1), weights, part(2)}, {0, 0, part(3), weights + V + LANES, nullptr}};
    }
};

INLINE void fill_up(Candidates& some) {
    for (i64 j = 0; j < LANES; j++) some.distances[some.count + j] = INT32_MAX, some.weights[some.count + j] = 0;
}

// Finds the tokens up to `reach` below the best, with their weights where these are asked for. Returns the weight of all tokens, or 0
// where that is not asked for.
template <class Vector, class Scale>
INLINE i64 find_candidates(const float* scores, i64 V, Scale scale, float reach, bool weighs, bool weighs_all, Candidates& found) {
    typedef typename Like<Vector>::ints ints;
    typedef typename Like<Vector>::longs longs;
    const i64 WIDTH = sizeof(Vector) / 4;
    longs sums = {}, weights = {};
    ints lanes;
    for (i64 j = 0; j < WIDTH; j++) lanes[j] = j;
    i64 count = 0;
    ints far = {};
    each<Vector>(scores, V, [&](i64 n, Vector score) LAMBDA {
        Vector scaled = scale(score);
        if (weighs_all) sums += weights = weight(scaled);
        ints near = scaled >= -reach, distances = distance(scaled), tokens = lanes + (int32_t)n;
        if (!any(near)) return;
        far = choose((distances > far) & near, distances, far);
        if (weighs && !weighs_all) weights = weight(scaled);
        if (!any(~near)) {
            store(found.distances + count, distances), store(found.weights + count, weights), store(found.tokens + count, tokens);
            count += WIDTH;
            return;
        }
        for (i64 j = 0; j < WIDTH; j++) {
            found.distances[count] = distances[j], found.weights[count] = weights[j], found.tokens[count] = tokens[j];
            count -= near[j];
        }
    });
    found.count = count, found.farthest = 0;
    fill_up(found);
    i64 total = 0;
    for (i64 j = 0; j < WIDTH; j++) total += sums[j], found.farthest = std::max(found.farthest, far[j]);
    return total;
}

// The weight of the candidates up to a distance, or their number.
template <class Vector, bool COUNTS>
INLINE i64 weight_within(const Candidates& some, int32_t within) {
    typedef typename Like<Vector>::ints ints;
    typedef typename Like<Vector>::longs longs;
    const i64 WIDTH = sizeof(Vector) / 4;
    longs sums = {};
    ints counts = {};
    for (i64 n = 0; n < some.count; n += WIDTH) {
        ints near = load<ints>(some.distances + n) <= within;
        if (COUNTS) counts -= near;
        else sums += load<longs>(some.weights + n) & __builtin_convertvector(near, longs);
    }
    i64 total = 0;
    for (i64 j = 0; j < WIDTH; j++) total += COUNTS ? counts[j] : (i64)sums[j];
    return total;
}

INLINE int32_t halfway(int32_t low, int32_t high) {  // between two distances as numbers
    float a, b;
    memcpy(&a, &low, 4), memcpy(&b, &high, 4);
    float middle = a + (b - a) / 2;
    memcpy(&low, &middle, 4);
    return low;
}

// Those further than `low`, up to `high`.
template <class Vector>
INLINE void keep_between(const Candidates& all, int32_t low, int32_t high, Candidates& left) {
    const i64 WIDTH = sizeof(Vector) / 4;
    left.count = 0;
    for (i64 n = 0; n < all.count; n += WIDTH) {
        auto distances = load<typename Like<Vector>::ints>(all.distances + n), between = (distances > low) & (distances <= high);
        for (i64 j = 0; any(between) && j < WIDTH; j++)
            if (between[j]) left.distances[left.count] = distances[j], left.weights[left.count++] = all.weights[n + j];
    }
    fill_up(left);
}

// The least distance up to which candidates weigh `share` together; those up to `high` do.
template <class Vector, bool COUNTS>
INLINE int32_t border(const Candidates& all, Candidates& left, int32_t high, i64 share) {
    const Candidates* some = &all;
    int32_t low = -1;  // up to it they weigh less: `nearer`
    i64 nearer = 0, before = 0;
    for (int turn = 1; high - low > 1; turn++) {
        int32_t middle = turn <= HALVINGS ? std::clamp(halfway(std::max(low, 0), high), low + 1, high - 1) : low + (high - low) / 2;
        i64 sum = before + weight_within<Vector, COUNTS>(*some, middle);
        if (sum < share) low = middle, nearer = sum;
        else high = middle;
        if (turn != HALVINGS) continue;
        before = nearer, some = &left;
        keep_between<Vector>(all, low, high, left);
    }
    return high;
}

// How far below the best the candidates are that a row's limits keep; -1 where other tokens may be kept too. `total` is the weight of
// all tokens, where their number has no limit.
template <class Vector>
INLINE int32_t kept_distance(const Draw& row, bool counts, float reach, i64 total, Candidates& found, Candidates& left) {
    int32_t within = found.farthest;
    if (counts && row.top_k < found.count) within = border<Vector, true>(found, left, within, row.top_k);
    else if (counts && row.top_k > found.count && reach < INFINITE_REACH) return -1;
    if (row.top_p < 1.0f) {
        i64 sum = weight_within<Vector, false>(found, within);
        if (counts) total = sum;
        i64 share = std::min(std::max((i64)std::ceil((double)total * row.top_p), (i64)1), total);
        if (sum < share) return -1;
        within = border<Vector, false>(found, left, within, share);
    }
    return std::min(within, distance(all<Vector>(std::min(row.reach, HOPELESS)))[0]);
}

template <class Vector, class Scale, class Tokens>
INLINE i64 draw_within(int32_t within, const float* scores, i64 V, uint64_t key, Scale scale, Tokens tokens) {
    return largest<Vector>(scores, V, [=](Vector score, i64 n) LAMBDA {
        Vector scaled = scale(score);
        auto kept = distance(scaled) <= within;
        return any(kept) ? choose(kept, scaled + noise<Vector>(tokens(n), key), all<Vector>(-INFINITY)) : all<Vector>(-INFINITY);
    });
}

template <class Vector>
INLINE i64 draw_among(const float* scores, i64 V, const Draw& row, DrawRoom& room) {
    typedef typename Like<Vector>::longs longs;
    i64 best = best_token<Vector>(scores, V);
    if (row.temperature <= 0.0f || best < 0) return best;
    float highest = scores[best];
    auto scale = [=](Vector score) LAMBDA { return (score - highest) / row.temperature; };
    bool counts = row.top_k > 0 && row.top_k < V, weighs = row.top_p < 1.0f;
    if (!counts && !weighs && row.reach >= CANDIDATE_REACH) {
        longs lanes;
        for (size_t j = 0; j < sizeof(Vector) / 4; j++) lanes[j] = j;
        int32_t within = distance(all<Vector>(std::min(row.reach, HOPELESS)))[0];
        return draw_within<Vector>(within, scores, V, row.key, scale, [=](i64 n) LAMBDA { return lanes + (uint64_t)n; });
    }
    Candidates& found = room.found;
    int32_t within = -1;
    for (float reach = CANDIDATE_REACH; within < 0; reach = INFINITE_REACH) {
        i64 total = find_candidates<Vector>(scores, V, scale, reach, weighs, weighs && !counts, found);
        within = kept_distance<Vector>(row, counts, reach, total, found, room.left);
    }
    i64 place = draw_within<Vector>(
        within, (const float*)found.distances, found.count, row.key, [](Vector far) LAMBDA { return -far; },
        [&](i64 n) LAMBDA { return __builtin_convertvector(load<typename Like<Vector>::ints>(found.tokens + n), longs); });
    return found.tokens[place];
}

static const i64 UNSCORED = -1, EXCLUDED = -2;  // the row's scores are not finite; they are, but its changes leave no token

template <class Vector>
INLINE i64 draw_token(const float* scores, i64 V, const Draw& row, DrawRoom& room) {
    if (!row.changes) return draw_among<Vector>(scores, V, row, room);
    change(scores, V, *row.changes, room.changed);
    i64 token = draw_among<Vector>(room.changed, V, row, room);
    return token == UNSCORED && best_token<Vector>(scores, V) != UNSCORED ? EXCLUDED : token;
}

// What is asked of a row's log probabilities.
struct Scored {
    i64 token;
    i64 top;  // so many of the likeliest tokens
    const i64* others;
    i64 num_others;
    float* values;  // is filled: of the token, the likeliest ones, the others
    i64* likeliest;  // is filled, the likeliest first, of equals the lower token
};

template <class Vector>
INLINE void score_row(const float* scores, i64 V, const Scored& row) {
    typedef typename Like<Vector>::longs longs;
    i64 best = best_token<Vector>(scores, V), kept = 0;
    if (best == UNSCORED) return;
    float highest = scores[best], least = -INFINITY;
    longs sums = {};
    each<Vector>(scores, V, [&](i64 first, Vector some) LAMBDA {
        sums += weight(some - highest);
        if (kept == row.top && !any(some > least)) return;
        for (i64 n = first; row.top && n < std::min(first + (i64)sizeof(Vector) / 4, V); n++) {
            if (kept == row.top && !(scores[n] > least)) continue;
            i64 at = kept < row.top ? kept++ : row.top - 1;
            for (; at && scores[row.likeliest[at - 1]] < scores[n]; at--) row.likeliest[at] = row.likeliest[at - 1];
            row.likeliest[at] = n;
            least = scores[row.likeliest[kept - 1]];
        }
    });
    i64 total = 0;
    for (size_t j = 0; j < sizeof(Vector) / 4; j++) total += sums[j];
    double normalizer = std::log((double)total * 0x1p-44);
    auto value = [&](i64 token) { return (float)((double)scores[token] - highest - normalizer); };
    row.values[0] = value(row.token);
    for (i64 n = 0; n < row.top; n++) row.values[1 + n] = value(row.likeliest[n]);
    for (i64 n = 0; n < row.num_others; n++) row.values[1 + row.top + n] = value(row.others[n]);
}
