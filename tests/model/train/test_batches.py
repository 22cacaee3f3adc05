"""What a step trains on: pieces of the text, and, in every third step, whole functions, each row from a header on."""

import ast

import numpy as np
import pytest
import torch

from model.train import batches
from model.train.batches import FUNCTIONS_EVERY, SHARE_OF_CONTEXT, TrainingText, batch_at
from model.train.trainer import Recipe
from tests.model.checkpoints import byte_level_tokenizer

CONTEXT = 160
LENGTH = CONTEXT // SHARE_OF_CONTEXT
RECIPE = Recipe(context=CONTEXT, batch=2, seed=3)
TEXTS = [
    "class A:\n    def one(self):\n        return 1\n\n    @property\n    def two(self):\n        return 2\n",
    "".join(f"def f{i}(x):\n    return {i}\n\n" for i in range(9)) + "def long():\n    return (" + "1, " * LENGTH + ")\n",
    "this is no Python\n",
]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level_tokenizer()


@pytest.fixture(scope="module")
def text(tokenizer) -> TrainingText:
    return batches.read(tokenizer, TEXTS, CONTEXT)


def function_steps(count: int) -> list[int]:
    return [FUNCTIONS_EVERY * turn + FUNCTIONS_EVERY - 1 for turn in range(count)]


def test_every_function_that_fits_is_read_and_ends(tokenizer, text):
    """Between end-of-text tokens stand functions, all of them Python; the one that is too long is not there."""
    bodies = tokenizer.decode(text.functions.tolist(), skip_special_tokens=False).split("<|endoftext|>")
    assert bodies.pop() == ""
    assert sorted(ast.parse(body).body[0].name for body in bodies) == sorted(["one", "two", *(f"f{i}" for i in range(9))])
    assert np.array_equal(text.row, batches.corpus.encode_texts(tokenizer, TEXTS))


def test_a_row_of_functions_starts_with_a_header(tokenizer, text):
    for step in function_steps(4):
        rows = batch_at(text, RECIPE, step)
        assert tuple(rows.shape) == (RECIPE.batch * SHARE_OF_CONTEXT, LENGTH + 1)
        assert all(tokenizer.decode(row.tolist()).startswith("def ") for row in rows)


def test_an_epoch_starts_once_at_each_function(text):
    """And the next epoch does so in another order."""
    rows = torch.cat([batch_at(text, RECIPE, step) for step in function_steps(9)])
    count = len(text.starts)
    expected = {tuple(text.functions[start:][: LENGTH + 1].tolist()) for start in text.starts}
    epochs = [[tuple(row) for row in part.tolist()] for part in (rows[:count], rows[count : 2 * count])]
    assert set(epochs[0]) == set(epochs[1]) == expected
    assert epochs[0] != epochs[1]


def test_the_other_steps_read_pieces_as_if_there_were_no_functions(text):
    for step in range(2 * FUNCTIONS_EVERY):
        if step not in function_steps(2):
            assert torch.equal(batch_at(text, RECIPE, step), batch_at(TrainingText(text.row), RECIPE, step))


def test_a_text_without_functions_is_read_in_pieces(tokenizer):
    text = batches.read(tokenizer, ["x = 1\n" * 300], CONTEXT)
    assert not len(text.starts)
    assert {tuple(batch_at(text, RECIPE, step).shape) for step in range(6)} == {(RECIPE.batch, CONTEXT + 1)}
