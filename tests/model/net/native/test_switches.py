"""The native decoder computes every switch of a model, alone; families set them together in `test_checkpoints.py`."""

from dataclasses import replace
from functools import cache, partial
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attend.model.backends.backend import Placement
from attend.model.backends.native import Native
from attend.model.config import NormPlace
from attend.model.net.attention import MultiHeadAttention
from attend.model.net.delta import GatedDelta
from attend.model.net.experts import Mixture
from attend.model.net.layers import ACTIVATIONS
from attend.model.net.paged_attention import ReferenceBackend, TorchBackend
from attend.model.net.transformer import Decoder
from attend.model.rope import YarnScaling
from attend.model.sublayers import DeltaSpec
from tests.model.net.margins import margins
from tests.model.net.native.test_native import distance, needs_library, pair, random_text, run, run_native, shaped

TEXTS = [random_text(length, at) for at, length in enumerate((70, 3, 33))]
WINDOW = {"sliding_window": 9, "window_layers": (1,)}
ODD = {"hidden_size": 40, "mlp_size": 72}
"""No whole vectors."""
EXPERTS = {"num_experts": 5, "experts_per_token": 2, "expert_size": 24}
SHARED = {"shared_expert_size": 72}
GROUPS = {"scoring_func": "sigmoid", "num_experts": 8, "expert_groups": 4, "groups_per_token": 2, "experts_per_token": 3}
DELTA = {"delta": DeltaSpec(key_heads=2, value_heads=4, key_size=16, value_size=32, kernel=4), "delta_layers": (0,)}
CONV = {"conv_kernel": 3, "conv_layers": (0,)}
AFTER = {"qk_norm": "head", "qk_norm_after_rope": True}
SCALED = {"query_scale_beta": 0.7, "query_scale_length": 9}
KV_SHARED = {"num_layers": 4, "kv_shared_layers": 2, "sliding_window": 9, "window_layers": (1, 3)}
PER_LAYER = {"per_layer_input_size": 12, "per_layer_vocab_size": 100}
CLAMPED = {"swiglu_limit": 0.9, "swiglu_slope": 1.2}
ALONE = {
    **{name: {"activation": name} for name in ("gelu", "gelu_tanh", "relu", "relu2")},
    **{f"plain-{name}": {"activation": name, "gated_mlp": False} for name in ("silu", "gelu", "gelu_tanh", "relu", "relu2")},
    **{name: {"norm_place": name} for name in ("sandwich", "output", "post", "parallel", "shared")},
    **{name: {"norm": name} for name in ("layernorm", "layernorm_without_bias")},
    **{f"residual_scale-{name}": {"residual_scale": 0.4, "norm_place": name} for name in get_args(NormPlace)},
    "embedding_scale": {"embedding_scale": 0.3},
    "rope_size-large": {"head_size": 96, "rope_size": 72},
    "head_size-small": {"head_size": 10},
    "head_size-80": {"head_size": 80},
    "local_rope_theta": WINDOW | {"local_rope_theta": 100.0},
    "qk_norm_after_rope-odd": AFTER
    | {"head_size": 42, "rope_size": 20, "rope_scaling": YarnScaling(4.0, 32, attention_factor=1.4)},
    "query_scale-odd": SCALED | {"head_size": 42, "rope_size": 20, "rope_layers": (1,)},
    "post_norm_eps": {"post_norm_eps": 0.5, "norm_place": "sandwich"},
    "rope_thetas": {"rope_thetas": (100.0, 0, 5e5), "num_layers": 3},
    "learned": {"positions": "learned"},
    "sinusoidal": {"positions": "sinusoidal"},
    "sinks-window": {"sinks": True, "softcap": 5.0, **WINDOW},
    "clamped_swiglu": CLAMPED,
    "experts-one": EXPERTS | {"experts_per_token": 1},
    "experts-all": EXPERTS | {"experts_per_token": 5},
    "experts-many": EXPERTS | {"num_experts": 20, "experts_per_token": 6, "expert_size": 16},
    "shared_expert-ungated": EXPERTS | SHARED | {"shared_expert_gate": False},
    "sigmoid_routing-of-chosen": EXPERTS | {"scoring_func": "sigmoid", "routing": "chosen", "routing_eps": 0.2},
    "score_correction-of-chosen": EXPERTS | {"score_correction": True, "routing": "chosen", "routing_floor": 0.7},
    "expert_groups-of-softmax": EXPERTS | GROUPS | {"scoring_func": "softmax", "experts_per_token": 4},
    "scaled_routing": EXPERTS | {"routed_scaling_factor": 2.5},
    "head_gate-10": {"head_gate": True, "head_size": 10, "norm_place": "parallel"},
    "attention_gate-10": {"attention_gate": True, "head_size": 10},
    "heads_by_layer-odd": WINDOW | {"head_size": 10, "global_head_size": 80, "global_kv_heads": 4, "qkv_bias": True},
    "keys_are_values": {"keys_are_values": True, "qk_norm": "head"},
    "value_norm": {"value_norm": True},
    "kv_shared_layers-wide": KV_SHARED | {"kv_shared_mlp_size": 100, "norm": "layernorm", "qk_norm": "all"},
    "layer_scale-post": {"layer_scale": True, "norm_place": "post", "residual_scale": 0.4},
    "per_layer_inputs-post": PER_LAYER | {"norm": "layernorm", "norm_place": "post", "layer_scale": True},
    "per_layer_inputs-parallel": PER_LAYER | {"norm_place": "parallel", "activation": "gelu", "residual_scale": 0.4},
    "gated_delta-odd": {"delta": DeltaSpec(3, 9, 10, 37, 2), "delta_layers": (0,)},
    "gated_delta-wide": {"delta": DeltaSpec(1, 2, 130, 70, 8), "delta_layers": (1,)},
    "gated_delta-alone": {"delta": DeltaSpec(3, 3, 12, 20, 1), "delta_layers": (0,), "activation": "gelu"},
    "gated_delta-twice": DELTA | {"delta_layers": (0, 1), "num_layers": 3},
    "gated_delta-negative": DELTA | {"delta": replace(DELTA["delta"], negative_eigenvalues=True, norm_eps=1e-2)},
    "norm_by_layer": DELTA | {"norm_place": "output", "delta_norm_place": "pre"},
    "short_conv-biased": CONV | {"conv_bias": True, "conv_kernel": 2, "conv_layers": (1,)},
    "short_conv-wide": CONV | {"conv_kernel": 16, "hidden_size": 136},
    "short_conv-twice": CONV | {"conv_layers": (0, 2), "num_layers": 3, "conv_bias": True},
}
each_case = pytest.mark.parametrize("name", ALONE)


