"""The gated delta rule: the recurrence, its chunked form, and the states that go from one to the next."""

import pytest
import torch
from torch import Tensor

from attend.model.errors import CheckpointError
from attend.model.net.delta import CHUNK, chunked_delta_rule, delta_rule
from attend.model.net.paged_attention import BatchLayout, KVCache, PagedAttention, Row
from attend.model.net.transformer import Decoder
from attend.model.sublayers import DeltaSpec
from attend.model.train.loss import hidden_states
from tests.model.attention import BACKENDS
from tests.model.checkpoints import VOCAB, tiny_config, tiny_decoder
from tests.model.net.native.test_native import dirty_cache

Rolled = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
CONFIG = tiny_config(
    num_layers=3, delta=DeltaSpec(key_heads=2, value_heads=4, key_size=8, value_size=6, kernel=4), delta_layers=(0, 2)
)
CONVOLVES = tiny_config(num_layers=3, conv_kernel=4, conv_bias=True, conv_layers=(0, 2))


def rolled(
    length: int, *, rows: int = 2, heads: int = 3, keys: int = 8, values: int = 5, fade: float = 1.0, rates: float = 1.0
) -> Rolled:
    """Queries, keys of length 1, values, log decays, rates below `rates` and a state."""
    torch.manual_seed(length)
    q, k = (torch.nn.functional.normalize(torch.randn(rows, heads, length, keys), dim=-1) for _ in range(2))
    decay, rate = -fade * torch.rand(rows, heads, length), rates * torch.rand(rows, heads, length)
    return q, k, torch.randn(rows, heads, length, values), decay, rate, torch.randn(rows, heads, keys, values)


@pytest.mark.parametrize("rates", [1.0, 2.0])
@pytest.mark.parametrize("fade", [0.0, 0.1, 3.0, 500.0])
@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_the_chunked_form_is_the_recurrence(length, fade, rates):
    """Without decay, with one that forgets all in a token, and between; also where a state may change its sign."""
    given = rolled(length, fade=fade, rates=rates)
    for ours, expected in zip(chunked_delta_rule(*given), delta_rule(*given), strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("rule", [delta_rule, chunked_delta_rule])
@pytest.mark.parametrize("parts", [[1] * 9, [4, 5], [8, 1]])
def test_a_state_goes_on_where_it_was_left(rule, parts):
    *given, state = rolled(9)
    expected, last = rule(*given, state)
    outputs = []
    for some in zip(*(part.split(parts, dim=2) for part in given), strict=True):
        out, state = rule(*some, state)
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs, dim=2), expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(state, last, atol=2e-6, rtol=1e-5)


def test_a_weak_decay_after_strong_ones_keeps_its_digits():
    q, k, v, decay, rate, state = rolled(CHUNK, fade=0.01)
    decay[..., : CHUNK // 2] -= 400.0
    for ours, expected in zip(
        chunked_delta_rule(q, k, v, decay, rate, state), delta_rule(q, k, v, decay, rate, state), strict=True
    ):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


LENGTHS = (1, 70, 9, 40)
TEXTS = [[(7 * at * at + 13 * row + at) % VOCAB for at in range(length)] for row, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module", params=[CONFIG, CONVOLVES], ids=["delta", "short_conv"])
def net(request) -> Decoder:
    return tiny_decoder(request.param)


@torch.inference_mode()
def paged(net: Decoder, cache: KVCache, backend: str, chunk: int, slots: list[int]) -> list[Tensor]:
    """Logits [T, V] of TEXTS side by side, so many tokens of each in a step, with their states in `slots`."""
    attention = BACKENDS[backend](net.config.attention_variants)
    found: list[list[Tensor]] = [[] for _ in TEXTS]
    for start in range(0, max(LENGTHS), chunk):
        rows = [(min(chunk, len(text) - start), row) for row, text in enumerate(TEXTS) if len(text) > start]
        rows.sort(key=lambda pair: pair[0] != 1)
        given = [Row(list(range(1 + row, 41, 4)), start, count) for count, row in rows]
        layout = BatchLayout.build(given, 8, "cpu", states=[slots[row] for _, row in rows])
        tokens = [token for count, row in rows for token in TEXTS[row][start : start + count]]
        logits = net.logits(net(torch.tensor(tokens), layout.positions_T, PagedAttention(attention, cache, layout)))
        for (_, row), part in zip(rows, logits.split([count for count, _ in rows]), strict=True):
            found[row].append(part)
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("chunk", [1, 7, 70])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_in_any_slot_and_in_any_chunks_is_that_of_the_whole_text(net, backend, chunk):
    """Beside texts of other lengths; then other texts take the slots, which hold what the first ones left."""
    cache = dirty_cache(net.config, 40, 8, torch.float32)
    for slots in ([4, 1, 5, 2], [1, 4, 2, 3]):
        for text, ours in zip(TEXTS, paged(net, cache, backend, chunk, slots), strict=True):
            expected = net.logits(hidden_states(net, torch.tensor([text])))
            assert (ours - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_may_write_to_another_slot_than_it_reads(net, backend):
    attention, text, found = BACKENDS[backend](net.config.attention_variants), torch.tensor(max(TEXTS, key=len)[:9]), []
    for slot in (3, 4):
        cache = dirty_cache(net.config, 40, 8, torch.float32)
        for start, end, target in ((0, 5, 3), (5, 9, slot)):
            layout = BatchLayout.build([Row([1, 2], start, end - start)], 8, "cpu", (), [target], [3])
            with torch.inference_mode():
                out_TE = net(text[start:end], layout.positions_T, PagedAttention(attention, cache, layout))
            if start == 0:
                before = [part[3].clone() for state in cache.states.values() for part in state]
        found.append((out_TE, [part[slot] for state in cache.states.values() for part in state]))
    assert torch.equal(found[0][0], found[1][0])
    assert all(map(torch.equal, found[0][1], found[1][1]))
    assert all(map(torch.equal, before, [part[3] for state in cache.states.values() for part in state]))


CONV = {"conv_kernel": 3, "conv_layers": (0,)}
UNSERVED = {
    "need a conv_kernel above 1": CONV | {"conv_kernel": 1},
    "delta_layers and conv_layers in one model": CONV | {"delta": CONFIG.delta, "delta_layers": (1,)},
    "a recurrent state in every layer": CONV | {"conv_layers": (0, 1, 2)},
    "delta_norm_place 'parallel'": {"delta_norm_place": "parallel"},
    "beside norm_place 'post'": {"delta_norm_place": "pre", "norm_place": "post"},
}


@pytest.mark.parametrize(("named", "switches"), UNSERVED.items(), ids=UNSERVED)
def test_layers_with_a_state_that_are_not_built_are_refused_by_name(named, switches):
    with pytest.raises(CheckpointError, match=f"config.json: .*{named}"):
        tiny_config(num_layers=3, **switches)


@pytest.mark.parametrize("config", [CONFIG, CONVOLVES], ids=["delta", "short_conv"])
def test_a_state_takes_the_bytes_that_its_tensors_take(config):
    cache = KVCache.allocate(config, [1, 6], 8, torch.bfloat16, "cpu")
    per_slot = sum(part[0].nbytes for state in cache.states.values() for part in state)
    assert per_slot == config.state_bytes == 2 * config.layers[0].state_bytes
    assert {len(part) for state in cache.states.values() for part in state} == {7}
