"""What is told of a text is what the model does with it: beside `transformers`, and beside the decoder that serves."""

import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from attend.model.backends.native import Native
from attend.model.config import ModelConfig
from attend.model.explain import explainer as module
from attend.model.explain.explainer import Explainer, Explanation, Question, predict_next_tokens
from attend.model.explain.reference import reference
from attend.model.net.attention import MultiHeadAttention
from attend.model.net.checkpoint import load_decoder, save
from attend.model.net.formats.codes import INT4, INT8
from attend.model.net.native.library import load_library as load_native
from attend.model.net.transformer import Decoder
from attend.model.sublayers import DeltaSpec
from attend.model.train.loss import hidden_states
from tests.model.checkpoints import KINDS, their_model, tiny_config, tiny_decoder, write_checkpoint

TOKENS = (5, 17, 80, 3, 44, 61, 9, 2, 33, 70, 11)
NEAR = 1e-4
MODELS = {
    "plain": tiny_config(),
    "original": tiny_config(positions="sinusoidal", norm_place="post", norm="layernorm", gated_mlp=False, activation="relu"),
    "learned": tiny_config(positions="learned", qkv_bias=True, out_bias=True, mlp_bias=True),
    "window": tiny_config(sliding_window=3, window_layers=(1,), softcap=2.0),
    "sinks": tiny_config(sinks=True, sliding_window=4, window_layers=(0,)),
    "sandwich": tiny_config(norm_place="sandwich", qk_norm="head", logit_softcap=3.0, embedding_scale=2.0),
    "parallel": tiny_config(norm_place="parallel", tied_head=False, residual_scale=0.5),
    "gated": tiny_config(attention_gate=True, delta=DeltaSpec(2, 4, 16, 8, 4), delta_layers=(0,)),
    "conv": tiny_config(conv_kernel=3, conv_bias=True, conv_layers=(0,)),
    "experts": tiny_config(num_experts=4, experts_per_token=2, expert_size=24, expert_layers=(1,), routing="chosen"),
}


def question(config: ModelConfig, tokens=TOKENS, **more) -> Question:
    return Question(tokens, tuple(range(config.num_layers)), tuple(range(config.num_heads)), **more)


def explained(net: Decoder, tokens=TOKENS, **more) -> Explanation:
    return Explainer(net).explain(question(net.config, tokens, **more))


@torch.no_grad()
def scores_of(net: Decoder, tokens=TOKENS) -> torch.Tensor:
    return net.logits(hidden_states(net, torch.tensor([tokens])))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_guesses_are_those_of_transformers(kind, tmp_path):
    folder = write_checkpoint(kind, tmp_path)
    theirs = their_model(folder, attn_implementation="eager")
    with torch.no_grad():
        said = theirs(torch.tensor([TOKENS]), output_attentions=True)
    context = 32 if kind.endswith("-long") else None  # theirs chooses angles by the length of the text, ours by the context
    net = load_decoder(folder, torch.float32, "cpu", context)
    found = explained(net, top=3)
    views = [view for view in found.layers if view.head_weights is not None]
    wanted = [layer[0] for layer in said.attentions if layer is not None]
    assert [view.kind for view in found.layers] == ["state" if spec.recurrence else "attention" for spec in net.config.layers]
    for view, weights_HTT in zip(views, wanted, strict=True):
        if kind == "granite_swa":  # theirs multiplies outputs by what the sinks leave, not weights
            weights_HTT = weights_HTT * (1 - view.head_weights.sinks_NT[..., None])
        assert (view.head_weights.weights_NTT - weights_HTT).abs().max() < NEAR
    logprobs_TV = said.logits[0].log_softmax(dim=-1)
    best = logprobs_TV.topk(3)
    assert (found.next_tokens.logprobs_NG - best.values).abs().max() < NEAR
    assert torch.equal(found.next_tokens.best_NG, best.indices)


@pytest.mark.parametrize("name", MODELS)
def test_rows_sum_to_one_beside_the_sinks_and_nothing_lies_above_the_diagonal_or_before_the_window(name):
    for view in explained(tiny_decoder(MODELS[name])).layers:
        if view.head_weights is None:
            continue
        weights, sinks = view.head_weights.weights_NTT, view.head_weights.sinks_NT
        assert (sinks is not None) == MODELS[name].sinks
        assert ((weights.sum(dim=-1) + (0 if sinks is None else sinks)) - 1).abs().max() < 1e-6
        assert sinks is None or sinks.max() > 1e-2
        hidden = torch.ones(len(TOKENS), len(TOKENS), dtype=torch.bool).triu(1)
        if view.window is not None:
            hidden |= torch.ones_like(hidden).tril(-view.window)
        assert (weights[:, hidden] == 0).all()
        assert (weights[:, ~hidden] > 0).all()


