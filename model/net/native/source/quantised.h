// y = x Wᵀ + b with W in whole numbers of 8 or 4 bits. A group of 32 columns has a scale in each row of W, and one in each row of x.
//
// x becomes whole numbers too, from -127 to 127, whatever the number of rows. The product of a group is exact, whoever computes it. Only then
// come scales, in float32, group after group: a result has the same bits alone, in any batch, and on any number of threads.
//
// Shapes: x [T, K], W [N, K], G groups. Codes: [panels][G][lines][16][4]: with 8 bits a line has four columns of each row of a panel, with 4 bits
// eight, the first four in the low halves of its bytes. Four columns stand in the order 0, 2, 1, 3. Scales and minima: float16 [panels][G][16].
#pragma once
#include "vectors.h"

static const i64 NEAR = NEAR_ROWS * DEPTH;  // numbers of x that stay near

// What a thread multiplies: some groups of columns of some rows of x, where nobody has made them whole numbers before, and of a panel.
struct Whole {
    alignas(64) int16_t x[NEAR];
    alignas(64) int8_t bytes[NEAR];
    int32_t sums[NEAR / GROUP];
    float scales[NEAR / GROUP];
    alignas(64) int16_t values[DEPTH * PANEL];  // a panel's: [pairs of columns][16][2]; or as bytes, of up to two panels
    alignas(64) float results[NEAR_ROWS * MAX_PANELS * PANEL];  // [pairs of panels][rows][PAIR]
};
static thread_local Whole whole;

static const int COUNTED = 5;  // in place of bits: codes of 4 bits whose values are 8 less

struct Turn {  // of a panel, or of several: their groups that are multiplied now
    const uint8_t* codes;
    const uint16_t *scales, *minima;  // minima: null where all are zero
    i64 groups, between, lines;       // between: groups from a panel to the next; lines: of a group of a panel
    const int8_t* table;
    const uint8_t* next;  // codes that are asked for meanwhile, in `parts` of a group's; 0: none
    i64 part, parts;      // part: of this block's first group
    Rounded x;  // from its first group here, and from the first row of the item
};

// A block of rows of x, from row t on, by a panel: adds to `results`, of which a row has PAIR.
typedef void MultiplyWhole(Turn, i64 t, float* results);

// Asks for a group's share of the next codes of each of PANELS panels: all blocks together ask for as much as they multiply.
template <int PANELS>
INLINE void ask_for_next(const Turn& turn, i64 group) {
    i64 first = (turn.part + group) * turn.lines, end = turn.parts ? first + turn.lines : first;
    if (turn.parts > 1) first /= turn.parts, end /= turn.parts;
    for (int panel = 0; panel < PANELS; panel++)
        for (i64 line = first; line < end; line++) __builtin_prefetch(turn.next + (panel * turn.between * turn.lines + line) * PANEL * 4, 0, 2);
}

template <class Vector>
INLINE Vector halves_at(const uint16_t* from) {
    Vector numbers;
    widen_halves(from, numbers);
    return numbers;
}

// Of each four bytes the first and the third in 16 bits, which are columns side by side; and the others.
template <class Ints>
INLINE Ints evens(Ints bytes) {
    return (Ints)((typename Lanes<sizeof(Ints) / 2>::shorts)bytes << 8 >> 8);
}
template <class Ints>
INLINE Ints odds(Ints bytes) {
    return (Ints)((typename Lanes<sizeof(Ints) / 2>::shorts)bytes >> 8);
}

// --- x

// The largest magnitude in a group, or NaN where it holds one: as whole numbers those are the largest.
INLINE float largest_of(const bf16* x) {
    typedef Lanes<8>::shorts shorts;
    shorts most = {};
    for (int i = 0; i < GROUP; i += 8) {
        shorts size = load<shorts>(x + i) & 0x7fff;
        most = size > most ? size : most;
    }
    shorts half = __builtin_shuffle(most, (shorts){4, 5, 6, 7, 0, 1, 2, 3});
    most = most > half ? most : half;
    half = __builtin_shuffle(most, (shorts){2, 3, 0, 1, 6, 7, 4, 5});
    most = most > half ? most : half;
    return wide((bf16)std::max(most[0], most[1]));
}

