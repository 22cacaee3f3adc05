"""Loading is seen: a bar with the rate on a terminal, one line everywhere else."""

import io

import pytest

from attend.service.runtime.loading import shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def load(stream, fails=False) -> list[str]:
    said: list[str] = []
    clock = iter([10.0, 14.0])
    with shown(stream, said.append, lambda: next(clock)) as report:
        for done in (1_000_000_000, 2_000_000_000):
            report(done, 2_000_000_000)
        if fails:
            raise ValueError
    return said


@pytest.mark.parametrize("kind", [Terminal, io.StringIO, lambda: None])
def test_one_line_tells_size_seconds_and_rate(kind):
    assert load(kind()) == ["Loaded 2.00 GB in 4.0 s (500 MB/s)"]


def test_a_terminal_sees_a_bar_with_bytes_and_rate(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    load(stream)
    assert "Loading" in stream.getvalue()
    assert "2.0/2.0 GB" in stream.getvalue()
    assert "/s" in stream.getvalue()


def test_what_is_no_terminal_gets_nothing_else():
    stream = io.StringIO()
    load(stream)
    assert stream.getvalue() == ""


def test_a_load_that_fails_says_nothing():
    with pytest.raises(ValueError):
        load(io.StringIO(), fails=True)
