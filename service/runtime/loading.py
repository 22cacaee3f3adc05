"""The progress of a checkpoint that is being loaded: a bar with the rate on a terminal, else one line at the end."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

Report = Callable[[int, int], None]
"""Called with the bytes read so far, and with all of them."""


@contextmanager
def shown(
    stream: TextIO | None, say: Callable[[str], None], clock: Callable[[], float] = time.perf_counter
) -> Iterator[Report]:
    """What `build_engine` reports to. `say` gets one line when all is loaded; a `stream` that is a terminal shows a bar before.

    The rate in the line includes the time after reading, until the engine is built.
    """
    columns = (TextColumn("Loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=Console(file=stream), transient=True, disable=stream is None or not stream.isatty())
    task, size, started = bar.add_task("", total=None), 0, clock()

    def report(done: int, total: int) -> None:
        nonlocal size
        size = total
        bar.update(task, completed=done, total=total)

    with bar:
        yield report
    seconds = clock() - started
    say(f"Loaded {size / 1e9:.2f} GB in {seconds:.1f} s ({size / 1e6 / seconds:.0f} MB/s)")
