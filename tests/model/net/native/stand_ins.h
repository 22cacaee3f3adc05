// Plain loops in place of the AVX-512, AVX-VNNI and AMX instructions that the native decoder uses, for CPUs that do not have them:
// with `-include stand_ins.h` each of its instruction sets runs on a CPU with AVX2. Vectors of 64 bytes are two of 32 then.
//
// What a CPU refuses ends the process here too: tiles without a shape or of shapes that do not fit, addresses that are not aligned.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define STAND_INS
#define AVX512 AVX2
#define AVX512_BF16 AVX2
#define AMX AVX2
#include "numbers.h"

namespace stand_ins {

INLINE void must(bool holds, const char* what) {
    if (holds) return;
    fprintf(stderr, "stand-ins: %s\n", what);
    abort();
}

// --- AVX-512

template <class Element>
struct Of {  // the elements of a register
    Element at[64 / sizeof(Element)];
};
template <class Element, class Register>
INLINE Of<Element> elements(const Register& x) {
    static_assert(sizeof x == 64, "");
    Of<Element> of;
    memcpy(&of, &x, 64);
    return of;
}
template <class Register, class Element>
INLINE Register as(const Of<Element>& of) {
    Register x;
    memcpy(&x, &of, 64);
    return x;
}

INLINE __m512 loadu_ps(const void* from) { return load<__m512>((const char*)from); }
INLINE void storeu_ps(void* to, const __m512& x) { memcpy(to, &x, 64); }
INLINE __m512i load_si512(const void* from) {
    must((uintptr_t)from % 64 == 0, "an address that is not aligned");
    return load<__m512i>((const char*)from);
}
INLINE __m512i castps_si512(const __m512& x) { return (__m512i)x; }
INLINE __m512i setzero_si512() { return __m512i{}; }
INLINE __m512i set1_epi32(int x) { return (__m512i)(x - ints{}); }
INLINE __m512 set1_ps(float x) { return x - __m512{}; }

INLINE __m512 dpbf16_ps(const __m512& sums, const __m512bh& a, const __m512bh& b) {
    floats first = (floats)a, second = (floats)b;
    return (__m512)add_product(add_product((floats)sums, second_of(first), second_of(second)), first_of(first), first_of(second));
}
INLINE __m512i cvtne2ps_pbh(const __m512& high, const __m512& low) {
    Of<float> numbers[2] = {elements<float>(low), elements<float>(high)};
    Of<bf16> of;
    for (int i = 0; i < 32; i++) of.at[i] = narrow(numbers[i / 16].at[i % 16]);
    return as<__m512i>(of);
}
INLINE __m512i permutexvar_epi16(const __m512i& places, const __m512i& x) {
    Of<uint16_t> at = elements<uint16_t>(places), from = elements<uint16_t>(x), of;
    for (int i = 0; i < 32; i++) of.at[i] = from.at[at.at[i] % 32];
    return as<__m512i>(of);
}
INLINE __m512i permutex2var_epi8(const __m512i& low, const __m512i& places, const __m512i& high) {
    Of<uint8_t> at = elements<uint8_t>(places), first = elements<uint8_t>(low), second = elements<uint8_t>(high), of;
    for (int i = 0; i < 64; i++) of.at[i] = (at.at[i] & 64 ? second : first).at[at.at[i] % 64];
    return as<__m512i>(of);
}
INLINE __m512i abs_epi8(const __m512i& x) {
    Of<int8_t> of = elements<int8_t>(x);
    for (int8_t& code : of.at) code = (int8_t)std::abs(code);
    return as<__m512i>(of);
}
template <class Element, int HIGH>  // the low or the high halves of each 16 bytes, by turns of a and of b
INLINE __m512i unpack(const __m512i& a, const __m512i& b) {
    const int COUNT = 16 / sizeof(Element);
    Of<Element> first = elements<Element>(a), second = elements<Element>(b), of;
    for (int i = 0; i < 4 * COUNT; i++) {
        int from = i / COUNT * COUNT + HIGH * COUNT / 2 + i % COUNT / 2;
        of.at[i] = i % 2 ? second.at[from] : first.at[from];
    }
    return as<__m512i>(of);
}
struct Quarter {
    char bytes[16];
};
INLINE __m512i shuffle_i32x4(const __m512i& a, const __m512i& b, int which) {
    Of<Quarter> first = elements<Quarter>(a), second = elements<Quarter>(b), of;
    for (int i = 0; i < 4; i++) of.at[i] = (i < 2 ? first : second).at[which >> 2 * i & 3];
    return as<__m512i>(of);
}
INLINE float reduce_max_ps(const __m512& x) {
    Of<float> of = elements<float>(x);
    return *std::max_element(of.at, of.at + 16);
}
INLINE __m512i mask_i32gather_epi32(const __m512i& otherwise, int mask, const __m512i& places, const void* base, int scale) {
    Of<int32_t> of = elements<int32_t>(otherwise), at = elements<int32_t>(places);
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) memcpy(&of.at[i], (const char*)base + (i64)at.at[i] * scale, 4);
    return as<__m512i>(of);
}
INLINE __m512 i32gather_ps(const __m512i& places, const void* base, int scale) {
    return (__m512)mask_i32gather_epi32(__m512i{}, 0xffff, places, base, scale);
}

