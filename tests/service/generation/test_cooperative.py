"""Calls that come together begin one after the other, and the rest of the event loop runs between them."""

import asyncio

import pytest

from attend.service.generation.cooperative import GET_SECONDS, MAX_GETS, yield_to_loop
from attend.service.http_api.request_ids import RequestIds
from tests.fakes import FakeEngine
from tests.service.bad_calls import whole_server
from tests.virtual_time import run_at_once

CALLS = 50


async def rounds(begins: list[int], calls: list) -> None:
    """Run calls together. `begins[0]` counts the rounds of the event loop meanwhile."""
    running = asyncio.gather(*calls)
    while not running.done():
        begins[0] += 1
        await asyncio.sleep(0)
    await running


async def http(begin) -> list:
    async def app(scope, receive, send) -> None:
        begin()

    stamped = RequestIds(app)
    return [stamped({"type": "http", "method": "POST", "path": "/", "headers": []}, None, None) for _ in range(CALLS)]


class Call:
    """A gRPC context that tells when a call asks for its key."""

    def __init__(self, begin) -> None:
        self.begin = begin

    def invocation_metadata(self) -> list:
        return []

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def set_trailing_metadata(self, pairs) -> None:
        pass

    set_code = set_details = set_trailing_metadata


async def grpc(begin) -> list:
    methods = whole_server(FakeEngine()).methods
    methods.is_draining = lambda: begin()  # asked once a call, when it has begun
    return [methods.Generate(b"\x00", Call(begin)) for _ in range(CALLS)]


@pytest.mark.parametrize("transport", [http, grpc])
async def test_of_calls_that_come_together_one_begins_each_time_the_event_loop_comes_round(transport):
    count, begun = [0], []

    await rounds(count, await transport(lambda: begun.append(count[0])))
    assert len(begun) == len(set(begun)) == CALLS


def test_calls_without_a_body_begin_a_few_hundred_a_second_and_delay_no_other_calls():
    begun: list[tuple[float, str]] = []

    async def app(scope, receive, send) -> None:
        begun.append((asyncio.get_running_loop().time(), scope["method"] + " " + scope["path"]))

    async def run() -> None:
        stamped = RequestIds(app)

        def call(method: str, path: str):
            return stamped({"type": "http", "method": method, "path": path, "headers": []}, None, None)

        start = asyncio.get_running_loop().time()
        await asyncio.gather(*(call("GET", "/v1/models") for _ in range(100)), call("POST", "/"), call("GET", "/healthz"))
        seconds = {what: at - start for at, what in begun}  # when the last one of each began
        assert seconds["GET /v1/models"] == pytest.approx(99 * GET_SECONDS)
        assert seconds["POST /"] == seconds["GET /healthz"] == 0
        await asyncio.sleep(1)
        at = asyncio.get_running_loop().time()
        await call("GET", "/v1/models")
        assert asyncio.get_running_loop().time() == at, "one alone waits for nothing"

    run_at_once(run())


def test_a_flood_of_calls_without_a_body_is_refused_and_holds_no_places():
    answered = []

    async def app(scope, receive, send) -> None:
        answered.append(200)

    async def send(message) -> None:
        if message["type"] == "http.response.start":
            answered.append(message["status"])

    async def run() -> None:
        stamped = RequestIds(app)
        scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": []}
        await asyncio.gather(*(stamped(dict(scope), None, send) for _ in range(3 * MAX_GETS)))
        await stamped(dict(scope), None, send)

    run_at_once(run())
    assert answered.count(429) >= MAX_GETS and answered.count(200) > MAX_GETS
    assert answered[-1] == 200


async def test_many_calls_of_one_caller_delay_only_his_own():
    done = []

    async def call(caller):
        await yield_to_loop(caller)
        done.append(caller)

    await asyncio.gather(*(call("many") for _ in range(CALLS)), call("few"), call(None))
    assert done[:3] == ["many", "few", None]
    assert len(done) == CALLS + 2


async def test_who_no_longer_waits_takes_no_round_from_others():
    left = [asyncio.create_task(yield_to_loop("left")) for _ in range(CALLS)]
    await asyncio.sleep(0)
    for task in left:
        task.cancel()
    count = [0]
    await rounds(count, [yield_to_loop("stays")])
    found = count[0]
    assert found <= 4


@pytest.mark.parametrize(
    "other",
    [
        {"headers": [(b"authorization", b"Bearer other")], "client": ("127.0.0.1", 1)},
        {"headers": [(b"x-api-key", b"many")], "client": ("127.0.0.1", 1)},
        {"headers": [(b"authorization", b"Bearer many")], "client": ("127.0.0.2", 1)},
        {"headers": [(b"authorization", b"Bearer many")], "client": ("127.0.0.1", 1), "method": "GET"},
    ],
)
async def test_calls_over_http_are_told_apart_by_their_keys_and_address_and_whether_they_bring_work(other):
    begun = []

    async def app(scope, receive, send):
        begun.append(scope["which"])

    stamped = RequestIds(app)
    many = {
        "type": "http",
        "path": "/",
        "method": "POST",
        "headers": [(b"authorization", b"Bearer many")],
        "client": ("127.0.0.1", 1),
    }
    calls = [many | {"which": "many"} for _ in range(CALLS)] + [
        {"type": "http", "path": "/", "method": "POST", "which": "other"} | other
    ]
    await asyncio.gather(*(stamped(scope, None, None) for scope in calls))
    assert begun.index("other") == 1
