// y = x Wᵀ + b, with W laid out once for the order in which it is read.
//
// Each value of y is one running sum over the columns of W from the first to the last, whatever else is computed beside it: the
// result for a row of x has the same bits alone, in any batch, and on any number of threads.
//
// Shapes: x [T, K], W [N, K]. A panel is 16 rows of W: [K / 2][16][2], pairs of columns side by side, as matrix units read them.
#pragma once
#include <immintrin.h>
#include <omp.h>
#include <sys/mman.h>

#include <cstdlib>
#include <new>
#include <vector>

#include "lora.h"
#include "numbers.h"

static const i64 PANEL = LANES;       // rows of W in a panel
static const i64 PAD = 32;         // K is filled up with zeros to a multiple of this, T with rows that nobody reads
static const i64 MANY_ROWS = 128;  // of x: multiplying takes longer than reading
static const i64 ROWS = 256;       // rows of x that stay near while panels pass by
static const i64 MOST_PANELS = 16;  // of a piece of work: long ones read and write long runs of memory
static const i64 PIECES = 3;       // work items a thread, where that makes no longer ones: a thread that is done takes another's
static const i64 LINE = 32;        // numbers in a cache line

enum Activation { SILU, GELU, GELU_TANH, RELU };
// What becomes of results y, with an Activation f: ACTIVATED + f is f(y), GATED + f is f(gate) * value. CLAMPED is gated too, by gpt-oss' own
// function. SCORES are stored in float32.
enum Kind { STORE, ADD, SCORES, ACTIVATED = 4, GATED = 8, CLAMPED = 12 };

// Calls RUN<KIND>, so that no loop asks which kind it is.
#define OF_KIND(KIND, RUN, ...)                                                   \
    switch (KIND) {                                                               \
        case STORE: return RUN<STORE>(__VA_ARGS__);                               \
        case ADD: return RUN<ADD>(__VA_ARGS__);                                   \
        case SCORES: return RUN<SCORES>(__VA_ARGS__);                             \
        case ACTIVATED + SILU: return RUN<ACTIVATED + SILU>(__VA_ARGS__);         \
        case ACTIVATED + GELU: return RUN<ACTIVATED + GELU>(__VA_ARGS__);         \
        case ACTIVATED + GELU_TANH: return RUN<ACTIVATED + GELU_TANH>(__VA_ARGS__); \
        case ACTIVATED + RELU: return RUN<ACTIVATED + RELU>(__VA_ARGS__);         \
        case GATED + SILU: return RUN<GATED + SILU>(__VA_ARGS__);                 \
        case GATED + GELU: return RUN<GATED + GELU>(__VA_ARGS__);                 \
        case GATED + GELU_TANH: return RUN<GATED + GELU_TANH>(__VA_ARGS__);       \
        case GATED + RELU: return RUN<GATED + RELU>(__VA_ARGS__);                 \
        case CLAMPED: return RUN<CLAMPED>(__VA_ARGS__);                           \
    }

struct Matrix {
    i64 N = 0, K = 0, panels = 0;  // K with its padding; panels in pairs
    uint32_t* weights = nullptr;   // [panels][K / 2][16], a pair of columns each
    std::vector<float> bias;       // [panels][16]
    i64 number = 0;                // see `attend_pack`
};

// Large pages where they are to be had: a decode step reads every one of them. Throws bad_alloc.
static void* allocate(size_t bytes) {
    const size_t huge = 2 << 20;
    bytes = (bytes + huge - 1) / huge * huge;  // part of a large page is none
    void* memory = aligned_alloc(huge, bytes);
    if (!memory) throw std::bad_alloc();
    madvise(memory, bytes, MADV_HUGEPAGE);
    return memory;
}

// Memory for many matrices side by side, so that small ones share large pages.
class Arena {
  public:
    Arena() = default;
    Arena(const Arena&) = delete;
    ~Arena() {
        for (void* part : parts_) free(part);
    }
    // `bytes` is a multiple of a cache line.
    void* take(size_t bytes) {
        if (bytes > left_) {
            left_ = std::max<size_t>(bytes, 64 << 20);
            parts_.push_back(nullptr);
            parts_.back() = next_ = (char*)allocate(left_);
        }
        next_ += bytes, left_ -= bytes;
        return next_ - bytes;
    }

