"""The laws of the Triton decoder: norms, rotation, MLPs and experts. Run as those of its attention are, see `laws.py`."""

import copy
from dataclasses import replace

import pytest
import torch

from attend.model.engine.build import build_engine
from attend.model.engine.cuda_recorder import CudaRecorder
from attend.model.engine.graphs import DecodeGraphs
from attend.model.engine.options import EngineOptions
from attend.model.engine.piecewise_graphs import PiecewiseGraphs
from attend.model.net.experts import Mixture
from attend.model.net.features import TRITON, features
from attend.model.net.layers import MLP, GatedMLP
from attend.model.net.paged_attention import BatchLayout, KVCache, PagedAttention, ReferenceBackend, Row, TorchBackend
from attend.model.net.triton import mlp
from attend.model.net.triton.backend import INTERPRETED, TritonBackend
from attend.model.net.triton.decoder import TritonDecoder
from attend.model.params import SamplingParams
from attend.model.rope import YarnScaling
from attend.model.sublayers import DeltaSpec
from attend.model.transfer import integers
from tests.model.checkpoints import tiny_config, tiny_decoder, write_checkpoint
from tests.model.engine.machines import answers, ask
from tests.model.net.formats.test_fp8 import BLOCKS, fp8
from tests.model.net.formats.writing import AWQ, GPTQ, awq, gptq, pack_folder, plain_folder

