"""JSON schemas as llguidance 1.9.1 carries them out: what it refuses although it need not, and where it would get stuck, is
written in other words. Every text of the new schema is one of the old.

- A `oneOf` of objects that differ in a `const` (pydantic's unions): that property becomes required, so that no two of them
  fit, and `anyOf` says the same.
- A pattern of `patternProperties` that matches declared properties alone: its schema goes to them. llguidance lets a comma
  follow the last property, and then finds no key (its issue 265).
- A `format` that llguidance does not know, such as `path` or `iri`: it is an annotation, as JSON Schema says, and left out.
- A keyword that llguidance does not know, at a value that every document fits (`uniqueItems: false`): it is left out.

llguidance reads a number of a schema as a double, and an integer as 64 bits of that. A schema that would so admit other numbers
than it says is refused: see `rounding`.
"""

import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from decimal import Decimal
from typing import Any, Literal
from urllib.parse import unquote

import llguidance

Whitespace = Literal["compact", "flexible"]
"""Between the parts of JSON: none, or one space, or a line end with blanks after it.

Compact is `{"a":1,"b":[2]}`. Each separator is then the only text that fits: a small model has no place to write blanks without
end, and an answer takes the fewest tokens. Minified JSON is in every model's training data.
"""
MAX_WHITESPACE = 16
"""Characters of flexible white space in one place: a line end and fifteen blanks."""
FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"))
"""Values of `format` that are enforced; any other is an annotation."""
MAX_PLACE = 512
"""Characters of a place in a message."""
OR_SHOWN = "or enforce no calls: tool_choice auto, no strict tool, no structured output"
"""What a caller can do about a tool's schema that cannot be enforced: it is then shown to the model as it is."""
MAX_HOPS = 8
"""How many `$ref` may lead straight to the next one."""
PLACE_SECONDS = 0.3
"""Seconds of processor time that the search for the place of a fault may take."""
MAX_EXACT = 2**53
"""A double holds every integer up to it."""
MAX_DOUBLE = sys.float_info.max
MAX_INTEGER = 2**63 - 1
"""llguidance's greatest one; a `maximum` beyond it is this one."""
ROUNDED = "integers beyond 2^53 cannot be enforced exactly; use strings, or leave it out"
_ONE_OF = "coerce_one_of"
_OVERLAP = (
    "oneOf needs branches of different types, or a property with a const or an enum of its own in each of them; "
    "anyOf needs neither"
)
_ACTIONS = {
    "look-around": "use a pattern without it",
    "lookaround": "use a pattern without it",
    "Unimplemented": "leave it out",
}
"""What a caller can do, by a word in llguidance's message."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SINGLE = ("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_CONSTANTS = ("enum", "const")
_EXCLUSIVE = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
"""Bounds, and where the number stands of one that is true, as in draft 4."""
_NUMERIC = (*_CONSTANTS, *_EXCLUSIVE, *_EXCLUSIVE.values())
_ANY: tuple[Any, ...] = (True, {})
_IDLE: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "propertyNames": (*_ANY, {"type": "string"}),
    "unevaluatedProperties": _ANY,
    "unevaluatedItems": _ANY,
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
}
"""Keywords that llguidance does not know, each with the values that every document fits."""
_JSON = re.compile(r"%json\s*(?=\{)")
_RULE = re.compile(r"^\w+: %json ", re.MULTILINE)
_DECODER = json.JSONDecoder()
Compile = Callable[[Any], llguidance.LLMatcher]
Fault = Callable[[Any], str]
"""Gives the reason why a schema does not compile, "" where it does."""


def read_schema(text: str) -> dict[str, Any]:
    """A JSON schema, given as text. ValueError says what is wrong; RecursionError where it is nested too deeply."""
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise ValueError("must be a JSON object")
    if "x-guidance" in schema:
        raise ValueError('"x-guidance" is not supported')
    return schema


def json_options(whitespace: Whitespace) -> "llguidance._lib.JsonCompileOptions":
    """Options of llguidance: how JSON may be written."""
    options: llguidance._lib.JsonCompileOptions = {
        "whitespace_flexible": whitespace == "flexible",
        "lenient": False,  # a keyword that is not carried out is refused by name
        "coerce_one_of": False,
        "json_allow_general_unicode_escapes": True,
    }
    if whitespace == "flexible":
        options["whitespace_pattern"] = rf"\x20|\x0A[\x20\x09]{{0,{MAX_WHITESPACE - 1}}}"
    return options


def source_of(schema: Any, whitespace: Whitespace = "compact") -> str:
    """A schema in llguidance's notation, with our options."""
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(_in_doubles(schema)), overrides=json_options(whitespace))


