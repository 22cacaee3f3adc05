"""How the memory of the KV cache is shared out among groups of layers."""

from dataclasses import replace

import pytest
import torch

from attend.model.config import ModelConfig
from attend.model.engine.build import size_engine
from attend.model.engine.cache import SNAPSHOTS_PER_CONTEXT, USUAL_CONTEXTS
from attend.model.engine.config import GroupSize
from attend.model.engine.options import EngineOptions
from attend.model.errors import SettingError
from attend.model.sublayers import DeltaSpec
from tests.model.checkpoints import tiny_config

SIZE = 32
WINDOW = 512
GEMMA = tiny_config(num_layers=12, sliding_window=WINDOW, window_layers=(0, 1, 2, 3, 4, 6, 7, 8, 9, 10), max_positions=1 << 17)
"""Five layers with a window to one without, as Gemma 3."""
FULL = replace(GEMMA, sliding_window=None, window_layers=None)
MISTRAL = replace(GEMMA, window_layers=None)
OPTIONS = EngineOptions(max_batch_requests=4, max_batch_tokens=1024)


def sized(config: ModelConfig, tokens: int, **changes):
    """An engine in the memory that so many tokens take in all layers, beside the reserved blocks."""
    memory = (tokens + SIZE) * config.kv_bytes_per_token(4)
    return size_engine(config, torch.float32, "cpu", replace(OPTIONS, kv_cache_memory=memory, **changes))


def test_layers_with_the_same_memory_are_one_group_full_attention_first():
    groups = replace(GEMMA, window_layers=(0, 2)).memory_groups
    assert [(tuple(number for number in range(12) if number not in (0, 2)), None), ((0, 2), WINDOW)] == [
        (group.layers, group.window) for group in groups
    ]
    assert [1, 0, 1, 0] == list(replace(GEMMA, window_layers=(0, 2)).group_of_layer[:4])
    assert 1 == len(FULL.memory_groups) == len(MISTRAL.memory_groups)


def test_five_layers_in_six_with_a_window_serve_several_times_the_tokens():
    """Four requests take 4 * 18 + 32 blocks under the window, a tenth of the blocks that the memory holds of each."""
    before, after = (sized(config, 32 * 1024).num_blocks for config in (FULL, GEMMA))
    assert 1024 == before
    assert 5.4 < after / before < 6


def test_all_layers_with_a_window_serve_all_positions():
    config = sized(MISTRAL, 8 * 1024)
    assert 1 << 17 == config.max_model_len
    assert 4 * 18 + 32 == config.num_blocks, "more would be of no use"


def test_short_requests_find_as_much_room_under_a_window_as_under_full_attention():
    """Where the memory holds less than the windows of all requests at once."""
    groups = sized(GEMMA, 3000, max_batch_requests=64).groups
    assert [93, 93] == [group.num_blocks for group in groups]
    assert [None, WINDOW] == [group.window for group in groups]


def test_a_window_without_room_for_a_step_keeps_all_tokens_and_bounds_the_context():
    config = sized(GEMMA, 1024)
    assert (GroupSize(32), GroupSize(32)) == config.groups
    assert 1024 == config.max_model_len
    assert (GroupSize(32),) == sized(MISTRAL, 1024).groups


