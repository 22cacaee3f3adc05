"""How a model says how well a document answers a query: by the cosine of embeddings, or as a reranker that answers yes or no.

A cross-encoder, a model with a head for scores, is not served.

A reranker of the second kind is a causal model: the score is the probability of yes beside no in the place of its answer, as of
Qwen3-Reranker. Its files say so, or its name, or a setting.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from attend.model.errors import CheckpointError, InvalidRequest
from attend.model.gguf.paths import is_gguf
from attend.model.pooling import MODULES, EmbeddingRules
from attend.model.text.tokenizer import Tokenizer
from attend.model.weights import read_any_json, read_json

NAMED = "qwen3-reranker"
"""A part of the names of models that answer yes or no, in small letters."""
RANK = 4
"""`pooling_type` of a GGUF file that holds a reranker."""
LOGIT_SCORE = "LogitScore"
"""The module of sentence-transformers that takes the scores of two tokens."""
YES, NO = "yes", "no"


class ScoreWay(StrEnum):
    """How a model scores a pair of texts."""

    COSINE = "cosine"
    YES_NO = "yes_no"


@dataclass(frozen=True, slots=True)
class ScoreRules:
    """How a checkpoint scores pairs of texts, or why it cannot."""

    way: ScoreWay | None = None
    tokens: tuple[int, int] = (-1, -1)
    """The ids of yes and no, where they are asked for."""
    refusal: str = "this model gives no scores: neither its files nor its name say how; the server's --score or --pooling can"


NO_SCORES = ScoreRules()
COSINE = ScoreRules(ScoreWay.COSINE, refusal="")


def score_rules(folder: Path, name: str, choice: str, embedding: EmbeddingRules, tokenizer: Tokenizer) -> ScoreRules:
    """The rules for a checkpoint that is served under a name; `choice` is the setting: auto, or a ScoreWay."""
    tokens = _one_token(tokenizer, YES), _one_token(tokenizer, NO)
    if choice == ScoreWay.YES_NO or (choice == "auto" and _answers_yes_or_no(folder, name, tokens)):
        if None in tokens:
            return ScoreRules(refusal=f"this model gives no scores: its tokenizer lacks a single token for {YES} or for {NO}")
        return ScoreRules(ScoreWay.YES_NO, (tokens[0] or 0, tokens[1] or 0), "")
    if embedding.pooling is not None:
        return COSINE
    return ScoreRules(refusal=embedding.refusal) if choice == ScoreWay.COSINE else NO_SCORES


def _one_token(tokenizer: Tokenizer, text: str) -> int | None:
    """The token of a text that is one."""
    try:
        ids = tokenizer.encode(text, add_special_tokens=False)
    except InvalidRequest:
        return None
    return ids[0] if len(ids) == 1 else None


def _answers_yes_or_no(folder: Path, name: str, tokens: tuple[int | None, int | None]) -> bool:
    """True if the model's name says so, or its files."""
    if NAMED in name.lower() or NAMED in folder.name.lower():
        return True
    if is_gguf(folder):
        from attend.model.gguf.documents import pooling_type  # it needs numpy, and a folder does not

        return pooling_type(folder) == RANK
    try:
        own = read_json(folder, "config.json").get("_name_or_path")
        return (isinstance(own, str) and NAMED in own.lower()) or _scored_tokens(folder) == tokens
    except CheckpointError:
        return False


def _scored_tokens(folder: Path) -> tuple[Any, Any] | None:
    """The tokens of a LogitScore; None where there is none. Raises CheckpointError."""
    listed = read_any_json(folder, MODULES) if (folder / MODULES).is_file() else []
    for module in listed if isinstance(listed, list) else []:
        kind, path = (module.get(name) if isinstance(module, dict) else None for name in ("type", "path"))
        if isinstance(kind, str) and isinstance(path, str) and kind.rpartition(".")[2] == LOGIT_SCORE:
            raw = read_json(folder, f"{path}/config.json")
            return raw.get("true_token_id"), raw.get("false_token_id")
    return None
