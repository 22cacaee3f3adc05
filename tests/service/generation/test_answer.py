"""What the engine's outputs mean for an answer: its text, its count, its end."""

import pytest

from attend.model.engine.request import FinishReason, Output, Request, Times, TokenLogprob
from attend.model.params import SamplingParams, StopRules
from attend.service.generation.answer import Answer
from attend.service.generation.text import TextStream
from attend.service.records import PromptPart
from tests.fakes import END, byte_tokenizer


def answer(*, index: int = 0, skip: bool = True, **rules) -> Answer:
    stops = StopRules(max_tokens=100, **rules)
    ends = frozenset((*stops.stop_token_ids, END))
    request = Request("r", [1, 2, 3], 100, SamplingParams(), seed=7, stop_token_ids=ends)
    return Answer(index, request, stops, TextStream(byte_tokenizer(), stops, skip_special_tokens=skip), (END,))


@pytest.mark.parametrize("again", [(), (7,)])
def test_the_first_chunk_alone_tells_of_the_prompt(again):
    one = answer()
    one.echo = "pqr"
    scores = (TokenLogprob(2, -1.0), TokenLogprob(3, -2.0))
    first = one.take(Output("r", again, prompt_logprobs=scores))
    assert first.prompt == PromptPart((1, 2, 3), scores, "pqr")
    assert one.take(output("b")).prompt is None


def test_a_stop_string_drops_the_log_probabilities_of_the_tokens_after_it():
    scores = tuple(TokenLogprob(token, -1.0) for token in b"abcdef")
    chunk = answer(stop=("cd",)).take(Output("r", tuple(b"abcdef"), logprobs=scores))
    assert chunk.logprobs == scores[:4]


def output(text: str | list[int], reason: FinishReason | None = None) -> Output:
    return Output("r", tuple(text.encode() if isinstance(text, str) else text), reason)


def test_a_chunk_carries_the_delta_and_the_totals():
    one = answer(index=3)
    one.take(output("ab"))
    chunk = one.take(output("cde"))
    assert (chunk.index, chunk.text, chunk.token_ids) == (3, "cde", tuple(b"cde"))
    assert (chunk.num_tokens, chunk.num_prompt_tokens, chunk.seed) == (5, 3, 7)
    assert (chunk.finish_reason, chunk.stop) == (None, None)


def test_the_end_of_text_token_counts_but_says_nothing_and_is_no_stop():
    chunk = answer(skip=False).take(output([*b"ab", END], FinishReason.STOP))
    assert (chunk.text, chunk.num_tokens, chunk.finish_reason, chunk.stop) == ("ab", 3, FinishReason.STOP, None)


def test_a_stop_token_is_named_counted_and_hidden():
    chunk = answer(stop_token_ids=(ord("c"),)).take(output("abc", FinishReason.STOP))
    assert (chunk.text, chunk.token_ids, chunk.stop) == ("ab", tuple(b"abc"), ord("c"))


def test_include_stop_shows_the_stop_token():
    chunk = answer(stop_token_ids=(ord("c"),), include_stop_str_in_output=True).take(output("abc", FinishReason.STOP))
    assert (chunk.text, chunk.stop) == ("abc", ord("c"))


def test_a_stop_string_ends_the_answer_and_drops_the_tokens_after_it():
    """Also where the engine says that it went on, or that it ended for another reason."""
    for reason in (None, FinishReason.LENGTH, FinishReason.DEADLINE):
        one = answer(stop=("cd",))
        chunk = one.take(output("abcdef", reason))
        assert (chunk.text, chunk.token_ids, chunk.num_tokens) == ("ab", tuple(b"abcd"), 4)
        assert (chunk.finish_reason, chunk.stop) == (FinishReason.STOP, "cd")
        assert (one.num_tokens, one.finish_reason) == (4, FinishReason.STOP)


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.DEADLINE, FinishReason.ABORT])
def test_what_was_held_back_is_shown_at_the_end(reason):
    one = answer(stop=("STOP",))
    assert one.take(output("xSTO")).text == "x"
    chunk = one.take(output("", reason))
    assert (chunk.text, chunk.num_tokens, chunk.finish_reason, chunk.stop) == ("STO", 4, reason, None)


def test_what_was_held_back_is_shown_before_the_end_of_text():
    one = answer(stop=("STOP",))
    one.take(output("xST"))
    assert one.take(output([END], FinishReason.STOP)).text == "ST"


def test_an_output_without_tokens_is_an_empty_chunk():
    one = answer()
    one.take(output("a"))
    chunk = one.take(output("", FinishReason.ABORT))
    assert (chunk.text, chunk.token_ids, chunk.num_tokens, chunk.finish_reason) == ("", (), 1, FinishReason.ABORT)


WHERE = {"token_ids": "token_ids", "finish_reason": "finish_reason", "times": "times", "logprobs": "logprobs"}
"""The field of a chunk that carries each field of an engine's output as it is."""
NOT_SHOWN = {"request_id", "error"}
"""The service finds the answer by the one, and logs the other."""


def test_all_that_the_engine_says_is_in_the_chunk():
    """A new field of Output fails here until it is said where it goes."""
    assert {*Output._fields} == WHERE.keys() | NOT_SHOWN | {"prompt_logprobs", "hidden"}
    scores = tuple(TokenLogprob(token, -1.0) for token in b"ab")
    last = Output("r", tuple(b"ab"), FinishReason.LENGTH, Times(1.0, 2.0, 3.0, 1), None, scores, scores[:1])
    one = answer()
    chunk = one.take(last)
    assert {name: getattr(chunk, WHERE[name]) for name in WHERE} == {name: getattr(last, name) for name in WHERE}
    assert chunk.prompt.logprobs == last.prompt_logprobs
    assert (chunk.prompt.token_ids, chunk.prompt.num_cached) == ((1, 2, 3), one.request.num_cached)


def test_the_first_chunk_tells_how_much_of_the_prompt_was_known():
    one = answer()
    one.request.num_cached = 2
    assert one.take(output("a")).prompt.num_cached == 2


def test_no_more_of_a_prompt_is_known_than_it_has_tokens():
    """Of a resumed answer the cache may know tokens too."""
    one = answer()
    one.request.num_cached = 5
    assert one.take(output("a")).prompt.num_cached == 3