DEVICE = "cpu" if INTERPRETED else "cuda"
BIASED = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
WINDOW = {"sliding_window": 3, "window_layers": (1,)}
EXPERTS = {"num_experts": 5, "experts_per_token": 3, "expert_size": 20}
MIXTURE = {"shared_expert_size": 20, **EXPERTS}
ROUTED = {"num_experts": 8, "expert_groups": 4, "groups_per_token": 2, "scoring_func": "sigmoid", "score_correction": True}
ROUTED |= {"shared_expert_gate": False, "routing": "chosen", "routing_eps": 1e-6, "routed_scaling_factor": 2.5}
DELTA = DeltaSpec(key_heads=2, value_heads=4, key_size=6, value_size=12, kernel=4)
QWEN = {"delta": DELTA, "delta_layers": (0,), "attention_gate": True, "qk_norm": "head", "rope_size": 2, "qkv_bias": True}
QWEN |= {"num_kv_heads": 1, "head_size": 12}
GEMMA4 = {"global_head_size": 16, "global_kv_heads": 1, "keys_are_values": True, "value_norm": True, "layer_scale": True}
GEMMA4 |= {"local_rope_theta": 100.0, **WINDOW, "num_heads": 6}
GEMMA4_SHARED = {"num_layers": 4, "kv_shared_layers": 2, "kv_shared_mlp_size": 60, "window_layers": (1, 2)}
GEMMA4_SHARED |= {"per_layer_input_size": 6, "per_layer_vocab_size": 100}
MODELS = {
    "llama": {"num_heads": 6, "mlp_size": 70},
    "qwen3": {"qk_norm": "head", "num_heads": 6, "head_size": 24, "qkv_bias": True},
    "olmo3": {"norm_place": "output", "qk_norm": "all", "num_heads": 6, "local_rope_theta": 100.0, **WINDOW}
    | {"rope_scaling": YarnScaling(4.0, 32, attention_factor=1.1)},
    "gemma3": {"norm_place": "sandwich", "activation": "gelu_tanh", "embedding_scale": 6.0, "qk_norm": "head"}
    | {"attention_scale": 0.3, "softcap": 5.0, **WINDOW},
    "gemma4": {"norm_place": "sandwich", "activation": "gelu_tanh", "qk_norm": "head", "attention_scale": 1.0, **GEMMA4},
    "gemma4-shared": {"norm_place": "sandwich", "qk_norm": "head", **GEMMA4, **GEMMA4_SHARED},
    "gemma4-post": {"norm_place": "post", **GEMMA4_SHARED, "layer_scale": True, "window_layers": (0, 2), "sliding_window": 3},
    "gemma4-experts": {"norm_place": "sandwich", **GEMMA4, **EXPERTS, "routing": "chosen", "experts_beside_mlp": True},
    "granite": {"residual_scale": 0.4, "rope_layers": (1,), "activation": "gelu", "mlp_bias": True, "norm_place": "sandwich"},
    "gpt2": {
        "norm": "layernorm",
        "positions": "learned",
        "activation": "gelu_tanh",
        "gated_mlp": False,
        "head_size": 5,
        **BIASED,
    },
    "2017": {"norm": "layernorm", "norm_place": "post", "positions": "sinusoidal", "activation": "relu", "gated_mlp": False}
    | {"residual_scale": 0.5, **BIASED},
    "gpt_neox": {"norm": "layernorm", "norm_place": "parallel", "rope_size": 6, "activation": "gelu", "gated_mlp": False}
    | {"head_size": 10, "qk_norm": "head", "residual_scale": 0.5, **BIASED},
    "cohere2": {"norm": "layernorm_without_bias", "norm_place": "shared", "rope_layers": (1,), "qk_norm": "all", **WINDOW},
    "gpt_oss": {"sinks": True, "swiglu_limit": 0.9, "swiglu_slope": 1.2, **EXPERTS, **BIASED, **WINDOW, "routing": "chosen"},
    "qwen2_moe": {**MIXTURE, "expert_layers": (1,), "activation": "relu"},
    "glm4_moe": {**MIXTURE, **ROUTED, "qk_norm": "head", "rope_size": 4, "expert_layers": (1,)},
    "qwen3_5": QWEN,
    "qwen3_5_moe": {**QWEN, **MIXTURE},
    "lfm3": {"head_gate": True, "norm_place": "sandwich", "head_size": 12, "qk_norm": "head", **WINDOW},
    "lfm2": {"conv_kernel": 3, "conv_bias": True, "conv_layers": (0,), "qk_norm": "head"},
    "olmo_hybrid": {"norm_place": "output", "delta_norm_place": "pre", "qk_norm": "all", "rope_layers": ()}
    | {"delta": replace(DELTA, negative_eigenvalues=True, norm_eps=1e-3), "delta_layers": (0,)},
    "hunyuan": {"qk_norm": "head", "qk_norm_after_rope": True, "head_size": 12, "num_heads": 6, "qkv_bias": True},
    "hunyuan-odd": {"qk_norm": "head", "qk_norm_after_rope": True, "norm": "layernorm", "head_size": 10, "rope_size": 6}
    | {"rope_scaling": YarnScaling(4.0, 32, attention_factor=1.4)},
    "ministral3": {"query_scale_beta": 0.7, "query_scale_length": 3, "rope_layers": (1,), "qk_norm": "head"},
    "muse_glimmer": {"norm_place": "sandwich", "post_norm_eps": 0.5, "rope_thetas": (0, 100.0), "attention_gate": True},
    "arcee": {"activation": "relu2", "gated_mlp": False},
    "qwen3_next": {**QWEN, **MIXTURE, "expert_layers": (0,), "qkv_bias": False},
}
"""Named for the families that set such switches; together they set all of them."""
each_model = pytest.mark.parametrize("name", MODELS)


def decoder_of(name, dtype=torch.float32, **changes):
    """A model's decoder with gains and biases of all sizes, weights such that no score is far above the others."""
    net = tiny_decoder(tiny_config(**MODELS[name] | changes))
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.linspace(-0.5, 0.5, len(parameter)))
    return net.to(DEVICE, dtype)


