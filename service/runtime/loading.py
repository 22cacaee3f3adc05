"""The progress of a checkpoint that is being loaded: a bar with the rate on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

Report = Callable[[int, int], None]
"""Called with the bytes read so far, and with all of them."""


@contextmanager
def progress_reporter(stream: TextIO | None) -> Iterator[Report]:
    """What `build_engine` reports to. A `stream` that is a terminal shows a bar."""
    columns = (TextColumn("Loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=Console(file=stream), transient=True, disable=stream is None or not stream.isatty())
    task = bar.add_task("", total=None)
    with bar:
        yield lambda num_bytes, total: bar.update(task, completed=num_bytes, total=total)
