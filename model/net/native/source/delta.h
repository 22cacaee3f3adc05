// A gated delta rule or a short convolution in place of attention: what happens between the products of such a layer. The equations are those
// of delta.py and short_conv.py.
//
// A head goes from token to token, in one order, and each column of its state by itself; so do the columns of a short convolution. So an output
// has the same bits whatever is computed beside it, and however a prompt is cut.
//
// Shapes: T tokens of a step, J heads of queries and of keys, H of values, K columns of a query and of a key, V of a value, W tokens that the
// convolution sees, C columns that pass it.
#pragma once
#include <vector>

#include "matrix.h"
#include "tokens.h"

static const i64 MAX_DELTA = 256;  // columns of a head
static const i64 MAX_SEEN = 16;    // tokens that a convolution sees
static const i64 COLUMNS = 32;     // of a state that move on together
static const i64 CONVOLVED = 64;   // columns of a short convolution in one piece of work
static const float UNIT_EPS = 1e-6f;

struct DeltaSizes {
    i64 J = 0, H = 0, K = 0, V = 0, W = 0;
    i64 channels() const { return 2 * J * K + H * V; }
    i64 width() const { return channels() + H * V; }  // with what gates the outputs
    i64 heads() const { return 2 * J + H; }           // queries, keys, values
    i64 parts() const { return ceiling(V, COLUMNS); }
    i64 column(i64 head) const { return head < 2 * J ? head * K : 2 * J * K + (head - 2 * J) * V; }
};

struct Convolution {  // of one layer
    const float *weight = nullptr, *bias = nullptr;  // [W, C], [C] or null
};

struct Delta {  // of one layer
    const float *speed = nullptr, *step_bias = nullptr, *gain = nullptr;  // [H], [H], [V]
};

struct Sequence {  // of a step: its tokens first .. first + count - 1, of which the first is number `start` of its request
    i64 first, count, start, source, target, kept;  // its state is read from one slot, and written after `kept` tokens to the other or the same
};

struct Recurrence {  // of one layer in one step
    DeltaSizes sizes;
    Convolution convolution;
    Delta delta;
    int activation;
    float eps, rate_scale;  // of the norm of a head's outputs; 1, or 2 where rates lie in (0, 2)
    i64 T;
    const bf16* inputs;     // [T, C + H V]: queries, keys, values, and what gates the outputs
    float* gates;           // [T, 2 H]: rates and steps, which become b and a
    float* heads;           // each head's [T, K or V], after the convolution; a head's outputs take the place of its values
    float *before, *state;  // of all slots: [C, W - 1] and [H, K, V]
    bf16* y;                // [T, H V]
    i64 y_stride;
    const float* queries(i64 head) const { return heads + head / (sizes.H / sizes.J) * sizes.K * T; }
    const float* keys(i64 head) const { return queries(head) + sizes.J * sizes.K * T; }
    float* values(i64 head) const { return heads + (2 * sizes.J * sizes.K + head * sizes.V) * T; }
};

// The last W tokens of a head's inputs, the oldest first, in float32.
struct Seen {
    alignas(64) float room[MAX_SEEN * MAX_DELTA];
    float* tokens[MAX_SEEN];

    // `before`: [columns, W - 1], which is not read where a request begins.
    Seen(i64 W, const float* before, i64 columns, bool begins) {
        memset(room, 0, W * MAX_DELTA * 4);
        for (i64 w = 0; w < W; w++) tokens[w] = room + w * MAX_DELTA;
        for (i64 w = 0; !begins && w < W - 1; w++)
            for (i64 i = 0; i < columns; i++) tokens[w][i] = before[i * (W - 1) + w];
    }
    void turn(i64 W) { std::rotate(tokens, tokens + 1, tokens + W); }  // the oldest makes room
    void keep(i64 W, float* before, i64 columns) const {
        for (i64 w = 0; w < W - 1; w++)
            for (i64 i = 0; i < columns; i++) before[i * (W - 1) + w] = tokens[w][i];
    }
};

// `sum` and a vector's columns of the last W tokens from column i on, each times its weights [W, C].
template <class Vector>
INLINE Vector weighted(Vector sum, const Seen& seen, i64 i, i64 W, const float* weight, i64 C, i64 columns) {
    for (i64 w = 0; w < W; w++, weight += C) sum += load<Vector>(seen.tokens[w] + i) * numbers<Vector>(weight, columns);
    return sum;
}

