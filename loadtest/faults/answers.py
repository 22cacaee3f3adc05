"""Attacks that ask for what they should not get: other callers' texts, a forged id, a way around a check.

Each looks at the answers. Most are done with a few calls.
"""

import asyncio
import itertools
import re
from collections.abc import Sequence

from loadtest.faults.attack import attack
from loadtest.faults.attacker import Attacker
from loadtest.faults.bodies import COMPLETIONS, completion_body

_numbers = itertools.count()
BODY = b'{"prompt":"a","max_tokens":1}'
COUNTED = re.compile(r'^attend_(?:auth_failures_total|requests_total\{.*outcome="invalid")\S* (\S+)$', re.MULTILINE)


async def got(a: Attacker, paths: Sequence[str], host: str = "localhost") -> dict[str, list[int]]:
    """The statuses of a GET of each path as it is written."""
    found = {}
    for path in paths:
        found[path] = statuses(await a.raw(f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode()))
        a.outcomes.update(map(str, found[path]))
    return found


def statuses(answer: bytes) -> list[int]:
    """The statuses of the answers in what came over a connection."""
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3})", answer)]


@attack(ends=True)
async def forged_request_ids(a: Attacker) -> None:
    """ids of requests with spaces, in two headers, after a comma, or of 3000 characters"""
    found = []
    for lines in (
        "x-request-id: good\r\nx-request-id: evil id <x>",
        "x-request-id: good, evil id <x>",
        "x-request-id: evil" + "l" * 3000,
        "x-request-id: evil\tid",
    ):
        head = a.head(COMPLETIONS, len(BODY), connection="close").replace(b"\r\n\r\n", f"\r\n{lines}\r\n\r\n".encode())
        answer = await a.raw(head + BODY)
        a.outcomes.update(map(str, statuses(answer)))
        found += [lines[:40]] if b"evil" in answer else []
    a.check("ids that came back as they were sent", len(found), 0, "; ".join(found))


@attack(("each", "shared"), ends=True)
async def a_second_authorization(a: Attacker) -> None:
    """a known and an unknown key in one call, in both orders"""
    secret = a.target.keys["open"]
    found = []
    for keys in ((secret, "wrong"), ("wrong", secret)):
        lines = "".join(f"authorization: Bearer {key}\r\n" for key in keys)
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
        answer = await a.raw(f"{head}{lines}content-length: {len(BODY)}\r\n\r\n".encode() + BODY)
        found += statuses(answer)
    a.outcomes.update(map(str, found))
    a.check("calls that were not refused with 401", sum(status != 401 for status in found), 0)


@attack(("each", "shared"), ends=True)
async def guessed_keys(a: Attacker) -> None:
    """40 calls with unknown keys to routes that generate nothing: an operator sees them"""

    def count_refusals() -> float:
        return sum(map(float, COUNTED.findall(a.target.get("/metrics")[1])))

    before, lines = await asyncio.to_thread(count_refusals), len(a.target.lines)
    for number in range(20):
        await a.get("/v1/models", authorization=f"Bearer wrong-{number}")
        await a.post("/tokenize", {"prompt": "a"}, authorization=f"Bearer wrong-{number}")
    await asyncio.sleep(1.0)
    seen = max(await asyncio.to_thread(count_refusals) - before, len(a.target.lines) - lines)
    a.check("refusals that neither a counter nor a line tells of", max(0, 40 - seen), 0)


@attack(ends=True)
async def forwarded_addresses(a: Attacker) -> None:
    """24 made-up addresses in X-Forwarded-For before the one that a gateway has added"""
    last = f"203.0.113.{next(_numbers) % 250}"
    given = ", ".join([f"2001:db8:1111:2222:3333:4444:5555:{number}" for number in range(24)] + [last])
    await a.post(COMPLETIONS, completion_body(), **{"x-forwarded-for": given})
    for _ in range(20):
        if any(last in line for line in a.target.lines):
            break
        await asyncio.sleep(0.1)
    told = any(last in line for line in a.target.lines)
    a.check("lines that lack the last address", 0 if told else 1)


