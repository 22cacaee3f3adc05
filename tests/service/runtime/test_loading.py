"""Loading is seen: a bar with the rate on a terminal, nothing elsewhere."""

import io

from attend.service.runtime.loading import progress_reporter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def load(stream) -> None:
    with progress_reporter(stream) as report:
        for done in (1_000_000_000, 2_000_000_000):
            report(done, 2_000_000_000)


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
