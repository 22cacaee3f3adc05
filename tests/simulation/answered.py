"""An answer as its caller sees it: each chunk is compared with what the answer must be."""

from itertools import pairwise
from typing import TYPE_CHECKING

from attend.model.engine.request import FinishReason
from attend.service.chat.parts import Content, Part, join_deltas
from attend.service.records import Chunk
from tests.simulation.model import scored
from tests.simulation.oracle import Text, shown

if TYPE_CHECKING:
    from tests.simulation.callers import Caller

CLOSE = 1e-6
"""Seconds that an alarm may come early."""
NEVER = 1 << 60
"""A round of the step thread that does not come."""


class Answered:
    """One answer as its caller sees it."""

    def __init__(self, caller: "Caller", index: int, seed: int) -> None:
        self.caller, self.index, self.seed = caller, index, seed
        self.expected = caller.expected(index, seed)
        self.resumed = len(caller.call.command.resume_token_ids)
        self.truth = Text(caller.call.command, self.expected.prompt)
        self.tokens: list[int] = []
        self.text = ""
        self.parts: list[Part] = []
        self.reason: FinishReason | None = None
        self.last_round = NEVER
        """The round of the step thread in which its caller got the last chunk."""
        for token in self.expected.tokens[: self.resumed]:
            self.truth.push(token)
        self.hidden = len(shown(self.truth.text, caller.call.command.stops.stop))
        """Characters that an earlier call has shown."""

    def take(self, chunk: Chunk) -> None:
        """A piece of it."""
        command, mine = self.caller.call.command, self.expected
        assert self.reason is None, "a chunk after the end"
        assert (chunk.prompt is None) == hasattr(self, "begun"), "the prompt comes with the first chunk, and with no other"
        self.begun = True
        before = self.resumed + len(self.tokens)
        self.tokens += chunk.token_ids
        upto = self.resumed + len(self.tokens)
        given = mine.tokens[before:upto]
        assert list(chunk.token_ids) == given, f"got {chunk.token_ids}, alone {given}"
        assert chunk.num_tokens == upto and chunk.num_prompt_tokens == len(mine.prompt), "wrong counts"
        assert chunk.seed == self.seed, "another seed"
        scores = mine.logprobs[before - self.resumed : upto - self.resumed]
        assert list(chunk.logprobs) == scores, "wrong log probabilities"
        self.check_prompt(chunk)
        ends = chunk.finish_reason
        last = ends in (FinishReason.STOP, FinishReason.LENGTH)
        complete = mine.reason is not None and upto == len(mine.tokens)
        assert last == complete or ends in (FinishReason.DEADLINE, FinishReason.ABORT), f"{ends}, alone {mine}"
        self.text += chunk.text
        self.parts += (Content(chunk.text),) if chunk.parts is None and chunk.text else chunk.parts or ()
        for token in () if last else given:
            self.truth.push(token)
        if ends is None:
            assert command.chat is not None or self.text == shown(self.truth.text, command.stops.stop)[self.hidden :], (
                "wrong text"
            )
        else:
            self.end(chunk, ends)

    def check_prompt(self, chunk: Chunk) -> None:
        """What comes with the first chunk."""
        if chunk.prompt is None:
            return
        command, prompt = self.caller.call.command, self.expected.prompt
        assert list(chunk.prompt.token_ids) == prompt, "another prompt"
        top = command.prompt_logprobs
        scores = [] if top is None else [scored(token, before, top) for before, token in pairwise(prompt)]
        unstarted = chunk.finish_reason in (FinishReason.DEADLINE, FinishReason.ABORT) and not chunk.token_ids
        assert list(chunk.prompt.logprobs) == scores or unstarted, "wrong log probabilities of the prompt"
        assert chunk.prompt.num_cached <= len(prompt) - (not self.resumed), "more is found of a prompt than it has to be found"

    def end(self, chunk: Chunk, reason: FinishReason) -> None:
        """Its last piece."""
        self.reason, self.last_round = reason, self.caller.life.round
        life, command, mine = self.caller.life, self.caller.call.command, self.expected
        times = chunk.times
        assert times is not None and min(times.queue, times.prefill, times.decode) >= 0, "wrong times"
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (reason, chunk.stop) == (mine.reason, mine.stop), f"ended by {reason} {chunk.stop!r}, alone {mine}"
            text, parts = mine.text, mine.parts
        else:
            assert reason is not FinishReason.ERROR and chunk.stop is None
            assert reason is not FinishReason.DEADLINE or life.now >= self.caller.deadline - CLOSE, "ended before its deadline"
            assert reason is not FinishReason.ABORT or life.closing, "ended although nobody wanted that"
            self.truth.end(complete=False)
            text, parts = self.truth.text, self.truth.parts
        if command.chat is None:
            assert self.text == text[self.hidden :], f"said {self.text!r}, alone {text[self.hidden :]!r}"
            return
        parts = join_deltas(parts)
        assert join_deltas(self.parts) == parts, f"said {join_deltas(self.parts)}, alone {parts}"
        assert self.text == "".join(part.text for part in parts if isinstance(part, Content)), "content that is none"
