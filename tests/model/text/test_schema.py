"""Schemas are carried out that llguidance by itself would refuse or get stuck in; what is refused has its place."""

import json
import random

import jsonschema
import llguidance
import pytest

from attend.model.errors import InvalidRequest
from attend.model.text.grammar import _byte_tokens, _compile_schema, _try
from attend.model.text.schema import FORMATS, rewritten
from tests.model.text.test_grammar import compiled

CLOSED = {"type": "object", "additionalProperties": False}
SCORE = CLOSED | {"properties": {"score": {"type": "integer", "multipleOf": 5}}, "required": ["score"]}
SAMPLED = [
    SCORE | {"patternProperties": {"^score$": {"type": "integer"}}},
    SCORE | {"patternProperties": {"^score$": {"type": "integer"}, "^(score|x)$": {"maximum": 50}}},
    SCORE | {"patternProperties": {"^score$": {"maximum": 50}, "^x_": {"type": "null"}}},
    CLOSED | {"properties": {"a": {"enum": [1, "b"]}, "b": True}, "patternProperties": {"^(a|b)$": {"type": "integer"}}},
    CLOSED | {"required": ["a"], "patternProperties": {"^a$": {"type": "boolean"}}},
    CLOSED | {"properties": {"a": False, "b": {}}, "patternProperties": {"^[ab]$": {"type": "null"}}},
    {"type": "array", "items": SCORE | {"patternProperties": {"^score$": {"type": "integer"}}}, "maxItems": 2},
    {"$defs": {"s": SCORE | {"patternProperties": {"^score$": {"maximum": 9}}}}, "$ref": "#/$defs/s"},
]


def walk(schema, seed, steps=300):
    """A random text of a schema, byte by byte, which likes to go on to further properties; None where it did not end."""
    matcher, draw, said = _compile_schema(json.loads(json.dumps(schema))), random.Random(seed), bytearray()
    assert not matcher.is_error(), matcher.get_error()
    while len(said) < steps and not matcher.is_stopped():
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token for token in range(256) if bits >> token & 1]
        assert allowed or matcher.is_accepting(), f"a dead end after {bytes(said)!r}: {matcher.get_error()}"
        if not allowed:
            break
        likely = [ord(sign) for sign in ',"}' if ord(sign) in allowed]
        said.append(draw.choice(likely if likely and draw.random() < 0.5 else allowed))
        assert matcher.consume_token(said[-1])
    return said.decode() if matcher.is_accepting() else None


def obeyed(schema, seeds=20):
    """How many random texts of a schema came to an end; all of those obey it."""
    plain = rewritten(json.loads(json.dumps(schema)), _compile_schema)
    texts = [text for seed in range(seeds) if (text := walk(plain, seed)) is not None]
    for text in texts:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    return len(texts)


@pytest.mark.parametrize("schema", SAMPLED)
def test_patterns_over_declared_properties_leave_no_dead_end_and_are_obeyed(schema):
    assert obeyed(schema) > 0


def tagged(name, *required, **more):
    properties = {"kind": {"const": name, "default": name, "type": "string"}, name: {"type": "integer", "maximum": 9}}
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False, **more}


CAT, DOG = tagged("cat"), tagged("dog", "dog")
REFERRED = {"$defs": {"Cat": CAT, "Dog": DOG}, "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]}


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [CAT, DOG]},
        REFERRED,
        REFERRED | {"discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat"}}},
        {"oneOf": [tagged("cat", "kind"), tagged("dog", "kind")]},
        CLOSED | {"$defs": REFERRED["$defs"], "properties": {"pet": {"oneOf": REFERRED["oneOf"]}}, "required": ["pet"]},
        {"oneOf": [{"type": "integer", "maximum": 9}, {"type": "null"}]},
    ],
)
def test_a_union_whose_branches_have_constants_of_their_own_is_carried_out(schema):
    """pydantic writes such ones, with the constants as defaults, and so not required."""
    assert obeyed(schema) > 0


