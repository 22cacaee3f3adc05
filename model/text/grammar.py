"""Structured output (guided decoding) as a token bitmask: which tokens may come next so that the text keeps a form.

The engine knows only `Grammar`: `mask()`, `advance(token)`, `is_finished`. Behind it stands llguidance (Microsoft, MIT;
https://github.com/guidance-ai/llguidance): an Earley parser over lazily built derivative automata, walked along a trie of the
vocabulary's bytes, so that a mask costs microseconds and a character may span tokens.

A grammar is text from a stranger that a compiler runs on. Measured on llguidance 1.9.1: objects chained by `$ref` 1000 deep
overflow the stack, which kills the process; `multipleOf: 100000007` never ends; 400 patternProperties take 10 s. The library's
own limits see none of the three. So each new grammar is first compiled and walked in a child process with a small stack and a
limit on its processor time and memory (vLLM's CVE-2025-48942 and xgrammar's CVE-2026-25048 are what happens without). What the
child survives is compiled here too.
"""

import json
import random
import re
import resource
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from attend.model.errors import EngineFailed, InvalidRequest, NotSupported, Overloaded
from attend.model.params import describe, shorten
from attend.model.text.grammar_tokens import for_grammars
from attend.model.text.mask import SHOWN, CompiledGrammar, DigitRuns, GrammarFailed, Shape, error_line
from attend.model.text.schema import (
    MAX_PLACE,
    OR_SHOWN,
    Fault,
    Whitespace,
    faulty_rule,
    place_of,
    read_schema,
    reword,
    rewritten,
    rewritten_rules,
    rounding,
    schemas_in,
    source_of,
)

if TYPE_CHECKING:
    from attend.model.text.tokenizer import Tokenizer

Value = TypeVar("Value")
Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "tools"]

MAX_TEXT_BYTES = 64 << 10
MAX_CHOICES = 1000
MAX_CHOICE_CHARACTERS = 1000
MAX_CACHED_GRAMMARS = 128
MAX_CACHED_BYTES = 64 << 20
MAX_REFUSED_GRAMMARS = 1024
MAX_REFUSED_BYTES = 8 << 20
"""Specs that were refused are remembered with the reason: the next caller is told at once, without a child process."""

_PROBE_CPU_SECONDS = 1  # compiling a schema of 64 KB takes 0.04 s, and Python's start 0.1 s
_PROBE_WALL_SECONDS = 10.0  # the machine is too busy, whatever the grammar
_PROBE_MEMORY = 1 << 30
_PROBE_STACK = 1 << 20  # threads have 2 MiB at the least (glibc, unlimited stack): what fits into 1 MiB fits into them
_PROBE_STEPS = 64
_MAX_PROBES = 2  # at once
_PROBE_CODE = (
    "import os, sys; os.nice(10); sys.path.insert(0, sys.argv[1]); from attend.model.text.grammar import probe; probe()"
)
# A core that is free compiles as fast; one that streams need is mostly theirs.
_CAUSES: dict[int, str] = {
    signal.SIGXCPU: f"too complex: it takes over {_PROBE_CPU_SECONDS} s to compile",
    signal.SIGSEGV: "nested too deeply, or references chained too long",
    signal.SIGBUS: "nested too deeply, or references chained too long",
    signal.SIGABRT: "too complex: it takes too much memory to compile",
}
"""What it says of a grammar that a signal ended its compilation."""

_LISTING = re.compile(r"^at \d+\(\d+\): | \d+ \| .*")
"""What llguidance shows of a grammar, and where its fault is: of no use to a caller who did not write it."""
_SPECIAL = re.compile(r"<\[\d+\]>")
"""A special token by its id, `<[id]>`, in our grammars."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What the answer must look like. Hashable."""

    kind: Kind
    text: str
    """A JSON schema, a regular expression (Rust's syntax; it matches the whole answer), a JSON list of strings, a grammar
    (Lark as in llguidance's docs/syntax.md, or llama.cpp's GBNF), each at most 64 KiB; "" for json_object. "tools" is a grammar
    in Lark that the server wrote for calls of tools; it may name special tokens by their ids."""
    place: str = field(default="", compare=False)
    """What the caller calls it."""

    def __post_init__(self) -> None:
        name = self.place or self.kind
        if self.kind not in get_args(Kind):
            raise InvalidRequest(f"structured output must be one of {', '.join(get_args(Kind))}; got {self.kind!r:.64}")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"{name}: lone surrogate at character {error.start}", name) from error
        if size > MAX_TEXT_BYTES:
            raise InvalidRequest(f"{name} must be at most {MAX_TEXT_BYTES} bytes; got {size}", name)
        if self.kind == "json_object" and self.text:
            raise InvalidRequest("json_object takes no text", name)
        if self.kind != "json_object" and not self.text:
            raise InvalidRequest(f"{name} must not be empty", name)
        if self.kind == "choice":
            choices(self.text, name)


