"""Messages of gRPC ask for what bodies of HTTP ask for: every field has its place, and both make the same command."""

from dataclasses import replace
from typing import Any, get_args

import pytest
from google.protobuf.descriptor import Descriptor

from attend.model.errors import InvalidRequest
from attend.model.params import NO_CHANGE, SamplingParams, StopRules
from attend.model.text.chat import ChatTemplate
from attend.model.text.grammar import GrammarSpec, Kind
from attend.service.contract import messages
from attend.service.contract.commands import to_command
from attend.service.contract.requests import ChatMessageRequest, ChatRequest, CompletionRequest, GenerateRequest
from attend.service.contract.shapes import Shape
from attend.service.contract.texts import AttentionRequest, EmbedRequest
from attend.service.grpc_api import convert
from attend.service.http_api.openapi import schemas
from attend.service.records import Command
from attend.v1 import generation_pb2 as pb
from tests.fakes import info
from tests.service.contract.test_chat import EVERYTHING as CHAT
from tests.service.contract.test_completions import EVERYTHING as COMPLETION
from tests.service.contract.wrong import scalar_of
from tests.service.messages import chat_message, generate_message

D, R = pb.DecodingParameters, pb.ResponseOptions
TEMPLATE = ChatTemplate("{% for message in messages %}{{ message['content'] }}{% endfor %}")
KINDS = {
    pb.GenerateRequest: GenerateRequest,
    pb.ChatRequest: ChatMessageRequest,
    pb.EmbedRequest: EmbedRequest,
    pb.ExplainRequest: AttentionRequest,
}
NOT_OF_CHATS = {"echo", "prompt_logprobs"}
"""Fields of a message that chats share with other calls, and refuse."""
HTTP_ONLY = {
    "user",
    "stream",
    "stream_options",
    "response_format",
    "max_completion_tokens",
    "encoding_format",
    "add_generation_prompt",
}


def names_of(kind: Descriptor) -> set[str]:
    """The fields of a message, and of the groups in it, under their names in a body."""
    groups = [field.message_type for field in kind.fields if field.name in messages.GROUPS]
    own = {field.name for field in kind.fields if field.name not in messages.GROUPS} - messages.NOT_ASKED
    return {messages.RENAMED.get(name, name) for name in own}.union(*map(names_of, groups))


@pytest.mark.parametrize(("message", "kind"), KINDS.items(), ids=lambda value: value.__name__)
def test_every_field_of_a_message_is_a_field_of_its_body_and_the_other_way_round(message, kind):
    """A field that is added to the proto alone fails here: it would be refused."""
    named, more = names_of(message.DESCRIPTOR), NOT_OF_CHATS if message is pb.ChatRequest else set()
    assert not named - kind.names - more, f"no fields of {kind.__name__}: RENAMED, or if chats refuse them NOT_OF_CHATS"
    assert not kind.names - named - HTTP_ONLY, f"{message.DESCRIPTOR.name} lacks these; if only HTTP has them: HTTP_ONLY"


def over_grpc(message: pb.GenerateRequest | pb.ChatRequest) -> Command:
    return to_command(messages.generation(message), "id", template=TEMPLATE)


SHOWN = {"return_token_ids", "timing"}
"""What an answer shows, which a command does not know."""
NOT_IN_A_COMMAND = "a field either changes the Command or stands in SHOWN"
SPECIAL = {"prompt", "messages", "tools", "tool_choice", "parallel_tool_calls", "structured_outputs", "adapter"}
SPECIAL |= {"chat_template_kwargs", "reasoning_effort", "top_logprobs", "continue_final_message"}
"""Fields that mean something only with others, or are written in another way: tests of their own have them."""


def cases(kind: type[Shape], shown: type[Shape], values: dict[str, Any]) -> list[Any]:
    """A value of each field that a message has: of a new one, any that is not its default."""
    known = schemas()[shown.__name__]["properties"]
    names = sorted(kind.names - HTTP_ONLY - SPECIAL)
    return [pytest.param(name, values[name] if name in values else scalar_of(known[name]), id=name) for name in names]


@pytest.mark.parametrize(
    ("name", "value"), cases(GenerateRequest, CompletionRequest, COMPLETION | {"resume_token_ids": [1, 2]})
)
def test_each_field_of_a_completion_means_the_same_in_a_message(name, value):
    body = {"prompt": "a"} | {name: value}
    found = over_grpc(generate_message(body))
    assert found == to_command(CompletionRequest.read(body), "id")
    assert (found == over_grpc(generate_message({"prompt": "a"}))) is (name in SHOWN), NOT_IN_A_COMMAND


@pytest.mark.parametrize(("name", "value"), cases(ChatMessageRequest, ChatRequest, CHAT))
def test_each_field_of_a_chat_means_the_same_in_a_message(name, value):
    hello: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    found, wanted = (
        over_grpc(chat_message(hello | {name: value})),
        to_command(ChatRequest.read(hello | {name: value}), "id", template=TEMPLATE),
    )
    assert found.prompts[0].write() == wanted.prompts[0].write()
    assert replace(found, prompts=("",)) == replace(wanted, prompts=("",))
    plain = over_grpc(chat_message(hello))
    assert (replace(found, prompts=("",)) == replace(plain, prompts=("",))) is (name in SHOWN), NOT_IN_A_COMMAND


