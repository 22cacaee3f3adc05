// What happens to each token by itself: its vector, norms, rotation, the write to the cache.
//
// Shapes: T tokens, E model width, H query heads, K key/value heads, D head size, B tokens in a block,
// R columns of a head that are rotated, the first ones, P positions.
// Caches: keys [block][K][B][D], values [block][K][B / 2][D][2], two tokens side by side: both as the matrix units of AMX read them,
// and a token's few lines are near each other. In 8 bits both are [block][K] pieces, each with the codes [B][D] of its tokens and then
// the scales of their groups, bfloat16 [B][G]: see kv_cache.py. So a head's part of a block is whole cache lines there, too.
#pragma once
#include "numbers.h"

// The 16 values from `from` on, or the first `count` of them and zeros.
template <class Number>
INLINE floats some(const Number* from, i64 count) {
    Number x[LANES] = {};
    memcpy(x, from, std::min(count, LANES) * sizeof(Number));
    return wide(load<Numbers<Number>>(x));
}

template <class Number>
INLINE floats get(const Number* from, i64 count) {
    return count >= LANES ? wide(load<Numbers<Number>>(from)) : some(from, count);
}

INLINE void put(bf16* to, floats x, i64 count) {
    halves y = narrow(x);
    if (count >= LANES) return store(to, y);
    memcpy(to, &y, count * 2);
}

// The same with vectors of any length: the numbers from `from` on, or the first `count` of them and zeros.
template <class Vector>
INLINE Vector numbers(const float* from, i64 count) {
    if (count * 4 >= (i64)sizeof(Vector)) return load<Vector>(from);
    Vector x = {};
    memcpy(&x, from, count * 4);
    return x;
}

template <class Vector>
INLINE Vector numbers(const bf16* from, i64 count) {
    typename Like<Vector>::halves x = {};
    if (count * 4 >= (i64)sizeof(Vector))
        x = load<typename Like<Vector>::halves>(from);
    else
        memcpy(&x, from, count * 2);
    return (Vector)(__builtin_convertvector(x, typename Like<Vector>::words) << 16);
}

template <class Vector>
INLINE void keep_numbers(float* to, Vector x, i64 count) {
    if (count * 4 >= (i64)sizeof x) return store(to, x);
    memcpy(to, &x, count * 4);
}

template <class Vector>
INLINE void keep_numbers(bf16* to, Vector x, i64 count) {  // rounded as `narrow` does
    typename Like<Vector>::words bits = (typename Like<Vector>::words)x;
    auto y = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, typename Like<Vector>::halves);
    if (count * 4 >= (i64)sizeof x) return store(to, y);
    memcpy(to, &y, count * 2);
}

template <class Vector>
INLINE float total(Vector x) {
    float sum = 0;
    for (size_t j = 0; j < sizeof x / 4; j++) sum += x[j];
    return sum;
}

struct Norm {  // without gains nothing is normed
    const float *gain = nullptr, *bias = nullptr;
    bool centred = false;  // layer norm; else RMS norm
    float eps = 0;
    Norm from(i64 place) const { return gain ? Norm{gain + place, bias ? bias + place : nullptr, centred, eps} : *this; }
};

struct Moments {
    float mean = 0, scale = 1;  // 1 / standard deviation, or 1 / rms
};

INLINE float sum_of(floats x) {
    float sum = 0;
    for (int j = 0; j < LANES; j++) sum += x[j];
    return sum;
}

template <class Number>
INLINE Moments moments_of(const Number* x, i64 count, const Norm& norm) {
    Moments m;
    if (norm.centred) {
        floats sums = {};
        for (i64 i = 0; i < count; i += LANES) sums += get(x + i, count - i);
        m.mean = sum_of(sums) / count;
    }
    floats squares = {};
    for (i64 i = 0; i < count; i += LANES) {
        floats y = get(x + i, count - i) - m.mean;
        if (count - i < LANES) y = choose(COUNT < (int32_t)(count - i), y, floats{});
        squares += y * y;
    }
    m.scale = 1.0f / std::sqrt(sum_of(squares) / count + norm.eps);
    return m;
}

