"""Fields that nobody here knows: taken and said, or refused with what to use."""

import re

import pytest

from attend.model.errors import InvalidRequest, NotSupported, Unauthenticated
from attend.service.access.keys import Entry, KeyRing, digest_of, write_keys
from attend.service.chat.forms import form_of
from attend.service.contract.anthropic import CountTokensRequest, MessagesRequest
from attend.service.contract.requests import ChatRequest, CompletionRequest, GenerateRequest
from attend.service.contract.tolerance import PUBLISHED, SAMPLING
from attend.service.remarks import CLAMPED, IGNORED, MAX_HEADER, MAX_IGNORED, Remarks
from attend.v1 import generation_pb2 as pb
from attend.v1.generation_pb2_grpc import GenerationServiceStub
from tests.fakes import FakeEngine, build_server, grpc_channel, info
from tests.service.contract.asked import calling_of, messages_of
from tests.service.http_api.described import LEAST, ask, chatting_server

READ = {"/v1/completions": CompletionRequest.read, "/v1/chat/completions": ChatRequest.read}


def said(path: str, server=None, **fields: object) -> tuple[int, str | None]:
    """The status and the names of ignored fields of a call's answer."""
    response = ask(chatting_server() if server is None else server, "POST", path, json=LEAST[path] | fields)
    return response.status_code, response.headers.get(IGNORED)


@pytest.mark.parametrize("path", LEAST)
def test_a_field_that_asks_for_nothing_is_taken_and_said_on_every_route(path):
    taken = {"prompt_cache_key": "k", "safety_identifier": "s", "service_tier": "auto", "inference_geo": "eu"}
    assert said(path, **taken) == (200, "prompt_cache_key, safety_identifier, service_tier, inference_geo")
    response = ask(chatting_server(), "POST", path, json=LEAST[path] | {"nobody_knows_it": None})
    assert (response.is_success, response.headers.get(IGNORED)) == (True, None), response.text


@pytest.mark.parametrize("path", READ)
@pytest.mark.parametrize("stream", [False, True])
def test_the_header_is_on_whole_answers_and_on_streams(path, stream):
    assert said(path, stream=stream, frobnicate=1) == (200, "frobnicate")


@pytest.mark.parametrize("path", READ)
def test_what_is_ignored_changes_nothing_of_what_is_asked(path):
    taken = {name: {"deep": [1]} for name in (*PUBLISHED, "frobnicate", "x-y", "ünknown")}
    assert READ[path](LEAST[path] | taken, Remarks()) == READ[path](LEAST[path])


@pytest.mark.parametrize(("name", "rule"), sorted(SAMPLING.items()))
def test_a_field_of_another_server_is_taken_where_it_does_nothing_and_else_names_ours(name, rule):
    for value in rule.values or () if rule.values is not None else (0.5, "x", [1]):
        remarks = Remarks()
        CompletionRequest.read({"prompt": "a", name: value}, remarks)
        assert remarks.names == [name]
    if rule.values is None:
        return
    with pytest.raises(NotSupported, match=f"^{name} is not supported") as caught:
        CompletionRequest.read({"prompt": "a", name: "something"}, Remarks())
    assert caught.value.field == name
    assert rule.instead in str(caught.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"),
        ("maxtokens", "max_tokens"),
        ("temperture", "temperature"),
        ("tempreature", "temperature"),
        ("stream_optoins", "stream_options"),
        ("stream_option", "stream_options"),
        ("top_kk", None),  # 6 letters and one edit from top_k
        ("streem", "stream"),
        ("strm", None),
        ("max_toks", None),
        ("repetition_penalty_range", None),
        ("logit_bais", "logit_bias"),
    ],
)
def test_a_name_that_resembles_a_known_one_is_an_error_that_names_it(name, meant):
    meant = {"top_kk": "top_k"}.get(name, meant)
    document = {"prompt": "a", name: 1}
    if meant is None:
        assert CompletionRequest.read(document, Remarks()) == CompletionRequest.read({"prompt": "a"})
        return
    with pytest.raises(InvalidRequest, match=f"^{name} is not a field of this request: did you mean {meant}\\?$") as caught:
        CompletionRequest.read(document, Remarks())
    assert caught.value.field == name


