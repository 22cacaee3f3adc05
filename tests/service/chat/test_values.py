"""Arguments that are not written as JSON become JSON that says the same."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attend.service.chat.arguments import ANY, MAX_LITERAL, as_json, braced_arguments, python_value, tagged_value
from attend.service.chat.parts import CallArguments, CallStart, Content, Tool
from tests.service.chat.examples import form
from tests.service.chat.test_parser import parts_of

TEXTS = st.text(st.characters(codec="utf-8") | st.sampled_from("\"'\\\n\x01<>{}[],:"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_a_python_literal_is_its_value(value):
    assert json.loads(python_value(f" {value!r} ")) == value
    assert json.loads(python_value(json.dumps(value))) == value


@pytest.mark.parametrize(
    ("text", "made"),
    [
        (r'"a\/b"', r'"a\/b"'),
        (r'"\ud83d\ude00"', r'"\ud83d\ude00"'),
        (r"'\ud83d\ude00'", r'"\ud83d\ude00"'),
        (r"'\ud800'", r'"\ud800"'),
        ('["a\nb"]', r'["a\u000ab"]'),
        ("{'a': null, 'b': True}", '{"a": null, "b": true}'),
        ("1e999", "1e999"),
        ("-1_000", "-1000"),
        ("[None]", "[null]"),
        ("(1, 2)", "[1, 2]"),
        *((text, None) for text in ("", "1 + 1", "f()", "b'a'", "{1}", "NaN", "nan", "x", "2j", "{(1,): 3}", "1; 2", "1e")),
    ],
)  # fmt: skip
def test_a_literal_that_has_a_value_in_json_is_that(text, made):
    assert python_value(text) == made
    if made is not None:
        json.loads(made).__repr__().encode()
        made.encode()


def test_long_literals_are_read_where_that_is_quick():
    numbers = ",".join("1" * MAX_LITERAL)
    assert python_value(f"[{numbers}]") == f"[{numbers}]"
    assert python_value(f"({numbers})") is None
    for quote in "'\"":
        assert python_value(f"({quote}{'x' * 100_000}{quote},)") == '["' + "x" * 100_000 + '"]'


@given(VALUES)
def test_a_tagged_value_that_is_no_string_is_its_json(value):
    assert json.loads(tagged_value(ANY, json.dumps(value, ensure_ascii=False))) == value


def test_line_ends_in_tagged_strings_are_escaped_and_words_of_python_are_values():
    assert json.loads(tagged_value(ANY, '["a\n\tb"]')) == ["a\n\tb"]
    assert [tagged_value(ANY, word) for word in ("True", "False", "None")] == ["true", "false", "null"]
    assert as_json('"\x01"') == '"\\u0001"'


@given(TEXTS.filter(lambda text: "<q>" not in text), st.integers(), st.booleans())
def test_braced_strings_are_as_they_are_written(text, number, word):
    made = braced_arguments(f"{{a:<q>{text}<q>, b : {number},c:[{json.dumps(word)},x y]}}".replace("x y", "x"), "<q>")
    assert json.loads(made) == {"a": text, "b": number, "c": [word, "x"]}


def test_a_long_braced_list_takes_no_time():
    """Ten thousand words took a second once, and a hundred thousand two minutes."""
    made = braced_arguments("{a:[" + "1," * 100_000 + "x]}", "<q>")
    assert len(json.loads(made)["a"]) == 100_001


NAMES = (Tool("get-weather.now", {"properties": {"from": {}, "max-age": {}, "class": {}}}), Tool("is", {}), Tool("1st", {}))


def test_names_of_tools_and_arguments_need_not_be_those_of_python():
    text = "[get-weather.now(from='a', max-age = 3 , class=None,), is(), 1st(\u00e9=1)]"
    parts = parts_of(form("pythonic"), text, NAMES)
    assert parts == parts_of(form("pythonic"), [text], NAMES)
    assert [part.name for part in parts if isinstance(part, CallStart)] == ["get-weather.now", "is", "1st"]
    said = [json.loads(part.text) for part in parts if isinstance(part, CallArguments)]
    assert said == [{"from": "a", "max-age": 3, "class": None}, {}, {"\u00e9": 1}]


@pytest.mark.parametrize(
    "text", ["[is(a=1, a=2)]", "[is(=1)]", "[is(a)]", "[is(a=1 b=2)]", "[is(a=])]", "[is(a=1]", "[is(,)]", "[is(**{})]"]
)
def test_what_is_no_python_call_is_content(text):
    assert parts_of(form("pythonic"), text, NAMES) == parts_of(form("pythonic"), [text], NAMES) == [Content(text)]


def test_arguments_in_a_string_can_be_sent():
    text = '<tool_call>{"name": "is", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'
    parts = parts_of(form("hermes"), text, NAMES)
    assert parts == [CallStart(0, "is"), CallArguments(0, '{"a": "\\ud800"}')]
