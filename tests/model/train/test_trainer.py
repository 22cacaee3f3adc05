"""Training: the loss falls, no piece is seen twice in an epoch, and a run that was cut off goes on as if it had not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from attend.model.errors import SettingError
from attend.model.train.batches import TrainingText, batch_at
from attend.model.train.trainer import Progress, Recipe, Trainer
from tests.model.checkpoints import VOCAB, tiny_config

RECIPE = Recipe(tokens=16 * 4 * 24, context=16, batch=4, learning_rate=2e-2, warmup=0.1, evaluate_every=8)
CONFIG = tiny_config(num_layers=1)
TEXT = (np.arange(2000) * 7 % 31).astype(np.uint16)  # each token follows from the one before it
HELD_OUT = torch.from_numpy(TEXT[:60].astype(np.int64))


class KilledError(Exception):
    """Stands for a power cut."""


def train(folder: Path, recipe: Recipe = RECIPE, kill_at: int | None = None) -> Trainer:
    trainer = Trainer(CONFIG, recipe, folder)

    def report(progress: Progress) -> None:
        if progress.step == kill_at:
            raise KilledError

    trainer.run(TrainingText(TEXT), HELD_OUT, 60, report)
    return trainer


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Trainer:
    return train(tmp_path_factory.mktemp("unbroken"))


def assert_same_moments(ours: dict[str, torch.Tensor], others: dict[str, torch.Tensor], place: tuple[str, int]) -> None:
    assert ours.keys() == others.keys(), place
    for key, value in ours.items():
        assert torch.equal(value, others[key]), (*place, key)


def assert_same_run(ours: Trainer, other: Trainer) -> None:
    for (name, one), two in zip(ours.net.named_parameters(), other.net.parameters(), strict=True):
        assert torch.equal(one, two), name
        for place, (optimizer, twin) in enumerate(zip(ours.optimizers, other.optimizers, strict=True)):
            assert_same_moments(optimizer.state.get(one, {}), twin.state.get(two, {}), (name, place))
    assert ours.progress.step == other.progress.step == RECIPE.steps
    assert list(map(tuple, ours.progress.held_out)) == list(map(tuple, other.progress.held_out))


def test_a_run_learns(unbroken):
    """On a text whose every token follows from the last, a few steps take the loss far below that of a guess."""
    (_, first), *_, (_, last) = unbroken.progress.losses
    (_, before), *_, (_, after) = unbroken.progress.held_out
    assert last < first / 2 < np.log(VOCAB) / 2
    assert after < before / 2 < np.log2(VOCAB) / 2
    assert unbroken.evaluate(HELD_OUT, 60) == after


@pytest.mark.parametrize("cut", [3, 8, 13, 23])
def test_a_run_that_was_cut_off_goes_on_to_the_same_bits(unbroken, tmp_path, cut):
    """True if it died before the first save, just after one, or between two: weights and moments are those unbroken."""
    with pytest.raises(KilledError):
        train(tmp_path, kill_at=cut)
    assert Trainer(CONFIG, RECIPE, tmp_path).progress.step == cut // 8 * 8
    assert_same_run(train(tmp_path), unbroken)


@pytest.mark.parametrize("change", [{"seed": 1}, {"batch": 5}, {"context": 8}, {"weight_decay": 0.0}])
def test_a_run_with_another_order_of_the_data_is_refused(tmp_path, change):
    train(tmp_path, replace(RECIPE, tokens=16 * 4 * 8))
    with pytest.raises(SettingError, match=next(iter(change))):
        Trainer(CONFIG, replace(RECIPE, **change), tmp_path)


def places(recipe: Recipe, tokens: np.ndarray, pieces: int) -> list[int]:
    """Where each of the first pieces starts, on a row that counts."""
    steps = [batch_at(TrainingText(tokens), recipe, step) for step in range(-(-pieces // recipe.batch))]
    rows, targets = (torch.cat(side)[:pieces] for side in zip(*steps, strict=True))
    assert torch.equal(rows - rows[:, :1], torch.arange(recipe.context).expand_as(rows))
    assert torch.equal(targets, rows + 1)
    return rows[:, 0].tolist()


@pytest.mark.parametrize("length", [49, 100, 500, 503])
def test_an_epoch_visits_each_piece_once(length):
    """Pieces of an epoch lie end to end: none repeats, none overlaps; the next epoch cuts and orders them anew."""
    recipe, tokens = Recipe(context=16, batch=3, seed=5), np.arange(length, dtype=np.uint16)
    per_epoch = (length - 1) // 16 - 1
    first, second = np.split(np.array(places(recipe, tokens, 2 * per_epoch)), 2)
    for epoch in (first, second):
        assert np.array_equal(np.sort(epoch), epoch.min() + 16 * np.arange(per_epoch))
        assert epoch.min() < 16
    if per_epoch > 3:
        assert first.tolist() != second.tolist()
        assert first.tolist() != sorted(first)
