"""How near forms of one model come to the first of them on a text: bits per byte, divergence, and agreement.

Shapes: T tokens · V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

SCORES = 1 << 22
"""Scores of each form that live at the same time: 16 MiB in float32."""


class Window(NamedTuple):
    """Tokens `start .. stop - 2` of a text are read at once; tokens `scored .. stop - 1` are predicted from them."""

    start: int
    first_scored: int
    stop: int


def overlapping_windows(num_tokens: int, context: int) -> Iterator[Window]:
    """Windows of `context` tokens that overlap by half. Each token of the text but the first is scored once.

    It has at least half a window before it, except in the first window.
    """
    scored = 1
    while scored < num_tokens:
        start = max(0, min(scored - context // 2, num_tokens - 1 - context))
        stop = min(start + context + 1, num_tokens)
        yield Window(start, scored, stop)
        scored = stop


class Scorer(Protocol):
    """A model in some form, or by another engine."""

    @property
    def vocab_size(self) -> int:
        """V, the size of the vocabulary."""
        ...

    def read(self, tokens: Sequence[int], first: int) -> Callable[[int, int], Tensor]:
        """Compute a window. The result gives scores [T, V] of what follows tokens `first + begin .. first + end - 1` of it."""
        ...


@dataclass(slots=True)
class Quality:
    """How well a form predicts a text, summed over its positions."""

    positions: int = 0
    nats: float = 0.0
    """-log p of the text's tokens."""
    squares: float = 0.0
    """Sum of the squared differences in cost of each token, in nats, from the first form."""
    divergence: float = 0.0
    """Kullback-Leibler divergence from the first form's probabilities to these, in nats."""
    agreed: int = 0
    """Positions whose likeliest token is the first form's."""

    def bits_per_byte(self, num_bytes: int) -> float:
        """Bits per byte of a text of `num_bytes` bytes."""
        return self.nats / math.log(2) / num_bytes

    def uncertainty(self, first: "Quality") -> float:
        """Standard error of the nats beside the first form's, for other texts of the same kind."""
        more = self.nats - first.nats
        return math.sqrt(max(0.0, self.squares - more * more / self.positions))

    def add(self, wanted_TV: Tensor, found_TV: Tensor, targets_T: Tensor) -> None:
        """Count positions with the log probabilities of the first form and of this one."""
        self.positions += len(targets_T)
        wanted_T, found_T = (F.nll_loss(each, targets_T, reduction="none").double() for each in (wanted_TV, found_TV))
        self.nats += found_T.sum().item()
        self.squares += (found_T - wanted_T).square().sum().item()
        parts_TV = F.kl_div(found_TV, wanted_TV, reduction="none", log_target=True)
        self.divergence += parts_TV.sum(dtype=torch.float64).item()
        self.agreed += int((found_TV.argmax(-1) == wanted_TV.argmax(-1)).sum())


@torch.inference_mode()
def compare(
    forms: Sequence[Scorer], tokens: Sequence[int], context: int, report: Callable[[int], None] = lambda count: None
) -> list[Quality]:
    """Each form's quality on a text, read in `overlapping_windows` by all forms side by side. `report` is told how far it
    is."""
    found = [Quality() for _ in forms]
    at_once = max(1, SCORES // forms[0].vocab_size)
    for start, scored, stop in overlapping_windows(len(tokens), context):
        readings = [form.read(tokens[start : stop - 1], scored - 1 - start) for form in forms]
        targets_T = torch.tensor(tokens[scored:stop])
        for begin in range(0, len(targets_T), at_once):
            end = min(begin + at_once, len(targets_T))
            wanted_TV = readings[0](begin, end).float().log_softmax(-1)
            found[0].add(wanted_TV, wanted_TV, targets_T[begin:end])
            for quality, scores in zip(found[1:], readings[1:], strict=True):
                quality.add(wanted_TV, scores(begin, end).float().log_softmax(-1), targets_T[begin:end])
        report(stop)
    return found