// b = scale * sigmoid(rate) and a = exp(-speed * softplus(step + bias)), where they were. Not by `exponential`: what a head remembers after a thousand
// tokens is a to the power of a thousand.
INLINE void gate_head(const Recurrence& r, const Sequence& row, i64 head) {
    for (i64 t = row.first; t < row.first + row.count; t++) {
        float *rate = r.gates + t * 2 * r.sizes.H + head, *step = rate + r.sizes.H, x = *step + r.delta.step_bias[head];
        float soft = x > 20 ? x : std::log1p(std::exp(x));
        *rate = r.rate_scale / (1 + std::exp(-*rate)), *step = std::exp(-r.delta.speed[head] * soft);
    }
}

// One head of queries, keys or values: each column's weighted sum over the last W tokens, and its activation. Queries and keys get length 1,
// queries divided by sqrt(K).
template <class Vector, int ACTIVATION>
INLINE void convolve_head(const Recurrence& r, const Sequence& row, i64 head) {
    const i64 step = sizeof(Vector) / 4;
    const DeltaSizes& s = r.sizes;
    i64 column = s.column(head), columns = head < 2 * s.J ? s.K : s.V, C = s.channels(), W = s.W;
    const float* before = r.before + (row.source * C + column) * (W - 1);
    float* to = r.heads + column * r.T + row.first * columns;
    const bf16* x = r.inputs + row.first * s.width() + column;
    Seen seen(W, before, columns, row.start == 0);
    for (i64 t = 0; t < row.count; t++, x += s.width(), to += columns) {
        Vector squares = {};
        for (i64 i = 0; i < columns; i += step) {
            store(seen.tokens[W - 1] + i, numbers<Vector>(x + i, columns - i));
            Vector sum = activated<ACTIVATION>(weighted(Vector{}, seen, i, W, r.convolution.weight + column + i, C, columns - i));
            squares += sum * sum;
            keep_numbers(to + i, sum, columns - i);
        }
        seen.turn(W);
        if (t + 1 == row.kept) seen.keep(W, r.before + (row.target * C + column) * (W - 1), columns);
        if (head >= 2 * s.J) continue;
        float scale = 1 / std::sqrt(total(squares) + UNIT_EPS) * (head < s.J ? 1 / std::sqrt((float)s.K) : 1.0f);
        for (i64 i = 0; i < columns; i += step) keep_numbers(to + i, numbers<Vector>(to + i, columns - i) * scale, columns - i);
    }
    if (head >= 2 * s.J) gate_head(r, row, head - 2 * s.J);
}

template <class Vector>
INLINE void convolve(const Recurrence& r, const Sequence& row, i64 head) {
    switch (r.activation) {
        case SILU: return convolve_head<Vector, SILU>(r, row, head);
        case GELU: return convolve_head<Vector, GELU>(r, row, head);
        case GELU_TANH: return convolve_head<Vector, GELU_TANH>(r, row, head);
        case RELU: return convolve_head<Vector, RELU>(r, row, head);
        case RELU2: return convolve_head<Vector, RELU2>(r, row, head);
    }
}

// Some columns of K rows from one place to another.
INLINE void copy_columns(const float* from, i64 stride, float* to, i64 to_stride, i64 K, i64 columns) {
    if (columns == COLUMNS)
        for (i64 i = 0; i < K; i++) memcpy(to + i * to_stride, from + i * stride, COLUMNS * 4);
    else
        for (i64 i = 0; i < K; i++) memcpy(to + i * to_stride, from + i * stride, columns * 4);
}

