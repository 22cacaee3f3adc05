"""A server that is told to end still answers calls for a while, so that no caller meets a refusal on its way elsewhere."""

import contextlib
import http.client
import json
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attend.v1 import generation_pb2 as pb
from attend.v1.generation_pb2_grpc import GenerationServiceStub
from tests.service.server import Server, running, wait_for
from tests.service.switch import Switch, switch
from tests.service.test_end_to_end import LONG, PROMPT, post
from tests.service.test_ends import read_all

pytestmark = [pytest.mark.ray, pytest.mark.alone]

LINGER = 6.0
FORGETS_SECONDS = 1.0
"""How long new connections still go to a server that is ready no more."""
PAUSE = 0.3
BODY = {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True}
ASKED = pb.GenerateRequest(text=PROMPT, max_tokens=3)
JSON = {"content-type": "application/json"}
SLOW = ("--num-threads", "1", "--dtype", "float32", "--backend", "torch")


def over_http(connection: http.client.HTTPConnection, **more: object) -> bool:
    """One call; whether its answer is whole. It connects anew where the last answer has ended the connection."""
    connection.request("POST", "/v1/completions", json.dumps(BODY | more), JSON)
    answer = connection.getresponse()
    text = answer.read()
    return answer.status == 200 and (text.endswith(b"data: [DONE]\n\n") if more else b"finish_reason" in text)


def kept_http(one: Switch, **more: object) -> Iterator[bool]:
    """Calls on one connection, for as long as that is kept."""
    with closing(http.client.HTTPConnection("127.0.0.1", one.http, timeout=60)) as connection:
        while True:
            yield over_http(connection, **more)


def new_http(one: Switch | Server) -> Iterator[bool]:
    """Calls with a connection each."""
    while True:
        with closing(http.client.HTTPConnection("127.0.0.1", one.http, timeout=60)) as connection:
            yield over_http(connection)


