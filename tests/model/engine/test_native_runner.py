"""A step of the native decoder in one call: the same bits as its parts, one after the other, and torch has no share in it."""

import copy
import random
from array import array

import pytest
import torch

from attend.model.backends.native import Native
from attend.model.engine.native_runner import NativeRunner
from attend.model.engine.plan import HiddenSum, PromptScores, StepInput
from attend.model.engine.runner import ModelRunner
from attend.model.net.kv_cache import KVCache
from attend.model.net.native.decoder import NativeBackend, NativeDecoder
from attend.model.net.native.drawing import draw_tokens, logprobs
from attend.model.params import SamplingParams
from attend.model.sampling_plan import Draw, SamplingPlan
from tests.model.checkpoints import VOCAB, tiny_config, tiny_decoder
from tests.model.net.native.test_drawing import Calls

pytestmark = pytest.mark.skipif(Native.absence() is not None, reason="the native decoder is not built")

BLOCK = 32
CONFIGS = {
    "plain": tiny_config(num_heads=4, num_kv_heads=2, head_size=32, max_positions=256),
    "windows": tiny_config(num_heads=2, num_kv_heads=2, head_size=64, max_positions=256, sliding_window=20, window_layers=(1,)),
    "capped": tiny_config(num_heads=2, num_kv_heads=1, head_size=32, max_positions=256, logit_softcap=3.0, logit_scale=0.7),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def runners(config) -> list[ModelRunner]:
    """The one call, and its parts."""
    net = NativeDecoder(copy.deepcopy(tiny_decoder(config)).bfloat16())
    backend = NativeBackend(config.attention_variants)
    caches = [KVCache.allocate(config, 40, BLOCK, torch.bfloat16, "cpu") for _ in range(2)]
    given = {"draw": draw_tokens, "logprobs": logprobs}
    return [kind(net, backend, cache, "cpu", **given) for kind, cache in zip((NativeRunner, ModelRunner), caches, strict=True)]


def plan_of(dice: random.Random, seed: int) -> SamplingPlan:
    limits = dice.choice([{}, {"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.5}])
    return SamplingPlan(SamplingParams(temperature=dice.choice([0.0, 0.7]), **limits), seed, logprobs=dice.choice([None, 2]))


def steps(num_groups: int, dice: random.Random) -> list[StepInput]:
    """Prompts of several lengths in chunks, then some tokens of each; drafts, prompt scores and sums of hidden states too."""
    lengths = [5, 33, 64, 1, 40]
    order = list(range(1, 41))
    dice.shuffle(order)
    tables = [
        [array("q", order[4 * row + 20 * (group % 2) : 4 * row + 20 * (group % 2) + 4]) for row in range(5)]
        for group in range(num_groups)
    ]
    plans = [plan_of(dice, row) for row in range(5)]
    done, found = [0] * 5, []
    for _ in range(8):
        counts = [
            min(20, length - at) if at < length else dice.choice([1, 1, 3]) for at, length in zip(done, lengths, strict=True)
        ]
        rows = sorted(range(5), key=lambda row: counts[row] != 1)
        step = StepInput(tables=[[of_group[row] for row in rows] for of_group in tables])
        for row in rows:
            first, name = len(step.tokens), f"r{row}"
            step.request_ids.append(name)
            step.versions.append(0)
            step.starts.append(done[row])
            step.counts.append(counts[row])
            step.tokens.extend(dice.choices(range(VOCAB), k=counts[row]))
            if done[row] < lengths[row] and row == 2:
                step.prompt_scores.append(PromptScores(name, first, dice.choices(range(VOCAB), k=counts[row]), 2))
            if row == 4:
                step.hidden_sums.append(HiddenSum(name, first, counts[row], array("d")))
            done[row] += counts[row]
            drafted = counts[row] if done[row] > lengths[row] else 1
            if drafted > 1:
                step.drafts[name] = step.tokens[-drafted + 1 :]
            for place in range(drafted) if done[row] >= lengths[row] else ():
                step.draws.append(Draw(plans[row], done[row] - drafted + 1 + place))
                step.draw_rows.append(first + counts[row] - drafted + place)
                step.draw_ids.append(name)
        found.append(step)
    return found


@each_config
def test_a_step_in_one_call_is_its_parts_one_after_the_other(config):
    one, parts = runners(config)
    for seed in range(3):
        for step in steps(len(config.memory_groups), random.Random(seed)):
            found, wanted = one.submit(step), parts.submit(step)
            assert found.tokens() == wanted.tokens()
            if step.draws:
                assert torch.equal(found.logits_RV, wanted.logits_RV)
            assert found.result() == wanted.result()


def test_torch_has_no_share_in_a_step_but_to_show_a_part_of_the_scores():
    one, _ = runners(CONFIGS["plain"])
    for step in steps(1, random.Random(1)):
        step.prompt_scores, step.hidden_sums = [], []
        one.submit(step)
        with Calls() as calls:
            one.submit(step)
        assert set(calls.names) <= {"aten.slice.Tensor"}


def test_a_table_that_ends_before_its_tokens_is_refused_before_it_is_read():
    one, _ = runners(CONFIGS["plain"])
    step = steps(1, random.Random(1))[0]
    step.tables = [[table[:0] for table in step.tables[0]]]
    with pytest.raises(AssertionError, match="too short"):
        one.submit(step)
