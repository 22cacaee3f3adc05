"""Bodies of HTTP as the messages of gRPC that ask for the same, by what the contract says of each field."""

import json
from typing import Any, TypeVar

from google.protobuf.message import Message

from attend.service.contract.messages import GROUPS, RENAMED
from attend.service.contract.structured import KINDS
from attend.v1 import generation_pb2 as pb

M = TypeVar("M", pb.GenerateRequest, pb.ChatRequest)


def generate_message(body: dict[str, Any]) -> pb.GenerateRequest:
    """A completion, with the ids of its prompt where it wants those of its answer."""
    body = dict(body)
    message, prompt = pb.GenerateRequest(), body.pop("prompt")
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.SetInParent()
        message.token_ids.ids.extend(prompt)
    if "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    message = filled(message, body)
    message.response.prompt_token_ids = message.response.output_token_ids
    return message


def chat_message(body: dict[str, Any]) -> pb.ChatRequest:
    """A chat."""
    body = dict(body)
    if not isinstance(body.get("tools", []), list):
        _unfit(body)
    message = pb.ChatRequest(
        messages=map(_turn, body.pop("messages", ())), tools=[_tool(each["function"]) for each in body.pop("tools", ())]
    )
    if isinstance(body.get("tool_choice"), dict):
        message.tool_name = body.pop("tool_choice")["function"]["name"]
    if "chat_template_kwargs" in body:
        message.chat_template_kwargs = json.dumps(body.pop("chat_template_kwargs"))
    return filled(message, body)


def embed_message(body: dict[str, Any]) -> pb.EmbedRequest:
    """A call for embeddings."""
    body = dict(body)
    given = body.pop("input")
    texts = [given] if isinstance(given, str) else given
    inputs = [{"text": each} if isinstance(each, str) else {"token_ids": {"ids": each}} for each in texts]
    return pb.EmbedRequest(inputs=inputs, **body)


def filled(message: M, body: dict[str, Any]) -> M:
    """The message with these fields in the places where it has them."""
    body = dict(body)
    structured = body.pop("structured_outputs", {})
    if len(structured) > 1:
        _unfit(structured)
    for name, value in structured.items():
        text = json.dumps(value) if isinstance(value, dict) else value
        body[KINDS[name]] = pb.DecodingParameters.Choices(choices=value) if name == "choice" else text
    places = {}
    for group in (message, *(getattr(message, name) for name in GROUPS)):
        places |= {RENAMED.get(each.name, each.name): (group, each.name) for each in group.DESCRIPTOR.fields}
        places |= {each.name: (group, each.name) for each in group.DESCRIPTOR.fields}
    for name, value in body.items():
        group, field = places[name]
        if isinstance(value, dict):
            getattr(group, field).update({int(key): item for key, item in value.items() if str(int(key)) == key or _unfit(key)})
        elif isinstance(value, list):
            place = getattr(group, field)
            (place.ids if isinstance(place, pb.TokenIds) else place).extend(value)
        elif isinstance(value, Message):
            getattr(group, field).CopyFrom(value)
        else:
            setattr(group, field, value)
    return message


def _unfit(value: Any) -> None:
    """Raise ValueError for what no message can hold."""
    raise ValueError(value)


def _turn(turn: dict[str, Any]) -> pb.ChatMessage:
    listed = turn.get("tool_calls", [])
    if (
        "role" not in turn
        or (turn["role"] == "user" and "content" not in turn)
        or not isinstance(listed, list)
        or any(each.get("type", "function") != "function" for each in listed)
    ):
        _unfit(turn)
    more = {"reasoning": turn["reasoning_content"]} if "reasoning_content" in turn else {}
    calls = [pb.ToolCall(id=call["id"], **call["function"]) for call in turn.get("tool_calls", ())]
    plain = {name: value for name, value in turn.items() if name not in ("tool_calls", "reasoning_content")}
    return pb.ChatMessage(**plain, **more, tool_calls=calls)


def _tool(function: dict[str, Any]) -> pb.Tool:
    if "name" not in function or not isinstance(function.get("parameters", {}), dict):
        _unfit(function)
    return pb.Tool(**function | ({"parameters": json.dumps(function["parameters"])} if "parameters" in function else {}))