EMAIL = {"type": "string", "pattern": "^(?!x)a"}
PLACED = [
    (CLOSED | {"properties": {"email": EMAIL}}, "properties.email.pattern: regex, character 2: look-around"),
    ({"type": "array", "items": {"anyOf": [{"type": "null"}, EMAIL]}}, "items.anyOf[1].pattern: regex"),
    ({"$defs": {"E": EMAIL}, "properties": {"a": {"$ref": "#/$defs/E"}}}, "$defs.E.pattern: regex"),
    ({"properties": {"a": {"not": {}}}}, 'properties.a.not: Unimplemented keys: ["not"]; leave it out'),
    ({"properties": {"a": {"items": [{"type": "nul"}]}}}, "properties.a.items[0].type: Invalid type: nul"),
    ({"properties": {"a": {"$ref": "#/no"}}}, "properties.a.$ref: Pointer '/no' does not exist"),
    ({"properties": {"n": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}, "properties.n.oneOf: oneOf needs branches"),
    (
        {"oneOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"type": "integer"}}}]},
        "oneOf: oneOf needs branches",
    ),
    (CLOSED | {"patternProperties": {"^(?!x)$": True}}, "patternProperties: regex, character 2"),
]


@pytest.mark.parametrize(("schema", "words"), PLACED)
def test_what_is_refused_has_its_place_and_names_no_option_of_the_library(schema, words):
    fault, source = _try("json_schema", json.dumps(schema))
    assert fault.startswith(words) and not source, fault
    assert "option" not in fault
    rules = f'start: a b\na: "x"\nb: %json {json.dumps(schema)} // "tools[0].function.parameters"\n'
    fault, source = _try("tools", rules)
    assert not source
    assert fault.startswith(f"tools[0].function.parameters.{words}"), fault
    assert fault.endswith("; or enforce no calls: tool_choice auto, no strict tool, no structured output")


def test_the_place_is_told_to_the_caller():
    with pytest.raises(
        InvalidRequest, match=r"^json_schema: properties\.email\.pattern: regex, .*look-around, .*; use a pattern without it$"
    ):
        compiled("json_schema", json.dumps(CLOSED | {"properties": {"email": EMAIL}}))


@pytest.mark.parametrize(
    "name", ["path", "url", "binary", "int32", "json-string", "uuid4", "date-span", "iri", "regex", "json-pointer"]
)
def test_a_format_that_is_not_enforced_is_an_annotation(name):
    formed = {"type": "string", "format": name}
    for schema in (
        {"items": formed},
        {"items": [True], "additionalItems": formed},
        {"$ref": "#/components/schemas/X", "components": {"schemas": {"X": {"items": {"$ref": "#/y"}}}}, "y": formed},
    ):
        array = {"type": "array", "minItems": 1, **schema}
        assert _try("json_schema", json.dumps(array))[0] == "", array
    assert walk(rewritten(dict(formed), _compile_schema) | {"const": "any text"}, 0) == '"any text"'


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_format_that_is_enforced_is_obeyed(name):
    schema = {"type": "string", "format": name}
    assert rewritten(dict(schema), _compile_schema) == schema
    assert _try("json_schema", json.dumps(schema))[0] == ""
    assert _compile_schema(schema).try_consume_tokens([*b'"\n any text"']) == 1


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": 1, "patternProperties": {"^a$": {}}, "properties": {"a": {"allOf": 1}}},
        {"oneOf": [{"properties": 1}, {"properties": {}}], "required": {}},
        {"oneOf": [{"properties": {"a": {"const": 1}}, "required": 1}, {"properties": {"a": {"enum": 2}}, "required": [{}]}]},
        {"patternProperties": 1, "properties": []},
        {"required": [1, {}], "patternProperties": {"^a$": 1}},
        {"properties": {"format": 1, "oneOf": [], "patternProperties": {"^a$": "b$"}}},
    ],
)
def test_what_is_no_schema_is_refused_in_the_librarys_words(schema):
    assert _try("json_schema", json.dumps(schema))[0].partition(":")[0] not in ("TypeError", "AttributeError")


