// y = x Wᵀ + b, with W laid out once for the order in which it is read.
//
// Each value of y is one running sum over the columns of W from the first to the last, whatever else is computed beside it: the
// result for a row of x has the same bits alone, in any batch, and on any number of threads.
//
// Shapes: x [T, K], W [N, K]. A panel is 16 rows of W: [K / 2][16][2], pairs of columns side by side, as matrix units read them.
#pragma once
#include <omp.h>
#include <sys/mman.h>

#include <cstdlib>
#include <new>
#include <vector>

#include "lora.h"
#include "tokens.h"

static const i64 PANEL = LANES;       // rows of W in a panel
static const i64 PAIR = 2 * PANEL;  // columns of results of two panels
static const i64 PAD = 32;         // K is filled up with zeros to a multiple of this, T with rows that nobody reads
static const i64 MANY_ROWS = 128;  // of x: multiplying takes longer than reading
static const i64 ROWS = 256;       // rows of x that stay near while panels pass by
static const i64 MAX_PANELS = 16;  // of a piece of work: long ones read and write long runs of memory
static const i64 FEW_ROWS_OF_ITEM = 16;  // of x, by one panel where those are few
static const i64 PIECES = 3;       // work items a thread, where that makes no longer ones: a thread that is done takes another's
static const i64 LINE = 32;        // numbers in a cache line

enum Activation { SILU, GELU, GELU_TANH, RELU, RELU2, ACTIVATIONS = 8 };
// What becomes of results y, with an Activation f: ACTIVATED + f is f(y), GATED + f is f(gate) * value. CLAMPED is gated too, by gpt-oss' own
// function. SCORES are stored in float32.
enum Kind { STORE, ADD, SCORES, ACTIVATED = ACTIVATIONS, GATED = 2 * ACTIVATIONS, CLAMPED = 3 * ACTIVATIONS };

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
        case ACTIVATED + RELU2: return RUN<ACTIVATED + RELU2>(__VA_ARGS__);       \
        case GATED + SILU: return RUN<GATED + SILU>(__VA_ARGS__);                 \
        case GATED + GELU: return RUN<GATED + GELU>(__VA_ARGS__);                 \
        case GATED + GELU_TANH: return RUN<GATED + GELU_TANH>(__VA_ARGS__);       \
        case GATED + RELU: return RUN<GATED + RELU>(__VA_ARGS__);                 \
        case GATED + RELU2: return RUN<GATED + RELU2>(__VA_ARGS__);               \
        case CLAMPED: return RUN<CLAMPED>(__VA_ARGS__);                           \
    }

struct Matrix {
    i64 N = 0, K = 0, panels = 0;  // K with its padding; panels in pairs
    uint32_t* weights = nullptr;   // [panels][K / 2][16], a pair of columns each; null where there are codes
    std::vector<float> bias;       // [panels][16]
    i64 number = 0;                // see `attend_pack`
    // Of whole numbers, see quantised.h.
    i64 bits = 16;
    uint8_t* codes = nullptr;
    uint16_t *scales = nullptr, *minima = nullptr;
    std::vector<float> units;  // [panels][16]
    int8_t table[16] = {};     // values of codes of 4 bits
    bool counted = false;      // those are -8 .. 7, in their order
};

// What a matrix in whole numbers is kept in.
struct Coding {
    i64 bits;
    bool has_minima;
    const int8_t* table;  // of 16 values
};

// A matrix in whole numbers as it comes: rows of codes, and of the scales of their groups.
struct CodedRows {
    i64 bits, G;
    const uint8_t* codes;             // [N][G * 4 * bits], with 4 bits the even column in the low half of a byte
    const uint16_t *scales, *minima;  // float16 [N][G]; minima: null where all are zero
    const float* units;               // [N]: powers of two

    // Row n: its codes, a byte each; its scales and minima, and what they are to be multiplied by.
    void row(i64 n, uint8_t* to, uint16_t* scales_to, uint16_t* minima_to, float& unit) const {
        const uint8_t* from = codes + n * G * 4 * bits;
        if (bits == 8) memcpy(to, from, G * GROUP);
        else for (i64 i = 0; i < G * GROUP / 2; i++) to[2 * i] = from[i] & 15, to[2 * i + 1] = from[i] >> 4;
        memcpy(scales_to, scales + n * G, G * 2);
        if (minima_to) memcpy(minima_to, minima + n * G, G * 2);
        unit = units[n];
    }
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
            parts_.back() = next_ = touched_ = (char*)allocate(left_);
        }
        next_ += bytes, left_ -= bytes;
        while (touched_ < next_) touch();
        return next_ - bytes;
    }

  private:
    // A few large pages, each by one thread: threads that come to the same page at once clear it one after the other.
    void touch() {
        const i64 huge = 2 << 20, pages = std::min<i64>(4, (next_ + left_ - touched_ + huge - 1) / huge);
#pragma omp parallel for schedule(dynamic)
        for (i64 page = 0; page < pages; page++) touched_[page * huge] = 0;
        touched_ += pages * huge;
    }

    std::vector<void*> parts_;
    char *next_ = nullptr, *touched_ = nullptr;
    size_t left_ = 0;
};

