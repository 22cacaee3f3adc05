"""The split of the training text depends on nothing but the files' paths, and the tokenizer alters no text."""

import ast
import hashlib

from attend.model.train.corpus import (
    functions,
    is_held_out,
)


def hashed(path: str) -> int:
    return int.from_bytes(hashlib.sha256(path.encode("utf-8")).digest(), "big")


def test_known_paths_stay_on_the_sides_they_are_on():
    """Written down once: another hash, or other input to it, would mix held-out text into the training text."""
    held_out, trained = ["functools.py", "asyncio/events.py"], ["argparse.py", "asyncio/tasks.py"]
    assert [is_held_out(path) for path in held_out + trained] == [True, True, False, False]
    assert [hashed(path) % 50 == 0 for path in held_out + trained] == [True, True, False, False]


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
