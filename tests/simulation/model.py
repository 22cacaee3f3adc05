"""A model that can be computed by hand: a few tokens, the next one a hash of the seed and of all tokens before it."""

import random
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch
from zlib import crc32

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from attend.model.engine.config import EngineConfig
from attend.model.engine.plan import StepInput, StepResult
from attend.model.engine.request import NO_SCORE, NO_TOKEN_LEFT, TokenLogprob
from attend.model.errors import DeviceFailed, OutOfMemory
from attend.model.sampling_plan import Draw, SamplingPlan
from attend.model.text import grammar
from attend.model.text.grammar import GrammarCompiler, GrammarSpec
from attend.model.text.mask import CompiledGrammar
from attend.model.text.tokenizer import BYTE_LETTERS, Tokenizer
from attend.service.chat.forms import CALLS, REASONING, AnswerFormat
from tests.model.engine.machines import FakeRunner, Tables
from tests.model.engine.windows import GroupsRunner

WORDS = [b'{"name": "f", "arguments": ', b"ab", b"\xc3", b"\xa9", *(bytes([byte]) for byte in b'abcd xy\n{}":,namergutsf')]
WORDS = list(dict.fromkeys(WORDS))
SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|end|>")
VOCAB = len(WORDS) + len(SPECIAL)
END = VOCAB - 1
LETTERS = "abcd xy"
"""What prompts are made of: each letter is one token."""
FORM = AnswerFormat(CALLS["hermes"], REASONING["think"])
SPECS = (
    GrammarSpec("regex", "[ab]{2,6}"),
    GrammarSpec("choice", '["abba", "a x", "dcdc"]'),
    GrammarSpec("json_schema", '{"type": "object", "properties": {}, "additionalProperties": false}'),
)
"""Forms of answers, compiled once in a process: compiling takes longer than a life."""
WIDTH = 3
LONGEST_STEP = 0.4
"""Seconds."""


