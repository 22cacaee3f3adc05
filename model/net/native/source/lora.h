// What adapters add to products, before anything becomes of the results: y = x Wᵀ + b + (x Aᵀ) Bᵀ, each row of x with an adapter
// of its own or with none. Each value is one running sum in one order, as in matrix.h; a row without an adapter is not touched.
//
// Shapes: x [T, K], A [R, K], B [N, R].
#pragma once
#include <vector>

#include "numbers.h"

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
};

// x Aᵀ of one row.
INLINE void shrink_row(const bf16* x, const LowRank& low, float* inner) {
    const bf16* down = low.down.data();
    for (i64 r = 0; r < low.R; r += LANES) {
        floats sum = {};
        for (i64 k = 0; k < low.K; k++, down += LANES) sum += wide(load<halves>(down)) * wide(x[k]);
        store(inner + r, sum);
    }
}

// y and what the row adds to the results of a panel.
INLINE floats raise_row(floats y, const LowRank& low, const float* inner, i64 panel) {
    const bf16* up = low.up.data() + panel * low.R * LANES;
    for (i64 r = low.first[panel]; r < low.last[panel]; r++) y += wide(load<halves>(up + r * LANES)) * inner[r];
    return y;
}
