"""Flags of settings: one that is yes or no takes no next word."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attend.model.config import DEFAULT_MODEL
from attend.service.commands import cli
from attend.service.commands.flags import without_values
from attend.service.commands.mistakes import THEIR_FLAGS
from attend.service.settings import Settings

YES_OR_NO = [name for name, field in Settings.model_fields.items() if field.annotation is bool]


@pytest.fixture
def served(monkeypatch):
    """The settings that `attend serve` has read from a command line."""
    found = []
    monkeypatch.setattr("attend.service.runtime.single.run", lambda settings: found.append(settings) or 0)
    monkeypatch.setattr("attend.service.runtime.supervisor.run", lambda settings: found.append(settings) or 0)

    def run(*words):
        done = CliRunner().invoke(cli.app, ["serve", *words])
        assert done.exit_code == 0, done.output
        return found.pop()

    return run


def told(attend, *words):
    """The line that ends a command with a mistake."""
    status, out, err = attend(*words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    return err.removeprefix("attend: ").rstrip("\n")


VALUES = {"--tensor-parallel": "2", "--adapter": "a=b", "--log-level": "debug"}
"""What other servers' flags are given whose counterpart does not take a number."""


OF_SERVE = [flag for flag in THEIR_FLAGS if flag not in ("--model", "-n", "--n-predict", "--temp")]


@pytest.mark.parametrize("flag", OF_SERVE)
def test_a_flag_of_another_server_leads_to_words_that_are_read(attend, served, flag):
    line = told(attend, "serve", flag, VALUES.get(THEIR_FLAGS[flag].split()[0], "64"))
    advice = line.removeprefix(f"there is no {flag}: ")
    assert advice.startswith(("use ", "leave it out, "))
    if advice.startswith("use --") and "--tls" not in advice:  # whose files are read
        served(*re.split("[,;:]? ", advice)[1 : 2 if advice.startswith("use --no-") else 3])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("serve -ngl=99", "there is no -ngl: leave it out, a GPU serves where there is one; --device cpu keeps it out"),
        ("serve --max-num-seqs=8", "there is no --max-num-seqs: use --max-batch-requests 8"),
        ("serve -c", "there is no -c: use --max-model-len VALUE"),
        ("serve --prot 1", "there is no --prot: did you mean --port?"),
        ("serve --zzz", "there is no --zzz: attend serve --help lists the flags"),
        ("serve a b", "got unexpected extra argument(s) (b): attend serve [OPTIONS] [MODEL]"),
        ("run x y -n 5", "there is no -n: use --max-tokens 5"),
        ("serve -hf a/b", "there is no -hf: use MODEL without a flag: attend serve hf://a/b"),
        ("run x y -c 5", "there is no -c: attend run --help lists the flags"),
        ("generate a b", "got unexpected extra argument(s) (b): attend generate [OPTIONS] [PROMPT]"),
        ("sevre", "there is no attend sevre: did you mean attend serve?"),
        ("keys ad", "there is no attend keys ad: did you mean attend keys add?"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_command_line_is_one_line_that_says_what_to_write(attend, words, line):
    assert told(attend, *words.split()) == line


def test_a_log_file_that_cannot_be_written_stops_the_start(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr("sys.argv", ["attend", "serve", "--log-file", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert capfd.readouterr().err == f"attend: log_file {str(tmp_path)!r} cannot be written: Is a directory\n"


@pytest.mark.parametrize("name", YES_OR_NO)
def test_a_flag_that_is_yes_or_no_may_stand_before_the_folder(served, name):
    flag = f"--{name.replace('_', '-')}"
    no = f"--no-{flag[2:]}"
    for words, value in (([flag], True), ([no], False)):
        for line in ([*words, str(DEFAULT_MODEL)], [str(DEFAULT_MODEL), *words]):
            settings = served(*line)
            assert (getattr(settings, name), settings.model) == (value, str(DEFAULT_MODEL)), line


def test_a_flag_that_may_stand_several_times_is_joined(served):
    assert served("--adapter", "a=/x", "--adapter", "b=/y").adapters == {"a": Path("/x"), "b": Path("/y")}


def test_help_asks_for_no_value_where_none_is_taken(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    out = CliRunner().invoke(cli.app, ["serve", "--help"]).output
    assert "<" not in out and not any(
        "<" in CliRunner().invoke(cli.app, [each, "--help"]).output for each in ("run", "explain")
    )
    for name, field in Settings.model_fields.items():
        flag = name.replace("_", "-")
        shown = f"  --{flag} / --no-{flag}" if field.annotation is bool else f"  --{flag} VALUE"
        assert shown in out, f"{name} has no such flag: GROUPS of service/commands/flags.py names each setting"


def test_a_flag_that_is_yes_or_no_is_understood_with_a_value():
    typed = ["serve", "--single", "true", "m", "--prefix-routing=false", "--strict-fields", "False", "--port", "1", "true"]
    assert without_values(typed) == [
        "serve",
        "--single",
        "m",
        "--no-prefix-routing",
        "--no-strict-fields",
        "--port",
        "1",
        "true",
    ]
