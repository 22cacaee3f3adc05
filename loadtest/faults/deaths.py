"""What happens when something dies: each death is tried on a real server of its own, with callers over both transports.

A death is a function of a started server that returns what was measured. Its docstring is its line in the table.
"""

import contextlib
import http.client
import json
import signal
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc

from attend.v1 import generation_pb2 as pb
from attend.v1.generation_pb2_grpc import GenerationServiceStub
from loadtest.faults.judge import Measure
from loadtest.faults.target import CONTROLLER, GCS, HAPROXY, MANAGER, REPLICA, Target, running, start_target, wait_for

Death = Callable[[], list[Measure]]
DEATHS: dict[str, Death] = {}
FAIL_SECONDS, REPLACE_SECONDS, AGAIN_SECONDS = 5.0, 15.0, 5.0
CALL_SECONDS = 60.0
EVERY = 0.25
"""Seconds between two calls of each transport."""
WATCH_SECONDS = 90.0
FAST = ("--drain-seconds", "1")


def death(one: Death) -> Death:
    """Put a function into DEATHS under its name, with spaces."""
    DEATHS[one.__name__.replace("_", " ")] = one
    return one


@dataclass(frozen=True, slots=True)
class Call:
    """One small call: when it began and ended on the monotonic clock, over which transport, and how."""

    began: float
    ended_at: float
    transport: str
    result: str
    """`ok`, `refused` (503 or UNAVAILABLE in our shape, other refusals too), or what else came."""

    @property
    def seconds(self) -> float:
        """How long the caller waited."""
        return self.ended_at - self.began


