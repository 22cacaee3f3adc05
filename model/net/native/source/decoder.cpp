// A whole bfloat16 decoder on a CPU, one call a step: plain C ABI, no torch headers.
//
// `attend_step` is `Decoder.forward` of transformer.py. Each heavy loop exists once for each instruction set; `attend_choose` picks one
// by number, `attend_has` says whether this CPU has one, and `attend_best` which is the best that it has. Threads are OpenMP's, as torch's are.
//
// Shapes: T tokens, E model width, M width of the MLP, V vocabulary, H query heads, K key/value heads, D head size,
// R columns of a head that are rotated, P positions.
#include <malloc.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <memory>

#include "attention_tiles.h"
#include "attention_vectors.h"
#include "blocks.h"
#include "delta.h"
#include "drawing.h"
#include "experts.h"
#include "quantised_tiles.h"
#include "quantised_vnni.h"
#include "threads.h"
#include "tiles.h"
#include "tokens.h"
#include "vectors.h"

// --- every loop once for each instruction set

struct Kernels {
    void (*embed)(const bf16* token, const float* position, float scale, bf16* to, i64 E);
    void (*join)(bf16* residual, const bf16* update, bf16* y, const Joint&, i64 E);
    void (*write)(bf16* qkv, const Heads&, const Cache&, const Turns&, const i64* positions, const i64* slots, i64 T);
    void (*multiply)(const Product&, i64 item);
    void (*multiply_whole)(const Product&, i64 item);
    void (*round)(const Product&, const Rounded&, i64 t);
    void (*shrink)(const bf16* x, const LowRank&, float* inner);
    void (*raise)(const Additions&, float* block, i64 pitch, i64 first, i64 rows, i64 panel, i64 panels);
    void (*attend)(const Tile&, const Tile* later, const Cache&, i64 K);
    void (*sum)(const bf16* updates, i64 stride, const i64* pairs, const float* weights, i64 calls, bf16* residual, bf16* y, float scale, i64 E);
    i64 (*draw)(const float* scores, i64 V, const Draw& row, float* room);
    bool (*score)(const float* scores, i64 V, const Scored& row);
    void (*gate)(const Tile&, i64 distance);
    void (*convolve)(const Recurrence&, const Sequence&, i64 head);
    void (*advance)(const Recurrence&, const Sequence&, i64 head, i64 part);
    void (*finish)(const Recurrence&, i64 t);
    i64 rows;  // queries that a tile of attention has at most, see `rows_of_tile`
    auto multiplier(const Matrix& matrix) const { return matrix.codes ? multiply_whole : multiply; }
};

