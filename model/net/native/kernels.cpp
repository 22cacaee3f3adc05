// What a bfloat16 decoder does between its matrix products, on a CPU: plain C ABI, no torch headers.
//
// Values are bfloat16 in memory and float32 in registers. Each function exists once for each instruction set; `attend_choose`
// picks one by name, and `attend_best` says which is the best that this CPU has. Threads are OpenMP's, as torch's are.
//
// Shapes: T tokens, E model width, H query heads, K key/value heads, G = H / K, D head size, B tokens in a block.
// Caches: keys [block][K][B][D], values [block][K][D][B]: both as the matrix units of AMX read them.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;
typedef int64_t i64;

static const int LANES = 16;  // queries that are computed together; each sees its own number of keys
static const int KEYS = 32;   // keys of one step: what one tile of values holds

INLINE float wide(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE bf16 narrow(float x) {  // to the nearest, ties to even; NaN stays NaN
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits += 0x7fff + ((bits >> 16) & 1);
    return x == x ? (bf16)(bits >> 16) : (bf16)0x7fc0;
}

INLINE float exponential(float x) {  // x <= 0, relative error below 1e-5; about 1e-38 for what is smaller than -87
    x = std::max(x, -87.0f);
    float k = nearbyintf(x * 1.44269504f);
    float r = x - k * 0.693359375f + k * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)k + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return p * scale;
}

// --- norm, activation, rotation: one token each

template <bool ADD>
INLINE void norm_token(const bf16* x, bf16* r, const bf16* gain, bf16* y, i64 E, float eps) {
    float sum = 0;
    for (i64 i = 0; i < E; i++) {
        if (ADD) r[i] = narrow(wide(r[i]) + wide(x[i]));
        sum += wide(r[i]) * wide(r[i]);
    }
    float scale = 1.0f / std::sqrt(sum / E + eps);
    for (i64 i = 0; i < E; i++) y[i] = narrow(wide(r[i]) * scale * wide(gain[i]));
}

INLINE void silu_token(const bf16* gate, const bf16* up, bf16* y, i64 M) {
    for (i64 i = 0; i < M; i++) {
        float x = wide(gate[i]), e = exponential(-std::abs(x));  // the sigmoid without overflow on either side
        y[i] = narrow(x * (x >= 0 ? 1.0f : e) / (1.0f + e) * wide(up[i]));
    }
}

INLINE void rotate_head(bf16* x, bf16* to, const bf16* gain, const float* cos, const float* sin, i64 D, float eps) {
    float scale = 1.0f, sum = 0;
    if (gain) {
        for (i64 i = 0; i < D; i++) sum += wide(x[i]) * wide(x[i]);
        scale = 1.0f / std::sqrt(sum / D + eps);
    }
    if (!cos) {
        memcpy(to, x, D * 2);
        return;
    }
    for (i64 i = 0; i < D / 2; i++) {
        float a = wide(x[i]), b = wide(x[i + D / 2]);
        if (gain) a *= scale * wide(gain[i]), b *= scale * wide(gain[i + D / 2]);
        to[i] = narrow(a * cos[i] - b * sin[i]);
        to[i + D / 2] = narrow(b * cos[i] + a * sin[i]);
    }
}

struct Projected {  // [T, (H + 2K) D]: queries, keys and values of each token, side by side
    bf16* qkv;
    i64 H, K, D;
    i64 stride() const { return (H + 2 * K) * D; }
};

struct Cache {
    bf16 *keys, *values;
    i64 block_size;
};

INLINE void write_token(const Projected& p, const Cache& cache, i64 t, i64 slot, const bf16* q_gain, const bf16* k_gain,
                        const float* cos, const float* sin, float eps) {
    bf16* row = p.qkv + t * p.stride();
    i64 B = cache.block_size, block = slot / B, at = slot % B;
    for (i64 h = 0; h < (cos ? p.H : 0); h++) rotate_head(row + h * p.D, row + h * p.D, q_gain, cos, sin, p.D, eps);
    for (i64 k = 0; k < p.K; k++) {
        bf16* head = cache.keys + ((block * p.K + k) * B + at) * p.D;
        rotate_head(row + (p.H + k) * p.D, head, k_gain, cos, sin, p.D, eps);
        const bf16* v = row + (p.H + p.K + k) * p.D;
        bf16* column = cache.values + (block * p.K + k) * p.D * B + at;
        for (i64 i = 0; i < p.D; i++) column[i * B] = v[i];
    }
}