@pytest.mark.parametrize("path", READ)
def test_fields_of_the_other_route_are_refused_by_name(path):
    others = {"/v1/completions": ChatRequest.names, "/v1/chat/completions": GenerateRequest.names - {"adapter"}}[path]
    read = READ[path]
    for name in sorted(others - {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}[path].names):
        with pytest.raises(InvalidRequest, match=f"^{name} is not"):
            read(LEAST[path] | {name: 3}, Remarks())


def test_strict_fields_are_refused_and_what_does_nothing_elsewhere_is_not():
    server = chatting_server(strict_fields=True)
    for name in ("prompt_cache_key", "frobnicate"):
        assert said("/v1/completions", server, **{name: "x"}) == (400, None)
    assert said("/v1/completions", server, repeat_penalty=1) == (200, "repeat_penalty")


def test_a_body_of_unknown_names_has_a_limit():
    names = [f"zz{number}qq" for number in range(MAX_IGNORED + 1)]
    CompletionRequest.read({"prompt": "a"} | dict.fromkeys(names[:-1], 1), Remarks())
    with pytest.raises(InvalidRequest, match="is not a field"):
        CompletionRequest.read({"prompt": "a"} | dict.fromkeys(names, 1), Remarks())


def test_the_header_holds_no_more_than_headers_may():
    names = ["a b", "a\r\nx-evil: 1", "ü", "x" * 65, "y" * 64, *(f"{'z' * 40}{number}" for number in range(40))]
    remarks = Remarks()
    for name in names:
        remarks.ignore(name)
    text = remarks.headers()[IGNORED]
    assert text.startswith(f"?, {'y' * 64}, ")
    assert len(text) <= MAX_HEADER
    assert text.endswith(", ...")
    assert said("/v1/completions", **{"a\r\nx-evil": 1, "b": 2}) == (200, "?, b")


# --- inside


def test_what_clients_add_to_a_text_is_taken_wherever_a_body_has_texts():
    text = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "citations": None}
    results = [{"type": "tool_result", "tool_use_id": "t", "content": [text], "cache_control": {}}, text]
    called = [text, {"type": "tool_use", "id": "t", "name": "f", "input": {}, "cache_control": {}}]
    talk = [{"role": "user", "content": [text]}, {"role": "assistant", "content": called}, {"role": "user", "content": results}]
    for read in (MessagesRequest.read, CountTokensRequest.read):
        remarks = Remarks()
        read({"system": [text], "messages": talk}, remarks)
        assert remarks.names == ["cache_control"]


def test_what_clients_add_to_messages_is_taken_and_said():
    remarks = Remarks()
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}], "id": "m1"},
        {"role": "assistant", "content": "b", "thinking_blocks": [{"x": 1}], "reasoning_details": [], "refusal": "no"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}, {"type": "text", "text": "c"}]},
        {"role": "user", "content": []},
    ]
    read = messages_of(messages, remarks)
    assert remarks.names == ["id", "cache_control", "thinking_blocks", "reasoning_details", "refusal", "content"]
    assert read == [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
        {"role": "user", "content": ""},
    ]


def test_a_mistyped_name_in_a_message_is_refused_by_its_place():
    with pytest.raises(InvalidRequest, match=r"^messages\[0\]\.contents is not a field .*: did you mean content\?$"):
        messages_of([{"role": "user", "content": "a", "contents": "b"}], Remarks())


FUNCTION = {"type": "function", "function": {"name": "f"}}


