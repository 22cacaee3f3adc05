"""The bodies' schemas in /openapi.json and the checks of the service agree, on both sides of every limit."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from attend.model.params import MAX_INT32
from attend.service.http_api.openapi import schemas
from attend.service.http_api.operations import OPERATIONS
from tests.fakes import FakeEngine, info
from tests.service.contract import test_chat, test_requests
from tests.service.http_api.described import LEAST, ask, chatting_server, faults, operation


def body_schema(path: str) -> dict[str, Any]:
    """The schema of a route's body."""
    return operation(path)["requestBody"]["content"]["application/json"]["schema"]


def shapes(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The alternatives of a field's schema."""
    for shape in schema.get("anyOf", [schema]):
        kinds = shape.get("type")
        yield shape | {"type": kinds[0]} if isinstance(kinds, list) else shape


def least(shape: dict[str, Any], number: int = 0) -> Any:
    """A value that an item's schema allows. Where items need names, each number has its own."""
    if {"anyOf", "oneOf"} & shape.keys():
        function = {"type": "function", "function": {"name": f"f{number}"}}
        written = json.dumps(shape)
        made = {
            "FunctionTool": function,
            "ResponseTool": {"type": "function", "name": f"f{number}"},
            "ToolParam": {"name": f"f{number}", "input_schema": {}},
        }
        if '"text"' in written or "/Document" in written:
            return "a"
        return next((tool for name, tool in made.items() if name in written), {"role": "user", "content": "a"})
    if "$ref" in shape:
        return {"role": "user", "content": "a"}
    if shape["type"] == "array":
        return [least(shape["items"])]
    return {"string": "a", "integer": 0}[shape["type"]]


def sized(shape: dict[str, Any], size: int) -> Any:
    """A value of so many parts."""
    if shape["type"] == "string":
        return "a" * size
    if shape["type"] == "array":
        return [least(shape["items"], number) for number in range(size)]
    return {str(key): 0 for key in range(size)}


def edges(schema: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Values on both sides of each limit of a field, and whether they are within."""
    for shape in shapes(schema):
        for word, step in (("minimum", -1), ("maximum", 1)):
            if word in shape:
                yield from ((shape[word], True), (shape[word] + step, False))
        if "exclusiveMinimum" in shape:
            yield from ((shape["exclusiveMinimum"], False), (shape["exclusiveMinimum"] + 1e-6, True))
        for word, step in (("minLength", -1), ("minItems", -1), ("maxLength", 1), ("maxItems", 1), ("maxProperties", 1)):
            if word in shape:
                yield from ((sized(shape, shape[word]), True), (sized(shape, shape[word] + step), False))
        if isinstance(shape.get("additionalProperties"), dict):
            yield from (({"97": value}, fits) for value, fits in edges(shape["additionalProperties"]))


WITH = {
    "max_tokens": lambda value: {"echo": True},
    "min_tokens": lambda value: {"max_tokens": min(max(value, 1), MAX_INT32)},
    "best_of": lambda value: {"n": min(max(value, 1), 8)},
    "top_logprobs": lambda value: {"logprobs": True},
}
"""What else a body needs for a value of a field to count."""
RELATED = {"/v1/score": ("queries", "documents", "text_1", "text_2")}
"""Fields whose sizes go together: tests/service/generation/test_score.py."""
LIMITED = [
    pytest.param(path, name, value, fits, id=f"{path}-{name}-{str(value)[:24]}-{fits}")
    for path in LEAST
    for name, schema in schemas()[OPERATIONS["post", path].body.__name__]["properties"].items()
    for value, fits in edges(schema)
    if path not in RELATED or name not in RELATED[path]
]


@pytest.mark.parametrize(("path", "name", "value", "fits"), LIMITED)
def test_a_limit_of_the_document_is_the_one_that_holds(path, name, value, fits):
    alone = (path, name) in (("/v1/chat/completions", "max_tokens"), ("/v1/attention", "top_logprobs"))
    extra = {} if alone else WITH.get(name, lambda value: {})(value)
    if path == "/v1/responses":
        extra = {f"max_output_{key[4:]}": each for key, each in extra.items() if key == "max_tokens"}
    body = LEAST[path] | extra | {name: value}
    if path == "/tokenize" and name in ("messages", "tools"):
        body = {"messages": [{"role": "user", "content": "a"}], name: value}
    if "max_tokens" in body:
        body.pop("max_completion_tokens", None)
    assert bool(faults(body_schema(path), body)) is not fits
    response = ask(chatting_server(FakeEngine(info=info(vocab_size=1000))), "POST", path, json=body)
    error = response.json().get("error", {})
    refused = response.status_code == 400 and error["code"] == "invalid_value"
    assert refused is not fits, error
    assert not refused or error["param"].partition("[")[0] in (name, "n")


def test_limits_are_tried_for_every_number():
    bodies = [schemas()[OPERATIONS["post", path].body.__name__]["properties"] for path in LEAST]
    numbers = {name for fields in bodies for name, field in fields.items() if {"minimum", "exclusiveMinimum"} & field.keys()}
    tried = {param.values[1] for param in LIMITED}
    assert {"temperature", "top_p", "max_tokens", "seed", "n", "priority", "deadline_ms", "dimensions"} <= numbers <= tried
    assert len(tried) >= 25


@pytest.mark.parametrize("given", ["", "a b", "a" * 129, "ü", "a\n", "x" * 128, "A-z_0.9:/+=@"])
def test_the_pattern_of_a_request_id_is_the_one_that_holds(given):
    body = {"prompt": "a", "request_id": given}
    fits = not faults(body_schema("/v1/completions"), body)
    if given != "a\n":  # Python's $ stands before a last line end; that of JSON Schema does not
        assert (ask(chatting_server(), "POST", "/v1/completions", json=body).status_code == 200) is fits


TABLES = {"/v1/completions": test_requests.WRONG, "/v1/chat/completions": test_chat.WRONG}


@pytest.mark.parametrize("path", TABLES)
def test_a_type_that_is_refused_is_none_that_the_document_allows(path):
    schema = body_schema(path)
    same = [(name, value) for name, value in TABLES[path] if not faults(schema, LEAST[path] | {name: value})]
    assert all(".0" in json.dumps(value) for _, value in same), same  # 3.0 is an integer to JSON Schema


@pytest.mark.parametrize("path", LEAST)
def test_null_is_allowed_wherever_a_field_may_be_absent(path):
    schema = body_schema(path)
    body = schemas()[schema["$ref"].rpartition("/")[2]]
    allowed = {name for name in body["properties"] if not faults(schema, LEAST[path] | {name: None})}
    assert allowed == set(body["properties"]) - set(body.get("required", ()))
    for name in body["properties"]:
        if path == "/v1/score" or (path == "/tokenize" and name == "prompt"):  # one of two is needed
            continue
        response = ask(chatting_server(), "POST", path, json=LEAST[path] | {name: None})
        assert (response.status_code == 200) is (name in allowed or name == "max_completion_tokens"), response.text


@pytest.mark.parametrize("path", LEAST)
def test_an_unknown_field_is_allowed_by_both(path):
    body = LEAST[path] | {"unknown": 1}
    assert not faults(body_schema(path), body)
    response = ask(chatting_server(), "POST", path, json=body)
    assert (response.status_code, response.headers["x-attend-ignored"]) == (200, "unknown")
