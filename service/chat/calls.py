"""Tool call formats of model families: a parser for each, which raises NotACall where the text is none."""

import json
import re
from collections.abc import Callable, Generator
from contextlib import suppress

from attend.service.chat.arguments import (
    TEXT,
    Values,
    as_json,
    braced_arguments,
    ends_in_string,
    python_value,
    tagged_value,
    to_json,
)
from attend.service.chat.forms import CallForm, Tags
from attend.service.chat.json_text import JsonText
from attend.service.chat.reader import NotACall, Reader, partial_marker

NAME = re.compile(r"[A-Za-z0-9_.-]")
MAX_NAME = 128
"""Characters of the name of a function, as OpenAI's Responses take."""
KEY = re.compile(r"[\w.$-]")
"""Of an argument's name in a Python call."""
MAX_KEY = 256
MAX_DEPTH = 64
"""Brackets inside each other in a Python call."""
ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("type", "id")
"""What models write in a call's object beside its name and arguments; it says nothing."""
Steps = Generator[None, None, None]


def read_calls(reader: Reader, form: CallForm, marker: str) -> Steps:
    """The calls after `marker`, and the text that ends them where the form has one."""
    yield from _SYNTAXES[form.syntax](reader, form, marker)
    if form.end and (yield from reader.literal(form.end, skip_spaces=True)):
        reader.read.clear()


# JSON: {"name": "f", "arguments": {"key": 1}}


def _json(reader: Reader, form: CallForm, marker: str) -> Steps:
    if (yield from reader.literal("[", skip_spaces=True)):
        yield from _json_list(reader)
        return
    yield from _json_call(reader)
    while True:
        if (yield from reader.spaces()) not in (";", ",", "{"):
            break
        yield from reader.literal(";", ",")
        yield from _json_call(reader)


def _json_list(reader: Reader) -> Steps:
    while True:
        yield from _json_call(reader)
        if not (yield from reader.literal(",", skip_spaces=True)):
            break
    yield from reader.require("]")
    reader.read.clear()


def _json_call(reader: Reader) -> Steps:
    """One object. It is a call from where its name, that of a tool, and the beginning of its arguments are known."""
    yield from reader.require("{", skip_spaces=True)
    name, early, started, seen = "", "", False, set[str]()
    while True:
        key = yield from _json_string(reader)
        if key in seen or key not in ("name", *ARGUMENTS, *_OTHERS) or (key in ARGUMENTS and seen & {*ARGUMENTS}):
            raise NotACall
        seen.add(key)
        yield from reader.require(":", skip_spaces=True)
        yield from reader.spaces()
        if key == "name":
            name = yield from _tool_name(reader)
        elif key in ARGUMENTS and name:
            yield from _arguments(reader, name)
            started = True
        elif key in ARGUMENTS:
            early = yield from _arguments_text(reader)
        else:
            yield from _json_value(reader)
        if not (yield from reader.literal(",", skip_spaces=True)):
            break
    yield from reader.require("}")
    if not name:
        raise NotACall
    if not started:
        reader.whole_call(name, early or "{}")
    reader.read.clear()


def _tool_name(reader: Reader) -> Generator[None, None, str]:
    name = yield from _json_string(reader)
    if name not in reader.tools:
        raise NotACall
    return name


def _json_string(reader: Reader) -> Generator[None, None, str]:
    if (yield from reader.spaces()) != '"':
        raise NotACall
    return str(json.loads((yield from _json_value(reader))))


def _json_value(reader: Reader) -> Generator[None, None, str]:
    """Read one JSON value to its end; returns its text."""
    value, pieces = JsonText(), []
    while not value.complete:
        if not (yield from reader.char()):
            value.end()
            if not value.complete:
                raise NotACall
            break
        piece, end = value.take(reader.text, reader.at)
        reader.take(end - reader.at)
        pieces.append(piece)
        if value.broken:
            raise NotACall
    return "".join(pieces)