// y = norm(x), or x where there is no norm. y may be x.
INLINE void norm_token(const bf16* x, const Norm& norm, bf16* y, i64 E) {
    if (!norm.gain) {
        if (x != y) memcpy(y, x, E * 2);
        return;
    }
    Moments m = moments_of(x, E, norm);
    for (i64 i = 0; i < E; i += LANES) {
        floats z = (get(x + i, E - i) - m.mean) * m.scale * get(norm.gain + i, E - i);
        put(y + i, norm.bias ? z + get(norm.bias + i, E - i) : z, E - i);
    }
}

// residual += scale * norm(update)
INLINE void add_token(bf16* residual, const bf16* update, const Norm& norm, float scale, i64 E) {
    Moments m = moments_of(update, E, norm);
    for (i64 i = 0; i < E; i += LANES) {
        floats z = (get(update + i, E - i) - m.mean) * m.scale * get(norm.gain + i, E - i);
        if (norm.bias) z += get(norm.bias + i, E - i);
        put(residual + i, get(residual + i, E - i) + z * scale, E - i);
    }
}

// x *= factor
INLINE void scale_token(bf16* x, float factor, i64 E) {
    for (i64 i = 0; i < E; i += LANES) put(x + i, get(x + i, E - i) * factor, E - i);
}

// x *= factors
INLINE void modulate_token(bf16* x, const bf16* factors, i64 E) {
    for (i64 i = 0; i < E; i += LANES) put(x + i, get(x + i, E - i) * get(factors + i, E - i), E - i);
}

// What happens to a token between two parts of a layer: residual += scale * update_norm(update), unless the product has added it;
// residual = sum_norm(residual) * after; y = next_norm(residual). y may be the update.
struct Joint {
    Norm update, sum, next;
    float scale = 1, after = 1;
};

INLINE void join_token(bf16* residual, const bf16* update, bf16* y, const Joint& joint, i64 E) {
    if (joint.update.gain) add_token(residual, update, joint.update, joint.scale, E);
    if (joint.sum.gain) norm_token(residual, joint.sum, residual, E);
    if (joint.after != 1) scale_token(residual, joint.after, E);
    norm_token(residual, joint.next, y, E);
}

// A token's vector, scaled, plus that of its position, where positions are added.
INLINE void embed_token(const bf16* token, const float* position, float scale, bf16* to, i64 E) {
    for (i64 i = 0; i < E; i += LANES) {
        floats x = get(token + i, E - i) * scale;
        put(to + i, position ? x + get(position + i, E - i) : x, E - i);
    }
}

// In this order of products; a head's numbers from `i` on.
INLINE floats normed_head(floats x, const Norm& norm, const Moments& m, i64 i, i64 count) {
    if (!norm.gain) return x;
    x = (x - m.mean) * (m.scale * get(norm.gain + i, count));
    return norm.bias ? x + get(norm.bias + i, count) : x;
}

INLINE void put(float* to, floats x, i64 count) { keep_numbers(to, x, count); }

// Norms a head, rotates its first R columns, and multiplies it by `scale`. `to` may be x.
template <class Number>
INLINE void turn_head(const bf16* x, Number* to, const Norm& norm, const Moments& m, const float* cos, const float* sin, float scale, i64 R, i64 D) {
    for (i64 i = 0, half = R / 2; i < half; i += LANES) {
        i64 count = half - i;
        floats a = normed_head(get(x + i, count), norm, m, i, count), c = get(cos + i, count), s = get(sin + i, count);
        floats b = normed_head(get(x + half + i, count), norm, m, half + i, count);
        put(to + i, (a * c - b * s) * scale, count);
        put(to + half + i, (b * c + a * s) * scale, count);
    }
    for (i64 i = R; i < D; i += LANES) put(to + i, normed_head(get(x + i, D - i), norm, m, i, D - i) * scale, D - i);
}

static const i64 MAX_HEAD = 512;

// Rotates a head, and then norms it. `to` may be x.
INLINE void turn_first(const bf16* x, bf16* to, const Norm& norm, const float* cos, const float* sin, float scale, i64 R, i64 D) {
    alignas(64) float turned[MAX_HEAD];
    turn_head(x, turned, Norm{}, Moments{}, cos, sin, 1, R, D);
    Moments m = moments_of(turned, D, norm);
    for (i64 i = 0; i < D; i += LANES) put(to + i, normed_head(get(turned + i, D - i), norm, m, i, D - i) * scale, D - i);
}

