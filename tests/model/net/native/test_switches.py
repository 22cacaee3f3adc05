"""The native decoder computes every switch of a model, alone and as families set them together."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from model.net.backends import ReferenceBackend, TorchBackend
from model.net.layers import ACTIVATIONS
from model.net.native.decoder import NativeBackend
from model.net.transformer import Decoder
from model.rope import LongScaling, YarnScaling
from tests.model.net.native.test_native import distance, needs_library, pair, random_text, run, run_native, shaped

TEXTS = [random_text(length, at) for at, length in enumerate((70, 3, 33))]
LONG = LongScaling((1.0, 1.5) * 5, (1.5, 9.0) * 5, 32, 1.2)
WINDOW = {"sliding_window": 9, "window_layers": (1,)}
ODD = {"hidden_size": 40, "mlp_size": 72}
"""No whole vectors."""
ALONE = {
    **{name: {"activation": name} for name in ("gelu", "gelu_tanh", "relu")},
    **{f"plain-{name}": {"activation": name, "gated_mlp": False} for name in ("silu", "gelu", "gelu_tanh", "relu")},
    **{name: {"norm_place": name} for name in ("sandwich", "output", "post")},
    "layernorm": {"norm": "layernorm"},
    "residual_scale": {"residual_scale": 0.4},
    "embedding_scale": {"embedding_scale": 0.3},
    "rope_size": {"rope_size": 20},
    "rope_size-large": {"head_size": 96, "rope_size": 72},
    "local_rope_theta": WINDOW | {"local_rope_theta": 100.0},
    "rope_layers": {"rope_layers": (1,)},
    "qk_norm": {"qk_norm": "head"},
    "qk_norm-all": {"qk_norm": "all"},
    "learned": {"positions": "learned"},
    "sinusoidal": {"positions": "sinusoidal"},
}
BIASED = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
TOGETHER = {
    "gemma": {"activation": "gelu_tanh", "embedding_scale": 40**0.5},
    "gemma2": {"activation": "gelu_tanh", "embedding_scale": 40**0.5, "norm_place": "sandwich", "softcap": 5.0}
    | {"attention_scale": 0.3, **WINDOW},
    "gemma3": {"activation": "gelu_tanh", "embedding_scale": 40**0.5, "norm_place": "sandwich", "qk_norm": "head"}
    | {"attention_scale": 0.3, "local_rope_theta": 100.0, **WINDOW},
    "glm4": {"norm_place": "sandwich", "rope_size": 16, "qkv_bias": True},
    "granite": {"embedding_scale": 3.0, "residual_scale": 0.4, "attention_scale": 0.2, "mlp_bias": True},
    "olmo2": {"norm_place": "output", "qk_norm": "all"},
    "olmo3": {"norm_place": "output", "qk_norm": "all", "local_rope_theta": 500.0, **WINDOW}
    | {"rope_scaling": YarnScaling(4.0, 32, attention_factor=1.1)},
    "phi3": {"rope_size": 20, "rope_scaling": LONG, "sliding_window": 9},
    "smollm3": {"rope_layers": (1,), "sliding_window": 9, "window_layers": (0,)},
    "gpt2": {"norm": "layernorm", "positions": "learned", "activation": "gelu_tanh", "gated_mlp": False, **BIASED},
    "attend-2017": {"norm": "layernorm", "norm_place": "post", "positions": "sinusoidal", "activation": "relu"}
    | {"gated_mlp": False, "embedding_scale": 40**0.5, **BIASED},
    "normed-without-positions": {"norm": "layernorm", "qk_norm": "all", "rope_layers": (), "residual_scale": 2.0},
    "normed-heads": {"norm": "layernorm", "qk_norm": "head", "rope_layers": (0,), "norm_place": "sandwich"},
}
each_case = pytest.mark.parametrize("switches", [*ALONE.values(), *TOGETHER.values()], ids=[*ALONE, *TOGETHER])


def exact_gains(*nets: Decoder) -> None:
    """The same gains in float32 for all nets, which bfloat16 cannot hold."""
    dice = torch.Generator().manual_seed(4)
    for norms in zip(*([norm for norm in net.modules() if isinstance(norm, nn.RMSNorm)] for net in nets), strict=True):
        gain = 0.6 + torch.rand(norms[0].weight.shape, generator=dice)
        for norm in norms:
            norm.weight = nn.Parameter(gain, requires_grad=False)


def nets_of(switches: dict) -> tuple[Decoder, Decoder]:
    """In float32 and in bfloat16, the same weights; gains of Gemma's kind where a family has them."""
    whole, half = pair(shaped(4, 2, **({"head_size": 32} | ODD | switches)))
    half.reach(half.config.max_positions)  # tables are not rounded
    for block in (*whole.blocks, *half.blocks):
        block.attention.qkv.weight *= 0.5  # attention to one token alone would make noise of rounding a matter of luck
    if switches.get("activation") == "gelu_tanh" and half.config.norm == "rmsnorm":
        exact_gains(whole, half)
    return whole, half


@needs_library
@each_case
@torch.inference_mode()
def test_a_switch_is_computed_no_farther_from_float32_than_torch_computes_it(variant, switches):
    """In one chunk and in several, beyond the window and beyond the original context."""
    whole, half = nets_of(switches)
    variants = half.config.attention_variants
    assert NativeBackend.supports(half.config, torch.bfloat16, "cpu", 32)
    wanted = run(whole, ReferenceBackend(variants), 1000, 32, torch.float32, TEXTS)
    theirs = distance(run(half, TorchBackend(variants), 1000, 32, torch.bfloat16, TEXTS), wanted)
    for chunk in (1000, 7):
        found = run_native(half, chunk, 32, texts=TEXTS)
        assert torch.isfinite(found).all()
        assert distance(found, wanted) <= min(theirs, 0.02)


@needs_library
@each_case
@torch.inference_mode()
def test_a_switch_leaves_a_token_its_bits_whatever_is_computed_beside_it(variant, switches):
    """Alone and in a batch, in one chunk and in many, on one thread and on two."""
    net = nets_of(switches)[1]
    torch.set_num_threads(2)
    wanted = run_native(net, 1000, 32, texts=TEXTS)
    for chunk in (1, 16):
        assert torch.equal(run_native(net, chunk, 32, texts=TEXTS), wanted), chunk
    torch.set_num_threads(1)
    alone = [run_native(net, 50, 32, texts=[text]) for text in TEXTS]
    torch.set_num_threads(2)
    assert torch.equal(torch.cat(alone), wanted)


@needs_library
@torch.inference_mode()
def test_gains_are_not_rounded(variant):
    """1 + w for w below the precision of bfloat16 is not 1."""
    net = nets_of({"norm_place": "sandwich", "qk_norm": "head"})[1]
    found = []
    for gain in (1.0, 1.003):
        for norm in net.modules():
            if isinstance(norm, nn.RMSNorm):
                norm.weight = nn.Parameter(torch.full(norm.weight.shape, gain), requires_grad=False)
        found.append(run_native(net, 1000, 32, texts=TEXTS))
    assert 0.001 < distance(*found) < 0.05
    assert torch.tensor(1.003).bfloat16() == 1


@needs_library
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu"])
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
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu"])
@torch.inference_mode()
def test_what_is_not_a_number_passes_through_every_activation(variant, name):
    for gated in (True, False):
        net = pair(shaped(4, 2, 32, activation=name, gated_mlp=gated, mlp_bias=True, positions="learned"))[1]
        last = net.blocks[-1].mlp
        (last.gate_up if gated else last.up).bias[3] = torch.nan
        assert run_native(net, 1000, 32, texts=TEXTS).isnan().all()