def _has_gain(module: nn.Module) -> bool:
    return isinstance(module, nn.RMSNorm) and module.weight is not None


def exact_gains(*nets: Decoder) -> None:
    """The same gains in float32 for all nets, which bfloat16 cannot hold."""
    dice = torch.Generator().manual_seed(4)
    for norms in zip(*([norm for norm in net.modules() if _has_gain(norm)] for net in nets), strict=True):
        gain = 0.6 + torch.rand(norms[0].weight.shape, generator=dice)
        for norm in norms:
            norm.weight = nn.Parameter(gain, requires_grad=False)


KINDS = 8
"""Of tokens; the first columns of the residual stream say of which kind a token is."""


def decide_by_kind(*nets: Decoder) -> None:
    """Give tokens a kind that no sublayer changes, and that routers read before all else: noise of rounding decides nothing."""
    dice = torch.Generator().manual_seed(6)
    count = nets[0].config.num_experts
    scores = torch.stack([torch.randperm(count, generator=dice) for _ in range(KINDS)], dim=1) - (count - 1) / 2
    for net in nets:
        tokens = net.embedding.tokens.weight
        tokens[:, :KINDS] = 24.0 * torch.eye(KINDS)[torch.arange(len(tokens)) % KINDS]
        for name, module in net.named_modules():
            if name.endswith((".out", ".merge", ".down", "per_layer.projection")):
                module.weight[..., :KINDS, :] = 0
                if module.bias is not None:
                    module.bias[..., :KINDS] = 0
            if isinstance(module, Mixture):
                module.router.weight.mul_(0.015625)[:, :KINDS] = 2 * scores / count
                if module.router.bias is not None:
                    module.router.bias.mul_(0.125)
                if module.correction is not None:
                    module.correction.copy_(torch.linspace(0.0, 1.5, count))


