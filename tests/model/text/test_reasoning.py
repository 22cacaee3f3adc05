"""A limit on reasoning: its end comes after so many tokens, whatever the model writes, and nothing else is touched."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attend.model.text.reasoning import ReasoningBudget, ReasoningLimit
from tests.conftest import examples
from tests.fakes import byte_tokenizer

TOKENIZER = byte_tokenizer()
SIZE = 300
BEGIN, END = "<think>", "</think>"


def limit(budget: int, *, anywhere: bool = False) -> ReasoningLimit:
    return ReasoningLimit(TOKENIZER, SIZE, BEGIN, END, anywhere, budget)


def written(wanted: str, budget: int, *, is_open: bool = False, anywhere: bool = False) -> str:
    """What comes of a model that wants to write a text, and goes on with it after a forced marker."""
    grammar, made, wanted_ids = ReasoningBudget(limit(budget, anywhere=anywhere), is_open=is_open), [], [*wanted.encode()]
    while wanted_ids:
        token = wanted_ids[0]
        allowed = grammar.mask()
        assert bool(allowed[token]) is grammar.allows(token)
        if allowed[token]:
            del wanted_ids[0]
        else:
            (token,) = np.flatnonzero(allowed)
        grammar.advance(int(token))
        made.append(int(token))
    assert not grammar.is_finished
    return bytes(made).decode(errors="replace")


@pytest.mark.parametrize("budget", [0, 1, 3, 100])
def test_reasoning_ends_at_the_budget_and_the_answer_follows(budget):
    told = written("abcdefg", budget, is_open=True)
    assert told == ("abcdefg" if budget >= 7 + 1 else "abcdefg"[:budget] + END + "abcdefg"[budget:])


def test_reasoning_that_ends_in_time_is_left_alone_and_content_is_free():
    text = f"ab{END}and then a long answer"
    assert written(text, 20, is_open=True) == text
    text = f"{BEGIN}ab{END}and then {BEGIN} a long answer, and on and on"
    assert written(text, 30) == text
    assert written("no reasoning at all, and no end of it", 3) == "no reasoning at all, and no end of it"


def test_a_character_is_whole_before_the_end_is_forced():
    told = written("aéééééé", 2, is_open=True)
    assert "\ufffd" not in told
    assert told.startswith(f"aé{END}")


def test_reasoning_may_come_again_where_an_answer_is_a_row_of_messages():
    text = f"x{BEGIN}ab{END}y{BEGIN}cdefghij"
    assert written(text, 3, anywhere=True).count(END) == 2
    assert written(text, 3).count(END) == 1


@settings(max_examples=examples(200), derandomize=True, deadline=None)
@given(
    st.lists(st.sampled_from(["a", " ", "é", BEGIN, END, "<", "</", "think>", "\n"]), max_size=30),
    st.integers(0, 9),
    st.booleans(),
)
def test_reasoning_is_never_longer_than_its_budget_and_one_character(pieces, budget, is_open):
    text = "".join(pieces)
    told = written(text, budget, is_open=is_open)
    rest = told if is_open else told.lstrip().removeprefix(BEGIN) if told.lstrip().startswith(BEGIN) else END
    assert len(rest.partition(END)[0].encode()) <= budget + 3 + len(END)


class Inner:
    """A grammar that allows one letter."""

    is_finished = True

    def __init__(self):
        self.taken = []

    def mask(self):
        return np.arange(SIZE) == 97

    def allows(self, token_id):
        return token_id == 97

    def advance(self, token_id):
        self.taken.append(token_id)

    def copy(self):
        return self


def test_another_grammar_holds_beside_it():
    inner = Inner()
    grammar = ReasoningBudget(limit(1), inner, is_open=True)
    assert grammar.is_finished
    assert not grammar.allows(98)
    grammar.advance(97)
    assert not grammar.is_finished
    for byte in END.encode():
        assert np.flatnonzero(grammar.mask()).tolist() == [byte]
        grammar.advance(byte)
    assert inner.taken == [97, *END.encode()]
    assert grammar.is_finished
