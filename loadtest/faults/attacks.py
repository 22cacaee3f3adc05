"""Attacks of one caller on the others: each is tried on a real server beside eight streams.

An attack is a coroutine that goes on until it is cancelled. Its docstring is its line in the table.
"""

import asyncio
import contextlib
import itertools
import resource
from collections.abc import Awaitable, Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attend.v1 import generation_pb2 as pb
from loadtest.faults.attacker import PAUSE, Attacker

Attack = Callable[[Attacker], Awaitable[None]]
ATTACKS: dict[str, Attack] = {}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MIB = 1 << 20
MANY_CONNECTIONS = 4096
_numbers = itertools.count()


def attack(one: Attack) -> Attack:
    """Put a coroutine into ATTACKS under its name, with spaces."""
    ATTACKS[one.__name__.replace("_", " ")] = one
    return one


def slow_schema() -> dict:
    """A JSON schema that takes about a second to compile or to be refused, another one each time."""
    number = 100_000_007 + 2 * next(_numbers)
    schema = {"type": "integer", "multipleOf": number}
    return {"prompt": "a", "max_tokens": 4, "structured_outputs": {"json": schema}}


@attack
async def bad_words(a: Attacker) -> None:
    """64 bad words for 16 prompts of 8 answers"""
    words = [f"word number {index} of the forbidden ones" for index in range(64)]
    body = {"prompt": [f"prompt {index}" for index in range(16)], "n": 8, "max_tokens": 1, "bad_words": words}
    await a.again(lambda: a.post(COMPLETIONS, body), 2)


@attack
async def bad_words_of_a_limited_key(a: Attacker) -> None:
    """the same with a key that is at its limit"""
    words = [f"word number {index} of the forbidden ones" for index in range(64)]
    body = {"prompt": [f"prompt {index}" for index in range(16)], "n": 8, "max_tokens": 1, "bad_words": words}
    await a.again(lambda: a.post(COMPLETIONS, body, "limited"), 8)


@attack
async def slow_grammars(a: Attacker) -> None:
    """64 schemas at a time that take a second each to compile"""
    await a.again(lambda: a.post(COMPLETIONS, slow_schema()), 64)


@attack
async def slow_grammars_of_a_limited_key(a: Attacker) -> None:
    """322 of them with a key that is at its limit"""
    await a.again(lambda: a.post(COMPLETIONS, slow_schema(), "limited"), 322)


@attack
async def rpcs_of_a_limited_key(a: Attacker) -> None:
    """322 gRPC calls at a time with a key that is at its limit"""
    request = pb.GenerateRequest(text="a", max_tokens=4)
    await a.again(lambda: a.rpc("Generate", request, "limited"), 322)


@attack
async def one_failing_grammar(a: Attacker) -> None:
    """the same schema that takes too long, 32 at a time"""
    body = slow_schema()
    await a.again(lambda: a.post(COMPLETIONS, body), 32)


@attack
async def standard_error_unread(a: Attacker) -> None:
    """refused calls while nobody reads the server's lines"""
    a.target.reading.clear()
    try:
        await a.again(lambda: a.post(COMPLETIONS, {"prompt": 1}), 16)
    finally:
        a.target.reading.set()


@attack
async def idle_connections(a: Attacker) -> None:
    """4096 connections that say nothing"""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(MANY_CONNECTIONS):
                with contextlib.suppress(OSError):
                    await stack.enter_async_context(a.connection())
                    a.outcomes["connected"] += 1
            await asyncio.Event().wait()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@attack
async def kept_connections(a: Attacker) -> None:
    """1024 connections that ask once and are then kept open"""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(1024):
            with contextlib.suppress(OSError):
                reader, writer = await stack.enter_async_context(a.connection())
                writer.write(b"GET /healthz HTTP/1.1\r\nhost: attend\r\n\r\n")
                a.outcomes[(await reader.readline()).decode().split()[1] if not reader.at_eof() else "cut"] += 1
        await asyncio.Event().wait()


