"""The attacks of `make faults` on a server that says yes to everything: each runs, and does what its line says."""

import asyncio
import contextlib
import threading
from collections import Counter

import grpc

import loadtest.faults.attacks  # noqa: F401 - puts them into ATTACKS
from loadtest.faults.attack import ATTACKS
from loadtest.faults.attacker import attacker
from loadtest.faults.target import Target
from loadtest.server import Address

NAMES = ("neighbour", "quiet", "open", "limited")


class Yes:
    """HTTP that answers 200 to whatever comes, and gRPC that counts calls and answers with nothing."""

    def __init__(self, answer=b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"):
        self.answer, self.calls, self.metadata = answer, Counter(), {}

    async def http(self, reader, writer):
        ends = (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError)
        with contextlib.closing(writer), contextlib.suppress(*ends):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                _, _, rest = head.partition(b"content-length: ")
                await reader.readexactly(int(rest.partition(b"\r")[0] or b"0"))
                self.calls[head.partition(b"\r")[0]] += 1
                writer.write(self.answer)
                await writer.drain()
                if b"connection: close" in head:
                    break

    def service(self, details):
        self.calls[details.method] += 1
        self.metadata = dict(details.invocation_metadata)

        async def answered(messages, context):
            async for _ in messages:
                yield b""

        return grpc.stream_stream_rpc_method_handler(answered)


class Handler(grpc.GenericRpcHandler):
    def __init__(self, yes):
        self.yes = yes

    def service(self, details):
        return self.yes.service(details)


@contextlib.asynccontextmanager
async def saying_yes(yes, keys=NAMES):
    listening = await asyncio.start_server(yes.http, "127.0.0.1", 0)
    rpcs = grpc.aio.server(handlers=[Handler(yes)])
    port = rpcs.add_insecure_port("127.0.0.1:0")
    await rpcs.start()
    http = listening.sockets[0].getsockname()[1]
    target = Target(Address(f"http://127.0.0.1:{http}", f"127.0.0.1:{port}"), None, "", dict.fromkeys(keys, "secret"))
    target.get = lambda path: (200, "")
    target.processes = lambda: []
    target.reading = threading.Event()
    try:
        yield target
    finally:
        listening.close()
        await rpcs.stop(0)


async def attacked(names, yes, seconds):
    """How each attack ended, and what it checked."""
    found = {}
    async with saying_yes(yes) as target:
        for name in names:
            async with attacker(target) as one:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await ATTACKS[name].run(one)
                found[name] = one
    return found


def test_every_attack_reaches_its_server():
    assert len(ATTACKS) > 55
    found = asyncio.run(attacked(list(ATTACKS), Yes(), 0.15))
    assert found.keys() == ATTACKS.keys()


def test_a_check_that_fails_is_told():
    body = b'{"usage": {"prompt_tokens_details": {"cached_tokens": 100}}}'
    evil = Yes(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    found = asyncio.run(attacked(["odd paths", "guessed prompts"], evil, 6.0))
    values = {name: one.checks[0].value if one.checks else None for name, one in found.items()}
    assert all(value for value in values.values()), values


def test_silent_calls_without_a_key_show_none():
    async def called():
        yes = Yes()
        async with saying_yes(yes) as target, attacker(target) as one:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(4.0):
                    await ATTACKS["silent rpcs without a key"].run(one)
        return yes

    yes = asyncio.run(called())
    assert yes.calls["/attend.v1.GenerationService/Generate"] > 100
    assert "authorization" not in yes.metadata