  private:
    std::vector<void*> parts_;
    char* next_ = nullptr;
    size_t left_ = 0;
};

// The row of W that is row `at` of the panels. With gates, panels of the first half and of the second take turns.
INLINE i64 source_row(i64 panel, i64 at, i64 N, bool gated) {
    i64 rows = gated ? N / 2 : N, row = (gated ? panel / 2 : panel) * PANEL + at;
    return row >= rows ? -1 : gated && panel % 2 ? rows + row : row;
}

// LINE columns from `k` on of a panel's rows, pair by pair. A cache line of each row is read at a time, and written lines are whole.
INLINE void pack_block(const bf16* const* rows, i64 k, i64 columns, uint32_t* to) {
    uint32_t block[PANEL][LINE / 2] = {};
    i64 count = std::clamp<i64>(columns - k, 0, LINE);
    for (i64 at = 0; at < PANEL; at++) {
        if (count == LINE) memcpy(block[at], rows[at] + k, LINE * 2);
        else memcpy(block[at], rows[at] + k, count * 2);
    }
    for (i64 pair = 0; pair < LINE / 2; pair++)
        for (i64 at = 0; at < PANEL; at++) to[pair * PANEL + at] = block[at][pair];
}

static Matrix pack(Arena& arena, const bf16* weights, const bf16* bias, i64 N, i64 columns, bool gated) {
    Matrix m;
    m.N = N, m.K = ceiling(columns, PAD) * PAD;
    m.panels = gated ? 2 * ceiling(N / 2, PANEL) : ceiling(N, 2 * PANEL) * 2;
    m.weights = (uint32_t*)arena.take(m.panels * m.K * PANEL * 2);
    m.bias.assign(m.panels * PANEL, 0.0f);
    std::vector<bf16> nothing(m.K, 0);
#pragma omp parallel for schedule(static)
    for (i64 panel = 0; panel < m.panels; panel++) {
        const bf16* rows[PANEL];
        for (i64 at = 0; at < PANEL; at++) {
            i64 row = source_row(panel, at, N, gated);
            rows[at] = row < 0 ? nothing.data() : weights + row * columns;
            if (bias && row >= 0) m.bias[panel * PANEL + at] = wide(bias[row]);
        }
        for (i64 k = 0; k < m.K; k += LINE) pack_block(rows, k, columns, m.weights + (panel * m.K + k) / 2 * PANEL);
    }
    return m;
}

// Row `row` of a matrix that was packed without gates.
static void unpack_row(const Matrix& m, i64 row, i64 columns, bf16* to) {
    const uint32_t* pair = m.weights + row / PANEL * m.K / 2 * PANEL + row % PANEL;
    for (i64 k = 0; k < columns; k += 2, pair += PANEL) memcpy(to + k, pair, std::min<i64>(2, columns - k) * 2);
}

// A and B of an adapter as the loops read them, in bfloat16 as W is.
static LowRank low_rank(const Matrix& m, bool gated, const float* down, const float* up, i64 ranks, i64 columns, const i64* parts, i64 count) {
    LowRank low;
    low.K = columns, low.R = ceiling(ranks, LANES) * LANES;
    low.down.assign(low.R * low.K, 0), low.up.assign(m.panels * low.R * PANEL, 0);
    low.first.assign(m.panels, ranks), low.last.assign(m.panels, 0);
    for (i64 r = 0; r < ranks; r++)
        for (i64 k = 0; k < columns; k++) low.down[(r / LANES * low.K + k) * LANES + r % LANES] = narrow(down[r * columns + k]);
    for (i64 panel = 0; panel < m.panels; panel++)
        for (i64 at = 0; at < PANEL; at++) {
            i64 row = source_row(panel, at, m.N, gated);
            for (const i64* part = parts; row >= 0 && part < parts + 4 * count; part += 4) {
                if (row < part[0] || row >= part[1]) continue;
                low.first[panel] = std::min(low.first[panel], part[2]), low.last[panel] = std::max(low.last[panel], part[3]);
                for (i64 r = part[2]; r < part[3]; r++) low.up[(panel * low.R + r) * PANEL + at] = narrow(up[row * ranks + r]);
            }
        }
    return low;
}

