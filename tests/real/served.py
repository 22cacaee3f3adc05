"""A real model in a replica in this process, behind the transports of the service."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attend.service.runtime.replica import Replica
from attend.service.settings import Settings
from tests.fakes import Server
from tests.real.models import MODELS


async def no_metrics() -> str:
    return ""


@contextmanager
def as_before() -> Iterator[None]:
    """Undo what a replica sets for its whole process."""
    logger, interval = logging.getLogger("attend"), sys.getswitchinterval()
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate


@contextmanager
def served(name: str, **settings: Any) -> Iterator[Server]:
    """The model of that name, with a small cache and one thread."""
    usual = {"single": True, "num_threads": 1, "kv_cache_memory": 100_000_000, "max_model_len": 1024}
    with as_before():
        replica = Replica(Settings(model=str(MODELS[name].path), **usual | settings), name)
        try:
            app = replica.application(no_metrics, behind_serve=False)
            yield Server(replica.engine, replica.service, replica.metrics, replica, lambda: app, replica.explaining)
        finally:
            replica.close()


def ask(server: Server, path: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    """An answer that is no error."""
    answer = server.post(body, path)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found
