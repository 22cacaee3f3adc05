"""The split of the training text depends on nothing but the files' paths, and the tokenizer alters no text."""

import ast
import hashlib
from pathlib import Path

import numpy as np
import pytest

from attend.model.train.corpus import (
    END_OF_TEXT,
    HELD_OUT_SHARE,
    encode_texts,
    functions,
    is_held_out,
    read_texts,
    source_files,
    standard_library,
    train_tokenizer,
)
from tests.model.checkpoints import byte_level_tokenizer


def hashed(path: str) -> int:
    return int.from_bytes(hashlib.sha256(path.encode("utf-8")).digest(), "big")


HELD_OUT, TRAINED = (
    next(name for i in range(10_000) if (hashed(name := f"package/module_{i}.py") % 50 == 0) == held) for held in (True, False)
)


def write_tree(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def test_one_file_in_fifty_is_held_out_by_the_hash_of_its_path():
    names = [f"a/{i}.py" for i in range(2000)]
    assert HELD_OUT_SHARE == 50
    assert [hashed(name) % 50 == 0 for name in names] == [is_held_out(name) for name in names]
    assert sum(map(is_held_out, names)) == pytest.approx(40, abs=20)


def test_known_paths_stay_on_the_sides_they_are_on():
    """Written down once: another hash, or other input to it, would mix held-out text into the training text."""
    held_out, trained = ["functools.py", "asyncio/events.py"], ["argparse.py", "asyncio/tasks.py"]
    assert [is_held_out(path) for path in held_out + trained] == [True, True, False, False]
    assert [hashed(path) % 50 == 0 for path in held_out + trained] == [True, True, False, False]


def test_where_the_folder_stands_does_not_move_the_split(tmp_path):
    """The path is relative to the root, whatever the root; the content has no say."""
    for root, content in ((tmp_path / "here", b"a = 1"), (tmp_path / "far" / "there", b"b = 2")):
        write_tree(root, {HELD_OUT: content, TRAINED: content + b"0"})
        assert [content.decode()] == read_texts(root, held_out=True)
        assert [content.decode() + "0"] == read_texts(root, held_out=False)


def test_each_text_is_on_one_side_of_the_split(tmp_path):
    """Together the two sides are the library; no text is on both."""
    names = [f"p{i % 7}/m{i}.py" for i in range(300)]
    root = write_tree(tmp_path, {name: f"# {name}".encode() for name in names})
    train, held_out = (set(read_texts(root, held_out=side)) for side in (False, True))
    assert set() == train & held_out
    assert {f"# {name}" for name in names} == train | held_out
    assert held_out


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


def test_a_file_that_is_not_utf8_is_left_out(tmp_path):
    name = next(name for i in range(1000) if not is_held_out(name := f"latin_{i}.py"))
    write_tree(tmp_path, {TRAINED: b"x", name: b"# \xe9"})
    assert read_texts(tmp_path, held_out=False) == ["x"]


def test_the_standard_library_is_where_python_keeps_it():
    assert (standard_library() / "argparse.py").is_file()


def test_texts_are_rows_of_tokens_each_after_an_end_of_text():
    """The token that ends a text also starts one: the row begins with it, and splitting at it gives back the texts."""
    tokenizer = byte_level_tokenizer()
    texts = ["def f():\n", "", "naïve 😀\n", "the cat"]
    row = encode_texts(tokenizer, texts)
    starts = np.flatnonzero(row == tokenizer.bos_token_id)
    assert row.dtype == np.uint16
    assert starts[0] == 0
    assert texts == [tokenizer.decode(part.tolist()) for part in np.split(row, starts[1:])]


def test_a_trained_tokenizer_is_a_function_of_its_texts():
    texts = ["aa bb aa bb", "aa cc"] * 3
    first, second = (train_tokenizer(texts, 280) for _ in range(2))
    assert first.raw.to_str() == second.raw.to_str()
    assert first.size <= 280
    assert first.decode([first.bos_token_id], skip_special_tokens=False) == END_OF_TEXT
    assert len(first.encode("aa bb")) < len("aa bb")


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