struct Clamp {  // of CLAMPED
    float limit = 0, slope = 0;
};

struct Product {
    const bf16* x;
    i64 stride, T;     // stride of x; x has room for T rounded up to PAD
    const Matrix* matrix;
    int kind;          // a Kind, with its Activation
    void* y;           // bf16, but floats with SCORES
    i64 y_stride;
    float scale = 1;   // of what ADD adds
    Clamp clamp = {};
    const Additions* more = nullptr;  // of adapters, where some rows have one

    // Work comes in items: an even number of panels for up to ROWS rows.
    i64 panels_of_item() const {
        i64 share = matrix->panels / (PIECES * omp_get_num_threads());
        return T < MANY_ROWS ? std::clamp<i64>(share / 2 * 2, 2, MOST_PANELS) : MOST_PANELS / 2;
    }
    i64 items_across() const { return ceiling(matrix->panels, panels_of_item()); }
    i64 items() const { return items_across() * ceiling(T, ROWS); }
};

template <int ACTIVATION>
INLINE floats activated(floats x) {
    return ACTIVATION == SILU ? silu(x) : ACTIVATION == GELU ? gelu(x) : ACTIVATION == GELU_TANH ? gelu_tanh(x) : relu(x);
}

// Gates are cut from above, values from both sides. In this order NaN stays NaN.
INLINE floats clamped(floats gate, floats value, const Clamp& clamp) {
    floats limit = all(clamp.limit);
    gate = choose(gate > limit, limit, gate);
    value = choose(value > limit, limit, choose(value < -limit, -limit, value));
    return (value + 1.0f) * gated_by(gate, gate * clamp.slope);
}

// What becomes of a block of results [rows][pitch], from row `first` and panel `panel` on.
template <int KIND>
INLINE void keep_rows(const Product& p, const float* block, i64 pitch, i64 first, i64 rows, i64 panel, i64 panels) {
    const Matrix& m = *p.matrix;
    const i64 step = KIND >= GATED ? 2 : 1;  // a panel of gates stands before its panel of values
    i64 width = m.N / step, begin = panel / step * PANEL, end = std::min(width, (panel + panels) / step * PANEL);
    for (i64 t = 0; t < rows; t++)
        for (i64 n = begin; n < end; n += PANEL) {
            const float *from = block + t * pitch + (n - begin) * step, *bias = m.bias.data() + n * step;
            floats y = load<floats>(from) + load<floats>(bias);
            if (KIND >= GATED) {
                floats value = load<floats>(from + PANEL) + load<floats>(bias + PANEL);
                y = KIND == CLAMPED ? clamped(y, value, p.clamp) : activated<KIND % 4>(y) * value;
            } else if (KIND >= ACTIVATED) {
                y = activated<KIND % 4>(y);
            }
            if (KIND == ADD) y *= p.scale;
            i64 place = (first + t) * p.y_stride + n, count = std::min(PANEL, end - n);
            bf16* to = (bf16*)p.y + place;
            if (count == PANEL) {
                if (KIND == SCORES)
                    store((float*)p.y + place, y);
                else
                    store(to, narrow(KIND == ADD ? wide(load<halves>(to)) + y : y));
            } else if (KIND == SCORES) {
                memcpy((float*)p.y + place, &y, count * 4);
            } else {
                halves kept = {};
                if (KIND == ADD) memcpy(&kept, to, count * 2), y += wide(kept);
                kept = narrow(y);
                memcpy(to, &kept, count * 2);
            }
        }
}

static const i64 PITCH = 4 * PANEL;  // columns of a block of results

INLINE void keep(const Product& p, float* block, i64 first, i64 rows, i64 panel, i64 panels) {
    if (p.more) p.more->raise(*p.more, block, PITCH, first, rows, panel, panels);
    OF_KIND(p.kind, keep_rows, p, block, PITCH, first, rows, panel, panels)
}

