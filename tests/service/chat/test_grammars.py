"""Every text of an enforced grammar is read as calls that obey."""

import json
import random

import jsonschema
import llguidance
import pytest

from attend.model.errors import InvalidRequest, NotSupported
from attend.model.text.grammar import GrammarSpec, _limits, _source
from attend.service.chat.forms import CALLS, AnswerFormat
from attend.service.chat.grammars import CallGrammar
from attend.service.chat.parser import AnswerParser
from attend.service.chat.parts import CallArguments, CallStart, Content, Reasoning, Tool, join_deltas
from tests.service.chat.test_parser import form_named

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "exact": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
DEEP = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2}},
    "$defs": {
        "tag": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"], "additionalProperties": False}
    },
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (Tool("weather", SCHEMA, strict=True), Tool("now", EMPTY), Tool("mark", DEEP))
FORMS = sorted(CALLS)


class Letters:
    """One token for each byte, an end, and a special token for each of these texts."""

    bos_token_id = None
    eos_token_id = 256

    def __init__(self, special=()):
        self.ids = {text: 257 + place for place, text in enumerate(special)}
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<end>", *(b"\xff" + text.encode() for text in special)]
        self.special_token_ids = [256, *self.ids.values()]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


ENDINGS = [
    "</think>",
    "<|end|><|start|>assistant",
    "<tool_call>",
    "[TOOL_CALLS]",
    "</parameter>",
    "</arg_value>",
    "yes",
    '{"city": "',
    "abc/",
]


def walk(spec: GrammarSpec, special=(), seed=0, steps=4000) -> tuple[str, bool]:
    """A random text of a grammar; whether it came to an end. What may end something is likelier than what may not."""
    letters = Letters(special)
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(letters))
    matcher = llguidance.LLMatcher(tokenizer, _source(spec.kind, spec.text), log_level=0, limits=_limits())
    assert not matcher.is_error(), matcher.get_error()
    texts, draw, said = {number: text for text, number in letters.ids.items()}, random.Random(seed), []
    for _ in range(steps):
        if matcher.is_stopped():
            break
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        every = [token for token in range(len(letters.tokens)) if bits >> token & 1]
        allowed = [token for token in every if not 128 <= token < 256] or every
        assert allowed, b"".join(said)
        if draw.random() < 0.1:
            ending = draw.choice(ENDINGS)
            said.append(ending[: matcher.try_consume_tokens(list(ending.encode()))].encode())
            continue
        ends = [token for token in allowed if token >= 256 or chr(token) in '<"}])\n`']
        token = draw.choice(ends if ends and draw.random() < 0.4 else allowed)
        matcher.consume_token(token)
        assert not matcher.is_error(), matcher.get_error()
        if token != 256:
            said.append(texts[token].encode() if token in texts else bytes([token]))
    return b"".join(said).decode(errors="replace"), matcher.is_stopped()


def tools_for(name: str) -> tuple[Tool, ...]:
    """Braced calls take no lists."""
    return TOOLS[:2] if CALLS[name].syntax == "braced" else TOOLS


def calls_in(parts) -> dict[int, tuple[str, object]]:
    names = {part.index: part.name for part in parts if isinstance(part, CallStart)}
    texts = {part.index: part.text for part in parts if isinstance(part, CallArguments)}
    return {index: (name, json.loads(texts[index])) for index, name in names.items()}


def obeys(parts, tools) -> int:
    """How many calls there are, all of which obey."""
    schemas, calls = {tool.name: tool.parameters for tool in tools}, calls_in(parts)
    for name, arguments in calls.values():
        jsonschema.validate(arguments, schemas[name])
    return len(calls)


def parsed(shape: AnswerFormat, text: str, tools, **more):
    parser = AnswerParser(shape, tools, calls_formed=True, **more)
    return join_deltas(parser.feed(text) + parser.finish())


def grammar(shape, tools=TOOLS, special=None, *, reasoning_open=False) -> CallGrammar:
    return CallGrammar(shape, tools, special or {}, reasoning_open=reasoning_open)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("parallel", [False, True])