// VECTOR: what the target has.
#define VARIANT(NAME, TARGET, VECTOR, MULTIPLY, WHOLE, ROUND, ATTEND)                                                                                  \
    TARGET static void embed_##NAME(const bf16* token, const float* position, float scale, bf16* to, i64 E) {                    \
        embed_token(token, position, scale, to, E);                                                                              \
    }                                                                                                                            \
    TARGET static void join_##NAME(bf16* residual, const bf16* update, bf16* y, const Joint& joint, i64 E) {                     \
        join_token(residual, update, y, joint, E);                                                                               \
    }                                                                                                                            \
    TARGET static void write_##NAME(bf16* qkv, const Heads& heads, const Cache& cache, const Turns& turns, const i64* positions, \
                                    const i64* slots, i64 T) {                                                                   \
        write_tokens(qkv, heads, cache, turns, positions, slots, T);                                                             \
    }                                                                                                                            \
    TARGET static void shrink_##NAME(const bf16* x, const LowRank& low, float* inner) { shrink_row<VECTOR>(x, low, inner); }     \
    TARGET static void raise_##NAME(const Additions& more, float* block, i64 pitch, i64 first, i64 rows, i64 panel, i64 panels) { \
        raise_rows<VECTOR>(more, block, pitch, first, rows, panel, panels);                                                      \
    }                                                                                                                            \
    TARGET __attribute__((unused)) static void tile_##NAME(const Tile& t, const Tile* later, const Cache& cache, i64 K) {        \
        attend_tile<VECTOR>(t, later, cache, K);                                                                                 \
    }                                                                                                                            \
    TARGET static void sum_##NAME(const bf16* updates, i64 stride, const i64* pairs, const float* weights, i64 calls,            \
                                  bf16* residual, bf16* y, float scale, i64 E) {                                                 \
        sum_token(updates, stride, pairs, weights, calls, residual, y, scale, E);                                                \
    }                                                                                                                            \
    TARGET static i64 draw_##NAME(const float* scores, i64 V, const Draw& row, float* room) {                                    \
        return draw_token<VECTOR>(scores, V, row, room);                                                                         \
    }                                                                                                                            \
    TARGET static bool score_##NAME(const float* scores, i64 V, const Scored& row) { return score_row<VECTOR>(scores, V, row); } \
    TARGET static void gate_##NAME(const Tile& t, i64 distance) { gate_tile<VECTOR>(t, distance); }                              \
    TARGET static void convolve_##NAME(const Recurrence& r, const Sequence& row, i64 head) { convolve<VECTOR>(r, row, head); }   \
    TARGET static void advance_##NAME(const Recurrence& r, const Sequence& row, i64 head, i64 part) {                            \
        advance_columns<VECTOR>(r, row, head, part);                                                                             \
    }                                                                                                                            \
    TARGET static void finish_##NAME(const Recurrence& r, i64 t) { finish_token<VECTOR>(r, t); }                                 \
    static const Kernels NAME = {embed_##NAME, join_##NAME, write_##NAME, MULTIPLY, WHOLE, ROUND, shrink_##NAME,   raise_##NAME,   ATTEND,     \
                                 sum_##NAME,   draw_##NAME, score_##NAME, gate_##NAME,  convolve_##NAME, advance_##NAME, finish_##NAME, LANES};

VARIANT(portable, , fours, multiply_portable, multiply_whole_portable, round_portable, tile_portable)
VARIANT(avx2, OF(AVX2), eights, multiply_avx2, multiply_whole_avx2, round_avx2, tile_avx2)
VARIANT(avx512, OF(AVX512), floats, multiply_avx512, multiply_whole_avx512, round_avx512, tile_avx512)

using Multiply = decltype(Kernels::multiply);
using Round = decltype(Kernels::round);
using Attend = decltype(Kernels::attend);

// The loops of another instruction set, with products of its own.
static Kernels with(Kernels kernels, Multiply multiply, Multiply whole, Round round, Attend attend, i64 rows = LANES) {
    kernels.multiply = multiply, kernels.multiply_whole = whole, kernels.round = round, kernels.attend = attend, kernels.rows = rows;
    return kernels;
}
static const Kernels avx2_vnni = with(avx2, multiply_avx2, multiply_whole_vnni256, round_vnni256, tile_avx2);
static const Kernels avx512_vnni = with(avx512, multiply_avx512, multiply_whole_vnni512, round_vnni512, tile_avx512);
static const Kernels avx512_bf16 = with(avx512, multiply_bf16, multiply_whole_vnni512, round_vnni512, attend_tile_pairs, MAX_ROWS);
static const Kernels amx = with(avx512, multiply_tiles, multiply_whole_amx, round_vnni512, attend_tile_amx);

static const Kernels* const KERNELS[] = {&portable, &avx2, &avx2_vnni, &avx512, &avx512_vnni, &avx512_bf16, &amx};
enum { PORTABLE, WITH_AVX2, WITH_AVX2_VNNI, WITH_AVX512, WITH_AVX512_VNNI, WITH_AVX512_BF16, WITH_AMX };
static int chosen = PORTABLE;

OF(AMX) static void release_tiles() { _tile_release(); }

// Threads that have used tiles give them back, so that the kernel need not save them.
template <class Work>
static void compute(i64 phases, Work work) {
    together(phases, [&](Team::Member& team) {
        work(team, *KERNELS[chosen]);
        if (chosen == WITH_AMX) release_tiles();
    });
}

static const i64 FEW_ROWS = 4;  // of x: whoever multiplies a matrix of codes makes them whole numbers

// A product as one phase, or as two where x becomes whole numbers first, in `room`.
static void multiply(Team::Member& team, const Kernels& kernels, Rounded room, Product p) {
    if (p.matrix->codes && p.T > FEW_ROWS) {
        room.rows = p.T;
        team.share(p.T, FEW_ROWS, [&](i64 begin, i64 end) {
            for (i64 t = begin; t < end; t++) kernels.round(p, room, t);
        });
        p.rounded = &room;
    }
    team.share(p.items(), 1, [&](i64 begin, i64 end) {
        for (i64 item = begin; item < end; item++) kernels.multiplier(*p.matrix)(p, item);
    });
}

struct Adapter {
    std::vector<LowRank> matrices;  // numbered as `attend_pack` numbers them; one that is not there adds nothing
};

// The adapters of a step's tokens, null where a token has none, and room for what one matrix needs of them.
struct Adapters {
    std::vector<const Adapter*> of_token;  // empty where no token has one
    std::vector<const LowRank*> of_row;
    std::vector<float> inner;
    i64 stride = 0;
    Additions additions;
};

// A product with what the step's adapters add to it.
static void adapted(Team::Member& team, const Kernels& kernels, Adapters& adapters, const Rounded& room, Product p) {
    if (adapters.of_token.empty()) return multiply(team, kernels, room, p);
    i64 number = p.matrix->number;
    team.share(p.T, 1, [&](i64 begin, i64 end) {
        for (i64 t = begin; t < end; t++) {
            const Adapter* adapter = adapters.of_token[t];
            const LowRank* low = adapter && adapter->matrices[number].there() ? &adapter->matrices[number] : nullptr;
            adapters.of_row[t] = low;
            if (low) kernels.shrink(p.x + t * p.stride, *low, adapters.inner.data() + t * adapters.stride);
        }
    });
    p.more = &adapters.additions;
    multiply(team, kernels, room, p);
}

struct Input {  // of a step: T tokens, and where they stand
    const i64 *tokens, *positions, *slots;
    i64 T;
};

static const i64 TOKENS = 4;  // of a piece of work on tokens
static const i64 WRITTEN = 32;  // of a piece that writes to the cache, where they are many: two threads seldom share a line of values

// How many queries a tile has at most: where vectors of pairs do not fit, no more than a vector of numbers.
static i64 rows_of_tile(const Kernels& kernels, i64 D, bool in_8_bits) { return D % (2 * LANES) || in_8_bits ? LANES : kernels.rows; }

// A layer's keys and values to the cache, then its attention: all is written before anything is read, for a request may share a
// block that another one fills in this step. In a piece of several tiles the next one's past is on its way.
static void attend(Team::Member& team, const Kernels& kernels, const Input& in, const Step& step, const std::vector<Work>& work,
                   const Turns& turns, const Attention& a) {
    i64 K = a.heads.K, tiles = (i64)work.size() * K;
    team.share(in.T, in.T < 4 * WRITTEN ? TOKENS : WRITTEN, [&](i64 begin, i64 end) {
        kernels.write(a.qkv + begin * a.heads.width(), a.heads, a.cache, turns, in.positions + begin, in.slots + begin, end - begin);
    });
    auto tile_at = [&](i64 n) { return tile_of(step, work[n / K], a, n % K); };
    team.share(tiles, std::clamp<i64>(tiles / (8 * omp_get_num_threads()), 1, 8), [&](i64 begin, i64 end) {
        Tile tile, later = tile_at(begin);
        for (i64 n = begin; n < end; n++) {
            bool last = n + 1 == end;
            tile = later;
            if (!last) later = tile_at(n + 1);
            kernels.attend(tile, last ? nullptr : &later, a.cache, K);
            if (a.heads.gated) kernels.gate(tile, a.heads.H * a.heads.D);
        }
    });
}

// A layer's delta rule: each head's convolution, then each part of its state, of long rows first; then each token by itself.
static void recur(Team::Member& team, const Kernels& kernels, const Recurrence& r, const std::vector<Sequence>& rows) {
    const DeltaSizes& s = r.sizes;
    auto share = [&](i64 grain, i64 pieces, auto work) {  // of each row
        team.share(pieces * (i64)rows.size(), grain, [&](i64 begin, i64 end) {
            for (i64 n = begin; n < end; n++) work(rows[rows.size() - 1 - n / pieces], n % pieces);
        });
    };
    share(1, s.heads(), [&](const Sequence& row, i64 head) { kernels.convolve(r, row, head); });
    i64 parts = s.parts(), all = s.H * parts * (i64)rows.size();
    share(std::clamp<i64>(all / (8 * omp_get_num_threads()), 1, parts), s.H * parts, [&](const Sequence& row, i64 n) {
        kernels.advance(r, row, n / parts, n % parts);
    });
    team.share(r.T, TOKENS, [&](i64 begin, i64 end) {
        for (i64 t = begin; t < end; t++) kernels.finish(r, t);
    });
}

// --- the decoder

struct Norms {  // of a sublayer: of what goes in, of what comes out, of the sum
    Norm input, output, sum;
};

enum Place { IN_TURN, PARALLEL, SHARED };  // attention and then the MLP, or both from the same residual: each with its norm, or with one

struct MLP {
    Matrix up, down;  // up: with its gates
};

struct Layer {
    Norms of_attention, of_mlp;
    Turns turns;
    Matrix qkv, out, router;  // router: with the gate of the shared expert as its last row
    bool recurs = false;      // a delta rule, else attention
    Matrix inputs, gates, merge;
    Delta delta;
    bool mixed = false;       // experts, else one MLP
    std::vector<MLP> mlps;    // the shared expert is the last
    Variant variant;
};

struct Slot {  // a matrix that is packed one day, from [N, K]
    Matrix* matrix;
    i64 N, K;
    bool gated;
};

// Room for a row of x: whole tiles, and an odd number of cache lines, so that 16 rows do not meet in few sets of the cache.
static i64 stride_of(i64 columns) { return (ceiling(columns, PAD) | 1) * PAD; }

struct Net {
    Heads heads;
    i64 E, M, V;
    Mixture mixture;
    DeltaSizes delta;
    Place place;
    bool gated;
    int activation, kind;  // kind: of the products that end in an activation
    Clamp clamp;
    float eps, embedding_scale, residual_scale;
    const bf16* embedding;
    const float* positions;  // null where they are not added
    Norm last;
    Arena arena;
    Matrix head, table;  // table: an embedding in whole numbers that is not the head
    std::vector<Layer> layers;
    std::vector<Slot> slots;
    Routing routing;
    Adapters adapters;
    i64 room = 0;  // tokens that fit into the buffers
    std::vector<int16_t> rounded_numbers;  // of what a matrix of codes multiplies, see Rounded
    std::vector<int8_t> rounded_bytes;
    std::vector<int32_t> rounded_sums;
    std::vector<float> rounded_scales;
    Rounded rounded = {};
    bf16 *normed = nullptr, *qkv = nullptr, *mixed = nullptr, *active = nullptr;
    bf16 *pairs = nullptr, *inner = nullptr, *shared = nullptr;  // of experts: what each pair reads, and then its update; what lies between
    bf16 *inputs = nullptr, *recurred = nullptr;  // of delta rules: [T, width], and what is merged
    std::vector<float> gates, delta_heads;        // see Recurrence
    std::vector<bf16**> buffers() { return {&normed, &qkv, &mixed, &active, &pairs, &inner, &shared, &inputs, &recurred}; }
    i64 normed_stride() const { return stride_of(E); }
    i64 mixed_stride() const { return stride_of(heads.H * heads.D); }
    i64 active_stride() const { return stride_of(M); }
    i64 recurred_stride() const { return stride_of(delta.H * delta.V); }
    ~Net() {
        for (bf16** buffer : buffers()) free(*buffer);
    }
};

static bf16* zeros(i64 count) {
    void* memory = allocate(count * 2);
    memset(memory, 0, count * 2);
    return (bf16*)memory;
}

static void make_room(Net& net, i64 T) {
    if (T <= net.room) return;
    for (bf16** buffer : net.buffers()) free(*buffer), *buffer = nullptr;
    net.room = 0;
    i64 room = ceiling(std::max<i64>(T, 64), PAD) * PAD;
    net.normed = zeros(room * net.normed_stride());
    net.qkv = zeros(room * net.heads.width());
    net.mixed = zeros(room * net.mixed_stride());
    net.active = zeros(room * net.active_stride());
    i64 widest = 0;  // of what is multiplied by codes
    for (const Slot& slot : net.slots) widest = std::max(widest, slot.matrix->codes ? slot.matrix->K : 0);
    if (widest) {
        net.rounded_numbers.resize(room * widest), net.rounded_bytes.resize(room * widest);
        net.rounded_sums.resize(room * widest / GROUP), net.rounded_scales.resize(room * widest / GROUP);
        net.rounded = {net.rounded_numbers.data(), net.rounded_bytes.data(), net.rounded_sums.data(), net.rounded_scales.data(), 0};
    }
    if (const Mixture& m = net.mixture; m.X) {  // buffers of their own: what fills up a row must stay zero
        net.pairs = zeros(room * m.calls() * net.normed_stride());
        net.inner = zeros(room * m.C * stride_of(m.F));
        net.shared = zeros(room * stride_of(m.S));
        net.routing.make_room(m, room);
    }
    if (const DeltaSizes& s = net.delta; s.H) {
        net.inputs = zeros(room * s.width()), net.recurred = zeros(room * net.recurred_stride());
        net.gates.resize(room * 2 * s.H), net.delta_heads.resize(room * s.channels());
    }
    net.room = room;
}

// The vector of a token [E]. A tied head is its embedding too: then it is copied to `room`, for the matrix is there once.
static const bf16* vector_of(const Net& net, i64 token, bf16* room) {
    if (net.embedding) return net.embedding + token * net.E;
    unpack_row(net.table.N ? net.table : net.head, token, net.E, room);
    return room;
}

static const i64 WORTH_THREADS = 1 << 15;  // scores: a thread that sleeps takes longer to wake than fewer take to look at

// From one sublayer to the next, which reads y; `last` is null before the first.
static void join(Team::Member& team, const Kernels& kernels, const Net& net, const Norms* last, const Norm& next, bf16* residual, bf16* y,
                 i64 y_stride, i64 T) {
    Joint joint = {last ? last->output : Norm{}, last ? last->sum : Norm{}, next, net.residual_scale};
    team.share(T, TOKENS, [&](i64 begin, i64 end) {
        for (i64 t = begin; t < end; t++)
            kernels.join(residual + t * net.E, net.normed + t * net.normed_stride(), y + t * y_stride, joint, net.E);
    });
}

// A sublayer's last product: added at once, or left in `normed` for the norm that comes before the sum.
static Product update(const Net& net, const Norms& norms, const bf16* x, i64 stride, i64 T, const Matrix& matrix, bf16* residual) {
    if (norms.output.gain) return {x, stride, T, &matrix, STORE, net.normed, net.normed_stride()};
    return {x, stride, T, &matrix, ADD, residual, net.E, net.residual_scale};
}

// The product of a group of pairs by the first or the last matrix of their expert. One token alone needs no copies of what it reads.
static Product up_of(const Net& net, const Layer& layer, const Group& group, i64 T) {
    const Mixture& m = net.mixture;
    const MLP& mlp = layer.mlps[group.expert];
    i64 stride = net.normed_stride();
    const bf16* x = T == 1 || group.expert == m.X ? net.normed : net.pairs + group.first * stride;
    bool shared = group.expert == m.X;
    i64 y_stride = stride_of(shared ? m.S : m.F);
    bf16* y = shared ? net.shared : net.inner + group.first * y_stride;
    return {x, stride, group.count, &mlp.up, net.kind, y, y_stride, 1, net.clamp, nullptr, net.routing.used};
}

static Product down_of(const Net& net, const Layer& layer, const Group& group) {
    const Mixture& m = net.mixture;
    bool shared = group.expert == m.X;
    i64 stride = stride_of(shared ? m.S : m.F), y_stride = net.normed_stride();
    const bf16* x = shared ? net.shared : net.inner + group.first * stride;
    return {x, stride, group.count, &layer.mlps[group.expert].down, STORE, net.pairs + group.first * y_stride, y_stride, 1, {}, nullptr, net.routing.used};
}

// The products of all groups as one phase; `items` is the member of Group that counts their work.
template <class ProductOf>
static void multiply_groups(Team::Member& team, const Kernels& kernels, const Routing& routing, i64 Group::* items, ProductOf product_of) {
    const Group *first = routing.groups.data(), *end = first + routing.used;
    team.share(end[-1].*items, 1, [&](i64 begin, i64 stop) {
        for (i64 item = begin; item < stop; item++) {
            const Group* group = std::upper_bound(first, end, item, [=](i64 at, const Group& each) { return at < each.*items; });
            Product p = product_of(*group);
            kernels.multiplier(*p.matrix)(p, item - (group == first ? 0 : group[-1].*items));
        }
    });
}

static const i64 FEW = 64;  // tokens: one thread sends them to their experts in less time than two take to share that

// Sends tokens to experts, and copies what each pair reads.
static void route(Team::Member& team, const Kernels& kernels, Net& net, const Layer& layer, i64 T) {
    const Mixture& m = net.mixture;
    Routing& r = net.routing;
    i64 stride = net.normed_stride(), pairs = T == 1 ? 0 : T * m.C;
    auto send = [&](i64 begin, i64 end) {
        for (i64 t = begin; t < end; t++) route_token(m, r, t);
    };
    auto copy = [&](i64 begin, i64 end) {
        for (i64 pair = begin; pair < end; pair++) memcpy(net.pairs + pair * stride, net.normed + r.tokens[pair] * stride, net.E * 2);
    };
    multiply(team, kernels, net.rounded, {net.normed, stride, T, &layer.router, SCORES, r.scores.data(), m.experts()});
    if (T > FEW) team.share(T, TOKENS, send);
    team.share(1, 1, [&](i64, i64) {
        if (T <= FEW) send(0, T);
        group_pairs(m, r, T);
        i64 ups = 0, downs = 0;
        for (i64 n = 0; n < r.used; n++) {
            Group& group = r.groups[n];
            group.up_items = ups += up_of(net, layer, group, T).items();
            group.down_items = downs += down_of(net, layer, group).items();
        }
        if (T <= FEW) copy(0, pairs);
    });
    if (T > FEW) team.share(pairs, TOKENS, copy);
}

// An MLP up to its activation, which stays where it is until `mlp_out`.
static void mlp_in(Team::Member& team, const Kernels& kernels, Net& net, const Layer& layer, i64 T) {
    i64 stride = net.normed_stride();
    if (!layer.mixed)
        return adapted(team, kernels, net.adapters, net.rounded, {net.normed, stride, T, &layer.mlps[0].up, net.kind, net.active, net.active_stride(), 1, net.clamp});
    route(team, kernels, net, layer, T);
    multiply_groups(team, kernels, net.routing, &Group::up_items, [&](const Group& group) { return up_of(net, layer, group, T); });
}

static void mlp_out(Team::Member& team, const Kernels& kernels, Net& net, const Layer& layer, i64 T, bf16* residual) {
    if (!layer.mixed)
        return adapted(team, kernels, net.adapters, net.rounded, update(net, layer.of_mlp, net.active, net.active_stride(), T, layer.mlps[0].down, residual));
    const Routing& r = net.routing;
    i64 stride = net.normed_stride(), calls = net.mixture.calls();
    bool added = !layer.of_mlp.output.gain;
    multiply_groups(team, kernels, r, &Group::down_items, [&](const Group& group) { return down_of(net, layer, group); });
    team.share(T, TOKENS, [&](i64 begin, i64 end) {
        for (i64 t = begin; t < end; t++)
            kernels.sum(net.pairs, stride, r.pairs.data() + t * calls, r.weights.data() + t * calls, calls,
                        added ? residual + t * net.E : nullptr, net.normed + t * stride, net.residual_scale, net.E);
    });
}

static const i64 PHASES_OF_LAYER = 20, PHASES_OF_ADAPTERS = 5;  // at most

struct Rows {  // of a step, as attention and as delta rules go through them
    i64 of_tile;
    std::vector<Work> work;
    std::vector<Sequence> sequences;
};

struct Memory {  // of one layer: keys and values, or states in all slots, see Recurrence
    Cache cache;
    float *before, *state;
};

// The products that attention begins with, or a delta rule.
static void mix_in(Team::Member& team, const Kernels& kernels, Net& net, const Layer& layer, i64 T) {
    i64 stride = net.normed_stride();
    if (!layer.recurs) return adapted(team, kernels, net.adapters, net.rounded, {net.normed, stride, T, &layer.qkv, STORE, net.qkv, net.heads.width()});
    adapted(team, kernels, net.adapters, net.rounded, {net.normed, stride, T, &layer.inputs, STORE, net.inputs, net.delta.width()});
    adapted(team, kernels, net.adapters, net.rounded, {net.normed, stride, T, &layer.gates, SCORES, net.gates.data(), 2 * net.delta.H});
}

// What comes between, and the last product.
static void mix_out(Team::Member& team, const Kernels& kernels, Net& net, const Layer& layer, const Memory& memory, const Input& in,
                    const Step& step, const Rows& rows, bf16* residual) {
    if (!layer.recurs) {
        i64 stride = net.mixed_stride();
        attend(team, kernels, in, step, rows.work, layer.turns, {net.heads, memory.cache, layer.variant, net.qkv, net.mixed, stride, rows.of_tile});
        return adapted(team, kernels, net.adapters, net.rounded, update(net, layer.of_attention, net.mixed, stride, in.T, layer.out, residual));
    }
    i64 stride = net.recurred_stride();
    recur(team, kernels,
          {net.delta, layer.delta, net.activation, net.eps, in.T, net.inputs, net.gates.data(), net.delta_heads.data(), memory.before,
           memory.state, net.recurred, stride},
          rows.sequences);
    adapted(team, kernels, net.adapters, net.rounded, update(net, layer.of_attention, net.recurred, stride, in.T, layer.merge, residual));
}

static void layer_of(Team::Member& team, const Kernels& kernels, Net& net, const Layer& layer, const Norms* last, const Memory& memory,
                     const Input& in, const Step& step, const Rows& rows, bf16* residual) {
    i64 T = in.T, stride = net.normed_stride();
    join(team, kernels, net, last, layer.of_attention.input, residual, net.normed, stride, T);
    mix_in(team, kernels, net, layer, T);
    if (net.place == PARALLEL) join(team, kernels, net, nullptr, layer.of_mlp.input, residual, net.normed, stride, T);
    if (net.place != IN_TURN) mlp_in(team, kernels, net, layer, T);
    mix_out(team, kernels, net, layer, memory, in, step, rows, residual);
    if (net.place == IN_TURN) {
        join(team, kernels, net, &layer.of_attention, layer.of_mlp.input, residual, net.normed, stride, T);
        mlp_in(team, kernels, net, layer, T);
    }
    mlp_out(team, kernels, net, layer, T, residual);
}

// The matrices in the order in which they are packed: see `attend_pack`.
static void list_matrices(Net& net) {
    auto add = [&](Matrix& matrix, i64 N, i64 K, bool gated = false) { net.slots.push_back({&matrix, N, K, gated}); };
    const Mixture& m = net.mixture;
    add(net.head, net.V, net.E);
    for (Layer& layer : net.layers) {
        i64 count = layer.mixed ? m.X : 1, width = layer.mixed ? m.F : net.M, sides = net.gated ? 2 : 1;
        const DeltaSizes& s = net.delta;
        if (layer.recurs)
            add(layer.inputs, s.width(), net.E), add(layer.gates, 2 * s.H, net.E), add(layer.merge, net.E, s.H * s.V);
        else
            add(layer.qkv, net.heads.width(), net.E), add(layer.out, net.E, net.heads.H * net.heads.D);
        if (layer.mixed) add(layer.router, m.experts(), net.E);
        for (i64 n = 0; n < count; n++) add(layer.mlps[n].up, sides * width, net.E, net.gated);
        for (i64 n = 0; n < count; n++) add(layer.mlps[n].down, net.E, width);
        if (layer.mixed && m.S) add(layer.mlps[m.X].up, 2 * m.S, net.E, true), add(layer.mlps[m.X].down, net.E, m.S);
    }
    add(net.table, net.V, net.E);
}

#ifdef STAND_INS
static bool has(int) { return true; }
#else
static bool may_use_tiles() {  // the kernel gives the tiles' state only to those who ask (Linux 5.16)
    const int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
}

// Whether this CPU has instruction set `number`, and with it all that its kernels use.
static bool has(int number) {
    __builtin_cpu_init();
    unsigned a = 7, b = 0, c = 0, d = 0, more = 7, b1 = 0, c1 = 1, d1 = 0;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    __asm__("cpuid" : "+a"(more), "=b"(b1), "+c"(c1), "=d"(d1));
    switch (number) {
        case PORTABLE: return true;
        case WITH_AVX2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
        case WITH_AVX2_VNNI: return has(WITH_AVX2) && (more >> 4 & 1);
        case WITH_AVX512:
            return has(WITH_AVX2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
        case WITH_AVX512_VNNI: return has(WITH_AVX512) && __builtin_cpu_supports("avx512vnni");
        case WITH_AVX512_BF16: return has(WITH_AVX512_VNNI) && __builtin_cpu_supports("avx512bf16");
        case WITH_AMX: return has(WITH_AVX512_BF16) && (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1) && may_use_tiles();
    }
    return false;
}
#endif

// Calls look(kernels, row) for each row of scores [R, V], in several threads where that is worth it.
template <class Look>
static void each_row(i64 R, i64 V, Look look) {
    auto some = [&](const Kernels& kernels, i64 begin, i64 end) {
        for (i64 r = begin; r < end; r++) look(kernels, r);
    };
    if (R * V <= WORTH_THREADS) return some(*KERNELS[chosen], 0, R);
    compute(1, [&](Team::Member& team, const Kernels& kernels) {
        team.share(R, 1, [&](i64 begin, i64 end) { some(kernels, begin, end); });
    });
}

extern "C" {

int attend_has(int number) { return has(number); }

// The number of the best instruction set that this CPU has.
int attend_best() {
    int best = WITH_AMX;
    while (!has(best)) best--;
    return best;
}

void attend_choose(int number) { chosen = number; }

// A decoder without its matrices. Sizes: {layers, E, M, V, H, K, D, R, activation, whether the MLP is gated, whether norms are layer norms, whether
// queries and keys are normed over all heads, the Place of attention and MLP, X, C, F, S, whether experts weigh their part of the softmax over all,
// whether attention is gated, J, H, K, V, W of delta rules, then for each layer whether it has experts, and for each whether it has a delta rule};
// what is not there has sizes of 0. Numbers: {eps, scale of the embedding, scale of what is added to the residual, limit and slope of gpt-oss' gates,
// whose limit is 0 elsewhere}.
//
// A norm is {gain, bias}, null where there is none. Arrays: {embedding [V, E], or null where the head is it, positions [P, E] or null}, the final
// norm, then for each layer the norms of {attention's input, output, sum, queries, keys, the MLP's input, output, sum}, {cos, sin [P, R]} or nulls,
// the sinks [H] or null, and of a delta rule {its convolution [W, C], exp(log speed) [H], the bias of its steps [H], its gain [V]} or nulls. The
// embedding is bfloat16, all others float32. All of them must outlive it.
// Variants: {scale, softcap, window} of each layer. Null where the memory does not suffice.
Net* attend_new(const i64* sizes, const void* const* arrays, const float* numbers, const float* variants) try {
    auto net = std::make_unique<Net>();
    i64 layers = sizes[0];
    net->E = sizes[1], net->M = sizes[2], net->V = sizes[3];
    net->heads = {sizes[4], sizes[5], sizes[6], sizes[18] != 0};
    net->gated = sizes[9], net->place = (Place)sizes[12];
    net->mixture = {sizes[13], sizes[14], sizes[15], sizes[16], sizes[17] != 0};
    net->delta = {sizes[19], sizes[20], sizes[21], sizes[22], sizes[23]};
    net->eps = numbers[0], net->embedding_scale = numbers[1], net->residual_scale = numbers[2];
    net->clamp = {numbers[3], numbers[4]};
    net->activation = (int)sizes[8];
    net->kind = net->gated && net->clamp.limit > 0 ? CLAMPED : (net->gated ? GATED : ACTIVATED) + net->activation;
    auto next = [&] { return (const float*)*arrays++; };
    auto norm = [&] {
        Norm norm = {next(), nullptr, sizes[10] != 0, numbers[0]};
        norm.bias = next();
        return norm;
    };
    auto norms = [&] {
        Norms norms;
        norms.input = norm(), norms.output = norm(), norms.sum = norm();
        return norms;
    };
    net->embedding = (const bf16*)next(), net->positions = next();
    net->last = norm();
    for (i64 n = 0; n < layers; n++, variants += 3) {
        Layer layer;
        layer.of_attention = norms();
        layer.turns.q = norm(), layer.turns.k = norm();
        layer.turns.all = sizes[11];
        layer.of_mlp = norms();
        layer.turns.cos = next(), layer.turns.sin = next();
        layer.turns.R = layer.turns.cos ? sizes[7] : 0;
        layer.variant = {variants[0], variants[1], (i64)variants[2], next()};
        layer.delta.convolution = next(), layer.delta.speed = next(), layer.delta.step_bias = next(), layer.delta.gain = next();
        layer.mixed = sizes[24 + n], layer.recurs = sizes[24 + layers + n];
        layer.mlps.resize(layer.mixed ? net->mixture.experts() : 1);
        net->layers.push_back(std::move(layer));
    }
    list_matrices(*net);
    return net.release();
} catch (const std::bad_alloc&) {
    return nullptr;
}

enum Packing { PACKED, NO_MEMORY, NOT_FINITE };

// Copy one matrix, which may be freed then. Number 0 is the head [V, E]; then come for each layer qkv [(H + 2K) D, E], with H D rows more behind the
// queries where attention is gated, and out [E, H D]; or of a delta rule inputs [C + H V, E], gates [2H, E] and merge [E, H V]; then gate and up
// [2M, E], or up [M, E], and down [E, M]; or with experts the router [X, E], whose last row is the gate of the shared one, gate and up of each expert
// [2F, E], down of each [E, F], and of the shared one [2S, E] and [E, S]. The last number is an embedding [V, E] in whole numbers that is not the
// head. It comes in parts that lie under each other. The bias may be null. Returns a Packing, NOT_FINITE + n for part n, counted from 0.
int attend_pack(Net* net, i64 number, const PlainRows* parts, const bf16* bias) try {
    const Slot& slot = net->slots[number];
    i64 broken;
    *slot.matrix = pack(net->arena, parts, bias, slot.N, slot.K, slot.gated, broken);
    slot.matrix->number = number;
    return broken ? NOT_FINITE + (int)broken - 1 : PACKED;
} catch (const std::bad_alloc&) {
    return NO_MEMORY;
}

// The same of a matrix in whole numbers, see CodedRows.
int attend_pack_codes(Net* net, i64 number, i64 bits, const uint8_t* codes, const uint16_t* scales, const uint16_t* minima, const float* units,
                      const int8_t* table, const bf16* bias) try {
    const Slot& slot = net->slots[number];
    const CodedRows rows = {bits, ceiling(slot.K, GROUP), codes, scales, minima, units};
    *slot.matrix = pack(net->arena, rows, {bits, minima != nullptr, table}, bias, slot.N, slot.K, slot.gated);
    slot.matrix->number = number;
    return PACKED;
} catch (const std::bad_alloc&) {
    return NO_MEMORY;
}

// The same of parts in blocks of GGUF.
int attend_pack_blocks(Net* net, i64 number, i64 bits, int has_minima, const int8_t* table, const bf16* bias, const BlockRows* parts) try {
    const Slot& slot = net->slots[number];
    const BlockParts rows(parts, slot.K / GROUP, bits);
    *slot.matrix = pack(net->arena, rows, {bits, has_minima != 0, table}, bias, slot.N, slot.K, slot.gated);
    slot.matrix->number = number;
    i64 broken = rows.broken.load();
    return broken ? NOT_FINITE + (int)broken - 1 : PACKED;
} catch (const std::bad_alloc&) {
    return NO_MEMORY;
}

// `count` rows from `first` on of matrix `number` of `attend_pack`, as they were given: float32 [count, columns]. Beside steps, in any thread.
void attend_unpack(const Net* net, i64 number, i64 first, i64 count, float* to) {
    const Slot& slot = net->slots[number];
    for (i64 n = 0; n < count; n++) unpack_row(*slot.matrix, place_of(first + n, slot.N, slot.gated), slot.K, to + n * slot.K);
}

// Give back to the system what was freed. Only glibc keeps it.
void attend_trim() {
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

// An adapter of this decoder that adds nothing yet. Null where the memory does not suffice.
Adapter* attend_adapter_new(const Net* net) try {
    auto adapter = std::make_unique<Adapter>();
    adapter->matrices.resize(net->slots.size());
    return adapter.release();
} catch (const std::bad_alloc&) {
    return nullptr;
}

// What it adds to matrix `number`, see `attend_pack`: down [ranks, columns of the matrix] and up [rows of the matrix, ranks], float32, which
// are copied. parts [count] are {first row, last row, first rank, last rank}, the lasts not included: elsewhere `up` is zero. 1 where the
// memory does not suffice, else 0.
int attend_adapter_set(const Net* net, Adapter* adapter, i64 number, const float* down, const float* up, i64 ranks, i64 columns,
                       const i64* parts, i64 count) try {
    const Slot& slot = net->slots[number];
    adapter->matrices[number] = low_rank(*slot.matrix, slot.gated, down, up, ranks, columns, parts, count);
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

void attend_adapter_free(Adapter* adapter) { delete adapter; }

// The adapters of the tokens [T] of the next steps, each null or alive until others are given here, and their most ranks; T = 0: none has
// one. 1 where the memory does not suffice, else 0.
int attend_adapt(Net* net, const Adapter* const* of_token, i64 T, i64 ranks) try {
    Adapters& adapters = net->adapters;
    adapters.stride = ceiling(ranks, LANES) * LANES;
    adapters.of_row.resize(T);
    if ((i64)adapters.inner.size() < T * adapters.stride) adapters.inner.resize(T * adapters.stride);
    adapters.additions = {adapters.of_row.data(), adapters.inner.data(), adapters.stride, KERNELS[chosen]->raise};
    adapters.of_token.assign(of_token, of_token + T);
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

void attend_free(Net* net) { delete net; }

// One step: T tokens of `rows` requests, which have starts and counts. keys and values are the layers' caches, bfloat16 or in 8 bits. Layers belong to groups:
// slots and blocks are the tokens' slots [T] and the requests' block table [rows, width] in each group. states are {before, state} of each layer,
// see Recurrence, and places [rows] the requests' slots in them. residual [T, E] is for use in between; hidden [T, E] is the result.
// Each thread adds 1 to `pulse` after each layer: others may read it meanwhile.
// Not for two threads at once. 1 where the memory does not suffice, else 0.
int attend_step(Net* net, const i64* tokens, const i64* positions, const i64* const* slots, i64 T, bf16* const* keys, bf16* const* values,
                 i64 block_size, int in_8_bits, const i64* groups, const i64* starts, const i64* counts, i64 rows, const i64* const* blocks, i64 width,
                 float* const* states, const i64* places, bf16* residual, bf16* hidden, i64* pulse) try {
    make_room(*net, T);
    i64 of_tile = rows_of_tile(*KERNELS[chosen], net->heads.D, in_8_bits);
    Rows all = {of_tile, work_of({starts, counts, blocks[0], rows, width}, of_tile / (net->heads.H / net->heads.K)), {}};
    for (i64 row = 0, first = 0; places && row < rows; first += counts[row++]) all.sequences.push_back({first, counts[row], starts[row], places[row]});
    i64 phases = PHASES_OF_LAYER + (net->adapters.of_token.empty() ? 0 : PHASES_OF_ADAPTERS);
    compute(phases * (i64)net->layers.size() + 2, [&](Team::Member& team, const Kernels& kernels) {
        team.share(T, TOKENS, [&](i64 a, i64 b) {
            for (i64 t = a; t < b; t++) {
                const float* position = net->positions ? net->positions + positions[t] * net->E : nullptr;
                bf16* to = residual + t * net->E;
                kernels.embed(vector_of(*net, tokens[t], to), position, net->embedding_scale, to, net->E);
            }
        });
        const Norms* last = nullptr;
        for (size_t n = 0; n < net->layers.size(); n++) {
            const Layer& layer = net->layers[n];
            Input in = {tokens, positions, slots[groups[n]], T};
            Step step = {starts, counts, blocks[groups[n]], rows, width};
            Memory memory = {{keys[n], values[n], block_size, in_8_bits != 0}, states[2 * n], states[2 * n + 1]};
            layer_of(team, kernels, *net, layer, last, memory, in, step, all, residual);
            last = &layer.of_mlp;
            __atomic_fetch_add(pulse, 1, __ATOMIC_RELAXED);
        }
        join(team, kernels, *net, last, net->last, residual, hidden, net->E, T);
    });
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

// Scores [T, V] of hidden states [T, E], in float32. 1 where the memory does not suffice, else 0.
int attend_logits(Net* net, const bf16* hidden, i64 T, float* scores) try {
    make_room(*net, T);
    for (i64 t = 0; t < T; t++) memcpy(net->normed + t * net->normed_stride(), hidden + t * net->E, net->E * 2);
    compute(2, [&](Team::Member& team, const Kernels& kernels) {
        multiply(team, kernels, net->rounded, {net->normed, net->normed_stride(), T, &net->head, SCORES, scores, net->V});
    });
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

// For each row of scores [R, V] the best token, or a draw under the row's key, changes and limits where its temperature is above 0; UNSCORED or
// EXCLUDED where there is none. 1 where the memory does not suffice, else 0.
int attend_draw(const float* scores, i64 R, i64 V, const Draw* rows, i64* tokens) try {
    thread_local std::vector<float> changed;  // a row for each thread
    i64 room = std::any_of(rows, rows + R, [](const Draw& row) { return row.changes != nullptr; }) ? V : 0;
    if ((i64)changed.size() < room * omp_get_max_threads()) changed.resize(room * omp_get_max_threads());
    float* to = changed.data();
    each_row(R, V, [=](const Kernels& kernels, i64 r) {
        tokens[r] = kernels.draw(scores + r * V, V, rows[r], to + room * omp_get_thread_num());
    });
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

// The log probabilities that are asked of each row of scores [R, V]. The number of rows that have none: their scores are not finite.
i64 attend_score(const float* scores, i64 R, i64 V, const Scored* rows) {
    std::atomic<i64> strange{0};
    each_row(R, V, [&](const Kernels& kernels, i64 r) { strange += !kernels.score(scores + r * V, V, rows[r]); });
    return strange;
}

// One layer's attention for queries, keys and values [T, (H + 2K) D] that are rotated already; out [T, H D]. Sinks [H] or null.
void attend_layer(bf16* qkv, const i64* slots, i64 T, i64 H, i64 K, i64 D, bf16* keys, bf16* values, i64 block_size, int in_8_bits, const i64* starts,
                  const i64* counts, i64 rows, const i64* blocks, i64 width, bf16* out, const float* variant, const float* sinks) {
    Step step = {starts, counts, blocks, rows, width};
    Attention a = {{H, K, D}, {keys, values, block_size, in_8_bits != 0}, {variant[0], variant[1], (i64)variant[2], sinks}, qkv, out, H * D,
                   rows_of_tile(*KERNELS[chosen], D, in_8_bits)};
    std::vector<Work> work = work_of(step, a.tokens_of_tile());
    Input in = {nullptr, slots, slots, T};
    compute(2, [&](Team::Member& team, const Kernels& kernels) { attend(team, kernels, in, step, work, {}, a); });
}
}
