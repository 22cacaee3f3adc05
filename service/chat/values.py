"""Arguments of calls that are not written as JSON: tagged texts, Python literals, braced texts, each as JSON."""

import ast
import json
import re
import warnings
from typing import Any

from service.chat.parts import Tool

MAX_LITERAL = 1 << 14
"""Characters outside strings of a Python literal that is no JSON: each takes Python's parser 5 us."""
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_WORDS = {"true": True, "false": False, "null": None}
_UNFIT = re.compile("[\x00-\x1f\ud800-\udfff]")
"""What JSON forbids in strings, and what UTF-8 cannot carry."""
_QUOTED = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_EITHER_QUOTED = re.compile(_QUOTED.pattern + "|" + _QUOTED.pattern.replace('"', "'"), re.DOTALL)
WORD = re.compile(r"[^\s{}\[\],:]+")
"""A key, or a value without quotes, between braces."""
_WORD_OR_KEY = re.compile(rf"({WORD.pattern})(\s*:)?")
_PLAIN = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")


def is_text(tool: Tool, key: str) -> bool:
    """Whether an argument is a string by its schema, and nothing else."""
    return _schema_of(tool, key).get("type") == "string"


def tagged_value(tool: Tool, key: str, text: str) -> str:
    """The JSON of an argument that was written as plain text: what it is as JSON, unless its schema wants a string."""
    if not is_text(tool, key):
        made = as_json(text)
        if made is not None:
            return made
        if text.strip() in ("True", "False", "None"):
            return {"True": "true", "False": "false", "None": "null"}[text.strip()]
    return written(text)


def as_json(text: str) -> str | None:
    """A text that is one JSON value, else None. What its strings may not hold becomes escapes."""
    try:
        json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return _QUOTED.sub(lambda string: _UNFIT.sub(_escape, string[0]), text.strip())


def ends_in_string(text: str) -> bool:
    """Whether a text that begins like JSON ends inside a string."""
    return text.lstrip()[:1] in ("[", "{", '"') and '"' in _QUOTED.sub("", text)


def written(value: Any) -> str:
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
        return written(ast.literal_eval(_PythonNames().visit(tree)))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


class _PythonNames(ast.NodeTransformer):
    """JSON's words, which models write too, as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """A word."""
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


def braced_arguments(text: str, quote: str) -> str | None:
    """The JSON of `{key:value, ...}` whose strings stand between `quote`s; None where it is not that.

    A bare word that is no JSON is a string.
    """
    pieces = text.split(quote)
    pieces[::2] = [_WORD_OR_KEY.sub(_braced_word, piece) for piece in pieces[::2]]
    pieces[1::2] = map(written, pieces[1::2])
    made = "".join(pieces)
    return as_json(made) if made.startswith("{") else None


def _braced_word(found: re.Match[str]) -> str:
    word, colon = found[1], found[2] or ""
    is_plain = not colon and (_PLAIN.fullmatch(word) or (word.startswith('"') and as_json(word)))
    return (word if is_plain else written(word)) + colon


def _escape(character: re.Match[str]) -> str:
    return f"\\u{ord(character[0]):04x}"


def _refuse(word: str) -> None:
    raise ValueError(word)


def _schema_of(tool: Tool, key: str) -> dict[str, Any]:
    properties = tool.parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    return schema if isinstance(schema, dict) else {}
