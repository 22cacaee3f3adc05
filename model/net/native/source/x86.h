// What x86-64 has and C++ has no words for: included by numbers.h, as arm.h is on arm64.
#pragma once
#include <immintrin.h>

static const size_t OF_32_REGISTERS = 64;  // bytes in a vector; of smaller ones there are 16

INLINE void spin() { _mm_pause(); }  // once around a loop that waits

#define OF(FEATURES) __attribute__((target(FEATURES)))
#define AVX2 "avx2,fma,bmi2"
#ifndef STAND_INS  // a test has loops in place of these instructions
#define AVX512 AVX2 ",avx512f,avx512bw,avx512dq,avx512vl,avx512cd,prefer-vector-width=512"
#define AVX512_BF16 AVX512 ",avx512bf16,avx512vbmi,prfchw"
#define AMX AVX512_BF16 ",amx-tile,amx-bf16,amx-int8"
#endif

INLINE float rounded(float product) {  // before it is added to: the compiler would make one operation of both
    __asm__("" : "+x"(product));
    return product;
}

// GCC 12 puts some of these sums into the registers of weights and then has too few.
INLINE eights add_product(eights sum, eights w, eights x) {
    __asm__("vfmadd231ps %1, %2, %0" : "+x"(sum) : "x"(w), "x"(x));
    return sum;
}

// The next codes as float32.
INLINE void widen(const int8_t* from, fours& to) {
    for (int j = 0; j < 4; j++) to[j] = from[j];
}
INLINE void widen(const int8_t* from, eights& to) {
    Lanes<8>::ints x;  // GCC 12 converts them one by one
    __asm__("vpmovsxbd %1, %0" : "=x"(x) : "m"(*(const int8_t(*)[8])from));
    to = __builtin_convertvector(x, eights);
}

// The next float16 as float32, none of them infinite.
INLINE void widen_halves(const uint16_t* from, fours& to) {
    Lanes<4>::words bits = __builtin_convertvector(load<Lanes<4>::halves>(from), Lanes<4>::words);
    to = (fours)(((bits & 0x7fff) << 13) | ((bits & 0x8000) << 16)) * 0x1p112f;
}
INLINE void widen_halves(const uint16_t* from, eights& to) { __asm__("vcvtph2ps %1, %0" : "=x"(to) : "m"(*(const uint16_t(*)[8])from)); }
#ifndef STAND_INS
INLINE void widen_halves(const uint16_t* from, floats& to) { __asm__("vcvtph2ps %1, %0" : "=v"(to) : "m"(*(const uint16_t(*)[16])from)); }
INLINE void widen(const int8_t* from, floats& to) {
    ints x;
    __asm__("vpmovsxbd %1, %0" : "=v"(x) : "m"(*(const int8_t(*)[16])from));
    to = __builtin_convertvector(x, floats);
}
#endif

// sums[v] += two products of 16 bits: of a row of x, whose next two columns are at `x`, by VECTORS of weights. As one piece: else GCC adds in an
// order of its own, and has too few registers for that.
INLINE void add_pairs(Lanes<4>::ints (&sums)[4], const Lanes<4>::ints (&w)[4], const void* x) {
    int32_t pair;
    memcpy(&pair, x, 4);
    for (int v = 0; v < 4; v++) {
        Lanes<4>::ints both = pair - Lanes<4>::ints{};
        __asm__("pmaddwd %2, %1\n\tpaddd %1, %0" : "+x"(sums[v]), "+x"(both) : "x"(w[v]));
    }
}
INLINE void add_pairs(Lanes<8>::ints (&sums)[2], const Lanes<8>::ints (&w)[2], const void* x) {
    Lanes<8>::ints first, second;
    __asm__("vpbroadcastd %4, %3\n\tvpmaddwd %3, %5, %2\n\tvpaddd %2, %0, %0\n\tvpmaddwd %3, %6, %3\n\tvpaddd %3, %1, %1"
            : "+x"(sums[0]), "+x"(sums[1]), "=&x"(first), "=&x"(second)
            : "m"(*(const int32_t(*)[1])x), "x"(w[0]), "x"(w[1]));
}
#ifndef STAND_INS  // else those of tests
INLINE void add_pairs(ints (&sums)[1], const ints (&w)[1], const void* x) {
    ints both;
    __asm__("vpbroadcastd %2, %1\n\tvpmaddwd %1, %3, %1\n\tvpaddd %1, %0, %0" : "+v"(sums[0]), "=&v"(both) : "m"(*(const int32_t(*)[1])x), "v"(w[0]));
}
#endif

// The values of codes, each byte from 0 to 15.
INLINE Lanes<4>::ints look_up(const int8_t* table, Lanes<4>::ints codes) {
    uint8_t bytes[16];
    store(bytes, codes);
    for (uint8_t& byte : bytes) byte = table[byte];
    return load<Lanes<4>::ints>(bytes);
}
INLINE Lanes<8>::ints look_up(const int8_t* table, Lanes<8>::ints codes) {
    Lanes<8>::ints values;
    __asm__("vbroadcasti128 %2, %0\n\tvpshufb %1, %0, %0" : "=&x"(values) : "x"(codes), "m"(*(const int8_t(*)[16])table));
    return values;
}
#ifndef STAND_INS
INLINE ints look_up(const int8_t* table, ints codes) {
    ints values;
    __asm__("vbroadcasti32x4 %2, %0\n\tvpshufb %1, %0, %0" : "=&v"(values) : "v"(codes), "m"(*(const int8_t(*)[16])table));
    return values;
}
#endif

// sums[v] += two products, in 16 bits, of codes from 0 to 15 and of the four bytes at `x`.
INLINE void add_bytes(Lanes<8>::ints (&sums)[2], Lanes<8>::ints first, Lanes<8>::ints second, const void* x) {
    Lanes<8>::ints both, four;
    __asm__("vpbroadcastd %4, %3\n\tvpmaddubsw %3, %5, %2\n\tvpaddw %2, %0, %0\n\tvpmaddubsw %3, %6, %3\n\tvpaddw %3, %1, %1"
            : "+x"(sums[0]), "+x"(sums[1]), "=&x"(both), "=&x"(four)
            : "m"(*(const int32_t(*)[1])x), "x"(first), "x"(second));
}
