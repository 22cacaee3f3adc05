"""The paged cache and the layout of a step. What backends compute is in `laws/`."""

from array import array
from dataclasses import replace

import pytest
import torch

from attend.model.net.paged_attention import BatchLayout, KVCache, Row
from attend.model.sublayers import DeltaSpec
from tests.model.checkpoints import tiny_config


def test_the_cache_has_the_promised_blocks_and_the_reserved_one():
    config = tiny_config(num_layers=3)
    cache = KVCache.allocate(config, num_blocks=5, block_size=16, dtype=torch.bfloat16, device="cpu")
    tensors = (*cache.keys, *cache.values)
    assert [(6 * 16, config.num_kv_heads, config.head_size)] * 6 == [tuple(part.shape) for part in tensors]
    assert 6 * 16 * config.kv_bytes_per_token(2) == sum(part.nbytes for part in tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_new_cache_is_zeros_whatever_others_left(dtype):
    """No page of it was touched, and nothing that ended lies in it."""
    config = replace(tiny_config(num_layers=2), delta=DeltaSpec(1, 1, key_size=8, value_size=8, kernel=2), delta_layers=(0,))
    for _ in range(3):
        cache = KVCache.allocate(config, [50, 50], 16, dtype, "cpu")
        parts = [*cache.keys, *cache.values, *(part for state in cache.states.values() for part in state)]
        assert cache.nbytes == sum(part.nbytes for part in parts) > 0
        assert not any(part.view(torch.uint8).any() for part in parts)
        for part in parts:
            part.view(torch.uint8).fill_(0xFF)


def test_a_token_lies_in_its_requests_blocks_one_after_the_other():
    """Token p in slot blocks[p // size] * size + p % size, for rows of one token and for longer ones."""
    layout = BatchLayout.build([Row([3, 7], 5, 1), Row([2, 9, 4], 3, 6)], 4, "cpu")
    assert [7 * 4 + 1, 2 * 4 + 3, 9 * 4, 9 * 4 + 1, 9 * 4 + 2, 9 * 4 + 3, 4 * 4] == layout.slots_T.tolist()
    assert [5, 3, 4, 5, 6, 7, 8] == layout.positions_T.tolist()
    assert [[3, 7, 0], [2, 9, 4]] == layout.block_table_RB.tolist()


@pytest.mark.parametrize("window", [None, 3])
def test_what_is_read_under_a_window_is_no_more_than_the_window(window):
    """Also in memory: old tokens of a long text are not gathered."""
    reads = BatchLayout.build([Row([3, 7], 5, 1), Row([5], 0, 1), Row([2, 9, 4], 8, 2)], 4, "cpu").reads(window)
    [group] = reads.single
    [(_, longer, _)] = reads.longer
    keys = 6 if window is None else 3
    assert (2 * keys, (2, 1, 1, keys)) == (len(group.slots), tuple(group.mask.shape))
    assert (10 if window is None else 4) == len(longer)
    assert [5 * 4] * keys == group.slots[keys:].tolist()


class Pages(array):
    """The blocks of a request, and how often one of them was looked at by itself."""

    num_read = 0

    def __iter__(self):
        self.num_read += len(self)
        return super().__iter__()

    def __getitem__(self, where):
        self.num_read += 1
        return super().__getitem__(where)


@pytest.mark.parametrize("tokens", [1, 200])
def test_a_layout_looks_at_the_blocks_of_a_long_past_as_a_whole(tokens):
    """They are copied as they lie in memory, and not made into numbers one by one in each step."""
    pages, past = Pages("q", range(4000, 0, -1)), 4000 * 8 - tokens
    layout = BatchLayout.build([Row(pages, past, tokens)], 8, "cpu")
    assert [*range(4000, 0, -1)] == layout.block_table_RB[0].tolist()
    assert pages.num_read <= 3
    assert [pages[at // 8] * 8 + at % 8 for at in range(past, past + tokens)] == layout.slots_T.tolist()