// The row of W that is row `at` of the panels. With gates, panels of the first half and of the second take turns.
INLINE i64 source_row(i64 panel, i64 at, i64 N, bool gated) {
    i64 rows = gated ? N / 2 : N, row = (gated ? panel / 2 : panel) * PANEL + at;
    return row >= rows ? -1 : gated && panel % 2 ? rows + row : row;
}

// LINE columns from `k` on of a panel's rows, pair by pair. A cache line of each row is read at a time, and written lines are whole. Returns
// whether a number is not finite.
INLINE bool pack_block(const bf16* const* rows, i64 k, i64 columns, uint32_t* to) {
    uint32_t block[PANEL][LINE / 2] = {};
    i64 count = std::clamp<i64>(columns - k, 0, LINE);
    for (i64 at = 0; at < PANEL; at++) {
        if (count == LINE) memcpy(block[at], rows[at] + k, LINE * 2);
        else memcpy(block[at], rows[at] + k, count * 2);
    }
    uint32_t broken = 0;  // the topmost bit of a half of it: its exponent has no zero
    for (i64 pair = 0; pair < LINE / 2; pair++)
        for (i64 at = 0; at < PANEL; at++) {
            uint32_t both = block[at][pair];
            to[pair * PANEL + at] = both;
            broken |= (both & 0x7f807f80) + 0x00800080;
        }
    return broken & 0x80008000;
}

struct PlainRows {
    const bf16* numbers;  // [rows, K]
    i64 rows;
};

// Rows of parts under each other. `broken`: a part that holds a number that is not finite, counted from 1; or 0.
static Matrix pack(Arena& arena, const PlainRows* parts, const bf16* bias, i64 N, i64 columns, bool gated, i64& broken) {
    Matrix m;
    m.N = N, m.K = ceiling(columns, PAD) * PAD;
    m.panels = gated ? 2 * ceiling(N / 2, PANEL) : ceiling(N, 2 * PANEL) * 2;
    m.weights = (uint32_t*)arena.take(m.panels * m.K * PANEL * 2);
    m.bias.assign(m.panels * PANEL, 0.0f);
    std::vector<bf16> nothing(m.K, 0);
    i64 found = 0;
#pragma omp parallel for schedule(static) reduction(max : found)
    for (i64 panel = 0; panel < m.panels; panel++) {
        const bf16* rows[PANEL];
        i64 of[PANEL];  // their parts
        for (i64 at = 0; at < PANEL; at++) {
            i64 row = source_row(panel, at, N, gated);
            rows[at] = nothing.data();
            if (row < 0) continue;
            if (bias) m.bias[panel * PANEL + at] = wide(bias[row]);
            const PlainRows* part = parts;
            for (; row >= part->rows; part++) row -= part->rows;
            rows[at] = part->numbers + row * columns, of[at] = part - parts;
        }
        bool unfit = false;
        for (i64 k = 0; k < m.K; k += LINE) unfit |= pack_block(rows, k, columns, m.weights + (panel * m.K + k) / 2 * PANEL);
        for (i64 at = 0; unfit && at < PANEL; at++)
            for (i64 k = 0; k < columns && rows[at] != nothing.data(); k++)
                if ((rows[at][k] & 0x7f80) == 0x7f80) found = std::max(found, of[at] + 1);
    }
    broken = found;
    return m;
}

// Where column k of a row stands: which line of those of a panel, and which of its row's four bytes there. Of four columns the second and the
// third change places; with 4 bits a line has eight columns, the last four in the high halves.
struct CodePlace {
    i64 line, byte;
    bool high;
    CodePlace(i64 k, i64 bits) : line(k * bits / 32), byte(k % 4 == 1 ? 2 : k % 4 == 2 ? 1 : k % 4), high(bits == 4 && k % 8 >= 4) {}
};

// Four codes of a row as a line has them.
INLINE uint32_t line_of(const uint8_t* codes) {
    uint32_t four;
    memcpy(&four, codes, 4);
    return (four & 0xff0000ff) | (four >> 8 & 0xff00) | (four & 0xff00) << 8;
}

