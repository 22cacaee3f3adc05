"""A model's process as the server sees it: start, health checks, memory, stop."""

import asyncio
import json
import logging
import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import aiohttp
import grpc

from attend.service.errors import ModelUnavailable
from attend.service.runtime.models.child import SOCKETS
from attend.service.runtime.models.entries import ServedModel
from attend.service.settings import Settings

log = logging.getLogger("attend.models")

PROBE_SECONDS, ANSWER_SECONDS, PROBES = 1.0, 1.5, 2
"""How often a process is asked whether it lives, how long each answer may take, and how often none comes, one time after the
other, before it is killed: its callers wait for 5 s at most."""
KILL_SECONDS = 15.0
"""Beside the drain: a process that has not ended by then is killed."""
CLOSE_SECONDS = 2.0
MAX_REPORT = 1 << 20
"""Bytes of a line that a process reports."""
READ_BYTES = 64 << 10
"""Of an answer that are read ahead of the caller."""
OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


class LoadFailed(Exception):
    """A model could not be loaded; the text says why."""


class ModelProcess:
    """A process that serves a model. Calls go to `http`, a session whose host does not matter, and to `grpc`, a channel."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, folder: Path, facts: dict[str, Any]) -> None:
        self.name = name
        """Name of the model."""
        self.facts = facts
        """What it serves: device, numbers, sizes."""
        self.memory = _memory(process.pid, facts)
        """Bytes that it takes, or may take; 0 where that is not known."""
        self.pid = process.pid
        self._process, self._folder = process, folder
        self.http = aiohttp.ClientSession(
            "http://localhost",
            connector=aiohttp.UnixConnector(str(folder / SOCKETS[0]), limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            auto_decompress=False,
            read_bufsize=READ_BYTES,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
        )
        self.grpc = grpc.aio.insecure_channel(f"unix:{folder / SOCKETS[1]}", options=OPTIONS)

    @classmethod
    async def start(cls, model: ServedModel, folder: Path) -> Self:
        """Start it, with its sockets in a folder of its own, which is made; wait until it serves. Raises LoadFailed."""
        os.mkdir(folder, 0o700)
        words = [str(os.getpid()), str(folder), _behind(model.settings, folder).to_json()]
        command = [sys.executable, "-P", "-m", "attend.service.runtime.models.child", *words]
        nothing, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=nothing, stdout=pipe, limit=MAX_REPORT)
        try:
            return cls(model.name, process, folder, await _report(process))
        except BaseException:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            shutil.rmtree(folder, ignore_errors=True)
            raise

    async def wait_for_exit(self) -> str:
        """Waits for its end; returns how it ended. One that answers no probe any more is killed."""
        watch = asyncio.create_task(self._kill_when_frozen())
        status = await self._process.wait()
        watch.cancel()
        names = {number.value: number.name for number in signal.Signals}
        return f"with status {status}" if status >= 0 else f"by {names.get(-status, -status)}"

    async def close(self) -> None:
        """Put away what led to it, once it has ended. Its last calls may learn of that first."""
        await asyncio.gather(self.http.close(), self.grpc.close(CLOSE_SECONDS))
        shutil.rmtree(self._folder, ignore_errors=True)

    def check(self) -> None:
        """Raise ModelUnavailable where it has ended since a call got it."""
        if self.http.closed:
            raise ModelUnavailable(f"the process of the model {self.name!r} ended during the call", 1)

    async def stop(self, seconds: float = 0.0) -> None:
        """Have it end its calls within so many seconds, then end; it is killed where it does not."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), seconds + KILL_SECONDS)
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _kill_when_frozen(self) -> None:
        """A process whose step thread is stuck ends itself; here one is noticed whose event loop is, or that was stopped."""
        failures = 0
        while failures < PROBES:
            if not failures:
                await asyncio.sleep(PROBE_SECONDS)
            try:
                async with asyncio.timeout(ANSWER_SECONDS), self.http.get("/healthz"):
                    failures = 0
            except (aiohttp.ClientError, OSError, RuntimeError, TimeoutError):
                failures += 1
        log.error("the process of the model %s has answered none of %d probes: it is killed", self.name, PROBES)
        with suppress(ProcessLookupError):
            self._process.kill()


async def _report(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """What it serves. Raises LoadFailed."""
    assert process.stdout is not None
    if not (line := await process.stdout.readline()):
        raise LoadFailed(f"its process ended with status {await process.wait()}")
    facts: dict[str, Any] = json.loads(line)
    if "error" in facts:
        await process.wait()
        raise LoadFailed(facts["error"])
    return facts


def _behind(settings: Settings, folder: Path) -> Settings:
    """The settings of a process that is behind another one: that judges hosts, origins and certificates, and has the pages."""
    own: dict[str, Any] = {"host": f"unix:{folder / SOCKETS[1]}", "tls_cert": "", "tls_key": "", "single": False, "models": ""}
    return settings.model_copy(
        update=own | {"allowed_hosts": "*", "cors_origins": "", "expose_docs": False, "linger_seconds": 0.0}
    )


def _memory(pid: int, facts: dict[str, Any]) -> int:
    """Bytes that a process takes (Pss) once its KV cache is full; 0 where a GPU holds them."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("Pss:") and facts["device"] == "cpu":
                return int(line.split()[1]) * 1024 + int(facts["kv_bytes"])
    return 0