def test_required_calls_are_read_and_obey(name, parallel):
    shape, tools = AnswerFormat(CALLS[name]), tools_for(name)
    ended = 0
    for seed in range(12):
        text, complete = walk(grammar(shape, tools).required_calls(parallel=parallel), seed=seed)
        if complete:
            ended += 1
            parts = parsed(shape, text, tools)
            assert obeys(parts, tools) >= 1, text
            assert not any(isinstance(part, Content) for part in parts), text
            assert parallel or len(calls_in(parts)) == 1
    assert ended >= 4


@pytest.mark.parametrize("name", FORMS)
def test_markers_may_be_special_tokens(name):
    shape, tools = form_named(name), tools_for(name)
    special = sorted(
        text for text in shape.markers if text.startswith(("<", "[")) and text not in ("<", ">", "<function=", "<parameter=")
    )
    spec = grammar(shape, tools, Letters(special).ids).required_calls(parallel=False)
    found = [walk(spec, special, seed) for seed in range(12)]
    ended = [text for text, complete in found if complete]
    assert ended
    for text in ended:
        assert obeys(parsed(shape, text, tools), tools) == 1, text


@pytest.mark.parametrize("name", FORMS)
def test_allowed_calls_obey_and_other_text_stays_free(name):
    shape, tools = AnswerFormat(CALLS[name]), tools_for(name)
    spec, calls, free = grammar(shape, tools).optional_calls(parallel=True), 0, 0
    for seed in range(24):
        text, complete = walk(spec, seed=seed, steps=800)
        if complete:
            found = obeys(parsed(shape, text, tools), tools)
            calls, free = calls + found, free + (found == 0)
    assert free


@pytest.mark.parametrize("reasoning_open", [False, True])
def test_reasoning_may_come_first_and_ends(reasoning_open):
    shape, kinds = form_named("hermes"), set()
    spec = grammar(shape, reasoning_open=reasoning_open).required_calls(parallel=False)
    for seed in range(30):
        text, complete = walk(spec, seed=seed, steps=1500)
        if complete:
            parts = parsed(shape, text, TOOLS, reasoning_open=reasoning_open)
            assert obeys(parts, TOOLS) == 1
            kinds.add(isinstance(parts[0], Reasoning))
    assert False in kinds or reasoning_open


CALLED = {
    "hermes": '<tool_call>{"name": "now", "arguments": {"x": 1}}</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "now", "parameters": {"x": 1}}',
    "qwen3_coder": "<function=now><parameter=x>1</parameter></function>",
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.now<|message|>{}",
}


def accepted(spec: GrammarSpec, text: str) -> str:
    """As much of a text as a grammar takes."""
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Letters()))
    matcher = llguidance.LLMatcher(tokenizer, _source(spec.kind, spec.text), log_level=0, limits=_limits())
    assert not matcher.is_error(), matcher.get_error()
    return text.encode()[: matcher.try_consume_tokens(list(text.encode()))].decode()


@pytest.mark.parametrize(("name", "call"), CALLED.items())
@pytest.mark.parametrize("kind", ["required_calls", "optional_calls"])
def test_no_call_stands_in_reasoning_or_in_text(name, call, kind):
    """Nothing would hold it to its schema."""
    spec = getattr(grammar(form_named(name)), kind)(parallel=True)
    for before in (
        ["<|channel|>analysis<|message|>", "<|channel|>final<|message|>"] if name == "harmony" else ["<think>", "Hm. "]
    ):
        if kind == "allowed" or before in ("<|channel|>analysis<|message|>", "<think>"):
            assert accepted(spec, before + "a b") == before + "a b"
            assert accepted(spec, before + call) != before + call


STRANGE = {
    "from": {"type": "boolean"},
    "max-n": {"type": "string", "maxLength": 2},
    "%v": {"type": "boolean"},
    "\u00e9": {"type": "boolean"},
    "</parameter>": {"type": "string", "enum": ["%k", "\u00e9\n\"'\\"]},
    "a b": {"type": "array", "items": {"enum": ["</parameter>", "</arg_value>", "\n"]}, "minItems": 1, "maxItems": 2},
}