// --- AMX

struct TileOf {
    int rows = 0, bytes = 0;  // of a row; no rows: no shape
    alignas(64) char at[16][64] = {};
};
static thread_local TileOf tiles[8];

INLINE TileOf& shaped(int tile) {
    must(tiles[tile].rows, "a tile without a shape");
    return tiles[tile];
}
static void tile_loadconfig(const void* config) {
    const char* from = (const char*)config;
    must(from[0] == 1 && from[1] == 0, "a palette that is not there");
    for (int tile = 0; tile < 8; tile++) {
        TileOf& of = tiles[tile] = TileOf();
        uint16_t bytes;
        memcpy(&bytes, from + 16 + 2 * tile, 2);
        of.rows = from[48 + tile], of.bytes = bytes;
        must(of.rows <= 16 && of.bytes <= 64 && !of.rows == !of.bytes, "a shape that no tile has");
    }
}
static void tile_release() {
    for (TileOf& tile : tiles) tile = TileOf();
}
INLINE void tile_zero(int tile) { memset(shaped(tile).at, 0, sizeof tiles[tile].at); }
static void tile_loadd(int tile, const void* from, i64 stride) {
    tile_zero(tile);
    for (int row = 0; row < tiles[tile].rows; row++) memcpy(tiles[tile].at[row], (const char*)from + row * stride, tiles[tile].bytes);
}
static void tile_stored(int tile, void* to, i64 stride) {
    for (int row = 0; row < shaped(tile).rows; row++) memcpy((char*)to + row * stride, tiles[tile].at[row], tiles[tile].bytes);
}
INLINE void must_fit(const TileOf& c, const TileOf& a, const TileOf& b) {
    must(c.rows == a.rows && c.bytes == b.bytes && a.bytes == 4 * b.rows && b.bytes % 4 == 0, "shapes that do not fit");
}
template <class Vector>
INLINE void store_row(TileOf& tile, int row, Vector x) {
    memcpy(tile.at[row], &x, tile.bytes);
}
OF(AVX2) static void tile_dpbf16ps(int to, int from, int by) {  // the first of all pairs in one sum, the second in another
    TileOf &c = shaped(to), &a = shaped(from), &b = shaped(by);
    must_fit(c, a, b);
    for (int m = 0; m < c.rows; m++) {
        floats first = {}, second = {};
        for (int k = 0; k < b.rows; k++) {
            floats pairs = load<floats>(b.at[k]);
            bf16 x[2];
            memcpy(x, a.at[m] + 4 * k, 4);
            first = add_product(first, first_of(pairs), all(wide(x[0]))), second = add_product(second, second_of(pairs), all(wide(x[1])));
        }
        store_row(c, m, load<floats>(c.at[m]) + (first + second));
    }
}
OF(AVX2) static void tile_dpbssd(int to, int from, int by) {
    TileOf &c = shaped(to), &a = shaped(from), &b = shaped(by);
    must_fit(c, a, b);
    for (int m = 0; m < c.rows; m++) {
        ints sums = load<ints>(c.at[m]);
        for (int k = 0; k < a.bytes; k++) sums += ((load<ints>(b.at[k / 4]) << (24 - k % 4 * 8)) >> 24) * (int)(int8_t)a.at[m][k];
        store_row(c, m, sums);
    }
}
}  // namespace stand_ins

