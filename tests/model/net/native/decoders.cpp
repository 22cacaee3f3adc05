// Small decoders of the native library without Python, on any machine: test_arm.py compares what this prints.
//
// Weights and tokens come from a counter, so that they are the same everywhere. A line for each model and instruction set: the model, the number
// of the instruction set, a digest of hidden states, scores and draws, the distance of the hidden states from the portable ones, and "alone"
// where a request by itself, cut into pieces, has the bits that it has beside others.
#include "layers.h"

extern "C" {
int attend_has(int number);
void attend_choose(int number);
Net* attend_new(const ModelSizes&, const void* const* arrays, const LayerSizes*);
int attend_pack(Net*, i64 number, const PlainRows* parts, const bf16* bias);
int attend_pack_codes(Net*, i64 number, i64 bits, const uint8_t* codes, const uint16_t* scales, const uint16_t* minima, const float* units,
                      const int8_t* table, const bf16* bias);
int attend_step(Net*, const Caches&, const StepCall&);
int attend_draw(const float* scores, i64 R, i64 V, const Draw* rows, i64* tokens);
void attend_free(Net*);
}

struct Model {
    const char* name;
    i64 bits, H, K, D, M;
    bool counted, minima, mixed, in_8_bits;  // mixed: a delta rule, then attention with experts
};
static const Model MODELS[] = {
    {"bfloat16", 16, 4, 2, 32, 72, false, false, false, false},  {"bfloat16, heads of 80", 16, 6, 2, 80, 200, false, false, false, true},
    {"int8", 8, 4, 2, 32, 72, false, false, false, true},        {"int8 with minima", 8, 9, 3, 64, 416, false, true, false, false},
    {"int4", 4, 4, 2, 32, 72, true, false, false, false},        {"int4 with minima", 4, 4, 1, 40, 1200, true, true, false, false},
    {"int4 by a table", 4, 4, 4, 32, 72, false, false, false, false}, {"mixed", 16, 4, 2, 32, 72, false, false, true, false},
    {"mixed int8", 8, 4, 2, 32, 72, false, false, true, true},
};
static const int8_t EIGHT_LESS[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
static const int8_t NORMAL[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const i64 E = 96, V = 213, LAYERS = 2, BLOCK = 32, BLOCKS = 5, POSITIONS = BLOCK * BLOCKS;

static uint64_t counter;
static uint32_t drawn() {
    counter = counter * 6364136223846793005u + 1442695040888963407u;
    return counter >> 40;
}
static float number() { return (int)(drawn() % 255 - 127) / 128.0f; }  // also as bfloat16
static std::vector<float> numbers(i64 count, float first = 0) {
    std::vector<float> all(count);
    for (float& each : all) each = first + number();
    return all;
}
static std::vector<bf16> halves_of(i64 count, float scale) {
    std::vector<bf16> all(count);
    for (bf16& each : all) each = narrow(number() * scale);
    return all;
}
static std::vector<uint16_t> scales_of(i64 count) {  // float16 from 1/64 to 1/32
    std::vector<uint16_t> all(count);
    for (uint16_t& each : all) each = 9 << 10 | drawn() % 1024;
    return all;
}

static void pack(Net* net, const Model& model) {
    for (size_t at = 0; at < net->slots.size(); at++) {
        const Slot& slot = net->slots[at];
        std::vector<bf16> bias = halves_of(slot.N, 0.25f);
        if (model.bits == 16) {
            std::vector<bf16> weights = halves_of(slot.N * slot.K, 0.25f);
            PlainRows rows = {weights.data(), slot.N};
            attend_pack(net, at, &rows, bias.data());
            continue;
        }
        const i64 G = ceiling(slot.K, GROUP);
        std::vector<uint8_t> codes(slot.N * G * 4 * model.bits);
        for (uint8_t& code : codes) code = (uint8_t)(model.bits == 8 ? drawn() % 255 - 127 : drawn());
        std::vector<uint16_t> scales = scales_of(slot.N * G), minima = scales_of(slot.N * G);
        const int8_t* table = model.counted ? EIGHT_LESS : NORMAL;
        std::vector<float> units(slot.N, model.counted && model.bits == 4 ? 0.5f : 0x1p-4f);
        attend_pack_codes(net, at, model.bits, codes.data(), scales.data(), model.minima ? minima.data() : nullptr, units.data(), table, bias.data());
    }
}

struct Made {  // a decoder, and what it points to
    std::vector<std::vector<float>> arrays;
    std::vector<bf16> embedding;
    Net* net;
    explicit Made(const Model& m) {
        counter = m.bits;
        embedding = halves_of(V * E, 1);
        ModelSizes sizes = {};
        sizes.layers = LAYERS, sizes.E = E, sizes.V = V, sizes.H = m.H, sizes.gated = 1, sizes.groups = sizes.groups_of_token = 1;
        sizes.eps = sizes.output_eps = sizes.delta_eps = 1e-6f, sizes.embedding_scale = sizes.residual_scale = sizes.routed_scale = sizes.rate_scale = 1;
        sizes.logit_scale = 1, sizes.logit_softcap = 30, sizes.activation = m.bits == 4 ? GELU : SILU;
        if (m.mixed) sizes.X = 4, sizes.C = 2, sizes.F = 40, sizes.S = 24, sizes.shared_gate = 1;
        if (m.mixed) sizes.key_heads = 2, sizes.value_heads = 4, sizes.key_size = 16, sizes.value_size = 24, sizes.delta_kernel = 4;
        std::vector<LayerSizes> layers(LAYERS, {0, ATTENTION, m.K, m.D, m.D / 4 * 2, m.M, 0, 0, 1 << 24, 0.2f, 0, 1});
        layers[1].window = 40, layers[1].softcap = 20, layers[1].mixed = m.mixed;
        if (m.mixed) layers[0].mixer = DELTA_RULE;
        std::vector<const void*> all = {embedding.data(), nullptr};
        auto add = [&](i64 count, float first, bool there = true) {
            arrays.push_back(numbers(there ? count : 0, first));
            all.push_back(there ? arrays.back().data() : nullptr);
        };
        add(E, 2), add(0, 0, false), add(0, 0, false), add(0, 0, false);
        for (const LayerSizes& layer : layers) {
            for (int norm = 0; norm < 14; norm++) add(norm == 3 || norm == 4 ? m.D : E, 2, norm == 0 || norm == 3 || norm == 4 || norm == 6), add(0, 0, false);
            add(POSITIONS * layer.R, 0), add(POSITIONS * layer.R, 0), add(m.H, 0);
            bool recurs = layer.mixer == DELTA_RULE;
            i64 channels = 2 * sizes.key_heads * sizes.key_size + sizes.value_heads * sizes.value_size;
            add(sizes.delta_kernel * channels, 0, recurs), add(0, 0, false);
            add(sizes.value_heads, 2, recurs), add(sizes.value_heads, 0, recurs), add(sizes.value_size, 2, recurs);
            add(0, 0, false), add(0, 0, false);
        }
        net = attend_new(sizes, all.data(), layers.data());
        pack(net, m);
    }
    ~Made() { attend_free(net); }
};

struct Results {
    std::vector<std::vector<bf16>> hidden;  // of each request
    std::vector<std::vector<float>> scores;
};

// Requests side by side in pieces of up to `chunk` tokens, in caches and states that hold NaN from before.
static Results run(const Model& m, Net* net, const std::vector<std::vector<i64>>& texts, i64 chunk) {
    const i64 R = texts.size(), blocks = R * BLOCKS, channels = net->delta.channels(), W = net->delta.W;
    std::vector<bf16> keys(blocks * BLOCK * m.K * (m.D + 8), 0xffff), values = keys;
    std::vector<float> before(R * channels * W, NAN), state(R * net->delta.H * net->delta.K * net->delta.V, NAN);
    std::vector<bf16*> all_keys(LAYERS, keys.data()), all_values(LAYERS, values.data());
    std::vector<std::vector<bf16>> more(4, keys);  // each layer has its own
    for (i64 n = 0; n < LAYERS; n++) all_keys[n] = more[2 * n].data(), all_values[n] = more[2 * n + 1].data();
    std::vector<float*> states = {before.data(), state.data(), nullptr, nullptr};
    const i64 groups[LAYERS] = {};
    Caches caches = {all_keys.data(), all_values.data(), BLOCK, m.in_8_bits, groups, states.data()};
    Results made = {std::vector<std::vector<bf16>>(R), std::vector<std::vector<float>>(R)};
    std::vector<i64> done(R), progress(1);
    for (;;) {
        std::vector<i64> which, tokens, starts, counts, scored, tables(R * BLOCKS);
        std::vector<const i64*> addresses;
        for (i64 r = 0; r < R; r++) {
            i64 count = std::min<i64>(chunk, texts[r].size() - done[r]);
            for (i64 i = 0; i < BLOCKS; i++) tables[r * BLOCKS + i] = (r * BLOCKS + i * 3 + 1) % blocks;
            if (!count) continue;
            which.push_back(r), starts.push_back(done[r]), counts.push_back(count), addresses.push_back(tables.data() + r * BLOCKS);
            for (i64 t = 0; t < count; t++) scored.push_back(tokens.size()), tokens.push_back(texts[r][done[r] + t]);
        }
        if (which.empty()) return made;
        const i64 T = tokens.size();
        std::vector<bf16> hidden(T * E);
        std::vector<float> scores(T * V);
        StepCall call = {T, (i64)which.size(), 1, T, tokens.data(), starts.data(), counts.data(), counts.data(), addresses.data(),
                         which.data(), which.data(), nullptr, hidden.data(), scored.data(), scores.data(), nullptr, nullptr, progress.data()};
        if (attend_step(net, caches, call)) abort();
        for (i64 n = 0, t = 0; n < call.R; t += counts[n++]) {
            i64 r = which[n];
            made.hidden[r].insert(made.hidden[r].end(), &hidden[t * E], &hidden[(t + counts[n]) * E]);
            made.scores[r].insert(made.scores[r].end(), &scores[t * V], &scores[(t + counts[n]) * V]);
            done[r] += counts[n];
        }
    }
}

static uint64_t digest;
template <class Number>
static void digest_of(const std::vector<Number>& numbers) {
    for (const Number& each : numbers) {
        uint64_t bits = 0;
        memcpy(&bits, &each, sizeof each);
        digest = (digest ^ bits) * 1099511628211u;
    }
}

static double distance(const Results& a, const Results& b) {
    double off = 0, all = 0;
    for (size_t r = 0; r < a.hidden.size(); r++)
        for (size_t i = 0; i < a.hidden[r].size(); i++) {
            double wanted = wide(b.hidden[r][i]), by = wide(a.hidden[r][i]) - wanted;
            off += by * by, all += wanted * wanted;
        }
    return std::sqrt(off / all);
}

int main() {
    std::vector<std::vector<i64>> texts;
    for (i64 length : {70, 1, 33, 7}) {
        texts.emplace_back(length);
        for (i64& token : texts.back()) token = drawn() % V;
    }
    for (const Model& model : MODELS) {
        Results portable;
        for (int variant = 0; variant < (int)(sizeof KERNELS / sizeof *KERNELS); variant++) {
            if (!attend_has(variant)) continue;
            attend_choose(variant);
            Made made(model);
            Results all = run(model, made.net, texts, 1000);
            if (variant == 0) portable = all;
            bool same = true;
            for (size_t r = 0; r < texts.size(); r++)
                for (i64 chunk : {r ? 1 : 40, 7}) {
                    Results alone = run(model, made.net, {texts[r]}, chunk);
                    same &= alone.hidden[0] == all.hidden[r] && alone.scores[0] == all.scores[r];
                }
            digest = 14695981039346656037u;
            for (size_t r = 0; r < texts.size(); r++) {
                std::vector<i64> tokens(texts[r].size());
                std::vector<Draw> draws;
                for (size_t t = 0; t < tokens.size(); t++) draws.push_back({nullptr, t, (i64)t % 3 * 20, t % 2 * 0.8f, 0.9f, INFINITY});
                attend_draw(all.scores[r].data(), tokens.size(), V, draws.data(), tokens.data());
                digest_of(all.hidden[r]), digest_of(all.scores[r]), digest_of(tokens);
            }
            printf("%s: %d %016llx %.5f %s\n", model.name, variant, (unsigned long long)digest, distance(all, portable), same ? "alone" : "not alone");
        }
    }
}
