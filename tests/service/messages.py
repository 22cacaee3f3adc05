"""Bodies of HTTP as the messages of gRPC that ask for the same, by what the contract says of each field."""

import json
from typing import Any, TypeVar

from google.protobuf.message import Message

from attend.service.contract.chat import ChatMessageRequest
from attend.service.contract.requests import GenerateRequest
from attend.service.contract.shapes import wires
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
    message = pb.ChatRequest(
        messages=map(_turn, body.pop("messages", ())), tools=[_tool(each["function"]) for each in body.pop("tools", ())]
    )
    if isinstance(body.get("tool_choice"), dict):
        message.tool_name = body.pop("tool_choice")["function"]["name"]
    if "chat_template_kwargs" in body:
        message.chat_template_kwargs = json.dumps(body.pop("chat_template_kwargs"))
    if "structured_outputs" in body:
        message.decoding.json_schema = json.dumps(body.pop("structured_outputs")["json"])
    return filled(message, body)


def filled(message: M, body: dict[str, Any]) -> M:
    """The message with these fields in the places that the contract has for them."""
    known = wires(GenerateRequest if isinstance(message, pb.GenerateRequest) else ChatMessageRequest)
    for name, value in body.items():
        *groups, field = known[name].proto[0].split(".")
        group: Message = message
        for each in groups:
            group = getattr(group, each)
        if isinstance(value, dict):
            getattr(group, field).update({int(key): item for key, item in value.items()})
        elif isinstance(value, list):
            place = getattr(group, field)
            (place.ids if isinstance(place, pb.TokenIds) else place).extend(value)
        else:
            setattr(group, field, value)
    return message


def _turn(turn: dict[str, Any]) -> pb.ChatMessage:
    more = {"reasoning": turn["reasoning_content"]} if "reasoning_content" in turn else {}
    calls = [pb.ToolCall(id=call["id"], **call["function"]) for call in turn.get("tool_calls", ())]
    plain = {name: value for name, value in turn.items() if name not in ("tool_calls", "reasoning_content")}
    return pb.ChatMessage(**plain, **more, tool_calls=calls)


def _tool(function: dict[str, Any]) -> pb.Tool:
    return pb.Tool(**function | ({"parameters": json.dumps(function["parameters"])} if "parameters" in function else {}))
