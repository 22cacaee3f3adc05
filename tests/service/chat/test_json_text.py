"""Where a JSON value ends, and from which character on a text can no longer be one."""

import json

import pytest

from attend.service.chat.json_text import MAX_ATOM, JsonText

VALUE = {"a": [1, -2.5, 1e30, True, False, None, {}, []], "b c": 'x"\\\n\té😀'}


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("tru3", 3),
        ("nul,", 3),
        ("[truth]", 4),
        ("01", 1),
        ("-x", 1),
        ("1.e5", 2),
        ("1e+-", 3),
        ("[1 2]", 3),
        ('{"a" 1}', 5),
        ("{1: 2}", 1),
        ("[1}", 2),
        ('"\\x"', 2),
        ('"\\u12g4"', 5),
        ("1" * (MAX_ATOM + 1), MAX_ATOM),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_text_is_broken_at_the_first_character_that_cannot_stand_there(text, at, size):
    value, taken = JsonText(), 0
    for begin in range(0, len(text), size):
        if not value.broken:
            taken += value.take(text[begin : begin + size])[1]
    assert (value.broken, taken) == (True, at)


@pytest.mark.parametrize("text", [json.dumps(VALUE), json.dumps(VALUE, indent=2, ensure_ascii=False), "[]", '"a"', "{} "])
def test_a_value_has_ended_with_its_last_character_and_not_before(text):
    value, whole = JsonText(), text.rstrip()
    written = ""
    for place, character in enumerate(whole):
        assert not value.complete, place
        written += value.take(character)[0]
    assert value.complete and not value.broken
    assert json.loads(written) == json.loads(text)
    assert value.take(" x") == ("", 0)


@pytest.mark.parametrize("text", ["1" * MAX_ATOM, "-0.5E+3", "true", "null"])
def test_a_number_or_a_word_ends_where_no_more_comes(text):
    value = JsonText()
    assert value.take(text) == (text, len(text))
    assert not value.complete
    value.end()
    assert value.complete
