// Products with the vectors of AVX2 and of AVX-512.
#pragma once
#include "quantised.h"

template <int HEIGHT, int PANELS>
OF(AVX2) static void block_avx2(const float* x, const uint32_t* weights, i64 between, i64 columns, float* sums, i64 pitch) {
    multiply_block<eights, HEIGHT, PANELS>(x, weights, between, columns, sums, pitch);
}

template <int HEIGHT, int PANELS>
OF(AVX512) static void block_avx512(const float* x, const uint32_t* weights, i64 between, i64 columns, float* sums, i64 pitch) {
    multiply_block<floats, HEIGHT, PANELS>(x, weights, between, columns, sums, pitch);
}

static MultiplyBlock* const AVX2_ONE[] = {TO_6(block_avx2, 1)};
static MultiplyBlock* const AVX2_TWO[] = {block_avx2<1, 2>, block_avx2<2, 2>, block_avx2<3, 2>};
static MultiplyBlock* const AVX512_ONE[] = {TO_12(block_avx512, 1)};
static MultiplyBlock* const AVX512_TWO[] = {TO_12(block_avx512, 2)};
static const Blocks BLOCKS_AVX2 = {6, 3, AVX2_ONE, AVX2_TWO}, BLOCKS_AVX512 = {12, NEAR_ROWS, AVX512_ONE, AVX512_TWO};

OF(AVX2) static void multiply_avx2(const Product& p, i64 item) { multiply_blocks<eights>(p, item, BLOCKS_AVX2); }
OF(AVX512) static void multiply_avx512(const Product& p, i64 item) { multiply_blocks<floats>(p, item, BLOCKS_AVX512); }

// Codes of 4 bits whose values are 8 less: 8 * 2 * 15 * 127 fits into 16 bits, so a group's products are added there.
template <int HEIGHT>
OF(AVX2) static void multiply_nibbles(const Turn turn, i64 t, float* results) {
    typedef Lanes<8>::ints ints;
    const int LINES = GROUP / 8;
    const uint8_t* codes = turn.codes;
    static const int32_t ones = 0x00010001;
    for (i64 group = 0; group < turn.groups; group++) {
        ints pairs[HEIGHT][2] = {}, products[HEIGHT][2];
        const int8_t* x = turn.x.bytes + (group * turn.x.rows + t) * GROUP;
        ask_for_next<1>(turn, group);
        for (int line = 0; line < LINES; line++, codes += PANEL * 4, x += 8) {
            ints first = load<ints>(codes), second = load<ints>(codes + 32);
            for (int r = 0; r < HEIGHT; r++) add_bytes(pairs[r], first & 0x0f0f0f0f, second & 0x0f0f0f0f, x + r * GROUP);
            for (int r = 0; r < HEIGHT; r++) add_bytes(pairs[r], (first >> 4) & 0x0f0f0f0f, (second >> 4) & 0x0f0f0f0f, x + r * GROUP + 4);
        }
        for (int r = 0; r < HEIGHT; r++) {
            products[r][0] = products[r][1] = -8 * turn.x.sums[group * turn.x.rows + t + r] - ints{};
            add_pairs(products[r], pairs[r], &ones);
        }
        add_group<eights, HEIGHT, 2>(turn, group, products, t, results);
    }
}

template <int HEIGHT, int BITS>
OF(AVX2) static void whole_avx2(const Turn turn, i64 t, float* results) { multiply_whole<eights, HEIGHT, BITS>(turn, t, results); }
template <int HEIGHT, int BITS>
OF(AVX512) static void whole_avx512(const Turn turn, i64 t, float* results) { multiply_whole<floats, HEIGHT, BITS>(turn, t, results); }

template <int BITS>
OF(AVX2) static void spread_avx2(const Turn& turn) { spread<eights, BITS>(turn); }
template <int BITS>
OF(AVX512) static void spread_avx512(const Turn& turn) { spread<floats, BITS>(turn); }

WHOLE_BLOCKS(avx2, UP_TO_4, 4)
WHOLE_BLOCKS(avx512, UP_TO_8, 8)
static MultiplyWhole* const NIBBLES[] = {multiply_nibbles<1>, multiply_nibbles<2>, multiply_nibbles<3>, multiply_nibbles<4>};
static const WholeBlocks AVX2_NIBBLES = {4, NIBBLES, nullptr, nullptr};

OF(AVX2) static void round_avx2(const Product& p, const Rounded& rounded, i64 t) { round_row<eights>(p, rounded, t, p.matrix->counted); }
OF(AVX512) static void round_avx512(const Product& p, const Rounded& rounded, i64 t) { round_row<floats>(p, rounded, t, false); }

OF(AVX2) static void multiply_whole_avx2(const Product& p, i64 item) {
    if (p.matrix->counted) return whole_blocks<eights, true>(p, item, AVX2_NIBBLES);
    whole_blocks<eights, false>(p, item, p.matrix->bits == 8 ? avx2_EIGHT : avx2_FOUR);
}
OF(AVX512) static void multiply_whole_avx512(const Product& p, i64 item) {
    whole_blocks<floats, false>(p, item, p.matrix->bits == 8 ? avx512_EIGHT : avx512_FOUR);
}
