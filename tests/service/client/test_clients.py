"""The client against a real application in this process, whose connections break at every place."""

import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from attend.model.errors import QueueFull, RateLimited, Unavailable
from attend.service.client.errors import Answer, DeadlinePassed, GaveUp, InvalidRequest, OtherFingerprint, Refused
from attend.service.client.grpc import GrpcClient
from attend.service.client.retry import Delta, Policy
from attend.v1 import generation_pb2 as pb
from tests.fakes import END, info
from tests.service.client.cutting import Real, real

TEXT = "aäß漢🎉é!" * 3
TOKENS = (*TEXT.encode(), END)
FAST = Policy(seconds=20.0, first_wait=0.001, longest_wait=0.002)
PATIENT = Policy(seconds=60.0, tries=50, first_wait=0.05, longest_wait=0.1)
"""A channel of gRPC takes a tenth of a second to connect again, and refuses calls until then."""


def rule(request: Any) -> int:
    """TEXT, each character by its bytes; with the seed 5 nothing but the letter z."""
    return ord("z") if request.seed == 5 else TOKENS[min(len(request.output), len(TOKENS) - 1)]


@pytest.fixture(scope="module")
def replica() -> Iterator[Real]:
    with real(rule) as replica:
        yield replica


def whole(deltas: list[Delta]) -> tuple[str, tuple[int, ...], Any, Any]:
    last = deltas[-1]
    tokens = tuple(token for delta in deltas for token in delta.token_ids)
    return "".join(delta.text for delta in deltas), tokens, last.finish_reason, last.stop_reason


def message(prompt: str = "x", max_tokens: int = 100, stop: tuple[str, ...] = (), **sampling: int) -> pb.GenerateRequest:
    request = pb.GenerateRequest(text=prompt, max_tokens=max_tokens, sampling=pb.SamplingParameters(**sampling))
    request.stopping.stop_strings.extend(stop)
    return request


def ask(replica: Real, policy: Policy = FAST, **fields: Any) -> list[Delta]:
    with GrpcClient(replica.target, policy=policy) as client:
        return list(client.stream(message(**fields)))


@pytest.mark.parametrize("fields", [{}, {"stop": ("é!a",)}], ids=str)
def test_an_answer_is_the_uncut_one_wherever_its_connections_break(replica, fields):
    """Each case breaks the first connection, and every other one the second too."""
    proxy = replica.grpc
    uncut = whole(ask(replica, **fields))
    text, size = TEXT.partition("é!a")[0] if fields else TEXT, proxy.passed
    assert (uncut[0], uncut[2]) == (text, "stop")
    for place, at in enumerate([*range(1, size, size // 8), size - 1]):
        proxy.cuts = [at, at // 2] if place % 2 else [at]
        assert whole(ask(replica, PATIENT, **fields)) == uncut, f"cut after {at} of {size} bytes"
        assert len(proxy.cuts) < 1 + place % 2, "the connection was not cut"


def test_a_refusal_for_now_is_tried_again_and_one_for_ever_is_not(replica):
    engine = replica.server.engine
    try:
        for error in (Unavailable("draining"), QueueFull("full")):
            engine.refusal = error
            with pytest.raises(DeadlinePassed, match=str(error)):
                ask(replica, Policy(seconds=0.9))
            with pytest.raises(GaveUp, match=str(error)):
                ask(replica, Policy(tries=1))
        engine.refusal = RateLimited("the key's limit", 7, "key_tokens")
        with pytest.raises(DeadlinePassed, match="the next try would come after"):
            ask(replica, Policy(seconds=6.0))
    finally:
        engine.refusal = None
    with pytest.raises(Refused, match="max_tokens") as caught:
        ask(replica, max_tokens=-1)
    assert caught.value.code == "INVALID_ARGUMENT"


def test_an_answer_does_not_go_on_with_another_fingerprint(replica):
    """The weights change where the first connection breaks. Where in the bytes the first token ends differs from run to run."""
    proxy, engine = replica.grpc, replica.server.engine
    ask(replica)
    size, before, stopped = proxy.passed, engine.info, []
    for eighths in range(3, 8):
        proxy.cuts = [size * eighths // 8]
        try:
            ask(replica, Policy(seconds=20.0, draw=Changing(engine)), seed=1)
        except OtherFingerprint as error:
            stopped.append(error)
        finally:
            engine.info = before
    assert stopped
    for error in stopped:
        got = error.answer
        assert "fp_other" in str(error)
        assert got.token_ids and got.token_ids == TOKENS[: len(got.token_ids)]
        assert TEXT.startswith(got.text)


class Changing(random.Random):
    """Chance that changes the server's weights as the second try is about to begin."""

    def __init__(self, engine: Any) -> None:
        super().__init__(1)
        self.engine = engine

    def uniform(self, low: float, high: float) -> float:
        self.engine.info = info(fingerprint="fp_other")
        return low


def test_a_silent_server_holds_no_caller_beyond_the_deadline(replica):
    engine = replica.server.engine
    engine.held = True
    try:
        with pytest.raises(DeadlinePassed):
            ask(replica, Policy(seconds=0.3))
    finally:
        engine.held = False


def test_the_same_seed_is_asked_for_with_every_try(replica):
    proxy, requests = replica.grpc, replica.server.engine.requests
    requests.clear()
    ask(replica)
    proxy.cuts = [proxy.passed * 2 // 3]
    assert whole(ask(replica))[0] == TEXT
    first, second, third = requests
    assert first.seed != second.seed == third.seed
    assert second.prompt == third.prompt
    requests.clear()
    assert whole(ask(replica, seed=5, max_tokens=3))[0] == "zzz"


def test_whole_answers_are_the_streams_put_together(replica):
    with GrpcClient(replica.target, policy=FAST) as client:
        whole = client.generate(message(seed=1))
    assert whole == Answer(TEXT, TOKENS, 1, "fp_fake", "stop", None, 1)


def test_a_field_whose_stream_could_not_go_on_is_refused_by_name(replica):
    for request in (
        message(n=2),
        pb.GenerateRequest(text="x", response=pb.ResponseOptions(echo=True)),
        pb.GenerateRequest(text="x", response=pb.ResponseOptions(prompt_logprobs=0)),
    ):
        with GrpcClient(replica.target) as client, pytest.raises(InvalidRequest, match="one answer, which can be resumed"):
            client.stream(request)


def test_the_client_imports_nothing_of_the_server():
    code = """
import sys, attend.service.client.grpc
heavy = {"torch", "ray", "fastapi", "uvicorn", "pydantic", "numpy", "tokenizers", "orjson", "prometheus_client"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
ours = {name for name in sys.modules if name.startswith(("attend.model", "attend.service."))}
assert all(name.startswith("attend.service.client") for name in ours), ours
"""
    subprocess.run([sys.executable, "-c", code], check=True)
