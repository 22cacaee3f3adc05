"""A step's work: as the scheduler plans it, as the runner gets it, and its result.

A `Plan` holds the scheduler's requests and stays with it. `StepInput` and `StepResult` cross to the runner and back, and hold
plain values alone.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from attend.model.engine.request import Request, TokenLogprob
from attend.model.pooling import Pooling
from attend.model.sampling_plan import Draw, History, SamplingPlan, TextCounts, completing


@dataclass(slots=True)  # freezing it would cost each running request a third of a microsecond a step
class ScheduledTokens:
    """Tokens `start .. start + count - 1` of a request; the last step of a catch-up draws a new one."""

    request: Request
    start: int
    count: int
    draft: Sequence[int] = ()
    """A guess at the tokens that are drawn next: computed too, as if they were already drawn."""
    input_pending: bool = False
    """Its one token is drawn by the previous step: this step was submitted before that token reached the host."""
    snapshot: int = 0
    """The slot in which its state is kept for others; 0: in none."""

    @property
    def num_rows(self) -> int:
        """Tokens that the step computes for it."""
        return self.count + len(self.draft)

    @property
    def completes(self) -> bool:
        """True if the counters meet after this step."""
        return self.input_pending or self.start + self.count == self.request.num_tokens

    @property
    def draws(self) -> bool:
        """True if the next token is drawn after this step."""
        return self.completes and self.request.max_tokens > 0


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's work; empty when there is none."""

    scheduled_tokens: tuple[ScheduledTokens, ...]
    num_streams: int = 0
    """Items, from the first on, that are the next token of a stream; the others are parts of prompts."""
    num_drafted: int = 0
    """Tokens of the streams' drafts."""
    early: bool = False
    """True if it was planned before the previous step had ended (async scheduling)."""

    @property
    def has_parts(self) -> bool:
        """True if it computes tokens that were known when it was planned, and not only those that the step before it draws."""
        return not all(item.input_pending for item in self.scheduled_tokens)

    @property
    def is_over(self) -> bool:
        """True if all its requests have ended, so that its result is not needed."""
        return all(item.request.finish_reason is not None for item in self.scheduled_tokens)

    @property
    def is_plain(self) -> bool:
        """True if it computes one token of each stream: no drafts, and none that was right once more."""
        return self.num_tokens == self.num_streams + self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(item.num_rows for item in self.scheduled_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the step that belong to prompts."""
        return sum(item.count for item in self.scheduled_tokens[self.num_streams :])


class PromptScores(NamedTuple):
    """Tokens of a prompt whose log probabilities are asked for."""

    request_id: str
    row: int
    """The place in T of the token before the first of them; the others follow."""
    tokens: Sequence[int]
    top: int
    """Alternatives to report with each."""


class HiddenSum(NamedTuple):
    """Hidden states of a request's tokens that are to be added to those of the tokens before, one after the other."""

    request_id: str
    row: int
    """The place in T of the first token; the others follow."""
    num_rows: int
    before: "array[float]"
    """[E], float64: the sum so far; empty for zero."""


@dataclass(slots=True)
class StepInput:
    """A step for the runner: R requests, those with one token first, and T tokens, in the order of their requests."""

    early: bool = False
    """True if it was submitted before the previous step had ended (async scheduling)."""
    pending: dict[str, int] = field(default_factory=dict)
    """By request id the place in T of its one token, where that is drawn by the step before: it has not reached the host."""
    request_ids: list[str] = field(default_factory=list)
    """[R]: id of each request; `starts` and `counts` stand in the same order."""
    tables: list[list["array[int]"]] = field(default_factory=list)
    """[G][R]: block tables, int64, of each group of layers. That of a state has the slot where the step reads it, and the one
    where it writes it if that is another one.
    """
    versions: list[int] = field(default_factory=list)
    """[R]: version of each request's tables, see `Request.version`; 0 where nothing is known of them."""
    starts: list[int] = field(default_factory=list)
    """[R]: position of each request's first token in this step."""
    counts: list[int] = field(default_factory=list)
    """[R]: how many tokens each request computes, draft tokens among them."""
    tokens: "array[int]" = field(default_factory=lambda: array("q"))
    """[T], int64; 0 where they are pending."""
    draws: list[Draw] = field(default_factory=list)
    """[N]: how each new token is drawn. A request with a draft draws once more after each of its tokens."""
    draw_rows: list[int] = field(default_factory=list)
    """[N]: the place in T of the token that it is drawn after."""
    draw_ids: list[str] = field(default_factory=list)
    """[N]: id of the request whose token is drawn."""
    drafts: dict[str, Sequence[int]] = field(default_factory=dict)
    """The last tokens of some requests, by request id: guesses at what is drawn after the tokens before them."""
    prompt_scores: list[PromptScores] = field(default_factory=list)
    hidden_sums: list[HiddenSum] = field(default_factory=list)
    adapters: dict[str, str] = field(default_factory=dict)
    """The digests of some requests' adapters, by request id; the others have none."""

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens in the step."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step, by request id: a drawn token, or the error of that request alone."""

    tokens: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    logprobs: Mapping[str, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, Sequence[TokenLogprob]] = field(default_factory=dict)
    """Log probabilities of the prompt tokens that this step has scored."""
    hidden_sums: Mapping[str, "array[float]"] = field(default_factory=dict)
    """[E], float64, with the hidden states that this step has added."""
    more: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Tokens drawn after that one, where the draft was right: as many as its right tokens."""
    put_off: Mapping[str, str] = field(default_factory=dict)
    """Requests that the step did not compute, with the reason. They start again from their first token."""


def step_input(plan: Plan) -> StepInput:
    """A plan for the runner.

    The block tables and the texts of penalties are the requests' own arrays: they hold until the step has been submitted.
    """
    step, items = StepInput(early=plan.early), plan.scheduled_tokens
    if not plan.is_plain or plan.num_streams < len(items):
        items = tuple(sorted(items, key=lambda item: item.num_rows != 1))
    step.tables = [list(tables) for tables in zip(*(item.request.tables for item in items), strict=True)]
    first = 0
    for item in items:
        request, count = item.request, item.num_rows
        step.request_ids.append(request.request_id)
        step.versions.append(request.version)
        step.starts.append(item.start)
        step.counts.append(count)
        if request.adapter is not None:
            step.adapters[request.request_id] = request.adapter.digest
        if item.input_pending:
            step.pending[request.request_id] = first
            step.tokens.append(0)
        else:
            step.tokens.extend(request.tokens(item.start, item.count))
        if item.draft:
            step.tokens.extend(item.draft)
            step.drafts[request.request_id] = item.draft
        if request.prompt_logprobs is not None:
            _add_prompt_scores(step, item, first, request.prompt_logprobs)
        if request.pooling is not None:
            _add_hidden_sum(step, item, first)
        if item.draws:
            _add_draws(step, item, first + item.count - 1)
        first += count
    return step


def _add_draws(step: StepInput, item: ScheduledTokens, row: int) -> None:
    """A draw after the last of its tokens, and one after each token of its draft."""
    request, plan = item.request, item.request.sampling_plan
    position = request.num_tokens + item.input_pending
    plain = plan.draws_from_scores and len(request.output) >= request.min_tokens
    step.draws.append(Draw(plan, position, plan.banned_tokens) if plain else _draw(request, plan, position))
    step.draw_rows.append(row)
    step.draw_ids.append(request.request_id)
    for place in range(1, len(item.draft) + 1):
        step.draws.append(Draw(plan, position + place, plan.banned_tokens))
        step.draw_rows.append(row + place)
        step.draw_ids.append(request.request_id)


def _draw(request: Request, plan: SamplingPlan, position: int) -> Draw:
    """How a request draws its next token where the tokens before it matter."""
    banned = plan.banned_tokens
    if len(request.output) < request.min_tokens:
        banned += tuple(request.stop_token_ids)
    if plan.has_bad_words:
        banned += completing(request.bad_words, request.output)
    text = _text(request) if plan.penalizes else None
    return Draw(plan, position, banned, text, awaits_mask=request.grammar is not None and not plan.can_sample_unmasked)


def _text(request: Request) -> TextCounts:
    """The token counts that its penalties use."""
    request.history = request.history or History()
    return request.history.follow(request.prompt, request.output)


def _add_prompt_scores(step: StepInput, item: ScheduledTokens, first: int, top: int) -> None:
    """The prompt's tokens that follow a token of this step, but those scored before a preemption."""
    request = item.request
    begin = max(item.start, len(request.prompt_scores)) + 1
    end = min(item.start + item.count + 1, len(request.prompt))
    if begin < end:
        row = first + begin - 1 - item.start
        step.prompt_scores.append(PromptScores(request.request_id, row, request.prompt[begin:end], top))


def _add_hidden_sum(step: StepInput, item: ScheduledTokens, first: int) -> None:
    """The tokens of this step that are pooled, but those summed before a preemption."""
    request = item.request
    begin = max(item.start, len(request.prompt) - 1 if request.pooling is Pooling.LAST else request.num_summed)
    end = 1 if request.pooling is Pooling.CLS else len(request.prompt)
    count = min(item.start + item.count, end) - begin
    if count > 0:
        step.hidden_sums.append(HiddenSum(request.request_id, first + begin - item.start, count, request.hidden_sum))