def test_a_bare_text_means_the_contracts_defaults():
    expected = Command(prompts=("a",), sampling=SamplingParams(), stops=StopRules(), request_id="id")
    assert over_grpc(pb.GenerateRequest(text="a")) == expected


def test_an_adapter_is_named_in_a_message_alone():
    assert over_grpc(pb.GenerateRequest(text="a", adapter="pirate")).adapter == "pirate"
    with pytest.raises(InvalidRequest, match="adapter is not a field of this request"):
        CompletionRequest.read({"prompt": "a", "adapter": "pirate"})


STRUCTURED = {
    "json_object": (D(json_object=True), GrammarSpec("json_object", "")),
    "json_schema": (D(json_schema="{}"), GrammarSpec("json_schema", "{}")),
    "regex": (D(regex="a+"), GrammarSpec("regex", "a+")),
    "grammar": (D(grammar="start: A"), GrammarSpec("grammar", "start: A")),
    "choice": (D(choice=D.Choices(choices=["a", 'b"'])), GrammarSpec("choice", '["a", "b\\""]')),
}


@pytest.mark.parametrize("name", STRUCTURED)
def test_each_form_of_structured_output_is_the_grammar_of_its_kind(name):
    decoding, spec = STRUCTURED[name]
    assert over_grpc(pb.GenerateRequest(text="a", decoding=decoding)).grammar == spec


def test_there_is_a_case_for_each_form_of_structured_output():
    forms = {field.name for field in D.DESCRIPTOR.oneofs_by_name["structured_output"].fields}
    assert forms == STRUCTURED.keys() == {*get_args(Kind)} - {"tools"}, "a grammar of tools is the server's own"


def test_a_zero_that_is_given_is_not_absent():
    assert over_grpc(pb.GenerateRequest(text="a", temperature=0)).sampling.temperature == 0
    assert over_grpc(pb.GenerateRequest(text="a", sampling=pb.SamplingParameters(seed=0))).sampling.seed == 0
    with pytest.raises(InvalidRequest, match=r"^max_tokens"):
        over_grpc(pb.GenerateRequest(text="a", max_tokens=0))
    with pytest.raises(InvalidRequest, match=r"^n must"):
        over_grpc(pb.GenerateRequest(text="a", sampling=pb.SamplingParameters(n=0)))


def test_empty_text_is_a_prompt_and_no_input_is_a_mistake():
    assert over_grpc(pb.GenerateRequest(text="")).prompts == ("",)
    assert over_grpc(pb.GenerateRequest(token_ids=pb.TokenIds())).prompts == ((),)  # refused by the service
    with pytest.raises(InvalidRequest, match=r"^input is required") as caught:
        over_grpc(pb.GenerateRequest())
    assert caught.value.field == "input"


SILENT: list[dict[str, Any]] = [
    {"decoding": D()},
    {"decoding": D(presence_penalty=0, frequency_penalty=0, repetition_penalty=1)},
    {"decoding": D(json_object=False)},
    {"decoding": D(bad_words=[], allowed_token_ids=[], logit_bias={})},
    {"response": R()},
    {"response": R(echo=False, timing=False, logprobs=False, prompt_token_ids=False)},
    {"cache_salt": ""},
    {"resume_token_ids": pb.TokenIds()},
]


@pytest.mark.parametrize("fields", SILENT)
def test_a_value_that_asks_for_nothing_is_accepted(fields):
    command = over_grpc(pb.GenerateRequest(text="a", **fields))
    assert command == over_grpc(pb.GenerateRequest(text="a")) and command.decoding is NO_CHANGE


def test_of_token_ids_that_are_truncated_only_those_are_read_that_stay():
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(1000)), truncate_prompt_tokens=3)
    assert messages.generation(request).prompt == [[997, 998, 999]]
    short = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]), truncate_prompt_tokens=3)
    assert messages.generation(short).prompt == [[1, 2]]


def test_calls_are_counted_before_they_are_read():
    turn = pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall()] * 129)
    with pytest.raises(InvalidRequest, match=r"^messages\[1\]\.tool_calls may hold at most 128 calls; got 129"):
        convert.check_sizes(pb.ChatRequest(messages=[pb.ChatMessage(role="user"), turn]), info())


@pytest.mark.parametrize("field", ["parameters", "chat_template_kwargs"])
def test_half_of_a_surrogate_pair_in_json_is_refused(field):
    request = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="a")])
    if field == "parameters":
        request.tools.add(name="f", parameters='{"\\ud800": 1}')
    else:
        request.chat_template_kwargs = '{"a": "\\ud800"}'
    with pytest.raises(InvalidRequest, match="must be a JSON object in a string"):
        over_grpc(request)