// The lines of a panel, of codes [16][K] with a byte each.
INLINE void pack_lines(const uint8_t* codes, i64 K, i64 bits, uint8_t* to) {
    for (i64 k = 0; k < K; k += 32 / bits)
        for (i64 at = 0; at < PANEL; at++, to += 4) {
            const uint8_t* from = codes + at * K + k;
            uint32_t line = bits == 8 ? line_of(from) : line_of(from) | line_of(from + 4) << 4;
            memcpy(to, &line, 4);
        }
}

// `Rows` gives rows one by one: see CodedRows.
template <class Rows>
static Matrix pack(Arena& arena, const Rows& from, const Coding& coding, const bf16* bias, i64 N, i64 columns, bool gated) {
    Matrix m;
    m.N = N, m.K = ceiling(columns, GROUP) * GROUP, m.bits = coding.bits;
    m.panels = gated ? 2 * ceiling(N / 2, PANEL) : ceiling(N, 2 * PANEL) * 2;
    const i64 G = m.K / GROUP, bytes = m.K * m.bits / 8;
    m.codes = (uint8_t*)arena.take(m.panels * bytes * PANEL);
    m.scales = (uint16_t*)arena.take(m.panels * G * PANEL * 2);
    m.minima = coding.has_minima ? (uint16_t*)arena.take(m.panels * G * PANEL * 2) : nullptr;
    m.bias.assign(m.panels * PANEL, 0), m.units.assign(m.panels * PANEL, 0);
    memcpy(m.table, coding.table, sizeof m.table);
    m.counted = m.bits == 4;
    for (int code = 0; code < 16; code++) m.counted &= m.table[code] == code - 8;
#pragma omp parallel
    {
        std::vector<uint8_t> codes(PANEL * m.K);
        std::vector<uint16_t> scales(2 * G);
#pragma omp for schedule(dynamic)
        for (i64 panel = 0; panel < m.panels; panel++) {
            for (i64 at = 0; at < PANEL; at++) {
                i64 row = source_row(panel, at, N, gated), place = panel * PANEL + at;
                if (row < 0) {
                    memset(codes.data() + at * m.K, 0, m.K), std::fill(scales.begin(), scales.end(), 0);
                } else {
                    from.row(row, codes.data() + at * m.K, scales.data(), m.minima ? scales.data() + G : nullptr, m.units[place]);
                    m.bias[place] = bias ? wide(bias[row]) : 0;
                }
                for (i64 g = 0; g < G; g++) {
                    m.scales[(panel * G + g) * PANEL + at] = scales[g];
                    if (m.minima) m.minima[(panel * G + g) * PANEL + at] = scales[G + g];
                }
            }
            pack_lines(codes.data(), m.K, m.bits, m.codes + panel * bytes * PANEL);
        }
    }
    return m;
}

INLINE float from_half(uint16_t half) {  // float16 without infinities
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13 | (uint32_t)(half & 0x8000) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value * 0x1p112f;
}

// Where row `row` of W stands among those of the panels: the inverse of `source_row`.
INLINE i64 place_of(i64 row, i64 N, bool gated) {
    i64 rows = gated ? N / 2 : N, at = row % rows;
    return (gated ? at / PANEL * 2 + row / rows : at / PANEL) * PANEL + at % PANEL;
}

INLINE void put(bf16* to, float value) { *to = narrow(value); }
INLINE void put(float* to, float value) { *to = value; }
INLINE void put(bf16* to, bf16 value) { *to = value; }
INLINE void put(float* to, bf16 value) { *to = wide(value); }

template <class Number>
static void unpack_codes(const Matrix& m, i64 row, i64 columns, Number* to) {
    i64 panel = row / PANEL, at = row % PANEL, G = m.K / GROUP;
    for (i64 k = 0; k < columns; k++) {
        i64 scale = (panel * G + k / GROUP) * PANEL + at;
        CodePlace place(k, m.bits);
        uint8_t byte = m.codes[(panel * m.K * m.bits / 32 + place.line) * PANEL * 4 + at * 4 + place.byte];
        int value = m.bits == 8 ? (int8_t)byte : m.table[place.high ? byte >> 4 : byte & 15];
        put(to + k, (value * from_half(m.scales[scale]) + (m.minima ? from_half(m.minima[scale]) : 0)) * m.units[row]);
    }
}

