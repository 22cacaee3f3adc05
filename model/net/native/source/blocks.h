// Blocks of GGUF files -> rows of whole numbers: codes, and the scales and minima of their groups. Source: ggml-common.h and ggml-quants.c of
// llama.cpp. formats/ggml.py says the same in torch, and a law compares both bit by bit.
//
// A group is 32 columns. Most types have one in a block; the K types have eight, a block of 256 columns.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tokens.h"

enum BlockType {  // ggml's numbers
    Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23, MXFP4 = 39
};

// Rows of a tensor as they lie in a file. As `_BlockRows` of packing.py.
struct BlockRows {
    const uint8_t* bytes;
    const i64* order;  // which row is row n; null: itself
    const i64* groups;  // which group of a row is group g; null: itself
    i64 rows, stride;  // stride: bytes in a row
    i64 type;
};

struct CodedGroup {
    uint8_t codes[GROUP];  // those of 4 bits from 0 to 15, or int8
    float scale, minimum;
};

INLINE float half_at(const uint8_t* from) {  // float16, also one that is not normal; infinity and NaN stay what they are
    uint16_t half;
    memcpy(&half, from, 2);
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13 | (uint32_t)(half & 0x8000) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return (half & 0x7c00) == 0x7c00 ? value * INFINITY : value * 0x1p112f;
}

