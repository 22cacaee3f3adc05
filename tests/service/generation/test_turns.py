"""Calls that come together begin one after the other, and the rest of the event loop runs between them."""

import asyncio

import pytest

from attend.service.generation.turns import GET_SECONDS
from attend.service.http_api.app import RequestIds
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
    known = methods._known
    methods._known = lambda caller, context: (begin(), known(caller, context))[1]
    return [methods.Generate(b"\x00", Call(begin)) for _ in range(CALLS)]


@pytest.mark.parametrize("transport", [http, grpc])
def test_of_calls_that_come_together_one_begins_each_time_the_event_loop_comes_round(transport):
    count, begun = [0], []

    async def run() -> None:
        await rounds(count, await transport(lambda: begun.append(count[0])))

    asyncio.run(run())
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
        await asyncio.gather(*(call("GET", "/v1/models") for _ in range(200)), call("POST", "/"), call("GET", "/healthz"))
        seconds = {what: at - start for at, what in begun}  # when the last one of each began
        assert seconds["GET /v1/models"] == pytest.approx(199 * GET_SECONDS)
        assert seconds["POST /"] == seconds["GET /healthz"] == 0
        await asyncio.sleep(1)
        at = asyncio.get_running_loop().time()
        await call("GET", "/v1/models")
        assert asyncio.get_running_loop().time() == at, "one alone waits for nothing"

    run_at_once(run())