@pytest.mark.parametrize("name", FORMS)
def test_strange_names_and_texts_are_read_as_they_were_asked_for(name):
    shape, takes = AnswerFormat(CALLS[name]), dict(STRANGE)
    if CALLS[name].layout.argument:
        unfit = {"tagged": (), "braced": ("a b",), "python": ("a b", "%v", "</parameter>")}[CALLS[name].syntax]
        takes = {
            key: schema
            for key, schema in STRANGE.items()
            if key not in unfit and (name, key) != ("qwen3_coder", "</parameter>")
        }
    tool = Tool("get-x.1", {"type": "object", "properties": takes, "required": [*takes], "additionalProperties": False})
    ended = 0
    for seed in range(8):
        text, complete = walk(grammar(shape, [tool]).required_calls(parallel=False), seed=seed)
        ended += complete
        assert not complete or obeys(parsed(shape, text, [tool]), [tool]) == 1, text
    assert ended


def test_a_schema_that_names_no_type_is_one_of_objects():
    spec = grammar(AnswerFormat(CALLS["hermes"]), [Tool("f", {})]).required_calls(parallel=False)
    head = '<tool_call>\n{"name": "f", "arguments": '
    assert accepted(spec, head + "[") == head and accepted(spec, head + "{") == head + "{"


FLEXIBLE = {"x-guidance": {"whitespace_flexible": True}}
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"x":{"a":[1,2]}}}',
    "qwen3_coder": '<tool_call>\n<function=f>\n<parameter=x>\n{"a":[1,2]}\n',
    "pythonic": '[f(x={"a":[1,2]})',
}


@pytest.mark.parametrize(("name", "text"), WRITTEN.items())
@pytest.mark.parametrize("schema", [True, {}, {"type": "object"} | FLEXIBLE])
def test_arguments_are_compact_whatever_their_schema_says(name, text, schema):
    about = FLEXIBLE if name == "hermes" else {}
    spec = grammar(AnswerFormat(CALLS[name]), [Tool("f", {"properties": {"x": schema}, **about})]).required_calls(
        parallel=False
    )
    assert accepted(spec, text) == text
    for mark in ('"a"', ":[", "[1", ",2", "2]"):
        other = text.replace(mark, f"{mark[0]} {mark[1:]}" if mark[0] in "[2" else f" {mark}")
        assert accepted(spec, other) != other, other


CONTENTS = [
    GrammarSpec("json_schema", json.dumps(SCHEMA)),
    GrammarSpec("json_object", ""),
    GrammarSpec("regex", "[a-c]{3}/x"),
    GrammarSpec("choice", '["yes", "no"]'),
]


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: content.kind)
@pytest.mark.parametrize("name", ["hermes", "harmony"])
def test_content_keeps_its_form_after_reasoning_and_beside_calls(name, content):
    shape, seen = form_named(name), set()
    spec = grammar(shape, reasoning_open=name == "hermes").content(content, parallel=False)
    for seed in range(40):
        text, complete = walk(spec, seed=seed, steps=1500)
        if not complete:
            continue
        parts = parsed(shape, text, TOOLS, reasoning_open=name == "hermes", content_formed=True)
        shown = "".join(part.text for part in parts if isinstance(part, Content))
        called = obeys(parts, TOOLS)
        seen.add("call" if called else "content")
        assert bool(called) != bool(shown)
        if shown and content.kind == "json_schema":
            jsonschema.validate(json.loads(shown), SCHEMA)
        elif shown and content.kind == "choice":
            assert shown in ("yes", "no")
        elif shown and content.kind == "json_object":
            assert isinstance(json.loads(shown), dict)
    assert "content" in seen


@pytest.mark.parametrize(
    ("name", "key", "text"),
    [
        ("functiongemma", "a b", "<escape>"),
        ("gemma4", "a:b", "<tool_call|>"),
        ("glm", "</arg_key>", "</arg_value>"),
        ("glm", "</arg_key>", "\nx"),
        ("qwen3_coder", "a>b", "</parameter>"),
        ("gemma", "a<b", None),
    ],
)
def test_a_name_or_a_text_that_a_form_cannot_write_is_refused(name, key, text):
    tool = Tool("f", {"type": "object", "properties": {key: {"type": "boolean"}}})
    with pytest.raises(NotSupported, match="cannot write this name"):
        grammar(AnswerFormat(CALLS[name]), [tool]).required_calls(parallel=True)
    tool = Tool("f", {"type": "object", "properties": {"x": {"type": "string", "enum": ["a", text]}}})
    if text is not None:
        with pytest.raises(NotSupported, match=r"properties\.x: this model's tool-call format cannot write '"):
            grammar(AnswerFormat(CALLS[name]), [tool]).required_calls(parallel=True)