def choices(text: str, name: str = "choice") -> list[str]:
    """The strings of a choice, given as a JSON list. Errors call it `name`."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} must be a JSON list of strings: {str(error)[:SHOWN]}", name) from error
    if not isinstance(values, list) or not 1 <= len(values) <= MAX_CHOICES:
        got = f"{len(values)} of them" if isinstance(values, list) else describe(values)
        raise InvalidRequest(f"{name} must be a list of 1 to {MAX_CHOICES} strings; got {got}", name)
    for index, value in enumerate(values):
        if not isinstance(value, str) or not 1 <= len(value) <= MAX_CHOICE_CHARACTERS:
            raise InvalidRequest(f"{name}[{index}] must be a string of 1 to {MAX_CHOICE_CHARACTERS} characters", name)
        if re.search("[\ud800-\udfff]", value):
            raise InvalidRequest(f"{name}[{index}] holds a lone surrogate", name)
    return values


class _Recent(Generic[Value]):
    """What was made of the specs that were asked for last, up to so many of them, and about so many bytes. Not thread-safe."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._entries: OrderedDict[GrammarSpec, tuple[Value, int]] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, spec: GrammarSpec) -> Value | None:
        if spec not in self._entries:
            return None
        self._entries.move_to_end(spec)
        return self._entries[spec][0]

    def keep(self, spec: GrammarSpec, value: Value, size_bytes: int) -> None:
        _, replaced = self._entries.pop(spec, (None, 0))
        self._entries[spec] = (value, size_bytes)
        self.size_bytes += size_bytes - replaced
        while len(self) > self._max_entries or self.size_bytes > self._max_bytes:
            _, (_, dropped) = self._entries.popitem(last=False)
            self.size_bytes -= dropped


