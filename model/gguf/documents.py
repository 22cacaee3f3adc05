"""A GGUF file read as the folder that its model would be in the Hugging Face layout: by the names of that folder's files."""

from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from tokenizers import Tokenizer

from attend.model.gguf import config, vocabulary
from attend.model.gguf.common import classifier_labels
from attend.model.gguf.container import Container, read_container
from attend.model.gguf.keys import Keys, shortest
from attend.model.gguf.paths import split_files

Document = dict[str, Any]
Stamps = tuple[tuple[int, int], ...]
"""Size and time of each part of a file."""
_READING = Lock()
"""The tokenizer and the weights are read side by side, and what both need once."""


def container(path: Path) -> Container:
    """The container of a GGUF file, read anew only where a part has changed. Raises CheckpointError."""
    with _READING:
        return _container(path, _stamps(path))


def _stamps(path: Path) -> Stamps:
    return tuple((status.st_size, status.st_mtime_ns) for status in (each.stat() for each in split_files(path)))


@lru_cache(maxsize=1)
def _container(path: Path, stamps: Stamps) -> Container:
    found = read_container(path)
    config.check_architecture(found)  # before its vocabulary is looked at
    return found


def json_file(path: Path, name: str) -> Document:
    """What a JSON file of the folder would hold; empty where there would be none. Raises CheckpointError."""
    if name not in DOCUMENTS:
        return {}
    with _READING:
        return deepcopy(_document(path, _stamps(path), name))


@lru_cache(maxsize=3)
def _document(path: Path, stamps: Stamps, name: str) -> Document:
    """A start asks for each of them again and again."""
    return DOCUMENTS[name](_container(path, stamps))


def tokenizer_of(path: Path) -> Tokenizer:
    """What tokenizer.json would hold. Raises CheckpointError."""
    return vocabulary.build_tokenizer(container(path))


def token_ids(path: Path) -> dict[str, int]:
    """The ids of all tokens by their texts. Raises CheckpointError."""
    return vocabulary.vocabulary_of(container(path)).ids


def pooling_type(path: Path) -> int | None:
    """How the file's embeddings are made, as llama.cpp counts the ways; None where it does not say. Raises CheckpointError."""
    kind: int | None = Keys(container(path)).get("pooling_type")
    return kind


def has_labels(path: Path) -> bool:
    """True if the file has a reranker's head in place of that of a text. Raises CheckpointError."""
    return classifier_labels(Keys(container(path))) is not None


def _config(found: Container) -> Document:
    tokens = vocabulary.vocabulary_of(found)
    return config.read_config(found) | {"bos_token_id": tokens.token("bos"), "eos_token_id": tokens.ends}


def _generation_config(found: Container) -> Document:
    """What the file says of sampling. Where no token counts, there is no penalty; what no folder has keeps its name."""
    start = "general.sampling."
    said = {key.removeprefix(start): value for key, value in found.metadata.items() if key.startswith(start)}
    if said.get("penalty_last_n") == 0 or said.get("penalty_repeat", 1) == 1:
        said = {name: value for name, value in said.items() if name not in ("penalty_last_n", "penalty_repeat")}
    made = {
        SAMPLING.get(name, start + name): shortest(value) if isinstance(value, float) else value for name, value in said.items()
    }
    return made | {"suppress_tokens": found.metadata.get("tokenizer.ggml.suppress_tokens")}


SAMPLING = {name: name for name in ("top_k", "top_p", "min_p")} | {
    "temp": "temperature",
    "penalty_repeat": "repetition_penalty",
}
"""How generation_config.json calls what `general.sampling.` says."""
DOCUMENTS: dict[str, Callable[[Container], Document]] = {
    "config.json": _config,
    "generation_config.json": _generation_config,
    "tokenizer_config.json": vocabulary.tokenizer_config,
}
