"""What a step trains on: pieces of the text, and, in every second step, whole functions, each row from a header on."""

import ast

import numpy as np
import pytest
import torch

from attend.model.train import batches
from attend.model.train.batches import FUNCTIONS_EVERY, SHARE_OF_CONTEXT, STUTTERS_EVERY, TrainingText, batch_at
from attend.model.train.loss import IGNORED
from attend.model.train.trainer import Recipe
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
    return batches.read_texts(tokenizer, TEXTS, CONTEXT)


def rows_of_functions(text: TrainingText, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens and targets of the first `count` rows of functions."""
    per_step = RECIPE.batch * SHARE_OF_CONTEXT
    steps = [FUNCTIONS_EVERY * turn + FUNCTIONS_EVERY - 1 for turn in range(-(-count // per_step))]
    tokens, targets = (torch.cat(side) for side in zip(*(batch_at(text, RECIPE, step) for step in steps), strict=True))
    return tokens[:count].tolist(), targets[:count].tolist()


def test_every_function_that_fits_is_read_and_ends(tokenizer, text):
    """Between end-of-text tokens stand functions, all of them Python; the one that is too long is not there."""
    bodies = tokenizer.decode(text.functions.tolist(), skip_special_tokens=False).split("<|endoftext|>")
    assert bodies.pop() == ""
    assert sorted(ast.parse(body).body[0].name for body in bodies) == sorted(["one", "two", *(f"f{i}" for i in range(9))])
    assert np.array_equal(text.row, batches.corpus.encode_texts(tokenizer, TEXTS))


def test_a_row_of_functions_starts_with_a_header_and_has_a_fixed_length(tokenizer, text):
    tokens, targets = rows_of_functions(text, 40)
    assert {len(row) for row in (*tokens, *targets)} == {LENGTH}
    assert all(tokenizer.decode(row).startswith("d") for row in tokens)


def test_an_epoch_starts_once_at_each_function(text):
    """And the next epoch does so in another order. Rows that stutter are told by their targets' first tokens."""
    count = len(text.starts)
    tokens, _ = rows_of_functions(text, 2 * count)
    plain = {tuple(text.functions[start:][:LENGTH].tolist()): start for start in text.starts}
    found = [plain.get(tuple(row)) for row in tokens]
    for epoch in (found[:count], found[count:]):
        known = [start for start in epoch if start is not None]
        assert len(known) == len(set(known)) >= count // 2
    assert found[:count] != found[count:]


def test_a_stutter_is_ignored_then_unlearned_and_what_follows_is_learned(text):
    """Without the stutter the row is the text as it was, and the stutter repeats what stands before it."""
    tokens, targets = rows_of_functions(text, 400)
    whole, more_often, gone_on = text.functions.tolist(), 0, 0
    for index in range(0, 400, STUTTERS_EVERY):
        row, goals = tokens[index], [tokens[index][0], *targets[index][:-1]]
        kept = [token for token, goal in zip(row, goals, strict=True) if goal >= 0]
        assert any(kept == whole[start:][: len(kept)] for start in text.starts)
        first = next(at for at, goal in enumerate(goals) if goal < 0)
        period = next((at for at, goal in enumerate(goals[first:]) if goal != IGNORED), len(row) - first)
        for at, goal in enumerate(goals):
            if goal < 0:
                assert row[at] == row[at - period]
                assert goal == IGNORED if at < first + period else goal == IGNORED - 1 - row[at]
            else:
                assert goal == row[at]
        more_often += min(goals) < IGNORED
        gone_on += goals[-1] >= 0
    assert more_often > 100
    assert gone_on > 50
