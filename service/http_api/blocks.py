"""An answer as blocks (reasoning, texts, tool calls), as the APIs of responses and messages write it."""

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


@dataclass(slots=True)
class BlockWriter(Writer):
    """Writes an answer as blocks, each event under its name. An answer without any has an empty text."""

    is_named: ClassVar[bool] = True
    blocks: list[Block] = field(default_factory=list)
    last: Chunk | None = None
    """The last chunk that was taken in."""
    _open: Block | None = None
    _scores: list[TokenLogprob] = field(default_factory=list)
    """Of tokens whose text has not come: half a character, or what may begin a stop string or a call."""
    _num_reasoning: int = 0

    def take(self, chunk: Chunk) -> Iterator[Change]:
        """Take in a chunk; what it changes. Scores stand with the text that comes with their tokens or after them."""
        self.last = chunk
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
            if not self.blocks:
                yield from self._begin("text")
            if self._scores and self._open is not None and self._open.kind == "text":
                yield self._grow("")
            yield from self._end()

    def _begin(self, kind: Kind, name: str = "", call: int = 0) -> Iterator[Change]:
        yield from self._end()
        self._open = Block(kind, len(self.blocks), name, call)
        self.blocks.append(self._open)
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
