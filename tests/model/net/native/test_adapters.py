"""LoRA adapters in the native decoder: each is the merged model, and no token's bits depend on what is beside it."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from attend.model.errors import CheckpointError
from attend.model.net.adapters import Adapter, AdapterBatch, LowRank, Part
from attend.model.net.native import library
from attend.model.net.native.adapters import NativeAdapters
from attend.model.net.native.decoder import NativeBackend, NativeDecoder
from attend.model.net.native.packing import numbers_of_matrices
from attend.model.net.paged_attention import BatchLayout, KVCache, PagedAttention, ReferenceBackend, Row
from attend.model.net.transformer import Decoder
from attend.model.sublayers import DeltaSpec
from tests.model.checkpoints import tiny_decoder
from tests.model.net.native.test_native import distance, random_text, shaped

needs_library = pytest.mark.skipif(library.load_library() is None, reason="the native decoder is not built")
pytestmark = [needs_library, pytest.mark.by_loops("amx")]
LENGTHS = [1, 33, 64, 65, 20]
SWITCHES = {
    "llama": {"num_kv_heads": 2},
    "biased": {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "mlp_size": 50},
    "gpt2": {"norm": "layernorm", "positions": "learned", "activation": "gelu_tanh", "gated_mlp": False, "mlp_bias": True},
    "gemma2": {"norm_place": "sandwich", "residual_scale": 0.7},
    "gpt_neox": {"norm": "layernorm", "norm_place": "parallel", "gated_mlp": False, "activation": "gelu"},
    "cohere": {"norm": "layernorm_without_bias", "norm_place": "shared"},
    "clamped": {"swiglu_limit": 7.0, "mlp_bias": True},
    "mixture": {"num_experts": 4, "experts_per_token": 2, "shared_expert_size": 40},
    "gemma4": {"norm_place": "sandwich", "per_layer_input_size": 12, "num_layers": 4, "kv_shared_layers": 2, "head_size": 48}
    | {"kv_shared_mlp_size": 60, "keys_are_values": True, "layer_scale": True},
    "beside": {"norm_place": "sandwich", "num_experts": 4, "experts_per_token": 4, "experts_beside_mlp": True},
    "delta": {"attention_gate": True, "delta": DeltaSpec(2, 4, 16, 32, 4), "delta_layers": (0,), "qk_norm": "head"},
    "head_gate": {"head_gate": True, "qk_norm": "head"},
    "conv": {"conv_kernel": 3, "conv_bias": True, "conv_layers": (0,)},
}


def random_adapter(net: Decoder, seed: int, rank: int = 5) -> Adapter:
    """One part of each matrix has a product; those of others are of another rank, and some matrices have none."""
    generator, matrices, known = torch.Generator().manual_seed(seed), {}, numbers_of_matrices(net.config)
    for name, linear in net.named_modules():
        if name not in known or (seed + len(matrices)) % 7 == 0:
            continue
        ranks = [rank + 3 * part for part in range(len(linear.parts))]
        if len(ranks) > 1:
            ranks[seed % len(ranks)] = 0
        down = torch.randn(sum(ranks), linear.in_features, generator=generator) / linear.in_features**0.5
        up, parts, row, begin = torch.zeros(linear.out_features, sum(ranks)), [], 0, 0
        for rows, size in zip(linear.parts, ranks, strict=True):
            up[row : row + rows, begin : begin + size] = torch.randn(rows, size, generator=generator) / 4
            if size:
                parts.append(Part(range(row, row + rows), range(begin, begin + size)))
            row, begin = row + rows, begin + size
        matrices[name] = LowRank(down, up, tuple(parts))
    return Adapter(str(seed), matrices)


def merged(net: Decoder, adapter: Adapter) -> Decoder:
    whole = Decoder(net.config)
    whole.load_state_dict(net.state_dict())
    for name, low in adapter.matrices.items():
        whole.get_submodule(name).weight.data += low.up_OR @ low.down_RI
    return whole.eval()


def run(net, backend, adapters=None, of_text=(), *, chunk: int, texts, dtype=torch.bfloat16) -> list[Tensor]:
    """Hidden states of texts side by side, in chunks; `of_text` has the adapter of each, None for none."""
    cache = KVCache.allocate(net.config, 4 * len(texts), 32, dtype, "cpu")
    done, found = [0] * len(texts), [[] for _ in texts]
    while any(at < len(text) for at, text in zip(done, texts, strict=True)):
        turns = [(i, done[i], min(chunk, len(text) - done[i])) for i, text in enumerate(texts) if done[i] < len(text)]
        turns.sort(key=lambda turn: turn[2] != 1)
        rows = [Row(range(4 * i + 1, 4 * i + 5), start, count) for i, start, count in turns]
        layout = BatchLayout.build(rows, 32, "cpu", states=[1 + i for i, *_ in turns])
        tokens = torch.cat([texts[i][start : start + count] for i, start, count in turns])
        if adapters is not None:
            owners = [of_text[i] for i, _, count in turns for _ in range(count)]
            groups = [AdapterBatch(each, [t for t, owner in enumerate(owners) if owner is each]) for each in {*owners} - {None}]
            adapters.use(groups, len(owners))
        hidden = net(tokens, layout.positions_T, PagedAttention(backend, cache, layout)).float()
        for (i, start, count), part in zip(turns, hidden.split([count for *_, count in turns]), strict=True):
            found[i].append(part)
            done[i] = start + count
    return [torch.cat(parts) for parts in found]


@pytest.fixture(params=SWITCHES)
def case(request):
    net = tiny_decoder(shaped(4, 2, **({"head_size": 32} | SWITCHES[request.param])))
    adapters = [random_adapter(net, seed) for seed in (1, 2, 3)]
    texts = [random_text(length, at) for at, length in enumerate(LENGTHS)]
    return SimpleNamespace(net=net, adapters=adapters, texts=texts, backend=NativeBackend(net.config.attention_variants))


def native(case) -> tuple[NativeDecoder, NativeAdapters]:
    net = NativeDecoder(tiny_decoder(case.net.config).bfloat16())
    beside = NativeAdapters(net)
    case.prepared = [beside.prepare(adapter) for adapter in case.adapters]
    return net, beside


@torch.inference_mode()
def test_a_text_has_the_same_bits_beside_any_adapters_and_in_any_chunks(variant, case):
    """Those without one have the bits of a decoder that knows of none."""
    net, beside = native(case)
    one, two, three = case.prepared
    of_text = [one, None, two, three, one]
    mixed = run(net, case.backend, beside, of_text, chunk=64, texts=case.texts)
    for at, (text, adapter) in enumerate(zip(case.texts, of_text, strict=True)):
        for chunk in (64, 7):
            [alone] = run(net, case.backend, beside, [adapter], chunk=chunk, texts=[text])
            assert torch.equal(alone, mixed[at])
    plain = NativeDecoder(tiny_decoder(case.net.config).bfloat16())
    assert torch.equal(run(plain, case.backend, chunk=64, texts=case.texts)[1], mixed[1])


@torch.inference_mode()
def test_an_adapter_is_no_farther_from_float32_than_the_merged_model_in_bfloat16(variant, case):
    """Up to a tenth: rounding the sum of two matrices is as good as rounding each."""
    net, beside = native(case)
    adapter, texts = case.prepared[1], case.texts[2:4]
    exact = merged(tiny_decoder(case.net.config), case.adapters[1])
    wanted = run(exact, ReferenceBackend(), chunk=64, texts=texts, dtype=torch.float32)
    found = run(net, case.backend, beside, [adapter] * 2, chunk=64, texts=texts)
    rounded = run(NativeDecoder(exact.bfloat16()), case.backend, chunk=64, texts=texts)
    without = run(net, case.backend, beside, [None] * 2, chunk=64, texts=texts)
    far, near, off = (distance(torch.cat(some), torch.cat(wanted)) for some in (found, rounded, without))
    assert far < 1.1 * near + 0.002
    assert off > 5 * far


def test_an_adapter_of_what_is_not_computed_here_is_refused_by_name(case):
    beside, low = native(case)[1], next(iter(case.adapters[0].matrices.values()))
    with pytest.raises(CheckpointError, match=r"^an adapter of blocks\.0\.mlp\.router is not computed by the native backend"):
        beside.prepare(Adapter("d", {"blocks.0.mlp.router": low}))
