"""Flags of settings: one that is yes or no takes no next word."""

import pytest
from typer.testing import CliRunner

from attend.service.commands import cli, flags
from attend.service.settings import Settings

YES_OR_NO = [name for name, field in Settings.model_fields.items() if field.annotation is bool]


@pytest.fixture
def served(monkeypatch):
    """The settings that `attend serve` has read from a command line."""
    found = []
    monkeypatch.setattr("attend.service.runtime.single.run", lambda settings: found.append(settings) or 0)
    monkeypatch.setattr("attend.service.runtime.supervisor.run", lambda settings: found.append(settings) or 0)

    def run(*words):
        done = CliRunner().invoke(cli.app, flags.without_values(["serve", *words]))
        assert done.exit_code == 0, done.output
        return found.pop()

    return run


def test_flags_of_other_servers_lead_to_ours(monkeypatch, capfd):
    assert {name.removeprefix("--").replace("-", "_") for name in flags.THEIR_FLAGS.values()} <= Settings.model_fields.keys()
    assert not {name.removeprefix("--").replace("-", "_") for name in flags.THEIR_FLAGS} & Settings.model_fields.keys()
    for words in (["serve", "--max-num-seqs", "8"], ["serve", "--max-num-seqs=8"]):
        monkeypatch.setattr("sys.argv", ["attend", *words])
        with pytest.raises(SystemExit, match="2"):
            cli.main()
        assert capfd.readouterr().err == "attend: there is no --max-num-seqs: use --max-batch-requests\n"


def test_a_log_file_that_cannot_be_written_stops_the_start(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr("sys.argv", ["attend", "serve", "--log-file", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert capfd.readouterr().err == f"attend: log_file {str(tmp_path)!r} cannot be written: Is a directory\n"


def test_there_are_flags_that_are_yes_or_no():
    assert {"single", "deterministic", "expose_docs", "prefix_caching"} <= set(YES_OR_NO)


@pytest.mark.parametrize("name", YES_OR_NO)
def test_a_flag_that_is_yes_or_no_may_stand_before_the_folder(served, tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    flag = f"--{name.replace('_', '-')}"
    no = f"--no-{flag[2:]}"
    for words, value in (([flag], True), ([no], False), ([flag, "false"], False), ([f"{flag}=false"], False),
                         ([flag, "TRUE"], True), ([f"{flag}=true"], True), ([flag, "0"], False)):  # fmt: skip
        for line in ([*words, str(tmp_path)], [str(tmp_path), *words]):
            settings = served(*line)
            assert (getattr(settings, name), settings.model) == (value, str(tmp_path)), line


def test_without_the_flag_the_variable_counts(served, monkeypatch):
    monkeypatch.setenv("ATTEND_DETERMINISTIC", "true")
    assert served().deterministic
    assert not served("--no-deterministic").deterministic


@pytest.mark.parametrize(
    "words",
    ["bench serve --single true", "generate --echo true", "serve --port 1 folder", "serve --single=maybe", "serve false"],
)
def test_other_words_stay_as_they_are(words):
    assert flags.without_values(words.split()) == words.split()


def test_help_asks_for_no_value_where_none_is_taken(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    out = CliRunner().invoke(cli.app, ["serve", "--help"]).output
    assert "<bool>" not in out
    for name, field in Settings.model_fields.items():
        flag = name.replace("_", "-")
        shown = f"  --{flag} / --no-{flag}" if field.annotation is bool else f"  --{flag} VALUE"
        assert shown in out, f"{name} has no such flag: GROUPS of service/commands/flags.py names each setting"
