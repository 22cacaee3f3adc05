"""How hidden states are pooled into an embedding, as the files of sentence-transformers beside a checkpoint say it, or a GGUF
file's own metadata.

modules.json lists what a text goes through: Transformer, Pooling, and mostly Normalize. The Pooling has a folder of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from attend.model.errors import CheckpointError, NotSupported
from attend.model.gguf.paths import is_gguf
from attend.model.params import describe
from attend.model.weights import read_any_json, read_json

MODULES, SENTENCES = "modules.json", "sentence_bert_config.json"


class Pooling(StrEnum):
    """Which of a text's hidden states are its embedding."""

    LAST = "lasttoken"
    """The hidden state of the last token."""
    MEAN = "mean"
    """The mean of the hidden states of all tokens."""
    CLS = "cls"
    """The hidden state of the first token."""


GGUF_WAYS = ("NONE", "MEAN", "CLS", "LAST", "RANK")
"""The values of `pooling_type` in a GGUF file, counted from 0."""
OF_GGUF = {1: Pooling.MEAN, 2: Pooling.CLS, 3: Pooling.LAST}
MODES = {
    **{"lasttoken": Pooling.LAST, "mean": Pooling.MEAN, "cls": Pooling.CLS},
    **{"mean_tokens": Pooling.MEAN, "cls_token": Pooling.CLS},
}
CHOICES = {"mean": Pooling.MEAN, "last": Pooling.LAST, "cls": Pooling.CLS}
"""The values of the setting `pooling` beside auto."""
HINT = "the server's --pooling can say it"
KNOWN = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class EmbeddingRules:
    """How a checkpoint's embeddings are made, or why none are."""

    pooling: Pooling | None = None
    max_tokens: int | None = None
    """Tokens of a text at most, where that is less than the context."""
    refusal: str = f"this model makes no embeddings: its checkpoint has no {MODULES} that says how; {HINT}"
    is_silent: bool = True
    """True if the files say nothing, where there is no pooling."""

    def require_pooling(self) -> Pooling:
        """The pooling. Raises NotSupported where there is none."""
        if self.pooling is None:
            raise NotSupported(self.refusal, "model")
        return self.pooling


NO_EMBEDDINGS = EmbeddingRules()


def chosen_rules(rules: EmbeddingRules, choice: str, warn: Callable[[str], None]) -> EmbeddingRules:
    """The rules of the files, or those with the pooling of a setting, which is `auto` or in CHOICES.

    Where the files say otherwise, `warn` gets a line that says so.
    """
    pooling = CHOICES.get(choice)
    if pooling is None:
        return rules
    if rules.pooling is not None and rules.pooling is not pooling:
        warn(f"pooling = {choice}: the model's own files say {rules.pooling}")
    elif rules.pooling is None and not rules.is_silent:
        warn(f"pooling = {choice}: the model's own files say otherwise ({rules.refusal})")
    return replace(rules, pooling=pooling, refusal="")


def read_rules(folder: Path) -> EmbeddingRules:
    """The rules in a checkpoint's files. A file that is wrong, or asks for what is not computed, gives a refusal."""
    if is_gguf(folder):
        return _gguf_rules(folder)
    if not (folder / MODULES).is_file():
        return NO_EMBEDDINGS
    try:
        pooling = _pooling(folder, _module_paths(folder))
        return EmbeddingRules(pooling, _max_tokens(folder), "")
    except CheckpointError as error:
        why = str(error).replace(f"{folder}/", "")  # callers are told it: no paths of this machine
        return EmbeddingRules(refusal=f"this model makes no embeddings: {why}", is_silent=False)


def _gguf_rules(path: Path) -> EmbeddingRules:
    from attend.model.gguf.documents import pooling_type  # it needs numpy, and a folder does not

    kind = pooling_type(path)
    if type(kind) is int and kind in OF_GGUF:
        return EmbeddingRules(OF_GGUF[kind], None, "")
    name = GGUF_WAYS[kind] if type(kind) is int and 0 <= kind < len(GGUF_WAYS) else None
    said = "no pooling_type" if kind is None else f"pooling_type {f'{kind} ({name})' if name else describe(kind)}"
    silent = kind in (None, 0)
    computed = f"supported: 1 (MEAN), 2 (CLS), 3 (LAST){f'; {HINT}' if silent else ''}"
    return EmbeddingRules(refusal=f"this model makes no embeddings: its file has {said}; {computed}", is_silent=silent)


def _module_paths(folder: Path) -> Mapping[str, str]:
    """The modules' folders, by their kinds."""
    listed = read_any_json(folder, MODULES)
    if not isinstance(listed, list):
        raise CheckpointError(f"{MODULES} must hold a JSON array")
    paths: dict[str, str] = {}
    for module in listed:
        kind, path = (module.get(name) if isinstance(module, dict) else None for name in ("type", "path"))
        if not isinstance(kind, str) or not isinstance(path, str):
            raise CheckpointError(f"{MODULES} must list objects with a type and a path; got {describe(module)}")
        kind = kind.rpartition(".")[2]
        if kind not in KNOWN or kind in paths:
            raise CheckpointError(f"{MODULES} has the module {kind[:64]!r}; supported: one each of {', '.join(KNOWN)}")
        paths[kind] = path
    if "Pooling" not in paths:
        raise CheckpointError(f"{MODULES} has no Pooling")
    return paths


def _pooling(folder: Path, paths: Mapping[str, str]) -> Pooling:
    name = f"{paths['Pooling']}/config.json"
    raw = read_json(folder, name)
    asked = [key.removeprefix("pooling_mode_") for key, on in raw.items() if key.startswith("pooling_mode_") and on]
    if "pooling_mode" in raw:  # as newer versions of sentence-transformers write it
        asked.append(str(raw["pooling_mode"]))
    if len(asked) != 1 or asked[0] not in MODES:
        raise CheckpointError(f"{name} asks for {' and '.join(asked)[:128] or 'no pooling'}; supported: lasttoken, mean, cls")
    return MODES[asked[0]]


def _max_tokens(folder: Path) -> int | None:
    if not (folder / SENTENCES).is_file():
        return None
    raw = read_json(folder, SENTENCES)
    if raw.get("do_lower_case"):
        raise CheckpointError(f"{SENTENCES} sets do_lower_case, which is not supported")
    most: Any = raw.get("max_seq_length")
    if most is not None and (type(most) is not int or most < 1):
        raise CheckpointError(f"{SENTENCES}: max_seq_length must be a positive integer; got {describe(most)}")
    return most
