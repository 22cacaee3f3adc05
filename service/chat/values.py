"""Tool arguments that are not JSON (tagged texts, Python literals, braces), converted to JSON."""

import ast
import json
import re
import warnings
from typing import Any

from attend.service.chat.argument_types import ANY, Values, is_admitted

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
