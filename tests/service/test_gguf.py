"""The default model, written as a GGUF file, is served as its folder is."""

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer

from attend.model.config import DEFAULT_MODEL
from attend.model.engine.build import fingerprint
from attend.model.text.tokenizer_files import read_facts
from attend.service.settings import Settings
from tests.model.gguf_files import Type, byte_level, stored_as, write_gguf
from tests.service.commands.conftest import attend  # noqa: F401 - a fixture
from tests.service.server import Server, running

PROMPT = "def fibonacci(n):"


def write(path: Path, kind: Type) -> Path:
    """The default model as a GGUF file, its matrices in a type."""
    tokens = byte_level(RawTokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json")), "gpt-2", add_bos_token=False)
    template = read_facts(DEFAULT_MODEL)["chat_template"]
    said = {"tokenizer.chat_template": template, "general.name": "Default", "qwen3.pooling_type": 3}
    return write_gguf(DEFAULT_MODEL, path, stored_as(kind), tokens=tokens | {"eos_token_id": 0}, metadata=said)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "small.gguf", Type.BF16)


def test_inspect_tells_of_a_gguf_file_what_it_tells_of_its_folder(file, attend):  # noqa: F811
    ours, theirs = (json.loads(attend("inspect", where, "--json")[1]) for where in (file, DEFAULT_MODEL))
    assert ours.pop("folder") == str(file) and theirs.pop("folder")
    assert ours.pop("weights") == {"files": 1, "bytes": file.stat().st_size, "dtypes": ["BF16", "F32"]}
    assert theirs.pop("weights") and (ours.pop("format"), theirs.pop("format")) == ("GGUF", None)
    assert ours["tokenizer"].pop("bos_token") is None and theirs["tokenizer"].pop("bos_token") == "<|endoftext|>"
    assert ours == theirs
    status, out, _ = attend("inspect", file)
    assert status == 0 and re.search(r"^family +qwen3$", out, re.MULTILINE) and "files 1, bytes " in out


def test_a_damaged_gguf_file_is_one_sentence_and_status_two(file, attend, tmp_path):  # noqa: F811
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(file.read_bytes()[:-1000])
    for command in ("inspect", "serve"):
        status, out, err = attend(command, broken)
        assert (status, out) == (2, "")
        assert err.startswith(f"attend: {broken}: tensor ") and err.count("\n") == 1 and "cut off" in err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_generate_says_the_same_of_a_gguf_file_and_of_its_folder(dtype, file, attend):  # noqa: F811
    words = ("generate", PROMPT, "--max-tokens", "12", "--temperature", "0", "--json", "--dtype", dtype)
    said = [json.loads(attend(*words, "--model", where)[1])["choices"] for where in (file, DEFAULT_MODEL)]
    assert said[0] == said[1]


def test_a_model_is_named_after_its_gguf_file_and_a_folder_stands_for_the_one_it_holds(file):
    assert Settings(model=str(file)).name == "small"
    assert Settings(model=str(file.parent)).folder == file
    assert Settings(model=str(file.parent)).name == file.parent.name


def test_the_fingerprint_changes_with_the_gguf_file(file, tmp_path):
    other = tmp_path / "small.gguf"
    other.write_bytes(file.read_bytes())
    assert fingerprint(other, "a") == fingerprint(file, "a")
    other.write_bytes(file.read_bytes()[:-1] + b"\7")
    assert fingerprint(other, "a") != fingerprint(file, "a")


def asked(server: Server, path: str, **body: object) -> dict:
    return server.post(path, **body)[2]


@pytest.mark.long
@pytest.mark.ray
def test_a_gguf_file_is_served_with_its_tokenizer_and_its_chat_template(tmp_path):
    path = write(tmp_path / "default-Q8_0.gguf", Type.Q8_0)
    with running(tmp_path / "log", str(path), "--single", "--num-threads", "1") as server:
        completion = asked(server, "/v1/completions", prompt=PROMPT, max_tokens=8, temperature=0)
        assert completion["model"] == "default-Q8_0" and completion["usage"]["completion_tokens"] == 8
        assert asked(server, "/tokenize", prompt=PROMPT)["count"] == completion["usage"]["prompt_tokens"]
        chat = asked(server, "/v1/chat/completions", messages=[{"role": "user", "content": PROMPT}], max_tokens=4)
        assert chat["choices"][0]["message"]["content"]
        [vector] = [each["embedding"] for each in asked(server, "/v1/embeddings", input=PROMPT)["data"]]
        assert sum(number * number for number in vector) == pytest.approx(1, abs=1e-4)
