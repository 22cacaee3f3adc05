"""The laws of structured output: what the mask lets through is right, what is right is let through, no spec does harm."""

import json
import random
import re
import resource
import time
from functools import cache
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attend.model.errors import EngineFailed, InvalidRequest, NotSupported
from attend.model.text.grammar import MAX_TEXT_BYTES, GrammarCompiler, GrammarSpec, Kind
from attend.model.text.grammar import _probe_source as probed
from attend.model.text.mask import CompiledGrammar, Grammar, GrammarFailed, compute_masks
from attend.model.text.schema import MAX_WHITESPACE, Whitespace
from attend.model.text.tokenizer import Tokenizer
from tests.conftest import examples

DEFAULT = Path(__file__).parents[3] / "model" / "default"
PADDING = 37  # scores beyond the tokenizer, as padded checkpoints have
END = 0
POINT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": -3, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", 7, None, "☃"]}, "maxItems": 3},
        "code": {"type": "string", "pattern": "^[a-f]{2}-[0-9]+$", "maxLength": 10},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "boolean"},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["v", "kids"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
CHOICES = ["yes", "no", "nobody", "é☃😀", 'a "quoted"\n\\line', "|.*"]
REGEXES = {
    "words": r"[a-c]{2,5}(-[0-9]{1,3})*;",
    "unicode": r"(α|β|☃){1,4}(é|😀)?",
    "anchored": r"^(ab|abc|abcd)$",
    "classes": r"\d{4}-\d\d [a-zé]{1,6}!",
}
SUM = 'start: term ("+" term)*\nterm: NUMBER | "(" start ")"\nNUMBER: /[0-9]{1,4}/\n'
SUM_GBNF = 'root ::= term ("+" term)*\nterm ::= [0-9] | "(" root ")"\n'


@cache
def shipped() -> Tokenizer:
    return Tokenizer.load(DEFAULT)


@cache
def compiler() -> GrammarCompiler:
    tokenizer = shipped()
    return GrammarCompiler(tokenizer, tokenizer.size + PADDING, (END,))


@cache
def compiler_of(whitespace: Whitespace) -> GrammarCompiler:
    return GrammarCompiler(shipped(), shipped().size, (END,), whitespace=whitespace)


@cache
def compiled(kind: Kind, text: str) -> CompiledGrammar:
    return compiler().compile(GrammarSpec(kind, text))


def tokens_of(text: str) -> list[int]:
    ids: list[int] = shipped().raw.encode(text, add_special_tokens=False).ids
    return ids


def choose(mask: np.ndarray, draw: random.Random, step: int) -> int:
    """Any allowed token; the end more often the longer it takes, and short tokens then, so that nothing runs for ever."""
    allowed = np.flatnonzero(mask)
    if END in allowed and draw.random() < 0.05 + step / 100:
        return END
    return int(draw.choice(allowed[: 300 if step > 40 else None]))


def walk(grammar: Grammar, draw: random.Random, limit: int = 400) -> tuple[list[int], bool]:
    """Tokens drawn until the end, and whether the end was reached."""
    taken: list[int] = []
    for step in range(limit):
        mask = grammar.mask()
        assert mask.any() and mask.dtype == np.bool_
        assert not mask[-PADDING:].any()
        if grammar.is_finished:
            assert np.flatnonzero(mask).tolist() == [END]
        token = choose(mask, draw, step)
        if token == END:
            return taken, True
        grammar.advance(token)
        taken.append(token)
    return taken, False


def validates(schema: object, text: str) -> bool:
    jsonschema.validate(json.loads(text), schema)
    return True


CASES = {
    "point": ("json_schema", json.dumps(POINT), lambda text: validates(POINT, text)),
    "tree": ("json_schema", json.dumps(TREE), lambda text: validates(TREE, text)),
    "object": ("json_object", "", lambda text: isinstance(json.loads(text), dict)),
    "choice": ("choice", json.dumps(CHOICES), lambda text: text in CHOICES),
    "sum": ("grammar", SUM, lambda text: re.fullmatch(r"[0-9()+]+", text) and eval_sum(text) >= 0),
    "gbnf": ("grammar", SUM_GBNF, lambda text: re.fullmatch(r"[0-9()+]+", text) and eval_sum(text) >= 0),
    **{
        name: ("regex", text, lambda answer, text=text: re.fullmatch(text, answer) is not None)
        for name, text in REGEXES.items()
    },
}


def eval_sum(text: str) -> int:
    """Value of a sum with parentheses; ValueError if it is not one."""
    while "(" in text:
        inner = re.search(r"\(([0-9+]+)\)", text)
        if inner is None:
            raise ValueError(text)
        text = text[: inner.start()] + str(eval_sum(inner[1])) + text[inner.end() :]
    return sum(int(term) for term in text.split("+"))


@pytest.mark.parametrize("name", CASES)
def test_whatever_the_mask_allows_until_the_end_keeps_the_form(name):
    kind, text, holds = CASES[name]
    tokenizer = shipped()
    ended = 0
    for seed in range(12):
        taken, complete = walk(compiled(kind, text).start(), random.Random(seed), limit=150)
        ended += complete
        if complete:
            answer = tokenizer.decode(taken, skip_special_tokens=False)
            assert "\ufffd" not in answer or name in ("point", "object")  # a string may hold U+FFFD itself
            assert holds(answer), answer
    assert ended >= 3


def accepts(grammar: Grammar, text: str) -> bool:
    """True if each token of `text` is allowed in its place, and the end after the last one and nowhere it must not be."""
    for token in tokens_of(text):
        mask = grammar.mask()
        if not mask[token]:
            return False
        grammar.advance(token)
    return bool(grammar.mask()[END])


DELETE = "\x7f"  # the library's one gap: in a string it takes U+007F only as an escape
characters = st.characters(exclude_categories=["Cs"], exclude_characters=DELETE)
points = st.fixed_dictionaries(
    {"name": st.text(characters, max_size=12), "age": st.integers(-3, 120)},
    optional={"tags": st.lists(st.sampled_from(["red", "green", 7, None, "☃"]), max_size=3)},
).map(lambda value: {name: value[name] for name in POINT["properties"] if name in value})  # members come in the schema's order
trees = st.recursive(
    st.builds(lambda v: {"v": v, "kids": []}, st.booleans()),
    lambda kids: st.builds(lambda v, k: {"v": v, "kids": k}, st.booleans(), st.lists(kids, max_size=2)),
    max_leaves=6,
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(characters, max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(characters, max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=examples(25))
@given(st.one_of(st.tuples(st.just(POINT), points), st.tuples(st.just(TREE), trees)))
def test_every_valid_document_is_accepted_in_its_own_tokens(pair):
    schema, value = pair
    assert accepts(compiled("json_schema", json.dumps(schema)).start(), compact(value))


@settings(deadline=None, max_examples=examples(25))
@given(st.dictionaries(st.text(characters, max_size=4), values, max_size=3))
def test_every_json_object_is_accepted_in_its_own_tokens(value):
    assert accepts(compiled("json_object", "").start(), compact(value))


def compact(value: object) -> str:
    """As orjson writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


TOOL = f'start: "f(" value ")"\nvalue: %json {json.dumps(TREE)} // "tools[0]"\n'
LEAF = {"v": True, "kids": [{"v": False, "kids": []}, {"v": True, "kids": []}]}
FORMED: list[tuple[Kind, str, str]] = [
    ("json_schema", json.dumps(TREE), "{}"),
    ("json_object", "", "{}"),
    ("tools", TOOL, "f({})"),
]


@pytest.mark.parametrize(("kind", "text", "around"), FORMED, ids=[kind for kind, _, _ in FORMED])
def test_json_is_compact_unless_the_server_is_set_otherwise(kind, text, around):
    """A small model that may write white space writes nothing else, and its answer is cut."""
    before, after = around.split("{}")
    spec, own = GrammarSpec(kind, text), compact(LEAF)
    assert accepts(compiler().compile(spec).start(), before + own + after)
    marks = [place for place, sign in enumerate(own) if sign in "{}[]:,"]
    spaced = [own[:place] + white + own[place:] for place in marks for white in (" ", "\n", "\t", "\r")]
    spaced += [own.replace(":", ": "), own.replace(",", ", "), json.dumps(LEAF), json.dumps(LEAF, indent=1), own + " "]
    for other in spaced:
        assert not accepts(compiler().compile(spec).start(), before + other + after), other
    for other in (own, json.dumps(LEAF), json.dumps(LEAF, indent=1), json.dumps(LEAF, indent=2)):
        assert accepts(compiler_of("flexible").compile(spec).start(), before + other + after), other


@pytest.mark.parametrize(("kind", "text", "around"), FORMED, ids=[kind for kind, _, _ in FORMED])
def test_flexible_white_space_has_an_end(kind, text, around):
    before, after = around.split("{}")
    spec, own = GrammarSpec(kind, text), compact(LEAF)
    for place in [place for place, sign in enumerate(own) if sign in "{}[]:,"][1:-1]:
        longest = "\n" + " " * (MAX_WHITESPACE - 1)
        for white, fits in ((longest, True), (longest + " ", False), ("  ", False), ("\n\n", False), ("\r", False)):
            other = own[:place] + white + own[place:]
            assert accepts(compiler_of("flexible").compile(spec).start(), before + other + after) == fits, other


@settings(deadline=None, max_examples=examples(25))
@given(
    st.sampled_from(sorted(REGEXES)).flatmap(
        lambda name: st.tuples(st.just(name), st.from_regex(REGEXES[name], fullmatch=True))
    )
)
def test_every_text_of_a_regex_is_accepted_in_its_own_tokens(case):
    name, text = case
    assert accepts(compiled("regex", REGEXES[name]).start(), text)


@settings(deadline=None, max_examples=examples(8))
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), min_size=1, max_size=6))
def test_a_choice_accepts_its_strings_and_nothing_else(strings):
    grammar = compiler().compile(GrammarSpec("choice", json.dumps(strings)))
    assert all(accepts(grammar.start(), text) for text in strings)
    assert not accepts(grammar.start(), "a text that was not offered")


@pytest.mark.parametrize(
    ("kind", "text", "wrong"),
    [
        ("json_schema", json.dumps(POINT), '{"name": "x", "age": 121}'),
        ("json_schema", json.dumps(POINT), '{"name": "x"}'),
        ("json_schema", json.dumps(POINT), '{"name": "x", "age": 1, "other": 2}'),
        ("json_schema", json.dumps(TREE), '{"v": true, "kids": [1]}'),
        ("json_object", "", "[]"),
        ("json_object", "", '{"a": }'),
        ("regex", REGEXES["anchored"], "abcde"),
        ("choice", json.dumps(CHOICES), "nob"),
        ("grammar", SUM, "(1+2"),
    ],
)
def test_what_breaks_the_form_is_refused_or_has_no_end(kind, text, wrong):
    assert not accepts(compiled(kind, text).start(), wrong)


NUMBER = json.dumps({"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]})
TEXT = json.dumps({"type": "object", "properties": {"n": {"type": "string", "pattern": "^[0-9]{10,40}$"}}, "required": ["n"]})
CALL = f'start: TEXT "<call>" a\nTEXT: /[^<]*/\na: %json {NUMBER} // "tools[0].function.parameters"\n'


@pytest.mark.parametrize(
    ("kind", "spec", "begin", "longest"),
    [
        ("json_schema", '{"type": "integer"}', "3", 20),
        ("json_schema", '{"type": "integer", "minimum": 5}', "7", 20),
        ("json_schema", NUMBER, '{"n":3', 20),
        ("json_schema", NUMBER, '{"n":-3.5', 20),
        ("json_schema", NUMBER, '{"n":1.5e-1', 20),
        ("json_object", "", '{"a":[{"b":1', 20),
        ("json_object", "", '{"a":"1', 99),
        ("json_schema", TEXT, '{"n":"1', 40),
        ("tools", CALL, "id 1", 99),
        ("tools", CALL, '<call>{"n":1', 20),
        ("regex", "[0-9]*", "1", 99),
    ],
)
def test_numbers_of_json_have_at_most_twenty_digits_in_a_row(kind, spec, begin, longest):
    """Whatever the model likes best; digits of texts, and of other grammars, are no numbers."""
    grammar, text = compiled(kind, spec).start(), begin
    for token in tokens_of(begin):
        grammar.advance(token)
    while len(text) < len(begin) + 110:
        digits = [token for token in tokens_of("00") + tokens_of("0") if grammar.mask()[token]]
        if not digits:
            break
        assert grammar.allows(digits[0])
        grammar.advance(digits[0])
        text += shipped().decode(digits[:1])
    run = len(re.search("[0-9]*$", text)[0])
    assert run == longest if longest < 99 else run > 99
    assert grammar.mask().any()


@pytest.mark.parametrize("token", [tokens_of("z")[0], 10**6])
def test_a_matcher_that_failed_says_so_for_ever_and_alone(token):
    failed, neighbour = compiled("regex", "ab").start(), compiled("regex", "ab").start()
    with pytest.raises(GrammarFailed, match="structured output"):
        failed.advance(token)
    with pytest.raises(GrammarFailed):
        failed.mask()
    assert not failed.is_finished and issubclass(GrammarFailed, EngineFailed)
    assert accepts(neighbour, "ab")


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("json_schema", "[]", "JSON object"),
        ("json_schema", '{"type": "objec"}', "objec"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"$ref": "#/nope"}', "/nope"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum"),
        ("json_schema", '{"type": "string", "pattern": "a("}', "character 2"),
        ("json_schema", '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}', "no text matches"),
        ("json_object", "{}", "no text"),
        ("regex", "ab(c", "character 3: unclosed group"),
        ("regex", "a(?=b)", "look-around"),
        ("regex", "[a&&b]", "no text matches"),
        ("regex", "a\ud800", "character 1"),
        ("regex", "a" * (MAX_TEXT_BYTES + 1), "65536 bytes"),
        ("choice", "[]", "1 to 1000"),
        ("choice", json.dumps(["a"] * 1001), "1 to 1000"),
        ("choice", '["a", 3]', r"choice\[1\]"),
        ("choice", r'["\ud800"]', "surrogate"),
        ("grammar", 'start: a b\na: "x"\n', r"1\("),
        ("grammar", "start: x\nx: x\n", "no text matches"),
        ("grammar", 'start: <|endoftext|> "a"', "special token"),
    ],
)
def test_a_bad_spec_is_a_sentence_that_names_its_field(kind, text, says):
    with pytest.raises(InvalidRequest, match=says) as caught:
        compiler().compile(GrammarSpec(kind, text))
    assert caught.value.field == kind and str(caught.value).startswith(kind)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def chain(length, wrap):
    links = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return json.dumps({"$defs": {**links, f"d{length}": {"type": "integer"}}, "$ref": "#/$defs/d0"})


BOMBS = {
    "nested repetition": ("regex", "((((a{1,100}){1,100}){1,100}){1,100})"),
    "parentheses": ("regex", "(" * 30_000 + "a" + ")" * 30_000),
    "deep schema": ("json_schema", '{"type":"array","items":' * 2000 + '{"type":"integer"}' + "}" * 2000),
    "chained references": ("json_schema", chain(1000, lambda link: {"type": "array", "items": link})),
    "least common multiple": ("json_schema", '{"type": "integer", "multipleOf": 100000007}'),
    "product of alternatives": (
        "json_schema",
        json.dumps(
            {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"type": "null"}}} for j in range(4)]} for i in range(12)]}
        ),
    ),
    "terminal doubling": ("grammar", "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(40)) + 'R40: "a"\n'),
    "repeated repetition": ("grammar", 'start: s{1,100000}\ns: t{1,100000}\nt: "a"{1,100000}\n'),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_within_two_seconds(name):
    """Of processor time, of this thread and its children: the clock on the wall also counts the neighbours' work."""

    def spent():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.thread_time() + usage.ru_utime + usage.ru_stime

    before = spent()
    with pytest.raises(InvalidRequest, match=BOMBS[name][0]):
        compiler().compile(GrammarSpec(*BOMBS[name]))
    assert spent() - before < 2


def cached(made):
    """Grammars in the cache of a compiler, and about how many bytes they hold."""
    return len(made._compiled), made._compiled.size_bytes


def test_the_cache_hits_and_stays_within_its_bounds():
    tokenizer = shipped()
    small = GrammarCompiler(tokenizer, tokenizer.size, (END,), max_entries=3)
    kept = [small.compile(GrammarSpec("choice", json.dumps([str(i)]))) for i in range(4)]
    assert small.compile(GrammarSpec("choice", '["3"]')) is kept[3]
    assert cached(small) == (3, sum(grammar.size_bytes for grammar in kept[1:]))
    assert small.compile(GrammarSpec("choice", '["0"]')) is not kept[0] and cached(small)[0] == 3
    tight = GrammarCompiler(tokenizer, tokenizer.size, (END,), max_bytes=1)
    assert accepts(tight.compile(GrammarSpec("choice", '["a"]')).start(), "a") and cached(tight) == (0, 0)


def test_a_model_without_an_end_token_is_refused():
    tokenizer = shipped()
    with pytest.raises(NotSupported, match="end token"):
        GrammarCompiler(tokenizer, tokenizer.size, ()).compile(GrammarSpec("json_object", ""))


def test_masks_that_are_worked_out_side_by_side_are_those_of_each_alone():
    dice = random.Random(2)
    specs = [("regex", "[a-c]{2,30}"), ("json_object", ""), ("choice", '["yes", "no", "never"]'), ("regex", "(ab|ba){3,9}")]
    together = [compiled(*spec).start() for spec in specs]
    alone = [each.copy() for each in together]
    for _ in range(25):
        compute_masks(together)
        for ours, theirs in zip(together, alone, strict=True):
            if theirs.is_finished:
                continue
            allowed = theirs.mask()
            assert np.array_equal(ours.mask(), allowed)
            token = dice.choice(np.flatnonzero(allowed).tolist())
            if token == END:
                continue
            ours.advance(token)
            theirs.advance(token)


@pytest.mark.parametrize("name", CASES)
def test_a_token_may_follow_exactly_if_the_grammar_goes_on_after_it(name):
    """All of the mask may; and what may, beside the mask, leads on to an answer of the form as well."""
    kind, text, _ = CASES[name]
    grammar, dice = compiled(kind, text).start(), random.Random(8)
    for _ in range(30):
        if grammar.is_finished:
            break
        mask = grammar.mask()
        may = np.array([grammar.allows(token) for token in range(len(mask))])
        assert not (mask & ~may).any()
        for token in np.flatnonzero(may & ~mask)[:5].tolist():
            other = grammar.copy()
            other.advance(token)
            assert other.is_finished or other.mask().any()
        for token in np.flatnonzero(~may)[:: max(1, len(mask) // 20)].tolist():
            with pytest.raises(GrammarFailed):
                grammar.copy().advance(token)
        token = dice.choice(np.flatnonzero(may).tolist())
        if token == END:
            break
        grammar.advance(token)


LONG_FORM = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 4000} for name in "abc"},
    "required": list("abc"),
    "additionalProperties": False,
}


def follow(grammar: Grammar, tokens: list[int]) -> None:
    """Take tokens as an answer does whose every mask is worked out. GrammarFailed where the grammar cannot go on."""
    for token in tokens:
        assert grammar.mask()[token]
        grammar.advance(token)
    assert grammar.mask()[END]


def long_answer(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return tokens_of(compact({name: "".join(draw.choices("abcdefgh éß日", k=length)) for name in "abc"}))


def test_however_many_answers_follow_a_grammar_and_however_long_none_uses_up_what_the_next_one_needs():
    """Copies of a matcher share the states that the library counts: two of these answers alone have more than it allows."""
    grammar = compiler().compile(GrammarSpec("json_schema", json.dumps(LONG_FORM)))
    for length, seed in ((3900, 1), (3900, 2), (5, 3), (5, 4)):
        follow(grammar.start(), long_answer(length, seed))


def test_answers_that_use_up_each_others_states_in_the_middle_go_on_where_they_were():
    """Their masks and what may follow are those of an answer that has all states to itself."""
    spec, fresh = GrammarSpec("json_schema", json.dumps(LONG_FORM)), GrammarCompiler(shipped(), shipped().size, (END,))
    texts = [long_answer(1500, seed) for seed in range(4)]
    together = [compiler().compile(spec).start() for _ in texts]
    states = {id(each._states) for each in together}
    for at in range(min(map(len, texts))):
        compute_masks(together)
        for grammar, tokens in zip(together, texts, strict=True):
            assert grammar.allows(tokens[at])
            assert grammar.mask()[tokens[at]]
            grammar.advance(tokens[at])
    assert len(states) == 1 and states != {id(each._states) for each in together}
    for grammar, tokens in zip(together, texts, strict=True):
        alone = fresh.compile(spec).start()
        for token in tokens[: at + 1]:
            alone.advance(token)
        assert np.array_equal(grammar.mask()[: shipped().size], alone.mask())


def spend(grammar: Grammar) -> None:
    """Use up the states that an answer shares with the others of its grammar."""
    states = grammar._states
    for seed in range(20):
        other = states.start()
        for token in long_answer(3900, seed):
            other.compute_bitmask()
            if not other.consume_token(token):
                break
    assert states.used_up()
    states.uses += 10_000


def own_compiler() -> GrammarCompiler:
    return GrammarCompiler(shipped(), shipped().size, (END,))


@pytest.mark.parametrize("worn", ["slow", "hungry"])
def test_a_grammar_that_cannot_be_renewed_in_a_step_fails_its_answer_and_is_new_for_the_next(worn, monkeypatch):
    """Because it takes long to compile, or because new states would not last."""
    maker, spec = own_compiler(), GrammarSpec("json_schema", json.dumps(LONG_FORM))
    compiled = maker.compile(spec)
    grammar, other = compiled.start(), compiled.start()
    spend(grammar)
    if worn == "slow":
        compiled.seconds = 1.0
    else:
        grammar._states.uses = 3
    for each in (grammar, other):
        assert not any(each.allows(token) for token in range(0, shipped().size, 7))
        with pytest.raises(GrammarFailed, match="too complex"):
            each.mask()
    assert maker.compile(spec) is compiled
    follow(compiled.start(), long_answer(5, 1))


@pytest.mark.parametrize(
    "spec", [GrammarSpec("regex", "ab(c"), GrammarSpec(*BOMBS["least common multiple"])], ids=["wrong", "slow"]
)
def test_a_spec_that_was_refused_is_refused_again_without_another_child_process(spec, monkeypatch):
    maker, children = own_compiler(), []
    monkeypatch.setattr(
        "attend.model.text.grammar._probe_source", lambda spec, white: children.append(spec) or probed(spec, white)
    )
    messages = []
    for _ in range(3):
        with pytest.raises(InvalidRequest) as caught:
            maker.compile(spec)
        assert caught.value.field == spec.kind
        messages.append(str(caught.value))
    assert len(set(messages)) == 1 == len(children)
