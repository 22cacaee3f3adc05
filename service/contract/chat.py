"""The request body of a chat completion, over HTTP and gRPC."""

from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt, StrictStr, WithJsonSchema

from attend.model.errors import InvalidRequest
from attend.model.params import MAX_INT32
from attend.service.chat.messages import MAX_MESSAGES
from attend.service.chat.prompt import EFFORTS
from attend.service.chat.tools import MAX_SCHEMA_BYTES, MAX_TOOLS
from attend.service.contract.conversation import Messages, ToolChoice, Tools
from attend.service.contract.requests import Generation, ModelName, OverGrpc, Scored, Templated
from attend.service.contract.shapes import ShownAs, Wire, between, body, optional_field
from attend.service.contract.tolerance import SAMPLING, Off
from attend.service.contract.validation import read_body
from attend.service.remarks import Remarks
from attend.v1 import generation_pb2 as pb

_REPLACED = "use tools and tool_choice"
_COMPLETION = "it is a field of POST /v1/completions"
OFF: dict[str, Off] = {
    "functions": Off(([],), _REPLACED),
    "function_call": Off(("none",), _REPLACED),
    "modalities": Off((["text"],), "answers are text"),
    "audio": Off((), "answers are text"),
    "web_search_options": Off((), "the model has the tools that a call declares, and no others"),
    "best_of": Off((1,), "use n"),
    "prompt": Off((), "use messages"),
    "suffix": Off(("",), _COMPLETION),
    "echo": Off((False,), _COMPLETION),
    "prompt_logprobs": Off((), _COMPLETION),
    "resume_token_ids": Off(([],), _COMPLETION),
}
"""Fields that clients send and that are not carried out here."""


class ChatRequest(Scored, Templated, Generation):
    """The body of POST /v1/chat/completions: a conversation, which the answer continues."""

    model_config = body(off=OFF)
    off = SAMPLING | OFF

    model: ModelName = optional_field(minLength=1, proto="model")
    max_tokens: StrictInt | None = optional_field(proto="max_tokens", **between(1, MAX_INT32))
    """The most tokens of an answer, under its older name. Absent means what the context has left."""
    messages: Annotated[list[Any], ShownAs(Messages), Wire(("messages",))] = Field(
        description=f"The conversation, 1 to {MAX_MESSAGES} messages, written as a prompt by the checkpoint's chat template."
    )
    max_completion_tokens: StrictInt | None = optional_field(**between(1, MAX_INT32))
    """The most tokens of an answer. Absent means what the context has left. Must equal `max_tokens` where both are given."""
    continue_final_message: StrictBool | None = optional_field(False, proto="continue_final_message")
    """The last message is the assistant's, and the answer goes on in it. The answer has what is new alone."""
    add_generation_prompt: StrictBool | None = optional_field()
    """True if the prompt ends where an answer begins. Default: true; false with `continue_final_message`."""
    tools: Annotated[list[Any], ShownAs(Tools)] | None = optional_field(
        description=f"Functions that the model may call: at most {MAX_TOOLS}, their schemas at most {MAX_SCHEMA_BYTES} bytes "
        "in all, 64 KiB where calls are enforced. Default: none.",
        proto="tools",
    )
    tool_choice: Annotated[Any, ShownAs(ToolChoice | None)] = optional_field(proto="tool_choice tool_name")
    """`none`: the tools are not shown to the model. `required`, or a function by its name: the answer is calls, whose arguments
    obey the schemas. Default: `auto`, the model decides; then only calls of `strict` tools are held to obey."""
    parallel_tool_calls: StrictBool | None = optional_field(True, proto="parallel_tool_calls")
    """An answer may hold more than one call."""
    reasoning_effort: Annotated[StrictStr, WithJsonSchema({"enum": list(EFFORTS)})] | None = optional_field(
        proto="reasoning_effort"
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


def read_chat(fields: dict[str, Any], remarks: Remarks | None = None) -> ChatRequest:
    """A parsed body as a ChatRequest. Raises InvalidRequest with the field named."""
    if fields.get("messages") is None:
        raise InvalidRequest("messages is required: a list of objects with a role and a content", "messages")
    return read_body(ChatRequest, fields, remarks)
