"""What is left for keys and values is what the device has, less the weights and the most that steps take."""

import gc
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from attend.model.engine.cache import SHARE, largest_steps, memory_left
from attend.model.engine.config import EngineConfig
from attend.model.engine.graphs import DecodeGraphs
from attend.model.engine.piecewise_graphs import PiecewiseGraphs
from attend.model.engine.runner import ModelRunner
from attend.model.net.paged_attention import Row
from tests.gpu.steps import Recorder, machine
from tests.gpu.test_families import FAMILIES
from tests.model.checkpoints import tiny_config

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

TOTAL = 1 << 30
CONFIG = EngineConfig(max_model_len=4096, num_blocks=128, block_size=32, max_batch_requests=16, max_batch_tokens=512)


def left(made, config):
    """`memory_left` on a device of TOTAL bytes, and the peak of its steps."""
    old, device = made.runner, made.device

    def runner(cache):
        recorder = Recorder(device)
        graphs = DecodeGraphs(old.net, old.backend, cache, config.max_model_len, config.max_batch_requests, recorder)
        states = bool(cache.states)
        pieces = None if states else PiecewiseGraphs(old.net, old.backend, cache, config.max_batch_tokens, recorder.in_pieces)
        return ModelRunner(old.net, old.backend, cache, "cuda", graphs, pieces=pieces)

    gc.collect()  # what the last runner held is freed
    device.reset()
    found = memory_left(old.net.config, config, torch.bfloat16, "cuda", runner, lambda: TOTAL - device.peak)
    return found, device.peak


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_gets_what_the_largest_steps_leave(family):
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "num_layers": 2, "max_positions": 4096}
    with machine(tiny_config(**shape | FAMILIES[family]), num_blocks=1) as made:
        weights = made.device.allocated
        found, peak = left(made, CONFIG)
        assert found == int((TOTAL - peak) * SHARE)
        assert peak > weights
        assert [] == made.device.faults
        again, wider = left(made, replace(CONFIG, max_batch_tokens=2048))
        assert wider > peak
        assert again < found
        more, higher = left(made, replace(CONFIG, max_batch_requests=64))
        assert higher > peak
        assert more < found


def test_the_largest_steps_are_a_whole_budget_of_a_prompt_and_every_stream_at_the_longest_length():
    prompt, streams = largest_steps(tiny_config(), CONFIG)
    assert ([512], [4096 - 512]) == (prompt.counts, prompt.starts)
    assert ([1] * 16, [4095] * 16) == (streams.counts, streams.starts)
    assert all(draw.plan.is_limited for draw in (*prompt.draws, *streams.draws))
    assert all(Row(table, 4095, 1).blocks[4095 // 32] == 1 for table in streams.tables[0])


def test_short_requests_fill_the_budget_of_a_step_together():
    prompts, _ = largest_steps(tiny_config(), replace(CONFIG, max_model_len=200))
    assert ([112, 200, 200], [88, 0, 0]) == (prompts.counts, prompts.starts)
    assert [111, 311, 511] == prompts.draw_rows
    few, _ = largest_steps(tiny_config(), replace(CONFIG, max_model_len=200, max_batch_requests=2))
    assert [200, 200] == few.counts


def test_recorded_steps_need_no_more_room_for_longer_requests_than_their_splits_take():
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "num_layers": 1, "max_positions": 1 << 17}

    def recorded(length):
        with machine(tiny_config(**shape), requests=8, length=length, num_blocks=1) as made:
            tables = made.runner.graphs._lines.tables_GLB.inner
            lines = tables.shape[1] + 8  # those that are kept, and those of a step
            return made.device.peak - lines * tables.shape[2] * tables.element_size()

    assert recorded(1 << 17) <= 1.001 * recorded(1 << 14)