// Some rows of x by one panel, with whatever vectors the target has.
template <int HEIGHT>
INLINE void rows_by_panel(const bf16* x, i64 stride, const uint32_t* weights, i64 K, float* block) {
    floats sums[HEIGHT] = {};
    for (i64 k = 0; k < K; k += 2, weights += PANEL) {
        words pairs = load<words>(weights);
        floats even = (floats)(pairs << 16), odd = (floats)(pairs & 0xffff0000u);
        for (int t = 0; t < HEIGHT; t++) {
            sums[t] += even * wide(x[t * stride + k]);
            sums[t] += odd * wide(x[t * stride + k + 1]);
        }
    }
    for (int t = 0; t < HEIGHT; t++) store(block + t * PITCH, sums[t]);
}

struct Item {
    i64 first, end, panel, panels;  // rows of x; panels
};

INLINE Item item_of(const Product& p, i64 number) {
    i64 chunk = number / p.items_across(), panel = number % p.items_across() * p.panels_of_item();
    i64 panels = std::min(p.panels_of_item(), p.matrix->panels - panel);
    return {chunk * ROWS, std::min(p.T, (chunk + 1) * ROWS), panel, panels};
}

INLINE const uint32_t* panel_of(const Matrix& m, i64 panel) { return m.weights + panel * m.K / 2 * PANEL; }

INLINE void multiply_vectors(const Product& p, i64 number) {
    alignas(64) float block[4 * PITCH];
    Item item = item_of(p, number);
    const Matrix& m = *p.matrix;
    for (i64 t = item.first; t < item.end; t += 4) {
        const bf16* x = p.x + t * p.stride;
        for (i64 n = 0; n < item.panels; n += 2) {
            for (i64 side = 0; side < 2; side++) {
                const uint32_t* weights = panel_of(m, item.panel + n + side);
                if (item.end - t == 1)
                    rows_by_panel<1>(x, p.stride, weights, m.K, block + side * PANEL);
                else
                    rows_by_panel<4>(x, p.stride, weights, m.K, block + side * PANEL);
            }
            keep(p, block, t, std::min<i64>(4, item.end - t), item.panel + n, 2);
        }
    }
}

// The same with AVX2: of vectors that it does not have GCC keeps the sums in memory.
template <int HEIGHT>
OF(AVX2) INLINE void rows_by_panel_avx2(const bf16* x, i64 stride, const uint32_t* weights, i64 K, float* block) {
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
    __m256 left[HEIGHT], right[HEIGHT];
    for (int t = 0; t < HEIGHT; t++) left[t] = right[t] = _mm256_setzero_ps();
    for (i64 k = 0; k < K; k += 2, weights += PANEL) {
        __m256i a = _mm256_loadu_si256((const __m256i*)weights), b = _mm256_loadu_si256((const __m256i*)weights + 1);
        __m256 even_a = (__m256)_mm256_slli_epi32(a, 16), even_b = (__m256)_mm256_slli_epi32(b, 16);
        __m256 odd_a = (__m256)_mm256_and_si256(a, upper), odd_b = (__m256)_mm256_and_si256(b, upper);
        for (int t = 0; t < HEIGHT; t++) {
            __m256 even = _mm256_set1_ps(wide(x[t * stride + k])), odd = _mm256_set1_ps(wide(x[t * stride + k + 1]));
            left[t] = _mm256_fmadd_ps(odd_a, odd, _mm256_fmadd_ps(even_a, even, left[t]));
            right[t] = _mm256_fmadd_ps(odd_b, odd, _mm256_fmadd_ps(even_b, even, right[t]));
        }
    }
    for (int t = 0; t < HEIGHT; t++) _mm256_storeu_ps(block + t * PITCH, left[t]), _mm256_storeu_ps(block + t * PITCH + 8, right[t]);
}

