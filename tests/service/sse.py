"""Server-sent events as a client reads them: by their lines, of which only those with data count."""

import json
from typing import Any


def events_of(text: str) -> list[Any]:
    """The objects of a stream that ends as it must."""
    *blocks, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    lines = [line for block in blocks for line in block.split("\n")]
    assert all(line.startswith(("data: ", "id: ", ":")) for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def named_events_of(text: str) -> list[Any]:
    """The objects of a stream whose events have their types as names."""
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    found = []
    for block in blocks:
        name, data = [line for line in block.split("\n") if not line.startswith(":")]
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
