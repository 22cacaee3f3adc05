"""What the numbers of a report hold for: who made them, when, with which seed, on what machine, of which servers."""

import json
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from loadtest.bench.machine import machine
from loadtest.options import api_key

TREE = Path(__file__).parents[1]
ANSWER_SECONDS = 10.0


def provenance(seed: int, servers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The same fields for each report. `servers`: what each said of itself (`identity`), by name."""
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "attend": own_version(),
        "seed": seed,
        "machine": machine(),
        "servers": dict(servers),
    }


def own_version() -> str:
    """That of the installed package, with the revision of the tree where git knows it."""
    try:
        number = version("attend-server")
    except PackageNotFoundError:
        number = "not installed"
    git = ["git", "-C", str(TREE), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        revision = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return number
    return f"{number} ({revision})"


def identity(url: str, ca_file: str = "") -> dict[str, Any]:
    """What a server of OpenAI's protocol says of itself; None for what it does not say.

    `ca_file` names who signs the server's certificate.
    """
    context = ssl.create_default_context(cafile=ca_file) if ca_file else None
    headers = {"authorization": f"Bearer {api_key()}"} if api_key() else {}

    def ask(path: str) -> dict[str, Any]:
        request = urllib.request.Request(url.rstrip("/") + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS, context=context) as answer:
                found = json.load(answer)
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    (first, *_) = ask("/v1/models").get("data") or [{}]
    said = ask("/version")
    about = {"version": said.get("version"), "fingerprint": said.get("system_fingerprint")}
    return {"url": url, "model": first.get("id")} | about
