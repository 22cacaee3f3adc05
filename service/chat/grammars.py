"""Grammars of enforced tool calls, for structured output, in the format of the model's family.

It is Lark as llguidance reads it (its docs/syntax.md). Arguments in JSON follow the tools' schemas by llguidance itself; those
that are written between tags or in quotes follow what is said here.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from attend.model.errors import InvalidRequest, NotSupported
from attend.model.params import describe
from attend.model.text.grammar import GrammarSpec, choices
from attend.model.text.schema import FORMATS, OR_SHOWN, read_schema
from attend.service.chat.arguments import WORD
from attend.service.chat.calls import KEY, MAX_KEY
from attend.service.chat.forms import HARMONY, AnswerFormat, CallForm
from attend.service.chat.parts import Tool
from attend.service.chat.tools import Calling, check_schema

MAX_KEYS = 64
"""Arguments of a tool that are not written as JSON."""
_ABOUT = {"title", "description", "default", "examples", "deprecated", "$schema", "$defs", "definitions", "$comment"}
_OBJECT = {"type", "properties", "required", "additionalProperties"}
_PLAIN = ("integer", "number", "boolean")
_TEXT = {"type", "enum", "const", "minLength", "maxLength"}


def answer_grammar(
    form: AnswerFormat, calling: Calling, content: GrammarSpec | None, special: Mapping[str, int], *, reasoning_open: bool
) -> GrammarSpec | None:
    """What the answers of a chat must look like; `content` is what their content must look like, where that was asked for."""
    grammar = CallGrammar(form, calling.tools, special, reasoning_open=reasoning_open)
    if calling.choice == "required":
        return grammar.required_calls(parallel=calling.parallel)
    if content is None:
        return grammar.optional_calls(parallel=calling.parallel) if calling.is_enforced else None
    if calling.tools or (form.reasoning is not None and content.kind != "grammar"):
        return grammar.content(content, parallel=calling.parallel)
    return content


class CallGrammar:
    """Writes the grammar of one request's tool calls."""

    def __init__(self, form: AnswerFormat, tools: Sequence[Tool], special: Mapping[str, int], *, reasoning_open: bool) -> None:
        """`special` has the ids of markers that are special tokens. `reasoning_open`: the prompt ends inside reasoning."""
        self._form = form
        self._tools = tools
        self._special = special
        self._is_open = reasoning_open
        self._rules: dict[str, str] = {}

    def required_calls(self, *, parallel: bool) -> GrammarSpec:
        """Reasoning where the model reasons, then one call; or more where they may be `parallel`."""
        return self._spec(f"{self._reasoning()} {self._calls(parallel)}")

    def optional_calls(self, *, parallel: bool) -> GrammarSpec:
        """Any text, then calls or none."""
        form = self._call_form
        if self._form.has_channels:
            heads = " | ".join(self._text(f"<|channel|>{name}<|message|>") for name in ("analysis", "commentary"))
            self._rules["before"] = f"({heads}) {self._up_to('BEFORE', '<|end|>', *HARMONY)} {self._text('<|start|>assistant')}"
            text = self._without("TEXT", *HARMONY)
            return self._spec(f"before* ({self._calls(parallel)} | {self._text('<|channel|>final<|message|>')} {text})")
        if form.bare:  # what begins like a call is one
            others = "" if self._form.reasoning is None else self._form.reasoning.begin[0]
            text = self._without("TEXT", *form.begins, first=rf"[^\s<{_escape_regex(form.bare + others)}]")
            return self._spec(f"{self._reasoning()} ({self._calls(parallel)} | {text})?")
        text, before = self._without("TEXT", *form.begins), self._up_to("BEFORE", form.begins[0], *form.begins[1:])
        return self._spec(f"{text} | {before} {self._after_marker(parallel)}")

    def content(self, content: GrammarSpec, *, parallel: bool) -> GrammarSpec:
        """Reasoning where the model reasons, then content of this form; or calls, where there are tools."""
        own = self._content(content)
        if self._form.has_channels:
            own = f"{self._text('<|channel|>final<|message|>')} {own}"
        calls = f"{self._calls(parallel)} | " if self._tools else ""
        return self._spec(f"{self._reasoning()} ({calls}{own})")

    @property
    def _call_form(self) -> CallForm:
        assert self._form.calls is not None, "a form without calls has no tools"
        return self._form.calls

    def _spec(self, start: str) -> GrammarSpec:
        return GrammarSpec("tools", "\n".join(f"{name}: {rule}" for name, rule in {"start": start, **self._rules}.items()))

    def _text(self, text: str) -> str:
        """A text, in which markers may be special tokens; nothing for an empty one."""
        places = {text.find(marker): marker for marker in sorted(self._special, key=len) if marker in text}
        if not places:
            return json.dumps(text, ensure_ascii=False) if text else ""
        before, marker, after = text.partition(places[min(places)])
        return " ".join(filter(None, (self._text(before), f"<[{self._special[marker]}]>", self._text(after))))

    def _without(self, name: str, *markers: str, first: str = "") -> str:
        """A terminal: any text in which none of the markers stands. `first` is what it begins with."""
        self._rules[name] = f"/{first}(?s:.*)/{_none_of(markers)}"
        return name

    def _up_to(self, name: str, end: str, *others: str, least: int = 0, most: int | str = "") -> str:
        """Any text of so many characters, and the first `end` after it; in the text stands none of `others` either.

        They are one terminal: llguidance takes the longest one that fits, and would take the beginning of `end` for text.
        """
        others = tuple(other for other in others if other != end)
        text, length = self._without(name, end, *others), f"(?s:.){{{least},{most}}}"
        if end in self._special:  # it ends a terminal by itself
            self._rules[name] += f" & /{length}/"
            return f"{text} {self._text(end)}"
        earlier = "|".join(_escape_regex(one) for one in (end, *(other for other in others if end.endswith(other))))
        never = _none_of([other for other in others if not end.endswith(other)])
        self._rules[name] = f"/{length}{_escape_regex(end)}/ & ~/(?s:.*)({earlier})(?s:.+)/{never}"
        return name

    def _reasoning(self) -> str:
        """Reasoning, which has to end where the prompt began it. No call stands in it, which nothing would hold to a schema."""
        reasoning = self._form.reasoning
        if self._form.has_channels:
            begin = self._text("<|channel|>analysis<|message|>")
            return f"({begin} {self._up_to('THOUGHT', '<|end|>', *HARMONY)} {self._text('<|start|>assistant')})?"
        if reasoning is None:
            return ""
        self._rules["SPACE"] = r"/\s{0,4}/"
        begins = self._call_form.begins if self._tools else ()
        body = f"{self._up_to('THOUGHT', reasoning.end, *begins)} SPACE"
        return body if self._is_open else f"({self._text(reasoning.begin)} {body})?"

    def _content(self, content: GrammarSpec) -> str:
        if content.kind == "regex":
            self._rules["CONTENT"] = f"/{regex_to_lark(content.text, '')}/"
            return "CONTENT"
        if content.kind == "choice":
            return "(" + " | ".join(json.dumps(one, ensure_ascii=False) for one in choices(content.text)) + ")"
        if content.kind == "json_object":
            return self._json("content", {"type": "object"}, "json_object")
        if content.kind == "json_schema":
            try:
                return self._json("content", read_schema(content.text), "json_schema")
            except (ValueError, RecursionError) as error:
                raise InvalidRequest(f"json_schema: {error}", "json_schema") from error
        raise NotSupported("structured_outputs.grammar cannot be combined with tools or reasoning", "structured_outputs")

    @property
    def _lead(self) -> str:
        """The marker that calls are written after."""
        form = self._call_form
        return "" if form.bare or not form.begins else form.begins[0]

    def _calls(self, parallel: bool) -> str:
        """One call, or more, with what the family writes around them."""
        return f"{self._text(self._lead)} {self._after_marker(parallel)}"

    def _after_marker(self, parallel: bool) -> str:
        """The same without their marker."""
        layout, lead = self._call_form.layout, self._lead
        each = "" if layout.opening else lead  # before each call
        names = [f"call_{place}" for place in range(len(self._tools))]
        for place, (name, tool) in enumerate(zip(names, self._tools, strict=True)):
            head, _, tail = layout.call.removeprefix(each).replace("%n", tool.name).partition("%a")
            self._rules[name] = " ".join((self._text(head), self._arguments(place, tool), self._text(tail)))
        self._rules["call"] = " | ".join(names)
        several = parallel and not self._form.has_channels  # each message of Harmony ends the answer
        more = f"({self._text(layout.between + each)} call)*" if several else ""
        return f"{self._text(layout.opening.removeprefix(lead))} call {more} {self._text(layout.closing)}"

    def _arguments(self, place: int, tool: Tool) -> str:
        layout, schema, where = self._call_form.layout, tool.parameters, tool.place
        check_schema(schema, where)
        if not layout.argument:
            return self._json(f"arguments_{place}", {"type": "object", **schema}, where)
        _only(schema, _OBJECT | _ABOUT, where)
        _check_references(schema, where)
        properties = schema.get("properties", {})
        if len(properties) > MAX_KEYS:
            raise _unfit(f"{where} may have at most {MAX_KEYS} properties with this model's tool-call format", where)
        shared: dict[str, Any] = {key: value for key, value in schema.items() if key in ("$defs", "definitions")}
        for key in schema.get("required", ()):
            if key not in properties:
                raise _unfit(f"{where}: {key[:64]} is required, and not one of its properties", where)
        names = {key: f"argument_{place}_{at}" for at, key in enumerate(properties)}
        for key, name in names.items():
            self._rules[name] = self._argument(name, key, properties[key], shared, f"{where}.properties.{key[:64]}")
        needed = [name for key, name in names.items() if key in schema.get("required", ())]
        others = [name for name in names.values() if name not in needed]
        return _join_rules(needed, others, self._text(layout.joint))

    def _argument(self, name: str, key: str, schema: Any, shared: dict[str, Any], where: str) -> str:
        """A value with what stands around it: between tags or quotes, or after a key."""
        form = self._call_form
        if not _can_name(form, key):
            raise _unfit(f"{where}: this model's tool-call format cannot write this name", where)
        head, _, tail = form.layout.argument.partition("%v")
        head = head.replace("%k", key)
        if form.syntax == "python" or not isinstance(schema, dict) or schema.get("type") != "string":
            if form.syntax == "braced" and (not isinstance(schema, dict) or schema.get("type") not in _PLAIN):
                raise _unfit(f"{where}: this model's tool-call format takes texts, numbers and booleans", where)
            value = self._json(f"{name}_value", {**schema, **shared} if isinstance(schema, dict) else schema, where)
            return " ".join((self._text(head), value, self._text(tail)))
        end = form.mark if form.tags is None else form.tags.value_end
        quote = form.mark if form.syntax == "braced" else ""
        before, ending, after = f"{tail}{quote}".partition(end)
        value = self._string(f"{name.upper()}_TEXT", schema, before + ending, where)
        return " ".join((self._text(head + quote), value, self._text(after)))

    def _string(self, name: str, schema: dict[str, Any], end: str, where: str) -> str:
        """A string as it is, and what ends it."""
        _only(schema, _TEXT | _ABOUT if schema.get("format") in FORMATS else _TEXT | _ABOUT | {"format"}, where)
        form = self._call_form
        stops = (form.mark, form.end) if form.tags is None else (form.tags.value_end,)
        is_trimmed = form.tags is not None and not end.startswith("\n")  # a line end next to a tag is not of the value
        listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if listed is not None:
            texts = [one for one in listed if isinstance(one, str)]
            for one in texts:
                if any(stop in one for stop in stops) or (is_trimmed and one != one.strip("\n")):
                    raise _unfit(f"{where}: this model's tool-call format cannot write {describe(one)}", where)
            return f"({' | '.join(map(self._text, texts))}) {self._text(end)}"
        value = self._up_to(name, end, *stops, least=schema.get("minLength", 0), most=schema.get("maxLength", ""))
        if is_trimmed:
            self._rules[name] += rf" & ~/\n(?s:.*)/ & ~/(?s:.*)\n{'' if end in self._special else _escape_regex(end)}/"
        return value

    def _json(self, name: str, schema: Any, where: str) -> str:
        """A rule of a schema, with a comment that says where it stands in the request: see `model/text/schema.py`."""
        written = {} if schema is True else schema
        self._rules[name] = f"%json {json.dumps(written)} // {json.dumps(where)}"
        return name