def kept_grpc(one: Switch, *, stream: bool = False) -> Iterator[bool]:
    """Calls on one channel."""
    with grpc.insecure_channel(f"127.0.0.1:{one.grpc}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = GenerationServiceStub(channel)
        while True:
            last = [*stub.GenerateStream(ASKED, timeout=60)][-1] if stream else stub.Generate(ASKED, timeout=60)
            yield bool(last.outputs)


def new_grpc(one: Switch) -> Iterator[bool]:
    """Calls with a channel each."""
    while True:
        yield next(kept_grpc(one))


CALLERS: dict[str, tuple[Callable[[Switch], Iterator[bool]], float]] = {
    "kept HTTP": (kept_http, PAUSE),
    "kept HTTP, now and then": (kept_http, 1.0),
    "kept HTTP, at once": (kept_http, 0.0),
    "kept HTTP, streams": (lambda one: kept_http(one, stream=True), PAUSE),
    "new HTTP": (new_http, PAUSE),
    "kept gRPC": (kept_grpc, PAUSE),
    "kept gRPC, now and then": (kept_grpc, 1.0),
    "kept gRPC, at once": (kept_grpc, 0.0),
    "kept gRPC, streams": (lambda one: kept_grpc(one, stream=True), PAUSE),
    "new gRPC": (new_grpc, PAUSE),
}


def call_on(name: str, one: Switch, ends: dict[str, list[str]], over: threading.Event) -> None:
    """Calls of one kind until `over` is set, and how each ended."""
    kind, pause = CALLERS[name]
    while not over.is_set():  # a failure ends a generator
        calls = kind(one)
        try:
            while not over.wait(pause):
                ends[name].append("ok" if next(calls) else "not whole")
        except (OSError, http.client.HTTPException) as error:
            ends[name].append(repr(error))
        except grpc.RpcError as error:
            ends[name].append(f"{error.code()}: {error.details()}")
        finally:
            calls.close()


def streams(server: Server) -> list[bool]:
    """Long streams of a caller who does not move, one after the other, until one is refused; whether each was whole."""
    ends = []
    with contextlib.suppress(OSError):  # refused
        while True:
            *_, last, _, done, _ = post(server, prompt=PROMPT, stream=True, **LONG)
            ends.append(done == b"data: [DONE]\n" and b'"stop_reason":"abort"' not in last)
    return ends


def models(folder: Path) -> tuple[str, ...]:
    (folder / "models.yaml").write_text("models: [{name: attend-default, pin: true}]")
    return ("--models", str(folder / "models.yaml"))


WAYS = {"single": lambda folder: ("--single",), "models": models, "ray": lambda folder: ()}
"""What the server is that ends; its successor is one process."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", ["single", "models", pytest.param("ray", marks=pytest.mark.long)])
def test_no_call_fails_while_callers_move_to_a_successor(tmp_path: Path, way: str) -> None:
    lingers = ("--linger-seconds", str(LINGER))
    ends: dict[str, list[str]] = {name: [] for name in CALLERS if way != "ray" or not name.startswith("kept gRPC")}
    over = threading.Event()
    with ExitStack() as stack:
        first = stack.enter_context(running(tmp_path / "first", *WAYS[way](tmp_path), *lingers))
        second = stack.enter_context(running(tmp_path / "second", "--single", *lingers))
        one = stack.enter_context(switch(first))
        pool = stack.enter_context(ThreadPoolExecutor(len(CALLERS) + 2))
        stack.callback(over.set)
        calling = [pool.submit(call_on, name, one, ends, over) for name in ends]
        assert wait_for(lambda: all(len(each) > 2 for each in ends.values()), 60), ends
        stays = pool.submit(streams, first)
        ending = pool.submit(first.stop, within=60)
        assert wait_for(lambda: first.get("/readyz")[0] == 503)
        time.sleep(FORGETS_SECONDS)
        one.server = second
        seconds = ending.result()
        counts = {name: len(each) for name, each in ends.items()}
        assert wait_for(lambda: all(len(each) > counts[name] + 2 for name, each in ends.items()), 60), ends
        over.set()
        for each in calling:
            each.result()
    failures = {name: bad for name, each in ends.items() if (bad := [end for end in each if end != "ok"])}
    assert failures == {}
    assert first.process.returncode == 0
    assert all(stays.result()) and stays.result(), "the drain lets what was begun end"
    assert LINGER <= seconds


def health_of(server: Server) -> int:
    with grpc.insecure_channel(server.target) as channel:
        return int(health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30).status)


def resting(server: Server) -> http.client.HTTPConnection:
    """A connection that has carried a call, and is kept."""
    made = http.client.HTTPConnection("127.0.0.1", server.http, timeout=10)
    made.request("GET", "/v1/models")
    made.getresponse().read()
    return made


def test_each_further_signal_ends_what_the_server_is_at(tmp_path: Path) -> None:
    """The first begins the lingering, the second the drain, and the third ends the calls."""
    flags = ("--single", "--linger-seconds", "600", "--drain-seconds", "600", *SLOW)
    with running(tmp_path / "log", *flags) as server, ThreadPoolExecutor() as pool, ExitStack() as stack:
        calls, rests = (stack.enter_context(closing(resting(server))) for _ in range(2))
        begun = threading.Event()
        lines = pool.submit(read_all, post(server, prompt=PROMPT, stream=True, **LONG), begun)
        assert begun.wait(60)
        server.process.send_signal(signal.SIGTERM)
        assert wait_for(lambda: server.get("/readyz") == (503, "draining\n"))
        assert "new calls are answered for 600 s more" in server.output()
        assert health_of(server) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert next(new_http(server))
        assert over_http(calls), "a connection that rests is kept, and its next call answered"
        assert calls.sock is None, "that answer says that it is the last one"
        assert rests.sock is not None and not select.select([rests.sock], [], [], 0)[0]
        server.process.send_signal(signal.SIGINT)
        assert wait_for(lambda: refuses(server))
        assert wait_for(lambda: "may end within 600 s; Ctrl-C again ends them at once" in server.output())
        assert rests.sock.recv(1) == b"", "what rests is closed once new calls are refused"
        assert not lines.done()
        server.stop(signal.SIGTERM)
    *_, last, _, done, _ = lines.result()
    assert (b'"stop_reason":"abort"' in last, done) == (True, b"data: [DONE]\n")
    assert server.process.returncode == 128 + signal.SIGTERM


def refuses(server: Server) -> bool:
    with closing(http.client.HTTPConnection("127.0.0.1", server.http, timeout=60)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(BODY), JSON)
        return connection.getresponse().status == 503