@torch.inference_mode()
def two_steps(way, net, backend, length=6):
    """A prompt of `length` tokens beside another's first token, then a token each: hidden states [T, E]."""
    dtype, blocks = net.head.weight.dtype, ([1, 4, 3, 5], [2])
    cache, found = KVCache.allocate(net.config, 5, 8, dtype, DEVICE), []
    for cached in (*cache.keys, *cache.values, *(part for state in cache.states.values() for part in state)):
        cached.fill_(torch.nan)  # what nobody has written is never read
    for rows in ([Row(blocks[1], 0, 1), Row(blocks[0], 0, length)], [Row(blocks[0], length, 1), Row(blocks[1], 1, 1)]):
        layout = BatchLayout.build(rows, 8, DEVICE, states=[row.blocks[0] for row in rows])
        tokens = torch.arange(len(layout.slots_T), device=DEVICE) + 5
        found.append(way(tokens, layout.positions_T, PagedAttention(backend, cache, layout)))
    return torch.cat(found)


def of_triton(net, length=6):
    return two_steps(TritonDecoder(net), net, TritonBackend(net.config.attention_variants), length)


def distance(ours, wanted):
    """Between hidden states, of the size of those that are wanted."""
    return float((ours.double() - wanted.double()).norm() / wanted.double().norm())


@each_model
def test_the_decoder_is_that_of_torch(name):
    """In float32, number for number."""
    net = decoder_of(name)
    wanted, found = two_steps(net, net, ReferenceBackend(net.config.attention_variants)), of_triton(net)
    assert found.dtype == wanted.dtype
    assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()


def test_all_that_it_lists_is_compared():
    assert TRITON == frozenset().union(*(features(tiny_config(**switches)) for switches in MODELS.values()))


def test_bfloat16_is_no_farther_from_float32_than_torchs():
    half = decoder_of("gemma3", torch.bfloat16)
    whole = decoder_of("gemma3")
    whole.load_state_dict({key: value.float() for key, value in half.state_dict().items()})
    half.reach(128)  # tables are not rounded
    variants = half.config.attention_variants
    wanted = two_steps(whole, whole, ReferenceBackend(variants), 24)
    theirs = distance(two_steps(half, half, TorchBackend(variants), 24), wanted)
    assert distance(of_triton(half, 24), wanted) <= min(theirs, 0.02)


def mixture_of(seed=0, **switches):
    """Experts whose matrices hold small whole numbers: float32 computes each of them exactly, in a batch of any size."""
    torch.manual_seed(seed)
    config = tiny_config(
        activation="relu", mlp_bias=True, **{"num_experts": 7, "experts_per_token": 4, "expert_size": 12} | switches
    )
    mixture = Mixture(config, config.layers[0].experts)
    for name, parameter in mixture.named_parameters():
        most = 1024 if name.startswith("router") else 3  # scores in steps so fine that none are equal
        parameter.data = torch.randint(-most, most + 1, parameter.shape) / (1024.0 if most == 1024 else 1.0)
    return mixture.to(DEVICE).requires_grad_(False), config


@pytest.mark.parametrize(
    ("switches", "num_tokens"),
    [
        ({"experts_per_token": 1}, 30),
        ({"routing": "chosen"}, 30),
        ({"experts_per_token": 7}, 30),
        ({"num_experts": 20, "experts_per_token": 2}, 4),
        (ROUTED | {"shared_expert_size": 12}, 30),
    ],
    ids=["one", "some", "all", "more than pairs", "of groups"],
)
def test_experts_are_summed_in_the_order_of_their_numbers(monkeypatch, switches, num_tokens):
    """To the bit what torch adds expert after expert, with several items for an expert and none for others."""
    monkeypatch.setattr(mlp, "PAIRS", 16)
    monkeypatch.setattr(mlp, "COUNTED", 16)
    mixture, config = mixture_of(**switches)
    x_TE = torch.randint(-2, 3, (num_tokens, 32), device=DEVICE).float()
    assert torch.equal(mixture(x_TE), mlp.feed_forward(mixture, x_TE, config))


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped"])
def test_an_activation_is_torchs_and_what_is_not_a_number_passes_through(name):
    switches = {"swiglu_limit": 2.0} if name == "clamped" else {"activation": name}
    values = torch.cat((torch.linspace(-8, 8, 46), torch.tensor([torch.nan, 0.0])))
    for make in (GatedMLP,) if name == "clamped" else (GatedMLP, MLP):
        config = tiny_config(hidden_size=48, mlp_bias=True, **switches)
        module = make(config, config.mlp_size).requires_grad_(False)
        for parameter in module.parameters():
            parameter.zero_()
        (module.up if make is MLP else module.gate_up).bias.copy_(values if make is MLP else torch.cat((values, values)))
        module.to(DEVICE)
        module.down = torch.nn.Identity()  # or what is not a number would spread
        x_TE = torch.zeros(1, 48, device=DEVICE)
        found, wanted = mlp.feed_forward(module, x_TE, config), module(x_TE)
        assert wanted[0, 46].isnan()
        torch.testing.assert_close(found, wanted, equal_nan=True)


