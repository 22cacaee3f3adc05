"""The gated delta rule and the short convolution in the native decoder: where its states lie, and how far they go."""

from dataclasses import replace

import pytest
import torch

from attend.model.net.native.decoder import NativeBackend, NativeDecoder
from attend.model.net.paged_attention import BatchLayout, PagedAttention, ReferenceBackend, Row
from tests.model.net.native.test_native import dirty_cache, distance, needs_library, random_text
from tests.model.net.native.test_switches import CONV, DELTA, nets_of

pytestmark = needs_library
SPEC = DELTA["delta"]


def states_after(net, backend, dtype: torch.dtype, chunks: list[tuple[int, int]], slots: list[int]):
    """What lies in the states of a dirty cache after two texts, so many tokens of each in a step."""
    cache, done = dirty_cache(net.config, 8, 32, dtype), [0, 0]
    for counts in chunks:
        turns = sorted((count != 1, at, count) for at, count in enumerate(counts) if count)
        rows = [Row(range(1 + 4 * at, 5 + 4 * at), done[at], count) for _, at, count in turns]
        layout = BatchLayout.build(rows, 32, "cpu", states=[slots[at] for _, at, _ in turns])
        tokens = torch.cat([random_text(70, at)[done[at] : done[at] + count] for _, at, count in turns])
        net(tokens, layout.positions_T, PagedAttention(backend, cache, layout))
        done = [before + count for before, count in zip(done, counts, strict=True)]
    return cache.states[0]


@pytest.mark.parametrize("kernel", [1, 2, 4, 8])
@pytest.mark.parametrize("chunks", [[(70, 3)], [(1, 2), (2, 1), (67, 0)]], ids=str)
@torch.inference_mode()
def test_states_lie_where_they_were_told_and_nowhere_else(variant, chunks, kernel):
    """As the `torch` backend leaves them. A text shorter than what the convolution sees leaves zeros before it."""
    whole, half = nets_of(DELTA | {"delta": replace(SPEC, kernel=kernel)})
    wanted = states_after(whole, ReferenceBackend(whole.config.attention_variants), torch.float32, [(70, 3)], [3, 1])
    found = states_after(NativeDecoder(half), NativeBackend(half.config.attention_variants), torch.bfloat16, chunks, [3, 1])
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours[[0, 2, 4, 5, 6, 7, 8]].isnan().all()
        assert not ours.numel() or distance(ours[[1, 3]], theirs[[1, 3]]) < 0.02
    if kernel == 8:
        assert (found[0][1, :, :4] == 0).all() and (found[0][1, :, 4:] != 0).all()


@pytest.mark.parametrize("kernel", [2, 3, 8, 16])
@pytest.mark.parametrize("chunks", [[(70, 3)], [(1, 2), (2, 1), (67, 0)]], ids=str)
@torch.inference_mode()
def test_so_do_the_states_of_a_short_convolution(variant, chunks, kernel):
    whole, half = nets_of(CONV | {"conv_kernel": kernel, "hidden_size": 136})
    wanted = states_after(whole, ReferenceBackend(whole.config.attention_variants), torch.float32, [(70, 3)], [3, 1])
    found = states_after(NativeDecoder(half), NativeBackend(half.config.attention_variants), torch.bfloat16, chunks, [3, 1])
    [ours], [theirs] = found, wanted
    assert ours[[0, 2, 4, 5, 6, 7, 8]].isnan().all()
    assert distance(ours[[1, 3]], theirs[[1, 3]]) < 0.02
    if kernel > 4:
        assert (ours[1, :, : kernel - 4] == 0).all() and (ours[1, :, kernel - 4 :] != 0).all()


@torch.inference_mode()
def test_a_step_may_write_to_another_slot_than_it_reads(variant):
    for switches in (DELTA, CONV):
        net = NativeDecoder(nets_of(switches)[1])
        for count in (1, 5):
            writes_elsewhere(net, count)


def writes_elsewhere(net: NativeDecoder, count: int) -> None:
    backend, text = NativeBackend(net.config.attention_variants), random_text(9 + count, 0)
    found = []
    for slot in (3, 5):
        cache = dirty_cache(net.config, 8, 32, torch.bfloat16)
        for start, some, sources in ((0, 9, [3]), (9, count, [3])):
            slots = [3 if start == 0 else slot]
            layout = BatchLayout.build([Row([1, 2], start, some)], 32, "cpu", (), slots, sources)
            out_TE = net(text[start : start + some], layout.positions_T, PagedAttention(backend, cache, layout))
            if start == 0:
                before = [part[3].clone() for part in cache.states[0]]
        found.append((out_TE, [part[slot] for part in cache.states[0]], [part[3] for part in cache.states[0]]))
    stays, moves = found
    assert torch.equal(stays[0], moves[0])
    assert all(map(torch.equal, stays[1], moves[1]))
    assert all(map(torch.equal, moves[2], before))


@pytest.mark.parametrize("draft", [1, 15])
@pytest.mark.parametrize("switches", [DELTA, CONV], ids=["delta", "convolution"])
@torch.inference_mode()
def test_a_draft_does_not_move_the_state_on_and_is_computed_from_it(variant, draft, switches):
    net = NativeDecoder(nets_of(switches)[1])
    backend, text, found = NativeBackend(net.config.attention_variants), random_text(40, 0), []
    for steps in ([(0, 9, 0), (9, 3, 0), (12, draft, 0)], [(0, 9, 0), (9, 3 + draft, draft), (12, draft, 0)]):
        cache, parts = dirty_cache(net.config, 8, 32, torch.bfloat16), []
        for start, count, more in steps:
            layout = BatchLayout.build([Row([1, 2], start, count, more)], 32, "cpu", (), [3])
            parts.append(net(text[start : start + count], layout.positions_T, PagedAttention(backend, cache, layout)))
        found.append((torch.cat(parts[1:])[: 3 + draft], parts[-1], *(part[3] for part in cache.states[0])))
    assert all(map(torch.equal, *found))