struct Heads {
    i64 H, K, D;
    bool gated = false;                                // whether numbers that gate the outputs come after the queries
    bool shared = false;                               // whether keys and values are those of another layer
    bool same = false;                                 // whether values are what keys are before their norm
    i64 keys() const { return (gated ? 2 : 1) * H * D; }  // where a token's keys begin
    i64 width() const { return keys() + 2 * K * D; }   // of a token's queries, keys and values, side by side
    i64 computed() const { return keys() + (shared ? 0 : (same ? 1 : 2) * K * D); }  // so many of them are a product
};

struct Cache {  // of one layer
    bf16 *keys, *values;
    i64 block_size;
    bool in_8_bits = false;
};

static const i64 GROUP = 32;  // numbers that share a scale, in 8 bits or 4: of a head, or columns of a matrix

struct Codes {  // of a head's tokens from some token of a block on: a number is its code times the scale of its group
    int8_t* codes;  // [tokens][D]
    bf16* scales;   // [tokens][G]
};

// Those of token `at` of a block and of those behind it. `held` are the keys or the values of a cache in 8 bits.
INLINE Codes codes_of(const bf16* held, i64 block_size, i64 block_and_head, i64 at, i64 D) {
    i64 G = ceiling(D, GROUP);
    int8_t* piece = (int8_t*)held + block_and_head * block_size * (D + 2 * G);
    return {piece + at * D, (bf16*)(piece + block_size * D) + at * G};
}

struct Turns {  // of queries and keys, and what values are normed by
    Norm q, k, v;
    bool all = false;    // one norm over all heads side by side, else over each by itself
    bool after = false;  // norms come after the rotation
    const float *cos = nullptr, *sin = nullptr;  // [P, R]
    i64 R = 0, length = 0;
    float beta = 0;  // see `query_scale_beta` of config.py
    float scale_at(i64 position) const { return R && beta ? 1 + beta * std::log(1 + (float)(position / length)) : 1; }
};

// `count` heads side by side, of a token at `position`, times `scale`.
INLINE void turn_heads(const bf16* x, i64 count, bf16* to, i64 to_stride, const Norm& norm, const Turns& turns, float scale, i64 position, i64 D) {
    if (x == to && !norm.gain && !turns.R) return;
    const float *cos = turns.cos + position * turns.R, *sin = turns.sin + position * turns.R;
    Moments m;
    if (norm.gain && turns.all) m = moments_of(x, count * D, norm);
    for (i64 h = 0; h < count; h++) {
        if (turns.after) {
            turn_first(x + h * D, to + h * to_stride, norm, cos, sin, scale, turns.R, D);
            continue;
        }
        if (norm.gain && !turns.all) m = moments_of(x + h * D, D, norm);
        turn_head(x + h * D, to + h * to_stride, norm.from(turns.all ? h * D : 0), m, cos, sin, scale, turns.R, D);
    }
}

// A token's queries where they are. Its keys are left to the caller; its values, under their norm, come to their place behind them.
INLINE void turn_queries(bf16* q, const Heads& heads, const Turns& turns, i64 position) {
    bf16 *k = q + heads.keys(), *v = k + heads.K * heads.D;
    turn_heads(q, heads.H, q, heads.D, turns.q, turns, turns.scale_at(position), position, heads.D);
    if (!heads.shared) turn_heads(heads.same ? k : v, heads.K, v, heads.D, turns.v, Turns{}, 1, 0, heads.D);
}

// Values of the token at place `at` of a block. Number by number: its neighbour may be in another thread's hands.
INLINE void write_values(const bf16* v, bf16* block, i64 at, i64 D) {
    bf16* to = block + at / 2 * 2 * D + at % 2;
    for (i64 i = 0; i < D; i++) to[2 * i] = v[i];
}

INLINE void write_two_values(const bf16* first, const bf16* second, bf16* block, i64 at, i64 D) {
    i64 i = 0;
    for (; i + LANES <= D; i += LANES)
        store(block + at * D + 2 * i, __builtin_convertvector(load<halves>(first + i), words) |
                                          __builtin_convertvector(load<halves>(second + i), words) << 16);
    for (bf16* to = block + at * D; i < D; i++) to[2 * i] = first[i], to[2 * i + 1] = second[i];
}

