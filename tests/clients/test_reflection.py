"""A gRPC client that knows no more than the address: it asks the server what there is and how to say it."""

from typing import Any

import pytest

from tests.service.server import Server

grpc = pytest.importorskip("grpc")
pytest.importorskip("grpc_reflection")
pytestmark = [pytest.mark.ray, pytest.mark.clients]

from google.protobuf import descriptor_pool, json_format, message_factory  # noqa: E402  # only where grpc is
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (  # noqa: E402
    ProtoReflectionDescriptorDatabase,
)

SERVICE = "attend.v1.GenerationService"
ASK = {"text": "def fibonacci(n):", "max_tokens": 24, "temperature": 0}


class Reflected:
    """Calls by name, with dictionaries in and out."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.database = ProtoReflectionDescriptorDatabase(channel)
        self.pool = descriptor_pool.DescriptorPool(self.database)

    def call(self, name: str, fields: dict, service: str = SERVICE) -> list[dict]:
        """Every answer of one call; one alone where the method does not stream."""
        method = self.pool.FindServiceByName(service).methods_by_name[name]
        request, response = (message_factory.GetMessageClass(kind) for kind in (method.input_type, method.output_type))
        make = self.channel.unary_stream if method.server_streaming else self.channel.unary_unary
        answer = make(f"/{service}/{name}", request.SerializeToString, response.FromString)(
            json_format.ParseDict(fields, request()), timeout=60
        )
        answers = answer if method.server_streaming else [answer]
        return [json_format.MessageToDict(each, preserving_proto_field_name=True) for each in answers]


@pytest.fixture
def reflected(server: Server):
    with grpc.insecure_channel(server.target) as channel:
        yield Reflected(channel)


def over_http(server: Server, **body: object) -> dict:
    return server.post("/v1/completions", **body)[2]


def test_the_server_names_its_services_and_their_methods(reflected):
    services = set(reflected.database.get_services())
    methods = reflected.pool.FindServiceByName(SERVICE).methods
    assert {SERVICE, "grpc.health.v1.Health"} <= services
    assert {method.name for method in methods if method.server_streaming} == {"GenerateStream", "ChatStream"}
    assert not any(method.client_streaming for method in methods)


def test_messages_built_from_reflection_get_the_answer_of_http(server, reflected):
    fields = {"logprobs": 2, "return_token_ids": True}
    document = over_http(server, prompt=ASK["text"], max_tokens=24, temperature=0, **fields)
    asked = ASK | {"response": {"logprobs": True, "top_logprobs": 2, "output_token_ids": True, "prompt_token_ids": True}}
    (whole,) = reflected.call("Generate", asked)
    (choice,), (output,) = document["choices"], whole["outputs"]
    assert output["text"] == choice["text"]
    assert [int(token) for token in output["token_ids"]] == choice["token_ids"]
    assert [int(token) for token in whole["prompt_info"]["token_ids"]] == choice["prompt_token_ids"]
    assert output["logprobs"] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-6)
    assert output["finish_info"]["finish_reason"] == "FINISH_REASON_LENGTH"
    assert int(output["finish_info"]["num_output_tokens"]) == document["usage"]["completion_tokens"] == 24
    assert whole["system_fingerprint"] == document["system_fingerprint"]


def test_the_pieces_of_a_stream_are_the_whole_answer_and_their_counts_totals(reflected):
    (whole,) = reflected.call("Generate", ASK)
    pieces = [output for answer in reflected.call("GenerateStream", ASK) for output in answer.get("outputs", [])]
    counts = [int(piece["num_tokens"]) for piece in pieces]
    assert "".join(piece.get("text", "") for piece in pieces) == whole["outputs"][0]["text"]
    assert counts == sorted(counts)
    assert counts[-1] == 24
    assert ["finish_info" in piece for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_tokens_of_reflected_calls_come_back_as_their_text(reflected):
    (tokens,) = reflected.call("Tokenize", {"text": ASK["text"]})
    assert reflected.call("Detokenize", {"token_ids": tokens["token_ids"]}) == [{"text": ASK["text"]}]
    assert reflected.call("Check", {}, "grpc.health.v1.Health") == [{"status": "SERVING"}]


def test_an_error_names_the_field_that_reflection_showed(reflected):
    with pytest.raises(grpc.RpcError) as caught:
        reflected.call("Generate", ASK | {"sampling": {"top_p": 2}})
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "top_p" in caught.value.details()