// --- attention: up to LANES queries that share a key/value head

struct Tile {  // lane j is query head j % G of token first + j / G
    const bf16* q;  // of the first token and the first of the group's heads
    bf16* out;
    i64 q_stride, out_stride, lanes, G, D;
    int32_t visible[LANES];  // keys that each lane sees
    i64 most;            // the largest of them
    const i64* blocks;
    float scale;
};

INLINE const bf16* query(const Tile& t, i64 lane) { return t.q + lane / t.G * t.q_stride + lane % t.G * t.D; }

struct Softmax {  // running, for each lane
    float highest[LANES], sum[LANES], factor[LANES];
    bool rescale;
};

INLINE void start(Softmax& s) {
    for (int j = 0; j < LANES; j++) s.highest[j] = -INFINITY, s.sum[j] = 0;
}

// Scores [KEYS][LANES] become weights; the sums so far are scaled to the new highest score.
INLINE void advance(Softmax& s, const Tile& t, float* scores, i64 from) {
    float limit[LANES];
    for (int j = 0; j < LANES; j++) limit[j] = (float)(t.visible[j] - from), s.factor[j] = s.highest[j];
    for (int n = 0; n < KEYS; n++)
        for (int j = 0; j < LANES; j++) {
            float x = scores[n * LANES + j] * t.scale;
            scores[n * LANES + j] = x = (float)n < limit[j] ? x : -INFINITY;
            s.highest[j] = std::max(s.highest[j], x);
        }
    bool same = true;
    for (int j = 0; j < LANES; j++) same &= s.factor[j] == s.highest[j];
    s.rescale = !same;
    for (int j = 0; j < LANES; j++) s.sum[j] *= s.factor[j] = exponential(s.factor[j] - s.highest[j]);
    for (int n = 0; n < KEYS; n++)
        for (int j = 0; j < LANES; j++) {
            float x = scores[n * LANES + j], w = exponential(x - s.highest[j]);
            scores[n * LANES + j] = w = x == -INFINITY ? 0.0f : w;
            s.sum[j] += w;
        }
}

INLINE void finish(const Tile& t, const Softmax& s, const float* sums) {  // sums [D][LANES]
    for (i64 j = 0; j < t.lanes; j++) {
        bf16* to = t.out + j / t.G * t.out_stride + j % t.G * t.D;
        float share = 1.0f / s.sum[j];
        for (i64 i = 0; i < t.D; i++) to[i] = narrow(sums[i * LANES + j] * share);
    }
}

struct Past {  // KEYS keys and values as they lie in one block; `known` of them are seen by a lane
    const bf16 *keys, *values;
    i64 stride, known;  // values of one dimension to the next
};

INLINE Past past_of(const Tile& t, const Cache& cache, i64 head, i64 K, i64 from, bf16* copy) {
    i64 B = cache.block_size, block = t.blocks[from / B] * K + head, at = from % B;
    Past past = {cache.keys + (block * B + at) * t.D, cache.values + block * t.D * B + at, B, std::min<i64>(KEYS, t.most - from)};
    if (past.known == KEYS) return past;
    // Values that no lane sees are not read: what an earlier owner of the block left there may be NaN.
    for (i64 i = 0; i < t.D; i++)
        for (int n = 0; n < KEYS; n++) copy[i * KEYS + n] = n < past.known ? past.values[i * B + n] : 0;
    return {past.keys, copy, KEYS, past.known};
}

static const i64 MAX_HEAD = 256;

INLINE void attend_tile(const Tile& t, const Cache& cache, i64 head, i64 K) {
    alignas(64) float sums[MAX_HEAD * LANES] = {}, scores[KEYS * LANES], q[MAX_HEAD * LANES] = {};
    alignas(64) bf16 copy[MAX_HEAD * KEYS];
    for (i64 j = 0; j < t.lanes; j++)
        for (i64 i = 0; i < t.D; i++) q[i * LANES + j] = wide(query(t, j)[i]);
    Softmax s;
    start(s);
    for (i64 from = 0; from < t.most; from += KEYS) {
        Past past = past_of(t, cache, head, K, from, copy);
        for (i64 n = 0; n < KEYS; n++) {
            float sum[LANES] = {};
            for (i64 i = 0; i < (n < past.known ? t.D : 0); i++)
                for (int j = 0; j < LANES; j++) sum[j] += wide(past.keys[n * t.D + i]) * q[i * LANES + j];
            for (int j = 0; j < LANES; j++) scores[n * LANES + j] = sum[j];
        }
        advance(s, t, scores, from);
        for (i64 i = 0; i < t.D; i++) {
            float sum[LANES];
            for (int j = 0; j < LANES; j++) sum[j] = sums[i * LANES + j] * s.factor[j];
            for (int n = 0; n < KEYS; n++)
                for (int j = 0; j < LANES; j++) sum[j] += wide(past.values[i * past.stride + n]) * scores[n * LANES + j];
            for (int j = 0; j < LANES; j++) sums[i * LANES + j] = sum[j];
        }
    }
    finish(t, s, sums);
}