// The rule for a part of a head's columns, token after token: what the decayed state says of the key,
// the correction u = b (v - a Sᵀk), S = a S + k uᵀ, and the output Sᵀq. One pass writes a token's state and asks it of the next key.
template <class Vector>
INLINE void advance_columns(const Recurrence& r, const Sequence& row, i64 head, i64 part) {
    const int width = sizeof(Vector) / 4, N = COLUMNS / width;
    i64 H = r.sizes.H, K = r.sizes.K, V = r.sizes.V, first = part * COLUMNS, columns = std::min(COLUMNS, V - first);
    const float *q = r.queries(head) + row.first * K, *k = r.keys(head) + row.first * K, *gates = r.gates + row.first * 2 * H + head;
    float *v = r.values(head) + row.first * V + first, *state = r.state + (row.target * H + head) * K * V + first;
    const float* before = r.state + (row.source * H + head) * K * V + first;
    alignas(64) float near[MAX_DELTA * COLUMNS];
    if (row.start == 0 || columns < COLUMNS) memset(near, 0, K * COLUMNS * 4);
    if (row.start > 0) copy_columns(before, V, near, COLUMNS, K, columns);
    Vector said[N] = {};
    for (i64 t = -1; t < row.count; t++) {  // the first pass changes nothing: the same loop, so that its sums have the same bits
        i64 now = std::max<i64>(t, 0), next = std::min(t + 1, row.count - 1);
        const float *key = k + now * K, *query = q + now * K, *next_key = k + next * K;
        float decay = t < 0 ? 1.0f : gates[t * 2 * H + H], rate = t < 0 ? 0.0f : gates[t * 2 * H];
        alignas(64) float values[COLUMNS] = {};
        memcpy(values, v + now * V, columns * 4);
        Vector update[N], out[N] = {};
        for (int n = 0; n < N; n++) update[n] = (load<Vector>(values + n * width) - said[n] * decay) * rate, said[n] = Vector{};
        float* row_of_state = near;
        for (i64 i = 0; i < K; i++, row_of_state += COLUMNS)
            for (int n = 0; n < N; n++) {
                Vector x = load<Vector>(row_of_state + n * width) * decay + update[n] * key[i];
                store(row_of_state + n * width, x);
                out[n] += x * query[i];
                said[n] += x * next_key[i];
            }
        if (t < 0) continue;
        for (int n = 0; n < N; n++) store(values + n * width, out[n]);
        memcpy(v + t * V, values, columns * 4);
        if (t + 1 == row.kept) copy_columns(near, COLUMNS, state, V, K, columns);
    }
}

// A token's outputs, each head's normed, times silu of what gates them.
template <class Vector>
INLINE void finish_token(const Recurrence& r, i64 t) {
    const i64 step = sizeof(Vector) / 4;
    const DeltaSizes& s = r.sizes;
    for (i64 head = 0; head < s.H; head++) {
        const float* x = r.values(head) + t * s.V;
        const bf16* gate = r.inputs + t * s.width() + s.channels() + head * s.V;
        bf16* y = r.y + t * r.y_stride + head * s.V;
        Vector squares = {};
        for (i64 i = 0; i < s.V; i += step) {
            Vector part = numbers<Vector>(x + i, s.V - i);
            squares += part * part;
        }
        float scale = 1 / std::sqrt(total(squares) / s.V + r.eps);
        for (i64 i = 0; i < s.V; i += step) {
            i64 count = s.V - i;
            Vector normed = numbers<Vector>(x + i, count) * scale * numbers<Vector>(r.delta.gain + i, count);
            keep_numbers(y + i, normed * silu(numbers<Vector>(gate + i, count)), count);
        }
    }
}

struct ShortConv {  // of one layer in one step
    i64 C, W;
    Convolution convolution;
    const bf16* inputs;  // [T, 3 C]: what gates the convolution's inputs, what gates its sums, and the inputs
    float* before;       // of all slots: [C, W - 1]
    bf16* y;             // [T, C]
    i64 y_stride;
    i64 parts() const { return ceiling(C, CONVOLVED); }
};

// Some columns of a row: the gated sum over the last W gated inputs. A product of two bfloat16 is exact in float32.
template <class Vector>
INLINE void convolve_part(const ShortConv& c, const Sequence& row, i64 part) {
    const i64 step = sizeof(Vector) / 4;
    i64 first = part * CONVOLVED, columns = std::min(CONVOLVED, c.C - first);
    Seen seen(c.W, c.before + (row.source * c.C + first) * (c.W - 1), columns, row.start == 0);
    for (i64 t = row.first; t < row.first + row.count; t++) {
        const bf16* x = c.inputs + t * 3 * c.C + first;
        bf16* y = c.y + t * c.y_stride + first;
        for (i64 i = 0; i < columns; i += step) {
            i64 count = columns - i;
            Vector sum = {};
            if (c.convolution.bias) sum = numbers<Vector>(c.convolution.bias + first + i, count);
            store(seen.tokens[c.W - 1] + i, numbers<Vector>(x + i, count) * numbers<Vector>(x + 2 * c.C + i, count));
            sum = weighted(sum, seen, i, c.W, c.convolution.weight + first + i, c.C, count);
            keep_numbers(y + i, numbers<Vector>(x + c.C + i, count) * sum, count);
        }
        seen.turn(c.W);
        if (t + 1 == row.first + row.kept) seen.keep(c.W, c.before + (row.target * c.C + first) * (c.W - 1), columns);
    }
}