// A group of a row of x becomes whole numbers, as group number `place`: bytes for those who read bytes, else numbers of 16 bits. The scale of one that
// holds NaN or infinity is not finite: neither will be what is made of it.
template <class Vector, bool BYTES>
INLINE void round_group(const bf16* x, const Rounded& rounded, i64 place) {
    typedef typename Like<Vector>::words words;
    const int COLUMNS = sizeof(Vector) / 2;  // of a vector of pairs
    const float shift = 12582912.0f;         // 1.5 * 2^23: adding it rounds to a whole number, whose 16 bits are then the lowest
    float most = largest_of(x), inverse = most < 1e-30f ? 0 : 127 / most;  // so that it is finite
    int16_t in_between[GROUP], *to = BYTES ? in_between : rounded.x + place * GROUP;
    words sums = {};
    for (int k = 0; k < GROUP; k += COLUMNS) {
        Vector pairs = load<Vector>(x + k);
        words first = (words)(first_of(pairs) * inverse + shift), second = (words)(second_of(pairs) * inverse + shift);
        sums += first + second;
        store(to + k, (first & 0xffff) | (second << 16));
    }
    uint32_t sum = 0;
    for (int i = 0; i < COLUMNS / 2; i++) sum += sums[i];
    rounded.sums[place] = (int32_t)(sum - GROUP * 0x4b400000u);
    rounded.scales[place] = most < 1e-30f ? 0 : most / 127;
    for (int k = 0; BYTES && k < GROUP; k += 16) {
        typedef Lanes<4>::ints ints;
        ints low = load<ints>(to + k), high = load<ints>(to + k + 8);
        ints evens = __builtin_shuffle(low, high, (ints){0, 2, 4, 6}), odds = __builtin_shuffle(low, high, (ints){1, 3, 5, 7});
        store(rounded.bytes + place * GROUP + k, (evens & 0x00ff00ff) | ((odds & 0x00ff00ff) << 8));
    }
}

// --- products

// What becomes of a group's exact products by HEIGHT rows of x: VECTORS of a panel, or of several.
template <class Vector, int HEIGHT, int VECTORS>
INLINE void add_group(const Turn turn, i64 group, typename Like<Vector>::ints (&products)[HEIGHT][VECTORS], i64 t, float* results) {
    const int WIDTH = sizeof(Vector) / 4, SIDE = PANEL / WIDTH;
    const i64 place = group * turn.x.rows + t;
    Vector steps[VECTORS], least[VECTORS];
    for (int v = 0; v < VECTORS; v++) steps[v] = halves_at<Vector>(turn.scales + (v / SIDE * turn.between + group) * PANEL + v % SIDE * WIDTH);
    for (int r = 0; r < HEIGHT; r++)
        for (int v = 0; v < VECTORS; v++) {
            float* to = results + r * PAIR + v * WIDTH;
            store(to, add_product(load<Vector>(to), __builtin_convertvector(products[r][v], Vector), steps[v] * turn.x.scales[place + r]));
        }
    if (turn.minima) {
        for (int v = 0; v < VECTORS; v++) least[v] = halves_at<Vector>(turn.minima + (v / SIDE * turn.between + group) * PANEL + v % SIDE * WIDTH);
        for (int r = 0; r < HEIGHT; r++)
            for (int v = 0; v < VECTORS; v++) {
                float *to = results + r * PAIR + v * WIDTH, sum = turn.x.scales[place + r] * (float)turn.x.sums[place + r];
                store(to, add_product(load<Vector>(to), least[v], sum - Vector{}));
            }
    }
    __asm__("" ::: "memory");  // no results in registers, which the next group's products need
}

// The values of line `line` of a panel, four columns of each row; `high`: of the second four.
template <class Vector, int BITS>
INLINE typename Like<Vector>::ints values_at(const Turn turn, i64 line, int v, bool high) {
    typedef typename Like<Vector>::words words;
    auto raw = load<typename Like<Vector>::ints>(turn.codes + line * PANEL * 4 + v * sizeof(Vector));
    if (BITS == 8) return raw;
    return look_up(turn.table, (typename Like<Vector>::ints)(((words)raw >> (high ? 4 : 0)) & 0x0f0f0f0f));
}

