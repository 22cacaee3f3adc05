"""The request body of a chat completion, over HTTP and gRPC."""

from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictStr, WithJsonSchema

from attend.service.chat.messages import MAX_MESSAGES
from attend.service.chat.prompt import EFFORTS
from attend.service.chat.tools import MAX_SCHEMA_BYTES, MAX_TOOLS
from attend.service.contract.conversation import Messages, ToolChoice, Tools
from attend.service.contract.requests import Generation, ModelName, Positive, Scored, Templated
from attend.service.contract.shapes import Wire, body, optional_field
from attend.service.contract.tolerance import SAMPLING, Unsupported
from attend.service.contract.validation import read_body
from attend.service.remarks import Remarks

_REPLACED = "use tools and tool_choice"
_COMPLETION = "it is a field of POST /v1/completions"
OFF: dict[str, Unsupported] = {
    "functions": Unsupported(([],), _REPLACED),
    "function_call": Unsupported(("none",), _REPLACED),
    "modalities": Unsupported((["text"],), "answers are text"),
    "audio": Unsupported((), "answers are text"),
    "web_search_options": Unsupported((), "the model has the tools that a call declares, and no others"),
    "best_of": Unsupported((1,), "use n"),
    "prompt": Unsupported((), "use messages"),
    "suffix": Unsupported(("",), _COMPLETION),
    "echo": Unsupported((False,), _COMPLETION),
    "prompt_logprobs": Unsupported((), _COMPLETION),
    "resume_token_ids": Unsupported(([],), _COMPLETION),
}
"""Fields that clients send and that are not carried out here."""


class ChatRequest(Scored, Templated, Generation):
    """The body of POST /v1/chat/completions: a conversation, which the answer continues."""

    model_config = body(off=OFF)
    off = SAMPLING | OFF

    model: ModelName = optional_field(minLength=1, proto="model")
    max_tokens: Positive | None = optional_field(proto="max_tokens")
    """The most tokens of an answer, under its older name. Absent means what the context has left."""
    messages: Annotated[Messages, Wire(("messages",))] = Field(
        description=f"The conversation, 1 to {MAX_MESSAGES} messages, written as a prompt by the checkpoint's chat template."
    )
    max_completion_tokens: Positive | None = optional_field()
    """The most tokens of an answer. Absent means what the context has left. Must equal `max_tokens` where both are given."""
    continue_final_message: StrictBool | None = optional_field(False, proto="continue_final_message")
    """The last message is the assistant's, and the answer goes on in it. The answer has what is new alone."""
    add_generation_prompt: StrictBool | None = optional_field()
    """True if the prompt ends where an answer begins. Default: true; false with `continue_final_message`."""
    tools: Tools | None = optional_field(
        description=f"Functions that the model may call: at most {MAX_TOOLS}, their schemas at most {MAX_SCHEMA_BYTES} bytes "
        "in all, 64 KiB where calls are enforced. Default: none.",
        proto="tools",
    )
    tool_choice: ToolChoice | None = optional_field(proto="tool_choice tool_name")
    """`none`: the tools are not shown to the model. `required`, or a function by its name: the answer is calls, whose arguments
    obey the schemas. Default: `auto`, the model decides; then only calls of `strict` tools are held to obey."""
    parallel_tool_calls: StrictBool | None = optional_field(True, proto="parallel_tool_calls")
    """An answer may hold more than one call."""
    reasoning_effort: Annotated[StrictStr, WithJsonSchema({"enum": list(EFFORTS)})] | None = optional_field(
        proto="reasoning_effort"
    )
    """How much the model is to reason, where its chat template knows such a thing. A template that can only leave reasoning out
    does so for `none`. Default: the template's."""


class ChatMessageRequest(ChatRequest):
    """What a message ChatRequest of gRPC asks for."""

    adapter: StrictStr | None = optional_field(proto="adapter")
    """The name of a LoRA adapter, beside the served model's."""


def read_chat(fields: dict[str, Any], remarks: Remarks | None = None) -> ChatRequest:
    """A parsed body as a ChatRequest. Raises InvalidRequest with the field named."""
    return read_body(ChatRequest, fields, remarks)
