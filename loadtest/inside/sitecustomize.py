"""Run by each Python process of a server whose PYTHONPATH begins with this folder: makes requests fail, and counts tasks.

In the process of the engine a step that holds a poisoned prompt raises, as a kernel with a bug would. Every few seconds the
number of asyncio's tasks goes into a file of its own in the folder that SOAK_FOLDER names. A server without it has neither.
"""

import asyncio.tasks
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = "SOAK_FOLDER"
POISON = (4097, 4099, 4097, 4099)
"""Token ids, one after the other in a prompt; no text becomes them."""
EVERY = 2.0


def is_poisoned(tokens: Sequence[int]) -> bool:
    """True if the tokens of a step hold POISON."""
    size, first = len(POISON), POISON[0]
    return any(token == first and tuple(tokens[at : at + size]) == POISON for at, token in enumerate(tokens))


def poison(runner: Any) -> None:
    """Make steps with POISON raise."""
    submit = runner.submit

    def compute_checked(self: Any, step: Any) -> Any:
        if is_poisoned(step.tokens):
            raise RuntimeError("a poisoned prompt")
        return submit(self, step)

    runner.submit = compute_checked


def watch(folder: Path) -> None:
    """Wait for the engine; poison its steps; count tasks for ever. A process without an engine waits for ever."""
    while not hasattr(sys.modules.get("attend.model.engine.build"), "build_engine"):
        time.sleep(EVERY)
    runner = sys.modules["attend.model.engine.runner"].ModelRunner
    for kind in (runner, *runner.__subclasses__()):
        if "submit" in vars(kind):
            poison(kind)
    inner = vars(asyncio.tasks)  # of all loops of the process
    tasks = inner["_scheduled_tasks" if sys.version_info >= (3, 12) else "_all_tasks"]
    counted = folder / f"{os.getpid()}.tasks"
    while True:
        counted.write_text(str(len(tasks)))
        time.sleep(EVERY)


if FOLDER in os.environ:
    threading.Thread(target=watch, args=(Path(os.environ[FOLDER]),), daemon=True).start()
