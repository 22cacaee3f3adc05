"""The lines of a command: text for a person, and JSON from the first line to the last beside JSON log lines."""

import json
import subprocess
import sys

import pytest

from attend.service.runtime import terminal_lines


@pytest.fixture
def as_json():
    terminal_lines.set_line_style("json")
    yield
    terminal_lines.set_line_style("text")


def test_each_line_of_a_text_is_an_object_with_the_fields_of_a_log_line(as_json, capsys):
    terminal_lines.print_line("Ready: a\nTry:   b")
    found = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in found] == ["Ready: a", "Try:   b"]
    assert all(line.keys() == {"time", "level", "logger", "message"} for line in found)


@pytest.mark.parametrize(("flags", "words"), [(["--single"], "/nowhere"), ([], "Ray Serve speaks no TLS")])
def test_a_start_that_fails_says_so_in_json_too(flags, words, tmp_path):
    (tmp_path / "tls.pem").write_text("")
    flags = ["--log-format", "json", "--tls-cert", str(tmp_path / "tls.pem"), "--tls-key", "/nowhere", *flags]
    command = [sys.executable, "-m", "attend.service.commands.cli", "serve", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    [line] = [json.loads(line) for line in done.stderr.splitlines()]
    assert (done.returncode, line["level"]) == (2, "error")
    assert words in line["message"]