@cache
def tokenizer() -> Tokenizer:
    """The words, byte-level, and the special tokens after them."""
    letters = {byte: letter for letter, byte in BYTE_LETTERS.items()}
    raw = RawTokenizer(models.BPE({"".join(letters[byte] for byte in word): at for at, word in enumerate(WORDS)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(SPECIAL))
    return Tokenizer(raw)


@cache
def compiler() -> GrammarCompiler:
    """One for all lives."""
    return GrammarCompiler(tokenizer(), VOCAB, (END,))


def compiled(spec: GrammarSpec) -> CompiledGrammar:
    """A grammar, without the child process that tries a stranger's first."""
    with patch.object(grammar, "_probe_source", lambda spec, _: grammar._source(spec.kind, spec.text)):
        return compiler().compile(spec)


def best_token(plan: SamplingPlan, context: Sequence[int], banned: Collection[int] = (), adapter: str = "") -> int | None:
    """The token after `context` with an adapter: a hash, moved on past banned ones; None where all are.

    Under every third seed only the last token and a slow count matter, so that the answer soon repeats itself, for a while.
    """
    seen = (context[-1] % 8, len(context) // 20) if plan.seed % 3 == 2 else context
    first = crc32(bytes(seen), crc32(f"{plan.seed} {plan.answer_index} {adapter}".encode()))
    allowed = plan.decoding.allowed_token_ids
    for step in range(VOCAB):
        token = (first + step) % VOCAB
        if token not in banned and (not allowed or token in allowed):
            return token
    return None


def score(token: int, before: int) -> float:
    """The log probability that the model gives a token after another one."""
    return -(1 + (token * 7 + before) % 5) / 4


def scored(token: int, before: int, top: int) -> TokenLogprob:
    """What the engine says of a token where alternatives are asked for."""
    return TokenLogprob(token, score(token, before), tuple((other, score(other, before)) for other in range(top)))


def hidden(token: int, position: int) -> list[float]:
    """The hidden state of a token."""
    return [1.0 + token, float(position), -1.0]


@dataclass
class Machine:
    """What goes wrong in steps. A poisonous request is named by its seed and answer, with a position: there it has no score
    (`rows`), or all of the step fails (`steps`)."""

    rows: dict[tuple[int, int], int]
    steps: dict[tuple[int, int], int]
    step_fails: bool = False
    """The next step fails as a whole."""
    device_fails: bool = False
    """The next step, and all after it."""
    most_tokens: int = 1 << 30
    """Of a step for which the memory suffices."""
    dice: random.Random = field(default_factory=random.Random)
    per_token: float = 0.001
    """Seconds of a token of a prompt; `per_stream` and `fixed` are those of a stream, and of a step for itself."""
    per_stream: float = 0.001
    fixed: float = 0.002
    since: int = 0
    """Steps since a slow one."""

    def alone(self, streams: int) -> float:
        """Seconds of a step without prompts."""
        return self.fixed + self.per_stream * streams

    def seconds(self, step: StepInput) -> float:
        """What a step takes: about what it costs, or LONGEST_STEP. Slow steps are accidents: never two of five."""
        streams = sum(
            count - len(step.drafts.get(name, ())) == 1 for name, count in zip(step.request_ids, step.counts, strict=True)
        )
        self.since = 0 if self.since > 3 and self.dice.random() < 0.1 else self.since + 1
        clean = self.alone(streams) + self.per_token * (step.num_tokens - streams)
        return clean * self.dice.uniform(0.95, 1.1) if self.since else LONGEST_STEP


class SlotRunner(GroupsRunner):
    """Keeps what each group of layers has of a token in its slot, and reads every context back from the slots."""

    def __init__(self, config: EngineConfig, machine: Machine) -> None:
        super().__init__(config)
        self.machine = machine
        self.least = min(config.max_batch_tokens, max(config.chunk_size, config.max_batch_requests))
        """Tokens for which the memory always suffices."""
        self.is_plain = len(config.groups) == 1 and config.groups[0].window is None
        self.failed: set[str] = set()
        """Requests that were in a step that failed."""

    def submit(self, step: StepInput) -> "Pending":
        """A step that is over already, but for what its grammars refuse."""
        machine, steps = self.machine, self.machine.steps
        if machine.device_fails:
            raise DeviceFailed("the device is gone")
        poisonous = any(draw.position >= steps.get((draw.plan.seed, draw.plan.answer_index), 1 << 30) for draw in step.draws)
        if machine.step_fails or poisonous:
            machine.step_fails = False
            self.failed |= set(step.request_ids)
            raise RuntimeError("the step failed")
        if step.num_tokens - sum(map(len, step.drafts.values())) > max(machine.most_tokens, self.least):
            self.failed |= set(step.request_ids) if self.groups[-1].has_state else set()  # such a step is not repeated
            raise OutOfMemory("no memory for the step")
        rows = list(zip(step.request_ids, zip(*step.tables, strict=True), step.starts, step.counts, strict=True))
        self.states_before = dict(self.states)
        tokens = list(step.tokens)
        for name, at in step.pending.items():
            tokens[at] = self.drawn.get(name, 0)
        places = {}
        at = 0
        parts = []
        for name, tables, start, count in rows:
            parts.append((start, tables, tokens[at : at + count], count - len(step.drafts.get(name, ()))))
            places[name] = tables
            at += count
        for start, tables, some, kept in sorted(parts, key=lambda part: part[0]):  # who shares what is filled comes after it
            self.write(tables, start, some, kept)
        return Pending(self, step, places, tokens)

    def write(self, tables: Tables, start: int, tokens: list[int], kept: int) -> None:
        """See `FakeRunner`: the groups cost time."""
        (FakeRunner if self.is_plain else GroupsRunner).write(self, tables, start, tokens, kept)

    def read(self, tables: Tables, end: int, early: bool) -> list[int]:
        """See `FakeRunner`. A context that some group does not have ends with a token that is none."""
        if self.is_plain:
            return FakeRunner.read(self, tables, end, early=True)  # who shares what a step did not fill begins again
        tokens = GroupsRunner.read(self, tables, end, early)
        return tokens if tokens[-1] >= 0 else [*tokens[:-1], 255]


class Pending:
    """A step under way."""

    def __init__(self, runner: SlotRunner, step: StepInput, tables: dict[str, Tables], given: list[int]) -> None:
        self.runner, self.step, self.tables, self.given = runner, step, tables, given
        self.contexts: list[list[int]] = []
        first: dict[str, int] = {}
        for name, draw in zip(step.draw_ids, step.draws, strict=True):
            first.setdefault(name, draw.position)
            self.contexts.append(runner.read(tables[name], draw.position, step.early))
        self.drawn = [self._draw(row, draw) for row, draw in enumerate(step.draws)]
        runner.drawn = {name: self.drawn[row] for row, name in reversed(list(enumerate(step.draw_ids)))}

    def _draw(self, row: int, draw: Draw, refused: Collection[int] = ()) -> int:
        """The token of a row; -1 where its scores are not finite, -2 where none is left."""
        if draw.position >= self.runner.machine.rows.get((draw.plan.seed, draw.plan.answer_index), 1 << 30):
            return -1
        adapter = self.step.adapters.get(self.step.draw_ids[row], "")
        masked = () if draw.mask is None else [token for token in range(VOCAB) if not draw.mask[token]]
        token = best_token(draw.plan, self.contexts[row], {*draw.banned_tokens, *refused, *masked}, adapter)
        return -2 if token is None else token

    def tokens(self) -> list[int]:
        return self.drawn

    def redraw(self, draws: dict[int, Draw], banned_tokens: dict[int, Sequence[int]]) -> list[int]:
        for row, draw in draws.items():
            self.drawn[row] = self._draw(row, draw, banned_tokens.get(row, ()))
        return [self.drawn[row] for row in draws]

    def result(self) -> StepResult:
        step, rows = self.step, {}
        for row, name in enumerate(step.draw_ids):
            rows.setdefault(name, []).append(row)
        errors = {
            name: NO_SCORE if self.drawn[own[0]] == -1 else NO_TOKEN_LEFT
            for name, own in rows.items()
            if self.drawn[own[0]] < 0
        }
        good = {name: own for name, own in rows.items() if name not in errors}
        return StepResult(
            tokens={name: self.drawn[own[0]] for name, own in good.items()},
            errors=errors,
            logprobs={
                name: scored(self.drawn[own[0]], self.contexts[own[0]][-1], step.draws[own[0]].plan.logprobs)
                for name, own in good.items()
                if step.draws[own[0]].plan.logprobs is not None
            },
            more={name: self._followers(own, step.drafts.get(name, ())) for name, own in good.items()},
            prompt_logprobs={
                each.request_id: [scored(token, self.given[each.row + at], each.top) for at, token in enumerate(each.tokens)]
                for each in step.prompt_scores
            },
            hidden_sums={each.request_id: self._summed(each) for each in step.hidden_sums},
        )

    def _followers(self, rows: list[int], draft: Sequence[int]) -> list[int]:
        """The tokens after right guesses."""
        right = 0
        while right < len(draft) and self.drawn[rows[right]] == draft[right]:
            right += 1
        return [self.drawn[row] for row in rows[1 : right + 1] if min(self.drawn[rows[1] : row + 1]) >= 0]

    def _summed(self, each: Any) -> "array[float]":
        starts = dict(zip(self.step.request_ids, zip(self._firsts(), self.step.starts, strict=True), strict=True))
        first, start = starts[each.request_id]
        total = list(each.before) or [0.0] * WIDTH
        for row in range(each.row, each.row + each.num_rows):
            total = [one + two for one, two in zip(total, hidden(self.given[row], start + row - first), strict=True)]
        return array("d", total)

    def _firsts(self) -> Iterable[int]:
        at = 0
        for count in self.step.counts:
            yield at
            at += count
