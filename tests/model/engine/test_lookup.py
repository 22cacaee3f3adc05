"""A draft is what followed when the last tokens last occurred, and a request whose guesses are wrong is asked for fewer."""

import random

import pytest

from attend.model.engine.config import LONGEST_DRAFT
from attend.model.engine.lookup import FIRST, LONGEST_PAUSE, MATCH, WINDOW, Lookup, num_right
from attend.model.params import DecodingParams
from tests.model.engine.machines import ask

LOOKALIKES = [0, 1, 256, 65536, 16777216, 0x01010101]
"""Their bytes look like each other's, shifted."""


def followed(tokens: list[int], most: int) -> list[int]:
    """The definition, searched from the end."""
    for at in range(len(tokens) - MATCH - 1, -1, -1):
        if tokens[at : at + MATCH] == tokens[-MATCH:]:
            known = list(tokens)
            while len(known) < len(tokens) + most:
                known.append(known[at + MATCH + len(known) - len(tokens)])
            return known[len(tokens) :]
    return []


@pytest.mark.parametrize("seed", range(40))
def test_a_draft_is_what_followed_the_last_tokens_when_they_last_occurred(seed):
    dice = random.Random(seed)
    tokens = dice.choices(dice.choice([[7, 8], LOOKALIKES, range(30)]), k=dice.randint(1, 60))
    request, lookup = ask("a", tokens, 100), Lookup()
    for _ in range(40):
        most = dice.randint(1, FIRST)
        assert followed([*request.prompt, *request.output], most) == lookup.draft(request, most)
        request.output += dice.choices(tokens, k=dice.randint(1, 3))


def test_what_repeats_itself_goes_on_repeating_itself():
    assert [2, 3, 1, 2] == Lookup().draft(ask("a", [1, 2, 3, 1, 2, 3, 1]), 9)


def test_what_lies_too_far_back_is_not_searched():
    stem, rest = [1, 2, 3, 4, 5], list(range(10, 10 + WINDOW))
    assert [4, 5, 10, 11] == Lookup().draft(ask("a", [*stem, *rest[: WINDOW - 8], 1, 2, 3]), 4)
    assert [] == Lookup().draft(ask("a", [*stem, *rest, 1, 2, 3]), 4)


def test_right_guesses_become_longer_and_a_wrong_one_begins_anew():
    request, lookup = ask("a", [1, 2] * 20), Lookup()
    lengths = []
    for right in (4, 8, 15, 3, 4, 0):
        lengths.append(len(lookup.draft(request, 100)))
        lookup.learn(lengths[-1], min(right, lengths[-1]))
    assert [FIRST, 8, LONGEST_DRAFT, LONGEST_DRAFT, 4, 8] == lengths
    assert FIRST == len(lookup.draft(request, 100))


def test_wrong_guesses_become_rare_and_a_right_one_ends_that():
    request, lookup = ask("a", [1, 2] * 20), Lookup()
    pauses = []
    for _ in range(9):
        pause = 0
        while not (draft := lookup.draft(request, 4)):
            pause += 1
        pauses.append(pause)
        lookup.learn(len(draft), 0)
    assert [0, 0, 1, 3, 7, 15, 31, LONGEST_PAUSE - 1, LONGEST_PAUSE - 1] == pauses
    while not lookup.draft(request, 4):
        pass
    lookup.learn(4, 1)
    assert lookup.draft(request, 4)


@pytest.mark.parametrize(
    "fields",
    [
        {"decoding": DecodingParams(frequency_penalty=0.5)},
        {"bad_words": [[4, 5]]},
        {"logprobs": 0},
        {"min_tokens": 2},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_token_that_depends_on_those_before_it_is_known_to_do_so(fields):
    """It can be neither guessed nor drawn before they are known."""
    assert ask("a").draws_from_scores
    request = ask("a", **fields)
    assert not request.draws_from_scores
    request.output += [8, 9]
    assert request.draws_from_scores == ("min_tokens" in fields)


@pytest.mark.parametrize(
    ("draft", "drawn", "right"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 3, 3], 1), ([1], [2, 1], 0)]
)
def test_guesses_count_up_to_the_first_wrong_one(draft, drawn, right):
    assert right == num_right(draft, drawn)
