"""Changes of the scores as rows: each does its sum and no more, in one order, and only to the row that asked for it."""

import math

import pytest
import torch

from attend.model.params import DecodingParams, SamplingParams
from attend.model.sampling import change_scores, row_logprobs
from attend.model.sampling_plan import Draw, History, SamplingPlan, completing

GREEDY = SamplingParams(temperature=0)
SCORES = [2.0, -1.0, 0.5, 0.0, -4.0, 3.0]
NEVER = -math.inf
EXPONENTS = (1.5, 0.5)


def draw(*, prompt=(), output=(), banned=(), sampling=GREEDY, position=0, **decoding) -> Draw:
    plan = SamplingPlan(sampling, 0, decoding=DecodingParams(**decoding))
    return Draw(plan, position, banned, History().follow(prompt, output))


def changed(scores=SCORES, **fields) -> list[float]:
    row = torch.tensor(scores)
    change_scores(row, draw(**fields))
    return row.tolist()


def but(**changes: float) -> list[float]:
    """`SCORES` with other values at `_0`, `_1` and so on."""
    return [changes.get(f"_{at}", score) for at, score in enumerate(SCORES)]


# Each change by itself


def test_without_parameters_nothing_changes():
    assert SCORES == changed(prompt=[0, 1, 2], output=[3, 4, 5, 5])


def test_a_bias_is_added_to_its_tokens_alone():
    assert but(_0=-98.0, _2=1.75, _5=103.0) == changed(logit_bias={2: 1.25, 5: 100, 0: -100})


@pytest.mark.parametrize("allowed", [(3,), (0, 5), (5, 0), (2, 2, 4), tuple(range(6))])
def test_only_allowed_tokens_keep_their_scores(allowed):
    assert [score if at in allowed else NEVER for at, score in enumerate(SCORES)] == changed(allowed_token_ids=allowed)


@pytest.mark.parametrize("penalty", EXPONENTS)
def test_repetition_divides_positive_and_multiplies_negative_scores_of_prompt_and_output(penalty):
    expected = but(_0=2.0 / penalty, _1=-1.0 * penalty, _3=0.0, _4=-4.0 * penalty)
    assert pytest.approx(expected) == changed(prompt=[0, 1, 3], output=[4], repetition_penalty=penalty)


def test_repetition_counts_a_token_once_however_often_and_wherever_it_stands():
    assert but(_0=1.0, _1=-2.0) == changed(prompt=[0, 0, 1], output=[0, 1, 1], repetition_penalty=2)


def test_frequency_is_taken_once_for_each_time_in_the_output():
    assert but(_0=0.5, _4=-4.5) == changed(prompt=[5, 5, 1], output=[0, 4, 0, 0], frequency_penalty=0.5)


def test_presence_is_taken_once_however_often_in_the_output():
    assert but(_0=1.5, _4=-4.5) == changed(prompt=[5, 5, 1], output=[0, 4, 0, 0], presence_penalty=0.5)


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
def test_frequency_and_presence_do_not_look_at_the_prompt(name):
    assert SCORES == changed(prompt=[0, 1, 2, 3, 4, 5], output=[], **{name: 2})


def test_banned_tokens_cannot_be_drawn():
    assert but(_5=NEVER, _1=NEVER) == changed(banned=(5, 1, 5))


def test_a_banned_token_that_the_model_does_not_have_bans_nothing():
    """A tokenizer may know more tokens than the model, and spell a bad word with them."""
    assert SCORES == changed(banned=(6, 500))
    assert but(_5=NEVER) == changed(banned=(6, 5))


# One order


def test_the_bias_comes_before_repetition():
    """So its sign decides between division and multiplication: (-1 + 3) / 2, and (2 - 3) * 2."""
    assert but(_0=-2.0, _1=1.0) == changed(prompt=[0, 1], logit_bias={0: -3, 1: 3}, repetition_penalty=2)


def test_no_penalty_makes_a_score_infinite():
    found = changed(prompt=list(range(6)), repetition_penalty=1e-39)
    assert all(math.isfinite(score) for score in found)


def test_repetition_comes_before_frequency_and_presence():
    found = changed(output=[0, 0, 1], repetition_penalty=2, frequency_penalty=0.5, presence_penalty=0.25)
    assert but(_0=2 / 2 - 0.5 * 2 - 0.25, _1=-1 * 2 - 0.5 - 0.25) == found


def test_the_bans_come_last():
    found = changed(banned=(5,), output=[5], logit_bias={5: 100}, allowed_token_ids=(5, 0), presence_penalty=-2)
    assert [2.0, *[NEVER] * 5] == found


def test_all_together_as_computed_by_hand():
    found = changed(
        prompt=[1, 2],
        output=[0, 0, 5],
        banned=(3,),
        allowed_token_ids=(0, 1, 3, 5),
        logit_bias={0: 1, 1: -1},
        repetition_penalty=2,
        frequency_penalty=0.25,
        presence_penalty=1,
    )
    assert [3 / 2 - 0.5 - 1, -2 * 2, NEVER, NEVER, NEVER, 3 / 2 - 0.25 - 1] == found


# Bad words


@pytest.mark.parametrize(
    ("output", "banned"),
    [
        ([], ()),
        ([1], ()),
        ([2], ()),
        ([1, 2], (3,)),
        ([9, 1, 2], (3,)),
        ([1, 2, 9], ()),
        ([2, 1], ()),
        ([1, 2, 3], ()),
        ([1, 1, 2], (3,)),
        ([1, 2, 1, 2], (3,)),
    ],
)
def test_the_last_token_of_a_word_is_banned_after_all_the_others(output, banned):
    assert banned == completing([[1, 2, 3]], output)


# Log probabilities


def noise(rows=5, size=8, dtype=torch.float32):
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(1)).mul(4).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_the_log_softmax_in_float32(dtype):
    logits, tokens = noise(dtype=dtype), [0, 7, 3, 3, 1]
    expected = torch.log_softmax(logits.float(), dim=-1)[torch.arange(5), tokens].tolist()
    assert pytest.approx(expected) == [chosen for chosen, _ in row_logprobs(logits, tokens, [0, 1, 2, 0, 8])]


@pytest.mark.parametrize("top", [[0] * 5, [8] * 5, [0, 1, 2, 5, 8], [1] * 5, [20, 3, 0, 9, 8]])
def test_each_row_gets_its_own_number_of_the_likeliest_sorted(top):
    """As many as there are, where the vocabulary holds fewer."""
    logits = noise()
    scores = torch.log_softmax(logits, dim=-1).tolist()
    for row, (_, best) in enumerate(row_logprobs(logits, [0] * 5, top)):
        expected = sorted(enumerate(scores[row]), key=lambda pair: -pair[1])[: top[row]]
        assert [token for token, _ in expected] == [token for token, _ in best]
        assert pytest.approx([value for _, value in expected]) == [value for _, value in best]


def test_tokens_that_are_asked_for_by_their_ids_come_after_the_likeliest():
    logits = noise(rows=2)
    scores = torch.log_softmax(logits, dim=-1).tolist()
    first, second = row_logprobs(logits, [0, 1], [1, 0], [(), (6, 2, 6)])
    assert len(first[1]) == 1
    assert [token for token, _ in second[1]] == [6, 2, 6]
    assert pytest.approx([scores[1][6], scores[1][2], scores[1][6]]) == [value for _, value in second[1]]
