// Products with NEON: with dot products of bytes (dotprod), and with matrix products of bytes and of bfloat16 (i8mm, bf16).
//
// A matrix instruction adds the products of two rows of x by two rows of W, over eight columns of bytes or four of bfloat16, to four sums. Those of
// bfloat16 are by definition two steps of the instruction for a vector and a pair (bfdot): so one row of x, which takes that one, has the same bits.
#pragma once
#include "quantised.h"

typedef Lanes<4>::ints int_fours;

// --- float32

template <int HEIGHT, int PANELS>
OF(DOTPROD) static void block_neon(const float* x, const uint32_t* weights, i64 between, i64 columns, float* sums, i64 pitch) {
    multiply_block<fours, HEIGHT, PANELS>(x, weights, between, columns, sums, pitch);
}

static MultiplyBlock* const NEON_ONE[] = {TO_6(block_neon, 1)};
static MultiplyBlock* const NEON_TWO[] = {block_neon<1, 2>, block_neon<2, 2>};
static const Blocks BLOCKS_NEON = {6, 2, NEON_ONE, NEON_TWO};

OF(DOTPROD) static void multiply_neon(const Product& p, i64 item) { multiply_blocks<fours>(p, item, BLOCKS_NEON); }

// --- whole numbers

static const int BYTE_ROWS = 4;  // of x in a block

// What is multiplied in place of the values of line `line` of a panel: see `values_at`.
template <int BITS>
OF(DOTPROD) INLINE int8x16_t factors_at(const Turn& turn, i64 line, int v, bool high) {
    if (BITS != COUNTED) return (int8x16_t)values_at<fours, BITS>(turn, line, v, high);
    const uint8x16_t raw = vld1q_u8(turn.codes + line * PANEL * 4 + v * 16);
    return (int8x16_t)(high ? vshrq_n_u8(raw, 4) : vandq_u8(raw, vdupq_n_u8(15)));
}

// Adds the products of four columns: those of a panel are in line `line` or in half of it, those of x in lane LANE of its rows.
template <int HEIGHT, int BITS, int LANE>
OF(DOTPROD) INLINE void add_lane(int_fours (&products)[HEIGHT][4], const Turn& turn, i64 line, bool high, const int8x16_t (&rows)[HEIGHT]) {
    for (int v = 0; v < 4; v++) {
        const int8x16_t w = factors_at<BITS>(turn, line, v, high);
        for (int r = 0; r < HEIGHT; r++) products[r][v] = (int_fours)vdotq_laneq_s32((int32x4_t)products[r][v], w, rows[r], LANE);
    }
}

template <int HEIGHT, int BITS>
OF(DOTPROD) INLINE void multiply_lanes(const Turn& turn, i64 t, float* results) {
    const int LINES = BITS == 8 ? 8 : 4, SOME = LINES / 2, SECOND = BITS == 8 ? 1 : 0;  // SOME: lines of 16 columns
    for (i64 group = 0; group < turn.groups; group++) {
        const i64 place = group * turn.x.rows + t;
        const int8_t* x = turn.x.bytes + place * GROUP;
        int_fours products[HEIGHT][4];
        for (int r = 0; r < HEIGHT; r++)
            for (int v = 0; v < 4; v++) products[r][v] = (BITS == COUNTED ? -8 * turn.x.sums[place + r] : 0) - int_fours{};
        ask_for_next<1>(turn, group);
        for (int half = 0; half < 2; half++) {
            const i64 line = group * LINES + half * SOME;
            int8x16_t rows[HEIGHT];
            for (int r = 0; r < HEIGHT; r++) rows[r] = vld1q_s8(x + r * GROUP + half * 16);
            add_lane<HEIGHT, BITS, 0>(products, turn, line, false, rows);
            add_lane<HEIGHT, BITS, 1>(products, turn, line + SECOND, !SECOND, rows);
            add_lane<HEIGHT, BITS, 2>(products, turn, line + 1 + SECOND, false, rows);
            add_lane<HEIGHT, BITS, 3>(products, turn, line + 1 + 2 * SECOND, !SECOND, rows);
        }
        add_group<fours, HEIGHT, 4>(turn, group, products, t, results);
    }
}

// BITS 16: of values that were spread.
template <int HEIGHT, int BITS>
OF(DOTPROD) static void whole_dotprod(Turn turn, i64 t, float* results) {
    if (BITS == 16) turn.codes = (const uint8_t*)whole.values;
    multiply_lanes<HEIGHT, BITS == 16 ? 8 : BITS>(turn, t, results);
}

