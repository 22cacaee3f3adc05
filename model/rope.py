"""Rotary positions as data: which columns turn how fast, and how their wavelengths are stretched for a longer context.

Each kind of scaling is a record of its numbers; `model/net/rope.py` computes with them. Torch-free.
"""

import math
from dataclasses import dataclass, fields

from attend.model.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How the wavelengths of a model that learned `original_positions` are stretched. See the kinds below."""

    def check(self, size: int) -> None:
        """Refuse numbers that mean nothing for `size` rotated columns. Raises CheckpointError."""
        for field in fields(self):
            value = getattr(self, field.name)
            optional = value is None and field.default is None
            if not optional and field.type in (float, int) and not (type(value) in (int, float) and 0 < value < math.inf):
                raise CheckpointError(f"config.json: rope scaling: {field.name} must be a number above 0; got {value!r}")


@dataclass(frozen=True, slots=True)
class LinearScaling(RopeScaling):
    """Every wavelength times `factor` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling(RopeScaling):
    """A larger theta the longer the served context is beyond `original_positions` ("NTK-aware")."""

    factor: float
    original_positions: int

    def check(self, size: int) -> None:
        """See RopeScaling."""
        RopeScaling.check(self, size)
        if self.factor < 1 or size < 4:
            raise CheckpointError(f"config.json: rope scaling needs a factor of 1 or more, and 4 rotated columns; got {self}")


@dataclass(frozen=True, slots=True)
class Llama3Scaling(RopeScaling):
    """Long wavelengths times `factor`, short ones as they are, a blend between (Llama 3.1 model card)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int

    def check(self, size: int) -> None:
        """See RopeScaling."""
        RopeScaling.check(self, size)
        if self.factor < 1 or self.low_freq_factor >= self.high_freq_factor:
            raise CheckpointError(
                "config.json: rope scaling needs a factor of 1 or more, and low_freq_factor below high_freq_factor, "
                f"and all of them above 0; got {self}"
            )


@dataclass(frozen=True, slots=True)
class ProportionalScaling(RopeScaling):
    """Every wavelength times `factor`; the first `share` of the pairs turns, and the others do not (Gemma 4)."""

    factor: float
    share: float

    def check(self, size: int) -> None:
        """See RopeScaling."""
        RopeScaling.check(self, size)
        if self.share > 1:
            raise CheckpointError(f"config.json: rope scaling: at most all pairs of columns turn; got a share of {self.share}")


@dataclass(frozen=True, slots=True)
class YarnScaling(RopeScaling):
    """As Llama 3's, with bounds in turns within the original context, and attention made sharper (Peng et al. 2023)."""

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    """Columns that turn more often within the original context stay as they are."""
    beta_slow: float = 1.0
    """Columns that turn less often are stretched by the whole factor."""
    attention_factor: float = 1.0
    """A factor of rotated queries and keys."""
    truncate: bool = True
    """True if the two bounds are rounded to whole columns."""


@dataclass(frozen=True, slots=True)
class LongScaling(RopeScaling):
    """A factor for each pair of columns: one list up to the original context, another for longer ones (Ding et al. 2024).

    The served context decides which list holds, for all requests and all their positions.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_positions: int
    attention_factor: float = 1.0
    """A factor of rotated queries and keys."""

    def check(self, size: int) -> None:
        """See RopeScaling."""
        RopeScaling.check(self, size)
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            sound = isinstance(factors, tuple) and all(type(x) in (int, float) and 0 < x < math.inf for x in factors)
            if not sound or len(factors) != size // 2:
                said = repr(factors)[:200]
                raise CheckpointError(f"config.json: rope scaling: {name} must be {size // 2} numbers above 0; got {said}")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions of a layer (Su et al. 2021): pair i of `size` columns turns by theta^(-2i / size) a position."""

    theta: float
    size: int
    scaling: RopeScaling | None