@attack
async def slow_heads(a: Attacker) -> None:
    """256 connections that send a byte of their head at a time"""

    async def one() -> None:
        async with a.connection() as (_, writer):
            for byte in a.head(COMPLETIONS, 10):
                writer.write(bytes([byte]))
                await asyncio.sleep(0.2)

    await a.again(one, 256)


@attack
async def slow_bodies(a: Attacker) -> None:
    """256 connections that send a byte of their body at a time"""

    async def one() -> None:
        async with a.connection() as (_, writer):
            writer.write(a.head(COMPLETIONS, MIB))
            while True:
                writer.write(b" ")
                await asyncio.sleep(0.2)

    await a.again(one, 256)


@attack
async def slow_readers(a: Attacker) -> None:
    """16 answers of a MB or more that nobody reads"""
    body = b'{"prompt":"def f","max_tokens":900,"ignore_eos":true,"stream":true,"logprobs":5,"n":1}'

    async def one() -> None:
        async with a.connection() as (_, writer):
            writer.write(a.head(COMPLETIONS, len(body)) + body)
            a.outcomes["unread"] += 1
            await asyncio.sleep(5)

    await a.again(one, 16)


@attack
async def callers_who_leave(a: Attacker) -> None:
    """streams that are given up as soon as they begin, 32 at a time"""
    body = b'{"prompt":"def f","max_tokens":900,"ignore_eos":true,"stream":true}'

    async def one() -> None:
        async with a.connection() as (reader, writer):
            writer.write(a.head(COMPLETIONS, len(body)) + body)
            await reader.readline()
            a.outcomes["left"] += 1

    await a.again(one, 32)


@attack
async def large_log_probabilities(a: Attacker) -> None:
    """prompt_logprobs at its limit: answers of 55 MB, 2 at a time"""
    body = {"prompt": [[7] * 1000] * 40, "max_tokens": 1, "prompt_logprobs": 20}
    await a.again(lambda: a.post(COMPLETIONS, body), 2)


@attack
async def log_probabilities_of_every_answer(a: Attacker) -> None:
    """128 answers with 5 log probabilities each, 2 at a time"""
    body = {"prompt": ["def f("] * 16, "n": 8, "max_tokens": 64, "logprobs": 5, "ignore_eos": True}
    await a.again(lambda: a.post(COMPLETIONS, body), 2)


@attack
async def refused_token_ids(a: Attacker) -> None:
    """3.9 MB of token ids over gRPC, the last of them wrong"""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[300] * 1_900_000 + [1 << 40]), max_tokens=1)
    await a.again(lambda: a.rpc("Generate", request), 4)


@attack
async def health_watches(a: Attacker) -> None:
    """watches of grpc.health.v1 that need no key, 512 at a time"""
    async with grpc.aio.insecure_channel(a.target.address.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def one() -> None:
            try:
                async for _ in stub.Watch(health_pb2.HealthCheckRequest(), metadata=[("application", "default")]):
                    a.outcomes["watching"] += 1
            except grpc.RpcError as error:
                a.outcomes[error.code().name] += 1

        await a.again(one, 512)


@attack
async def wrong_keys(a: Attacker) -> None:
    """calls with a key that is not known, 32 at a time"""
    await a.again(lambda: a.post(COMPLETIONS, {"prompt": "a"}, authorization="Bearer wrong"), 32)


@attack
async def wrong_bodies(a: Attacker) -> None:
    """1 MiB of JSON that is wrong half a million times"""
    body = b'{"prompt":[' + b"{}," * (MIB // 3 - 10) + b"{}]}"
    await a.again(lambda: a.post(COMPLETIONS, body), 4)


@attack
async def deep_bodies(a: Attacker) -> None:
    """1 MiB of brackets"""
    body = b'{"prompt":' + b"[" * (MIB - 20)
    await a.again(lambda: a.post(COMPLETIONS, body), 4)


@attack
async def stop_strings(a: Attacker) -> None:
    """4 stop strings of 256 characters that nearly match, for 64 answers"""
    stops = [" " * 255 + mark for mark in "abcd"]
    body = {"prompt": [" " * 200] * 8, "n": 8, "max_tokens": 128, "ignore_eos": True, "stop": stops, "logit_bias": {"220": 50}}
    await a.again(lambda: a.post(COMPLETIONS, body), 2)


@attack
async def long_chats(a: Attacker) -> None:
    """chats of 20,000 messages"""
    body = {"messages": [{"role": "user", "content": "hello there"}] * 20_000, "max_tokens": 1}
    await a.again(lambda: a.post(CHAT, body), 4)


@attack
async def long_prompts(a: Attacker) -> None:
    """prompts of 900 tokens that nobody has cached, 16 at a time"""

    async def one() -> None:
        number = next(_numbers)
        prompt = [100 + (number * 7919 + index * 31) % 7000 for index in range(900)]
        await a.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1})

    await a.again(one, 16)