// The values of all groups of a turn, for blocks that follow.
template <class Vector, int BITS>
INLINE void spread(const Turn& turn) {
    const int WIDTH = sizeof(Vector) / 4, VECTORS = PANEL / WIDTH;
    const i64 lines = turn.groups * GROUP * BITS / 32;
    int16_t* to = whole.values;
    for (i64 line = 0; line < lines; line++)
        for (int half = 0; half < 8 / BITS; half++, to += 4 * PANEL)
            for (int v = 0; v < VECTORS; v++) {
                auto values = values_at<Vector, BITS>(turn, line, v, half);
                store(to + v * WIDTH * 2, evens(values)), store(to + (PANEL + v * WIDTH) * 2, odds(values));
            }
}

// BITS 16: of values that were spread.
template <class Vector, int HEIGHT, int BITS>
INLINE void multiply_whole(const Turn turn, i64 t, float* results) {
    typedef typename Like<Vector>::ints ints;
    const int WIDTH = sizeof(Vector) / 4, VECTORS = PANEL / WIDTH, LINES = GROUP * (BITS == 16 ? 8 : BITS) / 32;
    for (i64 group = 0; group < turn.groups; group++) {
        ints products[HEIGHT][VECTORS] = {}, w[VECTORS];
        const int16_t *x = turn.x.x + (group * turn.x.rows + t) * GROUP, *values = whole.values + group * GROUP * PANEL;
        ask_for_next<1>(turn, group);
        for (int line = 0; line < LINES; line++)
            for (int half = 0; half < (BITS == 4 ? 2 : 1); half++, x += 4, values += 4 * PANEL)
                for (int odd = 0; odd < 2; odd++) {
                    for (int v = 0; v < VECTORS; v++)
                        if (BITS == 16) {
                            w[v] = load<ints>(values + (odd * PANEL + v * WIDTH) * 2);
                        } else {
                            w[v] = values_at<Vector, BITS>(turn, group * LINES + line, v, half);
                            w[v] = odd ? odds(w[v]) : evens(w[v]);
                        }
                    for (int r = 0; r < HEIGHT; r++) add_pairs(products[r], w, x + r * GROUP + 2 * odd);
                }
        add_group<Vector, HEIGHT, VECTORS>(turn, group, products, t, results);
    }
}

// --- a target's blocks

struct WholeBlocks {
    i64 height;                  // most rows of a block
    MultiplyWhole* const* from;  // codes, by rows
    MultiplyWhole* const* wide;  // values that were spread, by rows; null: blocks read codes however many there are
    void (*spread)(const Turn&);
    i64 panels = 1;  // of a block
    i64 few = 1;     // blocks that read codes, where more read values that were spread
};

template <int HEIGHT, int BITS>
static void whole_portable(const Turn turn, i64 t, float* results) { multiply_whole<fours, HEIGHT, BITS>(turn, t, results); }
template <int BITS>
static void spread_portable(const Turn& turn) { spread<fours, BITS>(turn); }

#define UP_TO_2(OF, BITS) {OF<1, BITS>, OF<2, BITS>}
#define UP_TO_4(OF, BITS) {OF<1, BITS>, OF<2, BITS>, OF<3, BITS>, OF<4, BITS>}
#define UP_TO_8(OF, BITS) {OF<1, BITS>, OF<2, BITS>, OF<3, BITS>, OF<4, BITS>, OF<5, BITS>, OF<6, BITS>, OF<7, BITS>, OF<8, BITS>}
#define WHOLE_BLOCKS(NAME, TO, HEIGHT)                                                                                        \
    static MultiplyWhole* const NAME##_OF_8[] = TO(whole_##NAME, 8);                                                          \
    static MultiplyWhole* const NAME##_OF_4[] = TO(whole_##NAME, 4);                                                          \
    static MultiplyWhole* const NAME##_WIDE[] = TO(whole_##NAME, 16);                                                         \
    static const WholeBlocks NAME##_EIGHT = {HEIGHT, NAME##_OF_8, NAME##_WIDE, spread_##NAME<8>};                           \
    static const WholeBlocks NAME##_FOUR = {HEIGHT, NAME##_OF_4, NAME##_WIDE, spread_##NAME<4>};
