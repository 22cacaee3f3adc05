"""Server-sent events as a client reads them: by their lines, of which only those with data count."""

import json
from collections.abc import Sequence
from math import isclose
from typing import Any

from openai._streaming import SSEDecoder


def events_of(text: str) -> list[Any]:
    """The objects of a stream that ends as it must."""
    *blocks, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    lines = [line for block in blocks for line in block.split("\n")]
    assert all(line.startswith(("data: ", ":")) for line in lines)
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


def events(content: bytes) -> list[Any]:
    """The document of each event, as the official client decodes them."""
    found = [event.data for event in SSEDecoder().iter_bytes(iter([content]))]
    return [data if data == "[DONE]" else json.loads(data) for data in found]


def joined(documents: Sequence[Any]) -> list[Any]:
    """What events say together."""
    choices = [choice for document in documents if document != "[DONE]" for choice in document["choices"]]
    lists: dict[str, list[Any]] = {}
    for choice in choices:
        parts = {**(choice["logprobs"] or {}), **{name: choice[name] for name in choice if name.endswith("_ids")}}
        parts["prompt_logprobs"] = choice.get("prompt_logprobs") or []
        for name, values in parts.items():
            lists.setdefault(name, []).extend(values)
    ends = [(choice["finish_reason"], choice["stop_reason"]) for choice in choices if choice["finish_reason"]]
    usage = [document.get("usage") for document in documents if document != "[DONE]"][-1:]
    usage = [counts and {**counts, "prompt_tokens_details": None} for counts in usage]  # what is cached may differ
    return ["".join(choice["text"] for choice in choices), lists, ends, usage, documents[-1:]]


def same(one: Any, other: Any, *, bits: bool) -> bool:
    """True if two values are the same; numbers that are no integers nearly so, without `bits`."""
    if isinstance(one, float) and isinstance(other, float) and not bits:
        return isclose(one, other, rel_tol=1e-3, abs_tol=1e-3)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(*pair, bits=bits) for pair in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key], bits=bits) for key in one)
    return bool(one == other)
