"""Tool arguments that are not written as JSON (tagged texts, Python literals, braces): what they may be, and their JSON.

Of a schema `type`, `enum` and `const` are looked at, through `$ref` inside the tool's schema, `anyOf`, `oneOf`, `allOf` and
OpenAPI's `nullable`. More may be admitted than the schema allows, never less. `oneOf` is read as `anyOf`.
"""

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

from attend.model.text.schema import pointed_at

Values = Mapping[str, frozenset[Any] | None]
"""By kind, see `kind_of`: the values that are admitted, None for all of that kind. A kind that is not there is not admitted."""
TEXT: Values = {"string": None}
ANY: Values = dict.fromkeys(("null", "boolean", "integer", "fraction", "string", "array", "object"))
MAX_DEPTH = 32
"""Steps by `$ref`, `anyOf`, `oneOf` and `allOf` into each other. What lies deeper is taken to admit everything."""
MAX_STEPS = 100_000
"""Schemas, and values of `enum` in each place that compares them, that are looked at for one answer: 0.1 s. What comes after
them is taken to admit everything."""
_KINDS = {"number": ("integer", "fraction")}


class ArgumentTypes:
    """What the arguments of one tool may be. One that refers to itself adds nothing by that."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        self._root = parameters
        self._known: dict[tuple[int, str | None], Values] = {}
        self._open: dict[tuple[int, str | None], int] = {}
        self._lowest = 0
        self._steps = 0

    def argument(self, key: str) -> Values:
        """What argument `key` may be."""
        return self._follow(self._root, key)

    def _follow(self, schema: Any, key: str | None = None) -> Values:
        """What a schema says of a value; with `key` what it says of that property of an object."""
        place, depth, self._steps = (id(schema), key), len(self._open), self._steps + 1
        if not isinstance(schema, dict) or depth > MAX_DEPTH or self._steps > MAX_STEPS:
            return {} if schema is False else ANY
        if place in self._known:
            return self._known[place]
        if place in self._open:
            self._lowest = min(self._lowest, self._open[place])
            return {}
        outside, self._lowest = self._lowest, depth
        self._open[place] = depth
        made = self._own(schema) if key is None else self._follow(_property(schema, key))
        for one in (*_list(schema, "allOf"), pointed_at(self._root, schema.get("$ref"))):
            made = self._both(made, self._follow(one, key))
        for options in filter(None, (_list(schema, "anyOf"), _list(schema, "oneOf"))):
            some: Values = {}
            for one in options:
                some = self._either(some, self._follow(one, key))
            made = self._both(made, some)
        if schema.get("nullable") is True and key is None:
            made = self._either(made, {"null": None})
        del self._open[place]
        if self._lowest >= depth:  # else it was followed as a part of one that is not known yet
            self._known[place] = made
        self._lowest = min(outside, self._lowest)
        return made

    def _own(self, schema: dict[str, Any]) -> Values:
        """What `type`, `enum` and `const` say."""
        made = ANY
        if "type" in schema:
            types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            made = dict.fromkeys(kind for name in types for kind in _kinds(name))
        for listed in (_list(schema, "enum"), [schema["const"]] if "const" in schema else []):
            if listed:
                self._steps += len(listed)
                only: dict[str, set[Any]] = {}
                for value in listed:
                    only.setdefault(kind_of(value), set()).add(_comparable(value))
                made = self._both(made, {kind: frozenset(values) for kind, values in only.items()})
        return made

    def _both(self, one: Values, other: Values) -> Values:
        made = {kind: self._join(one[kind], other[kind], narrow=True) for kind in one.keys() & other.keys()}
        return {kind: values for kind, values in made.items() if values is None or values}

    def _either(self, one: Values, other: Values) -> Values:
        more = {kind: self._join(one.get(kind, frozenset()), values, narrow=False) for kind, values in other.items()}
        return {**one, **more}

    def _join(self, mine: frozenset[Any] | None, theirs: frozenset[Any] | None, *, narrow: bool) -> frozenset[Any] | None:
        """What both hold (`narrow`), or either; None is all."""
        if mine is None or theirs is None:
            return (theirs if mine is None else mine) if narrow else None
        self._steps += len(mine) + len(theirs)
        return mine & theirs if narrow else mine | theirs


def is_admitted(values: Values, value: Any) -> bool:
    """True if a JSON value is one of these."""
    allowed = values.get(kind_of(value), frozenset())
    return allowed is None or _comparable(value) in allowed


def _kinds(name: Any) -> tuple[str, ...]:
    """The kinds of a `type`; all of them for one that JSON Schema does not know, such as `any`."""
    if not isinstance(name, str):
        return tuple(ANY)
    return _KINDS.get(name) or ((name,) if name in ANY else tuple(ANY))


def kind_of(value: Any) -> str:
    """The type of a JSON value. A number is `integer`, also as 1.0, or `fraction`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _property(schema: dict[str, Any], key: str) -> Any:
    """The schema that an object's schema has for one of its properties."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and key in properties:
        return properties[key]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _comparable(value: Any) -> Any:
    """What is equal exactly where two JSON values of one kind are."""
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else value


# --- to JSON

MAX_LITERAL = 1 << 14
"""Characters outside strings of a Python literal that is no JSON: each takes Python's parser 5 us."""
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_WORDS = {"true": True, "false": False, "null": None}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_UNFIT = re.compile("[\x00-\x1f\ud800-\udfff]")
"""What JSON forbids in strings, and what UTF-8 cannot carry."""
_QUOTED = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_EITHER_QUOTED = re.compile(_QUOTED.pattern + "|" + _QUOTED.pattern.replace('"', "'"), re.DOTALL)
WORD = re.compile(r"[^\s{}\[\],:]+")
"""A key, or a value without quotes, between braces."""
_WORD_OR_KEY = re.compile(rf"({WORD.pattern})(\s*:)?")
_PLAIN = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")


