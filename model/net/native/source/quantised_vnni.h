// Products of whole numbers where a CPU adds four products of bytes to a sum of 32 bits at once (vpdpbusd, of AVX-512-VNNI and of AVX-VNNI).
//
// It takes weights from 0 to 255, which are 128 more than they are: 128 times a group's sum of x is taken from its sums before.
#pragma once
#include "avx.h"

#ifndef STAND_INS
// sums[v] += four products: of the four signed bytes at `x` by VECTORS of weights from 0 to 255.
INLINE void add_quads(Lanes<8>::ints (&sums)[2], const Lanes<8>::ints (&w)[2], const void* x) {
    Lanes<8>::ints four;
    __asm__("vpbroadcastd %3, %2\n\t%{vex%} vpdpbusd %2, %4, %0\n\t%{vex%} vpdpbusd %2, %5, %1"
            : "+x"(sums[0]), "+x"(sums[1]), "=&x"(four)
            : "m"(*(const int32_t(*)[1])x), "x"(w[0]), "x"(w[1]));
}
INLINE void add_quads(ints (&sums)[2], const ints (&w)[2], const void* x) {
    ints four;
    __asm__("vpbroadcastd %3, %2\n\tvpdpbusd %2, %4, %0\n\tvpdpbusd %2, %5, %1"
            : "+v"(sums[0]), "+v"(sums[1]), "=&v"(four)
            : "m"(*(const int32_t(*)[1])x), "v"(w[0]), "v"(w[1]));
}
// All lanes x. As one piece: GCC 12 fills sixteen one by one in a template, which it takes apart before it knows the target. With a row of x that
// took as long as the products.
INLINE void fill(Lanes<8>::ints& lanes, int32_t x) { __asm__("vmovd %1, %x0\n\tvpbroadcastd %x0, %0" : "=x"(lanes) : "r"(x)); }
INLINE void fill(ints& lanes, int32_t x) { __asm__("vpbroadcastd %1, %0" : "=v"(lanes) : "r"(x)); }
#endif

// The values of a line's codes, plus 128, or plus 8 where they are COUNTED: none is below 0. BITS 16: of values that were spread so.
template <class Ints, int BITS>
INLINE Ints raised_values(const Turn& turn, Ints raw, bool high) {
    typedef typename Lanes<sizeof(Ints) / 4>::words words;
    if (BITS == 16) return raw;
    if (BITS == 8) return raw ^ (int32_t)0x80808080;
    Ints codes = (Ints)(((words)raw >> (high ? 4 : 0)) & 0x0f0f0f0f);
    return BITS == COUNTED ? codes : look_up(turn.table, codes) ^ (int32_t)0x80808080;
}

template <class Vector, int HEIGHT, int PANELS, int BITS>
INLINE void multiply_quads(const Turn turn, i64 t, float* results) {
    typedef typename Like<Vector>::ints ints;
    const int SIDE = PANEL * 4 / sizeof(Vector), VECTORS = PANELS * SIDE, HALVES = BITS == 4 || BITS == COUNTED ? 2 : 1, LINES = GROUP / 4 / HALVES;
    const i64 between = BITS == 16 ? turn.groups * LINES * PANEL * 4 : turn.between * LINES * PANEL * 4;
    const int32_t least = BITS == COUNTED ? -8 : -128;
    const uint8_t* codes = BITS == 16 ? (const uint8_t*)whole.values : turn.codes;
    const int8_t* x = turn.x.bytes + t * GROUP;
    for (i64 group = 0; group < turn.groups; group++, x += turn.x.rows * GROUP) {
        ints products[HEIGHT][VECTORS], w[VECTORS], raw[VECTORS];
        for (int r = 0; r < HEIGHT; r++) {
            fill(products[r][0], least * turn.x.sums[group * turn.x.rows + t + r]);
            for (int v = 1; v < VECTORS; v++) products[r][v] = products[r][0];
        }
        ask_for_next<PANELS>(turn, group);
        for (int line = 0; line < LINES; line++, codes += PANEL * 4) {
            for (int v = 0; v < VECTORS; v++) raw[v] = load<ints>(codes + v / SIDE * between + v % SIDE * sizeof(Vector));
            for (int half = 0; half < HALVES; half++) {
                for (int v = 0; v < VECTORS; v++) w[v] = raised_values<ints, BITS>(turn, raw[v], half);
                for (int r = 0; r < HEIGHT; r++) add_quads(products[r], w, x + r * GROUP + (line * HALVES + half) * 4);
            }
        }
        add_group<Vector, HEIGHT, VECTORS>(turn, group, products, t, results);
    }
}

