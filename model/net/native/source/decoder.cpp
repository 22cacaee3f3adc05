// A whole bfloat16 decoder on a CPU, one call a step: plain C ABI, no torch headers.
//
// `attend_step` is `Decoder.forward` of transformer.py. Each heavy loop exists once for each instruction set; `attend_choose` picks one
// by number, `attend_has` says whether this CPU has one, and `attend_best` which is the best that it has. Threads are those of threads.h; matrices are packed by OpenMP's.
//
// Shapes: T tokens, E model width, M width of the MLP, V vocabulary, H query heads, K key/value heads, D head size,
// R columns of a head that are rotated, P positions.
#include <malloc.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <map>
#include <memory>

#include "attention_tiles.h"
#include "attention_vectors.h"
#include "blocks.h"
#include "delta.h"
#include "drawing.h"
#include "experts.h"
#include "pairs.h"
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
    void (*modulate)(bf16* x, const bf16* factors, i64 E);
    void (*write)(bf16* qkv, const Heads&, const Cache&, const Turns&, const i64* positions, const i64* slots, i64 T);
    void (*multiply)(const Product&, i64 item);
    void (*multiply_whole)(const Product&, i64 item);
    void (*round)(const Product&, const Rounded&, i64 t);
    void (*shrink)(const bf16* x, const LowRank&, float* inner);
    void (*raise)(const Additions&, float* block, i64 pitch, i64 first, i64 rows, i64 panel, i64 panels);
    void (*attend)(const Tile&, const Tile* later, const Cache&, i64 K);
    void (*sum)(const bf16* updates, i64 stride, const i64* pairs, const float* weights, i64 calls, bf16* residual, bf16* y, float scale, i64 E);
    i64 (*draw)(const float* scores, i64 V, const Draw& row, DrawRoom& room);
    void (*score)(const float* scores, i64 V, const Scored& row);
    void (*cap)(float* scores, i64 V, float scale, float softcap);
    void (*merge)(const Tile&, const Partial& all, const Partial& more);
    void (*finish_tile)(const Tile&, const Partial& all);
    void (*gate)(const Tile&, i64 distance);
    void (*convolve)(const Recurrence&, const Sequence&, i64 head);
    void (*advance)(const Recurrence&, const Sequence&, i64 head, i64 part);
    void (*finish)(const Recurrence&, i64 t);
    void (*short_convolve)(const ShortConv&, const Sequence&, i64 part);
    void (*gate_heads)(bf16* token, const float* gates, i64 H, i64 D);
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
    TARGET static void modulate_##NAME(bf16* x, const bf16* factors, i64 E) { modulate_token(x, factors, E); }                   \
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
    TARGET static i64 draw_##NAME(const float* scores, i64 V, const Draw& row, DrawRoom& room) {                                 \
        return draw_token<VECTOR>(scores, V, row, room);                                                                         \
    }                                                                                                                            \
    TARGET static void score_##NAME(const float* scores, i64 V, const Scored& row) { score_row<VECTOR>(scores, V, row); }        \
    TARGET static void cap_##NAME(float* scores, i64 V, float scale, float softcap) { cap_scores<VECTOR>(scores, V, scale, softcap); } \
    TARGET static void merge_##NAME(const Tile& t, const Partial& all, const Partial& more) { merge_partials<VECTOR>(t, all, more); } \
    TARGET static void finish_tile_##NAME(const Tile& t, const Partial& all) {                                                   \
        for (i64 j = 0; j < t.lanes; j++) keep_lane(t, j, all.highest[j], all.totals[j], all.sums + j * Partial::pitch(t.D));     \
    }                                                                                                                            \
    TARGET static void gate_##NAME(const Tile& t, i64 distance) { gate_tile<VECTOR>(t, distance); }                              \
    TARGET static void convolve_##NAME(const Recurrence& r, const Sequence& row, i64 head) { convolve<VECTOR>(r, row, head); }   \
    TARGET static void advance_##NAME(const Recurrence& r, const Sequence& row, i64 head, i64 part) {                            \
        advance_columns<VECTOR>(r, row, head, part);                                                                             \
    }                                                                                                                            \
    TARGET static void finish_##NAME(const Recurrence& r, i64 t) { finish_token<VECTOR>(r, t); }                                 \
    TARGET static void short_convolve_##NAME(const ShortConv& c, const Sequence& row, i64 part) {                                \
        convolve_part<VECTOR>(c, row, part);                                                                                     \
    }                                                                                                                            \
    TARGET static void gate_heads_##NAME(bf16* token, const float* gates, i64 H, i64 D) {                                        \
        gate_token<VECTOR>(token, gates, H, D);                                                                                  \
    }                                                                                                                            \
    static const Kernels NAME = {embed_##NAME, join_##NAME, modulate_##NAME, write_##NAME, MULTIPLY, WHOLE, ROUND, shrink_##NAME,   raise_##NAME,   ATTEND,     \
                                 sum_##NAME,   draw_##NAME, score_##NAME, cap_##NAME, merge_##NAME, finish_tile_##NAME, gate_##NAME, convolve_##NAME, advance_##NAME, finish_##NAME, short_convolve_##NAME, gate_heads_##NAME, MAX_ROWS};

VARIANT(portable, , fours, multiply_portable, multiply_whole_portable, round_portable, tile_portable)
VARIANT(avx2, OF(AVX2), eights, multiply_avx2, multiply_whole_avx2, round_avx2, tile_avx2)
VARIANT(avx512, OF(AVX512), floats, multiply_avx512, multiply_whole_avx512, round_avx512, tile_avx512)

using Multiply = decltype(Kernels::multiply);
using Round = decltype(Kernels::round);
using Attend = decltype(Kernels::attend);

// The loops of another instruction set, with products of its own.
static Kernels with(Kernels kernels, Multiply multiply, Multiply whole, Round round, Attend attend, i64 rows = MAX_ROWS) {
    kernels.multiply = multiply, kernels.multiply_whole = whole, kernels.round = round, kernels.attend = attend, kernels.rows = rows;
    return kernels;
}
static const Kernels avx2_vnni = with(avx2, multiply_avx2, multiply_whole_vnni256, round_vnni256, tile_avx2);
static const Kernels avx512_vnni = with(avx512, multiply_avx512, multiply_whole_vnni512, round_vnni512, tile_avx512);
static const Kernels avx512_bf16 = with(avx512, multiply_bf16, multiply_whole_vnni512, round_vnni512, attend_tile_pairs);
static const Kernels amx = with(avx512, multiply_tiles, multiply_whole_amx, round_vnni512, attend_tile_amx, LANES);

static const Kernels* const KERNELS[] = {&portable, &avx2, &avx2_vnni, &avx512, &avx512_vnni, &avx512_bf16, &amx};
enum { PORTABLE, WITH_AVX2, WITH_AVX2_VNNI, WITH_AVX512, WITH_AVX512_VNNI, WITH_AVX512_BF16, WITH_AMX };
static int chosen = PORTABLE;

OF(AMX) static void release_tiles() { _tile_release(); }

// Threads that have used tiles give them back, so that the kernel need not save them.
static void rest() {
    if (chosen == WITH_AMX) release_tiles();
}

// Runs work(team, kernels) in this thread, whose team has as many threads as OpenMP would take.
template <class Work>
static void compute(Work work) {
    thread_local std::unique_ptr<Team> team;
    i64 threads = omp_get_max_threads();
    if (!team || team->size() != threads) team.reset(), team.reset(new Team(threads, rest));
    team->begin();
    work(*team, *KERNELS[chosen]);
    team->end();
    rest();
}

static const i64 FEW_ROWS = 4;  // of x: whoever multiplies a matrix of codes makes them whole numbers

// A product as one phase, or as two where x becomes whole numbers first, in `room`.
static void multiply(Team& team, const Kernels& kernels, Rounded room, Product p) {
    p.threads = team.size();
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
static void adapted(Team& team, const Kernels& kernels, Adapters& adapters, const Rounded& room, Product p) {
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

// How many queries a tile has at most: where those of matrix units do not fit, as many as tiles of vectors have.
static i64 rows_of_tile(const Kernels& kernels, i64 D, bool in_8_bits) { return D % (2 * LANES) || in_8_bits ? MAX_ROWS : kernels.rows; }

struct MergeRoom {  // of a tile
    float all[MAX_ROWS * (MAX_HEAD + 2)], more[MAX_ROWS * (MAX_HEAD + 2)];
};

// The tile of a share, cut to one of its splits.
static Tile split_of(const Step& step, const Plan& plan, const Attention& a, const Share& share, i64 split, MergeRoom& room) {
    Tile tile = tile_of(step, plan.tiles[share.tile], a, share.head);
    cut_tile(tile, split);
    if (share.place >= 0) tile.partial = Partial(a.partials + share.place, tile.lanes);
    else if (share.last - share.first > 1 || a.variant.sinks) tile.partial = Partial(room.more, tile.lanes);
    return tile;
}

// A layer's keys and values to the cache, then its attention: all is written before anything is read, for a request may share a
// block that another one fills in this step. The past that a thread reads next is on its way.
static void attend(Team& team, const Kernels& kernels, const Input& in, const Step& step, const Plan& plan, const Turns& turns,
                   const Attention& a) {
    i64 K = a.heads.K, shares = (i64)plan.shares.size();
    team.share(in.T, in.T < 4 * WRITTEN ? TOKENS : WRITTEN, [&](i64 begin, i64 end) {
        kernels.write(a.qkv + begin * a.heads.width(), a.heads, a.cache, turns, in.positions + begin, in.slots + begin, end - begin);
    });
    auto finish = [&](Tile& tile, const Partial& all) {
        tile.partial = {};
        kernels.finish_tile(tile, all);
    };
    auto gate = [&](const Tile& tile) {
        if (a.heads.gated) kernels.gate(tile, a.heads.H * a.heads.D);
    };
    team.share(shares, std::clamp<i64>(shares / (8 * team.size()), 1, 8), [&](i64 begin, i64 end) {
        MergeRoom room;
        const Share* share = &plan.shares[begin];
        Tile tile, later = split_of(step, plan, a, *share, share->first, room);
        for (i64 n = begin, split = share->first; n < end;) {
            tile = later;
            const Share& now = *share;
            Partial all(room.all, tile.lanes);
            bool merged = now.place < 0 && tile.partial.sums, first = split == now.first, over = ++split == now.last;
            if (over && ++n < end) split = (++share)->first;
            if (n < end) later = split_of(step, plan, a, *share, split, room);
            kernels.attend(tile, n < end ? &later : nullptr, a.cache, K);
            if (merged && first) begin_partial(tile, all);
            if (merged) kernels.merge(tile, all, tile.partial);
            if (merged && over) finish(tile, all);
            if (over && now.place < 0) gate(tile);
        }
    });
    if (plan.split.empty()) return;
    team.share((i64)plan.split.size(), 1, [&](i64 begin, i64 end) {
        MergeRoom room;
        for (i64 n = begin; n < end; n++) {
            const Share& share = plan.split[n];
            Tile tile = tile_of(step, plan.tiles[share.tile], a, share.head);
            Partial all(room.all, tile.lanes);
            begin_partial(tile, all);
            for (i64 split = share.first; split < share.last; split++)
                kernels.merge(tile, all, Partial(a.partials + share.place + (split - share.first) * Partial::size(tile.lanes, tile.D), tile.lanes));
            finish(tile, all), gate(tile);
        }
    });
}

// The pieces of each row of a step, of long rows first. Several are taken at once, `most` at most, where they are many.
template <class Work>
static void share_rows(Team& team, const std::vector<Sequence>& rows, i64 most, i64 pieces, Work work) {
    i64 all = pieces * (i64)rows.size();
    team.share(all, std::clamp<i64>(all / (8 * team.size()), 1, most), [&](i64 begin, i64 end) {
        for (i64 n = begin; n < end; n++) work(rows[rows.size() - 1 - n / pieces], n % pieces);
    });
}

// A layer's delta rule: each head's convolution, then each part of its state; then each token by itself.
static void recur(Team& team, const Kernels& kernels, const Recurrence& r, const std::vector<Sequence>& rows) {
    const DeltaSizes& s = r.sizes;
    share_rows(team, rows, 1, s.heads(), [&](const Sequence& row, i64 head) { kernels.convolve(r, row, head); });
    i64 parts = s.parts();
    share_rows(team, rows, parts, s.H * parts, [&](const Sequence& row, i64 n) {
        kernels.advance(r, row, n / parts, n % parts);
    });
    team.share(r.T, TOKENS, [&](i64 begin, i64 end) {
        for (i64 t = begin; t < end; t++) kernels.finish(r, t);
    });
}

// --- the decoder

// What a model is, and each of its layers: structures.py has the same fields in the same order. What is not there has sizes of 0.
struct ModelSizes {
    i64 layers, E, V, H;
    i64 P;                          // columns of a token's vector for each layer
    i64 attention_gate;
    i64 norms_all, normed_after;    // queries and keys are normed over all heads; after they were rotated
    i64 query_length;               // positions after which queries grow, see Turns
    i64 activation, gated, centred, place;  // of MLPs; whether norms are layer norms; where they are
    i64 X, C, F, S;                 // experts, those of a token, their width and that of the shared one
    i64 undivided, shared_gate, sigmoid, groups, groups_of_token, beside;  // see Mixture
    i64 key_heads, value_heads, key_size, value_size, delta_kernel, conv_kernel, head_gate;
    float eps, output_eps;          // of norms, and of those of a sublayer's output
    float embedding_scale, residual_scale, limit, slope;  // limit: of gpt-oss' gates, else 0
    float query_beta, routing_eps, routing_floor, routed_scale, delta_eps, rate_scale;
    float logit_scale, logit_softcap;  // scores become softcap * tanh(scores * scale / softcap); 0 is no cap
};

struct LayerSizes {
    i64 mixed, mixer, K, D, R, M;
    i64 shares, same;  // its keys and values are another layer's; its values are its keys
    i64 window;
    float scale, softcap;
    float after;       // what it ends by being multiplied with
};

struct Norms {  // of a sublayer: of what goes in, of what comes out, of the sum
    Norm input, output, sum;
    float after = 1;  // what the sum is multiplied by, at the end of a layer
};

enum Mixer { ATTENTION, DELTA_RULE, SHORT_CONV };  // what mixes tokens; no model has both of the last

enum Place { IN_TURN, PARALLEL, SHARED };  // attention and then the MLP, or both from the same residual: each with its norm, or with one

struct MLP {
    Matrix up, down;  // up: with its gates
};

struct Layer {
    Heads heads;
    i64 M;
    Norms of_attention, of_mlp, of_input;
    Turns turns;
    Matrix qkv, out, router;  // router: with the gate of the shared expert as its last row, if it has one
    const float* correction = nullptr;  // of the router's scores [X], or null
    Mixer mixer = ATTENTION;
    Matrix inputs, gates, merge;  // of what is in place of attention; a short convolution has no gates
    Convolution convolution;
    Delta delta;
    bool mixed = false;       // experts, else one MLP
    std::vector<MLP> mlps;    // the shared expert is the last, or the MLP that experts are beside
    Norm mlp_output, experts_input, experts_output, router_input;  // of experts beside an MLP
    const float* expert_scale = nullptr;                           // [X]
    Matrix gate, projection;  // of what the token's vector for this layer gates
    Variant variant;
};

struct Slot {  // a matrix that is packed one day, from [N, K]
    Matrix* matrix;
    i64 N, K;
    bool gated;
};

// Room for a row of x: whole tiles, and an odd number of cache lines, so that 16 rows do not meet in few sets of the cache.
static i64 stride_of(i64 columns) { return (ceiling(columns, PAD) | 1) * PAD; }

// Room for the draws of several threads. What no draw needs is not touched: it is no memory yet.
struct DrawRooms {
    std::vector<DrawRoom> of_thread;
    void make(i64 threads, i64 V) {
        if (threads <= (i64)of_thread.size() && V <= V_) return;
        i64 bytes = DrawRoom::bytes(V);
        memory_.reset(malloc(threads * bytes));
        if (!memory_) throw std::bad_alloc();
        of_thread.clear(), V_ = V;
        for (i64 n = 0; n < threads; n++) of_thread.push_back(DrawRoom::at((char*)memory_.get() + n * bytes, V));
    }

  private:
    struct Free {
        void operator()(void* memory) const { free(memory); }
    };
    std::unique_ptr<void, Free> memory_;
    i64 V_ = 0;
};

struct Net {
    i64 E, V;
    i64 P;  // columns of a token's vector for each layer
    Mixture mixture;
    DeltaSizes delta;
    i64 seen;  // tokens that short convolutions see
    bool head_gate;  // whether each head's output is multiplied by the sigmoid of one number
    Place place;
    bool gated;
    int activation, kind;  // kind: of the products that end in an activation
    Clamp clamp;
    float eps, embedding_scale, residual_scale, delta_eps, rate_scale, logit_scale, logit_softcap;
    const bf16* embedding;
    const float* positions_table;  // [P, E], null where they are not added
    Norm last;
    Arena arena;
    Matrix head, table;  // table: an embedding in whole numbers that is not the head
    Matrix per_layer;    // from embeddings to vectors for each layer, which have a norm
    Norm of_vectors;
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
    std::vector<i64> positions;  // of a step's tokens
    std::vector<std::vector<i64>> token_slots;  // of each group of layers
    DrawRooms draw_rooms;
    bf16 *residual = nullptr, *hidden = nullptr, *normed = nullptr, *qkv = nullptr;
    std::map<i64, bf16*> mixed, active;  // heads' outputs and activations, by their columns: what fills up a row must stay zero
    bf16 *vectors = nullptr, *gated_by_vectors = nullptr;
    bf16 *beside = nullptr, *routed = nullptr;  // of experts beside an MLP: what the MLP makes, and what the router reads
    bf16 *pairs = nullptr, *inner = nullptr, *shared = nullptr;  // of experts: what each pair reads, and then its update; what lies between
    bf16 *inputs = nullptr, *recurred = nullptr;  // of what is in place of attention: [T, width], and what is merged
    std::vector<float> gates, delta_heads;        // see Recurrence
    std::vector<float> partials;                  // of attention, see Plan
    std::vector<bf16**> buffers() {
        std::vector<bf16**> all = {&residual, &hidden, &normed, &qkv, &vectors, &gated_by_vectors, &beside, &routed, &pairs, &inner, &shared, &inputs, &recurred};
        for (auto* sized : {&mixed, &active})
            for (auto& [columns, buffer] : *sized) all.push_back(&buffer);
        return all;
    }
    i64 normed_stride() const { return stride_of(E); }
    i64 gates_of(const Layer& layer) const {  // rows of the gates
        return layer.mixer == DELTA_RULE ? 2 * delta.H : layer.mixer == ATTENTION && head_gate ? layer.heads.H : 0;
    }
    i64 inputs_width() const { return seen ? 3 * E : delta.width(); }
    i64 recurred_width() const { return seen ? E : delta.H * delta.V; }
    i64 recurred_stride() const { return stride_of(recurred_width()); }
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
    net.residual = zeros(room * net.E), net.hidden = zeros(room * net.E);
    net.normed = zeros(room * net.normed_stride());
    i64 width = 0;
    for (const Layer& layer : net.layers) width = std::max(width, layer.heads.width());
    net.qkv = zeros(room * width);
    for (auto* sized : {&net.mixed, &net.active})
        for (auto& [columns, buffer] : *sized) buffer = zeros(room * stride_of(columns));
    if (net.P) net.vectors = zeros(room * net.P * (i64)net.layers.size()), net.gated_by_vectors = zeros(room * stride_of(net.P));
    if (net.mixture.beside) net.beside = zeros(room * net.normed_stride()), net.routed = zeros(room * net.normed_stride());
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
    if (net.recurred_width()) net.inputs = zeros(room * net.inputs_width()), net.recurred = zeros(room * net.recurred_stride());
    const DeltaSizes& s = net.delta;
    i64 gates = 0;
    for (const Layer& layer : net.layers) gates = std::max(gates, net.gates_of(layer));
    net.gates.resize(room * gates), net.delta_heads.resize(room * s.channels());
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
static void join(Team& team, const Kernels& kernels, const Net& net, const Norms* last, const Norm& next, bf16* residual, bf16* y,
                 i64 y_stride, i64 T) {
    Joint joint = {last ? last->output : Norm{}, last ? last->sum : Norm{}, next, net.residual_scale, last ? last->after : 1};
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
static Product up_of(const Net& net, const Layer& layer, const Group& group, i64 T, i64 threads) {
    const Mixture& m = net.mixture;
    const MLP& mlp = layer.mlps[group.expert];
    i64 stride = net.normed_stride();
    const bf16* x = T == 1 || group.expert == m.X ? net.normed : net.pairs + group.first * stride;
    bool shared = group.expert == m.X;
    i64 y_stride = stride_of(shared ? m.S : m.F);
    bf16* y = shared ? net.shared : net.inner + group.first * y_stride;
    return {x, stride, group.count, &mlp.up, net.kind, y, y_stride, 1, net.clamp, nullptr, net.routing.used, threads};
}

static Product down_of(const Net& net, const Layer& layer, const Group& group, i64 threads) {
    const Mixture& m = net.mixture;
    bool shared = group.expert == m.X;
    i64 stride = stride_of(shared ? m.S : m.F), y_stride = net.normed_stride();
    const bf16* x = shared ? net.shared : net.inner + group.first * stride;
    return {x, stride, group.count, &layer.mlps[group.expert].down, STORE, net.pairs + group.first * y_stride, y_stride, 1, {}, nullptr, net.routing.used, threads};
}

// The products of all groups as one phase; `items` is the member of Group that counts their work.
template <class ProductOf>
static void multiply_groups(Team& team, const Kernels& kernels, const Routing& routing, i64 Group::* items, ProductOf product_of) {
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

// Sends tokens to experts by what the router makes of x, and copies what each pair reads.
static void route(Team& team, const Kernels& kernels, Net& net, const Layer& layer, const bf16* x, i64 T) {
    const Mixture& m = net.mixture;
    Routing& r = net.routing;
    i64 stride = net.normed_stride(), pairs = T == 1 ? 0 : T * m.C;
    auto send = [&](i64 begin, i64 end) {
        for (i64 t = begin; t < end; t++) {
            route_token(m, layer.correction, r, t);
            for (i64 c = t * m.calls(); layer.expert_scale && c < (t + 1) * m.calls(); c++) r.weights[c] *= layer.expert_scale[r.experts[c]];
        }
    };
    auto copy = [&](i64 begin, i64 end) {
        for (i64 pair = begin; pair < end; pair++) memcpy(net.pairs + pair * stride, net.normed + r.tokens[pair] * stride, net.E * 2);
    };
    multiply(team, kernels, net.rounded, {x, stride, T, &layer.router, SCORES, r.scores.data(), m.scores()});
    if (T > FEW) team.share(T, TOKENS, send);
    team.share(1, 1, [&](i64, i64) {
        if (T <= FEW) send(0, T);
        group_pairs(m, r, T);
        i64 ups = 0, downs = 0;
        for (i64 n = 0; n < r.used; n++) {
            Group& group = r.groups[n];
            group.up_items = ups += up_of(net, layer, group, T, team.size()).items();
            group.down_items = downs += down_of(net, layer, group, team.size()).items();
        }
        if (T <= FEW) copy(0, pairs);
    });
    if (T > FEW) team.share(pairs, TOKENS, copy);
}

static void active_in(Team& team, const Kernels& kernels, Net& net, const Layer& layer, const MLP& mlp, i64 T) {
    bf16* active = net.active.at(layer.M);
    adapted(team, kernels, net.adapters, net.rounded,
            {net.normed, net.normed_stride(), T, &mlp.up, net.kind, active, stride_of(layer.M), 1, net.clamp});
}

// The MLP beside experts, its output under its norm; then what the experts and their router read.
static void mlp_beside(Team& team, const Kernels& kernels, Net& net, const Layer& layer, i64 T, bf16* residual) {
    i64 stride = net.normed_stride();
    const MLP& mlp = layer.mlps.back();
    active_in(team, kernels, net, layer, mlp, T);
    adapted(team, kernels, net.adapters, net.rounded,
            {net.active.at(layer.M), stride_of(layer.M), T, &mlp.down, STORE, net.normed, stride});
    team.share(T, TOKENS, [&](i64 begin, i64 end) {
        for (i64 t = begin; t < end; t++) {
            bf16 *normed = net.normed + t * stride, *from = residual + t * net.E;
            kernels.join(normed, normed, net.beside + t * stride, {{}, {}, layer.mlp_output}, net.E);
            kernels.join(from, normed, normed, {{}, {}, layer.experts_input}, net.E);
            kernels.join(from, normed, net.routed + t * stride, {{}, {}, layer.router_input}, net.E);
        }
    });
}

// An MLP up to its activation, which stays where it is until `mlp_out`.
static void mlp_in(Team& team, const Kernels& kernels, Net& net, const Layer& layer, i64 T, bf16* residual) {
    if (!layer.mixed) return active_in(team, kernels, net, layer, layer.mlps[0], T);
    if (net.mixture.beside) mlp_beside(team, kernels, net, layer, T, residual);
    route(team, kernels, net, layer, net.mixture.beside ? net.routed : net.normed, T);
    multiply_groups(team, kernels, net.routing, &Group::up_items, [&](const Group& group) { return up_of(net, layer, group, T, team.size()); });
}

static void mlp_out(Team& team, const Kernels& kernels, Net& net, const Layer& layer, i64 T, bf16* residual) {
    if (!layer.mixed)
        return adapted(team, kernels, net.adapters, net.rounded,
                       update(net, layer.of_mlp, net.active.at(layer.M), stride_of(layer.M), T, layer.mlps[0].down, residual));
    const Routing& r = net.routing;
    i64 stride = net.normed_stride(), calls = net.mixture.calls();
    bool added = !layer.of_mlp.output.gain;
    multiply_groups(team, kernels, r, &Group::down_items, [&](const Group& group) { return down_of(net, layer, group, team.size()); });
    team.share(T, TOKENS, [&](i64 begin, i64 end) {
        for (i64 t = begin; t < end; t++) {
            bf16* normed = net.normed + t * stride;
            kernels.sum(net.pairs, stride, r.pairs.data() + t * calls, r.weights.data() + t * calls, calls,
                        added ? residual + t * net.E : nullptr, normed, net.residual_scale, net.E);
            if (net.mixture.beside) kernels.join(net.beside + t * stride, normed, normed, {layer.experts_output, {}, {}}, net.E);
        }
    });
}

// The vectors [T, layers, P] of a step's tokens: to what each token has by itself comes the norm of a product of its embedding.
static void vectors_of(Team& team, const Kernels& kernels, Net& net, i64 T, bf16* residual, bf16* vectors) {
    i64 layers = net.layers.size(), width = layers * net.P;
    join(team, kernels, net, nullptr, {}, residual, net.normed, net.normed_stride(), T);
    multiply(team, kernels, net.rounded, {net.normed, net.normed_stride(), T, &net.per_layer, STORE, net.vectors, width});
    team.share(T * layers, layers, [&](i64 begin, i64 end) {
        for (i64 n = begin; n < end; n++) {
            bf16* projected = net.vectors + n * net.P;
            kernels.join(vectors + n * net.P, projected, projected, {net.of_vectors, {}, {}, std::sqrt(0.5f)}, net.P);
        }
    });
}

// What a layer adds last: its vectors gate it.
static void add_input(Team& team, const Kernels& kernels, Net& net, const Layer& layer, i64 T, const bf16* vectors, bf16* residual) {
    i64 stride = net.normed_stride(), width = (i64)net.layers.size() * net.P, gate_stride = stride_of(net.P);
    join(team, kernels, net, &layer.of_mlp, {}, residual, net.normed, stride, T);
    adapted(team, kernels, net.adapters, net.rounded,
            {net.normed, stride, T, &layer.gate, ACTIVATED + net.activation, net.gated_by_vectors, gate_stride});
    team.share(T, TOKENS, [&](i64 begin, i64 end) {
        for (i64 t = begin; t < end; t++) kernels.modulate(net.gated_by_vectors + t * gate_stride, vectors + t * width, net.P);
    });
    adapted(team, kernels, net.adapters, net.rounded,
            {net.gated_by_vectors, gate_stride, T, &layer.projection, STORE, net.normed, stride});
}

struct Rows {  // of a step, as attention and as delta rules go through them
    std::map<std::array<i64, 3>, Plan> plans;  // of attention, see `key_of`
    std::vector<Sequence> sequences;
};

// Layers with equal keys share their attention out in the same way.
static std::array<i64, 3> key_of(const Layer& layer) { return {layer.heads.K, layer.heads.D, layer.variant.window}; }

// How the layers share out a step's attention, and the room for its partials.
static void plan_attention(Net& net, const Step& step, bool in_8_bits, Rows& rows) {
    i64 room = 0;
    for (const Layer& layer : net.layers) {
        if (layer.mixer != ATTENTION || rows.plans.count(key_of(layer))) continue;
        i64 tokens = rows_of_tile(*KERNELS[chosen], layer.heads.D, in_8_bits) / (layer.heads.H / layer.heads.K);
        const Plan& plan = rows.plans[key_of(layer)] = plan_of(step, layer.heads, layer.variant.window, tokens, omp_get_max_threads());
        room = std::max(room, plan.room);
    }
    if ((i64)net.partials.size() < room) net.partials.resize(room);
}

struct Memory {  // of one layer: keys and values, or states in all slots, see Recurrence
    Cache cache;
    float *before, *state;
};

// The products that attention begins with, or what is in its place.
static void mix_in(Team& team, const Kernels& kernels, Net& net, const Layer& layer, i64 T) {
    i64 stride = net.normed_stride();
    if (layer.mixer == ATTENTION)
        adapted(team, kernels, net.adapters, net.rounded, {net.normed, stride, T, &layer.qkv, STORE, net.qkv, layer.heads.width()});
    else
        adapted(team, kernels, net.adapters, net.rounded, {net.normed, stride, T, &layer.inputs, STORE, net.inputs, net.inputs_width()});
    i64 gates = net.gates_of(layer);
    if (gates) adapted(team, kernels, net.adapters, net.rounded, {net.normed, stride, T, &layer.gates, SCORES, net.gates.data(), gates});
}

// What comes between, and the last product.
static void mix_out(Team& team, const Kernels& kernels, Net& net, const Layer& layer, const Memory& memory, const Input& in,
                    const Step& step, const Rows& rows, bf16* residual) {
    if (layer.mixer == ATTENTION) {
        i64 H = layer.heads.H, D = layer.heads.D, columns = H * D, stride = stride_of(columns);
        bf16* mixed = net.mixed.at(columns);
        Attention attention = {layer.heads, memory.cache, layer.variant, net.qkv, mixed, stride,
                               rows_of_tile(kernels, D, memory.cache.in_8_bits), net.partials.data()};
        attend(team, kernels, in, step, rows.plans.at(key_of(layer)), layer.turns, attention);
        if (net.head_gate)
            team.share(in.T, TOKENS, [&](i64 begin, i64 end) {
                for (i64 t = begin; t < end; t++) kernels.gate_heads(mixed + t * stride, net.gates.data() + t * H, H, D);
            });
        return adapted(team, kernels, net.adapters, net.rounded, update(net, layer.of_attention, mixed, stride, in.T, layer.out, residual));
    }
    i64 stride = net.recurred_stride();
    if (layer.mixer == DELTA_RULE) {
        recur(team, kernels,
              {net.delta, layer.convolution, layer.delta, net.activation, net.delta_eps, net.rate_scale, in.T, net.inputs, net.gates.data(),
               net.delta_heads.data(), memory.before, memory.state, net.recurred, stride},
              rows.sequences);
    } else {
        ShortConv c = {net.E, net.seen, layer.convolution, net.inputs, memory.before, net.recurred, stride};
        share_rows(team, rows.sequences, c.parts(), c.parts(), [&](const Sequence& row, i64 part) { kernels.short_convolve(c, row, part); });
    }
    adapted(team, kernels, net.adapters, net.rounded, update(net, layer.of_attention, net.recurred, stride, in.T, layer.merge, residual));
}

// Returns the norms of what it adds last, which is not in the residual yet.
static const Norms* layer_of(Team& team, const Kernels& kernels, Net& net, const Layer& layer, const Norms* last, const Memory& memory,
                             const Input& in, const Step& step, const Rows& rows, const bf16* vectors, bf16* residual) {
    i64 T = in.T, stride = net.normed_stride();
    join(team, kernels, net, last, layer.of_attention.input, residual, net.normed, stride, T);
    mix_in(team, kernels, net, layer, T);
    if (net.place == PARALLEL) join(team, kernels, net, nullptr, layer.of_mlp.input, residual, net.normed, stride, T);
    if (net.place != IN_TURN) mlp_in(team, kernels, net, layer, T, residual);
    mix_out(team, kernels, net, layer, memory, in, step, rows, residual);
    if (net.place == IN_TURN) {
        join(team, kernels, net, &layer.of_attention, layer.of_mlp.input, residual, net.normed, stride, T);
        mlp_in(team, kernels, net, layer, T, residual);
    }
    mlp_out(team, kernels, net, layer, T, residual);
    if (!net.P) return &layer.of_mlp;
    add_input(team, kernels, net, layer, T, vectors, residual);
    return &layer.of_input;
}

// The matrices in the order in which they are packed: see `attend_pack`.
static void list_matrices(Net& net) {
    auto add = [&](Matrix& matrix, i64 N, i64 K, bool gated = false) { net.slots.push_back({&matrix, N, K, gated}); };
    const Mixture& m = net.mixture;
    add(net.head, net.V, net.E);
    for (Layer& layer : net.layers) {
        i64 count = layer.mixed ? m.X : 1, width = layer.mixed ? m.F : layer.M, sides = net.gated ? 2 : 1;
        bool attends = layer.mixer == ATTENTION;
        add(attends ? layer.qkv : layer.inputs, attends ? layer.heads.computed() : net.inputs_width(), net.E);
        if (i64 gates = net.gates_of(layer)) add(layer.gates, gates, net.E);
        add(attends ? layer.out : layer.merge, net.E, attends ? layer.heads.H * layer.heads.D : net.recurred_width());
        if (layer.mixed) add(layer.router, m.scores(), net.E);
        for (i64 n = 0; n < count; n++) add(layer.mlps[n].up, sides * width, net.E, net.gated);
        for (i64 n = 0; n < count; n++) add(layer.mlps[n].down, net.E, width);
        if (layer.mixed && m.S) add(layer.mlps[m.X].up, 2 * m.S, net.E, true), add(layer.mlps[m.X].down, net.E, m.S);
        if (layer.mixed && m.beside) add(layer.mlps.back().up, 2 * layer.M, net.E, true), add(layer.mlps.back().down, net.E, layer.M);
        if (net.P) add(layer.gate, net.P, net.E), add(layer.projection, net.E, net.P);
    }
    if (net.P) add(net.per_layer, (i64)net.layers.size() * net.P, net.E);
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
static void each_row(Team& team, const Kernels& kernels, i64 R, i64 V, Look look) {
    team.share(R, R * V <= WORTH_THREADS ? R : 1, [&](i64 begin, i64 end) {
        for (i64 r = begin; r < end; r++) look(kernels, r);
    });
}

// A token of each row of scores [R, V].
static void draw(Team& team, const Kernels& kernels, DrawRooms& rooms, const float* scores, i64 R, i64 V, const Draw* rows, i64* tokens) {
    each_row(team, kernels, R, V, [&](const Kernels& kernels, i64 r) {
        tokens[r] = kernels.draw(scores + r * V, V, rows[r], rooms.of_thread[Team::number()]);
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

// A decoder without its matrices.
//
// A norm is {gain, bias}, null where there is none. Arrays: {embedding [V, E], or null where the head is it, positions [P, E] or null}, the final
// norm, the norm of vectors for each layer, then for each layer the norms of {attention's input, output, sum, queries, keys, values, the MLP's input,
// output, sum, what a token's vector gates, and of experts beside an MLP its output, their input, their output, their router's input}, {cos, sin
// [P, R]} or nulls, the sinks [H] or null, the convolution {[W, C], bias [C]} of what is in place of attention, and of a delta rule {exp(log speed)
// [H], the bias of its steps [H], its gain [V]}, or nulls, the correction of the router's scores [X], and what each expert's weight is multiplied by
// [X], or nulls. The embedding is bfloat16, all others float32. All of them must outlive it. Null where the memory does not suffice.
Net* attend_new(const ModelSizes& model, const void* const* arrays, const LayerSizes* own) try {
    auto net = std::make_unique<Net>();
    net->E = model.E, net->V = model.V, net->P = model.P;
    net->gated = model.gated, net->place = (Place)model.place;
    net->mixture = {model.X, model.C, model.F, model.S, model.undivided != 0, model.shared_gate != 0, model.sigmoid != 0, model.groups,
                    model.groups_of_token, model.routing_eps, model.routing_floor, model.routed_scale, model.beside != 0};
    net->delta = {model.key_heads, model.value_heads, model.key_size, model.value_size, model.delta_kernel};
    net->seen = model.conv_kernel, net->head_gate = model.head_gate != 0;
    net->eps = model.eps, net->embedding_scale = model.embedding_scale, net->residual_scale = model.residual_scale;
    net->clamp = {model.limit, model.slope};
    net->delta_eps = model.delta_eps, net->rate_scale = model.rate_scale;
    net->logit_scale = model.logit_scale, net->logit_softcap = model.logit_softcap;
    net->activation = (int)model.activation;
    net->kind = net->gated && net->clamp.limit > 0 ? CLAMPED : (net->gated ? GATED : ACTIVATED) + net->activation;
    auto next = [&] { return (const float*)*arrays++; };
    auto norm = [&](float eps) {
        Norm norm = {next(), nullptr, model.centred != 0, eps};
        norm.bias = next();
        return norm;
    };
    auto mean_square_norm = [&](float eps) {
        Norm all = norm(eps);
        all.centred = false;
        return all;
    };
    auto norms = [&] {
        Norms norms;
        norms.input = norm(model.eps), norms.output = norm(model.output_eps), norms.sum = norm(model.eps);
        return norms;
    };
    net->embedding = (const bf16*)next(), net->positions_table = next();
    net->last = norm(model.eps);
    net->of_vectors = mean_square_norm(model.eps * net->E);
    for (i64 n = 0; n < model.layers; n++, own++) {
        Layer layer;
        layer.mixed = own->mixed, layer.mixer = (Mixer)own->mixer, layer.M = own->M;
        layer.heads = {model.H, own->K, own->D, model.attention_gate != 0, own->shares != 0, own->same != 0};
        layer.of_attention = norms();
        layer.turns.q = norm(model.eps), layer.turns.k = norm(model.eps), layer.turns.v = mean_square_norm(model.eps);
        layer.turns.all = model.norms_all, layer.turns.after = model.normed_after;
        layer.turns.length = model.query_length, layer.turns.beta = model.query_beta;
        layer.of_mlp = norms(), layer.of_input.output = norm(model.eps);
        (net->P ? layer.of_input : layer.of_mlp).after = own->after;
        layer.mlp_output = norm(model.eps), layer.experts_input = norm(model.eps);
        layer.experts_output = norm(model.eps), layer.router_input = norm(model.eps);
        layer.turns.cos = next(), layer.turns.sin = next();
        layer.turns.R = layer.turns.cos ? own->R : 0;
        layer.variant = {own->scale, own->softcap, own->window, next()};
        layer.convolution.weight = next(), layer.convolution.bias = next();
        layer.delta.speed = next(), layer.delta.step_bias = next(), layer.delta.gain = next();
        layer.correction = next(), layer.expert_scale = next();
        layer.mlps.resize(layer.mixed ? net->mixture.mlps() : 1);
        net->active[layer.M] = nullptr;
        if (layer.mixer == ATTENTION) net->mixed[layer.heads.H * layer.heads.D] = nullptr;
        net->layers.push_back(std::move(layer));
    }
    list_matrices(*net);
    return net.release();
} catch (const std::bad_alloc&) {
    return nullptr;
}

enum Packing { PACKED, NO_MEMORY, NOT_FINITE };

// Copy one matrix, which may be freed then. Number 0 is the head [V, E]; then come for each layer qkv [(H + 2K) D, E], with H D rows more behind the
// queries where attention is gated, and fewer where values are keys or both are another layer's, the gates of heads [H, E], if any, and out [E, H D]; or of a delta rule inputs
// [C + H V, E], gates [2H, E] and merge [E, H V]; or of a short convolution inputs [3E, E] and merge [E, E]; then gate and up [2M, E], or up [M, E],
// and down [E, M]; or with experts the router [X, E], whose last row is the gate of the shared one, if any, gate and up of each expert [2F, E], down of
// each [E, F], and of the shared one [2S, E] and [E, S], or of the MLP beside them [2M, E] and [E, M]; then, where tokens have vectors of P columns for
// each layer, the gate [P, E] and the projection [E, P]. Behind the layers come what makes these vectors [layers P, E], and an embedding [V, E] in
// whole numbers that is not the head. A matrix comes in parts that lie under each other. The bias may be null. Returns a Packing, NOT_FINITE + n for
// part n, counted from 0.
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

// The memory of all layers, as long as it lives. keys and values are the layers' caches, bfloat16 or in 8 bits; those of a layer whose keys and
// values are another one's are that one's. Layers belong to groups, each with block tables of its own. states are {before, state} of each layer,
// see Recurrence.
struct Caches {
    bf16 *const *keys, *const *values;
    i64 block_size, in_8_bits;
    const i64* groups;
    float* const* states;
};

// One step, of T tokens of R requests; StepCall of structures.py has the same fields in the same order. The requests have starts and counts, and in
// each of G groups the blocks tables[group * R + request]. sources and places [R] are the slots from which their states are read, and to which
// they are written after the first kept [R] tokens. vectors [T, layers, P] are what each token has by itself for each layer, times sqrt(P / 2), or
// null; they are for use in between too. hidden [T, E] is filled, if it is there. Of the S tokens whose places in T are `scored` the scores
// [S, V] are computed, and a token `drawn` from each, as `draws` says if it is there: see `attend_draw`. One thread adds 1 to `progress` after each
// layer: others may read it meanwhile.
struct StepCall {
    i64 T, R, G, S;
    const i64 *tokens, *starts, *counts, *kept;
    const i64* const* tables;
    const i64 *sources, *places;
    bf16 *vectors, *hidden;
    const i64* scored;
    float* scores;
    const Draw* draws;
    i64* drawn;
    i64* progress;
};

// Positions and slots of a step's tokens.
static void place_tokens(Net& net, const StepCall& call, i64 block_size) {
    net.positions.resize(call.T), net.token_slots.resize(call.G);
    for (std::vector<i64>& slots : net.token_slots) slots.resize(call.T);
    for (i64 row = 0, t = 0; row < call.R; row++)
        for (i64 at = call.starts[row], end = at + call.counts[row]; at < end; at++, t++) {
            net.positions[t] = at;
            for (i64 group = 0; group < call.G; group++)
                net.token_slots[group][t] = call.tables[group * call.R + row][at / block_size] * block_size + at % block_size;
        }
}

static Rows rows_of(Net& net, const StepCall& call, bool in_8_bits) {
    Rows all;
    plan_attention(net, {call.starts, call.counts, call.tables, call.R}, in_8_bits, all);
    for (i64 row = 0, first = 0; call.places && row < call.R; first += call.counts[row++])
        all.sequences.push_back({first, call.counts[row], call.starts[row], call.sources[row], call.places[row], call.kept[row]});
    return all;
}

// All layers and the last norm: hidden [T, E].
static void hide(Team& team, const Kernels& kernels, Net& net, const Caches& caches, const StepCall& call, const Rows& rows, bf16* hidden) {
    i64 T = call.T;
    bf16* residual = net.residual;
    team.share(T, TOKENS, [&](i64 a, i64 b) {
        for (i64 t = a; t < b; t++) {
            const float* position = net.positions_table ? net.positions_table + net.positions[t] * net.E : nullptr;
            bf16* to = residual + t * net.E;
            kernels.embed(vector_of(net, call.tokens[t], to), position, net.embedding_scale, to, net.E);
        }
    });
    if (net.P) vectors_of(team, kernels, net, T, residual, call.vectors);
    const Norms* last = nullptr;
    for (size_t n = 0; n < net.layers.size(); n++) {
        i64 group = caches.groups[n];
        Input in = {call.tokens, net.positions.data(), net.token_slots[group].data(), T};
        Step step = {call.starts, call.counts, call.tables + group * call.R, call.R};
        Memory memory = {{caches.keys[n], caches.values[n], caches.block_size, caches.in_8_bits != 0}, caches.states[2 * n], caches.states[2 * n + 1]};
        last = layer_of(team, kernels, net, net.layers[n], last, memory, in, step, rows, call.vectors + n * net.P, residual);
        __atomic_fetch_add(call.progress, 1, __ATOMIC_RELAXED);
    }
    join(team, kernels, net, last, net.last, residual, hidden, net.E, T);
}

// Scores [S, V] of hidden states: of all of them, or of those whose places are `scored`.
static void score(Team& team, const Kernels& kernels, Net& net, const bf16* hidden, const i64* scored, i64 S, float* scores) {
    for (i64 row = 0; row < S; row++) memcpy(net.normed + row * net.normed_stride(), hidden + (scored ? scored[row] : row) * net.E, net.E * 2);
    multiply(team, kernels, net.rounded, {net.normed, net.normed_stride(), S, &net.head, SCORES, scores, net.V});
    if (net.logit_scale != 1 || net.logit_softcap > 0)
        each_row(team, kernels, S, net.V, [&](const Kernels& kernels, i64 row) {
            kernels.cap(scores + row * net.V, net.V, net.logit_scale, net.logit_softcap);
        });
}

// Not for two threads at once. 1 where the memory does not suffice, else 0.
int attend_step(Net* net, const Caches& caches, const StepCall& call) try {
    make_room(*net, call.T);
    place_tokens(*net, call, caches.block_size);
    Rows rows = rows_of(*net, call, caches.in_8_bits != 0);
    compute([&](Team& team, const Kernels& kernels) {
        if (call.draws) net->draw_rooms.make(team.size(), net->V);
        bf16* hidden = call.hidden ? call.hidden : net->hidden;
        hide(team, kernels, *net, caches, call, rows, hidden);
        if (call.S) score(team, kernels, *net, hidden, call.scored, call.S, call.scores);
        if (call.draws) draw(team, kernels, net->draw_rooms, call.scores, call.S, net->V, call.draws, call.drawn);
    });
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

// Scores [T, V] of hidden states [T, E], in float32. 1 where the memory does not suffice, else 0.
int attend_logits(Net* net, const bf16* hidden, i64 T, float* scores) try {
    make_room(*net, T);
    compute([&](Team& team, const Kernels& kernels) { score(team, kernels, *net, hidden, nullptr, T, scores); });
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

// For each row of scores [R, V] the best token, or a draw under the row's key, changes and limits where its temperature is above 0; UNSCORED or
// EXCLUDED where there is none. 1 where the memory does not suffice, else 0.
int attend_draw(const float* scores, i64 R, i64 V, const Draw* rows, i64* tokens) try {
    thread_local DrawRooms rooms;
    compute([&](Team& team, const Kernels& kernels) {
        rooms.make(team.size(), V);
        draw(team, kernels, rooms, scores, R, V, rows, tokens);
    });
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

// The log probabilities that are asked of each row of scores [R, V]. Where its scores are not finite what is to be filled stays as it is.
void attend_score(const float* scores, i64 R, i64 V, const Scored* rows) {
    compute([&](Team& team, const Kernels& kernels) {
        each_row(team, kernels, R, V, [&](const Kernels& kernels, i64 r) { kernels.score(scores + r * V, V, rows[r]); });
    });
}

// One layer's attention for queries, keys and values [T, (H + 2K) D] that are rotated already; out [T, H D]. Sinks [H] or null.
void attend_layer(bf16* qkv, const i64* slots, i64 T, i64 H, i64 K, i64 D, bf16* keys, bf16* values, i64 block_size, int in_8_bits, const i64* starts,
                  const i64* counts, i64 rows, const i64* const* tables, bf16* out, const float* variant, const float* sinks) {
    Step step = {starts, counts, tables, rows};
    Attention a = {{H, K, D}, {keys, values, block_size, in_8_bits != 0}, {variant[0], variant[1], (i64)variant[2], sinks}, qkv, out, H * D,
                   rows_of_tile(*KERNELS[chosen], D, in_8_bits), nullptr};
    Plan plan = plan_of(step, a.heads, a.variant.window, a.tokens_of_tile(), omp_get_max_threads());
    std::vector<float> partials(plan.room);
    a.partials = partials.data();
    Input in = {nullptr, slots, slots, T};
    compute([&](Team& team, const Kernels& kernels) { attend(team, kernels, in, step, plan, {}, a); });
}
}
