// What happens to each token by itself: norm, rotation, the write to the cache.
//
// Shapes: T tokens, E model width, H query heads, K key/value heads, D head size, B tokens in a block.
// Caches: keys [block][K][B][D], values [block][K][B / 2][D][2], two tokens side by side: both as the matrix units of AMX read them,
// and a token's few lines are near each other.
#pragma once
#include "numbers.h"

// The 16 values from `from` on, or the first `count` of them and zeros.
INLINE floats some(const bf16* from, i64 count) {
    halves x = {};
    memcpy(&x, from, std::min(count, LANES) * 2);
    return wide(x);
}

INLINE float scale_of(const bf16* x, i64 count, float eps) {  // 1 / rms
    floats squares = {};
    i64 i = 0;
    for (; i + LANES <= count; i += LANES) squares += wide(load<halves>(x + i)) * wide(load<halves>(x + i));
    if (i < count) squares += some(x + i, count - i) * some(x + i, count - i);
    float sum = 0;
    for (int j = 0; j < LANES; j++) sum += squares[j];
    return 1.0f / std::sqrt(sum / count + eps);
}

INLINE void norm_token(const bf16* x, const bf16* gain, bf16* y, i64 E, float eps) {
    float scale = scale_of(x, E, eps);
    i64 i = 0;
    for (; i + LANES <= E; i += LANES) store(y + i, narrow(wide(load<halves>(x + i)) * scale * wide(load<halves>(gain + i))));
    if (i == E) return;
    halves rest = narrow(some(x + i, E - i) * scale * some(gain + i, E - i));
    memcpy(y + i, &rest, (E - i) * 2);
}

INLINE void rotate_head(const bf16* x, bf16* to, const bf16* gain, const float* cos, const float* sin, i64 D, float eps) {
    float scale = gain ? scale_of(x, D, eps) : 1.0f;
    if (!cos) {
        memcpy(to, x, D * 2);
        return;
    }
    for (i64 i = 0; i < D / 2; i += LANES) {
        floats a = wide(load<halves>(x + i)), b = wide(load<halves>(x + i + D / 2)), c = load<floats>(cos + i), s = load<floats>(sin + i);
        if (gain) a *= scale * wide(load<halves>(gain + i)), b *= scale * wide(load<halves>(gain + i + D / 2));
        store(to + i, narrow(a * c - b * s));
        store(to + i + D / 2, narrow(b * c + a * s));
    }
}

struct Heads {
    i64 H, K, D;
    i64 width() const { return (H + 2 * K) * D; }  // of a token's queries, keys and values, side by side
};

struct Cache {  // of one layer
    bf16 *keys, *values;
    i64 block_size;
};

struct Turns {  // null where there is nothing to do: no gains, or no rotation
    const bf16 *q_gain, *k_gain;
    const float *cos, *sin;
    float eps;
};

// Values of the token at place `at` of a block. Number by number: its neighbour may be in another thread's hands.
INLINE void write_values(const bf16* v, bf16* block, i64 at, i64 D) {
    bf16* to = block + at / 2 * 2 * D + at % 2;
    for (i64 i = 0; i < D; i++) to[2 * i] = v[i];
}

INLINE void write_two_values(const bf16* first, const bf16* second, bf16* block, i64 at, i64 D) {
    for (i64 i = 0; i < D; i += LANES)
        store(block + at * D + 2 * i, __builtin_convertvector(load<halves>(first + i), words) |
                                          __builtin_convertvector(load<halves>(second + i), words) << 16);
}

// T tokens of a step: turns their queries where they are, and writes their keys and values to the cache.
INLINE void write_tokens(bf16* qkv, const Heads& heads, const Cache& cache, const Turns& turns, const i64* positions, const i64* slots, i64 T) {
    i64 H = heads.H, K = heads.K, D = heads.D, B = cache.block_size;
    for (i64 t = 0; t < T; t++) {
        bf16 *q = qkv + t * heads.width(), *keys = cache.keys + (slots[t] / B * K * B + slots[t] % B) * D;
        const float *cos = turns.cos ? turns.cos + positions[t] * D : nullptr, *sin = turns.sin ? turns.sin + positions[t] * D : nullptr;
        for (i64 h = 0; h < (cos ? H : 0); h++) rotate_head(q + h * D, q + h * D, turns.q_gain, cos, sin, D, turns.eps);
        for (i64 k = 0; k < K; k++) rotate_head(q + (H + k) * D, keys + k * B * D, turns.k_gain, cos, sin, D, turns.eps);
    }
    for (i64 t = 0, count; t < T; t += count) {
        i64 at = slots[t] % B;
        count = at % 2 == 0 && t + 1 < T && slots[t + 1] == slots[t] + 1 ? 2 : 1;
        const bf16* v = qkv + t * heads.width() + (H + K) * D;
        for (i64 k = 0; k < K; k++) {
            bf16* block = cache.values + (slots[t] / B * K + k) * B * D;
            if (count == 2)
                write_two_values(v + k * D, v + heads.width() + k * D, block, at, D);
            else
                write_values(v + k * D, block, at, D);
        }
    }
}
