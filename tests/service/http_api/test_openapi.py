"""/openapi.json: valid OpenAPI, complete, and true: what it shows works, and what fails, fails as it says."""

import json
import re
from typing import Any

import pytest
from fastapi.openapi.utils import get_openapi

from attend.model.engine.request import EngineStats
from attend.model.errors import Overloaded, RateLimited, Unauthenticated, Unavailable
from attend.service.contract.requests import ChatRequest, CompletionRequest, StreamOptions
from attend.service.contract.scores import RerankRequest, ScoreRequest
from attend.service.contract.texts import AttentionRequest, DetokenizeRequest, EmbeddingsRequest, TokenizeRequest
from attend.service.http_api.body import MAX_BYTES, most_bytes_of_texts
from attend.service.http_api.openapi import OPERATIONS
from tests.fakes import CONTEXT, FakeEngine
from tests.service.http_api.described import (
    LEAST,
    ask,
    assert_described,
    chatting_server,
    document,
    events,
    fastapi_of,
    faults,
    operation,
)

BODIES = [
    CompletionRequest,
    ChatRequest,
    StreamOptions,
    AttentionRequest,
    EmbeddingsRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
    DetokenizeRequest,
]

# --- the document


def test_the_document_is_valid_openapi():
    pytest.importorskip("openapi_spec_validator").validate(document())
    assert document()["openapi"] == "3.1.0"


def test_every_route_that_is_shown_is_described_and_no_other():
    app = fastapi_of(chatting_server())
    found = get_openapi(title="", version="", routes=app.routes)["paths"]
    routes = {(method, path) for path, item in found.items() for method in item}
    assert routes == set(OPERATIONS)
    assert routes == {(method, path) for path, item in document()["paths"].items() for method in item}


def test_the_served_document_is_this_one():
    assert ask(chatting_server(), "GET", "/openapi.json").json() == document()


@pytest.mark.parametrize("kind", BODIES)
def test_the_fields_of_a_body_are_those_of_its_model_and_each_has_a_description(kind):
    properties = document()["components"]["schemas"][kind.__name__]["properties"]
    assert set(properties) == set(kind.model_fields)
    assert not [name for name, schema in properties.items() if not schema["description"].strip().endswith(".")]


def test_no_schema_is_unused():
    text = json.dumps(document())
    assert not [name for name in document()["components"]["schemas"] if f'"#/components/schemas/{name}"' not in text]


def test_every_operation_has_a_tag_a_summary_a_description_and_its_own_name():
    found = [each for item in document()["paths"].values() for each in item.values()]
    assert all(each["tags"] and each["summary"] and each["description"] for each in found)
    assert len({each["operationId"] for each in found}) == len(found)
    assert {tag for each in found for tag in each["tags"]} == {tag["name"] for tag in document()["tags"]}


# --- examples

KEPT = ("/v1/files", "/v1/batches")
"""Routes that need a folder: tests/service/batch/test_described.py holds their answers against the document."""
READ = [path for method, path in OPERATIONS if method == "get" and not path.startswith(KEPT)]


@pytest.mark.parametrize("path", LEAST)
@pytest.mark.parametrize("stream", [False, True])
def test_an_example_is_accepted_and_answered_as_described(path, stream):
    body = LEAST[path] | ({"stream": True} if stream and OPERATIONS["post", path].event else {})
    assert not faults(operation(path)["requestBody"]["content"]["application/json"]["schema"], body)
    response = ask(chatting_server(), "POST", path, json=body)
    assert response.status_code == 200, response.text
    assert_described(response, operation(path))


@pytest.mark.parametrize("path", READ)
def test_a_route_without_a_body_answers_as_described(path):
    response = ask(chatting_server(), "GET", path.replace("{model_id}", "fake"))
    assert response.status_code == 200
    assert_described(response, operation(path))


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_a_replica_that_is_not_well_answers_as_described(path):
    engine = FakeEngine()
    engine.age, engine.draining = 1e6, True
    response = ask(chatting_server(engine), "GET", path)
    assert response.status_code == 503
    assert_described(response, operation(path))


RICH: dict[str, dict[str, Any]] = {
    "/v1/completions": {"n": 2, "echo": True, "logprobs": 2, "prompt_logprobs": 2, "seed": 1, "stop": ["d"]},
    "/v1/chat/completions": {"n": 2, "logprobs": True, "top_logprobs": 2, "seed": 1, "stop": ["d"]},
}
STREAMS = [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}]


@pytest.mark.parametrize("path", RICH)
@pytest.mark.parametrize("stream", STREAMS)
def test_an_answer_with_all_that_can_be_asked_for_is_as_described(path, stream):
    body = LEAST[path] | RICH[path] | stream | {"timing": True, "return_token_ids": True}
    response = ask(chatting_server(), "POST", path, json=body)
    assert response.status_code == 200
    assert_described(response, operation(path))
    known = operation(path)["responses"]["200"]["content"]
    seen = events(response) if stream else [response.json()]
    name = OPERATIONS["post", path].event.__name__ if stream else known["application/json"]["schema"]["$ref"]
    shape = document()["components"]["schemas"][name.rpartition("/")[2]]
    without = set() if len(stream) != 1 else {"usage"}
    found = {key for event in seen for key in event}
    assert found == set(shape["properties"]) - without, "RICH asks for each field of the answer; the contract describes each"


