"""Many cores: how work is shared out, and that the bits depend neither on that nor on how many threads there are.

Keys are split every 1024 tokens, counted from a request's first one. More threads than cores compute the same, slowly.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from attend.model.config import ModelConfig
from attend.model.net.native.decoder import NativeBackend
from attend.model.net.paged_attention import BatchLayout, KVCache, ReferenceBackend, Row
from tests.model.net.native.test_native import dirty_cache, distance, needs_library, shaped

SPLIT = 1024
BLOCK = 32
LENGTHS = [SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 70]
ENDS = {
    "decode": lambda length: [length - 2, length - 1, length],
    "borders": lambda length: [end for end in (SPLIT - 1, SPLIT, SPLIT + 1) if end < length] + [length],
    "chunks": lambda length: [*range(700, length, 700), length],
}
"""Where chunks end."""
VIEWS = [
    ((14, 2, 64), {}),
    ((4, 4, 40), {"sliding_window": SPLIT + 76}),  # its first key is in the middle of a split
    ((8, 1, 32), {"sinks": True, "softcap": 5.0, "sliding_window": 100}),
    ((3, 3, 96), {"sinks": True}),
]
Text = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values of a request."""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def texts_of(config: ModelConfig, lengths: list[int]) -> list[Text]:
    generator = torch.Generator().manual_seed(1)

    def part(length: int, heads: int) -> Tensor:
        return torch.randn(length, heads, config.head_size, generator=generator).bfloat16()

    return [(part(length, config.num_heads), *(part(length, config.num_kv_heads) for _ in "kv")) for length in lengths]


def attended(config: ModelConfig, texts: list[Text], ends: list[list[int]], held: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Attention of texts side by side, each in chunks that end there, by the native backend, or in float32 by the reference."""
    exact = held == torch.float32
    backend = (ReferenceBackend if exact else NativeBackend)(config.attention_variants)
    blocks = [-(-len(q) // BLOCK) for q, _, _ in texts]
    cache: KVCache = dirty_cache(config, sum(blocks), BLOCK, held)
    order = iter((torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(2)) + 1).tolist())
    tables = [[next(order) for _ in range(count)] for count in blocks]
    sinks = torch.linspace(-1, 3, config.num_heads) if config.sinks else None
    done, found = [0] * len(texts), [[] for _ in texts]
    for step in range(max(map(len, ends))):
        turns = [(i, done[i], own[step] - done[i]) for i, own in enumerate(ends) if step < len(own)]
        turns.sort(key=lambda turn: turn[2] != 1)
        layout = BatchLayout.build([Row(tables[i], start, count) for i, start, count in turns], BLOCK, "cpu")
        parts = [[part[start : start + count] for part in texts[i]] for i, start, count in turns]
        q, k, v = (torch.cat(each).to(torch.float32 if exact else torch.bfloat16) for each in zip(*parts, strict=True))
        out = backend.forward(0, q, k, v, cache, layout, sinks).split([count for *_, count in turns])
        for (i, _, count), part in zip(turns, out, strict=True):
            found[i].append(part)
            done[i] += count
    return [torch.cat(parts) for parts in found]


@needs_library
@pytest.mark.parametrize("held", [torch.bfloat16, torch.int8], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize(("shape", "view"), VIEWS, ids=str)
@torch.inference_mode()
def test_the_bits_depend_on_no_chunk_no_batch_and_no_thread(variant, shape, view, held):
    """Of pasts that end about the border of a split, and with windows that begin in the middle of one."""
    config = shaped(*shape, **view)
    texts = texts_of(config, LENGTHS)
    torch.set_num_threads(1)
    wanted = attended(config, texts, [[length] for length in LENGTHS], held)
    assert distance(torch.cat(wanted).float(), torch.cat(attended(config, texts, [[n] for n in LENGTHS], torch.float32))) < 0.03
    for number, ends in zip((2, 16, 64), ENDS.values(), strict=True):
        torch.set_num_threads(number)
        found = attended(config, texts, [ends(length) for length in LENGTHS], held)
        assert [torch.equal(*both) for both in zip(found, wanted, strict=True)] == [True] * len(LENGTHS)
        torch.set_num_threads(2)
        for at, length in enumerate(LENGTHS):
            assert torch.equal(attended(config, texts[at : at + 1], [ends(length)], held)[0], wanted[at]), length