@pytest.mark.parametrize("name", FORMS)
def test_a_format_that_is_an_annotation_is_taken_in_every_form(name):
    tool = Tool("f", {"properties": {"x": {"type": "string", "format": "date-span", "maxLength": 3}}, "required": ["x"]})
    texts = [walk(grammar(AnswerFormat(CALLS[name]), [tool]).required_calls(parallel=False), seed=seed) for seed in range(5)]
    assert any(complete and obeys(parsed(AnswerFormat(CALLS[name]), text, [tool]), [tool]) for text, complete in texts)


@pytest.mark.parametrize("name", FORMS)
def test_words_of_a_schema_that_bind_nothing_are_taken_in_every_form(name):
    words = {"title": "T", "description": "D", "default": "a", "examples": ["a"], "deprecated": True, "$comment": "C"}
    tool = Tool("f", {"type": "object", "properties": {"x": {"type": "string", **words}}, **words | {"default": {}}})
    assert grammar(AnswerFormat(CALLS[name]), [tool]).required_calls(parallel=True)


def test_the_place_of_a_named_tool_is_that_in_the_request():
    tool = Tool("f", {"type": "object", "oneOf": [{}]}, place="tools[3].function.parameters")
    with pytest.raises(NotSupported, match=r"^tools\[3\]\.function\.parameters\.oneOf cannot be enforced"):
        grammar(AnswerFormat(CALLS["pythonic"]), [tool]).required_calls(parallel=True)


def test_what_a_form_cannot_enforce_is_refused_by_name():
    pattern = {"type": "object", "properties": {"x": {"type": "string", "pattern": "a+"}}}
    with pytest.raises(
        NotSupported, match=r"tools\[0\]\.function\.parameters\.properties\.x\.pattern cannot be enforced.*; or enforce"
    ):
        grammar(AnswerFormat(CALLS["glm"]), [Tool("f", pattern)]).required_calls(parallel=True)
    for missing in ({"required": ["y"]}, {"properties": {"x": {}}, "required": ["x", "y"]}):
        with pytest.raises(NotSupported, match="y is required, and not one of its properties"):
            grammar(AnswerFormat(CALLS["glm"]), [Tool("f", {"type": "object", **missing})]).required_calls(parallel=True)
    for target in ("#", "#/properties/y"):
        nested = {"type": "object", "properties": {"x": {"anyOf": [{"type": "null"}, {"$ref": target}]}}}
        with pytest.raises(NotSupported, match=rf"\$ref to {target} cannot be enforced"):
            grammar(AnswerFormat(CALLS["pythonic"]), [Tool("f", nested)]).required_calls(parallel=True)
    either = {"type": "object", "oneOf": [{}]}
    with pytest.raises(NotSupported, match="oneOf"):
        grammar(AnswerFormat(CALLS["pythonic"]), [Tool("f", either)]).required_calls(parallel=True)
    with pytest.raises(NotSupported, match="texts, numbers and booleans"):
        grammar(AnswerFormat(CALLS["gemma4"]), [Tool("f", DEEP)]).required_calls(parallel=True)
    with pytest.raises(InvalidRequest, match="tools must be at most 65536 bytes"):
        grammar(AnswerFormat(CALLS["hermes"]), [Tool("f", {"type": "object", "description": "x" * 70_000})]).required_calls(
            parallel=True
        )


@pytest.mark.parametrize("text", ["not JSON", "[1]", '"x"', "[" * 60_000, '{"a":' * 13_000, '{"x-guidance": {}}'])
@pytest.mark.parametrize("tools", [(), TOOLS])
def test_a_schema_that_is_none_is_refused_by_name(text, tools):
    with pytest.raises(InvalidRequest, match=r"^json_schema: "):
        grammar(AnswerFormat(CALLS["hermes"]), tools).content(GrammarSpec("json_schema", text), parallel=True)