def test_a_recorded_step_is_the_same_step():
    """Three requests in a graph for four, then one: the scores of a plain step over the same cache."""
    decoder = decoder_of("gpt_oss")
    config, backend, net = decoder.config, TritonBackend(decoder.config.attention_variants), TritonDecoder(decoder)
    cache = KVCache.allocate(config, 12, 8, torch.float32, DEVICE)
    for cached in (*cache.keys, *cache.values):
        cached.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
    record = (lambda step: step) if INTERPRETED else CudaRecorder()
    recorded = DecodeGraphs(net, backend, cache, max_model_len=64, max_batch_requests=4, record=record)
    for rows in ([Row([1, 2, 3, 4, 5], 38, 1), Row([6], 3, 1), Row([7, 8], 9, 1)], [Row([6], 4, 1)]):
        assert recorded.fits(rows)
        tokens = list(range(5, 5 + len(rows)))
        layout = BatchLayout.build(rows, 8, DEVICE)
        with torch.inference_mode():
            hidden = net(torch.tensor(tokens, device=DEVICE), layout.positions_T, PagedAttention(backend, cache, layout))
            expected = net.logits(hidden)
        done = recorded.run(rows, integers(tokens, DEVICE))
        torch.testing.assert_close(done.logits_TV, expected, atol=1e-4, rtol=1e-4)
        assert expected.argmax(-1).tolist() == done.greedy_T.tolist()