# --- failures


class Nobody:
    """A key ring that knows no key."""

    def among(self, *_: object) -> None:
        raise Unauthenticated("this server needs an API key")


def broken(**state: Any) -> FakeEngine:
    engine = FakeEngine(held="held" in state)
    for name, value in state.items():
        setattr(engine, name, value)
    return engine


MANY_TEXTS = ["/v1/embeddings", "/v1/rerank", "/v1/score"]


def most_of(path: str) -> int:
    """Bytes of a body."""
    return most_bytes_of_texts(CONTEXT) if path in MANY_TEXTS else MAX_BYTES


BOTH = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]
ENGINE = [*BOTH, *MANY_TEXTS]
JSON = {"content-type": "application/json"}
FAILURES = [
    *[(path, 400, {"json": {"model": 3}}, {}) for path in LEAST],
    *[(path, 404, {"json": LEAST[path] | {"model": "other"}}, {}) for path in LEAST],
    *[(path, 413, {"content": b" " * (most_of(path) + 1), "headers": JSON}, {}) for path in LEAST],
    *[(path, 415, {"content": b"{}"}, {}) for path in LEAST],
    *[(path, 429, {}, {"refusal": Overloaded("the queue is full", 3)}) for path in ENGINE],
    *[(path, 429, {}, {"refusal": RateLimited("too many", 70, "key_requests")}) for path in ENGINE],
    *[(path, 500, {}, {"refusal": RuntimeError("secret")}) for path in ENGINE],
    *[(path, 503, {}, {"refusal": Unavailable("draining")}) for path in ENGINE],
    *[(path, 504, {"json": LEAST[path] | {"deadline_ms": 1}}, {"held": True}) for path in ENGINE],
    ("/v1/attention", 429, {}, {"stats": lambda: EngineStats(1, 1, 1, 0)}),
    ("/v1/attention", 503, {}, {"draining": True}),
    ("/v1/models/{model_id}", 404, {}, {}),
]


@pytest.mark.parametrize(("path", "status", "sent", "state"), FAILURES)
def test_a_failure_is_as_described(path, status, sent, state):
    method = "POST" if path in LEAST else "GET"
    sent = sent or ({"json": LEAST[path]} if path in LEAST else {})
    response = ask(chatting_server(broken(**state)), method, path.replace("{model_id}", "other"), **sent)
    assert response.status_code == status
    assert_described(response, operation(path))


def test_an_explanation_that_takes_too_long_fails_as_described():
    server = chatting_server()

    def endless(between) -> None:
        while True:
            between()

    server.explaining.explainer.during = endless
    response = ask(server, "POST", "/v1/attention", json=LEAST["/v1/attention"] | {"deadline_ms": 20})
    assert response.status_code == 504
    assert_described(response, operation("/v1/attention"))


def test_every_failure_that_is_described_is_provoked_here_or_is_a_bug_or_a_key():
    described = {
        (path, int(status))
        for path, item in document()["paths"].items()
        for each in item.values()
        for status in each["responses"]
    }
    provoked = {(path, status) for path, status, *_ in FAILURES} | {(path, 503) for path in ("/healthz", "/readyz")}
    provoked |= {("/v1/attention", 504)}
    provoked |= {(path, status) for path, status in described if path.startswith(KEPT)}  # see there
    assert {(path, status) for path, status in described - provoked if status not in (200, 401, 429, 500)} == set()


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_a_call_without_a_key_is_refused_where_the_document_says_so(method, path):
    described = document()["paths"][path][method]
    body = {"json": LEAST[path]} if path in LEAST else {}
    keyed = chatting_server(keys=Nobody())
    response = ask(keyed, method, path.replace("{model_id}", "fake"), **body)
    assert response.status_code == (401 if "401" in described["responses"] else 200)
    if path in BOTH:
        assert keyed.value("attend_requests_total", transport="http", route=path, outcome="invalid") == 1
    wanted = [{"ApiKey": []}] if response.status_code == 401 else []
    assert (described["security"], fastapi_of(keyed).openapi()["paths"][path][method]["security"]) == ([], wanted)
    assert_described(response, described)


@pytest.mark.parametrize("path", BOTH)
def test_a_failure_in_the_middle_of_a_stream_is_an_event_as_described(path):
    longer = {name: 9 for name in LEAST[path] if name.startswith("max_")} or {"max_tokens": 9}
    response = ask(chatting_server(broken(broken_after=2)), "POST", path, json=LEAST[path] | {"stream": True} | longer)
    assert_described(response, operation(path))
    last = events(response)[-1]
    assert last.get("response", last)["error"]["code"] == "internal_error"


def test_no_description_speaks_of_files_of_the_server():
    assert re.findall(r"[\w/]+\.py\b", json.dumps(document())) == []