// --- the same with AMX: scores = K Qᵀ and sums = Vᵀ P, both read as they lie in the cache

#define AVX2 "avx2,fma,bmi2"
#define AVX512 AVX2 ",avx512f,avx512bw,avx512dq,avx512vl,avx512cd,prefer-vector-width=512"
#define AMX AVX512 ",avx512bf16,amx-tile,amx-bf16"

struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

__attribute__((target(AMX))) static void attend_tile_amx(const Tile& t, const Cache& cache, i64 head, i64 K) {
    alignas(64) float sums[MAX_HEAD * LANES], scores[KEYS * LANES];
    alignas(64) uint32_t q[MAX_HEAD / 2 * LANES], weights[KEYS / 2 * LANES];
    alignas(64) bf16 copy[MAX_HEAD * KEYS];
    memset(sums, 0, t.D * LANES * 4);
    for (i64 i = 0; i < t.D / 2; i++) _mm512_store_si512(q + i * LANES, _mm512_setzero_si512());
    for (i64 j = 0; j < t.lanes; j++)
        for (i64 i = 0; i < t.D / 2; i++) memcpy(q + i * LANES + j, query(t, j) + 2 * i, 4);
    __m512 highest = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps(), scale = _mm512_set1_ps(t.scale);
    __m512i visible = _mm512_loadu_si512(t.visible);
    for (i64 from = 0; from < t.most; from += KEYS) {
        Past past = past_of(t, cache, head, K, from, copy);
        int parts = past.known > 16 ? 2 : 1;
        for (int part = 0; part < parts; part++) {
            _tile_zero(0);
            for (i64 i = 0; i < t.D; i += 32) {
                _tile_loadd(1, past.keys + part * 16 * t.D + i, t.D * 2);
                _tile_loadd(2, q + i / 2 * LANES, LANES * 4);
                _tile_dpbf16ps(0, 1, 2);
            }
            _tile_stored(0, scores + part * 16 * LANES, LANES * 4);
        }
        __m512 before = highest;
        __m512i place = _mm512_set1_epi32((int)from);
        for (int n = 0; n < parts * 16; n++) {
            __mmask16 seen = _mm512_cmplt_epi32_mask(_mm512_add_epi32(place, _mm512_set1_epi32(n)), visible);
            __m512 x = _mm512_mul_ps(_mm512_load_ps(scores + n * LANES), scale);
            x = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, x);
            highest = _mm512_max_ps(highest, x);
            _mm512_store_ps(scores + n * LANES, x);
        }
        if (_mm512_cmpneq_ps_mask(before, highest)) {
            alignas(64) float factor[LANES], high[LANES];
            _mm512_store_ps(factor, before), _mm512_store_ps(high, highest);
            for (int j = 0; j < LANES; j++) factor[j] = exponential(factor[j] - high[j]);
            __m512 f = _mm512_load_ps(factor);
            sum = _mm512_mul_ps(sum, f);
            for (i64 i = 0; i < t.D; i++) _mm512_store_ps(sums + i * LANES, _mm512_mul_ps(_mm512_load_ps(sums + i * LANES), f));
        }
        alignas(64) float high[LANES];
        _mm512_store_ps(high, highest);
        for (int n = 0; n < parts * 16; n++) {
            __mmask16 seen = _mm512_cmpneq_ps_mask(_mm512_load_ps(scores + n * LANES), _mm512_set1_ps(-INFINITY));
            for (int j = 0; j < LANES; j++) scores[n * LANES + j] = exponential(scores[n * LANES + j] - high[j]);
            __m512 w = _mm512_maskz_mov_ps(seen, _mm512_load_ps(scores + n * LANES));
            sum = _mm512_add_ps(sum, w);
            _mm512_store_ps(scores + n * LANES, w);
        }
        for (int n = parts * 16; n < KEYS; n++) _mm512_store_ps(scores + n * LANES, _mm512_setzero_ps());
        for (int n = 0; n < KEYS; n += 2) {  // two keys' weights in one 32-bit lane: the order that the matrix unit wants
            __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(scores + n * LANES)));
            __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(scores + (n + 1) * LANES)));
            _mm512_store_si512(weights + n / 2 * LANES, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
        _tile_loadd(2, weights, LANES * 4);
        for (i64 i = 0; i < t.D; i += 16) {
            _tile_loadd(0, sums + i * LANES, LANES * 4);
            _tile_loadd(1, past.values + i * past.stride, past.stride * 2);
            _tile_dpbf16ps(0, 1, 2);
            _tile_stored(0, sums + i * LANES, LANES * 4);
        }
    }
    Softmax s;
    _mm512_storeu_ps(s.sum, sum);
    finish(t, s, sums);
}

