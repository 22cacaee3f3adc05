"""Which tokens of which requests the next step computes. Plain Python: no torch, no threads, time is injected.

There are no phases. A request has two counters, `num_computed` and `num_tokens`; a step lets the first catch up
with the second under a budget of tokens. That one subtraction is prefill, chunked prefill, decode, and the replay
after a preemption. Older requests go first, always: the oldest one can take every block, so somebody moves.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from model.config import EngineConfig
from model.engine.blocks import BlockPool
from model.engine.request import FinishReason, Output, Request, Times, TokenLogprob
from model.errors import ContextTooLong, EngineFailed, InvalidRequest


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Tokens `start .. start + count - 1` of a request; the last step of a catch-up draws a new one."""

    request: Request
    start: int
    count: int

    @property
    def completes(self) -> bool:
        """Whether the counters meet after this step."""
        return self.start + self.count == self.request.num_tokens

    @property
    def draws(self) -> bool:
        """Whether the next token is drawn after this step."""
        return self.completes and self.request.max_tokens > 0


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's work; empty when there is none."""

    scheduled: tuple[Scheduled, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(item.count for item in self.scheduled)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step found, by request id: a drawn token, or what went wrong with that request alone."""

    tokens: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    logprobs: Mapping[str, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, Sequence[TokenLogprob]] = field(default_factory=dict)
    """Of the prompt tokens that this step has scored."""


def check_fits(request: Request, config: EngineConfig) -> None:
    """Refuse what can never run to its end: no prompt, an answer that is there already, more tokens than a request may hold."""
    if not request.prompt:
        raise InvalidRequest("prompt must hold at least one token", "prompt")
    if request.output and len(request.output) >= request.max_tokens:
        text = f"resume_token_ids must hold fewer tokens than the answer may have, which is {request.max_tokens}"
        raise InvalidRequest(f"{text}; got {len(request.output)}", "resume_token_ids")
    limit = config.max_model_len
    if request.max_total_tokens > limit:
        field_name = "prompt" if len(request.prompt) >= limit else "max_tokens"
        raise ContextTooLong(
            f"{field_name}: this model's maximum context length is {limit} tokens, but the request asks for "
            f"{request.max_total_tokens}: {len(request.prompt)} in the prompt and {request.max_tokens} in max_tokens",
            field_name,
        )


class Scheduler:
    """Owns every request in flight and the block pool."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.num_preemptions = 0
        self._clock = clock
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in order of arrival
        self._by_id: dict[str, Request] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that hold no block."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Queue a request. Raises what `check_fits` raises."""
        check_fits(request, self.config)
        assert request.request_id not in self._by_id, f"request id {request.request_id} is in flight already"
        request.arrived_at = self._clock()
        self._by_id[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> Output | None:
        """End a request now, wherever it is; None where it is not in flight."""
        request = self._by_id.get(request_id)
        return None if request is None else self._finish(request, reason)

    def abort_all(self, reason: FinishReason = FinishReason.ABORT) -> list[Output]:
        """End every request in flight."""
        return [self._finish(request, reason) for request in tuple(self._by_id.values())]

    def schedule(self) -> Plan:
        """The next step's work. Running requests come first, oldest first; then new ones while there is room."""
        budget = self.config.max_batch_tokens
        plan: list[Scheduled] = []
        for request in list(self._running):
            if budget == 0 or not request.blocks:
                break  # those after a preempted request were preempted before it
            count = min(request.num_tokens - request.num_computed, budget)
            self._make_room(request, request.num_computed + count)
            if request.blocks:
                plan.append(Scheduled(request, request.num_computed, count))
                budget -= count
        plan.extend(self._admit(budget))
        return Plan(tuple(plan))

    def commit(self, plan: Plan, result: StepResult) -> list[Output]:
        """Take a step's result in: advance the counters, append drawn tokens, end what has ended."""
        outputs = []
        for item in plan.scheduled:
            request = item.request
            if request.finish_reason is not None:
                continue  # aborted while the step ran
            if request.request_id in result.errors:
                outputs.append(self._finish(request, FinishReason.ERROR, error=result.errors[request.request_id]))
                continue
            completes, draws = item.completes, item.draws
            request.num_computed = item.start + item.count
            request.prompt_scores += result.prompt_logprobs.get(request.request_id, ())
            if draws:
                scores = (result.logprobs[request.request_id],) if request.logprobs is not None else ()
                outputs.append(self._take(request, result.tokens[request.request_id], scores))
            elif completes:
                outputs.append(self._finish(request, FinishReason.LENGTH, prompt_logprobs=tuple(request.prompt_scores)))
        return outputs

    def check_integrity(self) -> None:
        """Every request is in one place, and its blocks are its own and enough."""
        assert len(self._by_id) == len(self._waiting) + len(self._running)
        assert all(not request.blocks and request.num_computed == 0 for request in self._waiting)
        assert all(len(request.blocks) * self.config.block_size >= request.num_computed for request in self._running)
        self.pool.check_integrity(block for request in self._running for block in request.blocks)

    def _admit(self, budget: int) -> Iterator[Scheduled]:
        """A request starts only when its blocks so far fit at once: a half-admitted one would block the rest."""
        while budget and self._waiting and len(self._running) < self.config.max_batch_requests:
            request = self._waiting[0]
            if not self._grow(request, request.num_tokens):
                return
            self._waiting.popleft()
            self._running.append(request)
            if request.scheduled_at is None:
                request.scheduled_at = self._clock()
            count = min(request.num_tokens, budget)
            budget -= count
            yield Scheduled(request, 0, count)

    def _make_room(self, request: Request, num_tokens: int) -> None:
        """Blocks for `num_tokens` tokens, taken from the youngest requests if need be: in the end from this one itself."""
        while not self._grow(request, num_tokens):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return

    def _grow(self, request: Request, num_tokens: int) -> bool:
        missing = -(-num_tokens // self.config.block_size) - len(request.blocks)
        blocks = self.pool.allocate(missing) if missing > 0 else []
        if blocks is None:
            return False
        request.blocks.extend(blocks)
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue without blocks: it will compute its tokens again, and draw the same ones."""
        self._release(request)
        request.num_computed = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self._running.remove(request)
        self.pool.free(request.blocks)
        request.blocks.clear()

    def _take(self, request: Request, token: int, scores: tuple[TokenLogprob, ...]) -> Output:
        first = request.first_token_at is None
        request.output.append(token)
        stopped = token in request.stop_token_ids and len(request.output) > request.min_tokens
        if request.grammar is not None and not stopped:
            try:
                request.grammar.advance(token)
            except EngineFailed as error:
                return self._finish(request, FinishReason.ERROR, error=str(error))
            stopped = request.grammar.finished
        if request.first_token_at is None:
            request.first_token_at = self._clock()
        prompt_scores = tuple(request.prompt_scores) if first else ()
        if stopped or len(request.output) >= request.max_tokens:
            reason = FinishReason.STOP if stopped else FinishReason.LENGTH
            return self._finish(request, reason, (token,), logprobs=scores, prompt_logprobs=prompt_scores)
        return Output(request.request_id, (token,), logprobs=scores, prompt_logprobs=prompt_scores)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        tokens: tuple[int, ...] = (),
        *,
        logprobs: tuple[TokenLogprob, ...] = (),
        prompt_logprobs: tuple[TokenLogprob, ...] = (),
        error: str | None = None,
    ) -> Output:
        del self._by_id[request.request_id]
        if request.blocks:
            self._release(request)
        else:
            self._waiting.remove(request)
        request.finish_reason = reason
        now = self._clock()
        scheduled = now if request.scheduled_at is None else request.scheduled_at
        first = now if request.first_token_at is None else request.first_token_at
        times = Times(scheduled - request.arrived_at, first - scheduled, now - first)
        return Output(request.request_id, tokens, reason, times, error, logprobs, prompt_logprobs)