def tagged_value(values: Values, text: str) -> str:
    """The JSON of an argument that was written as plain text, which may be one of `values`.

    The first of these that may be: what it is as JSON, unless that is a string; the text itself; what it is in Python, or a
    string in quotes. The text where none may be. So `null` is null where null and strings may be, as in vLLM's and Qwen's
    parsers, and `None` is a string there. Where nothing is known, JSON's strings and Python's words are read before the text.
    """
    made = as_json(text)
    if values == ANY:
        return made or _PYTHON_WORDS.get(text.strip()) or to_json(text)
    if made is not None and not made.startswith('"') and is_admitted(values, json.loads(made)):
        return made
    if not is_admitted(values, text):
        literal = python_value(text)
        if literal is not None and is_admitted(values, json.loads(literal)):
            return literal
    return to_json(text)


def as_json(text: str) -> str | None:
    """A text that is one JSON value, else None. What its strings may not hold becomes escapes."""
    try:
        json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return _QUOTED.sub(lambda string: _UNFIT.sub(_escape, string[0]), text.strip())


def ends_in_string(values: Values, text: str) -> bool:
    """True if a text that begins like the JSON of one of `values` ends inside a string."""
    begins = {"[": "array" in values, "{": "object" in values, '"': values == ANY}
    return begins.get(text.lstrip()[:1], False) and '"' in _QUOTED.sub("", text)


def to_json(value: Any) -> str:
    """The JSON of a value. Raises ValueError or TypeError where it has none."""
    return _UNFIT.sub(_escape, _ENCODER.encode(value))


def python_value(text: str) -> str | None:
    """The JSON of a Python literal, or of one with JSON's words in it; None where it is none."""
    made = as_json(text)
    if made is not None or len(_EITHER_QUOTED.sub("", text)) > MAX_LITERAL:
        return made
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text.strip(), mode="eval").body
        return to_json(ast.literal_eval(_PythonNames().visit(tree)))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


class _PythonNames(ast.NodeTransformer):
    """JSON's words, which models write too, as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """JSON's true, false and null as Python's constants."""
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


def braced_arguments(text: str, quote: str) -> str | None:
    """The JSON of `{key:value, ...}` whose strings stand between `quote`s; None where it is not that.

    A bare word that is no JSON is a string.
    """
    pieces = text.split(quote)
    pieces[::2] = [_WORD_OR_KEY.sub(_braced_word, piece) for piece in pieces[::2]]
    pieces[1::2] = map(to_json, pieces[1::2])
    made = "".join(pieces)
    return as_json(made) if made.startswith("{") else None


def _braced_word(found: re.Match[str]) -> str:
    word, colon = found[1], found[2] or ""
    is_plain = not colon and (_PLAIN.fullmatch(word) or (word.startswith('"') and as_json(word)))
    return (word if is_plain else to_json(word)) + colon


def _escape(character: re.Match[str]) -> str:
    return f"\\u{ord(character[0]):04x}"


def _refuse(word: str) -> None:
    raise ValueError(word)
