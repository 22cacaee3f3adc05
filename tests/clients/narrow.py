"""A server that runs one request and lets one wait, and the two requests that fill it."""

import concurrent.futures
import contextlib
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, ClassVar

from tests.service.server import Server, wait_for

MODEL = "attend-default"
PYTHON = os.environ.get("ATTEND_TEST_PYTHON", sys.executable)
"""The interpreter that has Attend; another one than ours in the environment of `make test-clients`."""


@dataclass(frozen=True)
class Narrow:
    """The server, and the API key that it asks for."""

    FLAGS: ClassVar = ("--max-batch-requests", "1", "--max-queued-requests", "1", "--dtype", "float32")

    server: Server
    key: str

    def post(self, **body: object) -> IO[bytes]:
        """The open answer to POST /v1/completions."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(f"{self.server.url}/v1/completions", json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=60)

    @contextlib.contextmanager
    def busy(self) -> Iterator[IO[bytes]]:
        """One answer of several seconds is being made; closing it ends it."""
        with self.post(prompt="def f(", max_tokens=900, ignore_eos=True, stream=True) as answer:
            yield answer
        assert wait_for(lambda: self.server.metric("attend_requests_running") == 0)

    @contextlib.contextmanager
    def full(self) -> Iterator[IO[bytes]]:
        """One answer is being made and another request waits, so that a third is refused until the first is closed."""
        with concurrent.futures.ThreadPoolExecutor() as pool, self.busy() as answer:
            waiting = pool.submit(lambda: json.load(self.post(prompt="def f(", max_tokens=1)))
            assert wait_for(lambda: self.server.metric("attend_requests_waiting") == 1)
            yield answer
            answer.close()
            assert waiting.result()["usage"]["completion_tokens"] == 1
        assert wait_for(self.takes)  # the edge refuses for a full replica for some time longer

    def takes(self) -> bool:
        """True if a call gets in."""
        try:
            self.post(prompt="def f(", max_tokens=1).close()
        except urllib.error.HTTPError as error:
            if error.code != 429:
                raise
            return False
        return True
