"""Merges the chunks of a call into whole answers."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from attend.model.engine.request import TokenLogprob
from attend.service.chat.parts import Part, join_deltas
from attend.service.records import Chunk


def merge_chunks(chunks: Iterable[Chunk]) -> list[Chunk]:
    """One chunk for each answer, with its pieces put together."""
    gathered = MergedAnswers()
    gathered.add(chunks)
    return gathered.answers()


class MergedAnswers:
    """The answers of a call, put together as their chunks arrive, so that little work is left at the end."""

    def __init__(self) -> None:
        self._answers: dict[int, _Pieces] = {}

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Take in chunks, in the order in which they were made."""
        for chunk in chunks:
            pieces = self._answers.get(chunk.index)
            if pieces is None:
                pieces = self._answers[chunk.index] = _Pieces(chunk, chunk)
            pieces.last = chunk
            pieces.texts.append(chunk.text)
            pieces.token_ids += chunk.token_ids
            pieces.logprobs += chunk.logprobs
            pieces.parts += chunk.parts or ()

    def answers(self) -> list[Chunk]:
        """One chunk for each answer, by index."""
        return [pieces.join() for _, pieces in sorted(self._answers.items())]


@dataclass(slots=True)
class _Pieces:
    """The chunks of one answer so far."""

    first: Chunk
    last: Chunk
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def join(self) -> Chunk:
        """The whole answer as one chunk."""
        text, token_ids, logprobs = "".join(self.texts), tuple(self.token_ids), tuple(self.logprobs)
        return replace(
            self.last,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt=self.first.prompt,
            parts=tuple(join_deltas(self.parts)) or None,
        )