@attack(("none",), ends=True)
async def other_hosts(a: Attacker) -> None:
    """calls without a key for another Host, as a page makes them that has bound its name to 127.0.0.1"""
    found = await got(a, ("/v1/models", "/", "/openapi.json"), "evil.example")
    a.check("answers to another Host", sum(200 in each for each in found.values()))


@attack(ends=True)
async def smuggled_requests(a: Attacker) -> None:
    """request smuggling: two lengths, a length beside chunks, a bare line end"""
    hidden = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
    head = a.head(COMPLETIONS, len(BODY) + len(hidden))[:-2]
    length = b"content-length: %d\r\n" % (len(BODY) + len(hidden))
    variants = {
        "a length and chunks": head + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n" + hidden,
        "two lengths": head.replace(length, length + b"content-length: 0\r\n") + b"\r\n" + BODY + hidden,
        "chunked, spelt otherwise": head.replace(length, b"transfer-encoding: xchunked\r\n") + b"\r\n0\r\n\r\n" + hidden,
        "a bare line end": head.replace(length, length.replace(b"\r", b"")) + b"\r\n" + BODY + hidden,
    }
    found = {}
    for name, data in variants.items():
        found[name] = statuses(await a.raw(data, seconds=1.0))
        a.outcomes.update(map(str, found[name]))
    answered = [name for name, seen in found.items() if len(seen) > 1]
    a.check("hidden calls that were answered", len(answered), 0, ", ".join(answered))


@attack(ends=True)
async def odd_paths(a: Attacker) -> None:
    """paths of HAProxy, outside the files, and doubled: none is a route"""
    paths = ("/stats", "/haproxy?stats", "//healthz", "/./healthz", "/static/..%2f..%2fsettings.py")
    found = await got(a, (*paths, "/static/../../settings.py", "/..%2f..%2fetc/passwd", "/v1/models/..%2f..%2fmetrics"))
    answered = [path for path, seen in found.items() if 200 in seen]
    a.check("paths that were answered", len(answered), 0, ", ".join(answered))


@attack()
async def headers_of_our_own(a: Attacker) -> None:
    """calls that bring x-attend-full, x-attend-edge and the like, 8 at a time"""
    own = {"x-attend-full": "1", "x-attend-edge": "1", "x-attend-ignored": "a", "retry-after": "100"}
    found: list[str] = []

    async def one() -> None:
        url, headers = a.target.address.http + COMPLETIONS, a.target.headers("open") | own
        async with a.session.post(url, json=completion_body(), headers=headers) as answer:
            await answer.read()
            a.outcomes[str(answer.status)] += 1
            found.extend(name for name in own if name in answer.headers)

    try:
        await a.repeat(one, 8)
    finally:
        a.check("headers that came back", len(found), 0, ", ".join(sorted(set(found))))


@attack(ends=True)
async def secrets_in_command_lines(a: Attacker) -> None:
    """what another user of the machine reads in the list of processes"""
    secrets = {secret for secret in a.target.keys.values() if len(secret) > 16}
    lines = [" ".join(process.cmdline()) for process in a.target.processes()]
    found = [line[:60] for line in lines if any(secret in line for secret in secrets)]
    a.check("command lines with a key", len(found), 0, "; ".join(found))


@attack(("each",), ends=True)
async def guessed_prompts(a: Attacker) -> None:
    """a key that guesses what another one has asked, by the tokens that were cached"""
    secret = f"our margin of the year {next(_numbers)} is 57 per cent. " + "the rest of the text is the same " * 10
    await a.post(COMPLETIONS, completion_body(prompt=secret), "neighbour")
    url = a.target.address.http + COMPLETIONS
    async with a.session.post(url, json=completion_body(prompt=secret), headers=a.target.headers("open")) as answer:
        usage = (await answer.json(content_type=None)).get("usage", {})
        a.outcomes[str(answer.status)] += 1
    a.check("cached tokens of another key", usage.get("prompt_tokens_details", {}).get("cached_tokens", 0))
