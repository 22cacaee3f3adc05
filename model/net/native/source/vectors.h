// Products with the vectors of a target: blocks of rows of x by panels, whose sums stay in registers.
//
// A block's sums go through `depth` columns, then rest in memory while other blocks use the same weights: those come from the first
// level of the cache for all blocks but the first. The order of each sum stays the same.
#pragma once
#include "matrix.h"

static const i64 NEAR_ROWS = 96;  // of x, whose columns of a turn stay in the second level of the cache
static const i64 DEPTH = 384;     // columns of a turn, at most
static const i64 AHEAD = 4096;    // bytes of weights that are asked for before one row of x multiplies them

struct Near {
    alignas(64) float x[NEAR_ROWS * DEPTH];
    alignas(64) float sums[NEAR_ROWS * MAX_PANELS * PANEL];
};
static thread_local Near near;

// A block of rows of x, DEPTH apart, by one panel or by two, which are `between` apart: adds to `sums`.
typedef void MultiplyBlock(const float* x, const uint32_t* weights, i64 between, i64 columns, float* sums, i64 pitch);

struct Blocks {
    i64 height, few;            // most rows of a block; most rows that are multiplied by two panels at once
    MultiplyBlock* const* one;  // by rows, from 1 on
    MultiplyBlock* const* two;
};

template <class Vector, int HEIGHT, int PANELS>
INLINE void multiply_block(const float* x, const uint32_t* weights, i64 between, i64 columns, float* sums, i64 pitch) {
    const int WIDTH = sizeof(Vector) / 4, SIDE = PANEL / WIDTH, VECTORS = PANELS * SIDE;
    Vector total[HEIGHT][VECTORS];
    for (int t = 0; t < HEIGHT; t++)
        for (int v = 0; v < VECTORS; v++) total[t][v] = load<Vector>(sums + t * pitch + v * WIDTH);
    for (i64 k = 0; k < columns; k += 2, weights += PANEL) {
        Vector first[VECTORS], second[VECTORS];
        for (int n = 0; HEIGHT == 1 && n < PANELS; n++) __builtin_prefetch((const char*)(weights + n * between) + AHEAD, 0, 3);
        for (int v = 0; v < VECTORS; v++) first[v] = first_of(load<Vector>(weights + v / SIDE * between + v % SIDE * WIDTH));
        for (int t = 0; t < HEIGHT; t++)
            for (int v = 0; v < VECTORS; v++) total[t][v] = add_product(total[t][v], first[v], x[t * DEPTH + k] - Vector{});
        __asm__("" : "+r"(weights), "+r"(x));  // read again: no register is left to keep them in
        for (int v = 0; v < VECTORS; v++) second[v] = second_of(load<Vector>(weights + v / SIDE * between + v % SIDE * WIDTH));
        for (int t = 0; t < HEIGHT; t++)
            for (int v = 0; v < VECTORS; v++) total[t][v] = add_product(total[t][v], second[v], x[t * DEPTH + k + 1] - Vector{});
    }
    for (int t = 0; t < HEIGHT; t++)
        for (int v = 0; v < VECTORS; v++) store(sums + t * pitch + v * WIDTH, total[t][v]);
}

template <int HEIGHT, int PANELS>
static void block_portable(const float* x, const uint32_t* weights, i64 between, i64 columns, float* sums, i64 pitch) {
    multiply_block<fours, HEIGHT, PANELS>(x, weights, between, columns, sums, pitch);
}

#define TO_6(OF, PANELS) OF<1, PANELS>, OF<2, PANELS>, OF<3, PANELS>, OF<4, PANELS>, OF<5, PANELS>, OF<6, PANELS>
#define TO_12(OF, PANELS) TO_6(OF, PANELS), OF<7, PANELS>, OF<8, PANELS>, OF<9, PANELS>, OF<10, PANELS>, OF<11, PANELS>, OF<12, PANELS>
static MultiplyBlock* const PORTABLE_ONE[] = {block_portable<1, 1>, block_portable<2, 1>};
static const Blocks BLOCKS_PORTABLE = {2, 0, PORTABLE_ONE, nullptr};

// Asks for part `part` of `parts` of the weights that come next: they come from memory while others are multiplied.
INLINE void ask_for(const void* from, i64 bytes, i64 part, i64 parts) {
    for (i64 i = part * bytes / parts / 64; i < (part + 1) * bytes / parts / 64; i++) __builtin_prefetch((const char*)from + i * 64, 0, 2);
}

// Rows first .. first + rows - 1 of x by the panels of an item.
template <class Vector>
INLINE void multiply_rows(const Product& p, const Item& item, i64 first, i64 rows, const Blocks& with) {
    const Matrix& m = *p.matrix;
    i64 count = ceiling(rows, with.height), pitch = item.panels * PANEL, between = m.K / 2 * PANEL;
    i64 depth = ceiling(ceiling(m.K, ceiling(m.K, DEPTH)), PAD) * PAD, panels = rows <= with.few && item.panels > 1 ? 2 : 1;
    MultiplyBlock* const* multiply = panels == 2 ? with.two : with.one;
    memset(near.sums, 0, rows * pitch * 4);
    for (i64 k = 0; k < m.K; k += depth) {
        i64 columns = std::min(depth, m.K - k);
        for (i64 t = 0; t < rows; t++) {
            const bf16* x = p.x + (first + t) * p.stride + k;
            for (i64 i = 0; i < columns; i += (i64)sizeof(Vector) / 4) store(near.x + t * DEPTH + i, numbers<Vector>(x + i, columns - i));
        }
        for (i64 n = 0; n < item.panels; n += panels) {
            const uint32_t* weights = panel_of(m, item.panel + n) + k / 2 * PANEL;
            bool last = n + panels >= item.panels, over = last && k + depth >= m.K;
            const uint32_t* next = last ? panel_of(m, item.panel) + (k + depth) / 2 * PANEL : weights + panels * between;
            for (i64 block = 0; block < count; block++) {
                i64 t = block * rows / count, height = (block + 1) * rows / count - t;
                if (!over && count > 1) ask_for(next, columns * PANEL * 2, block, count);
                multiply[height - 1](near.x + t * DEPTH, weights, between, columns, near.sums + t * pitch + n * PANEL, pitch);
            }
        }
    }
    keep<Vector>(p, near.sums, pitch, first, rows, item.panel, item.panels);
}

template <class Vector>
INLINE void multiply_blocks(const Product& p, i64 number, const Blocks& with) {
    Item item = item_of(p, number);
    i64 count = ceiling(item.end - item.first, NEAR_ROWS), rows = ceiling(ceiling(item.end - item.first, count), with.height) * with.height;
    for (i64 first = item.first; first < item.end; first += rows)
        multiply_rows<Vector>(p, item, first, std::min(rows, item.end - first), with);
}

static void multiply_portable(const Product& p, i64 item) { multiply_blocks<fours>(p, item, BLOCKS_PORTABLE); }