OF(AVX2) static void multiply_halves(const Product& p, i64 number) {
    alignas(64) float block[4 * PITCH];
    Item item = item_of(p, number);
    const Matrix& m = *p.matrix;
    for (i64 t = item.first; t < item.end; t += 4) {
        const bf16* x = p.x + t * p.stride;
        for (i64 n = 0; n < item.panels; n += 2) {
            for (i64 side = 0; side < 2; side++) {
                const uint32_t* weights = panel_of(m, item.panel + n + side);
                if (item.end - t == 1)
                    rows_by_panel_avx2<1>(x, p.stride, weights, m.K, block + side * PANEL);
                else
                    rows_by_panel_avx2<4>(x, p.stride, weights, m.K, block + side * PANEL);
            }
            keep(p, block, t, std::min<i64>(4, item.end - t), item.panel + n, 2);
        }
    }
}

// The same where a CPU multiplies pairs of bfloat16.
template <int HEIGHT>
OF(AVX512_BF16) INLINE void rows_by_panel_bf16(const bf16* x, i64 stride, const uint32_t* weights, i64 K, float* block) {
    __m512 sums[HEIGHT];
    for (int t = 0; t < HEIGHT; t++) sums[t] = _mm512_setzero_ps();
    for (i64 k = 0; k < K; k += 2, weights += PANEL) {
        __m512bh w = (__m512bh)_mm512_load_si512(weights);
        for (int t = 0; t < HEIGHT; t++) {
            int pair;
            memcpy(&pair, x + t * stride + k, 4);
            sums[t] = _mm512_dpbf16_ps(sums[t], w, (__m512bh)_mm512_set1_epi32(pair));
        }
    }
    for (int t = 0; t < HEIGHT; t++) _mm512_store_ps(block + t * PITCH, sums[t]);
}

OF(AVX512_BF16) static void multiply_pairs(const Product& p, i64 number) {
    alignas(64) float block[8 * PITCH];
    Item item = item_of(p, number);
    const Matrix& m = *p.matrix;
    for (i64 t = item.first; t < item.end; t += 8) {
        const bf16* x = p.x + t * p.stride;
        for (i64 n = 0; n < item.panels; n += 2) {
            for (i64 side = 0; side < 2; side++) {
                const uint32_t* weights = panel_of(m, item.panel + n + side);
                if (item.end - t == 1)
                    rows_by_panel_bf16<1>(x, p.stride, weights, m.K, block + side * PANEL);
                else
                    rows_by_panel_bf16<8>(x, p.stride, weights, m.K, block + side * PANEL);
            }
            keep(p, block, t, std::min<i64>(8, item.end - t), item.panel + n, 2);
        }
    }
}

// The same with tiles of 16 x 16 results: one row of tiles by up to four panels, or two by two.

struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// GCC 12 does not know that tiles are loaded from memory: what was written before must be there.
INLINE void written() { __asm__ volatile("" : : : "memory"); }