@dataclass
class Calls:
    """Small calls over both transports, one after the other begun whether or not the one before has ended."""

    target: Target
    completed: list[Call] = field(default_factory=list)

    def over_http(self) -> str:
        """One completion; what came."""
        place = urlsplit(self.target.address.http)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=CALL_SECONDS)
        try:
            connection.request("POST", "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 2}), self.target.headers())
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__
        finally:
            connection.close()
        if answer.status == 200:
            return "ok"
        with contextlib.suppress(ValueError, TypeError, KeyError):
            if json.loads(body)["error"]["message"] and (answer.status != 503 or answer.headers["retry-after"]):
                return "refused" if answer.status in (429, 502, 503) else str(answer.status)
        return f"{answer.status} in another shape"

    def over_grpc(self) -> str:
        """One Generate on a channel of its own; what came."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(self.target.address.grpc, options=options) as channel:
            metadata = [("application", "default")]
            try:
                request = pb.GenerateRequest(text="a", max_tokens=2)
                stub: Any = GenerationServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code
                stub.Generate(request, metadata=metadata, timeout=CALL_SECONDS)
            except grpc.RpcError as error:
                known = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED)
                return "refused" if error.code() in known else str(error.code().name)
            return "ok"

    def one(self, transport: str) -> None:
        """Make a call and note it."""
        began = time.monotonic()
        result = self.over_http() if transport == "HTTP" else self.over_grpc()
        self.completed.append(Call(began, time.monotonic(), transport, result))

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Calls of both transports four times a second for the length of the block, and their ends after it."""
        over = threading.Event()

        def feed(pool: ThreadPoolExecutor) -> None:
            while not over.wait(EVERY):
                for transport in ("HTTP", "gRPC"):
                    pool.submit(self.one, transport)

        with ThreadPoolExecutor(512) as pool:
            feeder = threading.Thread(target=feed, args=(pool,))
            feeder.start()
            try:
                yield
            finally:
                over.set()
                feeder.join()

    def ok_since(self, when: float) -> bool:
        """True if calls of both transports that began after `when` were answered."""
        return {call.transport for call in self.completed if call.result == "ok" and call.began > when} == {"HTTP", "gRPC"}

    def measures_after(self, when: float, again: float, fail: float = FAIL_SECONDS) -> list[Measure]:
        """What callers saw of a fault at `when`: the longest wait, other ends than ours, and when it was over."""
        since = [call for call in self.completed if call.ended_at > when]
        broken = [call.result for call in since if call.began > when and call.result not in ("ok", "refused")]
        back = {
            transport: next((c.ended_at - when for c in self._by_begin(transport, when) if c.result == "ok"), float("inf"))
            for transport in ("HTTP", "gRPC")
        }
        longest = max(since, key=lambda call: call.seconds, default=Call(when, when, "none", "none"))
        seen = f"{longest.transport}, {longest.result}, begun {longest.began - when:+.2f} s"
        return [
            Measure("longest call", longest.seconds, "s", fail, seen),
            Measure("unexpected errors", len(broken), "", None, ", ".join(sorted(set(broken)))),
            Measure("answering again", max(back.values()), "s", again),
        ]

    def _by_begin(self, transport: str, when: float) -> list[Call]:
        return sorted(
            (c for c in self.completed if c.transport == transport and c.began > when), key=lambda call: call.ended_at
        )


def struck(target: Target, what: str, number: signal.Signals, again: float) -> list[Measure]:
    """Send a signal to a process of a server under calls; what the callers saw until it was over."""
    calls = Calls(target)
    with calls.going_on():
        wait_for(lambda: calls.ok_since(0), WATCH_SECONDS)
        when, pid = time.monotonic(), target.send(what, number)
        settled = REPLACE_SECONDS + AGAIN_SECONDS

        def over() -> bool:
            replaced = number is not signal.SIGSTOP or pid not in target.pids(what)
            return replaced and calls.ok_since(when + AGAIN_SECONDS) and time.monotonic() > when + settled

        wait_for(over, WATCH_SECONDS)
    return calls.measures_after(when, again)


TWO = ("--replicas", "2", "--num-threads", "1")
STRUCK: dict[str, tuple[str, Sequence[str], str, signal.Signals, float]] = {
    "replica frozen": ("SIGSTOP of the only replica", (), REPLICA, signal.SIGSTOP, REPLACE_SECONDS),
    "replica killed": ("SIGKILL of the only replica", (), REPLICA, signal.SIGKILL, REPLACE_SECONDS),
    "one of two replicas killed": ("SIGKILL of one of two replicas", TWO, REPLICA, signal.SIGKILL, 1.0),
    "one of two replicas frozen": ("SIGSTOP of one of two replicas", TWO, REPLICA, signal.SIGSTOP, AGAIN_SECONDS),
    "haproxy killed": ("SIGKILL of HAProxy", (), HAPROXY, signal.SIGKILL, AGAIN_SECONDS),
    "controller killed": ("SIGKILL of Serve's controller", (), CONTROLLER, signal.SIGKILL, 1.0),
}
"""What is done, the server's flags, the process that gets the signal, and the seconds in which calls are answered again."""


def striking(about: str, flags: Sequence[str], what: str, number: signal.Signals, again: float) -> Death:
    """A death of STRUCK."""

    def run() -> list[Measure]:
        with running((*FAST, *flags)) as target:
            return struck(target, what, number, again)

    run.__doc__ = about
    return run


DEATHS |= {name: striking(*how) for name, how in STRUCK.items()}


def of_api(target: Target, path: str, body: bytes | None = None, kind: str = "application/json") -> bytes:
    """What a route of files and batches answers to a GET, or to a POST of this body."""
    request = urllib.request.Request(f"{target.address.http}/v1/{path}", body, target.headers() | {"content-type": kind})
    with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
        content: bytes = answer.read()
    return content


@death
def replica_killed_in_the_middle_of_a_batch() -> list[Measure]:
    """SIGKILL of the only replica in the middle of a batch (`batch_folder`)"""
    count, body = 60, {"prompt": "def f(", "max_tokens": 64}
    lines = [{"custom_id": str(at), "method": "POST", "url": "/v1/completions", "body": body} for at in range(count)]
    parts = {'purpose"': "batch", 'file"; filename="lines.jsonl"': "\n".join(map(json.dumps, lines))}
    form = "".join(f'--b\r\ncontent-disposition: form-data; name="{name}\r\n\r\n{text}\r\n' for name, text in parts.items())
    with tempfile.TemporaryDirectory() as folder, running((*FAST, "--batch-folder", folder)) as target:
        file = json.loads(of_api(target, "files", f"{form}--b--\r\n".encode(), "multipart/form-data; boundary=b"))["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        place = f"batches/{json.loads(of_api(target, 'batches', json.dumps(asked).encode()))['id']}"
        wait_for(lambda: json.loads(of_api(target, place))["request_counts"]["completed"] > 0, WATCH_SECONDS)
        found = struck(target, REPLICA, signal.SIGKILL, REPLACE_SECONDS)
        wait_for(lambda: json.loads(of_api(target, place))["status"] == "completed", 4 * WATCH_SECONDS)
        answers = of_api(target, f"files/{json.loads(of_api(target, place))['output_file_id']}/content").splitlines()
        names = [json.loads(line)["custom_id"] for line in answers]
        found.append(Measure("lines without an answer", count - len(set(names)), "", 0))
        return [*found, Measure("lines answered twice", len(names) - len(set(names)), "", 0)]


@death
def haproxy_and_its_manager_killed() -> list[Measure]:
    """SIGKILL of HAProxy's manager (a Serve actor), then of HAProxy"""
    with running(FAST) as target:
        target.send(MANAGER, signal.SIGKILL)
        return struck(target, HAPROXY, signal.SIGKILL, REPLACE_SECONDS)


def left_behind(target: Target, seconds: float) -> list[Measure]:
    """Until no process of the server is left."""
    began = time.monotonic()
    gone = wait_for(lambda: not target.processes(), 2 * seconds)
    return [Measure("until no process is left", time.monotonic() - began if gone else float("inf"), "s", seconds)]


DRIVER = "attend.service.runtime.driver"
ENDING = {
    "driver killed": ("SIGKILL of the driver", DRIVER, 10.0),
    "supervisor killed": ("SIGKILL of `attend serve` itself", "", 10.0),
    "ray killed": ("SIGKILL of Ray's control service, without which nothing can be replaced: the server ends", GCS, 90.0),
}
"""What is done, the process that is killed, and the seconds until no process is left."""


def ending(about: str, what: str, seconds: float) -> Death:
    """A death of ENDING."""

    def run() -> list[Measure]:
        with running(FAST) as target:
            if what:
                target.send(what, signal.SIGKILL)
            else:
                target.process.kill()
            return left_behind(target, seconds)

    run.__doc__ = about
    return run


DEATHS |= {name: ending(*how) for name, how in ENDING.items()}


@death
def stopped_while_it_starts() -> list[Measure]:
    """SIGTERM while the model loads"""
    with start_target(FAST) as target:
        wait_for(lambda: any("Loading" in line for line in target.lines), WATCH_SECONDS)
        target.process.terminate()
        return left_behind(target, 15.0)


@death
def other_users_of_the_machine() -> list[Measure]:
    """no death: sockets of the server that another user of the machine can write to"""
    with running(FAST) as target:
        paths = {each.laddr for one in target.processes() for each in one.net_connections("unix") if each.laddr}
        writable = sorted(path for path in paths if open_to_others(Path(path)))
        return [Measure("sockets", len(writable), "", 0, ", ".join(writable))]


def open_to_others(path: Path) -> bool:
    """True if any user of the machine can reach this socket and write to it."""
    if not path.is_absolute() or not path.is_socket():
        return False
    return bool(path.stat().st_mode & 0o002) and all(folder.stat().st_mode & 0o001 for folder in path.parents)
