// What arm64 has and C++ has no words for: included by numbers.h, as x86.h is on x86-64.
#pragma once
#include <arm_neon.h>

// All others round products before they are added, as the portable path of x86-64 does.
#define OF(FEATURES) __attribute__((target(FEATURES), optimize("fp-contract=fast")))
#define DOTPROD "arch=armv8.2-a+dotprod"
#define I8MM_BF16 DOTPROD "+i8mm+bf16"

static const size_t OF_32_REGISTERS = 16;  // bytes in a vector

INLINE void spin() { __asm__ volatile("isb" : : : "memory"); }  // once around a loop that waits: `yield` would take no time

INLINE float rounded(float product) {  // before it is added to: the compiler would make one operation of both
    __asm__("" : "+w"(product));
    return product;
}

// The next codes as float32.
INLINE void widen(const int8_t* from, fours& to) {
    int32_t codes;
    memcpy(&codes, from, 4);
    const int16x8_t wider = vmovl_s8((int8x8_t)vdup_n_s32(codes));
    to = (fours)vcvtq_f32_s32(vmovl_s16(vget_low_s16(wider)));
}

INLINE void widen_halves(const uint16_t* from, fours& to) { to = (fours)vcvt_f32_f16((float16x4_t)vld1_u16(from)); }

// sums[v] += two products of 16 bits: of a row of x, whose next two columns are at `x`, by weights.
INLINE void add_pairs(Lanes<4>::ints (&sums)[4], const Lanes<4>::ints (&w)[4], const void* x) {
    int16_t pair[2];
    memcpy(pair, x, 4);
    for (int v = 0; v < 4; v++) sums[v] += ((w[v] << 16) >> 16) * (int32_t)pair[0] + (w[v] >> 16) * (int32_t)pair[1];
}

// The values of codes, each byte from 0 to 15.
INLINE Lanes<4>::ints look_up(const int8_t* table, Lanes<4>::ints codes) {
    return (Lanes<4>::ints)vqtbl1q_s8(vld1q_s8(table), (uint8x16_t)codes);
}
