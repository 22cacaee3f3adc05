"""The paged cache and the layout of a step. What backends compute is in `laws/`."""

from pathlib import Path

import pytest
import torch

from model.net.backends import BatchLayout, KVCache, Row
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
    slots, mask = reads.single
    [(_, longer, _)] = reads.longer
    keys = 6 if window is None else 3
    assert (2 * keys, (2, 1, 1, keys)) == (len(slots), tuple(mask.shape))
    assert (10 if window is None else 4) == len(longer)
    assert [5 * 4] * keys == slots[keys:].tolist()
