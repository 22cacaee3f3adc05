"""An answer's parts: the same however its text is cut."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attend.service.chat.forms import CALLS, AnswerFormat
from attend.service.chat.json_text import MAX_DEPTH
from attend.service.chat.parser import MAX_HEADER, AnswerParser
from attend.service.chat.parts import CallArguments, CallStart, Content, Part, Reasoning, join_deltas
from tests.conftest import examples
from tests.service.chat.examples import TOOLS, form, rows

ROWS = rows()


def parts_of(shape: AnswerFormat, pieces, tools=TOOLS, *, reasoning_open=False, calls_formed=False, **end) -> list[Part]:
    parser = AnswerParser(shape, tools, reasoning_open=reasoning_open, calls_formed=calls_formed)
    return join_deltas([part for piece in pieces for part in parser.feed(piece)] + parser.finish(**end))


def form_named(name: str) -> AnswerFormat:
    return form(name, {"harmony": "harmony", "gemma4": "gemma4"}.get(name, "think"))


@pytest.mark.parametrize(("name", "text", "parts"), ROWS)
def test_an_answer_is_these_parts(name, text, parts):
    assert parts_of(form_named(name), [text]) == parts


@pytest.mark.parametrize(("name", "text", "parts"), ROWS)
def test_cuts_change_nothing(name, text, parts):
    shape = form_named(name)
    assert parts_of(shape, text) == parts  # a character at a time
    for at in range(len(text)):
        assert parts_of(shape, (text[:at], text[at:])) == parts, at
    for one, two in combinations(range(0, len(text), 3), 2):
        assert parts_of(shape, (text[:one], text[one:two], text[two:])) == parts, (one, two)


FRAGMENTS = st.sampled_from(
    [
        *sorted({marker for calls in CALLS.values() for marker in calls.markers}),
        *("<think>", "</think>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "final", "analysis", "to=functions.now"),
        *('{"name": "now"', ', "arguments": {', '"city": "x"', "}", "]", "[", "weather", "now(", "city='a'", ")", ", ", ";"),
        *(" ", "\n", "<", "a", '"', "\\", "[1, 2]", "-0.", "é", "{"),
    ]
)


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(sorted(CALLS)), st.lists(FRAGMENTS, max_size=14), st.data())
def test_cuts_change_nothing_in_any_text(name, fragments, data):
    text, shape = "".join(fragments), form_named(name)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    ends = [*cuts, len(text)]
    pieces = [text[start:end] for start, end in zip([0, *cuts], ends, strict=True)]
    reasoning_open, end = data.draw(st.booleans()), {"complete": data.draw(st.booleans())}
    whole = parts_of(shape, [text], reasoning_open=reasoning_open, **end)
    assert parts_of(shape, pieces, reasoning_open=reasoning_open, **end) == whole
    assert parts_of(shape, text, reasoning_open=reasoning_open, **end) == whole


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(sorted(set(CALLS) - {"harmony"})), st.lists(FRAGMENTS, max_size=14))
def test_without_tools_and_reasoning_nothing_is_changed(name, fragments):
    text = "".join(fragments)
    assert parts_of(AnswerFormat(CALLS[name]), [text], ()) == ([Content(text)] if text else [])


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(FRAGMENTS.filter(lambda text: "tool_call" not in text and "think" not in text), max_size=14))
def test_text_without_markers_is_content_to_the_last_character(fragments):
    text = "".join(fragments)
    assert parts_of(form("hermes"), text) == ([Content(text)] if text else [])


def test_text_is_shown_at_once_unless_a_marker_may_follow():
    parser = AnswerParser(form("hermes"), TOOLS)
    assert parser.feed("Hello, ") == [Content("Hello,")]
    assert parser.feed("wor") == [Content(" wor")]
    assert parser.feed("ld <tool") == [Content("ld")]
    assert parser.feed("s>") == [Content(" <tools>")]


def test_arguments_are_handed_on_as_they_are_written():
    parser = AnswerParser(form("hermes"), TOOLS)
    assert parser.feed('<tool_call>{"name": "weather", "arguments": ') == []
    assert parser.feed('{"city') == [CallStart(0, "weather"), CallArguments(0, '{"city')]
    assert parser.feed('": "Pa') == [CallArguments(0, '": "Pa')]
    assert parser.feed('ris"}}') == [CallArguments(0, 'ris"}')]


def test_a_string_between_tags_is_handed_on_as_it_is_written():
    parser = AnswerParser(form("qwen3_coder"), TOOLS)
    parser.feed("<tool_call>\n<function=write>\n<parameter=text>\n")
    assert parser.feed("one\ntwo") == [CallArguments(0, "one\\ntwo")]
    assert parser.feed("\n</para") == []
    assert join_deltas(parser.feed("meter>\n</function>")) == [CallArguments(0, '"}')]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('<tool_call>{"x', '<tool_call>{"x'),
        ("<tool_call>[]", "<tool_call>[]"),
        ('<tool_call>{"name": 1', '<tool_call>{"name": 1'),
    ],
)
def test_what_cannot_be_a_call_is_content_from_the_first_character_that_shows_it(text, shown):
    parser = AnswerParser(form("hermes"), TOOLS)
    parts = join_deltas([part for one in text + '": 1' for part in parser.feed(one)])
    assert parts[0].text.startswith(shown)


def test_reasoning_begins_an_answer_and_stands_nowhere_else():
    assert parts_of(form("hermes"), "The tag <think> opens it.</think>") == [Content("The tag <think> opens it.</think>")]


def test_markers_in_formed_content_are_text():
    formed = '"<tool_call>{"name": "now"}</tool_call>", "<think>"'
    parser = AnswerParser(form("hermes"), TOOLS, content_formed=True)
    assert join_deltas([part for one in formed for part in parser.feed(one)]) == [Content(formed)]


def test_reasoning_that_the_prompt_opened_goes_on():
    shape = form("hermes")
    assert parts_of(shape, ["\nHm.\n</think>\n\nYes."], reasoning_open=True) == [Reasoning("Hm."), Content("Yes.")]
    assert parts_of(shape, ["Hm."], reasoning_open=True) == [Reasoning("Hm.")]


def test_a_parser_says_whether_it_stands_in_reasoning():
    parser = AnswerParser(form("hermes"), TOOLS)
    seen = [(parser.feed(piece), parser.in_reasoning)[1] for piece in (" ", "<th", "ink>", "b", "</think", ">", "c")]
    assert seen == [False, False, True, True, True, False, False]


@pytest.mark.parametrize(
    ("text", "end", "parts"),
    [
        ("Yes. </thi", {"complete": False}, [Content("Yes. </thi")]),  # nothing to end
        ("Yes. <tool_c", {"complete": False}, [Content("Yes. ")]),
        ("Yes. <tool_c", {}, [Content("Yes. <tool_c")]),
        ('<tool_call>{"name": "now"', {"complete": False}, []),
        ('<tool_call>{"name": "now"', {}, [Content('<tool_call>{"name": "now"')]),
        ('<tool_call>{"name": "now", "arguments": {"a"', {}, [CallStart(0, "now"), CallArguments(0, '{"a"')]),
        ('<tool_call>{"name": "now", "arguments": {"a"', {"complete": False}, [CallStart(0, "now"), CallArguments(0, '{"a"')]),
    ],
)
def test_an_answer_that_is_broken_off_shows_no_half_of_a_marker(text, end, parts):
    assert parts_of(form("hermes"), text, **end) == parts


CALLED = [(name, text) for name, text, parts in ROWS if any(isinstance(part, CallStart) for part in parts)]


@pytest.mark.parametrize(("name", "text"), CALLED)
def test_wherever_an_answer_is_broken_off_what_it_shows_is_the_beginning_of_what_it_would_have_shown(name, text):
    def shown(kind, parts):
        return "".join(part.text for part in parts if isinstance(part, kind)).rstrip()

    whole, bare = parts_of(form_named(name), [text]), CALLS[name].bare
    for at in range(len(text)):
        parts = parts_of(form_named(name), [text[:at]], complete=False)
        if bare and parts == [Content(text[:at])]:
            continue  # it may be JSON, or a list, as well
        assert shown(Content, whole).startswith(shown(Content, parts)), text[:at]
        assert shown(Reasoning, whole).startswith(shown(Reasoning, parts)), text[:at]


def test_a_bare_beginning_of_a_call_that_is_broken_off_is_content():
    assert parts_of(form("llama3_json"), '{"name": "Al', complete=False) == [Content('{"name": "Al')]


@pytest.mark.parametrize(
    "text", ["to=you, with love", "to=now", "<|channel|>" + "x" * 300 + "<|start|>assistant<|channel|>final<|message|>y"]
)
def test_a_header_that_is_none_is_content_however_it_is_cut(text):
    parts = parts_of(form_named("harmony"), [text])
    assert parts == parts_of(form_named("harmony"), text)
    assert parts == [Content("x" * 300 + "y" if "x" in text else text)]


def test_deep_nesting_and_long_white_space_are_text():
    deep = '{"name": "now", "arguments": {"a": ' + "[" * 1000
    assert parts_of(form("llama3_json"), deep) == [
        CallStart(0, "now"),
        CallArguments(0, '{"a": ' + "[" * (MAX_DEPTH - 1)),
        Content("[" * (1001 - MAX_DEPTH)),
    ]
    python = "[now(a=" + "[" * 1000
    assert parts_of(form("pythonic"), [python]) == [Content(python)]
    space = " " * 5000
    for text in (f"a{space}<think>", f"a{space}b"):
        parts = parts_of(form("hermes"), text)
        assert parts == parts_of(form("hermes"), [text]) and parts[0].text.startswith(f"a{space}")


ADVERSE = ["<tool_call>", "<tool_call>{", '<tool_call>{"name": "', " ", "<", "</think><think>", "[", '{"a":', '\\"', "a"]


@pytest.mark.parametrize("piece", ADVERSE)
@pytest.mark.parametrize("name", ["hermes", "llama3_json", "pythonic", "qwen3_coder", "harmony"])
def test_twice_the_text_takes_about_twice_the_steps(piece, name):
    def steps(count: int) -> int:
        parser, done = AnswerParser(form_named(name), TOOLS), 0
        for one in piece * count:
            parser.feed(one)
            done += len(parser.text)  # what is looked at again with the next character
        return done

    assert steps(400) <= 2.5 * steps(200) + 2000


@pytest.mark.parametrize("more", [0, 1])
def test_a_header_of_harmony_has_so_many_characters_at_most(more):
    """A longer one is text, without its markers."""
    header = "final".ljust(MAX_HEADER - len("<|channel|><|message|>") + more)
    parts = parts_of(form_named("harmony"), [f"<|channel|>{header}<|message|>Hi"])
    assert parts == [Content(header + "Hi" if more else "Hi")]
