"""Lengths in tokens as a distribution: `256`, `uniform:64:512`, `normal:256:64`, `lognormal:200:0.8`."""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from math import log

Draw = Callable[[random.Random, float, float], float]
KINDS: dict[str, tuple[str, Draw]] = {
    "uniform": ("LEAST:MOST", lambda dice, low, high: dice.uniform(low, high)),
    "normal": ("MEAN:DEVIATION", lambda dice, mean, deviation: dice.gauss(mean, deviation)),
    "lognormal": ("MEDIAN:SIGMA", lambda dice, median, sigma: dice.lognormvariate(log(median), sigma)),
}
"""The distributions by name, with what their two numbers are. `lognormal` has the long tail of real prompts and answers."""
LONGEST = 1 << 20


@dataclass(frozen=True)
class Lengths:
    """A distribution of whole numbers from 1 on."""

    text: str
    kind: str
    first: float
    second: float = 0.0

    def draw(self, dice: random.Random) -> int:
        """The next length."""
        value = self.first if self.kind == "constant" else KINDS[self.kind][1](dice, self.first, self.second)
        return max(1, min(LONGEST, round(value)))


def lengths(text: str) -> Lengths:
    """A distribution from the command line. Raises argparse.ArgumentTypeError."""
    kind, *numbers = text.split(":")
    try:
        if kind not in KINDS:
            found = Lengths(text, "constant", float(text))
        else:
            found = Lengths(text, kind, *map(float, numbers))
            if len(numbers) != 2 or found.second < 0 or (kind == "uniform" and found.first > found.second):
                raise ValueError
        if not 1 <= found.first <= LONGEST:
            raise ValueError
    except (ValueError, TypeError):
        known = ", ".join(f"{name}:{what}" for name, (what, _) in KINDS.items())
        raise argparse.ArgumentTypeError(f"{text!r} is no distribution of lengths: a number from 1 on, or {known}") from None
    return found