@attack
async def texts_too_long(a: Attacker) -> None:
    """1 MiB of text to be tokenized, 8 at a time"""
    text = ("lorem ipsum dolor " * (MIB // 18))[: MIB - 100]
    await a.again(lambda: a.post("/tokenize", {"prompt": text}), 8)


@attack
async def many_prompts(a: Attacker) -> None:
    """lists of 128 prompts of 4000 characters, 4 at a time"""
    body = {"prompt": [f"{index} " + "word " * 790 for index in range(128)], "max_tokens": 1}
    await a.again(lambda: a.post(COMPLETIONS, body), 4)


@attack
async def half_characters(a: Attacker) -> None:
    """answers resumed after 1000 bytes that are no characters"""
    tokens = [128 + index % 64 for index in range(1000)]
    body = {"prompt": "a", "max_tokens": 1001, "resume_token_ids": tokens, "n": 8}
    await a.again(lambda: a.post(COMPLETIONS, body), 4)


@attack
async def scrapes(a: Attacker) -> None:
    """/metrics, 32 at a time, which needs no key"""
    await a.again(lambda: a.get("/metrics"), 32)


@attack
async def new_connections(a: Attacker) -> None:
    """a new connection for each /healthz, 64 at a time"""
    await a.again(lambda: a.get("/healthz", connection="close"), 64)


@attack
async def grpc_connections(a: Attacker) -> None:
    """a new gRPC connection for each call, 16 at a time"""

    async def one() -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(a.target.address.grpc, options=options) as channel:
            try:
                request = health_pb2.HealthCheckRequest()
                await health_pb2_grpc.HealthStub(channel).Check(request, metadata=[("application", "default")], timeout=10)
                a.outcomes["OK"] += 1
            except grpc.RpcError as error:
                a.outcomes[error.code().name] += 1
        await asyncio.sleep(PAUSE)

    await a.again(one, 16)


@attack
async def many_answers(a: Attacker) -> None:
    """calls of 128 answers of 200 tokens, 4 at a time"""
    body = {"prompt": ["def f("] * 16, "n": 8, "max_tokens": 200, "ignore_eos": True}
    await a.again(lambda: a.post(COMPLETIONS, body), 4)


@attack
async def explained_texts(a: Attacker) -> None:
    """/v1/attention of 512 tokens with as many weights as an answer may hold, 8 at a time"""
    tokens = [128 + index % 512 for index in range(512)]
    body = {"prompt": tokens, "layers": [0], "heads": [0, 1, 2], "top_logprobs": 20, "logit_lens": 5}
    await a.again(lambda: a.post("/v1/attention", body), 8)


@attack
async def explained_texts_over_grpc(a: Attacker) -> None:
    """the same over gRPC, with all heads of short texts"""
    request = pb.ExplainRequest(text="def f(x):\n    return x\n" * 3, scores=True, logit_lens=5)
    await a.again(lambda: a.rpc("Explain", request), 8)