@pytest.mark.parametrize("name", MODELS)
def test_weights_times_values_times_the_output_matrix_summed_over_heads_is_what_attention_adds(name):
    """With scores and weights as they are told, and values and the sublayer's output as the decoder in PyTorch has them."""
    net, kept = tiny_decoder(MODELS[name]).requires_grad_(False), {}

    def keep(layer, attention):
        attention.qkv.register_forward_hook(lambda _, x, y: kept.setdefault(layer, {}).update(qkv=y))
        attention.out.register_forward_hook(lambda _, x, y: kept[layer].update(out=y))

    for layer, block in enumerate(net.blocks):
        if isinstance(block.attention, MultiHeadAttention):
            keep(layer, block.attention)
    scores_of(net)
    for view in explained(net).layers:
        if view.head_weights is None:
            continue
        attention, config = net.blocks[view.layer].attention, net.config
        _, *gate, _, v_TQ = kept[view.layer]["qkv"].split(attention.qkv.parts, dim=-1)
        v_TKD = v_TQ.unflatten(-1, (-1, config.head_size))
        into = attention.out.weight.unflatten(-1, (config.num_heads, -1))
        total = 0 if attention.out.bias is None else attention.out.bias
        for head in range(config.num_heads):
            heads_TD = view.head_weights.weights_NTT[head] @ v_TKD[:, head * config.num_kv_heads // config.num_heads]
            if gate:
                heads_TD = heads_TD * gate[0].unflatten(-1, (config.num_heads, -1))[:, head].sigmoid()
            total = total + heads_TD @ into[:, head].T
        assert (total - kept[view.layer]["out"]).abs().max() < NEAR * max(1.0, float(total.abs().max()))


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_entropies_and_the_last_layers_guesses_are_the_decoders(name):
    net = tiny_decoder(MODELS[name])
    found, logprobs_TV = explained(net, top=4, lens=2), scores_of(net).log_softmax(dim=-1)
    here = found.next_tokens
    assert (here.logprobs_NG - logprobs_TV.topk(4).values).abs().max() < NEAR
    asked = logprobs_TV[:-1].gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    assert (here.asked_N[:-1] - asked).abs().max() < NEAR
    assert (here.entropy_N + (logprobs_TV.exp() * logprobs_TV).sum(dim=-1)).abs().max() < NEAR
    last = slice(-len(TOKENS), None)
    assert torch.equal(found.lens.best_NG[last], here.best_NG[:, :2])
    assert (found.lens.logprobs_NG[last] - here.logprobs_NG[:, :2]).abs().max() < 1e-6
    assert (found.lens.asked_N[last] - here.asked_N)[:-1].abs().max() < 1e-6


@cache
def spent(name: str, quantise: str) -> tuple[Decoder, Decoder]:
    """A decoder in float32 with the numbers of the one that serves, and what is left of that beside the native one."""
    changes = {"head_size": 32, "max_positions": 256}
    with tempfile.TemporaryDirectory() as folder:
        plain = tiny_decoder(tiny_config(**{**_changes(name), **changes}))
        save(plain, Path(folder), torch.bfloat16)
        kind = {"none": None, "int8": INT8, "int4": INT4}[quantise]
        served = load_decoder(Path(folder), torch.bfloat16, "cpu", quantize=kind)
        whole = load_decoder(Path(folder), torch.float32, "cpu", quantize=kind)
    serving = Native(served.config).decoder(served)
    served.keeps = serving  # the matrices lie there
    return whole, served


def _changes(name: str) -> dict:
    return {
        "plain": {},
        "untied": {"tied_head": False, "vocab_size": 100},
        "odd": {"mlp_size": 46, "hidden_size": 34, "qkv_bias": True},
        "experts": {"num_experts": 3, "experts_per_token": 2, "expert_size": 20, "shared_expert_size": 12, "routing": "chosen"},
        "delta": {"attention_gate": True, "delta": DeltaSpec(2, 4, 16, 32, 4), "delta_layers": (0,)},
        "conv": {"conv_kernel": 3, "conv_bias": True, "conv_layers": (0,)},
    }[name]


@pytest.mark.skipif(load_native() is None, reason="the native decoder is not built")
@pytest.mark.parametrize("quantise", ["none", "int8", "int4"])
@pytest.mark.parametrize("name", ["plain", "untied", "odd", "experts", "delta", "conv"])
def test_what_the_native_decoder_serves_from_is_explained_as_the_same_numbers_are_in_float32(name, quantise):
    whole, served = spent(name, quantise)
    ours, wanted = explained(served, top=3, lens=1), explained(whole, top=3, lens=1)
    for mine, theirs in zip(ours.layers, wanted.layers, strict=True):
        if theirs.head_weights is not None:
            assert (mine.head_weights.weights_NTT - theirs.head_weights.weights_NTT).abs().max() < 1e-5
    assert (ours.next_tokens.logprobs_NG - wanted.next_tokens.logprobs_NG).abs().max() < NEAR
    assert (ours.lens.logprobs_NG - wanted.lens.logprobs_NG).abs().max() < NEAR


def test_what_is_raised_between_slices_ends_the_work():
    explainer, calls = Explainer(tiny_decoder(tiny_config())), []

    def between():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        explainer.explain(question(explainer.config), between)
    assert len(calls) == 3
    assert explainer.explain(question(explainer.config)).layers  # and the next call is not ended by it


@pytest.mark.parametrize("rows", [1, 2, 7, 96, 1000])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_the_slices_of_a_head_add_up_to_the_whole(rows, scale, monkeypatch):
    monkeypatch.setattr(module, "NUMBERS", rows * 32)
    served = tiny_decoder(tiny_config())
    hidden_NE = torch.randn(9, 32) * scale
    asked_N = torch.arange(9) * 10
    found = predict_next_tokens(reference(served), hidden_NE, asked_N, 5)
    with torch.no_grad():
        logprobs_NV = served.logits(hidden_NE).log_softmax(dim=-1)
    best = logprobs_NV.topk(5)
    near = {"rtol": 1e-4, "atol": 1e-4}
    assert torch.equal(found.best_NG, best.indices)
    torch.testing.assert_close(found.logprobs_NG, best.values, **near)
    torch.testing.assert_close(found.asked_N, logprobs_NV.gather(-1, asked_N[:, None])[:, 0], **near)
    torch.testing.assert_close(found.entropy_N, -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1), **near)
