"""The names of the forms in which models write calls and reasoning."""

from typing import get_args

from attend.service.chat.forms import _SIGNS, CALLS, REASONING, ReasoningParser, ToolParser


def test_every_name_that_a_setting_takes_is_a_form_and_every_form_has_a_name():
    assert {*get_args(ToolParser)} == {"auto", "none", *CALLS}
    assert {*get_args(ReasoningParser)} == {"auto", "none", *REASONING}


def test_what_a_template_shows_is_a_form():
    assert {name for name, _ in _SIGNS} <= CALLS.keys()