def test_tools_that_are_no_functions_are_left_out_of_the_prompt_and_said():
    remarks = Remarks()
    tools = [
        {"type": "web_search"},
        FUNCTION | {"cache_control": {}},
        {"type": "custom", "custom": {"name": "g"}},
        {"type": "a b"},
    ]
    calling = calling_of(tools, None, None, form_of("", "hermes"), remarks)
    assert [tool.name for tool in calling.tools] == ["f"]
    assert calling.template_tools == (FUNCTION,)
    assert remarks.names == ["cache_control", "tools.web_search", "tools.custom", "?"]
    with pytest.raises(InvalidRequest, match="needs tools"):
        calling_of(tools[:1], "required", None, form_of("", "hermes"), Remarks())
    with pytest.raises(InvalidRequest, match=r"tools\[0\]\.type must be 'function'"):
        calling_of(tools[:1], None, None, form_of("", "hermes"), Remarks(strict=True))


@pytest.mark.parametrize(
    ("choice", "place"),
    [
        ({"type": "function"}, "tool_choice.function.name"),
        ({"type": "allowed_tools", "mode": "auto"}, "tool_choice.tools"),
        ({"type": "allowed_tools", "allowed_tools": {"tools": [FUNCTION]}}, "tool_choice.allowed_tools.mode"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function"}]}},
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
    ],
)
def test_a_choice_without_a_name_never_leaves_all_tools_out(choice, place):
    with pytest.raises(InvalidRequest, match=f"^{re.escape(place)} is required$") as caught:
        calling_of([FUNCTION], choice, None, form_of("", "hermes"), Remarks())
    assert caught.value.field == place


# --- keys


def test_a_key_may_come_as_x_api_key(tmp_path):
    path = tmp_path / "keys"
    write_keys(path, {"ci": Entry(digest_of(b"att_1"))})
    ring = KeyRing(path)
    assert ring.authenticate(x_api_key=["att_1"]).name == "ci"
    assert ring.authenticate("Bearer att_1", x_api_key=[b"att_1"]).name == "ci"
    wrong = (([], ["att_1", "att_1"]), ([], [""]), (["Basic att_1"], []))
    for authorization, x_api_key in wrong:
        with pytest.raises(Unauthenticated):
            ring.authenticate(*authorization, x_api_key=x_api_key)


# --- clamped

LONG = {"max_tokens": 32000}


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_beyond_the_context_is_clamped_in_a_chat_and_refused_in_a_completion(stream):
    server = chatting_server(FakeEngine(info=info(max_model_len=32)))
    chat = LEAST["/v1/chat/completions"] | {"max_completion_tokens": 32000, "min_tokens": 31000, "stream": stream}
    response = ask(server, "POST", "/v1/chat/completions", json=chat)
    assert (response.status_code, response.headers[CLAMPED]) == (200, "max_tokens")
    if not stream:
        assert response.json()["choices"][0]["finish_reason"] == "length"
        assert response.json()["usage"]["total_tokens"] == 32
    response = ask(server, "POST", "/v1/completions", json=LEAST["/v1/completions"] | LONG)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(("beyond", "status"), [("clamp", 200), ("refuse", 400)])
def test_the_setting_goes_before_the_routes(beyond, status):
    server = chatting_server(FakeEngine(info=info(max_model_len=32)), beyond_context=beyond)
    for path in READ:
        body = LEAST[path] | LONG
        body.pop("max_completion_tokens", None)
        assert ask(server, "POST", path, json=body).status_code == status


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize(("most", "said"), [(32000, "max_tokens"), (4, None)])
async def test_over_grpc_the_trailing_metadata_says_that_a_limit_is_clamped(method, most, said):
    server = build_server(FakeEngine(info=info(max_model_len=32)))
    server.methods.beyond_context = "clamp"

    async with grpc_channel(server) as channel:
        call = getattr(GenerationServiceStub(channel), method)(pb.GenerateRequest(text="ab", max_tokens=most))
        if method == "GenerateStream":
            assert [answer async for answer in call]
        beside = dict(await call.trailing_metadata())
    assert beside.get(CLAMPED) == said
    assert beside["x-request-id"]
