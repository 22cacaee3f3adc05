"""What no engine can beat, and what the bookkeeping costs: the arithmetic, without any timing."""

import pytest

from loadtest.bench.limits import decode_limit, weights
from loadtest.bench.scheduler import step_cost
from tests.model.checkpoints import tiny_config

CONFIG = tiny_config()


def test_every_matrix_is_counted_once():
    attention = 32 * (4 * 8) * 2 + 32 * (2 * 8) * 2
    assert weights(CONFIG) == 2 * (attention + 3 * 32 * 48) + 32 * CONFIG.vocab_size


def test_a_step_waits_for_memory_or_for_arithmetic_whichever_is_slower():
    read = 2 * weights(CONFIG) + 192 * CONFIG.kv_bytes_per_token(2)
    assert decode_limit(CONFIG, 1, 1e9, 1e30) == pytest.approx(1e9 / read)
    assert decode_limit(CONFIG, 4, 1e30, 1e9) == pytest.approx(1e9 / (2 * weights(CONFIG)))


def test_the_scheduler_alone_takes_time():
    assert 0 < step_cost(4, steps=5) < 1e6