TOP = 2**63 - 1
ROUNDED = "integers beyond 2^53 cannot be enforced exactly; use strings, or leave it out"


def takes(source, text):
    matcher = llguidance.LLMatcher(_byte_tokens(), source, log_level=0)
    assert not matcher.is_error()
    return matcher.try_consume_tokens([*text.encode()]) == len(text) and matcher.is_accepting()


@pytest.mark.parametrize("number", [2**53 + 1, -(2**53) - 1, 2**60 + 1, TOP - 1, TOP + 1, -TOP - 1, -TOP - 2, 10**30, 1e20])
@pytest.mark.parametrize(
    ("place", "schema"),
    [
        ("enum", lambda number: {"enum": [5, number]}),
        ("const", lambda number: {"const": number}),
        ("const", lambda number: {"const": {"a": [1, {"b": number}]}}),
        ("properties.id.enum", lambda number: {"properties": {"id": {"type": "integer", "enum": ["x", number]}}}),
        ("items.anyOf[1].const", lambda number: {"items": {"anyOf": [{"type": "null"}, {"const": number}]}}),
        ("$defs.Id.enum", lambda number: {"$defs": {"Id": {"enum": [number]}}, "items": {"$ref": "#/$defs/Id"}}),
        ("", lambda number: {"shared": {"Id": {"enum": [number]}}, "items": {"$ref": "#/shared/Id"}}),
    ],
)
def test_a_constant_that_would_come_out_as_another_number_is_refused(place, schema, number):
    """llguidance reads numbers as doubles, and integers as 64 bits of these."""
    written, told = json.dumps(schema(number)), f"{place}: {ROUNDED}" if place else ROUNDED
    assert _try("json_schema", written) == (told, "")
    assert _try("grammar", f'start: "a" %json {written}\n') == (ROUNDED, "")
    fault, _ = _try("tools", f'start: a\na: %json {written} // "tools[0].function.parameters"\n')
    assert fault.startswith(f"tools[0].function.parameters{'.' if place else ': '}{told}; or enforce no calls")


BOUNDS = [-TOP - 5000, -TOP - 1, -TOP, -TOP + 1023, -(2**60) - 1, -(2**53) - 1, -(2**53), -(2**53) + 1, 2**53 - 1, 2**53]
BOUNDS += [
    2**53 + 1,
    2**53 + 3,
    2**54 + 1,
    2**54 + 3,
    2**60 + 1,
    TOP - 600,
    TOP - 1,
    TOP,
    TOP + 1,
    2**64 - 1,
    2**64,
    1e18,
    1e30,
]
NEAR = (*range(-3, 4), 511, 512, 1024, -511, -512, -1024)


@pytest.mark.parametrize("kind", ["integer", "number", ["integer", "null"], None])
@pytest.mark.parametrize("word", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
def test_a_bound_admits_no_number_beyond_it(word, kind):
    """It is refused, or kept; a maximum beyond 64 bits may admit less."""
    below, is_open = word.endswith("aximum"), word.startswith("exclusive")
    of_draft_4 = word.replace("exclusiveM", "m")
    for number in BOUNDS:
        other = {"minimum": -(2**53)} if below else {"maximum": 2**64}
        bounds = [{word: number}, {word: number} | other, *([{of_draft_4: number, word: True}] if is_open else [])]
        for bound in bounds:
            fault, source = _try("json_schema", json.dumps(bound | ({"type": kind} if kind else {})))
            for near in [int(number) + distance for distance in (() if fault else NEAR)]:
                beyond = near > number if below else near < number
                assert not (beyond or (is_open and near == number)) or not takes(source, str(near)), (bound, near)