// Row `row` of the panels, as the matrix was given.
template <class Number>
static void unpack_row(const Matrix& m, i64 row, i64 columns, Number* to) {
    if (m.codes) return unpack_codes(m, row, columns, to);
    const bf16* from = (const bf16*)(m.weights + row / PANEL * m.K / 2 * PANEL + row % PANEL);  // pairs of columns, 16 rows side by side
    for (i64 k = 0; k < columns; k++) put(to + k, from[k / 2 * 2 * PANEL + k % 2]);
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

// Rows of x in whole numbers, group by group: see quantised.h.
struct Rounded {
    int16_t* x;      // [groups][rows][32], or
    int8_t* bytes;   // the same: of four columns the first, the third, the second and the fourth
    int32_t* sums;   // of a group's numbers, [groups][rows]
    float* scales;
    i64 rows;
    Rounded from(i64 place) const { return {x + place * GROUP, bytes + place * GROUP, sums + place, scales + place, rows}; }
};

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
    i64 beside = 1;                   // products that share a phase, this one included: as many share out the threads
    i64 threads = 1;
    const Rounded* rounded = nullptr;  // where x is in whole numbers already, for a matrix of codes

    // Work comes in items: an even number of panels for up to ROWS rows, or for few rows one panel, where threads would be left without work.
    i64 panels_of_item() const {
        i64 all = beside * matrix->panels, share = all / (PIECES * threads);
        if (T <= FEW_ROWS_OF_ITEM && all < 2 * threads && kind < GATED && !matrix->codes) return 1;
        return T < MANY_ROWS ? std::clamp<i64>(share / 2 * 2, 2, MAX_PANELS) : MAX_PANELS / (matrix->codes ? 1 : 2);
    }
    i64 items_across() const { return ceiling(matrix->panels, panels_of_item()); }
    i64 items() const { return items_across() * ceiling(T, ROWS); }
};

template <int ACTIVATION, class Vector>
INLINE Vector activated(Vector x) {
    Vector y = ACTIVATION == SILU ? silu(x) : ACTIVATION == GELU ? gelu(x) : ACTIVATION == GELU_TANH ? gelu_tanh(x) : relu(x);
    return ACTIVATION == RELU2 ? y * y : y;
}

// Gates are cut from above, values from both sides. In this order NaN stays NaN.
template <class Vector>
INLINE Vector clamped(Vector gate, Vector value, const Clamp& clamp) {
    Vector limit = all<Vector>(clamp.limit);
    gate = choose(gate > limit, limit, gate);
    value = choose(value > limit, limit, choose(value < -limit, -limit, value));
    return (value + 1.0f) * gated_by(gate, gate * clamp.slope);
}

template <class Vector>
struct Keep {
    // What becomes of a block of results [rows][pitch], from row `first` and panel `panel` on.
    template <int KIND>
    INLINE void rows(const Product& p, const float* block, i64 pitch, i64 first, i64 rows, i64 panel, i64 panels) {
        typedef typename std::conditional<KIND == SCORES, float, bf16>::type Number;
        const Matrix& m = *p.matrix;
        const i64 step = KIND >= GATED ? 2 : 1, width = sizeof(Vector) / 4;  // a panel of gates stands before its panel of values
        const i64 begin = panel / step * PANEL, end = std::min(m.N / step, (panel + panels) / step * PANEL), stride = p.y_stride;
        const float scale = p.scale;
        const Clamp clamp = p.clamp;
        for (i64 n = begin; n < end; n += width) {
            const i64 place = n / PANEL * step * PANEL + n % PANEL;  // among the columns of the block, and of the bias
            const Vector bias = load<Vector>(m.bias.data() + place), of_value = KIND >= GATED ? load<Vector>(m.bias.data() + place + PANEL) : bias;
            const float* from = block + place - begin * step;
            Number* to = (Number*)p.y + first * stride + n;
            for (i64 t = 0; t < rows; t++, from += pitch, to += stride) {
                Vector y = load<Vector>(from) + bias;
                if (KIND >= GATED) {
                    Vector value = load<Vector>(from + PANEL) + of_value;
                    y = KIND == CLAMPED ? clamped(y, value, clamp) : activated<KIND % ACTIVATIONS>(y) * value;
                } else if (KIND >= ACTIVATED) {
                    y = activated<KIND % ACTIVATIONS>(y);
                } else if (KIND == ADD) {
                    y = numbers<Vector>(to, end - n) + y * scale;
                }
                keep_numbers(to, y, end - n);
            }
        }
    }
};

template <class Vector>
INLINE void keep(const Product& p, float* block, i64 pitch, i64 first, i64 rows, i64 panel, i64 panels) {
    if (p.more) p.more->raise(*p.more, block, pitch, first, rows, panel, panels);
    OF_KIND(p.kind, Keep<Vector>::template rows, p, block, pitch, first, rows, panel, panels)
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
