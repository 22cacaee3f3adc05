"""The training text: the running interpreter's own standard library, split by a hash of each file's path."""

import ast
import hashlib
import io
import os
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from attend.model.text.tokenizer import Tokenizer

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_SHARE = 50
"""One file in this many is held out: sha256 of its relative path, as an integer, is a multiple of it."""

_SKIPPED = {"site-packages", "dist-packages", "__pycache__"}


def standard_library() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def is_held_out(relative: str) -> bool:
    """True if a file is kept from training, by nothing but its path."""
    return int(hashlib.sha256(relative.encode()).hexdigest(), 16) % HELD_OUT_SHARE == 0


def read_texts(root: Path, *, held_out: bool) -> list[str]:
    """The texts of the Python files under `root` on one side of the split, sorted, without installed packages; files that are
    not UTF-8 (test data of the library) are left out.
    """
    found = []
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in _SKIPPED)
        for path in (Path(folder, name) for name in sorted(files) if name.endswith(".py")):
            if is_held_out(path.relative_to(root).as_posix()) == held_out:
                with suppress(UnicodeDecodeError):
                    found.append(path.read_text(encoding="utf-8"))
    return found


def functions(text: str) -> Iterator[str]:
    """The source of every function and method of a text, moved to column 0, without decorators; none if it is not Python.

    Lines of a string that stand left of the function stay where they are.
    """
    tree = parse_python(text)
    lines = io.StringIO(text).readlines()  # as Python counts them, not at form feeds
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            indent = " " * node.col_offset
            yield "".join(line.removeprefix(indent) for line in lines[node.lineno - 1 : node.end_lineno])


def parse_python(text: str) -> ast.Module | None:
    """What Python's own parser makes of a text; None if it refuses it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an escape that a string does not know
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # also null bytes and too deep nesting
        return None


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE (Sennrich et al. 2016; Radford et al. 2019): every text can be encoded, none is altered."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    return Tokenizer(raw, raw.token_to_id(END_OF_TEXT))


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> NDArray[np.uint16]:
    """One long row of token ids; each text follows an end-of-text token, which thus also starts a text."""
    start = tokenizer.bos_token_id
    assert start is not None and tokenizer.size <= 1 << 16
    rows = [np.array([start, *encoding.ids], dtype=np.uint16) for encoding in tokenizer.raw.encode_batch_fast(texts)]
    return np.concatenate(rows)
