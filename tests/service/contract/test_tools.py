"""The tools of a call, and what is said of wrong ones."""

import json
import socket

import pytest

from attend.model.errors import InvalidRequest, NotSupported
from attend.model.text.grammar import GrammarSpec
from attend.service.chat.arguments import ArgumentTypes, tagged_value
from attend.service.chat.forms import CALLS, TEXT_ALONE, AnswerFormat
from attend.service.chat.grammars import answer_grammar
from attend.service.chat.tools import MAX_SCHEMA_BYTES, NO_CALLS, check_schema
from attend.service.contract.conversation import is_callable
from attend.service.remarks import Remarks
from tests.service.contract.asked import calling_of

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
    assert [each["function"]["name"] for each in read.template_tools] == ["f", "g"]


def test_a_template_gets_a_tool_as_its_caller_wrote_it_without_what_is_not_known():
    schema = {"required": ["z"], "properties": {"z": {"type": "string"}, "a": {}}, "type": "object"}
    function = {"parameters": schema, "strict": False, "description": None, "name": "f"}
    given = [{"function": function | {"x": 1, "y": None}, "z": 2, "type": "function"}]
    (shown,) = calling_of(given, None, None, FORM, Remarks()).template_tools
    assert json.dumps(shown) == json.dumps({"function": function, "type": "function"})


@pytest.mark.parametrize("name", ["return", "response"])
def test_a_schema_of_what_a_tool_gives_back_is_shown_to_the_template(name):
    given = [tool(**{name: {"type": "object"}})]
    assert calling(given).template_tools == tuple(given)
    with pytest.raises(InvalidRequest, match="bytes in all"):
        calling([tool(**{name: {"title": "x" * MAX_SCHEMA_BYTES}})])


def test_a_model_whose_calls_nobody_knows_gets_no_tools():
    with pytest.raises(NotSupported, match=r"^tools: the chat template of this model shows no form of calls"):
        calling_of([tool()], None, None, TEXT_ALONE)
    assert calling_of([tool()], "none", None, TEXT_ALONE) == NO_CALLS


ZOD = {"type": "string", "format": "email", "pattern": r"^(?!\.)(?!.*\.\.)[a-z.]+@[a-z]+\.[a-z]+$"}
LIST = {"type": "array", "items": [{"type": "integer"}, {"type": "null"}], "additionalItems": False}
OLD = {
    "look-around": {"type": "object", "properties": {"email": ZOD}},
    "draft 7": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {"x": LIST}},
    "draft 7 unnamed": {"properties": {"x": LIST}, "definitions": {"a": {"$id": "#a"}}, "dependencies": {"x": ["y"]}},
    "draft 4": {"id": "http://x/y#", "type": "object", "properties": {"x": {"minimum": 1, "exclusiveMinimum": True}}},
    "format": {"type": "object", "properties": {"x": {"type": "string", "format": "date-span"}}},
}
NONE = {
    "type": {"properties": {"a": {"type": "text"}}},
    "list as type": {"properties": {"a": {"type": [["string"]]}}},
    "object as type": {"properties": {"a": {"type": {}}}},
    "python": {"properties": {"a": {"type": "dict"}, "b": {"type": "float"}}},
    "required": {"required": "a"},
    "draft 3": {"properties": {"a": {"type": "string", "required": True}}},
    "properties": {"properties": 3},
    "other words": {"properties": {"a": {"allOf": 1, "anyOf": {}, "enum": "x", "$ref": [], "additionalProperties": "x"}}},
    "elsewhere": {"$schema": "http://127.0.0.1:1/x", "$ref": "http://127.0.0.1:1/y"},
}


@pytest.mark.parametrize("schema", [*OLD.values(), *NONE.values()], ids=[*OLD, *NONE])
def test_a_schema_that_nothing_enforces_is_shown_as_it_came(schema):
    """It types tagged arguments, as far as it says of what type they are."""
    given = [tool(parameters=schema)]
    read = calling(given)
    assert read.template_tools == tuple(given) and not read.is_enforced and read.tools[0].parameters == schema
    assert answer_grammar(FORM, read, None, {}, reasoning_open=False) is None
    for key in ("a", "x", "email"):
        for text in ("1", "y", '{"z": [1]}'):
            tagged_value(ArgumentTypes(schema).argument(key), text)


@pytest.mark.parametrize("schema", [each for name, each in OLD.items() if name.startswith("draft")])
def test_a_schema_of_an_older_draft_is_taken_where_it_is_enforced(schema):
    spec = answer_grammar(FORM, calling([tool(parameters=schema)], "required"), None, {}, reasoning_open=False)
    assert '"exclusiveMinimum": true' in spec.text or '"additionalItems": false' in spec.text


ENFORCING = [
    ({"choice": "required"}, None),
    ({"choice": {"type": "function", "function": {"name": "f"}}}, None),
    ({"strict": True}, None),
    ({}, GrammarSpec("json_object", "")),
]


@pytest.mark.parametrize(("how", "content"), ENFORCING, ids=["required", "named", "strict", "beside a schema"])
def test_what_is_no_schema_is_refused_where_it_is_enforced_with_place_and_action(how, content):
    for schema, place, words in [
        (NONE["type"], ".properties.a.type", '"text" is not valid'),
        (NONE["required"], ".required", "array"),
        (NONE["draft 3"], ".properties.a.required", "array"),
    ]:
        tools = [tool("g"), tool(parameters=schema, strict=how.get("strict", False))]
        with pytest.raises(InvalidRequest) as caught:
            answer_grammar(FORM, calling(tools, how.get("choice")), content, {}, reasoning_open=False)
        said = str(caught.value)
        assert said.startswith(f"tools[1].function.parameters{place} is no JSON schema: ") and words in said
        assert said.endswith("; or enforce no calls: tool_choice auto, no strict tool, no structured output")
        assert caught.value.field == "tools[1].function.parameters"


def test_a_schema_names_no_place_that_is_asked():
    """A schema that is fetched would let a caller reach what only the server can."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/x"
        check_schema({"$schema": url, "$ref": url, "properties": {"a": {"$ref": f"{url}#/a"}}}, "here")
        with pytest.raises(BlockingIOError):
            server.accept()


def test_deep_schemas_are_refused_and_end():
    deep = {"type": "object"}
    for _ in range(5000):
        deep = {"type": "object", "properties": {"a": deep}}
    with pytest.raises(InvalidRequest, match=r"^tools: a schema is nested too deeply"):
        calling([tool(parameters=deep)])


@pytest.mark.parametrize("own", ["function", "custom"])
@pytest.mark.parametrize(("kind", "is_own"), [(None, True), ("own", True), ("", False), ("web_search", False)])
def test_a_tool_is_callable_without_a_type_or_by_its_own_and_not_by_another_even_an_empty_one(own, kind, is_own):
    """Anthropic's tools of another type need no name."""
    tools = [{"type": own if kind == "own" else kind}] + [{}] * is_own
    assert {is_callable(tool, 0, Remarks(), own) for tool in tools} == {is_own}
