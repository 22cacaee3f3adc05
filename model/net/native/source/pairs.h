// Products where a CPU multiplies pairs of bfloat16 (AVX-512-BF16): blocks of rows of x by two panels. A block's sums stay in registers from the first
// column to the last, and x is read where it lies: both come from the second level of the cache without delay.
//
// One thread of an AMD EPYC (Zen 4), 2026-11-27, beside blocks of 384 columns whose x was copied, shape M: 1.08 times as fast with 256 rows, 1.37 times
// with 16, 1.5 times with one.
#pragma once
#include "matrix.h"

static const i64 PAIR_ROWS = 12;  // of a block at most: 24 sums, two vectors of weights, a pair of x

// What comes next from memory: `lines` cache lines of it are asked for beside each eight columns.
struct Next {
    const char* from;
    i64 lines;
};

// The sums [rows][panels][PANEL] of a block, whose rows of x are `stride` bytes apart, by one panel or two of `columns` columns behind each other.
typedef void MultiplyPairs(const char* x, i64 stride, const uint32_t* weights, i64 columns, Next next, float* sums);

template <int HEIGHT, int PANELS>
OF(AVX512_BF16) static void multiply_pairs(const char* x, i64 stride, const uint32_t* weights, i64 columns, Next next, float* sums) {
    const i64 between = columns / 2 * PANEL;
    __m512 total[HEIGHT][PANELS];
    for (int t = 0; t < HEIGHT; t++)
        for (int n = 0; n < PANELS; n++) total[t][n] = _mm512_set1_ps(0);
    const char *a = x, *b = x + 3 * stride, *c = x + 6 * stride, *d = x + 9 * stride;
    for (i64 k = 0; k < columns; k += 8, weights += 4 * PANEL, a += 16, b += 16, c += 16, d += 16) {
        __asm__("" : "+r"(a), "+r"(b), "+r"(c), "+r"(d));  // of every third row: for one of each there are too few registers
        for (i64 line = 0; line < next.lines; line++, next.from += 64) _mm_prefetch(next.from, _MM_HINT_T1);
        for (int pair = 0; pair < 4; pair++) {
            __m512bh w[PANELS];
            for (int n = 0; n < PANELS; n++) w[n] = (__m512bh)_mm512_load_si512(weights + pair * PANEL + n * between);
            for (int t = 0; t < HEIGHT; t++) {
                const char* row = (t < 3 ? a : t < 6 ? b : t < 9 ? c : d) + t % 3 * stride;
                __m512bh both = (__m512bh)_mm512_castps_si512(_mm512_set1_ps(((const float*)row)[pair]));
                for (int n = 0; n < PANELS; n++) total[t][n] = _mm512_dpbf16_ps(total[t][n], w[n], both);
            }
        }
    }
    for (int t = 0; t < HEIGHT; t++)
        for (int n = 0; n < PANELS; n++) _mm512_storeu_ps(sums + (PANELS * t + n) * PANEL, total[t][n]);
}

#define PAIRS_OF(N)                                                                                                                                  \
    {multiply_pairs<1, N>, multiply_pairs<2, N>, multiply_pairs<3, N>, multiply_pairs<4, N>,  multiply_pairs<5, N>,  multiply_pairs<6, N>, \
     multiply_pairs<7, N>, multiply_pairs<8, N>, multiply_pairs<9, N>, multiply_pairs<10, N>, multiply_pairs<11, N>, multiply_pairs<12, N>}
static MultiplyPairs* const MULTIPLY_PAIRS[][PAIR_ROWS] = {PAIRS_OF(1), PAIRS_OF(2)};  // by panels, by rows

// Asks for the lines that the results of two panels will be written to, while they are computed: else a block waits for them.
OF(AVX512_BF16) INLINE void ask_for_results(const Product& p, i64 first, i64 rows, i64 panel) {
    const i64 size = p.kind == SCORES ? 4 : 2, column = panel / (p.kind >= GATED ? 2 : 1) * PANEL;
    for (i64 t = first; t < first + rows; t++)
        for (i64 byte = 0; byte < 32 * size; byte += 64) __builtin_prefetch((const char*)p.y + (t * p.y_stride + column) * size + byte, 1);
}

// The next two panels are asked for part by part, beside each block. For one block that would be more than memory can bring: it reads on its own.
OF(AVX512_BF16) static void multiply_bf16(const Product& p, i64 number) {
    const Item item = item_of(p, number);
    const i64 K = p.matrix->K, rows = item.end - item.first, count = ceiling(rows, PAIR_ROWS), lines = count > 1 ? ceiling(8, count) : 0;
    alignas(64) float sums[PAIR_ROWS * 2 * PANEL];
    for (i64 n = 0; n < item.panels; n += 2) {
        const uint32_t* weights = panel_of(*p.matrix, item.panel + n);
        const i64 panels = std::min<i64>(2, item.panels - n);
        const char *next = (const char*)(weights + K * PANEL), *end = next + (n + 2 < item.panels ? K * PANEL * 4 : 0);
        for (i64 block = 0; block < count; block++) {
            i64 t = item.first + block * rows / count, height = item.first + (block + 1) * rows / count - t;
            ask_for_results(p, t, height, item.panel + n);
            MULTIPLY_PAIRS[panels - 1][height - 1]((const char*)(p.x + t * p.stride), p.stride * 2, weights, K, {next, next < end ? lines : 0}, sums);
            next += lines * K / 8 * 64;
            keep<floats>(p, sums, panels * PANEL, t, height, item.panel + n, panels);
        }
    }
}