def margin_and_noise(whole: Decoder, half: Decoder) -> tuple[float, float]:
    """By how much scores must change, at least, to give a token another expert; and what rounding does to them."""
    scores: dict[Decoder, list[torch.Tensor]] = {}
    found: list[float] = []

    def note(net: Decoder, mixture: Mixture, _: object, __: object, scores_TX: torch.Tensor) -> None:
        scores[net].append(scores_TX.float())
        found.append(float(margins(mixture, scores_TX).min()) if net is whole else torch.inf)

    for net, dtype in ((whole, torch.float32), (half, torch.bfloat16)):
        scores[net], mixtures = [], [module for module in net.modules() if isinstance(module, Mixture)]
        hooks = [mixture.router.register_forward_hook(partial(note, net, mixture)) for mixture in mixtures]
        run(net, TorchBackend(net.config.attention_variants), 1000, 32, dtype, TEXTS)
        for hook in hooks:
            hook.remove()
    return min(found), float((torch.cat(scores[whole]) - torch.cat(scores[half])).abs().max())


def settle(delta: GatedDelta) -> None:
    """Heads that forget within a few tokens, and some that remember all of the text. Keys are like queries: where they are
    orthogonal, an output is 0 but for rounding, and its norm makes noise of it.
    """
    delta.log_speed.copy_(torch.linspace(-6, 0, len(delta.log_speed)))
    for rows in (delta.inputs.weight, delta.convolution):
        queries, keys = rows[: 2 * delta.spec.query_width].chunk(2)
        keys.mul_(0.3).add_(queries)


def nets_of(switches: dict) -> tuple[Decoder, Decoder]:
    """In float32 and in bfloat16, the same weights; gains of Gemma's kind where a family has them."""
    whole, half = pair(shaped(4, 2, **({"head_size": 32} | ODD | switches)))
    half.reach(half.config.max_positions)  # tables are not rounded
    for block in half.blocks:
        if isinstance(block.attention, GatedDelta):
            settle(block.attention)
        elif isinstance(block.attention, MultiHeadAttention):
            block.attention.qkv.weight *= 0.5  # attention to one token alone would make noise of rounding a matter of luck
    whole.load_state_dict(half.state_dict())
    if switches.get("activation") == "gelu_tanh" and half.config.norm == "rmsnorm":
        exact_gains(whole, half)
    if half.config.num_experts is not None:
        decide_by_kind(whole, half)
    return whole, half


@cache
def expected(name: str) -> tuple[Decoder, torch.Tensor, float]:
    """A case's net in bfloat16, what the equation in float32 gives, and how far torch is from it: for all instruction sets."""
    whole, half = nets_of(ALONE[name])
    variants = half.config.attention_variants
    if half.config.num_experts is not None:
        margin, noise = margin_and_noise(whole, half)
        assert margin > 2 * noise, "a router decides within the noise: this case needs other weights"
    wanted = run(whole, ReferenceBackend(variants), 1000, 32, torch.float32, TEXTS)
    return half, wanted, distance(run(half, TorchBackend(variants), 1000, 32, torch.bfloat16, TEXTS), wanted)


@needs_library
@each_case
@torch.inference_mode()
def test_a_switch_is_computed_no_farther_from_float32_than_torch_computes_it(variant, name):
    """In one chunk and in several, beyond the window and beyond the original context."""
    net, wanted, theirs = expected(name)
    assert Native.refusal(net.config, Placement(torch.bfloat16, "cpu", 32)) is None
    for chunk in (1000, 7):
        found = run_native(net, chunk, 32, texts=TEXTS)
        assert torch.isfinite(found).all()
        assert distance(found, wanted) <= min(theirs, 0.02)


@needs_library
@each_case
@torch.inference_mode()
def test_a_switch_leaves_a_token_its_bits_whatever_is_computed_beside_it(variant, name):
    """Alone and in a batch, in one chunk and in many, on one thread and on two."""
    net = expected(name)[0]
    torch.set_num_threads(2)
    wanted = run_native(net, 1000, 32, texts=TEXTS)
    for chunk in (1, 16):
        assert torch.equal(run_native(net, chunk, 32, texts=TEXTS), wanted), chunk
    torch.set_num_threads(1)
    alone = [run_native(net, 50, 32, texts=[text]) for text in TEXTS]
    torch.set_num_threads(2)
    assert torch.equal(torch.cat(alone), wanted)


