"""All attacks of one caller on the others: ATTACKS has those of the modules below, and those that ask for what they should not
get. What an application refuses whatever is in front of it is tested in tests/service.
"""

import itertools
import re

from loadtest.faults import bodies, rpc, wire
from loadtest.faults.attack import ATTACKS, attack
from loadtest.faults.attacker import Attacker
from loadtest.faults.bodies import COMPLETIONS, completion_body

__all__ = ["ATTACKS", "bodies", "rpc", "wire"]

_numbers = itertools.count()


@attack(ends=True)
async def odd_paths(a: Attacker) -> None:
    """paths of HAProxy, outside the files, and doubled: none is a route"""
    paths = ("/stats", "/haproxy?stats", "//healthz", "/./healthz", "/static/..%2f..%2fsettings.py")
    answered = []
    for path in (*paths, "/static/../../settings.py", "/..%2f..%2fetc/passwd", "/v1/models/..%2f..%2fmetrics"):
        answer = await a.raw(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        statuses = re.findall(rb"HTTP/1\.[01] (\d{3})", answer)
        a.outcomes.update(status.decode() for status in statuses)
        answered += [path] if b"200" in statuses else []
    a.check("paths that were answered", len(answered), 0, ", ".join(answered))


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
