"""The split of the training text depends on nothing but the files' paths, and the tokenizer alters no text."""

import ast
import hashlib
from pathlib import Path

import numpy as np

from attend.model.train.corpus import (
    encode_texts,
    functions,
    is_held_out,
    source_files,
)
from tests.model.checkpoints import byte_level_tokenizer


def hashed(path: str) -> int:
    return int.from_bytes(hashlib.sha256(path.encode("utf-8")).digest(), "big")


def write_tree(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def test_known_paths_stay_on_the_sides_they_are_on():
    """Written down once: another hash, or other input to it, would mix held-out text into the training text."""
    held_out, trained = ["functools.py", "asyncio/events.py"], ["argparse.py", "asyncio/tasks.py"]
    assert [is_held_out(path) for path in held_out + trained] == [True, True, False, False]
    assert [hashed(path) % 50 == 0 for path in held_out + trained] == [True, True, False, False]


def test_only_the_librarys_own_python_files_are_read(tmp_path):
    """Installed packages, caches and other files are no part of it; files come sorted, whatever the disk says."""
    ours = ["a.py", "b/a.py", "b/z.py", "c/d/e.py"]
    others = [
        "site-packages/x.py",
        "b/site-packages/x.py",
        "dist-packages/y.py",
        "c/__pycache__/z.py",
        "b/notes.txt",
        "b/w.pyc",
    ]
    write_tree(tmp_path, dict.fromkeys([*reversed(ours), *others], b""))
    assert [(name, tmp_path / name) for name in ours] == list(source_files(tmp_path))


def test_texts_are_rows_of_tokens_each_after_an_end_of_text():
    """The token that ends a text also starts one: the row begins with it, and splitting at it gives back the texts."""
    tokenizer = byte_level_tokenizer()
    texts = ["def f():\n", "", "naïve 😀\n", "the cat"]
    row = encode_texts(tokenizer, texts)
    starts = np.flatnonzero(row == tokenizer.bos_token_id)
    assert row.dtype == np.uint16
    assert starts[0] == 0
    assert texts == [tokenizer.decode(part.tolist()) for part in np.split(row, starts[1:])]


def test_functions_are_moved_to_column_0_and_stay_python():
    text = '''
class A:
    @property
    def one(self):
        """First.

left of the function
        """
        def inner(x):
            return x\x0c

        return inner

    async def two(self): pass
'''
    found = {ast.parse(function).body[0].name: function for function in functions(text)}
    assert found.keys() == {"one", "inner", "two"}
    assert found["inner"] == "def inner(x):\n    return x\x0c\n"
    assert found["one"].startswith('def one(self):\n    """First.\n\nleft of the function\n')
    assert found["two"] == "async def two(self): pass\n"
    assert list(functions("def f(:\n")) == []