// The nearest float16, the even one of two, of a number below 2^15.
INLINE uint16_t to_half(float value) {
    const float least = 0x1p-14f;  // below, a float16 counts 2^-24, as a float32 does from 0.5 to 1
    uint32_t bits, sign;
    memcpy(&bits, &value, 4);
    sign = bits >> 16 & 0x8000, bits &= 0x7fffffff;
    float size = std::fabs(value);
    if (size < least) {
        size += 0.5f;
        memcpy(&bits, &size, 4);
        return sign | (bits - 0x3f000000);
    }
    return sign | (bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13;
}

// 32 numbers in 8 bits: the largest becomes 127 or -127. As `quantise` of codes.py. A factor of all of them that is not finite stays seen.
INLINE void round_numbers(const float* numbers, float factor, CodedGroup& to) {
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, whose bits are then the lowest
    float largest = 0;
    for (i64 i = 0; i < GROUP; i++) largest = std::max(largest, std::fabs(numbers[i]));
    float whole = largest == 0 ? 1 : largest;
    for (i64 i = 0; i < GROUP; i++) {
        float rounded = numbers[i] / whole * 127 + shift;
        uint32_t bits;
        memcpy(&bits, &rounded, 4);
        to.codes[i] = (uint8_t)bits;
    }
    to.scale = largest / 127 + 0 * factor, to.minimum = 0;
}

// Low halves, then high halves.
INLINE void nibbles(const uint8_t* from, uint8_t* to) {
    for (i64 i = 0; i < 16; i++) to[i] = from[i] & 15, to[16 + i] = from[i] >> 4;
}

// The fifth bits of 32 columns, from 4 bytes.
INLINE void fifth_bits(const uint8_t* from, uint8_t* to) {
    for (i64 i = 0; i < GROUP; i++) to[i] |= (from[i / 8] >> i % 8 & 1) << 4;
}

// Scale and minimum of group g of a block of 256: 6 bits each in 12 bytes, times a float16 of the block.
INLINE void k_scales(const uint8_t* block, i64 g, CodedGroup& to) {
    const uint8_t *low = block + 4, *middle = block + 8, *high = block + 12;
    i64 i = g % 4;
    int scale = g < 4 ? low[i] & 63 : (high[i] & 15) | low[i] >> 6 << 4, minimum = g < 4 ? middle[i] & 63 : high[i] >> 4 | middle[i] >> 6 << 4;
    to.scale = half_at(block) * scale, to.minimum = -half_at(block + 2) * minimum;
}

// Types with scales for 16 columns: the numbers are rounded once more. Group g of a block of 256.
INLINE void twos(const uint8_t* block, i64 g, CodedGroup& to) {
    const uint8_t* codes = block + 16 + g / 4 * 32;
    float numbers[GROUP], unit = half_at(block + 80), least = half_at(block + 82);
    for (i64 i = 0; i < GROUP; i++) {
        int both = block[2 * g + i / 16];
        numbers[i] = unit * (both & 15) * (codes[i] >> g % 4 * 2 & 3) - least * (both >> 4);
    }
    round_numbers(numbers, unit + least, to);
}

INLINE void threes(const uint8_t* block, i64 g, CodedGroup& to) {
    const uint8_t *bits = block, *codes = block + 32 + g / 4 * 32, *scales = block + 96;
    float numbers[GROUP], unit = half_at(block + 108);
    for (i64 half = 0; half < 2; half++) {
        const i64 at = 2 * g + half;
        float scale = unit * ((scales[at % 8] >> at / 8 * 4 & 15 | (scales[8 + at % 4] >> at / 4 * 2 & 3) << 4) - 32);
        for (i64 i = half * 16; i < half * 16 + 16; i++)
            numbers[i] = scale * ((codes[i] >> g % 4 * 2 & 3) - (bits[i] >> g & 1 ? 0 : 4));
    }
    round_numbers(numbers, unit, to);
}

INLINE void sixes(const uint8_t* block, i64 g, CodedGroup& to) {
    const i64 side = g / 4, quarter = g % 4;
    const uint8_t *low = block + 64 * side + 32 * (quarter % 2), *high = block + 128 + 32 * side;
    const int8_t* scales = (const int8_t*)block + 192 + 8 * side + 2 * quarter;
    const int down = quarter / 2 * 4, up = quarter * 2;
    float numbers[GROUP], unit = half_at(block + 208);
    for (i64 half = 0; half < 2; half++) {
        float scale = unit * scales[half];
        for (i64 i = half * 16; i < half * 16 + 16; i++)
            numbers[i] = scale * (float)((int)((low[i] >> down & 15) | (high[i] >> up & 3) << 4) - 32);
    }
    round_numbers(numbers, unit, to);
}

INLINE void eights_of(const uint8_t* block, CodedGroup& to) {
    memcpy(to.codes, block + 2, GROUP);
    to.scale = half_at(block), to.minimum = 0;
    bool reaches = false;
    for (i64 i = 0; i < GROUP; i++) reaches |= to.codes[i] == 0x80;
    if (!reaches) return;
    float numbers[GROUP];  // products take codes from -127 on
    for (i64 i = 0; i < GROUP; i++) numbers[i] = to.scale * (int8_t)to.codes[i];
    round_numbers(numbers, to.scale, to);
}

// Group g of a row.
INLINE void read_group(i64 type, const uint8_t* row, i64 g, CodedGroup& to) {
    const uint8_t* block;
    to.minimum = 0;
    switch (type) {
        case Q4_0:
        case IQ4_NL:
            block = row + g * 18;
            nibbles(block + 2, to.codes), to.scale = half_at(block);
            return;
        case Q4_1:
            block = row + g * 20;
            nibbles(block + 4, to.codes), to.scale = half_at(block), to.minimum = half_at(block + 2) + 8 * to.scale;  // code 8 is the value 0
            return;
        case Q5_0:
            block = row + g * 22;
            nibbles(block + 6, to.codes), fifth_bits(block + 2, to.codes), to.scale = half_at(block);
            for (i64 i = 0; i < GROUP; i++) to.codes[i] -= 16;
            return;
        case Q5_1:
            block = row + g * 24;
            nibbles(block + 8, to.codes), fifth_bits(block + 4, to.codes), to.scale = half_at(block), to.minimum = half_at(block + 2);
            return;
        case Q8_0: return eights_of(row + g * 34, to);
        case Q4_K:
        case Q5_K: {
            block = row + g / 8 * (type == Q4_K ? 144 : 176);
            const uint8_t *codes = block + (type == Q4_K ? 16 : 48) + g % 8 / 2 * 32, *bits = block + 16;
            k_scales(block, g % 8, to);
            const int down = g % 2 * 4, bit = g % 8;
            for (i64 i = 0; i < GROUP; i++) to.codes[i] = codes[i] >> down & 15;
            if (type == Q4_K) to.minimum += 8 * to.scale;
            else for (i64 i = 0; i < GROUP; i++) to.codes[i] |= (bits[i] >> bit & 1) << 4;
            return;
        }
        case Q2_K: return twos(row + g / 8 * 84, g % 8, to);
        case Q3_K: return threes(row + g / 8 * 110, g % 8, to);
        case Q6_K: return sixes(row + g / 8 * 210, g % 8, to);
        case IQ4_XS: {
            block = row + g / 8 * 136;
            const int bit = g % 8, high = (block[2] | block[3] << 8) >> 2 * bit & 3;
            nibbles(block + 8 + bit * 16, to.codes);
            to.scale = half_at(block) * ((block[4 + bit / 2] >> bit % 2 * 4 & 15 | high << 4) - 32);
            return;
        }
        case MXFP4:
            block = row + g * 17;
            nibbles(block + 1, to.codes), to.scale = std::ldexp(1.0f, block[0] - 128);  // less one more, since the values are doubled
            return;
    }
}

INLINE const int8_t* values_of(i64 type) {  // of codes of 4 bits; null: the type has 8
    static const int8_t counted[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    static const int8_t normal[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    static const int8_t floats[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    switch (type) {
        case Q4_0:
        case Q4_1:
        case Q4_K: return counted;
        case IQ4_NL:
        case IQ4_XS: return normal;
        case MXFP4: return floats;
        default: return nullptr;
    }
}

// The rows of parts under each other, in 4 bits where all of them have those values, else in 8.
struct BlockParts {
    const BlockRows* parts;
    i64 groups, bits;
    mutable std::atomic<i64> broken{0};  // a part with a scale that is not finite, counted from 1

    BlockParts(const BlockRows* parts, i64 groups, i64 bits) : parts(parts), groups(groups), bits(bits) {}

    // Row n: its codes, a byte each; scales and minima, which may be null, in float16 times `unit`, a power of two.
    void row(i64 n, uint8_t* codes, uint16_t* scales, uint16_t* minima, float& unit) const {
        static thread_local std::vector<float> numbers;
        numbers.resize(2 * groups);
        float *steps = numbers.data(), *least = steps + groups, largest = 0;
        const BlockRows* part = parts;
        for (; n >= part->rows; part++) n -= part->rows;
        const uint8_t* bytes = part->bytes + (part->order ? part->order[n] : n) * part->stride;
        const int8_t* values = bits == 8 ? values_of(part->type) : nullptr;
        bool finite = true;
        for (i64 g = 0; g < groups; g++) {
            CodedGroup group;
            read_group(part->type, bytes, part->groups ? part->groups[g] : g, group);
            for (i64 i = 0; values && i < GROUP; i++) group.codes[i] = (uint8_t)values[group.codes[i]];
            memcpy(codes + g * GROUP, group.codes, GROUP);
            steps[g] = group.scale, least[g] = group.minimum;
            finite &= std::isfinite(group.scale) && std::isfinite(group.minimum);
            largest = std::max({largest, std::fabs(group.scale), minima ? std::fabs(group.minimum) : 0});
        }
        if (!finite) broken.store(part - parts + 1, std::memory_order_relaxed), largest = 0;
        int exponent;
        std::frexp(largest, &exponent);
        unit = std::ldexp(1.0f, exponent - 15);
        for (i64 g = 0; finite && g < groups; g++) {
            scales[g] = to_half(steps[g] / unit);
            if (minima) minima[g] = to_half(least[g] / unit);
        }
    }
};
