// Products of whole numbers with AMX: of up to 16 rows of x by a panel, a group at a time. A tile of results holds the exact products of one group,
// for its scales come next: half of the depth that a tile could have, which costs nothing where adding takes longer than multiplying.
#pragma once
#include "quantised_vnni.h"
#include "tiles.h"

static const i64 ROWS_OF_VECTORS = 8;       // of x: as few are multiplied without tiles
static const i64 RUN = 4;                   // groups that are multiplied before their scales come
static thread_local int rows_of_tiles = 0;  // of x, in the shapes that the tiles have; 0: others than those of whole numbers

// Tiles 0 to 3 hold results [rows][16], 4 and 5 a group of x [rows][32], 6 and 7 a group of a panel: [8][16][4], as codes of 8 bits lie.
OF(AMX) INLINE void shape_for(int rows) {
    if (rows_of_tiles == rows) return;
    TileShapes shapes;
    for (int tile = 0; tile < 8; tile++) {
        shapes.rows[tile] = tile < 6 ? (uint8_t)rows : GROUP / 4;
        shapes.row_bytes[tile] = tile == 4 || tile == 5 ? GROUP : 4 * PANEL;
    }
    shape_tiles(shapes);
    rows_of_tiles = rows;
}

// Groups of a turn on their way. What a vector or a tile has stored can be loaded by the other only once it is in the cache: the values of the next
// RUN groups are written, and then their products, before anybody waits for those of this one.
template <int HEIGHT>
struct Runs {
    alignas(64) char values[2][RUN][GROUP * PANEL];
    alignas(64) ints products[2][RUN][HEIGHT];
};

// Writes the values of a RUN of groups from `first` on, or of as many as there are, as codes of 8 bits lie.
OF(AMX) INLINE void write_values(const Turn& turn, i64 first, char (&values)[RUN][GROUP * PANEL]) {
    for (i64 i = 0; i < RUN && first + i < turn.groups; i++)
        for (i64 line = 0; line < GROUP / 8; line++)
            for (int half = 0; half < 2; half++)
                store(values[i] + (2 * line + half) * 4 * PANEL, values_at<floats, 4>(turn, (first + i) * GROUP / 8 + line, 0, half));
}

// The products of a RUN of groups. `values`: of codes of 8 bits, or written before.
template <int HEIGHT>
OF(AMX) INLINE void multiply_run(const Turn& turn, i64 first, i64 t, const char* values, ints (&products)[RUN][HEIGHT]) {
    const int8_t* x = turn.x.bytes + (first * turn.x.rows + t) * GROUP;
    i64 count = turn.groups - first;
    written();
#define MULTIPLY(I, X, W)                                               \
    if (I < count) {                                                    \
        _tile_zero(I);                                                  \
        _tile_loadd(X, x + I * turn.x.rows * GROUP, GROUP);             \
        _tile_loadd(W, values + I * GROUP * PANEL, 4 * PANEL);          \
        _tile_dpbssd(I, X, W);                                          \
        _tile_stored(I, products[I], 4 * PANEL);                        \
    }
    MULTIPLY(0, 4, 6)
    MULTIPLY(1, 5, 7)
    MULTIPLY(2, 4, 6)
    MULTIPLY(3, 5, 7)
#undef MULTIPLY
}

// What becomes of COUNT groups' products: as `add_group`, with a row's results in a register meanwhile.
template <int COUNT, bool MINIMA, int HEIGHT>
OF(AMX) INLINE void add_groups(const Turn& turn, i64 group, const ints (*products)[HEIGHT], i64 t, float* results) {
    const i64 place = group * turn.x.rows + t;
    floats steps[COUNT], least[COUNT] = {};
    for (int i = 0; i < COUNT; i++) steps[i] = halves_at<floats>(turn.scales + (group + i) * PANEL);
    for (int i = 0; MINIMA && i < COUNT; i++) least[i] = halves_at<floats>(turn.minima + (group + i) * PANEL);
#pragma GCC unroll 4
    for (int r = 0; r < HEIGHT; r++) {
        for (int i = 0; i < COUNT; i++)  // not all at once: rows of x would wait for them
            if (r == i * HEIGHT / COUNT) ask_for_next<1>(turn, group + i);
        floats sum = load<floats>(results + r * PAIR);
        for (int i = 0; i < COUNT; i++) {
            i64 at = place + i * turn.x.rows + r;
            sum = add_product(sum, __builtin_convertvector(products[i][r], floats), steps[i] * turn.x.scales[at]);
            if (MINIMA) sum = add_product(sum, least[i], turn.x.scales[at] * (float)turn.x.sums[at] - floats{});
        }
        store(results + r * PAIR, sum);
    }
}

template <int HEIGHT, int BITS>
OF(AMX) static void whole_amx(const Turn turn, i64 t, float* results) {
    Runs<HEIGHT> runs;
    auto add = [&](auto count, i64 group, const ints (*some)[HEIGHT]) OF(AMX) {
        turn.minima ? add_groups<count, true>(turn, group, some, t, results) : add_groups<count, false>(turn, group, some, t, results);
    };
    auto multiply = [&](i64 first, int now) OF(AMX) {
        const char* values = BITS == 4 ? runs.values[now][0] : (BITS == 8 ? (const char*)turn.codes : (const char*)whole.values) + first * GROUP * PANEL;
        multiply_run<HEIGHT>(turn, first, t, values, runs.products[now]);
        if (BITS == 4) write_values(turn, first + RUN, runs.values[1 - now]);
    };
    shape_for(HEIGHT);
    if (BITS == 4) write_values(turn, 0, runs.values[0]);
    multiply(0, 0);
    for (i64 first = 0, now = 0; first < turn.groups; first += RUN, now = 1 - now) {
        if (first + RUN < turn.groups) multiply(first + RUN, 1 - now);
        if (first + RUN <= turn.groups) add(std::integral_constant<int, RUN>(), first, runs.products[now]);
        else for (i64 i = 0; first + i < turn.groups; i++) add(std::integral_constant<int, 1>(), first + i, runs.products[now] + i);
    }
}

#define UP_TO_16(OF, BITS)                                                                                                                \
    {OF<1, BITS>, OF<2, BITS>,  OF<3, BITS>,  OF<4, BITS>,  OF<5, BITS>,  OF<6, BITS>,  OF<7, BITS>,  OF<8, BITS>,                       \
     OF<9, BITS>, OF<10, BITS>, OF<11, BITS>, OF<12, BITS>, OF<13, BITS>, OF<14, BITS>, OF<15, BITS>, OF<16, BITS>}
OF(AMX) static void spread_amx(const Turn& turn) { spread_bytes<floats, 1, false>(turn); }
static MultiplyWhole *const amx_OF_8[] = UP_TO_16(whole_amx, 8), *const amx_OF_4[] = UP_TO_16(whole_amx, 4), *const amx_WIDE[] = UP_TO_16(whole_amx, 16);
static const WholeBlocks amx_EIGHT = {16, amx_OF_8, nullptr, nullptr}, amx_FOUR = {16, amx_OF_4, amx_WIDE, spread_amx};

OF(AMX) static void multiply_whole_amx(const Product& p, i64 number) {
    Item item = item_of(p, number);
    if (item.end - item.first <= ROWS_OF_VECTORS) return multiply_whole_vnni512(p, number);
    rows_of_tiles = 0;
    whole_blocks<floats, true>(p, number, p.matrix->bits == 8 ? amx_EIGHT : amx_FOUR);
}
