// A decoder, and what its layers compute.
#pragma once
#include <array>
#include <map>

#include "kernels.h"

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
