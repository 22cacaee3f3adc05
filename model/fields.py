"""Types of the fields of frozen records, as their annotations have them."""

import math
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from attend.model.errors import CheckpointError


def check_fields(record: Any, where: str = "", but: tuple[str, ...] = ()) -> None:
    """Refuse a field that is not what it should be: integers and numbers are above 0, and other types not looked at."""
    for field in fields(record):
        value = getattr(record, field.name)
        kinds = get_args(field.type) if get_origin(field.type) in (Union, UnionType) else (field.type,)
        if field.name in but or (value is None and NoneType in kinds):
            continue
        if (fault := _fault(value, kinds[0])) is not None:
            raise CheckpointError(f"config.json: {where}{field.name} {fault}")


def _fault(value: Any, kind: Any) -> str | None:
    if get_origin(kind) is Literal:
        known = get_args(kind)
        return None if value in known else f"{value!r} is not supported; known: {', '.join(known)}"
    if kind is int and not (type(value) is int and value > 0):
        return f"must be a positive integer; got {value!r}"
    if kind is float and not (type(value) in (int, float) and 0 < value < math.inf):
        return f"must be a positive number; got {value!r}"
    if kind is bool and type(value) is not bool:
        return f"must be true or false; got {value!r}"
    return None
