"""Multi-head latent attention: the written-out equation, one cached vector a token, and what does not compute it."""

import pytest
import torch

from attend.model.backends.backend import Placement
from attend.model.backends.choice import choose_backend
from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError, SettingError
from attend.model.explain.explainer import Explainer, Question
from attend.model.net.adapters import targets_of
from attend.model.net.checkpoint import load_decoder, read_config
from attend.model.net.formats.codes import INT8
from attend.model.net.linear import Linear
from attend.model.net.packed_linears import PackedLinear, multiplies_bfloat16, pack_linears
from attend.model.net.paged_attention import BatchLayout, KVCache, PagedAttention, Row
from attend.model.net.quantised import QuantisedLinear
from attend.model.sublayers import LatentSpec
from attend.model.train.loss import hidden_states
from tests.model.adapters import linears, write_adapter
from tests.model.attention import BACKENDS
from tests.model.checkpoints import tiny_config, tiny_decoder, write_checkpoint

SPEC = LatentSpec(rank=12, query_rank=None, key_size=6, rope_size=4, value_size=5)


def latent_config(**changes) -> ModelConfig:
    return tiny_config(**{"latent": SPEC, "num_kv_heads": 1, "head_size": SPEC.cached_size} | changes)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
def test_one_vector_of_a_token_is_kept_in_each_layer(dtype):
    config = latent_config(num_layers=3)
    width = 16 + (2 if dtype == torch.int8 else 0) // dtype.itemsize
    cache = KVCache.allocate(config, 5, 8, dtype, "cpu")
    assert config.kv_bytes_per_token(dtype.itemsize) == 3 * width * dtype.itemsize
    assert cache.nbytes == 6 * 8 * config.kv_bytes_per_token(dtype.itemsize)
    assert all(held is other for held, other in zip(cache.keys, cache.values, strict=True))
    assert {(6 * 8, 1, width)} == {tuple(held.shape) for held in cache.keys}


@torch.inference_mode()
def test_a_cache_in_8_bits_changes_scores_by_its_rounding_alone():
    config, tokens = latent_config(), torch.arange(40)
    net, found = tiny_decoder(config), {}
    for dtype in (torch.float32, torch.int8):
        cache, layout = KVCache.allocate(config, 5, 8, dtype, "cpu"), BatchLayout.build([Row([*range(1, 6)], 0, 40)], 8, "cpu")
        paged = PagedAttention(BACKENDS["torch"](config.attention_variants), cache, layout)
        found[dtype] = net.logits(net(tokens, layout.positions_T, paged))
    off = (found[torch.int8] - found[torch.float32]).abs().max() / found[torch.float32].abs().max()
    assert 0 < off < 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint("youtu", tmp_path_factory.mktemp("youtu"))


def test_torch_serves_it_and_the_others_refuse_it_by_name(folder):
    config = read_config(folder)
    assert choose_backend("auto", config, Placement(torch.bfloat16, "cpu", 32)).name == "torch"
    for name in ("native", "triton"):
        with pytest.raises(SettingError, match=f"backend is {name}, but .*(latent_attention|was not built|is not installed)"):
            choose_backend(name, config, Placement(torch.bfloat16, "cuda" if name == "triton" else "cpu", 32))


def test_an_adapter_of_the_absorbed_matrix_is_refused_by_name(folder, tmp_path):
    for ends in (("kv_b_proj",), ("o_proj", "kv_b_proj")):
        adapter = write_adapter(tmp_path / ends[0], linears(folder, ends))
        with pytest.raises(CheckpointError, match=r"kv_b_proj"):
            targets_of(folder).read(adapter)


@torch.inference_mode()
def test_quantised_and_packed_weights_leave_the_absorbed_matrix_as_it_is(folder):
    tokens, scores = torch.arange(30)[None], {}
    for kind in (None, INT8):
        net = load_decoder(folder, torch.bfloat16, "cpu", quantize=kind)
        before = net.logits(hidden_states(net, tokens)).float()
        pack_linears(net)
        attention = net.blocks[1].attention
        assert type(attention.kv_up) is Linear
        form = QuantisedLinear if kind else PackedLinear if multiplies_bfloat16() else Linear
        assert {form} == {
            type(part) for part in (attention.query.q_down, attention.query.q_up, attention.kv_down, attention.out)
        }
        scores[kind] = net.logits(hidden_states(net, tokens)).float()
        torch.testing.assert_close(scores[kind], before, rtol=0, atol=0.05 * float(before.abs().max()))
    off = (scores[INT8] - scores[None]).abs().mean() / scores[None].std()
    assert 0 < off < 0.1


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_heads": 2},
        {"head_size": 8},
        {"qk_norm": "head"},
        {"positions": "learned"},
        {"rope_size": 4},
        {"sinks": True},
        {"attention_gate": True},
    ],
    ids=str,
)
def test_a_mix_that_latent_attention_does_not_have_is_refused(changes):
    with pytest.raises(CheckpointError, match="latent"):
        latent_config(**changes)


@torch.inference_mode()
def test_the_explanation_computes_it_from_the_served_weights(folder):
    """Quantised ones too: its matrices are read slice by slice, and this one whole."""
    tokens = (5, 17, 80, 3, 44)
    for kind in (None, INT8):
        net = load_decoder(folder, torch.float32, "cpu", quantize=kind)
        found = Explainer(net).explain(Question(tokens, layers=(0, 3), heads=(0, 2)))
        wanted = net.logits(hidden_states(net, torch.tensor([tokens]))).log_softmax(dim=-1)
        torch.testing.assert_close(found.next_tokens.logprobs_NG[:, 0], wanted.amax(dim=-1), rtol=0, atol=1e-4)
        for view in found.layers:
            assert view.head_weights is not None
            torch.testing.assert_close(view.head_weights.weights_NTT.sum(dim=-1), torch.ones(2, len(tokens)))
