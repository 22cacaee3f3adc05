"""The command `attend` in this process: starting another one takes seconds."""

import io
import sys
from collections.abc import Callable

import pytest

from attend.service.commands import cli
from attend.service.settings import PREFIX, Settings


@pytest.fixture
def attend(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command here, with something piped in: (status, standard output, standard error)."""
    for name in Settings.model_fields:
        monkeypatch.delenv(PREFIX + name.upper(), raising=False)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("TERM", "dumb")

    def run(*words: object, piped: bytes | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["attend", *map(str, words)])
        if piped is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped)))
        try:
            cli.main()
        except SystemExit as end:
            return end.code or 0, *capfd.readouterr()
        return 0, *capfd.readouterr()

    return run