// The scale of a group whose largest magnitude has these bits: rounded up, NaN where a number is not finite.
INLINE bf16 scale_of(uint32_t largest) {
    if (largest >= 0x7f800000) return 0x7fc0;
    float scale;
    memcpy(&scale, &largest, 4);
    scale /= 127;
    memcpy(&largest, &scale, 4);
    return (largest + 0xffff) >> 16;
}

// A head of one token, as `encode` of kv_cache.py. Only its own bytes are written: their neighbours may be in another thread's hands.
INLINE void encode_head(const bf16* x, const Codes& to, i64 D) {
    for (i64 g = 0; g * GROUP < D; g++) {
        i64 count = std::min(GROUP, D - g * GROUP);
        alignas(64) float group[GROUP] = {};
        for (i64 i = 0; i < count; i += LANES) store(group + i, get(x + g * GROUP + i, count - i));
        uint32_t largest = 0;
        for (i64 i = 0; i < GROUP; i += LANES) {
            words magnitudes = (words)magnitude(load<floats>(group + i));
            for (int j = 0; j < LANES; j++) largest = std::max<uint32_t>(largest, magnitudes[j]);
        }
        float scale = wide(to.scales[g] = scale_of(largest));
        int8_t codes[GROUP];
        for (i64 i = 0; i < GROUP; i += LANES) {
            // 1.5 * 2^23: the low bits are the nearest whole number; those of 0 / 0 are 0
            words places = (words)(load<floats>(group + i) / scale + 12582912.0f);
            store(codes + i, __builtin_convertvector(places, Numbers<int8_t>));
        }
        memcpy(to.codes + g * GROUP, codes, count);
    }
}

// `write_tokens` for a cache in 8 bits. Keys become bfloat16 before, as they do in other caches.
INLINE void encode_tokens(bf16* qkv, const Heads& heads, const Cache& cache, const Turns& turns, const i64* positions, const i64* slots, i64 T) {
    i64 K = heads.K, D = heads.D, B = cache.block_size;
    for (i64 t = 0; t < T; t++) {
        bf16 *q = qkv + t * heads.width(), *k = q + heads.keys(), *v = k + K * D;
        turn_queries(q, heads, turns, positions[t]);
        if (heads.shared) continue;
        turn_heads(k, K, k, D, turns.k, turns, 1, positions[t], D);
        for (i64 head = 0; head < K; head++) {
            i64 piece = slots[t] / B * K + head;
            encode_head(k + head * D, codes_of(cache.keys, B, piece, slots[t] % B, D), D);
            encode_head(v + head * D, codes_of(cache.values, B, piece, slots[t] % B, D), D);
        }
    }
}

// T tokens of a step: turns their queries where they are, and writes their keys and values to the cache.
INLINE void write_tokens(bf16* qkv, const Heads& heads, const Cache& cache, const Turns& turns, const i64* positions, const i64* slots, i64 T) {
    if (cache.in_8_bits) return encode_tokens(qkv, heads, cache, turns, positions, slots, T);
    i64 K = heads.K, D = heads.D, B = cache.block_size;
    for (i64 t = 0; t < T; t++) {
        bf16 *q = qkv + t * heads.width(), *keys = cache.keys + (slots[t] / B * K * B + slots[t] % B) * D;
        turn_queries(q, heads, turns, positions[t]);
        if (!heads.shared) turn_heads(q + heads.keys(), K, keys, B * D, turns.k, turns, 1, positions[t], D);
    }
    for (i64 t = 0, count; t < T && !heads.shared; t += count) {
        i64 at = slots[t] % B;
        count = at % 2 == 0 && t + 1 < T && slots[t + 1] == slots[t] + 1 ? 2 : 1;
        const bf16* v = qkv + t * heads.width() + heads.keys() + K * D;
        for (i64 k = 0; k < K; k++) {
            bf16* block = cache.values + (slots[t] / B * K + k) * B * D;
            if (count == 2)
                write_two_values(v + k * D, v + heads.width() + k * D, block, at, D);
            else
                write_values(v + k * D, block, at, D);
        }
    }
}
