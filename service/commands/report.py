"""Lines of `attend check` and `attend doctor`: the outcome of each check."""

from collections.abc import Callable

from rich.console import Console
from rich.text import Text

Print = Callable[[str, str, str, str], None]
"""Prints the outcome, time, name and detail of a check as a line."""


def printer(*, silent: bool = False) -> Print:
    """Prints in colours where the terminal has them; `silent` prints nothing."""
    if silent:
        return lambda outcome, spent, name, detail: None
    console, colours = Console(highlight=False), {"ok": "green", "failed": "bold red", "skipped": "yellow"}

    def show(outcome: str, duration: str, name: str, detail: str) -> None:
        line = Text.assemble((f"{outcome:<7}", colours[outcome]), f" {duration:>8}  {name:<19} ", (detail, "dim"))
        console.print(line, soft_wrap=True)

    return show