// The values of all groups of a turn of codes of 4 bits, as codes of 8 bits lie.
OF(DOTPROD) static void spread_dotprod(const Turn& turn) {
    char* to = (char*)whole.values;
    for (i64 line = 0; line < turn.groups * GROUP / 8; line++)
        for (int half = 0; half < 2; half++)
            for (int v = 0; v < 4; v++, to += 16) store(to, values_at<fours, 4>(turn, line, v, half));
}

// The values of all groups of a turn: [columns / 8][16][8].
template <int BITS>
OF(DOTPROD) static void spread_pairs(const Turn& turn) {
    int8_t* to = (int8_t*)whole.values;
    for (i64 k = 0; k < turn.groups * GROUP; k += 8)
        for (int v = 0; v < 4; v++, to += 32) {
            int32x4_t first = (int32x4_t)values_at<fours, BITS>(turn, k * BITS / 32, v, false);
            int32x4_t second = (int32x4_t)values_at<fours, BITS>(turn, (k + 4) * BITS / 32, v, BITS == 4);
            vst1q_s8(to, (int8x16_t)vzip1q_s32(first, second)), vst1q_s8(to + 16, (int8x16_t)vzip2q_s32(first, second));
        }
}

// Of two matrices of sums, by two rows of x and by two rows of W each, the four sums of a row of x.
template <class Vector>
INLINE Vector sums_of(int row, Vector first, Vector second) {
    const int64x2_t a = (int64x2_t)first, b = (int64x2_t)second;
    return (Vector)(row % 2 ? vzip2q_s64(a, b) : vzip1q_s64(a, b));
}

// Of values as `spread_pairs` lays them out. An odd row too many is the last one again.
template <int HEIGHT, int>
OF(I8MM_BF16) static void whole_i8mm(const Turn turn, i64 t, float* results) {
    const int PAIRS = (HEIGHT + 1) / 2;
    const int8_t* w = (const int8_t*)whole.values;
    for (i64 group = 0; group < turn.groups; group++) {
        const int8_t* x = turn.x.bytes + (group * turn.x.rows + t) * GROUP;
        int32x4_t sums[PAIRS][8] = {};
        ask_for_next<1>(turn, group);
        for (int k = 0; k < GROUP; k += 8, w += 8 * PANEL) {
            int8x16_t rows[PAIRS];
            for (int pair = 0; pair < PAIRS; pair++)
                rows[pair] = vcombine_s8(vld1_s8(x + 2 * pair * GROUP + k), vld1_s8(x + std::min(2 * pair + 1, HEIGHT - 1) * GROUP + k));
            for (int n = 0; n < 8; n++)
                for (int pair = 0; pair < PAIRS; pair++) sums[pair][n] = vmmlaq_s32(sums[pair][n], rows[pair], vld1q_s8(w + 16 * n));
        }
        int_fours products[HEIGHT][4];
        for (int r = 0; r < HEIGHT; r++)
            for (int v = 0; v < 4; v++) products[r][v] = (int_fours)sums_of(r, sums[r / 2][2 * v], sums[r / 2][2 * v + 1]);
        add_group<fours, HEIGHT, 4>(turn, group, products, t, results);
    }
}

static MultiplyWhole* const DOTPROD_OF_8[] = UP_TO_4(whole_dotprod, 8);
static MultiplyWhole* const DOTPROD_OF_4[] = UP_TO_4(whole_dotprod, 4);
static MultiplyWhole* const DOTPROD_COUNTED[] = UP_TO_4(whole_dotprod, COUNTED);
static MultiplyWhole* const DOTPROD_WIDE[] = UP_TO_4(whole_dotprod, 16);
static MultiplyWhole* const I8MM_WIDE[] = UP_TO_4(whole_i8mm, 16);
// By bits: 8, 4, and 4 where they are COUNTED.
static const WholeBlocks DOTPROD_BLOCKS[] = {{BYTE_ROWS, DOTPROD_OF_8, nullptr, nullptr},
                                             {BYTE_ROWS, DOTPROD_OF_4, DOTPROD_WIDE, spread_dotprod},
                                             {BYTE_ROWS, DOTPROD_COUNTED, DOTPROD_WIDE, spread_dotprod}};
static const WholeBlocks I8MM_BLOCKS[] = {{BYTE_ROWS, DOTPROD_OF_8, I8MM_WIDE, spread_pairs<8>},
                                          {BYTE_ROWS, DOTPROD_OF_4, I8MM_WIDE, spread_pairs<4>},
                                          {BYTE_ROWS, DOTPROD_COUNTED, I8MM_WIDE, spread_pairs<4>}};
INLINE i64 blocks_of(const Matrix& matrix) { return matrix.bits == 8 ? 0 : matrix.counted ? 2 : 1; }

OF(DOTPROD) static void round_neon(const Product& p, const Rounded& rounded, i64 t) { round_row<fours>(p, rounded, t, true); }

