"""The scheduler of continuous batching: which tokens of which requests the next step computes.

Plain Python: no torch, no threads, time is injected.

A request has two counters, `num_computed` and `num_tokens`; a step lets the first catch up with the second under a budget of
tokens. That one subtraction is prefill, chunked prefill, decode, and the replay after a preemption.

Requests stand in the order of their virtual arrivals, "older" and "younger": a level of priority counts as ten seconds of
waiting. Owners take turns (`fair_share.py`), and that order is for the requests of one. An owner of whom no request runs gets a
place in the batch at once, from one who has more than one.

Streams, which lack one token, go first, and advance in every step. Prompts, which lack more, share the tokens that `StepCost`
allows. In one step the oldest prompt goes first, in the next the shortest: a prompt waits at most two steps for each chunk of
its own and of those before it, whatever else arrives.
"""

import logging
from bisect import insort_left, insort_right
from collections import deque
from collections.abc import Callable, Sequence, Set
from operator import attrgetter

from attend.model.engine.config import EngineConfig
from attend.model.engine.fair_share import MAX_PASSED_SECONDS
from attend.model.engine.lookup import Lookups
from attend.model.engine.plan import Plan, ScheduledTokens, StepResult
from attend.model.engine.prompt_chunks import PromptChunks
from attend.model.engine.request import SECONDS_A_LEVEL, FinishReason, Output, Request, TokenLogprob
from attend.model.errors import EngineFailed

log = logging.getLogger("attend.engine")

VIRTUAL_ARRIVAL = attrgetter("virtual_arrival")


