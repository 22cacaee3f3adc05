"""The tools of a call, and what is said of wrong ones."""

import json

import pytest

from attend.model.errors import InvalidRequest, NotSupported
from attend.service.chat.forms import CALLS, TEXT_ALONE, AnswerFormat
from attend.service.chat.tools import MAX_SCHEMA_BYTES, NO_CALLS
from attend.service.contract.conversation import calling_of

FORM = AnswerFormat(CALLS["hermes"])


def tool(name="f", **function):
    return {"type": "function", "function": {"name": name, **function}}


def calling(tools, choice=None, parallel=None):
    return calling_of(tools, choice, parallel, FORM)


def test_tools_may_be_called_unless_none_is_chosen():
    assert calling(None) == calling([]) == calling([tool()], "none") == NO_CALLS
    read = calling([tool("f"), tool("g", strict=True)])
    assert [each.name for each in read.tools] == ["f", "g"]
    assert (read.choice, read.parallel, read.is_enforced) == ("auto", True, True)
    assert not calling([tool()]).is_enforced
    assert calling([tool()], "required", False).is_enforced
    assert not calling([tool()], parallel=False).parallel


def test_a_function_by_its_name_is_the_only_one_and_required():
    read = calling([tool("f"), tool("g")], {"type": "function", "function": {"name": "g"}})
    assert [each.name for each in read.tools] == ["g"] and read.choice == "required"
    assert [each["function"]["name"] for each in read.shown] == ["f", "g"]


@pytest.mark.parametrize("name", ["return", "response"])
def test_a_schema_of_what_a_tool_gives_back_is_shown_to_the_template(name):
    given = [tool(**{name: {"type": "object"}})]
    assert calling(given).shown == tuple(given)
    with pytest.raises(InvalidRequest, match="bytes in all"):
        calling([tool(**{name: {"title": "x" * MAX_SCHEMA_BYTES}})])


def test_a_model_whose_calls_nobody_knows_gets_no_tools():
    with pytest.raises(NotSupported, match=r"^tools: the chat template of this model shows no form of calls"):
        calling_of([tool()], None, None, TEXT_ALONE)
    assert calling_of([tool()], "none", None, TEXT_ALONE) == NO_CALLS


P = "tools[0].function.parameters"
WRONG = [
    ({}, None, "tools", "must be a list; got {} (object)"),
    ([1], None, "tools[0]", "must be an object; got 1 (integer)"),
    ([{"type": "function"}], None, "tools[0].function", "is required"),
    ([{"type": "web_search", "function": {}}], None, "tools[0].type", "must be 'function'; got 'web_search'"),
    ([{"type": "function", "function": {}}], None, "tools[0].function.name", "is required"),
    ([tool("a b")], None, "tools[0].function.name", "must be 1 to 64 letters"),
    ([tool("x" * 65)], None, "tools[0].function.name", "must be 1 to 64 letters"),
    ([tool("f"), tool("f")], None, "tools[1].function.name", "must be that of no other tool; got 'f'"),
    ([tool(description=1)], None, "tools[0].function.description", "must be a string"),
    ([tool(strict=1)], None, "tools[0].function.strict", "must be a boolean"),
    ([tool(response="x")], None, "tools[0].function.response", "must be a JSON schema of what the function gives back"),
    ([tool(extra=1)], None, "tools[0].function.extra", "is not a field of this request"),
    ([tool() | {"x": 1}], None, "tools[0].x", "is not a field of this request"),
    ([tool(parameters="x")], None, P, "must be a JSON schema of an object"),
    ([tool(parameters={"type": "string"})], None, P, "must be a JSON schema of an object"),
    ([tool(parameters={"properties": {"a": {"type": "text"}}})], None, P, ".properties.a.type is no JSON schema: "),
    ([tool(parameters={"required": "a"})], None, P, ".required is no JSON schema: "),
    ([tool(str(number)) for number in range(500)], None, "tools", "may hold at most 128 tools; got 500"),
    ([tool(parameters={"title": "x" * (1 << 20)})], None, "tools", f"may have schemas of at most {MAX_SCHEMA_BYTES} bytes"),
    ([tool()], {"NamedTool": 1}, "tool_choice.type", "is required"),
    ([tool()], "any", "tool_choice", "must be 'auto', 'none' or 'required'; or an object"),
    ([tool()], 1, "tool_choice", "must be 'auto', 'none' or 'required'; or an object"),
    ([tool()], {"type": "function", "function": {"name": "g"}}, "tool_choice.function.name", "one of the tools; got 'g'"),
    ([tool()], {"type": "function", "function": {"name": "f", "x": 1}}, "tool_choice.function.x", "is not a field"),
    ([], "required", "tool_choice", "needs tools"),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "choice", "place", "words"), WRONG)
def test_a_mistake_is_named_with_its_place(tools, choice, place, words):
    with pytest.raises(InvalidRequest) as caught:
        calling(tools, choice)
    assert str(caught.value).startswith(place) and words in str(caught.value), caught.value
    assert caught.value.field == place


def test_a_schema_names_no_place_that_is_asked(monkeypatch):
    """A schema that is fetched would let a caller reach what only the server can."""
    read = calling([tool(parameters={"$schema": "http://127.0.0.1:1/x", "type": "object", "$ref": "http://127.0.0.1:1/y"})])
    assert read.tools[0].parameters["$ref"]


def test_deep_schemas_are_refused_and_end():
    deep = {"type": "object"}
    for _ in range(5000):
        deep = {"type": "object", "properties": {"a": deep}}
    with pytest.raises(InvalidRequest, match=r"^tools: a schema is nested too deeply"):
        calling([tool(parameters=deep)])


def test_every_name_of_a_form_is_one_that_the_settings_take():
    from typing import get_args

    from attend.service.chat.forms import REASONING, ReasoningParser, ToolParser

    assert {*get_args(ToolParser)} == {"auto", "none", *CALLS}
    assert {*get_args(ReasoningParser)} == {"auto", "none", *REASONING}
    assert json.dumps(sorted(CALLS))
