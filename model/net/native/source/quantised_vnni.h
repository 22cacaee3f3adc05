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
INLINE void add_quads(ints (&sums)[1], const ints (&w)[1], const void* x) {
    __asm__("vpdpbusd %1%{1to16%}, %2, %0" : "+v"(sums[0]) : "m"(*(const int32_t(*)[1])x), "v"(w[0]));
}
// All lanes x. As one piece: GCC 12 fills sixteen one by one in a template, which it takes apart before it knows the target. With a row of x that
// took as long as the products.
INLINE void fill(Lanes<8>::ints& lanes, int32_t x) { __asm__("vmovd %1, %x0\n\tvpbroadcastd %x0, %0" : "=x"(lanes) : "r"(x)); }
INLINE void fill(ints& lanes, int32_t x) { __asm__("vpbroadcastd %1, %0" : "=v"(lanes) : "r"(x)); }
#endif

template <class Vector, int HEIGHT, int BITS>
INLINE void multiply_quads(const Turn turn, i64 t, float* results, i64 pitch) {
    typedef typename Like<Vector>::ints ints;
    const int VECTORS = PANEL * 4 / sizeof(Vector), LINES = GROUP * BITS / 32;
    for (i64 group = 0; group < turn.groups; group++) {
        i64 place = group * turn.x.rows + t;
        const int8_t* x = turn.x.bytes + place * GROUP;
        ints products[HEIGHT][VECTORS], w[VECTORS];
        for (int r = 0; r < HEIGHT; r++)
            for (int v = 0; v < VECTORS; v++) fill(products[r][v], -128 * turn.x.sums[place + r]);
        for (int line = 0; line < LINES; line++)
            for (int half = 0; half < 8 / BITS; half++, x += 4) {
                for (int v = 0; v < VECTORS; v++)
                    w[v] = values_at<Vector, BITS>(turn, group * LINES + line, v, half) ^ (int32_t)0x80808080;
                for (int r = 0; r < HEIGHT; r++) add_quads(products[r], w, x + r * GROUP);
            }
        add_group<Vector, HEIGHT, VECTORS>(turn, group, products, t, results, pitch);
    }
}

// The values of all groups of a turn of codes of 4 bits, as codes of 8 bits lie.
template <class Vector>
INLINE void spread_bytes(const Turn& turn) {
    char* to = (char*)whole.values;
    for (i64 line = 0; line < turn.groups * GROUP / 8; line++)
        for (int half = 0; half < 2; half++, to += 4 * PANEL)
            for (i64 v = 0; v < PANEL * 4 / (i64)sizeof(Vector); v++) store(to + v * sizeof(Vector), values_at<Vector, 4>(turn, line, (int)v, half));
}

// BITS 16: of values that were spread.
template <class Vector, int HEIGHT, int BITS>
INLINE void multiply_codes(Turn turn, i64 t, float* results, i64 pitch) {
    if (BITS == 16) turn.codes = (const uint8_t*)whole.values;
    multiply_quads<Vector, HEIGHT, BITS == 16 ? 8 : BITS>(turn, t, results, pitch);
}

template <int HEIGHT, int BITS>
OF(AVX2) static void whole_vnni256(const Turn turn, i64 t, float* results, i64 pitch) { multiply_codes<eights, HEIGHT, BITS>(turn, t, results, pitch); }
template <int HEIGHT, int BITS>
OF(AVX512) static void whole_vnni512(const Turn turn, i64 t, float* results, i64 pitch) { multiply_codes<floats, HEIGHT, BITS>(turn, t, results, pitch); }
OF(AVX2) static void spread_vnni256(const Turn& turn) { spread_bytes<eights>(turn); }
OF(AVX512) static void spread_vnni512(const Turn& turn) { spread_bytes<floats>(turn); }

#define UP_TO_12(OF, BITS) \
    {OF<1, BITS>, OF<2, BITS>, OF<3, BITS>, OF<4, BITS>, OF<5, BITS>, OF<6, BITS>, OF<7, BITS>, OF<8, BITS>, OF<9, BITS>, OF<10, BITS>, OF<11, BITS>, OF<12, BITS>}
#define BYTE_BLOCKS(NAME, TO, HEIGHT, SPREAD, SCALES)                                                     \
    static MultiplyWhole* const NAME##_OF_8[] = TO(whole_##NAME, 8);                                      \
    static MultiplyWhole* const NAME##_OF_4[] = TO(whole_##NAME, 4);                                      \
    static MultiplyWhole* const NAME##_WIDE[] = TO(whole_##NAME, 16);                                     \
    static const WholeBlocks NAME##_EIGHT = {HEIGHT, NAME##_OF_8, nullptr, nullptr, SCALES};              \
    static const WholeBlocks NAME##_FOUR = {HEIGHT, NAME##_OF_4, NAME##_WIDE, SPREAD, SCALES};
BYTE_BLOCKS(vnni256, UP_TO_4, 4, spread_vnni256, spread_scales_avx2)
BYTE_BLOCKS(vnni512, UP_TO_12, 12, spread_vnni512, spread_scales_avx512)

OF(AVX2) static void round_vnni256(const Product& p, const Rounded& rounded, i64 t) { round_row<eights>(p, rounded, t, true); }
OF(AVX512) static void round_vnni512(const Product& p, const Rounded& rounded, i64 t) { round_row<floats>(p, rounded, t, true); }

OF(AVX2) static void multiply_whole_vnni256(const Product& p, i64 item) {
    whole_blocks<eights, true>(p, item, p.matrix->bits == 8 ? vnni256_EIGHT : vnni256_FOUR);
}
OF(AVX512) static void multiply_whole_vnni512(const Product& p, i64 item) {
    whole_blocks<floats, true>(p, item, p.matrix->bits == 8 ? vnni512_EIGHT : vnni512_FOUR);
}