OF(AMX) static void shape_tiles(const TileShapes& shapes) {
    __asm__ volatile("" : : "r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
}

OF(AMX) static void whole_tiles() {
    TileShapes shapes;
    for (int tile = 0; tile < 8; tile++) shapes.rows[tile] = 16, shapes.row_bytes[tile] = 64;
    shape_tiles(shapes);
}

static const i64 TILE = 32 / 2 * PANEL;  // pairs of columns in a tile of weights

OF(AMX) INLINE void one_by_four(const bf16* x, i64 stride, const Matrix& m, i64 panel, float* block) {
    const uint32_t *a = panel_of(m, panel), *b = panel_of(m, panel + 1), *c = panel_of(m, panel + 2), *d = panel_of(m, panel + 3);
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (i64 k = 0; k < m.K; k += 32, a += TILE, b += TILE, c += TILE, d += TILE) {
        _tile_loadd(4, x + k, stride * 2);
        _tile_loadd(5, a, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, b, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, c, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, d, 64);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, block, PITCH * 4); _tile_stored(1, block + 16, PITCH * 4);
    _tile_stored(2, block + 32, PITCH * 4); _tile_stored(3, block + 48, PITCH * 4);
}

OF(AMX) INLINE void one_by_two(const bf16* x, i64 stride, const Matrix& m, i64 panel, float* block) {
    const uint32_t *a = panel_of(m, panel), *b = panel_of(m, panel + 1);
    _tile_zero(0); _tile_zero(1);
    for (i64 k = 0; k < m.K; k += 32, a += TILE, b += TILE) {
        _tile_loadd(4, x + k, stride * 2);
        _tile_loadd(5, a, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, b, 64);
        _tile_dpbf16ps(1, 4, 6);
    }
    _tile_stored(0, block, PITCH * 4); _tile_stored(1, block + 16, PITCH * 4);
}

struct Rest {  // results of two panels that wait to be kept: while the matrix units work on the next, the vector units are idle
    float* block;
    i64 first, rows, panel, kept;
};

static const i64 PAIR = 2 * PANEL;  // columns of such a block

template <int KIND>
OF(AMX) INLINE void keep_some(const Product& p, Rest& rest, i64 rows) {
    rows = std::min(rows, rest.rows - rest.kept);
    if (p.more) p.more->raise(*p.more, rest.block + rest.kept * PAIR, PAIR, rest.first + rest.kept, rows, rest.panel, 2);
    keep_rows<KIND>(p, rest.block + rest.kept * PAIR, PAIR, rest.first + rest.kept, rows, rest.panel, 2);
    rest.kept += rows;
}

// Asks for some lines of a tile of weights; a core that sees them go by asks for the others.
OF(AMX) INLINE void hint(const uint32_t* tile) {
    for (i64 i = 0; i < TILE; i += TILE / 4) _mm_prefetch(tile + i, _MM_HINT_T1);
}

// Two rows of tiles by two panels, into a block [32][PAIR]. `more`: the next two panels follow, from memory.
template <int KIND>
OF(AMX) INLINE void two_by_two(const Product& p, const bf16* x, i64 panel, float* block, Rest& rest, bool more) {
    const Matrix& m = *p.matrix;
    const uint32_t *a = panel_of(m, panel), *b = panel_of(m, panel + 1), *next = panel_of(m, panel + 2);
    i64 stride = p.stride, rows = ceiling(32 * 32, m.K);
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (i64 k = 0; k < m.K; k += 32, a += TILE, b += TILE) {
        _tile_loadd(4, x + k, stride * 2);
        _tile_loadd(6, a, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (more) hint(next + k * PANEL / 2), hint(next + (m.K + k) * PANEL / 2);
        _tile_loadd(5, x + 16 * stride + k, stride * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        keep_some<KIND>(p, rest, rows);
    }
    _tile_stored(0, block, PAIR * 4); _tile_stored(1, block + 16, PAIR * 4);
    _tile_stored(2, block + 16 * PAIR, PAIR * 4); _tile_stored(3, block + 16 * PAIR + 16, PAIR * 4);
}

// A row of tiles: few tokens.
OF(AMX) INLINE void multiply_few(const Product& p, const Item& item) {
    alignas(64) float block[16 * PITCH];
    const bf16* x = p.x + item.first * p.stride;
    for (i64 n = 0, step; n < item.panels; n += step) {
        step = item.panels - n >= 4 ? 4 : 2;
        if (step == 4)
            one_by_four(x, p.stride, *p.matrix, item.panel + n, block);
        else
            one_by_two(x, p.stride, *p.matrix, item.panel + n, block);
        keep(p, block, item.first, item.end - item.first, item.panel + n, step);
    }
}

template <int KIND>
OF(AMX) INLINE void multiply_many(const Product& p, const Item& item) {
    alignas(64) float blocks[2][32 * PAIR];
    Rest rest = {};
    i64 turn = 0;
    for (i64 t = item.first; t < item.end; t += 32)
        for (i64 n = 0; n < item.panels; n += 2) {
            float* block = blocks[turn++ % 2];
            two_by_two<KIND>(p, p.x + t * p.stride, item.panel + n, block, rest, t == item.first && n + 2 < item.panels);
            rest = {block, t, std::min<i64>(32, item.end - t), item.panel + n, 0};
        }
    keep_some<KIND>(p, rest, rest.rows);
}

OF(AMX) static void multiply_tiles(const Product& p, i64 number) {
    Item item = item_of(p, number);
    whole_tiles();
    written();
    if (item.end - item.first <= 16) return multiply_few(p, item);
    OF_KIND(p.kind, multiply_many, p, item)
}
