// bfloat16 in memory, float32 in registers, 16 values at a time: each target splits them into the vectors that it has.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;
typedef int64_t i64;

static const i64 LANES = 16;
typedef float fours __attribute__((vector_size(16)));
typedef float eights __attribute__((vector_size(32)));
typedef float floats __attribute__((vector_size(LANES * 4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));
typedef bf16 halves __attribute__((vector_size(LANES * 2)));
static const ints COUNT = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

INLINE fours add_product(fours sum, fours w, fours x) { return sum + w * x; }
INLINE floats add_product(floats sum, floats w, floats x) { return sum + w * x; }

template <class Number>
using Numbers __attribute__((vector_size(LANES * sizeof(Number)))) = Number;

INLINE float wide(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

template <class Vector, class Number>
INLINE Vector load(const Number* from) {
    Vector vector;
    memcpy(&vector, from, sizeof vector);
    return vector;
}

template <class Vector, class Number>
INLINE void store(Number* to, Vector vector) {
    memcpy(to, &vector, sizeof vector);
}

INLINE floats wide(floats x) { return x; }
INLINE floats wide(halves x) { return (floats)(__builtin_convertvector(x, words) << 16); }

INLINE halves narrow(floats x) {  // to the nearest, ties to even; NaN that come from bfloat16 or from arithmetic stay NaN
    words bits = (words)x;
    return __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, halves);
}

INLINE bf16 narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

// Vectors of another length, in loops where each number counts: of those that a target does not have GCC keeps some in memory.
template <int WIDTH>
struct Lanes {
    typedef float floats __attribute__((vector_size(WIDTH * 4)));
    typedef int32_t ints __attribute__((vector_size(WIDTH * 4)));
    typedef uint32_t words __attribute__((vector_size(WIDTH * 4)));
    typedef bf16 halves __attribute__((vector_size(WIDTH * 2)));
    typedef int16_t shorts __attribute__((vector_size(WIDTH * 2)));
    typedef int8_t bytes __attribute__((vector_size(WIDTH)));
    typedef uint64_t longs __attribute__((vector_size(WIDTH * 8)));
    typedef double doubles __attribute__((vector_size(WIDTH * 8)));
};

template <class Vector>
using Like = Lanes<sizeof(Vector) / 4>;

// Of pairs of bfloat16, the first in the low halves: the first ones, the second ones.
template <class Vector>
INLINE Vector first_of(Vector pairs) {
    return (Vector)((typename Like<Vector>::words)pairs << 16);
}

template <class Vector>
INLINE Vector second_of(Vector pairs) {
    return (Vector)((typename Like<Vector>::words)pairs & 0xffff0000u);
}

// a where the bits of `where` are set, as a comparison sets them, else b. GCC takes a choice with ?: apart into single numbers.
template <class Bits, class Vector>
INLINE Vector choose(Bits where, Vector a, Vector b) {
    return (Vector)(((Bits)a & where) | ((Bits)b & ~where));
}

template <class Vector>
INLINE Vector larger(Vector a, Vector b) {
    return a > b ? a : b;
}

template <class Vector>
INLINE Vector magnitude(Vector x) {
    return (Vector)((typename Like<Vector>::words)x & 0x7fffffff);
}

template <class Vector = floats>
INLINE Vector all(float x) {
    return x - Vector{};
}

template <class Vector>
INLINE Vector exponential(Vector x) {  // x <= 0, relative error below 1e-5; about 1e-38 for what is smaller than -87
    typedef typename Like<Vector>::words bits;
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    Vector y = larger(all<Vector>(-87.0f), x) * 1.44269504f;  // in this order NaN stays NaN
    Vector shifted = y + shift, f = y - (shifted - shift);
    Vector p = f * 9.58285e-3f + 5.590642e-2f;  // 2^f for |f| <= 1/2, to 2.9e-6
    p = p * f + 2.4024099e-1f;
    p = p * f + 6.9312419e-1f;
    p = p * f + 1.0f;
    return (Vector)((bits)p + ((bits)shifted << 23));  // the low bits of `shifted` are the whole part of y
}

template <class Vector>
INLINE Vector gated_by(Vector x, Vector z) {  // x times the sigmoid of z, without overflow on either side
    Vector e = exponential(-magnitude(z));
    return x * choose(z >= 0.0f, all<Vector>(1.0f), e) / (e + 1.0f);
}

template <class Vector>
INLINE Vector silu(Vector x) {
    return gated_by(x, x);
}

template <class Vector>
INLINE Vector gelu_tanh(Vector x) {  // x / 2 * (1 + tanh(z)) is x times the sigmoid of 2 z
    return gated_by(x, (x + x * x * x * 0.044715f) * 1.5957691216f);
}

template <class Vector>
INLINE Vector gelu(Vector x) {  // x times the normal distribution; its tail is 7.1.26 of Abramowitz & Stegun, to 1e-7
    Vector z = magnitude(x) * 0.70710678f, k = 1.0f / (z * 0.3275911f + 1.0f);
    Vector p = k * 1.061405429f - 1.453152027f;
    p = p * k + 1.421413741f;
    p = p * k - 0.284496736f;
    p = p * k + 0.254829592f;
    Vector tail = p * k * exponential(-z * z) * 0.5f;
    return x * choose(x >= 0.0f, 1.0f - tail, tail);
}

template <class Vector>
INLINE Vector relu(Vector x) {
    return choose(x < 0.0f, Vector{}, x);  // in this order NaN stays NaN
}

INLINE i64 ceiling(i64 a, i64 b) { return (a + b - 1) / b; }

#ifdef __x86_64__
#include "x86.h"
#else
#include "arm.h"
#endif
