// What adapters add to products, before anything becomes of the results: y = x Wᵀ + (x Aᵀ) Bᵀ + b, each row of x with an adapter
// of its own or with none. Each value is one running sum in one order, as in matrix.h; a row without an adapter is not touched.
//
// Shapes: x [T, K], A [R, K], B [N, R].
#pragma once
#include <vector>

#include "tokens.h"

struct LowRank {
    i64 K = 0, R = 0;                 // R is filled up with zeros to a multiple of LANES
    std::vector<bf16> down;           // [R / LANES][K][LANES]
    std::vector<bf16> up;             // [panels][R][LANES]: rows of B as the panels have those of W
    std::vector<i64> first, last;     // [panels]: which ranks are not zero there
    bool there() const { return R > 0; }
};

// Of the tokens of a step: what each adds to one matrix, null where it adds nothing, and x Aᵀ.
struct Additions {
    const LowRank* const* of_row;
    float* inner;  // [T][stride]
    i64 stride;
    // Adds to a block of results [rows][pitch], from row `first` and panel `panel` on. Called, so that the loops without are as they were.
    void (*raise)(const Additions&, float* block, i64 pitch, i64 first, i64 rows, i64 panel, i64 panels);
};

// x Aᵀ of one row.
template <class Vector>
INLINE void shrink_row(const bf16* x, const LowRank& low, float* inner) {
    const int WIDTH = sizeof(Vector) / 4, VECTORS = LANES / WIDTH;
    const bf16* down = low.down.data();
    for (i64 r = 0; r < low.R; r += LANES) {
        Vector sums[VECTORS] = {};
        for (i64 k = 0; k < low.K; k++, down += LANES)
            for (int v = 0; v < VECTORS; v++) sums[v] += numbers<Vector>(down + v * WIDTH, WIDTH) * wide(x[k]);
        for (int v = 0; v < VECTORS; v++) store(inner + r + v * WIDTH, sums[v]);
    }
}

template <class Vector>
INLINE void raise_rows(const Additions& more, float* block, i64 pitch, i64 first, i64 rows, i64 panel, i64 panels) {
    const int WIDTH = sizeof(Vector) / 4, VECTORS = LANES / WIDTH;
    for (i64 t = 0; t < rows; t++) {
        const LowRank* low = more.of_row[first + t];
        const float* inner = more.inner + (first + t) * more.stride;
        for (i64 n = 0; low && n < panels; n++) {
            const bf16* up = low->up.data() + (panel + n) * low->R * LANES;
            float* results = block + t * pitch + n * LANES;
            Vector y[VECTORS];
            for (int v = 0; v < VECTORS; v++) y[v] = load<Vector>(results + v * WIDTH);
            for (i64 r = low->first[panel + n]; r < low->last[panel + n]; r++)
                for (int v = 0; v < VECTORS; v++) y[v] += numbers<Vector>(up + r * LANES + v * WIDTH, WIDTH) * inner[r];
            for (int v = 0; v < VECTORS; v++) store(results + v * WIDTH, y[v]);
        }
    }
}