def test_a_window_as_long_as_the_context_is_full_attention():
    config = sized(MISTRAL, 10**6, max_model_len=WINDOW)
    assert (GroupSize(4 * WINDOW // SIZE),) == config.groups


def test_a_context_that_was_asked_for_comes_before_more_requests_at_once():
    asked = sized(GEMMA, 4000, max_batch_requests=64, max_model_len=15000)
    assert 15000 == asked.max_model_len
    assert asked.groups[0].num_blocks * SIZE >= 15000
    assert asked.groups[1].num_blocks >= 18 + 32
    with pytest.raises(
        SettingError, match=r"^max_model_len is 25000 tokens, but the KV cache holds \d+: raise kv_cache_memory"
    ):
        sized(GEMMA, 4000, max_batch_requests=64, max_model_len=25000)


@pytest.mark.parametrize("tokens", [64, 1000, 1600, 5000, 40000, 10**6])
@pytest.mark.parametrize("config", [GEMMA, FULL, MISTRAL], ids=["gemma", "full", "mistral"])
def test_the_groups_take_no_more_than_the_memory_and_nearly_all_that_is_useful(config, tokens):
    memory = (tokens + SIZE) * config.kv_bytes_per_token(4)
    groups = sized(config, tokens).groups
    each = [config.block_bytes(group, SIZE, 4) for group in config.memory_groups]
    taken = sum((group.num_blocks + 1) * size for group, size in zip(groups, each, strict=True))
    assert taken <= memory
    most = [(1 << 17) * 4 // SIZE if group.window is None else 4 * 18 + 32 for group in config.memory_groups]
    full = all(group.num_blocks == count for group, count in zip(groups, most, strict=True))
    assert full or memory - taken < sum(each)


# States.


STATEFUL = replace(FULL, delta=DeltaSpec(1, 1, key_size=25, value_size=10, kernel=1), delta_layers=tuple(range(11)))
"""Every layer but the last keeps a state of 1000 bytes."""


def test_there_is_a_state_for_each_request_and_the_rest_is_for_keys_and_values():
    memory = 5 * 11 * 1000 + 101 * STATEFUL.block_bytes(STATEFUL.memory_groups[0], SIZE, 4)
    config = size_engine(STATEFUL, torch.float32, "cpu", replace(OPTIONS, kv_cache_memory=memory, state_cache_share=0.0))
    assert (GroupSize(100), GroupSize(4, has_state=True)) == config.groups
    assert 2 * STATEFUL.num_kv_heads * STATEFUL.head_size * 4 == STATEFUL.kv_bytes_per_token(4), (
        "of the one layer with keys and values"
    )


def test_without_snapshots_of_states_prefix_caching_is_off_where_layers_keep_them():
    assert OPTIONS.prefix_caching
    nowhere_full = replace(STATEFUL, sliding_window=64)
    for config, share, on in ((STATEFUL, 0.1, True), (STATEFUL, 0.0, False), (FULL, 0.0, True), (nowhere_full, 0.1, False)):
        options = replace(OPTIONS, kv_cache_memory=10**8, state_cache_share=share)
        sized = size_engine(config, torch.float32, "cpu", options)
        assert (on, on and share > 0) == (sized.prefix_caching, sized.num_snapshots > 0)


def test_where_nothing_is_set_there_are_snapshots_for_sixteen_talks(monkeypatch):
    sizes, _ = usual(monkeypatch, STATEFUL, 1 << 50)
    kept = SNAPSHOTS_PER_CONTEXT * USUAL_CONTEXTS
    assert (kept, 64 + kept) == (sizes.num_snapshots, sizes.groups[1].num_blocks)


# What nobody has set.


GIB = 1 << 30


def usual(monkeypatch, config: ModelConfig, free: int, **changes):
    """The engine's sizes where so many bytes are free, and the bytes of its cache."""
    monkeypatch.setattr("attend.model.engine.cache.available_memory", lambda: free)
    sizes = size_engine(config, torch.float32, "cpu", EngineOptions(**changes))
    each = [config.block_bytes(group, SIZE, 4) for group in config.memory_groups]
    return sizes, sum((group.num_blocks + 1) * size for group, size in zip(sizes.groups, each, strict=True))


def test_a_cpus_cache_is_for_sixteen_whole_contexts_where_nothing_is_set(monkeypatch):
    for asked, context in ((None, 1 << 17), (1000, 1000)):
        sizes, _ = usual(monkeypatch, FULL, 1 << 50, max_model_len=asked)
        assert (context, -(-16 * context // SIZE)) == (sizes.max_model_len, sizes.num_blocks)
    assert -(-5 * 1000 // SIZE) == usual(monkeypatch, FULL, 1 << 50, max_model_len=1000, max_batch_requests=5)[0].num_blocks


@pytest.mark.parametrize(
    ("threads", "requests", "contexts"), [(2, 64, 16), (16, 64, 16), (32, 128, 32), (64, 256, 64), (128, 256, 64)]
)
def test_with_more_threads_more_requests_run_and_have_room(monkeypatch, threads, requests, contexts):
    sizes, _ = usual(monkeypatch, FULL, 1 << 50, max_model_len=1000, num_threads=threads)
    assert (requests, -(-contexts * 1000 // SIZE)) == (sizes.max_batch_requests, sizes.num_blocks)
    states, _ = usual(monkeypatch, STATEFUL, 1 << 50, max_model_len=1000, num_threads=threads)
    assert (requests, 4 * contexts) == (states.max_batch_requests, states.num_snapshots)
    assert EngineOptions(num_threads=threads, max_batch_requests=5).batch("cpu").requests == 5
    assert EngineOptions(num_threads=threads).batch("cuda").requests == 256


def test_a_cpus_cache_takes_a_quarter_of_what_is_free_at_most(monkeypatch):
    for free in (GIB // 4, GIB):
        sizes, taken = usual(monkeypatch, FULL, free)
        assert free // 4 - FULL.kv_bytes_per_token(4) * SIZE < taken <= free // 4
        assert sizes.max_model_len == min(1 << 17, sizes.num_blocks * SIZE), "the context is what the memory holds"


def test_what_is_set_is_neither_cut_nor_raised(monkeypatch):
    for memory in (GIB // 4, 8 * GIB):
        sizes, taken = usual(monkeypatch, FULL, 1 << 50, kv_cache_memory=memory)
        assert memory - FULL.kv_bytes_per_token(4) * SIZE < taken <= memory
        assert (memory > GIB) == (sizes.num_blocks > 16 * (1 << 17) // SIZE)
