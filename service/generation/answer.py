"""One answer while it is generated: text, parts, token count and finish reason, from engine outputs."""

from dataclasses import dataclass, field

from attend.model.engine.request import FinishReason, Output, Request
from attend.model.errors import DeadlineExceeded, InvalidRequest, Unavailable
from attend.model.params import StopRules
from attend.service.chat.parser import AnswerParser
from attend.service.chat.parts import CallStart, Content, Part, join_deltas
from attend.service.generation.text import TextStream
from attend.service.records import ChatRules, Chunk, PromptPart


@dataclass(slots=True)
class Answer:
    """Answer `index` of a call, and the engine request that makes it."""

    index: int
    request: Request
    stops: StopRules
    text: TextStream
    eos_token_ids: tuple[int, ...]
    echo: str = ""
    """The prompt's text, where the answer is to begin with it."""
    parser: AnswerParser | None = None
    """What splits the text; None where it is text alone."""
    max_calls: int | None = None
    """Tool calls after which the answer ends, where it goes on to another one."""
    content_stop_ids: frozenset[int] = frozenset()
    """Stop tokens that end content alone: not reasoning, and no tool call. The engine does not know them."""
    num_tokens: int = field(init=False, default=0)
    num_reasoning_tokens: int = field(init=False, default=0)
    finish_reason: FinishReason | None = field(init=False, default=None)
    has_begun: bool = field(init=False, default=False)
    _num_dropped_calls: int = field(init=False, default=0)
    """Calls that the parser read after a stop string."""

    def resume(self) -> None:
        """Take in the tokens that the caller has already: their text was shown; what they held back is held back again."""
        for token in self.request.output:
            _, stop = self._push(token)
            if stop is not None or token in self.request.stop_token_ids:
                raise InvalidRequest("resume_token_ids holds an answer that has ended already", "resume_token_ids")
        self.num_tokens = len(self.request.output)

    def take(self, output: Output) -> Chunk:
        """The chunk that an output makes. A stop string ends the answer, whatever else the output holds."""
        shown: list[Part] = []
        for count, token in enumerate(output.token_ids if output.finish_reason is None else self._texts(output), start=1):
            parts, stop = self._push(token)
            shown += parts
            if stop is not None:
                return self._chunk(output, shown, count, FinishReason.STOP, stop)
            if self._has_enough:
                return self._chunk(output, shown, count, FinishReason.STOP, None)
        if output.finish_reason is None:
            return self._chunk(output, shown, len(output.token_ids), None, None)
        parts, hit = self._end(output.finish_reason)
        reason = output.finish_reason if hit is None else FinishReason.STOP
        return self._chunk(
            output, shown + parts, len(output.token_ids), reason, self._stop_token(output) if hit is None else hit
        )

    def _push(self, token: int) -> tuple[list[Part], str | int | None]:
        """The parts that a token settles, and the stop string or stop token that ends the answer with it.

        The token is one of reasoning where that goes on before it, or after it.
        """
        if self.parser is None:
            piece, hit = self.text.show(self.text.decode(token))
            return ([Content(piece)] if piece else []), hit
        may_stop = token in self.content_stop_ids and self.text.num_tokens >= self.stops.min_tokens
        stops, before = may_stop and self.parser.in_content, self.parser.in_reasoning
        parts, hit = list[Part](), None
        if not stops or self.stops.include_stop_str_in_output:
            parts, hit = self._show(self.parser.feed(self.text.decode(token)))
        self.num_reasoning_tokens += before or self.parser.in_reasoning
        if not stops or hit is not None:
            return parts, hit
        rest, hit = self._end(FinishReason.STOP)
        return parts + rest, token if hit is None else hit

    def _end(self, reason: FinishReason) -> tuple[list[Part], str | None]:
        """The parts that the end of the answer releases, and the stop string in them."""
        piece = self.text.decode(None)
        if self.parser is None:
            piece, hit = self.text.show(piece, last=True)
            return ([Content(piece)] if piece else []), hit
        return self._show([*self.parser.feed(piece), *self.parser.finish(complete=reason is FinishReason.STOP)], last=True)

    def _show(self, parts: list[Part], *, last: bool = False) -> tuple[list[Part], str | None]:
        """What can be shown of these parts, and the stop string that ended the answer in their content."""
        if not self.stops.stop:
            return parts, None
        shown: list[Part] = []
        for place, part in enumerate(parts):
            is_content = isinstance(part, Content)
            piece, hit = self.text.show(part.text if isinstance(part, Content) else "", last=not is_content)
            shown += [Content(piece)] if piece else []
            if hit is not None:
                self._num_dropped_calls = sum(isinstance(other, CallStart) for other in parts[place:])
                return shown, hit
            shown += [] if is_content else [part]
        held = self.text.show("", last=True)[0] if last else ""
        return ([*shown, Content(held)] if held else shown), None

    @property
    def _has_enough(self) -> bool:
        return self.parser is not None and self.max_calls is not None and self.parser.num_calls > self.max_calls

    @property
    def _has_calls(self) -> bool:
        """True if there are calls, and all that are shown are whole."""
        if self.parser is None:
            return False
        shown = self.parser.num_calls - self._num_dropped_calls
        return self.parser.num_whole >= min(shown, self.max_calls or shown) > 0

    def _texts(self, output: Output) -> tuple[int, ...]:
        """The tokens of a last output that are text. A stop token counts and has an id, but shows no text."""
        hidden = self._stopped_by_token(output) and not self.stops.include_stop_str_in_output
        return output.token_ids[:-1] if hidden else output.token_ids

    def _stopped_by_token(self, output: Output) -> bool:
        """A grammar stops after a token that is text, and a drain after none."""
        if output.finish_reason is not FinishReason.STOP or not output.token_ids:
            return False
        return output.token_ids[-1] in self.request.stop_token_ids

    def _stop_token(self, output: Output) -> int | None:
        by_token = self._stopped_by_token(output) and output.token_ids[-1] not in self.eos_token_ids
        return output.token_ids[-1] if by_token else None

    def _chunk(
        self, output: Output, parts: list[Part], count: int, reason: FinishReason | None, stop: str | int | None
    ) -> Chunk:
        """A chunk of the first `count` tokens of an output."""
        self.num_tokens += count
        self.finish_reason = reason
        request, prompt = self.request, None
        if not self.has_begun:
            cached = min(request.num_cached, len(request.prompt))  # of a resumed answer, tokens of it may be known too
            prompt = PromptPart(tuple(request.prompt), output.prompt_logprobs, self.echo, cached, output.hidden)
            self.has_begun = True
        parts = self._allowed_parts(parts)
        return Chunk(
            index=self.index,
            text="".join(part.text for part in parts if isinstance(part, Content)),
            token_ids=output.token_ids[:count],
            num_tokens=self.num_tokens,
            num_prompt_tokens=len(request.prompt),
            seed=request.seed,
            finish_reason=reason,
            stop=stop,
            logprobs=output.logprobs[:count],
            prompt=prompt,
            times=output.times,
            parts=self._untold_parts(parts),
            has_calls=self._has_calls,
            num_reasoning_tokens=self.num_reasoning_tokens,
        )

    def _allowed_parts(self, parts: list[Part]) -> list[Part]:
        """The parts before a call that is one too many."""
        if not self._has_enough:
            return parts
        extra = (at for at, part in enumerate(parts) if isinstance(part, CallStart) and part.index == self.max_calls)
        return parts[: next(extra, len(parts))]

    def _untold_parts(self, parts: list[Part]) -> tuple[Part, ...] | None:
        """The parts, where the text does not tell them."""
        if self.parser is None or (parts and all(isinstance(part, Content) for part in parts)):
            return None
        return tuple(join_deltas(parts))


CUT = (FinishReason.DEADLINE, FinishReason.ABORT)
"""Ends that come from outside, and may come anywhere."""


def check_begun(reason: FinishReason | None, token: str = "the first token") -> None:
    """Raise what a call is refused with that is cut before it has any token that is new to its caller: no empty answer."""
    if reason is FinishReason.DEADLINE:
        raise DeadlineExceeded(f"the deadline passed before {token}")
    if reason is FinishReason.ABORT:
        raise Unavailable(f"the server shut down before {token}; try another replica")


def parser_of(chat: ChatRules, reasoning_open: bool, *, content_formed: bool) -> AnswerParser | None:
    """What splits an answer; None where there is nothing to split."""
    if chat.form.reasoning is None and not chat.form.has_channels and not chat.calling.tools:
        return None
    return AnswerParser(
        chat.form,
        chat.calling.tools,
        reasoning_open=reasoning_open,
        content_formed=content_formed,
        calls_formed=content_formed or chat.calling.is_enforced,
    )
