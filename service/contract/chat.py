"""The body of a chat, as JSON and as a message of gRPC."""

from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt, StrictStr, WithJsonSchema

from attend.model.errors import InvalidRequest, NotSupported
from attend.model.params import MAX_INT32, describe
from attend.service.chat.messages import MAX_MESSAGES
from attend.service.chat.prompt import EFFORTS
from attend.service.chat.tools import MAX_SCHEMA_BYTES, MAX_TOOLS
from attend.service.contract.conversation import Messages, ToolChoice, Tools
from attend.service.contract.requests import Generation, ModelName, OverGrpc, Scored
from attend.service.contract.shapes import ShownAs, Wire, between, body, off, told
from attend.service.contract.validation import kind_of, validated
from attend.v1 import generation_pb2 as pb

_REPLACED = "give tools and tool_choice in its place"
NOT_BUILT: dict[str, tuple[Any, str]] = {
    "functions": ([], _REPLACED),
    "function_call": ("none", _REPLACED),
    "store": (False, "no answer is kept"),
}
"""Fields that clients send and that are not carried out: what asks for nothing, beside null, and what is said of the rest."""


class ChatRequest(Scored, Generation):
    """The body of POST /v1/chat/completions. Messages and tools are read by `conversation.py`."""

    model_config = body(**{name: off(f"Not supported: {instead}.", value) for name, (value, instead) in NOT_BUILT.items()})

    model: ModelName = told(minLength=1, proto="model", client=True)
    max_tokens: StrictInt | None = told(proto="max_tokens", client=True, **between(1, MAX_INT32))
    """The most tokens of an answer, under its older name. Absent means what the context has left."""
    messages: Annotated[list[Any], ShownAs(Messages), Wire(("messages",), client=True)] = Field(
        description=f"The conversation, 1 to {MAX_MESSAGES} messages, written as a prompt by the checkpoint's chat template."
    )
    max_completion_tokens: StrictInt | None = told(client=True, **between(1, MAX_INT32))
    """The most tokens of an answer. Absent means what the context has left. Must equal `max_tokens` where both are given."""
    chat_template_kwargs: dict[StrictStr, Any] | None = told(proto="chat_template_kwargs", client=True)
    """What the chat template takes beside the messages. Default: nothing."""
    tools: Annotated[list[Any], ShownAs(Tools)] | None = told(
        description=f"Functions that the model may call: at most {MAX_TOOLS}, their schemas at most {MAX_SCHEMA_BYTES} bytes "
        "in all, 64 KiB where calls are enforced. Default: none.",
        proto="tools",
    )
    tool_choice: Annotated[Any, ShownAs(ToolChoice | None)] = told(proto="tool_choice tool_name")
    """`none`: the tools are not shown to the model. `required`, or a function by its name: the answer is calls, whose arguments
    obey the schemas. Default: `auto`, the model decides; then only calls of `strict` tools are held to obey."""
    parallel_tool_calls: StrictBool | None = told(True, proto="parallel_tool_calls")
    """An answer may hold more than one call."""
    reasoning_effort: Annotated[StrictStr, WithJsonSchema({"enum": list(EFFORTS)})] | None = told(
        proto="reasoning_effort", client=True
    )
    """How much the model is to reason, where its chat template knows such a thing. A template that can only leave reasoning out
    does so for `none`. Default: the template's."""

    def documents(self) -> list[Any]:
        """The messages as JSON has them."""
        return self.messages


class ChatMessageRequest(OverGrpc, ChatRequest):
    """What a message ChatRequest of gRPC asks for. Its messages are protobuf's until the prompt is written."""

    def documents(self) -> list[Any]:
        """The messages as JSON has them."""
        return list(map(_document, self.messages))


def _document(message: pb.ChatMessage) -> dict[str, Any]:
    """A message in OpenAI's words. What is empty was not given, but a content may be empty."""
    read: dict[str, Any] = {"role": message.role, "content": message.content}
    given = {"name": message.name, "reasoning_content": message.reasoning, "tool_call_id": message.tool_call_id}
    read |= {name: value for name, value in given.items() if value}
    if message.tool_calls:
        read["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return read


def read_chat(fields: dict[str, Any]) -> ChatRequest:
    """A parsed body as a ChatRequest. Raises InvalidRequest with the field named."""
    for name, value in fields.items():
        if not _asks_for_nothing(name, value):
            raise NotSupported(f"{name}: {NOT_BUILT[name][1]}; got {describe(value)}", name)
    fields = {name: value for name, value in fields.items() if name not in NOT_BUILT}
    if fields.get("messages") is None:
        raise InvalidRequest("messages is required: a list of objects with a role and a content", "messages")
    return validated(ChatRequest, fields)


def _asks_for_nothing(name: str, value: Any) -> bool:
    if name not in NOT_BUILT or value is None:
        return True
    off = NOT_BUILT[name][0]
    return kind_of(value) is kind_of(off) and value == off
