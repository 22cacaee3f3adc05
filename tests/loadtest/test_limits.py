"""What no engine can beat: the arithmetic, without any timing."""

import itertools
from dataclasses import replace

import pytest

from attend.model.sublayers import DeltaSpec, MixtureSpec
from loadtest.bench.limits import (
    decode_bytes,
    decode_limit,
    distinct_experts,
    int8_rate,
    prompt_limit,
    prompt_operations,
    weights,
)
from tests.model.checkpoints import tiny_config

CONFIG = tiny_config()


def test_every_matrix_is_counted_once():
    attention = 32 * (4 * 8) * 2 + 32 * (2 * 8) * 2
    assert weights(CONFIG) == 2 * (attention + 3 * 32 * 48) + 32 * CONFIG.vocab_size


def test_without_gates_an_mlp_has_two_matrices():
    assert weights(CONFIG) - weights(replace(CONFIG, gated_mlp=False)) == 2 * 32 * 48


@pytest.mark.parametrize(("experts", "chosen", "tokens"), [(4, 1, 3), (4, 2, 2), (3, 2, 4), (5, 5, 2), (6, 3, 1)])
def test_distinct_experts_are_the_mean_over_all_ways_in_which_tokens_choose(experts, chosen, tokens):
    ways = list(itertools.product(itertools.combinations(range(experts), chosen), repeat=tokens))
    mean = sum(len(set().union(*way)) for way in ways) / len(ways)
    assert distinct_experts(MixtureSpec(experts, chosen, 16, "all", None), tokens) == pytest.approx(mean)


def test_of_a_mixture_a_step_reads_the_experts_that_it_needs_and_a_token_is_multiplied_by_its_own():
    mixture = replace(CONFIG, num_experts=6, experts_per_token=2, expert_size=16, shared_expert_size=24, expert_layers=(1,))
    fixed = weights(CONFIG) - 3 * 32 * 48 + 32 * (6 + 1) + 3 * 32 * 24
    assert weights(mixture) == pytest.approx(fixed + 2 * 3 * 32 * 16)
    assert weights(mixture, 10**6) == pytest.approx(fixed + 6 * 3 * 32 * 16)
    assert decode_limit(mixture, 4, 1e30, 1e9) == pytest.approx(1e9 / (2 * weights(mixture)))
    read = 2 * weights(mixture, 4) + 4 * 192 * mixture.kv_bytes_per_token(2)
    assert decode_limit(mixture, 4, 1e9, 1e30) == pytest.approx(4 * 1e9 / read)


def test_a_delta_rule_has_matrices_of_its_own_and_a_state_that_is_read_and_written():
    spec = DeltaSpec(key_heads=1, value_heads=2, key_size=8, value_size=6, kernel=4)
    config = replace(CONFIG, delta=spec, delta_layers=(0,), attention_gate=True)
    attention, rule = 32 * (3 * 32 + 2 * 16), 32 * (2 * 8 + 2 * 6) + 32 * 12 + 32 * 4 + 12 * 32
    assert weights(config) == attention + rule + 2 * 3 * 32 * 48 + 32 * CONFIG.vocab_size
    state = 4 * (28 * 3 + 2 * 8 * 6)
    assert decode_bytes(config, 5) == 2 * weights(config) + 5 * (192 * config.kv_bytes_per_token(2) + 2 * state)
    matrices = weights(config) - 32 * CONFIG.vocab_size
    assert prompt_operations(config, 100) == 2 * matrices + 4 * 32 * 50 + 7 * 2 * 8 * 6


def test_a_short_convolution_has_matrices_of_its_own_and_a_gate_of_heads_has_one():
    config = replace(CONFIG, conv_kernel=3, conv_layers=(0,), head_gate=True)
    attention, convolution = 32 * (2 * 32 + 2 * 16 + CONFIG.num_heads), 4 * 32 * 32
    assert weights(config) == attention + convolution + 2 * 3 * 32 * 48 + 32 * CONFIG.vocab_size
    state = 4 * 32 * 2
    assert decode_bytes(config, 5) == 2 * weights(config) + 5 * (192 * config.kv_bytes_per_token(2) + 2 * state)


def test_a_step_waits_for_memory_or_for_arithmetic_whichever_is_slower():
    read = 2 * weights(CONFIG) + 192 * CONFIG.kv_bytes_per_token(2)
    assert decode_limit(CONFIG, 1, 1e9, 1e30) == pytest.approx(1e9 / read)
    assert decode_limit(CONFIG, 4, 1e30, 1e9) == pytest.approx(1e9 / (2 * weights(CONFIG)))


def test_a_prompt_needs_the_head_once_and_sees_half_of_itself():
    matrices = weights(CONFIG) - 32 * CONFIG.vocab_size
    assert prompt_limit(CONFIG, 0, 1e9) == pytest.approx(1e9 / (2 * matrices))
    scores_and_values = 2 * 2 * (4 * 8) * 2 * 50  # multiply and add, two layers, half of 100 tokens
    assert prompt_limit(CONFIG, 100, 1e9) == pytest.approx(1e9 / (2 * matrices + 2 * scores_and_values / 2))


def test_a_rate_of_int8_products_can_be_measured():
    assert int8_rate(32, 64) > 0