__attribute__((target(AMX))) static void begin_amx() {
    TileShapes shapes;
    for (int tile = 0; tile < 3; tile++) shapes.rows[tile] = 16, shapes.row_bytes[tile] = 64;
    __asm__ volatile("" : : "r"(&shapes) : "memory");  // GCC 12 believes that only the first 8 bytes are read
    _tile_loadconfig(&shapes);
}

__attribute__((target(AMX))) static void end_amx() { _tile_release(); }

// --- a step's tokens: `rows` requests, each with tokens start .. start + count - 1

struct Step {
    const i64 *starts, *counts, *blocks;
    i64 rows, width;  // the block table is [rows, width]
};

struct Work {
    i64 row, token, first;  // the row, the tile's first token in the step and in the row
};

static std::vector<Work> work_of(const Step& step, i64 tokens_of_tile) {
    std::vector<Work> all;
    for (i64 row = 0, token = 0; row < step.rows; token += step.counts[row++])
        for (i64 first = 0; first < step.counts[row]; first += tokens_of_tile) all.push_back({row, token + first, first});
    std::reverse(all.begin(), all.end());  // the longest first: of a prompt its end
    return all;
}

static Tile tile_of(const Step& step, const Work& work, const Projected& p, bf16* out, i64 head, i64 tokens_of_tile, float scale) {
    Tile t;
    t.G = p.H / p.K, t.D = p.D, t.scale = scale;
    t.q_stride = p.stride(), t.out_stride = p.H * p.D;
    t.q = p.qkv + work.token * t.q_stride + head * t.G * p.D;
    t.out = out + work.token * t.out_stride + head * t.G * p.D;
    i64 tokens = std::min(tokens_of_tile, step.counts[work.row] - work.first), before = step.starts[work.row] + work.first;
    t.lanes = tokens * t.G, t.most = before + tokens;
    for (i64 j = 0; j < LANES; j++) t.visible[j] = (int32_t)(before + std::min(j / t.G, tokens - 1) + 1);
    t.blocks = step.blocks + work.row * step.width;
    return t;
}

template <void (*TILE)(const Tile&, const Cache&, i64, i64), void (*BEGIN)(), void (*END)()>
static void attend_all(const Step& step, const Projected& p, const Cache& cache, bf16* out, float scale) {
    i64 tokens_of_tile = LANES / (p.H / p.K);
    std::vector<Work> all = work_of(step, tokens_of_tile);
    i64 total = (i64)all.size() * p.K;
#pragma omp parallel
    {
        BEGIN();
#pragma omp for schedule(dynamic)
        for (i64 n = 0; n < total; n++)
            TILE(tile_of(step, all[n / p.K], p, out, n % p.K, tokens_of_tile, scale), cache, n % p.K, p.K);
        END();
    }
}

static void nothing() {}

// --- every function once for each instruction set

struct Kernels {
    void (*norm)(const bf16*, bf16*, const bf16*, bf16*, i64, i64, float);
    void (*silu)(const bf16*, bf16*, i64, i64);
    void (*write)(const Projected&, const Cache&, i64, const i64*, const i64*, const bf16*, const bf16*, const float*, const float*, float);
    void (*attend)(const Step&, const Projected&, const Cache&, bf16*, float);
};

