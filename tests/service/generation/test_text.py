"""An answer's text: the pieces are the decoded tokens, cut at the first stop string, and no piece says too much."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attend.model.params import StopRules
from attend.service.generation.text import TextStream
from tests.conftest import examples
from tests.fakes import END, byte_tokenizer

law = settings(max_examples=examples(200), derandomize=True, deadline=None)
stop_strings = st.lists(st.text("ab!é", min_size=1, max_size=4), max_size=4).map(tuple)
answers = st.lists(st.sampled_from([*b"aaabbb!", *"é".encode(), 0xF0, END]), max_size=24)


def run(tokens: list[int], rules: StopRules, *, skip: bool = True) -> tuple[list[str], str | None, int]:
    """The pieces, the stop string, and the number of tokens taken."""
    stream = TextStream(byte_tokenizer(), rules, skip_special_tokens=skip)
    pieces = []
    for count, token in enumerate(tokens, start=1):
        piece, hit = stream.show(stream.decode(token))
        pieces.append(piece)
        if hit is not None:
            return pieces, hit, count
    piece, hit = stream.show(stream.decode(None), last=True)
    return [*pieces, piece], hit, len(tokens)


def settled(tokens: list[int]) -> str:
    """What the tokens say so far, without what may still become a character."""
    return byte_tokenizer().decode(tokens).rstrip("\ufffd")


def expected(tokens: list[int], rules: StopRules) -> tuple[str, str | None]:
    """The law, worked out on whole texts: for each token, the stop strings that this token completes."""
    seen = ""
    for count in range(1, len(tokens) + 2):
        last = count > len(tokens)
        text = byte_tokenizer().decode(tokens) if last else settled(tokens[:count])
        if len(text) < len(seen):
            continue  # a damaged character is still open again
        ends = [
            (at, stop)
            for stop in rules.stop
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) > len(seen)
        ]
        if ends and min(count, len(tokens)) > rules.min_tokens:
            at, stop = min(ends)
            return text[: at + len(stop) * rules.include_stop_str_in_output], stop
        seen = text
    return seen, None


@law
@given(answers, stop_strings, st.booleans(), st.integers(0, 6))
@example([*b"ax"], ("a", "ab"), False, 1)
def test_the_pieces_are_the_decoded_tokens_cut_at_the_first_stop_string(tokens, stop, include, min_tokens):
    rules = StopRules(stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens)
    pieces, hit, _ = run(tokens, rules)
    assert ("".join(pieces), hit) == expected(tokens, rules)


@law
@given(answers)
def test_without_stop_strings_the_pieces_are_the_text(tokens):
    for skip in (True, False):
        pieces, hit, count = run(tokens, StopRules(), skip=skip)
        assert "".join(pieces) == byte_tokenizer().decode(tokens, skip_special_tokens=skip)
        assert (hit, count) == (None, len(tokens))


@law
@given(st.text("ab!", max_size=20), stop_strings)
def test_what_was_shown_never_holds_the_beginning_of_a_stop_string_that_comes_true(text, stop):
    """At each moment, the text so far is a beginning of the final text: nothing has to be taken back."""
    tokens = list(text.encode())
    pieces, hit, count = run(tokens, StopRules(stop=stop))
    shown = "".join(pieces)
    if hit is not None:
        assert text[:count] == shown + hit + text[len(shown) + len(hit) : count]
        assert not any(other in shown for other in stop)


@law
@given(st.text("ab!", max_size=20), stop_strings)
def test_only_what_may_become_a_stop_string_is_held_back(text, stop):
    stream = TextStream(byte_tokenizer(), StopRules(stop=stop), skip_special_tokens=True)
    shown = ""
    for count, token in enumerate(text.encode(), start=1):
        piece, hit = stream.show(stream.decode(token))
        if hit is not None:
            return
        shown += piece
        held = text[len(shown) : count]
        assert held == "" or any(one.startswith(held) and one != held for one in stop)


@pytest.mark.parametrize(
    ("text", "stop", "shown", "found"),
    [
        ("one STOP two", ("STOP",), "one ", "STOP"),
        ("STSTOP", ("STOP",), "ST", "STOP"),
        ("aab", ("aab", "ab"), "", "aab"),
        ("xaab", ("ab",), "xa", "ab"),
        ("abc", ("abcd",), "abc", None),
        ("naïve café", ("é",), "naïve caf", "é"),
        ("go 😀 on", ("😀",), "go ", "😀"),
        ("\n\nend", ("\n\n",), "", "\n\n"),
    ],
)
def test_a_stop_string_is_found_though_it_is_split_over_tokens(text, stop, shown, found):
    pieces, hit, _ = run(list(text.encode()), StopRules(stop=stop))
    assert ("".join(pieces), hit) == (shown, found)
    pieces, hit, _ = run(list(text.encode()), StopRules(stop=stop, include_stop_str_in_output=True))
    assert ("".join(pieces), hit) == (shown + (found or ""), found)


def test_the_first_tokens_up_to_min_tokens_cannot_stop():
    pieces, hit, count = run(list(b"a!b!c!"), StopRules(stop=("!",), min_tokens=2))
    assert ("".join(pieces), hit, count) == ("a!b", "!", 4)


def test_a_stop_string_may_begin_before_min_tokens_and_end_after():
    pieces, hit, count = run(list(b"xSTOPy"), StopRules(stop=("STOP",), min_tokens=4))
    assert ("".join(pieces), hit, count) == ("x", "STOP", 5)


def test_an_unfinished_character_is_shown_at_the_end_as_a_replacement():
    pieces, hit, _ = run([*b"ok", 0xF0, 0x9F], StopRules(stop=("!",)))
    assert pieces[:4] == ["o", "k", "", ""]
    assert ("".join(pieces), hit) == ("ok\ufffd", None)


class Counted(str):
    """A stop string that counts how many of its beginnings are looked for."""

    looks = 0

    def __getitem__(self, at):
        Counted.looks += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("stop", ["a" * 255 + "b", "ab" * 127 + "aa", "x" * 256])
def test_a_character_costs_few_looks_at_a_stop_string_however_long_it_is(stop):
    stream = TextStream(byte_tokenizer(), StopRules(stop=("a" * 256, Counted(stop))), skip_special_tokens=True)
    text, Counted.looks = (stop[:-1] + "c") * 3 + "".join(stop[:end] + "c" for end in range(255)), 0
    for character in text:
        stream.show(character)
    assert Counted.looks <= 2 * len(text)
