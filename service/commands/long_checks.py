"""The checks of `attend check --long`: a stream of each transport that lasts longer than gateways let one last by default."""

import http.client
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from attend.service.commands.probe import PROMPT, CheckFailed, CheckSkipped, Probe, require
from attend.v1 import generation_pb2 as pb
from attend.v1 import generation_pb2_grpc as rpc

LONG_SECONDS = 20.0
"""Gateways cut after 15 s by default."""
MAX_ANSWERS = 8
"""Of one call, which a server takes: a small model ends one answer in two seconds."""
UNDER_LIMITS = 32
"""Tokens of the context that are left to the prompt."""

OpenStream = Callable[[Probe, int], Iterator[bool]]
"""A stream of so many answers as long as the context allows: False for what comes, and True once each answer has ended."""


def held_http(probe: Probe, answers: int) -> Iterator[bool]:
    """Server-sent events of a completion."""
    with probe.events("/v1/completions", _longest(probe) | {"n": answers}) as lines:
        for line in lines:
            if line.startswith(b"data: "):
                yield line == b"data: [DONE]"


def held_grpc(probe: Probe, answers: int) -> Iterator[bool]:
    """Messages of GenerateStream."""
    longest = _longest(probe)["max_tokens"]
    request = pb.GenerateRequest(text=PROMPT, max_tokens=longest, temperature=1.0)
    request.sampling.n, request.stopping.ignore_eos = answers, True
    ended = 0
    with probe.channel() as channel:
        stub: Any = rpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code
        for message in stub.GenerateStream(request, metadata=probe.metadata()):
            ended += sum(output.HasField("finish_info") for output in message.outputs)
            yield ended == answers


def check_long_stream(probe: Probe, open_stream: OpenStream) -> str:
    """Hold a stream for LONG_SECONDS. Raises CheckFailed where it is cut, and CheckSkipped where this model's end sooner."""
    answers = 1
    while True:
        began = time.monotonic()
        ended, lasted = False, 0.0
        try:
            for last in open_stream(probe, answers):
                ended, lasted = last, time.monotonic() - began
                if lasted >= LONG_SECONDS:
                    return f"a stream was held for {lasted:.0f} s"
        except (grpc.RpcError, OSError, http.client.HTTPException) as error:
            told = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.RpcError) else str(error)
            raise CheckFailed(f"the stream was cut after {time.monotonic() - began:.1f} s: {told}") from error
        require(ended, f"the stream was cut after {time.monotonic() - began:.1f} s")
        if answers == MAX_ANSWERS:
            raise CheckSkipped(f"the longest stream of this model ended by itself after {lasted:.0f} s, and was not cut")
        answers = MAX_ANSWERS


def _longest(probe: Probe) -> dict[str, Any]:
    (listed,) = probe.get("/v1/models").json()["data"]
    tokens = listed["max_model_len"] - UNDER_LIMITS
    return {"prompt": PROMPT, "max_tokens": tokens, "temperature": 1.0, "ignore_eos": True, "stream": True}


CHECKS: dict[str, Callable[[Probe], str]] = {
    "long stream": lambda probe: check_long_stream(probe, held_http),
    "long gRPC stream": lambda probe: check_long_stream(probe, held_grpc),
}