@needs_library
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
@torch.inference_mode()
def test_an_activation_has_the_value_of_its_own_equation(variant, name):
    """To the precision of bfloat16, in the tails too: the two kinds of GELU are near each other elsewhere."""
    x = torch.linspace(-5, 5, 72).bfloat16()
    for gated in (True, False):
        sizes = {"hidden_size": 72, "mlp_size": 72, "num_layers": 1, "mlp_bias": True, "norm_eps": 1e-30}
        net = pair(shaped(4, 2, 32, activation=name, gated_mlp=gated, **sizes))[1]
        for parameter in net.parameters():
            parameter.zero_()
        mlp = net.blocks[0].mlp
        (mlp.gate_up if gated else mlp.up).bias.copy_(torch.cat((x, torch.ones_like(x))) if gated else x)
        mlp.down.weight.copy_(torch.eye(72))
        net.norm.weight.fill_(1)
        wanted = ACTIVATIONS[name](x.double())
        found = run_native(net, 1000, 32, texts=TEXTS[:1])[0].double()
        torch.testing.assert_close(found * wanted.square().mean().sqrt(), wanted, rtol=0.02, atol=1e-9)
    assert not torch.allclose(F.gelu(x.double()), F.gelu(x.double(), approximate="tanh"), rtol=0.02, atol=1e-9)


@needs_library
@torch.inference_mode()
def test_a_clamped_gate_has_the_value_of_its_own_equation(variant):
    """Gates from far below to above the limit, ups on both sides of it."""
    gate, up = (
        each.flatten().bfloat16() for each in torch.meshgrid(torch.linspace(-4, 3, 9), torch.linspace(-3, 3, 8), indexing="ij")
    )
    sizes = {"hidden_size": 72, "mlp_size": 72, "num_layers": 1, "mlp_bias": True, "norm_eps": 1e-30}
    net = pair(shaped(4, 2, 32, swiglu_limit=2.0, swiglu_slope=1.3, **sizes))[1]
    for parameter in net.parameters():
        parameter.zero_()
    mlp = net.blocks[0].mlp
    mlp.gate_up.bias.copy_(torch.cat((gate, up)))
    mlp.down.weight.copy_(torch.eye(72))
    net.norm.weight.fill_(1)
    gate, up = gate.double().clamp(max=2), up.double().clamp(-2, 2)
    wanted = (up + 1) * gate * torch.sigmoid(1.3 * gate)
    found = run_native(net, 1000, 32, texts=TEXTS[:1])[0].double()
    torch.testing.assert_close(found * wanted.square().mean().sqrt(), wanted, rtol=0.02, atol=1e-9)


@needs_library
@torch.inference_mode()
def test_experts_are_summed_in_the_order_of_their_numbers(variant):
    """In float32, where 2^30 + 1 - 2^30 is 0, and 2^30 - 2^30 + 1 is 1: the order of their scores."""
    experts = {"num_experts": 3, "experts_per_token": 3, "routing": "chosen", "mlp_bias": True, "num_layers": 1}
    net = pair(shaped(4, 2, 32, **experts))[1]
    for parameter in net.parameters():
        parameter.zero_()
    for module in net.modules():
        if isinstance(module, nn.RMSNorm):
            module.weight.fill_(1)
    net.embedding.tokens.weight.fill_(1)
    mixture = net.blocks[0].mlp
    mixture.router.bias.copy_(torch.tensor([0.0, -1.0, 0.0]))
    mixture.experts.down.bias[:, :20] = torch.tensor([2.0**30, 1.0, -(2.0**30)])[:, None]
    found = run_native(net, 1000, 32, texts=TEXTS)
    assert torch.equal(found, torch.ones_like(found))


@needs_library
@torch.inference_mode()
def test_an_expert_that_is_not_a_number_harms_only_the_tokens_that_go_to_it(variant):
    whole, half = nets_of(EXPERTS | SHARED | {"qkv_bias": True, "routing": "chosen"})
    wanted = run_native(half, 1000, 32, texts=TEXTS)
    for net in (whole, half):
        net.blocks[-1].mlp.experts.down.weight[3, 7, 5] = torch.nan
    found = run_native(half, 1000, 32, texts=TEXTS)
    expected = run(whole, ReferenceBackend(whole.config.attention_variants), 1000, 32, torch.float32, TEXTS)
    harmed = expected.isnan().all(dim=-1)
    assert 0 < harmed.sum() < len(harmed)
    assert found[harmed].isnan().all()
    assert torch.equal(found[~harmed], wanted[~harmed])
