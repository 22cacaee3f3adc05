// A whole bfloat16 decoder on a CPU, one call a step: plain C ABI, no torch headers.
//
// `attend_step` is `Decoder.forward` of transformer.py. Each heavy loop exists once for each instruction set; `attend_choose` picks one
// by number, `attend_has` says whether this CPU has one, and `attend_best` which is the best that it has. Threads are those of threads.h; matrices are packed by OpenMP's.
//
// Shapes: T tokens, E model width, M width of the MLP, V vocabulary, H query heads, K key/value heads, D head size,
// R columns of a head that are rotated, P positions.
#include <malloc.h>

#include "layers.h"

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
    int best = (int)std::size(KERNELS) - 1;
    while (!has(best) || slower_than_before(best)) best--;
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