def _join_rules(needed: list[str], others: list[str], joint: str) -> str:
    """Rules one after the other, with `joint` between two, the last ones each or not."""
    rest = " ".join(f"({joint} {name})?" for name in others)
    if needed or not joint:
        return f"{f' {joint} '.join(needed)} {rest}"
    runs = [f"{name} {' '.join(f'({joint} {later})?' for later in others[at + 1 :])}" for at, name in enumerate(others)]
    return f"({' | '.join(runs)})?" if runs else ""


def _can_name(form: CallForm, key: str) -> bool:
    """True if a call whose arguments are not JSON can name one so."""
    if form.tags is not None:
        return form.tags.key_end not in key
    if form.syntax == "python":
        return len(key) <= MAX_KEY and re.fullmatch(f"{KEY.pattern}+", key) is not None
    return WORD.fullmatch(key) is not None and form.mark not in key and form.end not in key


def _check_references(schema: Any, where: str) -> None:
    """Raise NotSupported for a reference to what does not stand beside an argument alone."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            target = value.get("$ref")
            if isinstance(target, str) and not target.startswith(("#/$defs/", "#/definitions/")):
                raise _unfit(f"{where}: $ref to {target[:64]} cannot be enforced in this model's tool-call format", where)
        if isinstance(value, (dict, list)):
            waiting += value.values() if isinstance(value, dict) else value


def _unfit(words: str, where: str) -> NotSupported:
    """The error of a schema that cannot be enforced."""
    return NotSupported(f"{words}; {OR_SHOWN}", where)


def _only(schema: Any, known: set[str], where: str) -> None:
    """Raise NotSupported for a keyword that nothing here carries out."""
    for key in schema:
        if key not in known:
            raise _unfit(f"{where}.{key[:64]} cannot be enforced in this model's tool-call format", where)


def _none_of(markers: Sequence[str]) -> str:
    """What is added to a terminal so that none of the markers stands in it: one expression, which costs the least."""
    return f" & ~/(?s:.*)({'|'.join(map(_escape_regex, markers))})(?s:.*)/" if markers else ""


def _escape_regex(text: str) -> str:
    return "".join(one if one.isascii() and one.isalnum() else f"\\x{{{ord(one):x}}}" for one in text)