// The values of all groups of a turn of codes of 4 bits, as codes of 8 bits lie, of PANELS panels; RAISED by 128.
template <class Vector, int PANELS, bool RAISED>
INLINE void spread_bytes(const Turn& turn) {
    char* to = (char*)whole.values;
    for (int panel = 0; panel < PANELS; panel++)
        for (i64 line = 0; line < turn.groups * turn.lines; line++)
            for (int half = 0; half < 2; half++, to += 4 * PANEL)
                for (i64 v = 0; v < PANEL * 4 / (i64)sizeof(Vector); v++) {
                    auto values = values_at<Vector, 4>(turn, panel * turn.between * turn.lines + line, (int)v, half);
                    store(to + v * sizeof(Vector), values ^ (RAISED ? (int32_t)0x80808080 : 0));
                }
}

template <int HEIGHT, int BITS>
OF(AVX2) static void whole_vnni256(const Turn turn, i64 t, float* results) { multiply_quads<eights, HEIGHT, 1, BITS>(turn, t, results); }
template <int HEIGHT, int BITS>
OF(AVX512) static void whole_vnni512(const Turn turn, i64 t, float* results) { multiply_quads<floats, HEIGHT, 2, BITS>(turn, t, results); }
OF(AVX2) static void spread_vnni256(const Turn& turn) { spread_bytes<eights, 1, true>(turn); }
OF(AVX512) static void spread_vnni512(const Turn& turn) { spread_bytes<floats, 2, true>(turn); }

#define BYTE_BLOCKS(NAME, TO, HEIGHT, PANELS)                                                              \
    static MultiplyWhole* const NAME##_OF_8[] = TO(whole_##NAME, 8);                                       \
    static MultiplyWhole* const NAME##_OF_4[] = TO(whole_##NAME, 4);                                       \
    static MultiplyWhole* const NAME##_OF_COUNTED[] = TO(whole_##NAME, COUNTED);                           \
    static MultiplyWhole* const NAME##_WIDE[] = TO(whole_##NAME, 16);                                      \
    static const WholeBlocks NAME##_EIGHT = {HEIGHT, NAME##_OF_8, nullptr, nullptr, PANELS, 4};            \
    static const WholeBlocks NAME##_FOUR = {HEIGHT, NAME##_OF_4, NAME##_WIDE, spread_##NAME, PANELS, 2};  \
    static const WholeBlocks NAME##_COUNTED = {HEIGHT, NAME##_OF_COUNTED, nullptr, nullptr, PANELS, 4};
BYTE_BLOCKS(vnni256, UP_TO_4, 4, 1)
BYTE_BLOCKS(vnni512, UP_TO_8, 8, 2)

OF(AVX2) static void round_vnni256(const Product& p, const Rounded& rounded, i64 t) { round_row<eights>(p, rounded, t, true); }
OF(AVX512) static void round_vnni512(const Product& p, const Rounded& rounded, i64 t) { round_row<floats>(p, rounded, t, true); }

OF(AVX2) static void multiply_whole_vnni256(const Product& p, i64 item) {
    const Matrix& m = *p.matrix;
    whole_blocks<eights, true>(p, item, m.bits == 8 ? vnni256_EIGHT : m.counted ? vnni256_COUNTED : vnni256_FOUR);
}
OF(AVX512) static void multiply_whole_vnni512(const Product& p, i64 item) {
    const Matrix& m = *p.matrix;
    whole_blocks<floats, true>(p, item, m.bits == 8 ? vnni512_EIGHT : m.counted ? vnni512_COUNTED : vnni512_FOUR);
}
