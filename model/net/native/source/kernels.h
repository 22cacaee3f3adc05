// Every loop once for each instruction set, and how threads share them out.
#pragma once
#include <memory>

#include "attention_vectors.h"
#include "blocks.h"
#include "delta.h"
#include "drawing.h"
#include "experts.h"
#include "quantised.h"
#include "threads.h"

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

using Multiply = decltype(Kernels::multiply);
using Round = decltype(Kernels::round);
using Attend = decltype(Kernels::attend);

// The loops of another instruction set, with products of its own.
static Kernels with(Kernels kernels, Multiply multiply, Multiply whole, Round round, Attend attend, i64 rows = MAX_ROWS) {
    kernels.multiply = multiply, kernels.multiply_whole = whole, kernels.round = round, kernels.attend = attend, kernels.rows = rows;
    return kernels;
}
static int chosen = 0;  // of KERNELS: the portable ones

#ifdef __x86_64__
#include "variants_x86.h"
#else
#include "variants_arm.h"
#endif

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

static const i64 FEW_ROWS = 4;  // of x, for a thread that makes them whole numbers

// A product as one phase, or as two where x becomes whole numbers first, in `room`.
static void multiply(Team& team, const Kernels& kernels, Rounded room, Product p) {
    p.threads = team.size();
    if (p.matrix->codes) {
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