#define _mm512_loadu_ps stand_ins::loadu_ps
#define _mm512_storeu_ps stand_ins::storeu_ps
#define _mm512_load_si512 stand_ins::load_si512
#define _mm512_castps_si512 stand_ins::castps_si512
#define _mm512_setzero_si512 stand_ins::setzero_si512
#define _mm512_set1_epi32 stand_ins::set1_epi32
#define _mm512_set1_ps stand_ins::set1_ps
#define _mm512_dpbf16_ps stand_ins::dpbf16_ps
#define _mm512_cvtne2ps_pbh stand_ins::cvtne2ps_pbh
#define _mm512_permutexvar_epi16 stand_ins::permutexvar_epi16
#define _mm512_permutex2var_epi8 stand_ins::permutex2var_epi8
#define _mm512_abs_epi8 stand_ins::abs_epi8
#define _mm512_unpacklo_epi8 stand_ins::unpack<int8_t, 0>
#define _mm512_unpackhi_epi8 stand_ins::unpack<int8_t, 1>
#define _mm512_unpacklo_epi32 stand_ins::unpack<int32_t, 0>
#define _mm512_unpackhi_epi32 stand_ins::unpack<int32_t, 1>
#define _mm512_unpacklo_epi64 stand_ins::unpack<i64, 0>
#define _mm512_unpackhi_epi64 stand_ins::unpack<i64, 1>
#undef _mm512_shuffle_i32x4
#define _mm512_shuffle_i32x4 stand_ins::shuffle_i32x4
#define _mm512_reduce_max_ps stand_ins::reduce_max_ps
#undef _mm512_i32gather_ps
#define _mm512_i32gather_ps stand_ins::i32gather_ps
#undef _mm512_mask_i32gather_epi32
#define _mm512_mask_i32gather_epi32 stand_ins::mask_i32gather_epi32
#undef _tile_loadconfig
#define _tile_loadconfig stand_ins::tile_loadconfig
#undef _tile_release
#define _tile_release stand_ins::tile_release
#undef _tile_zero
#define _tile_zero stand_ins::tile_zero
#undef _tile_loadd
#define _tile_loadd stand_ins::tile_loadd
#undef _tile_stored
#define _tile_stored stand_ins::tile_stored
#undef _tile_dpbf16ps
#define _tile_dpbf16ps stand_ins::tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_dpbssd stand_ins::tile_dpbssd

// --- what the sources write as assembler

// sums += products of 16 bits, two by two.
INLINE void add_pairs(ints (&sums)[1], const ints (&w)[1], const void* x) {
    int16_t pair[2];
    memcpy(pair, x, 4);
    sums[0] += ((w[0] << 16) >> 16) * (int)pair[0] + (w[0] >> 16) * (int)pair[1];
}

INLINE ints look_up(const int8_t* table, const ints& codes) {
    stand_ins::Of<uint8_t> of = stand_ins::elements<uint8_t>(codes);
    for (uint8_t& byte : of.at) byte = byte & 0x80 ? 0 : (uint8_t)table[byte & 15];
    return stand_ins::as<ints>(of);
}

// sums += products of bytes, four by four: weights without a sign by signed numbers.
template <class Ints, int VECTORS>
INLINE void add_quads(Ints (&sums)[VECTORS], const Ints (&w)[VECTORS], const void* x) {
    int8_t four[4];
    memcpy(four, x, 4);
    for (int v = 0; v < VECTORS; v++)
        for (int k = 0; k < 4; k++) sums[v] += ((w[v] >> 8 * k) & 255) * (int)four[k];
}

template <class Ints>
INLINE void fill(Ints& lanes, int32_t x) {
    lanes = x - Ints{};
}

INLINE void widen(const int8_t* from, floats& to) {
    for (int j = 0; j < 16; j++) to[j] = from[j];
}

INLINE void widen_halves(const uint16_t* from, floats& to) {
    for (int j = 0; j < 16; j += 4) {
        fours some;
        widen_halves(from + j, some);
        memcpy((float*)&to + j, &some, sizeof some);
    }
}
