"""Blocks that no query sees any more go back, and no answer changes by it: beyond several windows, on every backend."""

from functools import cache, partial

import torch

from attend.model.config import ModelConfig
from attend.model.engine.config import GroupSize
from attend.model.engine.engine import Engine
from tests.model.checkpoints import tiny_config
from tests.model.engine.machines import run
from tests.model.net.laws.test_engine_laws import BLOCK, Answer, answer, assert_near, engine
from tests.model.net.laws.test_engine_laws import crowd as shared_beginnings
from tests.model.net.laws.ways import Way, each_pair, leaves

SIZES = {"num_heads": 2, "num_kv_heads": 1, "head_size": 32, "max_positions": 256}
MODELS = {
    "some layers": tiny_config(**SIZES, num_layers=2, sliding_window=40, window_layers=(0,)),
    "all layers": tiny_config(**SIZES, num_layers=2, sliding_window=33),
    "itself alone": tiny_config(**SIZES, num_layers=2, sliding_window=1, window_layers=(0,)),
}
LENGTHS = [200, 31, 170, 20, 97, 30]
COMINGS = {
    "chunked": {"max_batch_tokens": 13},
    "batched": {},
    "async scheduling": {"async_scheduling": True},
    "async scheduling, preempted": {"async_scheduling": True, "num_blocks": 8},
    "prefix hit": {"prefix_caching": True},
    "preempted": {"num_blocks": 8},
    "preempted, in chunks, with prefix hits": {"num_blocks": 8, "prefix_caching": True, "max_batch_tokens": 40},
}


crowd = partial(shared_beginnings, LENGTHS, 5 * BLOCK, 24)
"""The beginnings that they share are longer than any window."""


@cache
def kept(way: Way, config: ModelConfig) -> dict[str, Answer]:
    """What each of the crowd gets alone from a pool that keeps all of its tokens."""
    return {name: answer(outputs) for request in crowd() for name, outputs in run(engine(way, config), [request]).items()}


def window_engine(way: Way, config: ModelConfig, *, num_blocks: int = 64, **changes) -> Engine:
    """An engine that gives blocks back. They hold NaN until they are given out again, as the reserved block does."""
    steps = changes.get("max_batch_tokens", 256) // BLOCK
    groups = []
    for group in config.memory_groups:
        least = 0 if group.window is None else -(-(group.window - 1) // BLOCK) + 2 + steps
        groups.append(GroupSize(num_blocks if group.window is None else least + num_blocks // 2, group.window))
    machine = engine(way, config, num_blocks=groups[0].num_blocks, groups=tuple(groups), max_model_len=256, **changes)
    commit = machine.scheduler.commit

    def poisoning(plan, result, dropped):
        outputs = commit(plan, result, dropped)
        poison(machine)
        return outputs

    machine.scheduler.commit = poisoning
    return machine


def poison(machine: Engine) -> None:
    """Fill with NaN what nobody holds and nobody can find again."""
    cache, size = machine.runner.cache, machine.scheduler.config.block_size
    for layer, group in enumerate(cache.group_of_layer):
        pool = machine.scheduler.tables.groups[group].pool
        lost = torch.tensor([0, *(block for block in pool._free if block not in pool._keys)], device=cache.keys[0].device)
        for part in (cache.keys[layer], cache.values[layer]):
            part.view(-1, size, *part.shape[1:]).index_fill_(0, lost, leaves(part, torch.nan))


@each_pair(COMINGS, MODELS)
def test_an_answer_is_that_of_a_pool_that_frees_nothing(way, config, coming):
    machine = window_engine(way, config, **COMINGS[coming])
    found = {name: answer(outputs) for name, outputs in run(machine, crowd()).items()}
    assert_near(way, config, crowd(), found)
    if way.fine:
        assert {name: tokens for name, (tokens, _) in kept(way, config).items()} == {
            name: tokens for name, (tokens, _) in found.items()
        }
    if way.exact:
        assert kept(way, config) == found
    stats = machine.stats()
    assert COMINGS[coming].get("prefix_caching", False) == (stats.num_prefix_hits > 0)
    assert ("preempted" in coming) == (stats.num_preemptions > 0)
