"""The tokens of each training step: pieces of the running text, and in every second step whole functions.

A piece starts anywhere in a file, so a model that reads pieces alone seldom sees a function begin without what stands
above it, and seldom sees one end. Rows of whole functions teach both: each starts with a header at position 0.

And a model that only reads what people wrote never learns to leave a loop, since people do not write them; its greedy
text ends in one. So some functions stutter: a line or a few tokens stand there several times over (the idea of Xu et al.
2022, "Learning to break the loop"). What is learned is how the function goes on after the last of them; what stands there
a second time is ignored, and what stands there more often is unlearned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attend.model.text.tokenizer import Tokenizer
from attend.model.train import corpus
from attend.model.train.loss import IGNORED, unlikelihood_targets

if TYPE_CHECKING:
    from attend.model.train.trainer import Recipe

FUNCTIONS_EVERY = 2
"""One step in so many trains on functions."""
STUTTERS_EVERY = 2
"""One row of functions in so many has a repeated part."""
MAX_REPEATS, MAX_REPEATED = 8, 8
"""Copies of what is repeated; its tokens, where it is not lines."""
SHARE_OF_CONTEXT = 4
"""A row of functions is this many times shorter than a piece, and a step has as many times more of them."""


@dataclass(frozen=True, slots=True)
class TrainingText:
    """The training text, as token ids."""

    row: NDArray[np.uint16]
    """All files, each after an end-of-text token."""
    functions: NDArray[np.uint16] = field(default_factory=lambda: np.zeros(0, dtype=np.uint16))
    """All functions that fit in a row, each before an end-of-text token."""
    starts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Indices in `functions` at which a row may start: those of functions with a whole row of tokens from there on."""
    ends_line: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    """True if each token of the vocabulary begins with the end of a line, bool [V]."""


def read_texts(tokenizer: Tokenizer, texts: list[str], context: int) -> TrainingText:
    """The texts as running text and as the functions that are no longer than a row of functions."""
    row, end = corpus.encode_texts(tokenizer, texts), tokenizer.bos_token_id
    longest = context // SHARE_OF_CONTEXT
    bodies = [function for text in texts for function in corpus.functions(text)]
    encoded = [[*encoding.ids, end] for encoding in tokenizer.raw.encode_batch_fast(bodies)]
    fitting = [np.array(ids, dtype=np.uint16) for ids in encoded if len(ids) <= longest]
    if not fitting:
        return TrainingText(row)
    functions = np.concatenate(fitting)
    starts = np.cumsum([0, *map(len, fitting[:-1])], dtype=np.int64)
    ends_line = np.array([tokenizer.decode([token]).startswith("\n") for token in range(tokenizer.size)])
    return TrainingText(row, functions, starts[starts + longest < len(functions)], ends_line)


def batch_at(text: TrainingText, recipe: Recipe, step: int) -> tuple[Tensor, Tensor]:
    """Token ids [rows, length] of a step and their targets: a pure function of the recipe, so that resuming repeats nothing."""
    if len(text.starts) and step % FUNCTIONS_EVERY == FUNCTIONS_EVERY - 1:
        rows = _functions(text, recipe, step // FUNCTIONS_EVERY)
    else:
        rows = [(piece[:-1], piece[1:]) for piece in _pieces(text.row, recipe, step)]
    tokens, targets = (torch.from_numpy(np.stack(side).astype(np.int64)) for side in zip(*rows, strict=True))
    return tokens, targets


def _pieces(row: NDArray[np.uint16], recipe: Recipe, step: int) -> list[NDArray[np.uint16]]:
    """Each epoch cuts the row at a new offset and visits the pieces in a new order."""
    per_epoch = (len(row) - 1) // recipe.context - 1
    rows = []
    for index in range(step * recipe.batch, (step + 1) * recipe.batch):
        epoch, place = divmod(index, per_epoch)
        order = np.random.default_rng((recipe.seed, epoch))
        offset = int(order.integers(recipe.context))
        start = offset + int(order.permutation(per_epoch)[place]) * recipe.context
        rows.append(row[start : start + recipe.context + 1])
    return rows


def _functions(text: TrainingText, recipe: Recipe, turn: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Each epoch starts once at each function, in a new order, and reads on over those that follow it."""
    length, batch = recipe.context // SHARE_OF_CONTEXT, recipe.batch * SHARE_OF_CONTEXT
    rows = []
    for index in range(turn * batch, (turn + 1) * batch):
        epoch, place = divmod(index, len(text.starts))
        start = int(np.random.default_rng((recipe.seed, epoch)).permutation(len(text.starts))[place])
        row = text.functions[text.starts[start] :][: length + 1].astype(np.int64)
        if index % STUTTERS_EVERY:
            rows.append((row[:-1], row[1:]))
        else:
            end = int(np.argmax(row == text.functions[-1])) or length
            rows.append(_repeat_function(row, end, text.ends_line, np.random.default_rng((recipe.seed, index))))
    return rows


def _repeat_function(
    row: NDArray[np.int64], end: int, ends_line: NDArray[np.bool_], chance: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens and targets of a row, with a part of its first function, which ends before `end`, several times over."""
    lines = np.flatnonzero(ends_line[row[:end]])
    if len(lines) > 1 and chance.random() < 0.5:
        first = int(chance.integers(len(lines) - 1))
        begin, stop = lines[first], lines[min(len(lines) - 1, first + int(chance.integers(1, 4)))]
    else:
        begin = int(chance.integers(end))
        stop = min(end, begin + int(chance.integers(1, MAX_REPEATED + 1)))
    copies = np.tile(row[begin:stop], int(chance.integers(1, MAX_REPEATS)))
    tokens = np.concatenate([row[:stop], copies, row[stop:]])[: len(row)]
    targets = tokens.copy()
    again, more = slice(stop, 2 * stop - begin), slice(2 * stop - begin, stop + len(copies))
    targets[again] = IGNORED
    targets[more] = unlikelihood_targets(tokens[more])
    return tokens[:-1], targets[1:]
