"""Defaults of sampling: the caller's word goes before the checkpoint's, and that before our own, on both transports."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from attend.model.generation_config import NO_DEFAULTS, Defaults, read_defaults
from attend.model.text.chat import ChatTemplate
from attend.service.contract import commands, messages
from attend.service.contract.requests import ChatRequest, CompletionRequest
from attend.service.records import Command
from attend.service.settings import read_settings
from attend.v1 import generation_pb2 as pb
from attend.v1.generation_pb2_grpc import GenerationServiceStub
from tests.fakes import END, build_server, grpc_channel

FILE = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}
ASKED = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
DEFAULTS = Defaults({name: FILE[name] for name in list(FILE)[:4]}, {"repetition_penalty": 1.1})


def completion(asked: dict[str, Any], *defaults: Defaults) -> Command:
    return commands.to_command(CompletionRequest.read({"prompt": "a"} | asked), "id", *defaults)


def conversation(asked: dict[str, Any], *defaults: Defaults) -> Command:
    body = ChatRequest.read({"messages": [{"role": "user", "content": "a"}]} | asked)
    return commands.to_command(body, "id", *(defaults or (NO_DEFAULTS,)), ChatTemplate("x"))


def message(asked: dict[str, Any], *defaults: Defaults) -> Command:
    request = pb.GenerateRequest(text="a")
    places = {"temperature": request, "repetition_penalty": request.decoding}
    for name, value in asked.items():
        setattr(places.get(name, request.sampling), name, value)
    return commands.to_command(messages.generation(request), "id", *defaults)


def drawn_by(command: Command) -> dict[str, float]:
    return Defaults(
        {name: getattr(command.sampling, name) for name in list(FILE)[:4]},
        {"repetition_penalty": command.decoding.repetition_penalty},
    ).values()


transports = pytest.mark.parametrize("read", [completion, conversation, message])


@transports
def test_without_defaults_of_the_checkpoint_ours_hold(read: Callable[..., Command]):
    assert drawn_by(read({})) == NO_DEFAULTS.values()


@transports
@pytest.mark.parametrize("name", FILE)
def test_what_a_caller_says_goes_before_the_checkpoints_defaults_field_by_field(read: Callable[..., Command], name: str):
    assert drawn_by(read({}, DEFAULTS)) == FILE
    assert drawn_by(read({name: ASKED[name]}, DEFAULTS)) == FILE | {name: ASKED[name]}


async def test_the_served_model_shows_its_defaults_and_its_stop_tokens_and_every_transport_draws_by_them():
    server = build_server(template=ChatTemplate("x"), defaults=DEFAULTS)

    say = {"max_tokens": 1, "top_k": 7}
    async with server.http() as client, grpc_channel(server) as channel:
        await client.post("/v1/completions", json={"prompt": "a", **say})
        await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], **say})
        sampling = pb.SamplingParameters(top_k=7)
        await GenerationServiceStub(channel).Generate(pb.GenerateRequest(text="a", max_tokens=1, sampling=sampling))
        found = (await client.get("/v1/models/fake")).json()
    assert (found["default_sampling"], found["stop_token_ids"]) == (FILE, [END])
    drawn = [
        (each.sampling.temperature, each.sampling.top_k, each.decoding.repetition_penalty) for each in server.engine.requests
    ]
    assert [(0.6, 7, 1.1)] * 3 == drawn


def test_the_setting_decides_whether_the_file_is_read_and_a_flag_goes_before_the_environment(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(FILE), encoding="utf-8")
    environment = {"ATTEND_GENERATION_CONFIG": "none"}
    for flags, variables, wanted in (
        ({}, {}, FILE),
        ({"generation_config": "none"}, {}, NO_DEFAULTS.values()),
        ({}, environment, NO_DEFAULTS.values()),
        ({"generation_config": "model"}, environment, FILE),
    ):
        assert read_defaults(tmp_path, read_settings(flags, variables).generation_config).values() == wanted