WHOLE_BLOCKS(portable, UP_TO_2, 2)

// Rows first .. first + rows - 1 of x by the panels of an item.
template <class Vector, bool BYTES>
INLINE void whole_rows(const Product& p, const Item& item, i64 first, i64 rows, const WholeBlocks& with) {
    const Matrix& m = *p.matrix;
    i64 count = ceiling(rows, with.height), G = m.K / GROUP;
    bool many = count > with.few, spreads = with.wide && many;
    i64 most = many ? DEPTH : p.rounded ? m.K : NEAR / rows, groups = ceiling(G, ceiling(m.K, most));
    MultiplyWhole* const* multiply = spreads ? with.wide : with.from;
    memset(whole.results, 0, item.panels * PANEL * rows * 4);
    for (i64 g = 0; g < G; g += groups) {
        i64 now = std::min(groups, G - g);
        Rounded x = p.rounded ? p.rounded->from(g * p.rounded->rows + first) : Rounded{whole.x, whole.bytes, whole.sums, whole.scales, rows};
        for (i64 t = 0; !p.rounded && t < rows; t++)
            for (i64 group = 0; group < now; group++)
                round_group<Vector, BYTES>(p.x + (first + t) * p.stride + (g + group) * GROUP, x, group * rows + t);
        for (i64 n = 0; n < item.panels; n += with.panels) {
            const i64 at = (item.panel + n) * G + g, group_bytes = GROUP * PANEL * m.bits / 8;
            Turn turn = {m.codes + at * group_bytes, m.scales + at * PANEL, m.minima ? m.minima + at * PANEL : nullptr, now, G, GROUP * m.bits / 32, m.table, nullptr, 0, 0, x};
            if (spreads) with.spread(turn);
            float* results = whole.results + n / 2 * rows * PAIR + n % 2 * PANEL;
            bool last = n + with.panels == item.panels, over = last && g + groups >= G;
            const uint8_t* next = m.codes + (last ? item.panel * G + g + groups : at + with.panels * G) * group_bytes;
            for (i64 block = 0; block < count; block++) {
                i64 t = block * rows / count, height = (block + 1) * rows / count - t;
                turn.next = count == 1 ? turn.codes + AHEAD : next, turn.part = block * now, turn.parts = over && count > 1 ? 0 : count;
                multiply[height - 1](turn, t, results + t * PAIR);
            }
        }
    }
    for (i64 n = 0; n < item.panels; n += 2) {
        float* results = whole.results + n / 2 * rows * PAIR;
        for (i64 t = 0; t < rows; t++)
            for (i64 i = 0; i < PAIR; i += (i64)sizeof(Vector) / 4) {
                float* result = results + t * PAIR + i;
                store(result, load<Vector>(result) * load<Vector>(m.units.data() + (item.panel + n) * PANEL + i));
            }
        keep<Vector>(p, results, PAIR, first, rows, item.panel + n, 2);
    }
}

template <class Vector, bool BYTES>
INLINE void whole_blocks(const Product& p, i64 number, const WholeBlocks& with) {
    Item item = item_of(p, number);
    i64 count = ceiling(item.end - item.first, NEAR_ROWS), rows = ceiling(ceiling(item.end - item.first, count), with.height) * with.height;
    for (i64 first = item.first; first < item.end; first += rows)
        whole_rows<Vector, BYTES>(p, item, first, std::min(rows, item.end - first), with);
}

// A row of x becomes whole numbers, for all who multiply it.
template <class Vector>
INLINE void round_row(const Product& p, const Rounded& rounded, i64 t, bool bytes) {
    for (i64 g = 0; g < p.matrix->K / GROUP; g++) {
        const bf16* x = p.x + t * p.stride + g * GROUP;
        if (bytes) round_group<Vector, true>(x, rounded, g * rounded.rows + t);
        else round_group<Vector, false>(x, rounded, g * rounded.rows + t);
    }
}

static void round_portable(const Product& p, const Rounded& rounded, i64 t) { round_row<fours>(p, rounded, t, false); }

static void multiply_whole_portable(const Product& p, i64 item) {
    whole_blocks<fours, false>(p, item, p.matrix->bits == 8 ? portable_EIGHT : portable_FOUR);
}
