"""One measured quantity of a fault, and its limit."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Measure:
    """`value` in `unit` of `what`, which should be at most `most`; None is no limit. `note` says what was seen."""

    what: str
    value: float
    unit: str = ""
    most: float | None = None
    note: str = ""

    @property
    def within_limit(self) -> bool:
        """True if the value is within its limit."""
        return self.most is None or self.value <= self.most

    def text(self) -> str:
        """The value with its unit, and the limit."""
        value = "never" if math.isinf(self.value) else f"{self.value:.3g}"
        limit = "" if self.most is None or self.value == self.most == 0 else f" (at most {self.most:.3g})"
        return f"{self.what} {value}{' ' + self.unit if self.unit else ''}{limit}"
