"""Grammars that nobody meant: valid regular expressions, grammars and JSON schemas with characters changed, and known traps."""

import json
import random
from collections.abc import Iterator
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0},
        "b": {"type": "array", "items": {"$ref": "#/$defs/s"}, "maxItems": 3},
    },
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"s": {"type": "string", "pattern": "^[a-z]{1,4}$"}, "t": {"anyOf": [{"enum": [1, "x", None]}, {"const": 2}]}},
}
VALID = {
    "regex": (r"(?i)ab[^c-e\d]{2,5}|x(y|z)*?\.\w+", r"[0-9]{4}-[0-9]{2}-[0-9]{2}", r"\p{Greek}+|[\x41-\x5a&&[^M]]"),
    "grammar": (
        'start: item ("," item)*\nitem: /[a-z]+/ | "(" start ")"\n%ignore / /',
        'root ::= "a" item{1,3} [x-z]?\nitem ::= ("b" | "c")+ # done',
        'start: "a"? B~2..4 c\nB: "b" | /x{3}/\nc[max_tokens=5]: /.*/',
    ),
    "json": (json.dumps(SCHEMA), '{"type": "string", "format": "date-time", "minLength": 2}', '{"oneOf": [{"type": "null"}]}'),
}
PIECES = (
    *'()[]{}*+?|\\^$.-,:/"0\n',
    "(?=",
    "\\1",
    "{9999}",
    "[^",
    "(?R)",
    "::=",
    "%json {",
    "start: start\n",
    "null",
    '"$ref":"#",',
    "é",
)
TRAPS: tuple[tuple[str, Any], ...] = (
    ("regex", "(" * 30000),
    ("regex", "(((a{1000}){1000}){1000}){1000}"),
    ("grammar", "\0"),
    ("grammar", "root ::= " + "(" * 20000),
    ("grammar", 'start: "a"~1..100000000'),
    ("json", "[" * 20000),
    ("json", {"$ref": "#"}),
    ("json", {"type": "integer", "multipleOf": 100000007}),
    ("json", {"type": "integer", "minimum": 10**300}),
    ("json", {"type": "string", "maxLength": 10**18}),
    ("json", {"minLength": 5, "maxLength": 2, "type": "string"}),
    ("json", {"type": "array", "minItems": 10**9, "items": {}}),
    ("json", {"required": ["a"] * 1000, "type": "object"}),
    ("choice", ["a", "a\0b", "😀"]),
)


def grammars(count: int, seed: int) -> Iterator[tuple[str, Any]]:
    """`count` pairs (name in structured_outputs, value); the traps come first."""
    yield from TRAPS[:count]
    draw = random.Random(seed)
    for _ in range(count - len(TRAPS)):
        name = draw.choice(tuple(VALID))
        text = draw.choice(VALID[name])
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(text) + 1)
            kept = place + draw.choice((0, 0, 1, 1, 5, 40))
            text = text[:place] + draw.choice((*PIECES, "")) + text[kept:]
        yield name, text
