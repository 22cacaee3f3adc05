"""Two tools and what calls of them must be. The shipped model means nothing by a call: that it is one is what is enforced."""

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Weather(BaseModel):
    """The weather of a place."""

    model_config = ConfigDict(extra="forbid")

    place: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=9)


class Now(BaseModel):
    """What time it is."""

    model_config = ConfigDict(extra="forbid")

    zone: Literal["UTC", "CET"]


MODELS: dict[str, type[BaseModel]] = {"Weather": Weather, "Now": Now}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": model.__doc__, "parameters": model.model_json_schema()}}
    for name, model in MODELS.items()
]
QUESTION = {"role": "user", "content": "Weather in Oslo?"}
ROOM = 120
"""Tokens that hold the longest call that the model makes here."""


def named(name: str) -> dict[str, Any]:
    """The choice of one tool."""
    return {"type": "function", "function": {"name": name}}


def valid(name: str, arguments: str) -> BaseModel:
    """The arguments of a call, read strictly. Raises where they do not obey the tool's schema."""
    return MODELS[name].model_validate(json.loads(arguments), strict=True)
