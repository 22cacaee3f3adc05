"""What passes between scheduler and runner: a step's work, and what came of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from model.engine.request import Request, TokenLogprob


@dataclass(slots=True)  # freezing it would cost each running request a third of a microsecond a step
class Scheduled:
    """Tokens `start .. start + count - 1` of a request; the last step of a catch-up draws a new one."""

    request: Request
    start: int
    count: int
    draft: Sequence[int] = ()
    """A guess at the tokens that are drawn next: computed too, as if they stood there already."""
    follows: bool = False
    """Its one token is what the step before draws: submitted before that sample has reached the host."""

    @property
    def num_rows(self) -> int:
        """Tokens that the step computes for it."""
        return self.count + len(self.draft)

    @property
    def completes(self) -> bool:
        """Whether the counters meet after this step."""
        return self.follows or self.start + self.count == self.request.num_tokens

    @property
    def draws(self) -> bool:
        """Whether the next token is drawn after this step."""
        return self.completes and self.request.max_tokens > 0


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's work; empty when there is none."""

    scheduled: tuple[Scheduled, ...]
    num_streams: int = 0
    """Items, from the first on, that are the next token of a stream; the others are parts of prompts."""
    num_drafted: int = 0
    """Tokens of the streams' drafts."""

    @property
    def follows(self) -> bool:
        """Whether all its tokens are those that the step before draws."""
        return bool(self.scheduled) and self.scheduled[0].follows

    @property
    def is_over(self) -> bool:
        """Whether all its requests have ended, so that it was computed in vain."""
        return all(item.request.finish_reason is not None for item in self.scheduled)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return self.num_streams + self.num_prompt_tokens + self.num_drafted

    @property
    def num_prompt_tokens(self) -> int:
        """Those of them that are parts of prompts."""
        return sum(item.count for item in self.scheduled[self.num_streams :])


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step found, by request id: a drawn token, or what went wrong with that request alone."""

    tokens: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    logprobs: Mapping[str, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, Sequence[TokenLogprob]] = field(default_factory=dict)
    """Of the prompt tokens that this step has scored."""
    more: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Tokens drawn after that one, where the draft was right: as many as its right tokens."""
