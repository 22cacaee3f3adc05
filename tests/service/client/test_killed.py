"""Replicas of a real server die by kill -9 in the middle of a stream; the client's answer is the uncut one.

ATTEND_TEST_KILLS is how often.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from attend.service.client.grpc import GrpcClient
from attend.service.client.retry import Delta, Policy
from attend.v1 import generation_pb2 as pb
from tests.service.server import Server, running

pytestmark = [pytest.mark.ray, pytest.mark.alone]

KILLS = int(os.environ.get("ATTEND_TEST_KILLS", "1"))
PROMPT, TOKENS, SEED = "def f(x):", 200, 7
POLICY = Policy(seconds=120.0)


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two replicas in float32, where every replica gives the same bits."""
    flags = ("--dtype", "float32", "--replicas", "2", "--num-threads", "1")
    with running(tmp_path_factory.mktemp("killed") / "log", *flags) as server:
        yield server


Sleep = Callable[[float], None]


def answer(server: Server, sleep: Sleep = time.sleep) -> Iterator[Delta]:
    request = pb.GenerateRequest(text=PROMPT, max_tokens=TOKENS, temperature=0.8)
    request.stopping.ignore_eos, request.sampling.seed = True, SEED
    with GrpcClient(server.target, policy=POLICY, sleep=sleep) as client:
        yield from client.stream(request)


def ticks(server: Server) -> dict[int, int]:
    """Processor time of each replica, by process."""
    found = {}
    for pid in server.processes():
        with contextlib.suppress(OSError):
            if b"ray::ServeReplica" in Path(f"/proc/{pid}/cmdline").read_bytes():
                words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                found[pid] = int(words[11]) + int(words[12])
    return found


def busiest(server: Server, before: dict[int, int]) -> list[int]:
    """The replica that has computed most since `before`: the one with the stream, or else one that starts."""
    return [pid for _, pid in sorted((spent - before.get(pid, 0), pid) for pid, spent in ticks(server).items())][-1:]


def test_an_answer_whose_replica_is_killed_is_the_uncut_one(replicated):
    uncut = list(answer(replicated))
    tokens, text = [token for delta in uncut for token in delta.token_ids], "".join(delta.text for delta in uncut)
    assert len(tokens) == TOKENS
    chance, silences = random.Random(KILLS), []
    for _ in range(KILLS):
        place, before, pauses = chance.randrange(20, 100), ticks(replicated), []

        def pause(seconds: float, pauses: list[float] = pauses) -> None:
            pauses.append(seconds)
            time.sleep(seconds)

        got, said, killed, moments = [], "", 0, []
        for delta in answer(replicated, pause):
            got, said = got + list(delta.token_ids), said + delta.text
            moments.append(time.monotonic())
            if not pauses and len(got) >= place + 40 * killed:
                for pid in busiest(replicated, before):  # if it was one that starts, the next is the stream's
                    os.kill(pid, signal.SIGKILL)
                killed += 1
        assert (got, said) == (tokens, text)
        assert pauses, "the stream was not broken"
        silences.append(max(later - earlier for earlier, later in pairwise(moments)))
    print(f"{KILLS} of {KILLS}, longest silences {[round(silence, 2) for silence in sorted(silences)]} s")