OF(DOTPROD) static void multiply_whole_dotprod(const Product& p, i64 item) {
    whole_blocks<fours, true>(p, item, DOTPROD_BLOCKS[blocks_of(*p.matrix)]);
}
OF(DOTPROD) static void multiply_whole_i8mm(const Product& p, i64 item) {
    whole_blocks<fours, true>(p, item, I8MM_BLOCKS[blocks_of(*p.matrix)]);
}

// --- bfloat16

static const i64 PAIR_ROWS = 6;  // of x in a block

// The sums [HEIGHT][PANEL], `pitch` apart, of rows of x by a panel, from the first column to the last.
template <int HEIGHT>
OF(I8MM_BF16) static void multiply_bfloat16(const bf16* x, i64 stride, const uint32_t* weights, i64 columns, float* sums, i64 pitch) {
    const int PAIRS = (HEIGHT + 1) / 2;
    float32x4_t total[PAIRS][8] = {};
    for (i64 k = 0; k < columns; k += 4, weights += 2 * PANEL) {
        uint16x8_t rows[PAIRS];
        for (int pair = 0; pair < PAIRS; pair++)
            rows[pair] = vcombine_u16(vld1_u16(x + 2 * pair * stride + k), vld1_u16(x + std::min(2 * pair + 1, HEIGHT - 1) * stride + k));
        for (int v = 0; v < 4; v++) {
            uint32x4_t first = vld1q_u32(weights + 4 * v), second = vld1q_u32(weights + PANEL + 4 * v);
            const bfloat16x8_t w[2] = {(bfloat16x8_t)vzip1q_u32(first, second), (bfloat16x8_t)vzip2q_u32(first, second)};
            for (int n = 0; n < 2; n++)
                for (int pair = 0; pair < PAIRS; pair++)
                    total[pair][2 * v + n] = vbfmmlaq_f32(total[pair][2 * v + n], (bfloat16x8_t)rows[pair], w[n]);
        }
    }
    for (int r = 0; r < HEIGHT; r++)
        for (int v = 0; v < 4; v++) store(sums + r * pitch + 4 * v, sums_of(r, total[r / 2][2 * v], total[r / 2][2 * v + 1]));
}

template <int LANE>
OF(I8MM_BF16) INLINE void add_lane(float32x4_t (&total)[4], const uint32_t* weights, bfloat16x8_t x) {
    for (int v = 0; v < 4; v++) total[v] = vbfdotq_laneq_f32(total[v], (bfloat16x8_t)vld1q_u32(weights + LANE * PANEL + 4 * v), x, LANE);
}

template <>
OF(I8MM_BF16) void multiply_bfloat16<1>(const bf16* x, i64, const uint32_t* weights, i64 columns, float* sums, i64) {
    float32x4_t total[4] = {};
    for (i64 k = 0; k < columns; k += 8, weights += 4 * PANEL) {
        const bfloat16x8_t row = (bfloat16x8_t)vld1q_u16(x + k);
        ask_for((const char*)weights + AHEAD, 16 * PANEL, 0, 1);
        add_lane<0>(total, weights, row), add_lane<1>(total, weights, row), add_lane<2>(total, weights, row), add_lane<3>(total, weights, row);
    }
    for (int v = 0; v < 4; v++) store(sums + 4 * v, total[v]);
}

typedef void MultiplyBfloat16(const bf16* x, i64 stride, const uint32_t* weights, i64 columns, float* sums, i64 pitch);
static MultiplyBfloat16* const MULTIPLY_BFLOAT16[] = {multiply_bfloat16<1>, multiply_bfloat16<2>, multiply_bfloat16<3>,
                                                      multiply_bfloat16<4>, multiply_bfloat16<5>, multiply_bfloat16<6>};

OF(I8MM_BF16) static void multiply_bf16(const Product& p, i64 number) {
    const Item item = item_of(p, number);
    const i64 rows = item.end - item.first, count = ceiling(rows, PAIR_ROWS);
    alignas(64) float sums[PAIR_ROWS * 2 * PANEL];
    for (i64 n = 0; n < item.panels; n += 2) {
        const i64 panels = std::min<i64>(2, item.panels - n);
        for (i64 block = 0; block < count; block++) {
            i64 t = item.first + block * rows / count, height = item.first + (block + 1) * rows / count - t;
            for (i64 side = 0; side < panels; side++)
                MULTIPLY_BFLOAT16[height - 1](p.x + t * p.stride, p.stride, panel_of(*p.matrix, item.panel + n + side), p.matrix->K,
                                              sums + side * PANEL, panels * PANEL);
            keep<fours>(p, sums, panels * PANEL, t, height, item.panel + n, panels);
        }
    }
}