#define VARIANT(NAME, TARGET, ATTEND)                                                                                              \
    TARGET static void norm_##NAME(const bf16* x, bf16* r, const bf16* gain, bf16* y, i64 T, i64 E, float eps) {                   \
        _Pragma("omp parallel for schedule(static) if (T >= 16)") for (i64 t = 0; t < T; t++) if (x)                               \
            norm_token<true>(x + t * E, r + t * E, gain, y + t * E, E, eps);                                                       \
        else norm_token<false>(nullptr, r + t * E, gain, y + t * E, E, eps);                                                       \
    }                                                                                                                              \
    TARGET static void silu_##NAME(const bf16* gate_up, bf16* y, i64 T, i64 M) {                                                   \
        _Pragma("omp parallel for schedule(static) if (T >= 8)") for (i64 t = 0; t < T; t++)                                       \
            silu_token(gate_up + t * 2 * M, gate_up + t * 2 * M + M, y + t * M, M);                                                \
    }                                                                                                                              \
    TARGET static void write_##NAME(const Projected& p, const Cache& cache, i64 T, const i64* positions, const i64* slots,         \
                                    const bf16* q_gain, const bf16* k_gain, const float* cos, const float* sin, float eps) {       \
        _Pragma("omp parallel for schedule(static) if (T >= 8)") for (i64 t = 0; t < T; t++)                                       \
            write_token(p, cache, t, slots[t], q_gain, k_gain, cos ? cos + positions[t] * p.D : cos, sin + positions[t] * p.D, eps);           \
    }                                                                                                                              \
    TARGET __attribute__((unused)) static void tile_##NAME(const Tile& t, const Cache& cache, i64 head, i64 K) { attend_tile(t, cache, head, K); }         \
    static const Kernels NAME = {norm_##NAME, silu_##NAME, write_##NAME, ATTEND};

#define OF(NAME) __attribute__((target(NAME)))
VARIANT(portable, , (attend_all<tile_portable, nothing, nothing>))
VARIANT(avx2, OF(AVX2), (attend_all<tile_avx2, nothing, nothing>))
VARIANT(avx512, OF(AVX512), (attend_all<tile_avx512, nothing, nothing>))
VARIANT(amx, OF(AMX), (attend_all<attend_tile_amx, begin_amx, end_amx>))

static const char* const NAMES[] = {"portable", "avx2", "avx512", "amx"};
static const Kernels* const KERNELS[] = {&portable, &avx2, &avx512, &amx};
static const Kernels* chosen = &portable;

static bool has_amx() {  // the kernel gives the tiles' state only to those who ask (Linux 5.16)
    const int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    unsigned a = 7, b = 0, c = 0, d = 0;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    return (d >> 22 & 1) && (d >> 24 & 1) && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
}

extern "C" {

// The number of the best instruction set that this CPU has.
int attend_best() {
    __builtin_cpu_init();
    bool wide512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
    if (wide512 && __builtin_cpu_supports("avx512bf16") && has_amx()) return 3;
    return wide512 ? 2 : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 1 : 0;
}

const char* attend_name(int number) { return NAMES[number]; }

void attend_choose(int number) { chosen = KERNELS[number]; }

// r += x where x is not null; y = r / rms(r) * gain. x, r, y [T, E].
void attend_norm(const bf16* x, bf16* r, const bf16* gain, bf16* y, i64 T, i64 E, float eps) { chosen->norm(x, r, gain, y, T, E, eps); }

// y = silu(gate) * up. gate_up [T, 2M], y [T, M].
void attend_silu(const bf16* gate_up, bf16* y, i64 T, i64 M) { chosen->silu(gate_up, y, T, M); }

// Norms (where there are gains) and rotates queries in place and keys into the cache; copies values there. cos, sin [P, D];
// without them nothing is normed or rotated.
void attend_write(bf16* qkv, i64 T, i64 H, i64 K, i64 D, bf16* keys, bf16* values, i64 block_size, const i64* positions,
                  const i64* slots, const bf16* q_gain, const bf16* k_gain, const float* cos, const float* sin, float eps) {
    chosen->write({qkv, H, K, D}, {keys, values, block_size}, T, positions, slots, q_gain, k_gain, cos, sin, eps);
}

// softmax(Q Kᵀ * scale + causal mask) V for the tokens of `rows` requests; out [T, H D].
void attend_paged(bf16* qkv, i64 H, i64 K, i64 D, bf16* keys, bf16* values, i64 block_size, const i64* starts, const i64* counts,
                  i64 rows, const i64* blocks, i64 width, bf16* out, float scale) {
    chosen->attend({starts, counts, blocks, rows, width}, {qkv, H, K, D}, {keys, values, block_size}, out, scale);
}
}