class GrammarCompiler:
    """Compiles specs for one tokenizer. Safe to call from several threads; never from the step thread:
    a new spec takes 0.1 to 0.3 s.

    `vocab_size` is the number of scores that the model gives; it may exceed the tokenizer's size. `whitespace` is that of JSON.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        *,
        whitespace: Whitespace = "compact",
        max_entries: int = MAX_CACHED_GRAMMARS,
        max_bytes: int = MAX_CACHED_BYTES,
    ) -> None:
        self._source = tokenizer
        self._size = min(tokenizer.size, vocab_size)
        self._vocab_size = vocab_size
        self._whitespace = whitespace
        self._ends = tuple(token for token in eos_token_ids if 0 <= token < self._size)
        self._compiled = _Recent[CompiledGrammar](max_entries, max_bytes)
        self._refused = _Recent[str](MAX_REFUSED_GRAMMARS, MAX_REFUSED_BYTES)
        self._lock = threading.Lock()
        self._probes = threading.BoundedSemaphore(_MAX_PROBES)
        self._vocabulary_lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._digits: DigitRuns | None = None

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """The grammar of `spec`, from the cache if it is there. InvalidRequest names the field and what is wrong with it."""
        found = self._find(spec)
        if found is None:
            vocabulary = self._load_vocabulary(spec.kind)
            with self._probes:
                found = self._find(spec) or self._make(spec, vocabulary)  # while this thread waited, another may have made it
        found.refresh()
        return found

    def _find(self, spec: GrammarSpec) -> CompiledGrammar | None:
        with self._lock:
            found, refused = self._compiled.get(spec), self._refused.get(spec)
        if refused is not None:
            raise InvalidRequest(refused, spec.kind)
        return found

    def _make(self, spec: GrammarSpec, vocabulary: llguidance.LLTokenizer) -> CompiledGrammar:
        """The grammar of a spec that is new, kept for the next caller; or why there is none."""
        try:
            made = self._compile(spec.kind, vocabulary, _probe_source(spec, self._whitespace))
        except InvalidRequest as error:
            with self._lock:
                self._refused.keep(spec, str(error), len(spec.text.encode()) + 4 * SHOWN)
            raise
        with self._lock:
            self._compiled.keep(spec, made, made.size_bytes)
        return made

    def _load_vocabulary(self, field: str) -> llguidance.LLTokenizer:
        """The library's form of the tokenizer, made on first use: 0.2 s for 49152 tokens."""
        if not self._ends:
            raise NotSupported(f"{field}: the served model has no end token that could end a structured answer", field)
        with self._vocabulary_lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = for_grammars(self._source, self._vocab_size, self._ends)
                    self._digits = DigitRuns(self._source.raw.get_vocab(with_added_tokens=True), self._vocab_size)
                except ValueError as error:
                    raise NotSupported(f"{field}: not possible with this model's kind of tokenizer: {error}", field) from error
            return self._vocabulary

    def _compile(self, field: str, vocabulary: llguidance.LLTokenizer, source: str) -> CompiledGrammar:
        def build() -> llguidance.LLMatcher:
            raw = llguidance.LLMatcher(vocabulary, source, log_level=0, limits=_limits())
            if raw.is_error():
                raise InvalidRequest(f"{field}: {error_line(raw)}", field)
            return raw

        shape = Shape(self._ends, self._size, self._vocab_size)
        digits = None if field in ("regex", "choice", "grammar") else self._digits
        compiled = CompiledGrammar(build, shape, (64 << 10) + 128 * len(source), digits)  # 7 MB for a schema of 64 KB
        try:
            compiled.start().mask()  # the states built for it are shared by all copies
        except GrammarFailed as error:
            raise InvalidRequest(f"{field}: {error}", field) from error
        return compiled