class Scheduler(PromptChunks):
    """Owns every request in flight and the block tables."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        super().__init__(config, clock)
        self.num_preemptions = 0
        self.num_ended = 0
        self.num_drafted = 0
        self.num_accepted = 0
        """Tokens of drafts, and those of them that were drawn."""
        self._planned_at = 0.0
        self._lookups = Lookups()
        self._waiting: deque[Request] = deque()
        """Requests without blocks, in the order of their virtual arrivals, as is `_running`."""
        self._by_id: dict[str, Request] = {}
        self.awaiting_kv: dict[str, float] = {}  # since when blocks of a waiting request are read from disk: it is not admitted
        self.on_finish: Callable[[Request], None] = lambda request: None

    @property
    def num_waiting(self) -> int:
        """Waiting requests: they hold no block."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Running requests: they hold blocks."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Queue a request that has passed `check_fits`."""
        assert 0 < len(request.prompt) <= request.max_total_tokens <= self.config.max_model_len, "a request that can never run"
        assert request.request_id not in self._by_id, f"request id {request.request_id} is in flight already"
        request.arrived_at, request.tables = self._clock(), self.tables.new()
        request.virtual_arrival = request.arrived_at - SECONDS_A_LEVEL * request.priority
        self._by_id[request.request_id] = request
        self._shares.enter(request)
        insort_right(self._waiting, request, key=VIRTUAL_ARRIVAL)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> Output | None:
        """End a request now, wherever it is; None where it is not in flight."""
        request = self._by_id.get(request_id)
        return None if request is None else self._finish(request, reason)

    def abort_all(self, reason: FinishReason = FinishReason.ABORT) -> list[Output]:
        """End every request in flight."""
        return [self._finish(request, reason) for request in tuple(self._by_id.values())]

    def schedule(self) -> Plan:
        """The next step's work: a token for each stream, oldest first, then parts of prompts."""
        self.tables.begin_step()
        self._planned_at = self._clock()
        self._admit_newcomers()
        return self._fill_step(*self._streams())

    def schedule_async(self, plan: Plan) -> Plan | None:
        """The step after `plan`, before the tokens drawn in `plan` have reached the host: one more token for every stream, and
        parts of prompts.

        None where those tokens must be known first, to choose the next requests or to draw, or where somebody must give way. A
        request that finished in the meantime is computed once more and its token dropped.
        """
        under_way = [item for item in plan.scheduled_tokens if item.request.finish_reason is None]
        drawing = {item.request for item in under_way if item.draws}
        if self.config.draft_tokens or not all(request.draws_from_scores for request in drawing):
            return None
        if not self._foresees_prompts and (len(drawing) < len(self._running) or self._may_admit()):
            return None
        if any(r.pooling is not None or r.prompt_logprobs is not None for r in self._running if r not in drawing):
            return None  # what is asked of the part under way is added to what the next one gives
        known = self.tables.next_numbers()
        if self._foresees_prompts:
            for item in under_way:
                item.request.num_computed = item.start + item.count  # as if it had ended already
            if not self._admit_newcomers(early=True):
                return None
        streams, prompts = self._followers(drawing)
        if len(streams) > self.budget or not all(self.tables.grow(r, r.num_tokens + (r in drawing)) for r in streams):
            return None
        for request in streams if self.tables.has_windows else ():
            self.tables.allocate(request, request.num_tokens + 1)
        items = [self._planned_early(r) if r in drawing else self._plan_chunk(r, 1) for r in streams]
        following = self._fill_step(items, prompts, early=True)
        self.tables.known_next = (known, self.tables.next_numbers()) if following.has_parts else None
        return following if following.scheduled_tokens else None

    @property
    def _foresees_prompts(self) -> bool:
        """True if the parts of prompts after a step are known before its end. Not where that end frees the blocks that are out
        of a window's sight or keeps a snapshot, nor where streams are left out in turns.
        """
        turns = self.config.stream_turns and self._shares.is_shared
        return not (self.tables.has_windows or self.tables.has_states or turns)

    def _may_admit(self) -> bool:
        """True if the next step may admit a request."""
        is_full = len(self._running) >= self.config.max_batch_requests
        if not is_full:
            return bool(self._ready())
        return any(not request.was_newcomer for request in self._shares.newcomers(self._ready(), self._running))

    def _followers(self, drawing: Set[Request]) -> tuple[list[Request], list[Request]]:
        """The streams of the step after one in which `drawing` draw, and the running requests that lack more than a token."""
        streams, prompts = list[Request](), list[Request]()
        for request in self._running:
            if request in drawing:
                streams += [request] if len(request.output) + 1 < request.max_tokens else []
            elif request.is_stream:
                streams.append(request)
            elif request.num_computed < request.num_tokens:
                prompts.append(request)
        return streams, prompts

    def _fill_step(self, plan: Sequence[ScheduledTokens], prompts: list[Request], *, early: bool = False) -> Plan:
        """The streams of a step, and what else fits in it: parts of prompts, also of requests that are admitted; or guesses."""
        left = self.budget - sum(item.count for item in plan)
        if left and (self._foresees_prompts or not early) and (admitted := self._admit_waiting()):
            prompts = sorted(prompts + admitted, key=VIRTUAL_ARRIVAL)
        self._shares.charge(plan)
        if left and prompts:
            cost, goal = self.cost, self.config.step_goal  # the room is counted in tokens at the beginning of a prompt
            parts = self._share_out(
                prompts, cost.prompt_budget(len(plan), len(prompts), goal) if plan else cost.prompt_budget_alone(), left
            )
            return Plan((*plan, *parts), len(plan), early=early)
        guessed = 0 if early else self._lookups.guess(plan, min(self.config.draft_tokens, left), self.tables)
        return Plan(tuple(plan), len(plan), guessed, early)

    def drop(self, plan: Plan) -> None:
        """A step that was planned early is not waited for, since all its requests have ended: whether it filled its blocks is
        not known.
        """
        if plan.has_parts:
            self._distrust(self.tables.forget_step(), Plan(()), StepResult())

    def commit(self, plan: Plan, result: StepResult, dropped_plan: Plan | None = None) -> list[Output]:
        """Apply a step's result: advance the counters, append drawn tokens, end the requests that are complete.

        `dropped_plan`: the step after it, whose result is lost since something of this one failed.
        """
        outputs = []
        restarted: set[str] = set()
        lost = (
            [] if dropped_plan is None else [item.request for item in dropped_plan.scheduled_tokens if not item.input_pending]
        )
        if result.errors or result.put_off or lost:
            restarted = self._distrust(self.tables.forget_step(), plan, result, lost)
        for item in plan.scheduled_tokens:
            request = item.request
            if request.finish_reason is not None:
                continue  # aborted while the step ran
            name = request.request_id
            if name in result.errors:
                self.tables.forget(request)
                outputs.append(self._finish(request, FinishReason.ERROR, error=result.errors[name]))
                continue
            if name in restarted:
                self._restart(request)
                continue
            request.num_computed, request.num_replayed = item.start + item.count, 0
            if item.input_pending:
                self.tables.remember(request, request.num_computed)
            if item.snapshot:
                self.tables.keep(request, item.snapshot)
            if name in result.prompt_logprobs:
                request.prompt_scores += result.prompt_logprobs[name]
            if name in result.hidden_sums:
                request.hidden_sum, request.num_summed = result.hidden_sums[name], request.num_computed
            if request.num_computed < request.num_tokens:
                continue
            if request.max_tokens > 0:
                scores = () if request.logprobs is None else (result.logprobs[name],)
                outputs.append(self._take(request, result.tokens[name], scores))
                if item.draft:
                    outputs[-1] = self._take_more(item, outputs[-1], result.more.get(name, ()))
            else:
                reason = FinishReason.LENGTH if request.pooling is None else FinishReason.STOP
                ended = self._finish(request, reason, prompt_logprobs=tuple(request.prompt_scores))
                outputs.append(ended._replace(hidden=request.pooled_hidden))
        for item in plan.scheduled_tokens if self.tables.has_windows else ():
            if item.request.reserved_tokens:
                self.tables.evict_out_of_window(item.request)
        if plan.scheduled_tokens and plan.is_plain and not (result.errors or result.put_off):
            pairs = sum(self.cost.pairs(item.start, item.count) for item in plan.scheduled_tokens[plan.num_streams :])
            self.cost.learn(plan.num_streams, plan.num_prompt_tokens, pairs, self._clock() - self._planned_at)
        self._planned_at = self._clock()  # when a step that was submitted early begins
        self.tables.end_step()
        return outputs

    def _distrust(self, blocks: Sequence[set[int]], plan: Plan, result: StepResult, lost: Sequence[Request] = ()) -> set[str]:
        """Some of the blocks that a step was to fill, by group, were not filled. Requests outside of the step that share any of
        them, or have `lost` a part, compute their tokens again. Returns the requests of the step that must.
        """
        planned = {item.request.request_id for item in plan.scheduled_tokens}
        for request in self._running:
            shares = request in lost or not all(map(set.isdisjoint, blocks, request.tables))
            if request.request_id not in planned and shares:
                self._restart(request)
        return self.tables.begun_after(blocks, plan.scheduled_tokens, result) | {r.request_id for r in lost}

    def _restart(self, request: Request) -> None:
        """Have a request compute its tokens again, as after a preemption; prefix cache hits of it are not counted then."""
        self.tables.restart(request)
        request.num_preemptions += 1

    def shrink(self) -> None:
        """Halve the tokens of a step, for good: one of so many needs more memory than there is."""
        self.budget = max(self.least_budget, self.budget // 2)
        log.warning("out of memory: the token budget of a step is halved, to %d", self.budget)

    @property
    def least_budget(self) -> int:
        """Tokens of a step below which it is not shrunk."""
        return min(self.config.max_batch_tokens, max(self.config.chunk_size, self.config.max_batch_requests))

    def _streams(self) -> tuple[list[ScheduledTokens], list[Request]]:
        """The next token of each stream, and the running requests that are none: they lack more, or were never scheduled."""
        plan, prompts, left = list[ScheduledTokens](), list[Request](), self.budget
        for request in [each for each in self._running if each.num_tokens > each.reserved_tokens]:
            self._make_room(request, request.num_tokens)  # before any is planned: it may take an older one's
        for request in self._shares.select_streams(self._running, self.cost) if self.config.stream_turns else self._running:
            count = 1 + request.num_replayed
            if count > left:
                break
            if not request.is_stream:
                prompts.append(request)
                continue
            plan.append(self._plan_chunk(request, count))
            left -= count
        return plan, prompts

    def _admit_waiting(self) -> list[Request]:
        """A request starts only when its blocks so far fit at once: a half-admitted one would block the rest."""
        admitted = []
        while (waiting := self._ready()) and len(self._running) < self.config.max_batch_requests:
            if not self.tables.admit(request := self._shares.next(waiting, self._running)):
                break
            admitted.append(self._start(request))
        return admitted

    def _ready(self) -> Sequence[Request]:
        """Who may be admitted of those that wait."""
        return [one for one in self._waiting if one.request_id not in self.awaiting_kv] if self.awaiting_kv else self._waiting

    def _start(self, request: Request) -> Request:
        self._waiting.remove(request)
        insort_right(self._running, request, key=VIRTUAL_ARRIVAL)
        return request

    def _admit_newcomers(self, *, early: bool = False) -> bool:
        """Admit a request of each owner of whom none runs; others may have to give way for it. False where they would have to
        and may not, since their next tokens are under way: `early`.
        """
        for request in self._shares.newcomers(self._ready(), self._running):
            while (is_full := len(self._running) >= self.config.max_batch_requests) or not self.tables.admit(request):
                victim = self._shares.gives_way(request, self._running, is_full)
                if victim is None:
                    break
                if early:
                    return False
                self._preempt(victim)
            request.was_newcomer = True
            if request.reserved_tokens:
                self._start(request)
            elif self._clock() - request.arrived_at > MAX_PASSED_SECONDS:
                break
        return True

    def _planned_early(self, request: Request) -> ScheduledTokens:
        """The token that the step before draws."""
        snapshot = self.tables.advance(request, request.num_tokens + 1, pending=True)
        return ScheduledTokens(request, request.num_tokens, 1, input_pending=True, snapshot=snapshot)

    def _make_room(self, request: Request, num_tokens: int) -> None:
        """Blocks for `num_tokens` tokens, taken from others if need be: in the end from this one itself."""
        while request.reserved_tokens and not self.tables.grow(request, num_tokens):
            self._preempt(self._shares.victim(self._running) or self._running[-1])

    def _preempt(self, request: Request) -> None:
        """Back into the queue without blocks: it will compute its tokens again, and draw the same ones."""
        self._running.remove(request)
        self.tables.free(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort_left(self._waiting, request, key=VIRTUAL_ARRIVAL)

    def _take(self, request: Request, token: int, scores: tuple[TokenLogprob, ...]) -> Output:
        first = request.first_token_at is None
        request.output.append(token)
        stopped = token in request.stop_token_ids and len(request.output) > request.min_tokens
        if request.grammar is not None and not stopped:
            try:
                request.grammar.advance(token)
            except Exception as error:  # whatever it is, it is this request's alone
                reason = str(error) if isinstance(error, EngineFailed) else f"the grammar failed: {type(error).__name__}"
                return self._finish(request, FinishReason.ERROR, error=reason)
            stopped = request.grammar.is_finished
        if request.first_token_at is None:
            request.first_token_at = self._clock()
        prompt_scores = tuple(request.prompt_scores) if first else ()
        if stopped or len(request.output) >= request.max_tokens:
            reason = FinishReason.STOP if stopped else FinishReason.LENGTH
            return self._finish(request, reason, (token,), logprobs=scores, prompt_logprobs=prompt_scores)
        return Output(request.request_id, (token,), logprobs=scores, prompt_logprobs=prompt_scores)

    def _take_more(self, item: ScheduledTokens, output: Output, tokens: Sequence[int]) -> Output:
        """The output with the tokens that followed right guesses, up to the one that ends the request."""
        request = item.request
        self._lookups.of(request).learn(len(item.draft), len(tokens))
        self.num_drafted += len(item.draft)
        self.num_accepted += len(tokens)
        for token in tokens:
            if output.finish_reason is None:
                if self.tables.has_states:
                    request.num_replayed += 1
                else:
                    request.num_computed += 1
                last = self._take(request, token, ())
                output = last._replace(token_ids=(*output.token_ids, token), prompt_logprobs=output.prompt_logprobs)
        return output

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
        self._shares.leave(request)
        self.num_ended += 1
        (self._running if request.reserved_tokens else self._waiting).remove(request)
        request.finish_reason = reason
        self.on_finish(request)
        self.tables.free(request)
        if request.lookup is not None:
            request.lookup.end(request)
        times = request.times(self._clock())
        return Output(request.request_id, tokens, reason, times, error, logprobs, prompt_logprobs)
