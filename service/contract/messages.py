"""gRPC messages to the request bodies of HTTP: a field has the name that it has there, or the one in RENAMED."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from google.protobuf.message import Message

from attend.model.errors import InvalidRequest, NotSupported
from attend.service.chat.messages import json_object
from attend.service.chat.tools import MAX_SCHEMA_BYTES, MAX_TOOLS
from attend.service.contract.requests import ChatMessageRequest, GenerateRequest
from attend.service.contract.shapes import Shape
from attend.service.contract.structured import KINDS
from attend.service.contract.texts import AttentionRequest, EmbedRequest
from attend.v1 import generation_pb2 as pb

GROUPS = ("sampling", "stopping", "decoding", "response")
"""Messages inside a message whose fields are the body's own."""
NOT_ASKED = frozenset({"prompt_token_ids"})
"""What a message has and no body: read where the answer is written."""
RENAMED: dict[str, str] = {
    "include_stop_string": "include_stop_str_in_output",
    "stop_strings": "stop",
    "output_token_ids": "return_token_ids",
    "inputs": "input",
    "tool_name": "tool_choice",
    **dict.fromkeys(("text", "token_ids"), "prompt"),
    **dict.fromkeys(("answer_text", "answer_token_ids"), "answer"),
    **dict.fromkeys(KINDS.values(), "structured_outputs"),
}
"""Fields of messages that bodies have under another name."""


def generation(message: pb.GenerateRequest | pb.ChatRequest) -> GenerateRequest | ChatMessageRequest:
    """A call for text; of a chat the messages have been counted. Raises InvalidRequest with the field named."""
    if isinstance(message, pb.ChatRequest):
        return ChatMessageRequest.read(fields_of(message, ChatMessageRequest))
    _needs_input(message)
    fields = fields_of(message, GenerateRequest)
    if isinstance(fields["prompt"], list):
        fields["prompt"] = [fields["prompt"]]  # one prompt, also where it is empty
    return GenerateRequest.read(fields)


def to_embed_request(message: pb.EmbedRequest) -> EmbedRequest:
    """A call of Embed. Raises InvalidRequest with the field named."""
    return EmbedRequest.read({"input": []} | fields_of(message, EmbedRequest))


def to_explain_request(message: pb.ExplainRequest) -> AttentionRequest:
    """A call of Explain. Raises InvalidRequest with the field named."""
    _needs_input(message)
    return AttentionRequest.read(fields_of(message, AttentionRequest))


def _needs_input(message: pb.GenerateRequest | pb.ExplainRequest) -> None:
    if message.WhichOneof("input") is None:
        raise InvalidRequest("input is required: text or token_ids", "input")


def fields_of(message: Message, kind: type[Shape]) -> dict[str, Any]:
    """The fields that a message gives, under their names in a body. What is empty and not `optional` was not given.

    Raises NotSupported for one that a body of this kind does not have.
    """
    fields = {}
    for given, value in _given_fields(message):
        if given in NOT_ASKED:
            continue
        name = RENAMED.get(given, given)
        if name not in kind.names:
            raise NotSupported(f"{name} is not for a chat, whose prompt is written by the server", name)
        fields[name] = READ[given](value, message) if given in READ else _plain(value)
    return fields


def _given_fields(message: Message) -> Iterator[tuple[str, Any]]:
    for field, value in message.ListFields():
        if field.name in GROUPS:
            yield from _given_fields(value)
        else:
            yield field.name, value


def _plain(value: Any) -> Any:
    """A value as JSON has it: a list, or an object whose keys are texts."""
    if isinstance(value, Message):  # of one list, which may be given and empty
        ((field, *_),) = (value.DESCRIPTOR.fields,)
        return list(getattr(value, field.name))
    if hasattr(value, "items"):
        return {str(key): item for key, item in value.items()}
    return value if isinstance(value, str | bool | int | float) else list(value)


def _kept_tokens(tokens: pb.TokenIds, message: Any) -> list[int]:
    """Of token ids that are to be truncated only the remaining ones are read: a message may hold millions."""
    is_cut = "truncate_prompt_tokens" in message.DESCRIPTOR.fields_by_name and message.HasField("truncate_prompt_tokens")
    return list(tokens.ids[-max(1, message.truncate_prompt_tokens) :] if is_cut else tokens.ids)


def _messages(messages: Any, call: Any) -> list[dict[str, Any]]:
    """The messages in OpenAI's words. What is empty was not given, but a content may be empty."""
    made = []
    for message in messages:
        read = {"role": message.role, "content": message.content}
        given = {"name": message.name, "reasoning_content": message.reasoning, "tool_call_id": message.tool_call_id}
        read |= {name: value for name, value in given.items() if value}
        calls = [{"id": each.id, "function": {"name": each.name, "arguments": each.arguments}} for each in message.tool_calls]
        made.append(read | ({"tool_calls": calls} if calls else {}))
    return made


def _tools(tools: Any, message: Any) -> list[Any]:
    """The tools in OpenAI's words, in which `conversation.py` reads them and templates write them."""
    if len(tools) > MAX_TOOLS:  # refused for their number, and not looked at
        return [None] * len(tools)
    size = sum(len(tool.parameters) for tool in tools)
    if size > MAX_SCHEMA_BYTES:  # before they are parsed
        raise InvalidRequest(f"tools may have schemas of at most {MAX_SCHEMA_BYTES} bytes in all; got at least {size}", "tools")
    made = []
    for index, tool in enumerate(tools):
        given = {"name": tool.name, "description": tool.description or None, "strict": tool.strict or None}
        if tool.parameters:
            given["parameters"] = json_object(tool.parameters, f"tools[{index}].parameters")
        order = ("name", "description", "parameters", "strict")
        function = {name: given[name] for name in order if given.get(name) is not None}
        made.append({"type": "function", "function": function})
    return made


def _input(given: pb.EmbedInput) -> str | list[int]:
    """A text, or the token ids of one."""
    if given.WhichOneof("input") is None:
        raise InvalidRequest("input must hold text or token_ids", "input")
    return str(given.text) if given.HasField("text") else list(given.token_ids.ids)


def _structured_output(name: str, value: Any, message: Any) -> dict[str, Any]:
    """One form of structured output, in vLLM's words."""
    return {name: _plain(value)}


READ: dict[str, Callable[[Any, Any], Any]] = {
    "token_ids": _kept_tokens,
    "messages": _messages,
    "tools": _tools,
    "tool_choice": lambda choice, message: choice or None,
    "tool_name": lambda name, message: {"type": "function", "function": {"name": name}},
    "chat_template_kwargs": lambda text, message: json_object(text, "chat_template_kwargs"),
    "inputs": lambda inputs, message: list(map(_input, inputs)),
    **{kind: partial(_structured_output, name) for name, kind in KINDS.items()},
}
"""Of the fields whose values are written otherwise in JSON: what makes one of the value and its message."""
