"""Chat over gRPC: a message to a Command. What it means is decided in `contract/conversation.py`, as over HTTP."""

from typing import Any

from attend.model.chat import ChatTemplate
from attend.model.errors import InvalidRequest, NotSupported
from attend.model.generation_config import NO_DEFAULTS, Defaults
from attend.model.params import integer
from attend.service.chat.forms import TEXT_ALONE, AnswerForm
from attend.service.chat.messages import check_count, json_object
from attend.service.chat.prompt import prompt_of
from attend.service.chat.tools import MAX_SCHEMA_BYTES, MAX_TOOLS
from attend.service.contract.conversation import calling_of, messages_of
from attend.service.grpc_api.convert import arguments_of, stops_of
from attend.service.records import ChatPrompt, ChatRules, Command
from attend.v1 import generation_pb2 as pb


def to_command(
    request: pb.ChatRequest,
    request_id: str,
    template: ChatTemplate,
    defaults: Defaults = NO_DEFAULTS,
    form: AnswerForm = TEXT_ALONE,
) -> Command:
    """What the message asks for. Its messages become a prompt when the call is prepared, and are checked then.

    Raises InvalidRequest with the field named.
    """
    check_count(request.messages)
    if request.HasField("max_tokens"):
        integer("max_tokens", request.max_tokens, 1, 2**31 - 1)
    for name in ("echo", "prompt_logprobs"):
        if request.response.echo if name == "echo" else request.response.HasField(name):
            raise NotSupported(f"{name} is not for a chat, whose prompt is written by the server", name)
    parallel = request.parallel_tool_calls if request.HasField("parallel_tool_calls") else None
    calling = calling_of(_tools(request), _choice(request), parallel, form)
    given = json_object(request.chat_template_kwargs, "chat_template_kwargs") if request.chat_template_kwargs else {}

    def write() -> str:
        messages = messages_of([_message(message) for message in request.messages])
        return prompt_of(template, messages, calling, given, request.reasoning_effort or None)

    return Command(
        prompts=(ChatPrompt(write),),
        request_id=request.request_id or request_id,
        stops=stops_of(request, max_tokens=None),
        chat=ChatRules(form, calling),
        **arguments_of(request, defaults),
    )


def _tools(request: pb.ChatRequest) -> list[Any]:
    """The tools in OpenAI's words, in which `conversation.py` reads them and templates write them."""
    tools = request.tools
    if len(tools) > MAX_TOOLS:  # refused for their number, and not looked at
        return [None] * len(tools)
    size = sum(len(tool.parameters) for tool in tools)
    if size > MAX_SCHEMA_BYTES:  # before they are parsed
        raise InvalidRequest(f"tools may have schemas of at most {MAX_SCHEMA_BYTES} bytes in all; got at least {size}", "tools")
    return [{"type": "function", "function": _function(tool, f"tools[{index}]")} for index, tool in enumerate(tools)]


def _function(tool: pb.Tool, place: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = json_object(tool.parameters, f"{place}.parameters")
    return function | ({"strict": True} if tool.strict else {})


def _choice(request: pb.ChatRequest) -> Any:
    if request.WhichOneof("choice") == "tool_name":
        return {"type": "function", "function": {"name": request.tool_name}}
    return request.tool_choice or None


def _message(message: pb.ChatMessage) -> dict[str, Any]:
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