def _arguments(reader: Reader, name: str) -> Steps:
    """The arguments of a call whose name is known, as they are written where they are an object."""
    if (yield from reader.char()) == "{":
        yield from stream_arguments(reader, reader.start(name))
    else:
        reader.whole_call(name, (yield from _arguments_text(reader)))


def _arguments_text(reader: Reader) -> Generator[None, None, str]:
    """Arguments, whole: an object, an object in a string, or null for none."""
    text = yield from _json_value(reader)
    if text.startswith('"'):
        text = as_json(json.loads(text)) or ""
    if text == "null":
        return "{}"
    if not text.startswith("{"):
        raise NotACall
    return text


def stream_arguments(reader: Reader, index: int) -> Steps:
    """The object that follows, handed on as it arrives. Raises NotACall where it breaks, or does not end."""
    value = JsonText()
    while not value.complete:
        if not (yield from reader.char()):
            raise NotACall
        piece, end = value.take(reader.text, reader.at)
        reader.take(end - reader.at)
        reader.arguments(index, piece)
        if value.broken:
            raise NotACall
    reader.num_whole += 1


# Named: f[ARGS]{"key": 1}, and after the older form of the same marker a list in JSON.


def _read_named(reader: Reader, form: CallForm, marker: str) -> Steps:
    if (yield from reader.spaces()) in ("[", "{"):
        yield from _json(reader, form, marker)
        return
    name = yield from _name(reader)
    if (yield from reader.literal("[CALL_ID]")):
        yield from _name(reader, known=False)
    yield from reader.literal(form.mark)
    if (yield from reader.spaces()) != "{":
        raise NotACall
    yield from stream_arguments(reader, reader.start(name))


def _name(reader: Reader, *, known: bool = True) -> Generator[None, None, str]:
    """A name, up to the first character that it cannot have."""
    name = ""
    while NAME.match((yield from reader.char())) and len(name) < MAX_NAME:
        name += reader.take()
        if known and not any(tool.startswith(name) for tool in reader.tools):
            raise NotACall
    if known and name not in reader.tools:
        raise NotACall
    return name


# Tagged: <function=f><parameter=key>1</parameter></function>


def _read_tagged(reader: Reader, form: CallForm, marker: str) -> Steps:
    tags = form.tags
    assert tags is not None
    if marker != tags.name_begin:
        yield from reader.spaces()
        if tags.name_begin:
            yield from reader.require(tags.name_begin)
    name = yield from _name(reader)
    if tags.name_end:
        yield from reader.require(tags.name_end)
    yield from reader.spaces()
    ends = tuple(filter(None, (tags.end, form.end)))
    tag = yield from reader.require(tags.key_begin, *ends)
    index, keys = reader.start(name), 0
    reader.arguments(index, "{")
    while tag == tags.key_begin:
        key = yield from reader.until(tags.key_end)
        if tags.value_begin:
            yield from reader.require(tags.value_begin, skip_spaces=True)
        reader.arguments(index, f"{', ' if keys else ''}{to_json(key)}: ")
        yield from _tagged_value(reader, tags, reader.values_of(name, key), index)
        keys += 1
        tag = yield from reader.literal(tags.key_begin, *ends, skip_spaces=True)
        if not tag and reader.ended and not reader.complete:
            raise NotACall
    reader.arguments(index, "}")  # other text ends it too
    reader.num_whole += 1


