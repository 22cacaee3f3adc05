"""A model that is no checkpoint: the sentence says what is wrong with it, and what is taken."""

import pytest

from attend.model.errors import CheckpointError
from attend.service.runtime import hub
from attend.service.runtime.model_path import resolve_model
from attend.service.settings import Settings


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The current folder, in which words without a slash are looked for."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(model):
    """(model, lines)."""
    lines = []
    return resolve_model(Settings(model=model), lines.append).model, lines


@pytest.mark.parametrize(
    ("model", "reference"),
    [
        ("HuggingFaceTB/SmolLM2-135M", "hf://HuggingFaceTB/SmolLM2-135M"),
        ("org/name@v1", "hf://org/name@v1"),
        ("https://huggingface.co/org/name", "hf://org/name"),
        ("https://huggingface.co/org/name/", "hf://org/name"),
        ("http://hf.co/org/name", "hf://org/name"),
        ("https://huggingface.co/org/name/tree/main", "hf://org/name@main"),
        ("https://huggingface.co/org/name/blob/main/x-Q4.gguf", "hf://org/name/x-Q4.gguf@main"),
    ],
)
def test_the_name_or_page_of_a_repository_is_taken_with_a_line_that_says_so(model, reference):
    assert found(model) == (reference, [f"{model} is not a path here: using {reference}"])


def test_what_is_here_is_never_looked_for_on_the_hub(here):
    (here / "org" / "name").mkdir(parents=True)
    (here / "org" / "name" / "config.json").write_text("{}")
    (here / "x.gguf").touch()
    for model in ("org/name", "./org/name", "x.gguf", "", "hf://org/name"):
        assert found(model) == (model, [])


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("gemma3", "gemma3 does not exist: give .* a .gguf file, or hf://ORG/NAME; did you mean hf://ORG/gemma3[?]$"),
        ("/nowhere/at/all", "^/nowhere/at/all does not exist: give a checkpoint folder with config.json in it, [^;]*NAME$"),
        ("nowhere/weights.gguf", "nowhere/weights.gguf does not exist: give [^;]*$"),
        ("weights.gguf", "weights.gguf does not exist: give [^;]*$"),
        ("folder/nam", "folder/nam does not exist: give [^;]*$"),
        ("model.txt", "model.txt is a file, and not a .gguf file: give a checkpoint folder"),
        ("folder", "folder/config.json is missing$"),
        ("ggufs", "ggufs/config.json is missing; name one of its GGUF files, as in .*a.gguf$"),
        ("x" * 300, "cannot be read: File name too long"),
    ],
)
def test_a_path_that_leads_to_no_checkpoint_is_told_apart(here, model, told):
    (here / "model.txt").touch()
    for folder in ("folder", "ggufs"):
        (here / folder).mkdir()
    for name in ("a", "b"):
        (here / "ggufs" / f"{name}.gguf").touch()
    with pytest.raises(CheckpointError, match=told):
        found(model)


def test_a_replica_reads_a_name_as_the_command_does(monkeypatch):
    """In a cluster no command has read the settings first."""
    fetched = []
    monkeypatch.setattr(hub, "fetch_model", lambda reference, say: fetched.append(reference) or "/cache/name")
    settings = hub.with_folder(Settings(model="org/name"), lambda line: None)
    assert (fetched, settings.model, settings.name) == (["hf://org/name"], "/cache/name", "org/name")
