"""Schemas of lists of objects inside each other: sixteen are carried out, and no depth that a body may have costs much."""

import asyncio
import json
import random
import time

import pytest

from attend.model.errors import InvalidRequest
from attend.service.chat.forms import CALLS, AnswerFormat
from attend.service.chat.grammars import answer_grammar
from attend.service.chat.messages import INVALID_JSON, MAX_DEPTH, arguments_of, json_object
from attend.service.chat.parser import AnswerParser
from attend.service.chat.parts import CallArguments, join_deltas
from attend.service.http_api.body import parse_json
from tests.model.text.test_grammar import compact, compiled, tokens_of
from tests.service.bad_calls import CHAT, COMPLETIONS, CPU_SECONDS, LONGEST_MESSAGE, asgi, whole_server
from tests.service.contract.asked import calling_of

LISTS = 16
SAID = [{"role": "user", "content": "a"}]


def lists(levels: int, *, nullable: bool = False) -> dict:
    """The schema of an object that has a list of objects that have ..."""
    inner: dict = {"type": "string", "enum": ["x"]}
    for _ in range(levels):
        array = {"type": "array", "items": {"type": "object", "properties": {"a": inner}, "required": ["a"]}, "minItems": 1}
        inner = {"anyOf": [array, {"type": "null"}]} if nullable else array
    return {"type": "object", "properties": {"a": inner}, "required": ["a"], "additionalProperties": False}


def value(levels: int):
    """What obeys it."""
    return {"a": [value(levels - 1)] if levels else "x"}


def body(**fields) -> bytes:
    return json.dumps({"messages": SAID} | fields).encode()


def tool(schema) -> dict:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def written(name: str, document) -> str:
    """A call in a form, by hand."""
    form = CALLS[name]
    layout, own, lead = form.layout, compact(document), "" if form.bare or not form.begins else form.begins[0]
    if layout.argument:
        own = layout.argument.replace("%k", "a").replace("%v", compact(document["a"]))
    call = layout.call.replace("%n", "f").replace("%a", own)
    begin = lead + layout.opening.removeprefix(lead) if layout.opening else ""
    return f"{begin or lead}{call.removeprefix(begin or lead)}{layout.closing}"


@pytest.mark.parametrize("name", sorted(name for name, form in CALLS.items() if form.syntax != "braced"))
@pytest.mark.parametrize("nullable", [False, True])
def test_a_call_with_sixteen_lists_of_objects_is_taken_enforced_and_read(name, nullable):
    form, read = AnswerFormat(CALLS[name]), parse_json(body(tools=[tool(lists(LISTS, nullable=nullable))]))
    calling = calling_of(read["tools"], "required", None, form)
    spec = answer_grammar(form, calling, None, {}, reasoning_open=False)
    assert spec is not None
    grammar, text = compiled(spec.kind, spec.text).start(), written(name, value(LISTS))
    for token in tokens_of(text):
        assert grammar.mask()[token], text
        grammar.advance(token)
    for formed in (False, True):
        parser = AnswerParser(form, calling.tools, calls_formed=formed)
        arguments = [part.text for part in join_deltas(parser.feed(text) + parser.finish()) if isinstance(part, CallArguments)]
        assert [json.loads(each) for each in arguments] == [value(LISTS)]


@pytest.mark.parametrize("nullable", [False, True])
def test_an_answer_with_sixteen_lists_of_objects_is_enforced(nullable):
    schema = parse_json(
        body(response_format={"type": "json_schema", "json_schema": {"schema": lists(LISTS, nullable=nullable)}})
    )
    text = json.dumps(schema["response_format"]["json_schema"]["schema"])
    grammar = compiled("json_schema", text).start()
    for token in tokens_of(compact(value(LISTS))):
        grammar.advance(token)
    assert grammar.mask()[0]


def test_past_calls_and_schemas_over_grpc_have_the_depth_of_a_body():
    deep = lambda levels: '{"a":' * levels + "1" + "}" * levels  # noqa: E731 - once
    assert arguments_of(deep(MAX_DEPTH)) == json_object(deep(MAX_DEPTH), "here") == json.loads(deep(MAX_DEPTH))
    for levels in (MAX_DEPTH + 1, 900, 100_000):
        assert arguments_of(deep(levels)) == {INVALID_JSON: deep(levels)}
        with pytest.raises(InvalidRequest, match=r"^here m"):
            json_object(deep(levels), "here")


WRAPS = {
    "items": lambda inner: {"items": inner},
    "list": lambda inner: {"items": [inner]},
    "properties": lambda inner: {"type": "object", "properties": {"n" * 60: inner}},
    "anyOf": lambda inner: {"anyOf": [inner, {"type": "null"}]},
    "oneOf": lambda inner: {"oneOf": [{"type": "null"}, inner]},
    "allOf": lambda inner: {"allOf": [inner, inner]} if len(json.dumps(inner)) < 5000 else {"allOf": [inner]},
    "not": lambda inner: {"not": inner},
    "if": lambda inner: {"if": inner},
    "const": lambda inner: {"const": inner},
    "default": lambda inner: {"default": inner},
    "strange": lambda inner: {"type": inner},
}
LEAVES = [{"type": "string"}, {"type": "string", "pattern": "(?!x)"}, {"type": "nul"}]
PLACES = {
    "a tool that is shown": lambda schema: (CHAT, {"tools": [tool(schema)]}),
    "a tool that is enforced": lambda schema: (CHAT, {"tools": [tool(schema)], "tool_choice": "required"}),
    "a tool beside an object": lambda schema: (CHAT, {"tools": [tool(schema)], "response_format": {"type": "json_object"}}),
    "an answer": lambda schema: (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}),
    "a completion": lambda schema: (COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": schema}}),
    "the template's arguments": lambda schema: (CHAT, {"chat_template_kwargs": {"x": [schema]}}),
    "a message": lambda schema: (CHAT, {"messages": [{"role": "assistant", "content": "a", "parsed": schema}]}),
    "no field": lambda schema: (COMPLETIONS, {"prompt": "a", "x": schema}),
}


def depth(document) -> int:
    inner = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    return isinstance(document, dict | list) + max(map(depth, inner), default=0)


def deepest(place: str, wrap: str, leaf: dict) -> tuple[str, dict]:
    """The deepest body of its kind that may be sent."""
    made, schema = PLACES[place](leaf), leaf
    while True:
        schema = WRAPS[wrap](schema)
        path, fields = PLACES[place](
            schema if wrap in ("properties", "strange") else {"type": "object", "properties": {"a": schema}}
        )
        document = ({} if path == COMPLETIONS else {"messages": SAID}) | fields | {"max_tokens": 1}
        if depth(document) > MAX_DEPTH:
            return made
        made = path, document


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_body_as_deep_as_may_be_is_answered_soon_and_one_deeper_is_refused(place, wrap):
    draw = random.Random(f"{place} {wrap}")
    path, document = deepest(place, wrap, draw.choice(LEAVES))
    server = whole_server(template="{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ x | tojson }}" + "{{ messages }}")
    began = time.thread_time()
    answer = asyncio.run(asgi(server, path, json.dumps(document).encode()))
    assert answer.status in (200, 400), answer.body[:500]
    assert time.thread_time() - began < CPU_SECONDS
    assert answer.status == 200 or len(answer.error["message"]) <= LONGEST_MESSAGE
    deeper = asyncio.run(asgi(server, path, json.dumps({"x" * 9: [document]}).encode()))
    assert deeper.status == 400 and f"deeper than {MAX_DEPTH} levels" in deeper.error["message"]