@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("name", [name for name, switches in MODELS.items() if not switches.keys() & {"delta", "conv_kernel"}])
def test_a_step_in_pieces_is_the_same_step(name, gated):
    """Streams beside prompts, over the same cache: hidden states of a plain step."""
    decoder = decoder_of(name, attention_gate=gated)
    config, backend, net = decoder.config, TritonBackend(decoder.config.attention_variants), TritonDecoder(decoder)
    cache = KVCache.allocate(config, 24, 8, torch.float32, DEVICE)
    for cached in (*cache.keys, *cache.values):
        cached.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
    record = (lambda step: step) if INTERPRETED else CudaRecorder().in_pieces
    recorded = PiecewiseGraphs(net, backend, cache, 32, record)
    for rows in ([Row([1, 2, 3, 4, 5], 38, 1), Row([6], 3, 1), Row([7, 8], 3, 9), Row([9], 0, 4)], [Row([6, 9], 4, 6)]):
        assert recorded.fits(rows)
        tokens = [5 + at for at in range(sum(row.count for row in rows))]
        others = [[[block + 11 for block in row.blocks] for row in rows]] * (cache.num_groups - 1)
        layout = BatchLayout.build(rows, 8, DEVICE, others)
        with torch.inference_mode():
            expected = net(
                torch.tensor(tokens, device=DEVICE), layout.positions_T, PagedAttention(backend, cache, layout)
            ).clone()
        for layer, group in enumerate(cache.group_of_layer):
            cache.keys[layer][layout.of(group).slots_T] = cache.values[layer][layout.of(group).slots_T] = torch.nan
        found = recorded.run(rows, integers(tokens, DEVICE), others)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_each_group_of_layers_has_blocks_of_its_own(fused):
    """In a plain step and in a recorded one. Blocks that a window no longer sees are gone, and block 0 holds NaN."""
    config = tiny_config(
        num_layers=3, head_size=16, sliding_window=20, window_layers=(0,), delta=DELTA, delta_layers=(1,), attention_gate=True
    )
    decoder, backend = tiny_decoder(config).to(DEVICE), TritonBackend(config.attention_variants)
    net = TritonDecoder(decoder) if fused else decoder
    cache = KVCache.allocate(config, [12, 7, 4], 8, torch.float32, DEVICE)
    for cached in (*cache.keys, *cache.values):
        cached.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
        cached[:8] = torch.nan
    for state in cache.states.values():
        for part in state:
            part[1:].normal_(generator=torch.Generator(DEVICE).manual_seed(0))
    record = (lambda step: step) if INTERPRETED else CudaRecorder()
    recorded = DecodeGraphs(net, backend, cache, max_model_len=64, max_batch_requests=4, record=record)
    rows, others = [Row([1, 2, 3, 4, 5], 38, 1), Row([6], 3, 1), Row([7, 8], 9, 1)], [[[0, 0, 7, 1, 5], [2], [4, 3]]]
    tokens, states = torch.tensor([5, 6, 7], device=DEVICE), [4, 1, 3]
    layout = BatchLayout.build(rows, 8, DEVICE, others, states)
    caches = [replace(cache, states=copy.deepcopy(cache.states)) for _ in range(2)]  # a step moves states on
    with torch.inference_mode():
        reference = PagedAttention(ReferenceBackend(config.attention_variants), caches[0], layout)
        expected = decoder.logits(decoder(tokens, layout.positions_T, reference))
        found = net.logits(net(tokens, layout.positions_T, PagedAttention(backend, caches[1], layout)))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    cache.keys[0][:8] = cache.values[0][:8] = torch.nan  # where the recording has written its padding
    torch.testing.assert_close(recorded.run(rows, tokens, others, states).logits_TV, expected, atol=1e-4, rtol=1e-4)


OPTIONS = EngineOptions(
    device=DEVICE, dtype="float32", block_size=8, max_model_len=32, max_batch_requests=4, kv_cache_memory=1 << 20
)


def answers_of(folder, weights, **options):
    """What an engine answers whose start-up line shows these weights."""
    engine = build_engine(folder, replace(OPTIONS, **options))
    assert (engine.info.backend, engine.info.weights) == (options["backend"], weights)
    requests = [
        ask("long", range(5, 15), 2),
        ask("short", [7], 3),
        ask("drawn", [9, 8], 2, sampling=SamplingParams(), seed=3),
    ]
    return answers(engine._engine, requests)


@pytest.mark.parametrize(("family", "quantize"), [("llama", "none"), ("gpt2", "none"), ("llama", "int4")])
def test_an_engine_on_triton_answers_as_one_on_torch(family, quantize, tmp_path):
    """From a checkpoint to tokens, with recorded steps on a GPU. Weights in whole numbers are made plain by torch alone."""
    write_checkpoint(family, tmp_path)
    weights = "float32" if quantize == "none" else quantize
    cpu = {} if quantize == "none" else {"device": "cpu"}
    wanted = answers_of(tmp_path, weights, backend="torch", quantize=quantize, **cpu)
    assert wanted == answers_of(tmp_path, weights, backend="triton", quantize=quantize)


LAYOUTS = {
    "awq": (awq(64), AWQ | {"group_size": 64}, "int4"),
    "gptq": (gptq(8, 32), GPTQ | {"bits": 8, "group_size": 32}, "int8"),
    "fp8": (fp8("blocks"), BLOCKS, "fp8"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_engine_on_triton_multiplies_the_codes_of_a_checkpoint(layout, tmp_path):
    """Its answers are those of a plain checkpoint with the same numbers."""
    pack, settings, weights = LAYOUTS[layout]
    plain = plain_folder(tmp_path / "plain")
    folder = pack_folder(plain, pack, settings)
    assert answers_of(plain, "float32", backend="torch") == answers_of(folder, weights, backend="triton")
