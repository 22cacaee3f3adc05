"""What no engine can beat, and what the bookkeeping costs: the arithmetic, without any timing."""

import itertools
from types import SimpleNamespace

import pytest

from loadtest.bench import scheduler
from loadtest.bench.limits import decode_limit, prompt_limit, weights
from tests.model.checkpoints import tiny_config

CONFIG = tiny_config()


def test_every_matrix_is_counted_once():
    attention = 32 * (4 * 8) * 2 + 32 * (2 * 8) * 2
    assert weights(CONFIG) == 2 * (attention + 3 * 32 * 48) + 32 * CONFIG.vocab_size


def test_a_step_waits_for_memory_or_for_arithmetic_whichever_is_slower():
    read = 2 * weights(CONFIG) + 192 * CONFIG.kv_bytes_per_token(2)
    assert decode_limit(CONFIG, 1, 1e9, 1e30) == pytest.approx(1e9 / read)
    assert decode_limit(CONFIG, 4, 1e30, 1e9) == pytest.approx(1e9 / (2 * weights(CONFIG)))


def test_a_prompt_needs_the_head_once_and_sees_half_of_itself():
    matrices = weights(CONFIG) - 32 * CONFIG.vocab_size
    assert prompt_limit(CONFIG, 0, 1e9) == pytest.approx(1e9 / (2 * matrices))
    scores_and_values = 2 * 2 * (4 * 8) * 2 * 50  # multiply and add, two layers, half of 100 tokens
    assert prompt_limit(CONFIG, 100, 1e9) == pytest.approx(1e9 / (2 * matrices + 2 * scores_and_values / 2))


def test_a_step_costs_the_processor_time_of_schedule_and_commit_alone_in_microseconds(monkeypatch):
    """By a clock that reads 3 ms for a schedule, 50 ms for what the model would do, and 4 ms for a commit."""
    readings = itertools.accumulate(itertools.cycle([0.0, 0.003, 0.050, 0.004]))
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: 0.0, thread_time=lambda: next(readings)))
    assert scheduler.step_cost(4, steps=5) == pytest.approx(7000)