def _in_doubles(value: Any) -> Any:
    """A JSON value without integers that no double holds, which llguidance cannot read: the greatest double stands for them.

    It enforces neither: see `rounding`.
    """
    if isinstance(value, dict):
        return {name: _in_doubles(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_in_doubles(item) for item in value]
    if isinstance(value, int) and abs(value) > MAX_DOUBLE:
        return math.copysign(MAX_DOUBLE, value > 0 or -1)
    return value


def rewritten(schema: dict[str, Any], compile_schema: Compile) -> dict[str, Any]:
    """The same schema, changed as the module says. `compile_schema` tries schemas: their errors are none here."""
    for each in _all_schemas(schema):
        if isinstance(each.get("format"), str) and each["format"] not in FORMATS:
            del each["format"]
        for word in [word for word in _IDLE if word in each and any(_is_same(each[word], idle) for idle in _IDLE[word])]:
            del each[word]
        _exclude(each, schema)
        _spread_patterns(each, compile_schema)
    return schema


def rounding(schema: dict[str, Any]) -> str:
    """ROUNDED for a schema whose numbers llguidance would take for others, which may admit more; "" for any other."""
    for each in _all_schemas(schema):
        for word in _NUMERIC:
            stands = _EXCLUSIVE.get(word, word) if each.get(word) is True else word
            if any(_is_rounded(word, number) for number in _numbers(each.get(stands))):
                return ROUNDED
    return ""


def schemas_in(grammar: str) -> Iterator[dict[str, Any]]:
    """The schemas in a grammar in Lark, whoever wrote it."""
    for found in _JSON.finditer(grammar):
        with suppress(ValueError):  # no JSON: it stands in a text, or is a fault that llguidance tells
            yield _DECODER.raw_decode(grammar, found.end())[0]


def rewritten_rules(grammar: str, compile_schema: Compile, whitespace: Whitespace = "compact") -> str:
    """A grammar in Lark that the server wrote, its schemas rewritten. Each is a rule of its own, on a line of its own."""
    pieces: list[str] = []
    end = 0
    for schema, start, after, _ in _rules(grammar):
        written = rewritten(schema, compile_schema) | {"x-guidance": json_options(whitespace)}
        pieces += grammar[end:start], json.dumps(_in_doubles(written))
        end = after
    return "".join(pieces) + grammar[end:]


def place_of(schema: dict[str, Any], fault: Fault) -> str:
    """The path of the innermost schema or keyword that has the same fault by itself, as `properties.email.pattern`."""
    words, shared = fault(schema), {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    steps, current, limit = list[str](), schema, time.process_time() + PLACE_SECONDS

    def has_it(part: dict[str, Any]) -> bool:
        return time.process_time() < limit and fault({**shared, **part}) == words

    while inner := next(((step, child) for step, child in _subschemas(current) if has_it(child)), None):
        steps.append(inner[0])
        current = inner[1]
    steps += next(([word] for word, value in current.items() if has_it({word: value})), [])
    return ".".join(steps)


def faulty_rule(grammar: str, fault: Fault) -> tuple[str, dict[str, Any]]:
    """The first schema with a fault in a grammar in Lark, and where it stands, as the comment beside it says."""
    return next(((where, schema) for schema, _, _, where in _rules(grammar) if fault(schema)), ("", {}))


def reword(words: str) -> str:
    """What llguidance says of a schema, without options that a caller does not have, and what the caller can do."""
    action = next((f"; {action}" for word, action in _ACTIONS.items() if word in words), "")
    return _OVERLAP if _ONE_OF in words else words + action


def pointed_at(root: Any, reference: Any) -> Any:
    """What a `$ref` into the same document names; True, which admits everything, where it names nothing there."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return True
    found = root
    for step in unquote(reference).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and len(name) < 8 and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return True
    return found


def _all_schemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A schema, those inside it, and those that references lead to, each once. It may be changed when it has come."""
    waiting: list[Any] = [schema]
    seen: dict[int, Any] = {}
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict) and id(each) not in seen:
            seen[id(each)] = each
            waiting += [pointed_at(schema, each.get("$ref")), *(child for _, child in _subschemas(each))]
            yield each


def _numbers(value: Any) -> Iterator[int | float]:
    """The numbers in a JSON value."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, (dict, list)):
            waiting += each.values() if isinstance(each, dict) else each
        elif isinstance(each, (int, float)) and not isinstance(each, bool):
            yield each


def _is_rounded(word: str, number: int | float) -> bool:
    """True if llguidance may admit what a keyword with this number does not."""
    if word in _EXCLUSIVE:  # the next number inside is at most so large
        return not -MAX_EXACT < (number if word == "exclusiveMaximum" else -number) <= MAX_EXACT
    if abs(number) <= MAX_EXACT or (word == "maximum" and number >= MAX_INTEGER):
        return False
    if abs(number) > MAX_INTEGER or min(int(float(number)), MAX_INTEGER) != number:
        return True
    is_integer = word in _CONSTANTS and isinstance(number, int)
    return not is_integer and Decimal(repr(float(number))) != number  # where integers are not asked for, it is shortened


def _is_same(value: Any, other: Any) -> bool:
    """True if two JSON values are the same: in Python 1 is True."""
    return type(value) is type(other) and bool(value == other)


def _rules(grammar: str) -> Iterator[tuple[dict[str, Any], int, int, str]]:
    """Each schema in a grammar of ours, where it starts and ends, and what the comment after it says."""
    for found in _RULE.finditer(grammar):
        schema, end = _DECODER.raw_decode(grammar, found.end())
        comment = grammar[end:].partition("\n")[0].removeprefix(" // ")
        if isinstance(schema, dict):
            yield schema, found.end(), end, json.loads(comment) if comment else ""


def _subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas inside one that are objects, each with the step to it."""
    for word, value in schema.items():
        if word in _MAPS and isinstance(value, dict):
            steps = [(f"{word}.{name[:64]}", child) for name, child in value.items()]
        elif word in _LISTS and isinstance(value, list):
            steps = [(f"{word}[{index}]", child) for index, child in enumerate(value)]
        else:
            steps = [(word, value)] if word in _SINGLE else []
        yield from ((step, child) for step, child in steps if isinstance(child, dict))


def _exclude(schema: dict[str, Any], root: dict[str, Any]) -> None:
    """Make a `oneOf` an `anyOf` where its branches are objects with constants of their own, which then are required."""
    targets = [_resolve_refs(branch, root) for branch in _list(schema, "oneOf")]
    objects = [one for one in targets if isinstance(one, dict) and one.get("type") == "object"]
    shared = [one["properties"] for one in objects if isinstance(one.get("properties"), dict)]
    if not shared or len(shared) < len(targets) or "anyOf" in schema:
        return
    marks = [name for name in shared[0] if _are_apart([_constants(_resolve_refs(each.get(name), root)) for each in shared])]
    marks.sort(key=lambda mark: sum(mark not in _list(one, "required") for one in objects))
    if marks:
        for one in objects:
            one["required"] = [*(name for name in _list(one, "required") if name != marks[0]), marks[0]]
        schema["anyOf"] = schema.pop("oneOf")


def _resolve_refs(schema: Any, root: dict[str, Any]) -> Any:
    for _ in range(MAX_HOPS):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = pointed_at(root, schema["$ref"])
    return schema


def _constants(schema: Any) -> set[str]:
    """The values that a schema lists, none where it allows others."""
    if not isinstance(schema, dict):
        return set()
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return set(map(json.dumps, listed)) if isinstance(listed, list) else set()


def _list(schema: dict[str, Any], word: str) -> list[Any]:
    value = schema.get(word)
    return value if isinstance(value, list) else []


def _are_apart(sets: list[set[str]]) -> bool:
    return all(sets) and len(set().union(*sets)) == sum(map(len, sets))


def _spread_patterns(schema: dict[str, Any], compile_schema: Compile) -> None:
    """Give the schema of a pattern that matches declared properties alone to those."""
    patterns, properties = schema.get("patternProperties"), schema.get("properties", {})
    if not (isinstance(patterns, dict) and isinstance(properties, dict)):
        return
    names = [*dict.fromkeys((*properties, *(name for name in _list(schema, "required") if isinstance(name, str))))]
    others: dict[str, Any] = {"type": "object", "properties": dict.fromkeys(names, False), "additionalProperties": False}
    for pattern in [each for each in patterns if names and "^" in each and "$" in each]:  # others match texts without end
        if patterns[pattern] is False or _takes(compile_schema(others | {"patternProperties": {pattern: True}}), '{"'):
            continue
        rule = patterns.pop(pattern)
        for name in names:
            if not compile_schema({"type": "string", "const": name, "pattern": pattern}).is_error():
                properties[name] = _and(properties.get(name, True), rule)
    if properties:
        schema["properties"] = properties


def _takes(matcher: llguidance.LLMatcher, text: str) -> bool:
    """True if an answer may begin so; true of a schema with a fault, which is told elsewhere."""
    return matcher.is_error() or matcher.try_consume_tokens([*text.encode()]) == len(text)


def _and(schema: Any, rule: Any) -> Any:
    """A schema with a rule beside its own: it is changed, and not copied, as references may lead into it."""
    made = {} if schema is True else schema
    if isinstance(made, dict):
        made["allOf"] = [*_list(made, "allOf"), rule]
    return made
