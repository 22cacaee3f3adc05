// Products of whole numbers with AMX: of up to 16 rows of x by a panel, a group at a time. A tile of results holds the exact products of one group,
// for its scales come next: half of the depth that a tile could have, which costs nothing where adding takes longer than multiplying.
#pragma once
#include "quantised_vnni.h"
#include "tiles.h"

static const i64 ROWS_OF_VECTORS = 4;           // of x: as few are multiplied without tiles
static thread_local int rows_of_tiles = 0;  // of x, in the shapes that the tiles have; 0: others than those of whole numbers

// Tile 0 holds results [rows][16], tile 1 a group of x [rows][32], tile 2 a group of a panel: [8][16][4], as codes of 8 bits lie.
OF(AMX) INLINE void shape_for(int rows) {
    if (rows_of_tiles == rows) return;
    TileShapes shapes;
    shapes.rows[0] = shapes.rows[1] = (uint8_t)rows, shapes.rows[2] = GROUP / 4;
    shapes.row_bytes[0] = shapes.row_bytes[2] = 4 * PANEL, shapes.row_bytes[1] = GROUP;
    shape_tiles(shapes);
    rows_of_tiles = rows;
}

// Where the values of a group lie as bytes. BITS 4: they are written to `room`; BITS 16: they were spread.
template <int BITS>
OF(AMX) INLINE const void* bytes_of(const Turn& turn, i64 group, char* room) {
    if (BITS == 16) return (const char*)whole.values + group * GROUP * PANEL;
    if (BITS == 8) return turn.codes + group * GROUP * PANEL;
    for (i64 line = 0; line < GROUP / 8; line++)
        for (int half = 0; half < 2; half++)
            store(room + (2 * line + half) * 4 * PANEL, values_at<floats, 4>(turn, group * GROUP / 8 + line, 0, half));
    return room;
}

// What becomes of a group's products, a few rows at a time: more would need more addresses than there are registers.
template <int HEIGHT>
OF(AMX) INLINE void add_rows(const Turn& turn, i64 group, ints (&products)[HEIGHT][1], i64 t, float* results, i64 pitch) {
    const int FEW = 4, LAST = HEIGHT % FEW;
#pragma GCC unroll 1
    for (int r = 0; r + FEW <= HEIGHT; r += FEW)
        add_group<floats, FEW, 1>(turn, group, (ints(&)[FEW][1])products[r], t + r, results + r * pitch, pitch);
    if constexpr (LAST > 0)
        add_group<floats, LAST, 1>(turn, group, (ints(&)[LAST][1])products[HEIGHT - LAST], t + HEIGHT - LAST, results + (HEIGHT - LAST) * pitch, pitch);
}

template <int HEIGHT, int BITS>
OF(AMX) static void whole_amx(const Turn turn, i64 t, float* results, i64 pitch) {
    alignas(64) ints products[HEIGHT][1];
    alignas(64) char room[GROUP * PANEL];
    shape_for(HEIGHT);
    for (i64 group = 0; group < turn.groups; group++) {
        const void* w = bytes_of<BITS>(turn, group, room);
        ask_for_next<1>(turn, group);
        written();
        _tile_zero(0);
        _tile_loadd(1, turn.x.bytes + (group * turn.x.rows + t) * GROUP, GROUP);
        _tile_loadd(2, w, 4 * PANEL);
        _tile_dpbssd(0, 1, 2);
        _tile_stored(0, products, 4 * PANEL);
        add_rows<HEIGHT>(turn, group, products, t, results, pitch);
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
