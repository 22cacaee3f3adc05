"""An answer as blocks: reasoning, texts and tool calls. Each begins, grows and ends.

The APIs of responses and messages write an answer so; a chat writes deltas of one message.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

from attend.model.engine.request import TokenLogprob
from attend.service.chat.parts import CallArguments, CallStart, Content, Part, Reasoning
from attend.service.http_api.sse import Writer
from attend.service.records import Chunk

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """A block of an answer: text, reasoning, or a call of a tool."""

    kind: Kind
    index: int
    """Place of the block in the answer, from 0."""
    name: str = ""
    """Name of the tool that is called."""
    call: int = 0
    """Of a call: how many came before it."""
    pieces: list[str] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)
    """Of a text's tokens, where they are asked for."""

    @property
    def text(self) -> str:
        """All that it has so far: a text, or the arguments of a call as JSON."""
        return "".join(self.pieces)


class Change(NamedTuple):
    """A block starts, grows by `delta`, or ends: whole, or where the answer was cut."""

    kind: Literal["start", "grow", "end"]
    block: Block
    delta: str = ""
    scores: tuple[TokenLogprob, ...] = ()
    """Of the delta's tokens, where they are asked for."""


class Blocks:
    """The blocks of one answer. An answer without any has an empty text."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._scores: list[TokenLogprob] = []
        """Of tokens whose text has not come: half a character, or what may begin a stop string or a call."""
        self._num_reasoning = 0

    def of(self, chunk: Chunk) -> Iterator[Change]:
        """What a chunk adds; with its last one, an answer's last block ends.

        Scores stand with the first text that comes with their tokens or after them, and not with reasoning or calls. Those that
        are left at the end stand with the last text.
        """
        new, self._num_reasoning = chunk.num_reasoning_tokens - self._num_reasoning, chunk.num_reasoning_tokens
        self._scores += chunk.logprobs[new:]
        parts: tuple[Part, ...] = chunk.parts if chunk.parts is not None else ((Content(chunk.text),) if chunk.text else ())
        for part in parts:
            if isinstance(part, CallStart):
                yield from self._begin("call", part.name, part.index)
                continue
            kind: Kind = "call" if isinstance(part, CallArguments) else "reasoning" if isinstance(part, Reasoning) else "text"
            if self._open is None or self._open.kind != kind:
                yield from self._begin(kind)
            yield self._grow(part.text)
        if parts:
            self._scores = []
        if chunk.finish_reason is not None:
            if not self.all:
                yield from self._begin("text")
            if self._scores and self._open is not None and self._open.kind == "text":
                yield self._grow("")
            yield from self._end()

    def _begin(self, kind: Kind, name: str = "", call: int = 0) -> Iterator[Change]:
        yield from self._end()
        self._open = Block(kind, len(self.all), name, call)
        self.all.append(self._open)
        yield Change("start", self._open)

    def _grow(self, delta: str) -> Change:
        block, scores = self._open, list[TokenLogprob]()
        assert block is not None
        if block.kind == "text":
            scores, self._scores = self._scores, []
        block.pieces.append(delta)
        block.scores += scores
        return Change("grow", block, delta, tuple(scores))

    def _end(self) -> Iterator[Change]:
        if self._open is not None:
            ended, self._open = self._open, None
            yield Change("end", ended)


@dataclass(slots=True)
class BlockWriter(Writer):
    """Writes an answer as blocks, each event under its name."""

    is_named: ClassVar[bool] = True
    blocks: Blocks = field(default_factory=Blocks)
    last: Chunk | None = None
    """The last chunk that was taken in."""

    def take(self, chunk: Chunk) -> Iterator[Change]:
        """Take in a chunk; what it changes."""
        self.last = chunk
        return self.blocks.of(chunk)

    def gather(self) -> "BlockWriter":
        """Itself: a whole answer is what its stream ends with."""
        return self

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Take in chunks of an answer that is not streamed."""
        for chunk in chunks:
            for _ in self.take(chunk):
                pass

    def answers(self) -> list[Chunk]:
        """Empty: `full_response` takes the answers from the blocks."""
        return []
