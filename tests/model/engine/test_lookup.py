"""A draft is what followed when the last tokens last occurred, in texts of the same owner; wrong guesses make drafts rarer."""

import random
from types import SimpleNamespace

import pytest

from attend.model.engine.config import LONGEST_DRAFT
from attend.model.engine.lookup import (
    FIRST,
    LONGEST_PAUSE,
    MATCHES,
    MAX_OWNERS,
    MAX_TOKENS,
    PART_TOKENS,
    SUREST,
    Lookup,
    Lookups,
    Texts,
)
from attend.model.params import DecodingParams
from tests.model.engine.machines import ask

LOOKALIKES = [0, 1, 256, 65536, 16777216, 0x01010101]
"""Their bytes look like each other's, shifted."""


def alone() -> Lookup:
    """Of the only request."""
    return Lookup(Texts())


def followed(tokens: list[int], most: int) -> list[int]:
    """The definition, searched from the end: the longer match, or else the shorter one."""
    for length in MATCHES:
        for at in range(len(tokens) - length - 1, -1, -1):
            if tokens[at : at + length] == tokens[-length:]:
                known = list(tokens)
                while len(known) < len(tokens) + most:
                    known.append(known[at + length + len(known) - len(tokens)])
                return known[len(tokens) :]
    return []


def ended(lookups: Lookups, name: str, tokens: list[int], **fields) -> None:
    """A request of which drafts were made has ended with this text."""
    request = ask(name, tokens, 100, **fields)
    for _ in range(-(-len(tokens) // PART_TOKENS)):
        drafted(lookups, request, 1)
    request.lookup.end(request)


def drafted(lookups: Lookups, request, most: int, streams: int = 1) -> list[int]:
    return lookups.of(request).draft(request, most, streams)


@pytest.mark.parametrize("seed", range(40))
def test_a_draft_is_what_followed_the_last_tokens_when_they_last_occurred(seed):
    dice = random.Random(seed)
    tokens = dice.choices(dice.choice([[7, 8], LOOKALIKES, range(30)]), k=dice.randint(1, 60))
    request, lookup = ask("a", tokens, 100), alone()
    for _ in range(40):
        most = dice.randint(1, FIRST)
        assert followed([*request.prompt, *request.output], most) == lookup.draft(request, most)
        request.output += dice.choices(tokens, k=dice.randint(1, 3))


def test_what_repeats_itself_goes_on_repeating_itself():
    lookup = alone()
    lookup.learn(4, 4)
    assert [2, 3, 1, 2, 3, 1, 2, 3] == lookup.draft(ask("a", [1, 2, 3, 1, 2, 3, 1]), 9)


def test_a_long_prompt_is_indexed_in_parts():
    request, lookup = ask("a", [*range(10, 10 + 2 * PART_TOKENS), 1, 2, 3, 4, *range(10, 10 + PART_TOKENS), 1, 2, 3]), alone()
    assert [[], [], [4, 10]] == [lookup.draft(request, 2) for _ in range(3)]


@pytest.mark.parametrize("running", [False, True])
def test_a_draft_comes_from_another_request_where_the_text_itself_is_new(running):
    lookups = Lookups()
    other = ask("a", [1, 2, 3, 4, 5, 6, 7, 8], 100)
    drafted(lookups, other, 9)
    if not running:
        other.lookup.end(other)
    assert [4, 5, 6, 7] == drafted(lookups, ask("b", [9, 1, 2, 3]), 9)
    assert [8] == drafted(lookups, ask("c", [5, 6, 7]), 9), "it does not go on past its end"


def test_more_tokens_in_common_count_more_than_a_younger_text():
    lookups, stem = Lookups(), list(range(20, 20 + MATCHES[0]))
    ended(lookups, "a", [*stem, 1])
    ended(lookups, "b", [*stem[-MATCHES[1] :], 2])
    assert [1] == drafted(lookups, ask("c", stem), 1)
    assert [2] == drafted(lookups, ask("d", stem[1:]), 1)


@pytest.mark.parametrize("streams", range(1, 9))
def test_the_more_streams_the_more_tokens_must_have_occurred(streams):
    least = min(SUREST, MATCHES[1] + streams - 1)
    for known in range(1, 9):
        lookups, stem = Lookups(), list(range(20, 20 + known))
        ended(lookups, "a", [0, *stem, 7])
        assert ([7] if known >= least else []) == drafted(lookups, ask("b", [1, *stem]), 1, streams)


ADAPTER = SimpleNamespace(digest="x")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"owner": "ann"}, {"owner": "ben"}),
        ({"owner": "ann"}, {"owner": None}),
        ({"owner": None}, {"owner": "None"}),
        ({"owner": "ann", "cache_salt": "1"}, {"owner": "ann"}),
        ({"owner": "ann"}, {"owner": "ann", "adapter": ADAPTER}),
    ],
    ids=["owners", "a key and none", "a key of that name", "salts", "adapters"],
)
@pytest.mark.parametrize("running", [False, True])
def test_no_draft_comes_from_a_text_of_another_owner(one, other, running):
    """Its answer would come sooner where the other has the same text."""
    lookups, planted = Lookups(), [1, 2, 3, 4, 5, 6]
    for fields, asking in ((one, other), (other, one)):
        request = ask("a", planted, 100, **fields)
        drafted(lookups, request, 9)
        if not running:
            request.lookup.end(request)
        assert [4, 5, 6] == drafted(lookups, ask("b", planted[:3], **fields), 9)
        assert [] == drafted(lookups, ask("c", planted[1:4], **asking), 9)
        lookups = Lookups()


def test_the_oldest_text_is_dropped_and_the_last_is_kept_whatever_its_length():
    lookups = Lookups()
    ended(lookups, "a", [1, 2, 3, 4])
    ended(lookups, "b", [9] * (MAX_TOKENS - 4))
    assert [4] == drafted(lookups, ask("c", [1, 2, 3]), 1)
    ended(lookups, "d", [5, 6, 7, 8])
    assert [] == drafted(lookups, ask("e", [1, 2, 3]), 1)
    assert [8] == drafted(lookups, ask("f", [5, 6, 7]), 1)
    ended(lookups, "g", [*[9] * MAX_TOKENS, 1, 2, 3, 4])
    assert [] == drafted(lookups, ask("h", [5, 6, 7]), 1)
    assert [4] == drafted(lookups, ask("i", [1, 2, 3]), 1)


def test_the_owner_who_has_asked_least_lately_is_forgotten():
    lookups = Lookups()
    for at in range(MAX_OWNERS):
        ended(lookups, "a", [1, 2, 3, 4], owner=f"{at}")
    assert [4] == drafted(lookups, ask("b", [1, 2, 3], owner="0"), 1)
    ended(lookups, "c", [1, 2, 3, 4], owner="new")
    assert [4] == drafted(lookups, ask("d", [1, 2, 3], owner="0"), 1)
    assert [] == drafted(lookups, ask("e", [1, 2, 3], owner="1"), 1)


def test_right_guesses_become_longer_and_a_wrong_one_begins_anew():
    request, lookup = ask("a", [1, 2] * 20), alone()
    lengths = []
    for right in (4, 8, 15, 3, 4, 0):
        lengths.append(len(lookup.draft(request, 100)))
        lookup.learn(lengths[-1], min(right, lengths[-1]))
    assert [FIRST, 8, LONGEST_DRAFT, LONGEST_DRAFT, 4, 8] == lengths
    assert FIRST == len(lookup.draft(request, 100))


def test_wrong_guesses_become_rare_and_a_right_one_ends_that():
    request, lookup = ask("a", [1, 2] * 20), alone()
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