def _limits() -> llguidance.LLParserLimits:
    """What one step may cost. A hopelessly ambiguous grammar stops after about 10 ms, 80 ms at the worst seen."""
    return llguidance.LLParserLimits(
        max_items_in_row=1000,
        step_max_items=5000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        max_lexer_states=20_000,  # of all answers together, 0.3 to 2 kB each; States are renewed when they are used up
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def _source(kind: Kind, text: str, whitespace: Whitespace = "compact") -> str:
    """The spec in the library's own notation. ValueError says what is wrong, and where."""
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(text)
    if kind == "grammar":
        return llguidance.LLMatcher.grammar_from_lark(any_to_lark(text))
    if kind == "tools":
        return llguidance.LLMatcher.grammar_from_lark(rewritten_rules(text, _compile_schema, whitespace))
    if kind == "choice":  # one regex: a rule per string costs a row of items, and 10 ms for the first mask
        return llguidance.LLMatcher.grammar_from_regex("|".join(_escape(one) for one in choices(text)))
    schema = rewritten(read_schema(text), _compile_schema) if kind == "json_schema" else {"type": "object"}
    return source_of(schema, whitespace)


def _compile_schema(schema: Any) -> llguidance.LLMatcher:
    """A schema compiled over single bytes, to learn whether it compiles."""
    return llguidance.LLMatcher(_byte_tokens(), source_of(schema), log_level=0, limits=_limits())


def _fault(schema: Any) -> str:
    """Why a schema does not compile; empty: it does."""
    matcher = _compile_schema(schema)
    return error_line(matcher) if matcher.is_error() else ""


def _rounding(kind: Kind, text: str) -> str:
    """Why the numbers in a grammar's schemas cannot be enforced; empty: they can."""
    if kind == "json_schema":
        return rounding(read_schema(text))
    if kind == "tools":
        return rounding(faulty_rule(text, rounding)[1])
    return next(filter(None, map(rounding, schemas_in(text))), "") if kind == "grammar" else ""


def _error_text(kind: Kind, text: str, fault: Fault, said: str) -> str:
    """What is `said` of a grammar, or of the first of its schemas with a fault, and in which that is."""
    where, schema = "", dict[str, Any]()
    if kind == "json_schema":
        schema = rewritten(read_schema(text), _compile_schema)
    elif kind == "tools":
        where, schema = faulty_rule(rewritten_rules(text, _compile_schema), fault)
    place = ".".join(filter(None, (where, place_of(schema, fault))))
    words = reword(fault(schema) or said)
    told = f"{shorten(place, MAX_PLACE)}: {words}" if place else words
    return f"{told}; {OR_SHOWN}" if where.startswith("tools[") else told


def _escape(text: str) -> str:
    """A regex in Rust's syntax that matches `text` alone."""
    return "".join(one if one.isascii() and one.isalnum() else f"\\x{{{ord(one):x}}}" for one in text)


def _probe_source(spec: GrammarSpec, whitespace: Whitespace) -> str:
    """`_source` of a spec that a child process compiled and walked within its limits; InvalidRequest or Overloaded if not."""
    # -P: the folder that the server was started in is no place to import from.
    command = [sys.executable, "-P", "-c", _PROBE_CODE, str(Path(__file__).parents[3])]
    asked = json.dumps([spec.kind, spec.text, whitespace]).encode()
    try:
        child = subprocess.run(command, input=asked, capture_output=True, timeout=_PROBE_WALL_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise Overloaded(f"{spec.kind}: the server is too busy to compile it") from error
    if child.returncode > 0:  # our program failed, not the grammar
        raise EngineFailed(f"the probe of a {spec.kind} failed: {child.stderr.decode(errors='replace')[-SHOWN:]}")
    if child.returncode < 0:
        cause = _CAUSES.get(-child.returncode)
        if cause is None:  # killed from outside, as where the machine is short of memory
            raise Overloaded(f"{spec.kind}: the server could not finish compiling it")
        raise InvalidRequest(f"{spec.kind}: {cause}", spec.kind)
    fault, source = json.loads(child.stdout)
    if fault:
        raise InvalidRequest(f"{spec.kind}: {fault}", spec.kind)
    return str(source)


def probe() -> None:
    """The child process: read [kind, text, white space], write [fault or "", source]. A signal ends it if a limit does."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (_PROBE_CPU_SECONDS, _PROBE_CPU_SECONDS + 1))
    if sys.platform == "linux":  # macOS knows the name but not the limit
        resource.setrlimit(resource.RLIMIT_AS, (_PROBE_MEMORY, _PROBE_MEMORY))
    asked = json.load(sys.stdin)
    answer: list[str] = []
    threading.stack_size(_PROBE_STACK)
    worker = threading.Thread(target=lambda: answer.extend(_try(*asked)))
    worker.start()
    worker.join()
    json.dump(answer, sys.stdout)


def _try(kind: Kind, text: str, whitespace: Whitespace = "compact") -> tuple[str, str]:
    """[what is wrong or "", source]. What would stop an answer soon after its start is found here."""
    try:
        if said := _rounding(kind, text):
            return _error_text(kind, text, rounding, said), ""
        source = _source(kind, text, whitespace)
    except RecursionError:
        return "nested too deeply", ""
    except MemoryError:
        return _CAUSES[signal.SIGABRT], ""
    except Exception as error:  # the converters raise what they like
        return " ".join(str(error).split())[:SHOWN] or type(error).__name__, ""
    walked = _SPECIAL.sub(f"<[{_Bytes.other}]>", source) if kind == "tools" else source
    matcher = llguidance.LLMatcher(_byte_tokens(), walked, log_level=0, limits=_limits())
    if matcher.is_error():
        said = error_line(matcher)
        return _error_text(kind, text, _fault, said if kind == "grammar" else _LISTING.sub("", said)), ""
    draw = random.Random(0)
    for step in range(_PROBE_STEPS):
        if matcher.is_stopped():  # complete, or in error
            break
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token for token in (*range(256), _Bytes.other) if bits >> token & 1]
        if allowed:
            matcher.consume_token(draw.choice(allowed))
        elif not matcher.is_error() and not matcher.is_accepting():
            return f"no text matches it after {step} bytes", ""
    return (error_line(matcher), "") if matcher.is_error() else ("", source)


@cache
def _byte_tokens() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))


class _Bytes:
    """The least tokenizer that the library takes: one token a byte, and an end. One more stands for any special token."""

    eos_token_id = 256
    bos_token_id = None
    other = 257
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>", b"<other>")
    special_token_ids = (256, other)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)
