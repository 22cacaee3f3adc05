"""The paged cache and the layout of a step. What backends compute is in `laws/`."""

from array import array
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from attend.model.net.paged_attention import GATHERED, LEAST_KEYS, BatchLayout, KVCache, Row
from attend.model.sublayers import DeltaSpec
from tests.model.checkpoints import tiny_config

LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def test_the_cache_has_the_promised_blocks_and_the_reserved_one():
    config = tiny_config(num_layers=3)
    cache = KVCache.allocate(config, num_blocks=5, block_size=16, dtype=torch.bfloat16, device="cpu")
    tensors = (*cache.keys, *cache.values)
    assert [(6 * 16, config.num_kv_heads, config.head_size)] * 6 == [tuple(part.shape) for part in tensors]
    assert 6 * 16 * config.kv_bytes_per_token(2) == sum(part.nbytes for part in tensors)


@pytest.mark.skipif(not LARGE_PAGES.exists(), reason="this system has no large pages")
def test_all_of_a_cache_on_a_cpu_asks_for_large_pages():
    cache = KVCache.allocate(tiny_config(num_layers=2), num_blocks=5, block_size=16, dtype=torch.bfloat16, device="cpu")
    assert all("hg" in flags_of(part.data_ptr()) for part in (*cache.keys, *cache.values))


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


def flags_of(address: int) -> list[str]:
    """What the kernel was told of the mapping that holds an address (proc_pid_smaps(5))."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
            inside = begin <= address < end
        elif inside and name == "VmFlags:":
            return values
    raise AssertionError(f"no mapping holds {address:#x}")


def test_rows_of_one_token_must_come_first():
    with pytest.raises(AssertionError, match="rows of one token come first"):
        BatchLayout.build([Row([1], 0, 3), Row([2], 4, 1)], 8, "cpu")


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


def decodes(*lengths):
    """Rows of one token at the end of so many, each in blocks of its own."""
    free = count(1)
    return [Row([next(free) for _ in range(-(-length // 32))], length - 1, 1) for length in lengths]


def gathered(*lengths, window=None):
    """How many slots the torch backend reads for each row, and the most for a group of rows."""
    rows = decodes(*lengths)
    groups = BatchLayout.build(rows, 32, "cpu").reads(window).single
    slots = {row: len(group.slots) // len(group.rows_N) for group in groups for row in group.rows_N.tolist()}
    assert sorted(slots) == [*range(len(rows))], "a row is computed twice, or never"
    return [slots[row] for row in range(len(rows))], max(len(group.slots) for group in groups)


def test_a_short_row_costs_beside_a_long_one_what_it_costs_alone():
    short = [40, 64, 65, 700, 701]
    alone, _ = gathered(*short)
    assert alone == gathered(*short, 16384)[0][:5]
    assert alone == gathered(16384, *short, 9000)[0][1:6]


@pytest.mark.parametrize("window", [None, 50, 500])
def test_no_row_costs_more_than_twice_its_keys_whoever_is_beside_it(window):
    lengths = [1 + 37 * at % 3001 for at in range(200)]
    slots, _ = gathered(*lengths, window=window)
    wanted = [min(length, window or length) for length in lengths]
    assert all(real <= read <= max(2 * real, LEAST_KEYS) for real, read in zip(wanted, slots, strict=True))


def test_what_is_gathered_at_once_is_bounded_by_the_longest_row_and_not_by_the_batch():
    assert gathered(*[2000] * 64)[1] <= GATHERED
    assert 2 * GATHERED == gathered(*[2 * GATHERED] * 3, 5)[1]
