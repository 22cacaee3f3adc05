"""What /openapi.json says of a field, and the words that it says it in."""

from dataclasses import dataclass, field
from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}


@dataclass(frozen=True, slots=True)
class Note:
    """What the document says of a field beside its type."""

    text: str
    limits: Schema = field(default_factory=dict)
    """Keywords for the type that the model gives it."""
    default: Any = None
    """What null and absence mean; None where there is no single value for it."""
    shapes: tuple[Schema, ...] = ()
    """What the field may be, beside null, where the model's type does not say all of it."""
    required: bool = False


def between(low: float, high: float) -> Schema:
    """A range with its ends."""
    return {"minimum": low, "maximum": high}


def above(low: float, high: float) -> Schema:
    """A range without its lower end."""
    return {"exclusiveMinimum": low, "maximum": high}


def listed(items: Schema, **limits: int) -> Schema:
    """A list."""
    return {"type": "array", "items": items, **limits}
