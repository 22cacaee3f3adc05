"""An argument that is written as plain text gets the type that the tool's schema gives it."""

import json
import time

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attend.service.chat.arguments import ANY, MAX_DEPTH, TEXT, ArgumentTypes, as_json, python_value, tagged_value
from attend.service.chat.parts import CallArguments, Tool
from tests.conftest import examples
from tests.service.chat.examples import form
from tests.service.chat.test_parser import parts_of

DEFS = {
    "Level": {"enum": ["1", "2"]},
    "Tree": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]}}},
    "a/b": {"type": "integer"},
    "Again": {"$ref": "#/$defs/Again"},
    "Round": {"anyOf": [{"$ref": "#/$defs/Round"}, {"type": "string"}]},
    "Deep": {"allOf": [{"$ref": "#/$defs/Level"}]},
}
OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


def read_as(schema, text):
    """What the value of argument x is, by its schema."""
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": DEFS}
    return json.loads(tagged_value(ArgumentTypes(parameters).argument("x"), text))


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (OPTIONAL, "94105", "94105"),
        (OPTIONAL, "true", "true"),
        (OPTIONAL, '{"a": 1}', '{"a": 1}'),
        (OPTIONAL, '"a"', '"a"'),
        (OPTIONAL, "null", None),
        (OPTIONAL, "None", "None"),
        ({"type": ["string", "null"]}, "1e3", "1e3"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, '"a"', '"a"'),
        ({"$ref": "#/$defs/Level"}, "2", "2"),
        ({"$ref": "#/$defs/Level"}, '"2"', "2"),
        ({"$ref": "#/$defs/Level", "default": "1"}, "2", "2"),
        ({"$ref": "#/$defs/Deep"}, "2", "2"),
        ({"enum": ["1", 2]}, "2", 2),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"enum": [True, "False"]}, "True", True),
        ({"enum": [True, "False"]}, "False", "False"),
        ({"const": "7"}, "7", "7"),
        ({"const": 7}, "7", 7),
        ({"const": 7}, "7.0", 7.0),
        ({"const": {"a": [1]}}, '{"a":[1]}', {"a": [1]}),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": ["boolean", "string"]}]}, "5", "5"),
        ({"type": ["integer", "string"]}, "5", 5),
        ({"type": "integer"}, "5.0", 5.0),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": ["integer", "string"]}, "5.5", "5.5"),
        ({"type": "number"}, "5", 5),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "1", "1"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"$ref": "#/$defs/a~1b"}, "5", 5),
        ({"$ref": "#/$defs/a%7E1b"}, "5", 5),
        ({"$ref": "#/$defs/Tree"}, '{"next": null}', {"next": None}),
        ({"$ref": "#/$defs/Tree"}, "{'next': None}", {"next": None}),
        ({"$ref": "#/$defs/Round"}, "5", "5"),
        ({"$ref": "#/$defs/missing"}, "5", 5),
        ({"$ref": "https://example.com/schema"}, "5", 5),
        ({"anyOf": [{"type": "object"}, {"type": "string"}]}, "{'a': 1}", "{'a': 1}"),
        ({"type": "array"}, "('a', True)", ["a", True]),
        ({}, '"a"', "a"),
        (True, "None", None),
    ],
)
def test_json_is_taken_where_the_schema_admits_it_and_the_text_elsewhere(schema, text, value):
    made = read_as(schema, text)
    assert (type(made), made) == (type(value), value)


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/Args", "$defs": {"Args": {"properties": {"x": OPTIONAL}}}},
        {"allOf": [{"properties": {"y": {}}}, {"properties": {"x": OPTIONAL}}]},
        {"oneOf": [{"properties": {"x": {"type": "string"}}}, {"properties": {"x": {"type": "null"}}}]},
        {"additionalProperties": OPTIONAL},
    ],
)
def test_the_schema_of_an_argument_may_stand_where_that_of_the_tool_refers_to(parameters):
    values = ArgumentTypes({"type": "object", **parameters}).argument("x")
    assert [tagged_value(values, text) for text in ("5", "null")] == ['"5"', "null"]


def test_references_that_go_round_or_never_end_are_followed_for_so_long():
    assert ArgumentTypes({"properties": {"x": {"$ref": "#/properties/x"}}}).argument("x") == {}
    assert ArgumentTypes({"$ref": "#"}).argument("x") == {}
    chain = {str(step): {"$ref": f"#/$defs/{step + 1}"} for step in range(1000)}
    assert ArgumentTypes({"properties": {"x": {"$ref": "#/$defs/0"}}, "$defs": chain}).argument("x") == ANY
    near = {str(step): {"$ref": f"#/$defs/{step + 1}"} for step in range(MAX_DEPTH - 2)} | {
        str(MAX_DEPTH - 2): {"type": "string"}
    }
    assert ArgumentTypes({"properties": {"x": {"$ref": "#/$defs/0"}}, "$defs": near}).argument("x") == TEXT


