// Products with AMX, in tiles of 16 x 16 results: one row of tiles by up to four panels, or two by two.
#pragma once
#include "matrix.h"

struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// GCC 12 does not know that tiles are loaded from memory: what was written before must be there.
INLINE void written() { __asm__ volatile("" : : : "memory"); }

OF(AMX) static void shape_tiles(const TileShapes& shapes) {
    __asm__ volatile("" : : "r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
}

OF(AMX) static void whole_tiles() {
    TileShapes shapes;
    for (int tile = 0; tile < 8; tile++) shapes.rows[tile] = 16, shapes.row_bytes[tile] = 64;
    shape_tiles(shapes);
}

static const i64 TILE = 32 / 2 * PANEL;  // pairs of columns in a tile of weights
static const i64 PITCH = 4 * PANEL;      // columns of a block of results

OF(AMX) INLINE void one_by_four(const bf16* x, i64 stride, const Matrix& m, i64 panel, float* block) {
    const uint32_t *a = panel_of(m, panel), *b = panel_of(m, panel + 1), *c = panel_of(m, panel + 2), *d = panel_of(m, panel + 3);
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (i64 k = 0; k < m.K; k += 32, a += TILE, b += TILE, c += TILE, d += TILE) {
        _tile_loadd(4, x + k, stride * 2);
        _tile_loadd(5, a, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, b, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, c, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, d, 64);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, block, PITCH * 4); _tile_stored(1, block + 16, PITCH * 4);
    _tile_stored(2, block + 32, PITCH * 4); _tile_stored(3, block + 48, PITCH * 4);
}

OF(AMX) INLINE void one_by_two(const bf16* x, i64 stride, const Matrix& m, i64 panel, float* block) {
    const uint32_t *a = panel_of(m, panel), *b = panel_of(m, panel + 1);
    _tile_zero(0); _tile_zero(1);
    for (i64 k = 0; k < m.K; k += 32, a += TILE, b += TILE) {
        _tile_loadd(4, x + k, stride * 2);
        _tile_loadd(5, a, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, b, 64);
        _tile_dpbf16ps(1, 4, 6);
    }
    _tile_stored(0, block, PITCH * 4); _tile_stored(1, block + 16, PITCH * 4);
}

OF(AMX) INLINE void one_by_one(const bf16* x, i64 stride, const Matrix& m, i64 panel, float* block) {
    const uint32_t* a = panel_of(m, panel);
    _tile_zero(0);
    for (i64 k = 0; k < m.K; k += 32, a += TILE) {
        _tile_loadd(4, x + k, stride * 2);
        _tile_loadd(5, a, 64);
        _tile_dpbf16ps(0, 4, 5);
    }
    _tile_stored(0, block, PITCH * 4);
}

struct Rest {  // results of two panels that wait to be kept: while the matrix units work on the next, the vector units are idle
    float* block;
    i64 first, rows, panel, kept;
};

template <int KIND>
OF(AMX) INLINE void keep_some(const Product& p, Rest& rest, i64 rows) {
    rows = std::min(rows, rest.rows - rest.kept);
    if (p.more) p.more->raise(*p.more, rest.block + rest.kept * PAIR, PAIR, rest.first + rest.kept, rows, rest.panel, 2);
    Keep<floats>::rows<KIND>(p, rest.block + rest.kept * PAIR, PAIR, rest.first + rest.kept, rows, rest.panel, 2);
    rest.kept += rows;
}

// Asks for some lines of a tile of weights; a core that sees them go by asks for the others.
OF(AMX) INLINE void hint(const uint32_t* tile) {
    for (i64 i = 0; i < TILE; i += TILE / 4) _mm_prefetch(tile + i, _MM_HINT_T1);
}

// Two rows of tiles by two panels, into a block [32][PAIR]. `more`: the next two panels follow, from memory.
template <int KIND>
OF(AMX) INLINE void two_by_two(const Product& p, const bf16* x, i64 panel, float* block, Rest& rest, bool more) {
    const Matrix& m = *p.matrix;
    const uint32_t *a = panel_of(m, panel), *b = panel_of(m, panel + 1), *next = panel_of(m, panel + 2);
    i64 stride = p.stride, rows = ceiling(32 * 32, m.K);
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (i64 k = 0; k < m.K; k += 32, a += TILE, b += TILE) {
        _tile_loadd(4, x + k, stride * 2);
        _tile_loadd(6, a, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (more) hint(next + k * PANEL / 2), hint(next + (m.K + k) * PANEL / 2);
        _tile_loadd(5, x + 16 * stride + k, stride * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        keep_some<KIND>(p, rest, rows);
    }
    _tile_stored(0, block, PAIR * 4); _tile_stored(1, block + 16, PAIR * 4);
    _tile_stored(2, block + 16 * PAIR, PAIR * 4); _tile_stored(3, block + 16 * PAIR + 16, PAIR * 4);
}

// A row of tiles: few tokens.
OF(AMX) INLINE void multiply_few(const Product& p, const Item& item) {
    alignas(64) float block[16 * PITCH];
    const bf16* x = p.x + item.first * p.stride;
    for (i64 n = 0, step; n < item.panels; n += step) {
        step = item.panels - n >= 4 ? 4 : item.panels == 1 ? 1 : 2;
        if (step == 4)
            one_by_four(x, p.stride, *p.matrix, item.panel + n, block);
        else if (step == 1)
            one_by_one(x, p.stride, *p.matrix, item.panel + n, block);
        else
            one_by_two(x, p.stride, *p.matrix, item.panel + n, block);
        keep<floats>(p, block, PITCH, item.first, item.end - item.first, item.panel + n, step);
    }
}

template <int KIND>
OF(AMX) INLINE void multiply_many(const Product& p, const Item& item) {
    alignas(64) float blocks[2][32 * PAIR];
    Rest rest = {};
    i64 turn = 0;
    for (i64 t = item.first; t < item.end; t += 32)
        for (i64 n = 0; n < item.panels; n += 2) {
            float* block = blocks[turn++ % 2];
            two_by_two<KIND>(p, p.x + t * p.stride, item.panel + n, block, rest, t == item.first && n + 2 < item.panels);
            rest = {block, t, std::min<i64>(32, item.end - t), item.panel + n, 0};
        }
    keep_some<KIND>(p, rest, rest.rows);
}

OF(AMX) static void multiply_tiles(const Product& p, i64 number) {
    Item item = item_of(p, number);
    whole_tiles();
    written();
    if (item.end - item.first <= 16) return multiply_few(p, item);
    OF_KIND(p.kind, multiply_many, p, item)
}
