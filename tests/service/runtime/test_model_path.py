"""A model that is no checkpoint: the sentence says what is wrong with it, and what is taken."""

import numpy
import pytest
from gguf import GGUFWriter

from attend.model.config import DEFAULT_MODEL
from attend.model.errors import CheckpointError, SettingError
from attend.model.gguf.paths import LFS
from attend.service.runtime.model_path import check_model, resolve_model
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


def one_tensor(path, **metadata):
    """The bytes of a GGUF file of one tensor, with these texts as metadata."""
    writer = GGUFWriter(path, metadata.pop("architecture", "llama"))
    for name, text in metadata.items():
        writer.add_string(name, text)
    writer.add_tensor("a", numpy.zeros((4, 32), dtype="float32"))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    return path.read_bytes()


BAD_GGUFS = {
    "empty": (lambda path: b"", "has 0 bytes: it is no GGUF file"),
    "text": (lambda path: b"text" * 9, "does not begin with GGUF$"),
    "pointer": (lambda path: LFS + b"spec/v1\noid sha256:0", "pointer of Git LFS: git lfs pull fetches the file$"),
    "cut": (lambda path: one_tensor(path)[:-100], "beyond the file: it is cut off$"),
    "short": (lambda path: one_tensor(path)[:60], "damaged or cut off$"),
    "part-00001-of-00003": (one_tensor, "part-00002-of-00003.gguf is missing$"),
    "mmproj": (lambda path: one_tensor(path, **{"general.type": "mmproj"}), "the text model; images are not served$"),
    "clip": (lambda path: one_tensor(path, architecture="clip"), "the text model; images are not served$"),
    "adapter": (lambda path: one_tensor(path, **{"general.type": "adapter"}), "--adapter NAME=FOLDER takes a LoRA adapter"),
    "imatrix": (lambda path: one_tensor(path, **{"general.type": "imatrix"}), "give the file of the model itself$"),
}
"""What makes the bytes of a file, and what is said of it."""


@pytest.mark.parametrize("name", BAD_GGUFS)
def test_a_bad_gguf_file_is_told_apart_by_its_header(here, name):
    make, told = BAD_GGUFS[name]
    path = here / f"{name}.gguf"
    path.write_bytes(make(path))
    with pytest.raises(CheckpointError, match=told):
        check_model(Settings(model=str(path)))


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("config.json", None, "config.json is missing$"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("model.safetensors", None, "model.safetensors is missing$"),
        ("model.safetensors", b"text" * 9, "model.safetensors is damaged: "),
        ("model.safetensors", LFS + b"spec/v1", "pointer of Git LFS"),
        ("model.safetensors", (DEFAULT_MODEL / "model.safetensors").read_bytes()[:-1], "model.safetensors is damaged: "),
    ],
)
def test_a_bad_folder_is_told_apart_without_reading_weights(here, name, data, told):
    for path in DEFAULT_MODEL.iterdir():
        (here / path.name).write_bytes(path.read_bytes())
    check_model(Settings(model=str(here)))
    if data is None:
        (here / name).unlink()
    else:
        (here / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=told):
        check_model(Settings(model=str(here)))


@pytest.mark.parametrize("model", ["", str(DEFAULT_MODEL)])
def test_a_context_beyond_the_models_is_told_by_its_config(model):
    settings = Settings(model=model, max_model_len=1025)
    with pytest.raises(SettingError, match="max_model_len is 1025, but this model has only 1024 positions"):
        check_model(settings)
    check_model(settings, is_server=False)  # which reads no such setting