def test_the_work_of_an_answer_is_bounded(monkeypatch):
    """References that double at each step, and new arguments without an end."""
    doubled = {str(step): {"anyOf": [{"$ref": f"#/$defs/{step + 1}"}] * 2} for step in range(MAX_DEPTH // 2 - 2)}
    started = time.thread_time()
    admitted = ArgumentTypes({"properties": {"x": {"$ref": "#/$defs/0"}}, "$defs": doubled})
    assert admitted.argument("x") == ANY
    wide = ArgumentTypes({"allOf": [{"properties": {}}] * 10_000})
    for number in range(10_000):
        wide.argument(str(number))
    assert wide._steps < 200_000
    assert time.thread_time() - started < 10


KINDS = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])
LISTED = st.sampled_from(["1", "2", 1, 2, 1.5, True, False, None, "true", "null", "None", "a", [1], {"a": 1}, ["a"]])
PLAIN = st.one_of(
    st.builds(lambda kind: {"type": kind}, KINDS),
    st.builds(lambda kinds: {"type": kinds}, st.lists(KINDS, min_size=1, max_size=3, unique=True)),
    st.builds(lambda listed: {"enum": listed}, st.lists(LISTED, min_size=1, max_size=3)),
    st.builds(lambda value: {"const": value}, LISTED),
    st.builds(lambda kind, listed: {"type": kind, "enum": listed}, KINDS, st.lists(LISTED, min_size=1, max_size=3)),
    st.builds(lambda name: {"$ref": f"#/$defs/{name}"}, st.sampled_from(["Level", "Tree", "a~1b", "Deep"])),
    st.just({}),
)
SCHEMAS = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.builds(
            lambda word, parts: {word: parts}, st.sampled_from(["anyOf", "allOf"]), st.lists(inner, min_size=1, max_size=3)
        ),
        st.builds(lambda part, beside: {**beside, "allOf": [part]}, inner, PLAIN),
        st.builds(lambda name, beside: {**beside, "$ref": f"#/$defs/{name}"}, st.sampled_from(["Level", "Deep"]), PLAIN),
    ),
    max_leaves=6,
)
WRITTEN = st.sampled_from(
    [
        *["1", "2", "1.0", "1.5", "true", "True", "null", "None", "a", '"1"', '"a"', "[1]", "['a']", '["a"]', '{"a": 1}'],
        *["{'a': 1}", "{'a': True}", '{"next": {"next": null}}', "", " 1", "1\n2", "[1", '{"a', "007", "NaN", "1e999", "<x>"],
    ]
)


@settings(max_examples=examples(400), deadline=None)
@given(SCHEMAS, WRITTEN, st.integers(1, 9))
def test_what_was_read_is_valid_where_any_reading_of_the_text_is(schema, text, cut):
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": DEFS}
    validator = jsonschema.Draft202012Validator(parameters)
    readings = [json.dumps(text.removesuffix("\n")), *filter(None, (as_json(text), python_value(text)))]
    tool = (Tool("f", parameters),)
    answer = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
    parts = parts_of(form("qwen3_coder"), [answer], tool)
    assert parts == parts_of(form("qwen3_coder"), [answer[at : at + cut] for at in range(0, len(answer), cut)], tool)
    made = json.loads("".join(part.text for part in parts if isinstance(part, CallArguments)))
    if any(validator.is_valid({"x": json.loads(reading)}) for reading in readings):
        assert validator.is_valid(made), (schema, text, made)


def test_a_quote_does_not_join_texts_whose_schema_admits_null():
    tools = (Tool("f", {"properties": {"x": OPTIONAL, "y": OPTIONAL}}),)
    answer = (
        '<tool_call>f<arg_key>x</arg_key><arg_value>"a</arg_value><arg_key>y</arg_key><arg_value>b"</arg_value></tool_call>'
    )
    parts = parts_of(form("glm"), [answer], tools)
    assert json.loads("".join(part.text for part in parts if isinstance(part, CallArguments))) == {"x": '"a', "y": 'b"'}


def test_calls_that_a_grammar_forms_are_read_as_it_writes_them():
    """A string whose schema is not of type string alone stands in quotes there."""
    tools = (Tool("f", {"properties": {"x": OPTIONAL, "y": {"type": "string"}}}),)
    answer = (
        "<tool_call>f<arg_key>x</arg_key><arg_value>%s</arg_value><arg_key>y</arg_key><arg_value>%s</arg_value></tool_call>"
    )
    for written, formed, value in (('"5"', True, "5"), ('"5"', False, '"5"'), ("null", True, None)):
        parts = parts_of(form("glm"), [answer % (written, written)], tools, calls_formed=formed)
        read = json.loads("".join(part.text for part in parts if isinstance(part, CallArguments)))
        assert read == {"x": value, "y": written}


def test_what_schemas_say_of_each_other_in_a_circle_does_not_depend_on_who_is_asked_first():
    a = {"anyOf": [{"$ref": "#/$defs/B"}, {"type": "string"}]}
    b = {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "integer"}]}
    properties = {"a": {"$ref": "#/$defs/A"}, "b": {"$ref": "#/$defs/B"}}
    for order in ("ab", "ba"):
        admitted = ArgumentTypes({"type": "object", "properties": properties, "$defs": {"A": a, "B": b}})
        assert [admitted.argument(key).keys() for key in order] == [{"string", "integer"}] * 2


@pytest.mark.parametrize("word", ["anyOf", "allOf"])
def test_many_references_to_a_long_enum_cost_a_bounded_time(word):
    parameters = {"type": "object", "properties": {}, "d": {"enum": list(range(13_000))}}
    parameters["properties"] = {f"a{n}": {word: [{"$ref": "#/d"}] * 3000} for n in range(3)}
    admitted = ArgumentTypes(parameters)
    began = time.process_time()
    for name in parameters["properties"]:
        assert "integer" in admitted.argument(name)
    assert time.process_time() - began < 1