def _tagged_value(reader: Reader, tags: Tags, values: Values, index: int) -> Steps:
    """A value up to its end tag: a string as it is written, anything else at once. It has no line end next to either tag."""
    yield from reader.literal("\n")
    if values != TEXT:
        text = yield from reader.until(tags.value_end)
        if ends_in_string(values, text):
            text = yield from _past_string(reader, text, tags.value_end)
        reader.arguments(index, tagged_value(values, text.removesuffix("\n")))
        return
    reader.arguments(index, '"')
    ends = (tags.value_end, "\n" + tags.value_end)
    while True:
        at = reader.text.find(tags.value_end, reader.at)
        keep = partial_marker(reader.text, reader.at, ends) if at < 0 else 0
        piece = reader.take((len(reader.text) - keep if at < 0 else at) - reader.at)
        if at >= 0:
            reader.arguments(index, to_json(piece.removesuffix("\n"))[1:])
            reader.take(len(tags.value_end))
            return
        reader.arguments(index, to_json(piece)[1:-1])
        if reader.ended:
            reader.drop_half(ends)
            raise NotACall
        yield


def _past_string(reader: Reader, text: str, end: str) -> Generator[None, None, str]:
    """JSON in one of whose strings stands `end`, up to the `end` after it; `text` alone where what follows does not end it."""
    value, pieces, mark = JsonText(), [text], len(reader.read)
    value.take(text)
    with suppress(NotACall):
        while value.in_string:
            pieces += end, (yield from reader.until(end))
            value.take("".join(pieces[-2:]))
        if value.complete:
            return "".join(pieces)
    if reader.ended and not reader.complete:
        raise NotACall
    reader.put_back(mark)
    return text


# Python: [f(key=1), g(key="x")]


def _python(reader: Reader, form: CallForm, marker: str) -> Steps:
    listed = yield from reader.literal("[", skip_spaces=True)
    while True:
        yield from reader.spaces()
        yield from _python_call(reader)
        yield from reader.spaces()
        if listed:
            if not (yield from reader.literal(",")):
                break
        elif not NAME.match((yield from reader.char())):
            return
    yield from reader.require("]")
    reader.read.clear()


def _python_call(reader: Reader) -> Steps:
    """One call. It is certain where it ends, since Python's literals are read as a whole."""
    name = yield from _name(reader)
    yield from reader.require("(")
    values: dict[str, str] = {}
    while not (yield from reader.literal(")", skip_spaces=True)):
        key = yield from _python_key(reader)
        value = python_value((yield from _python_text(reader)))
        if value is None or key in values:
            raise NotACall
        values[key] = value
        yield from reader.literal(",")
    reader.whole_call(name, "{" + ", ".join(f"{to_json(key)}: {value}" for key, value in values.items()) + "}")


def _python_key(reader: Reader) -> Generator[None, None, str]:
    """The name of an argument, which need not be one in Python, and the mark after it."""
    key = ""
    while KEY.match((yield from reader.char())) and len(key) < MAX_KEY:
        key += reader.take()
    yield from reader.require("=", skip_spaces=True)
    if not key:
        raise NotACall
    return key


def _python_text(reader: Reader) -> Generator[None, None, str]:
    """A value as it is written, up to the comma or the bracket after it."""
    text, depth, quote = list[str](), 0, ""
    while True:
        character = yield from reader.char()
        if not depth and not quote and character in (",", ")"):
            return "".join(text)
        if not character or not 0 <= depth <= MAX_DEPTH:
            raise NotACall
        text.append(reader.take())
        if quote and character == "\\":
            if not (yield from reader.char()):
                raise NotACall
            text.append(reader.take())
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")


# Braced: call:f{key:<|"|>x<|"|>, other:1}


def _read_braced(reader: Reader, form: CallForm, marker: str) -> Steps:
    yield from reader.require("call:", skip_spaces=True)
    name = yield from _name(reader)
    if (yield from reader.char()) != "{":
        raise NotACall
    text = braced_arguments((yield from reader.until(form.end)).rstrip(), form.mark)
    if text is None:
        raise NotACall
    reader.whole_call(name, text)


_SYNTAXES: dict[str, Callable[[Reader, CallForm, str], Steps]] = {
    "json": _json,
    "named": _read_named,
    "tagged": _read_tagged,
    "python": _python,
    "braced": _read_braced,
}
