"""Each bug that is planted in the service is found by its simulation, so that the simulation is evidence."""

from array import array
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any
from unittest.mock import patch

import pytest

from attend.model.engine.blocks import BlockPool
from attend.model.engine.budget import StepCost
from attend.model.engine.groups import StateGroup, WindowGroup
from attend.model.engine.lookup import Lookups
from attend.model.engine.loop import AsyncEngine, _Stream
from attend.model.engine.request import FinishReason, Output, Request
from attend.model.engine.scheduler import Scheduler
from attend.model.engine.snapshots import Snapshots
from attend.model.engine.tables import BlockTables
from attend.service.access.quota import Key, Lease, _Window
from attend.service.generation import generation, prepare
from attend.service.generation.answer import Answer
from attend.service.generation.generation import GenerationService
from attend.service.generation.prepare import Preparation
from attend.service.generation.text import TextStream
from attend.service.generation.thread_pools import FairSemaphore, TurnPool
from attend.service.observe.metrics import Metrics, RequestRecord
from tests.simulation.life import Life

HUNT = [19, 14, 32, 17, 56, 57, 68, *range(300)]
"""Seeds within which a planted bug must show: a part of those that the tests run. First those under which the rarest do."""
Bug = Callable[..., Any]
PLANTED: dict[str, tuple[object, str, Bug]] = {}


def planted(target: object, name: str) -> Callable[[Bug], Bug]:
    """Register a bug: what is done in the place of the function that stands there, which it is given first."""

    def register(bug: Bug) -> Bug:
        PLANTED[bug.__name__] = (target, name, bug)
        return bug

    return register


def bug(name: str, target: object, attribute: str, does: Bug) -> None:
    """Register a bug of a line."""
    PLANTED[name] = (target, attribute, does)


def during(attribute: str, change: Callable[[Any], Any], of: Callable[..., Any] = lambda self, *given: self) -> Bug:
    """While the function runs, something `of` its arguments is another."""

    def changed(old: Any, *given: Any, **named: Any) -> Any:
        target = of(*given)
        with patch.object(target, attribute, change(getattr(target, attribute))):
            return old(*given, **named)

    return changed


def passing(at: int, change: Callable[[Any], Any]) -> Bug:
    """An argument of the function is another; the first is number 0."""
    return lambda old, *given, **named: old(*given[:at], change(given[at]), *given[at + 1 :], **named)


def afterwards(does: Callable[..., Any]) -> Bug:
    """The function does something more."""
    return lambda old, *given: (old(*given), does(*given))[0]


def unless(holds: Callable[..., bool]) -> Bug:
    """The function does nothing where something holds."""
    return lambda old, *given: None if holds(*given) else old(*given)


def without(is_lost: Callable[[Any], bool]) -> Bug:
    """Some of what the function returns is lost."""
    return lambda old, *given: [one for one in old(*given) if not is_lost(one)]


def told_as(outcome: str, other: str) -> Bug:
    """An outcome of a call is counted as another one."""
    return lambda old, self, found, error=None: old(self, other if found == outcome and error else found, error)


def going_first(*, shortest: bool) -> Bug:
    """The shortest prompt of each owner goes first in each step, or in none."""

    def share_out(old: Any, scheduler: Any, *given: Any) -> Any:
        for account in scheduler._shares._accounts.values():
            account.shortest_next = shortest
        return old(scheduler, *given)

    return share_out


def first(self: Any, request: Any, *given: Any) -> Any:
    return request


def pool(scheduler: Any, *given: Any) -> Any:
    return scheduler.tables.groups[0].pool


def plant(name: str) -> Any:
    """Within it, the code has a bug."""
    target, attribute, bug = PLANTED[name]
    old = getattr(target, attribute)

    def wrong(*given: Any, **named: Any) -> Any:
        return bug(old, *given, **named)

    return patch.object(target, attribute, property(wrong) if isinstance(old, property) else wrong)


# In the step thread and its bridge to the event loop.


@planted(AsyncEngine, "_deliver")
def an_output_goes_to_another(old, self, loop, outputs, failure):
    if len(outputs) > 1 and all(output.finish_reason is None for output in outputs):
        names = [output.request_id for output in outputs]
        outputs = [output._replace(request_id=name) for output, name in zip(outputs, reversed(names), strict=True)]
    old(self, loop, outputs, failure)


@planted(AsyncEngine, "_deliver")
def an_output_is_lost_while_another_waits(old, self, loop, outputs, failure):
    unread = {name for name, stream in self._streams.items() if stream.outputs}
    old(self, loop, [each for each in outputs if each.request_id not in unread or each.finish_reason], failure)


@planted(AsyncEngine, "_deliver")
def streams_are_kept_after_their_end(old, self, loop, outputs, failure):
    before = dict(self._streams)
    old(self, loop, outputs, failure)
    self._streams |= {name: stream for name, stream in before.items() if name.endswith("-0")}


@planted(AsyncEngine, "_command")
def commands_do_not_wake_the_step_thread(old, self, *commands):
    self._commands.extend(commands)
    return not self._over


@planted(AsyncEngine, "_finish")
def closing_forgets_who_waits(old, self):
    waiting, self._engine.scheduler._waiting = self._engine.scheduler._waiting, type(self._engine.scheduler._waiting)()
    for request in waiting:
        del self._engine.scheduler._by_id[request.request_id]
    return old(self)


@planted(AsyncEngine, "drain")
async def draining_forgets_the_queue(old, self, seconds):
    queued = {request.request_id for request in self._engine.scheduler._waiting}
    streams, self._streams = self._streams, {name: one for name, one in self._streams.items() if name not in queued}
    task = old(self, seconds)
    self._streams = streams
    abort, self.abort = self.abort, lambda name, reason: None if name in queued else abort(name, reason)
    await task
    self.abort = abort


bug("a_draining_engine_takes_requests", AsyncEngine, "_open", during("_draining", lambda draining: False))
bug("the_queue_has_one_place_too_many", AsyncEngine, "_open", during("_capacity", lambda places: places + 1))


# In the way from a call to its chunks.


@planted(GenerationService, "_last_chunk")
def an_answer_that_ended_goes_on(old, self, chunk, output, request):
    chunk = old(self, chunk, output, request)
    return replace(chunk, finish_reason=FinishReason.LENGTH) if chunk.finish_reason is FinishReason.DEADLINE else chunk


# In preparation.


@planted(Preparation, "_read")
def prompts_are_mixed_up(old, self, command, prompts):
    made = old(self, command, prompts)
    made.prompts.reverse()
    return made


@planted(prepare, "_start_grammar")
def answers_share_one_grammar(old, compiled, received):
    if "shared" not in vars(compiled):
        vars(compiled)["shared"] = old(compiled, received)
    return compiled.shared


bug(
    "a_resumed_answer_forgets_its_text",
    Answer,
    "resume",
    lambda old, self: setattr(self, "num_tokens", len(self.request.output)),
)


# In answers and their texts.


@planted(Answer, "_chunk")
def an_answer_stopped_by_its_text_is_told_as_cut_off(old, self, output, parts, count, reason, stop):
    reason = FinishReason.LENGTH if isinstance(stop, str) else reason
    return old(self, output, parts, count, reason, stop)


@planted(TextStream, "show")
def a_stop_string_leaks(old, self, piece, *, last=False):
    text, stop = old(self, piece, last=last)
    if stop is None:
        text, self._held = text + self._held, ""
    return text, stop


bug("stop_strings_count_before_min_tokens", TextStream, "show", during("_stops", lambda stops: replace(stops, min_tokens=0)))


@planted(TextStream, "show")
def a_stop_string_over_two_pieces_is_missed(old, self, piece, *, last=False):
    self._held = ""
    return old(self, piece, last=last)


# In what keys pay.

bug("only_the_last_tokens_are_paid", Lease, "use", lambda old, self, tokens: setattr(self, "used", tokens))


@planted(Lease, "reserve")
def a_call_reserves_twice(old, self, tokens):
    old(self, tokens)
    self._key.charge(tokens)


@planted(Key, "admit")
@contextmanager
def answers_hold_their_places_where_a_call_fails(old, self, answers, tokens=0):
    with old(self, answers, tokens) as lease:
        try:
            yield lease
        except Exception:
            self.usage.running += answers
            raise


@planted(Key, "arrive")
def a_refused_request_is_charged(old, self, answers=1):
    try:
        old(self, answers)
    except Exception:
        self.usage.requests.take(1, self._clock())
        raise


bug(
    "a_limit_lets_one_through",
    Key,
    "_check",
    lambda old, self, now, requests=0, answers=0, tokens=0: old(self, now, requests, max(0, answers - 1), tokens),
)


# In what is counted.


@planted(RequestRecord, "_close")
def a_call_is_counted_twice(old, self, outcome, error=None):
    old(self, outcome, error)
    self._closed = False


@planted(RequestRecord, "_answer_ends")
def the_last_answer_gives_a_call_its_outcome(old, self, chunk, now):
    old(self, chunk, now)
    self._reasons = dict.fromkeys(self._reasons, chunk.finish_reason)


@planted(RequestRecord, "_answer_begins")
def a_prompt_counts_for_each_of_its_answers(old, self, chunk, n):
    self._prompts.discard(chunk.index // n)
    old(self, chunk, n)


@planted(RequestRecord, "count_delivered")
def tokens_that_nobody_got_are_counted(old, self, chunks, n):
    old(self, chunks, n)
    self._count_tokens()


# In work beside the event loop.


@planted(FairSemaphore, "hold")
@contextmanager
def places_are_kept_where_work_fails(old, self, owner, amount=1):
    with old(self, owner, amount):
        try:
            yield
        except Exception:
            self._change(owner, amount)
            raise


@planted(FairSemaphore, "hold")
@contextmanager
def places_are_kept_where_a_caller_leaves(old, self, owner, amount=1):
    with old(self, owner, amount):
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception):
                self._change(owner, amount)
            raise


@planted(TurnPool, "submit")
def work_behind_other_work_is_never_begun(old, self, owner, work):
    threads, busy = self._threads, bool(self._waiting)
    if busy:
        self._threads = type("Nobody", (), {"submit": lambda self, work: None})()
    try:
        return old(self, owner, work)
    finally:
        self._threads = threads


# In the scheduler.

bug("blocks_of_an_aborted_request_are_not_freed", Scheduler, "abort", during("free", lambda free: lambda blocks: None, of=pool))
bug("requests_go_by_age_alone", Scheduler, "add", during("priority", lambda priority: 5, of=first))


@planted(Scheduler, "_preempt")
def a_preempted_request_goes_on_where_it_stood(old, self, request):
    stood, skip = request.num_computed, self.tables.skip_known

    def skip_known(other):
        skip(other)
        other.num_computed = max(other.num_computed, stood if other is request else 0)

    old(self, request)
    self.tables.skip_known = skip_known


bug("a_stop_token_does_not_end_the_request", Scheduler, "_take", during("stop_token_ids", lambda ids: frozenset(), of=first))
bug("max_tokens_is_overrun_by_one", Scheduler, "_take", during("max_tokens", lambda most: most + 1, of=first))


@planted(Scheduler, "commit")
def the_token_of_an_aborted_request_is_handed_out(old, self, plan, result, dropped_plan=None):
    gone = [item.request.request_id for item in plan.scheduled_tokens if item.request.finish_reason is not None]
    late = [Output(name, (result.tokens[name],)) for name in gone if name in result.tokens]
    return old(self, plan, result, dropped_plan) + late


@planted(Scheduler, "commit")
def the_last_output_comes_twice(old, self, plan, result, dropped_plan=None):
    outputs = old(self, plan, result, dropped_plan)
    return outputs + [output for output in outputs if output.finish_reason is not None]


bug("blocks_of_a_failed_step_stay_known", Scheduler, "commit", during("forget", lambda forget: lambda blocks: None, of=pool))
bug("the_budget_is_one_token_larger", Scheduler, "schedule", during("budget", lambda budget: budget + 1))
bug(
    "a_batch_has_one_request_too_many",
    Scheduler,
    "_admit_waiting",
    during("config", lambda config: replace(config, max_batch_requests=config.max_batch_requests + 1)),
)


@planted(Scheduler, "_make_room")
def blocks_are_taken_from_the_oldest(old, self, request, num_tokens):
    while request.reserved_tokens and not self.tables.grow(request, num_tokens):
        self._preempt(self._running[0])


@planted(Scheduler, "_streams")
def prompts_take_the_budget(old, self):
    plan, prompts = old(self)
    return ([], prompts) if prompts else (plan, prompts)


@planted(Scheduler, "_part")
def what_fits_is_cut(old, self, request, share, first):
    missing = request.num_tokens - request.num_computed
    return old(self, request, share - (missing == share > 1), first)


@planted(Scheduler, "_begin")
def lookups_are_not_counted(old, self, request):
    queries = self.num_prefix_queries
    old(self, request)
    self.num_prefix_queries = queries


@planted(Scheduler, "_admit_waiting")
def hits_after_a_preemption_count_again(old, self):
    admitted = old(self)
    for request in admitted:
        again = request.num_computed if request.num_preemptions else 0
        request.num_cached += again
        self.num_prefix_hits += again
    return admitted


@planted(Scheduler, "commit")
def a_request_that_was_put_off_counts_as_computed(old, self, plan, result, dropped_plan=None):
    scored = {
        name: why for name, why in result.put_off.items() if name in self._by_id and self._by_id[name].logprobs is not None
    }
    tokens = dict.fromkeys(result.put_off, 0) | dict(result.tokens)
    return old(self, plan, replace(result, put_off=scored, tokens=tokens), dropped_plan)


# In guesses.


@planted(Scheduler, "_take_more")
def a_right_draft_moves_the_state_on(old, self, item, output, tokens):
    output = old(self, item, output, tokens)
    item.request.num_computed += item.request.num_replayed
    item.request.num_replayed = 0
    return output


bug(
    "a_guess_has_no_blocks",
    Lookups,
    "guess",
    during("grow", lambda grow: lambda request, num_tokens: True, of=lambda *given: given[-1]),
)


# In steps that begin early.

bug(
    "a_step_begins_early_without_blocks",
    Scheduler,
    "schedule_async",
    during("grow", lambda grow: lambda request, num_tokens: True, of=lambda self, plan: self.tables),
)


@planted(Scheduler, "schedule_async")
def somebody_gives_way_for_a_step_that_begins_early(old, self, plan):
    for request in tuple(self._running):
        if request.reserved_tokens:
            self._make_room(request, request.num_tokens + 1)
    return old(self, plan)


bug("who_waits_is_passed_over", Scheduler, "schedule_async", during("_waiting", lambda waiting: deque()))


@planted(Scheduler, "schedule_async")
def prompts_are_passed_over(old, self, plan):
    drawing = [item.request for item in plan.scheduled_tokens if item.draws]
    with patch.object(self, "_running", [request for request in self._running if request in drawing]):
        return old(self, plan)


@planted(Scheduler, "_followers")
def a_part_that_is_under_way_is_computed_twice(old, self, drawing):
    found = old(self, drawing)
    for request in found[1]:
        request.num_computed = max(0, request.num_computed - self.config.block_size)
    return found


@planted(Scheduler, "schedule_async")
def who_draws_the_last_token_is_followed(old, self, plan):
    for request in self._running:
        request.max_tokens += 1
    try:
        return old(self, plan)
    finally:
        for request in self._running:
            request.max_tokens -= 1


@planted(Scheduler, "schedule_async")
def a_block_is_known_before_its_last_token(old, self, plan):
    following, size = old(self, plan), self.config.block_size
    for item in following.scheduled_tokens if following is not None else ():
        at = item.start // size
        if (item.start + 1) % size == 0 and item.request.num_known == at and self.config.prefix_caching:
            tokens = [*item.request.tokens(at * size, size - 1), 0]
            parent = self.tables.parent(item.request)
            self.tables.groups[0].pool.remember(parent, tokens, item.request.tables[0][at])
    return following


# In blocks and the prefix cache.


@planted(BlockPool, "free")
def a_freed_block_is_free_twice(old, self, blocks):
    blocks = list(blocks)
    old(self, blocks)
    self._free.update(dict.fromkeys(blocks[:1]))


@planted(BlockPool, "share")
def a_shared_block_stays_free(old, self, blocks):
    free = self._free.copy()
    old(self, blocks)
    self._free = free


@planted(BlockTables, "skip_known")
def a_known_prompt_leaves_no_token_to_compute(old, self, request):
    old(self, request)
    size, pool = self.config.block_size, self.groups[0].pool
    found = pool.find(self.parent(request), request.tokens(request.num_computed, size))
    if found is not None and request.num_computed + size == request.num_tokens:
        pool.share(found[:1])
        request.tables[0].append(found[0])
        request.num_computed += size


@planted(Scheduler, "_plan_chunk")
def a_block_is_known_from_its_first_token_on(old, self, request, count):
    item = old(self, request, count)
    at, size = request.num_known, self.config.block_size
    if self.config.prefix_caching and (item.start + count) % size:
        padded = [*request.tokens(at * size, size), *[0] * size][:size]
        self.tables.groups[0].pool.remember(self.tables.parent(request), padded, request.tables[0][at])
    return item


# In windows.


@planted(BlockTables, "evict_out_of_window")
def a_block_goes_back_one_block_early(old, self, request):
    request.num_computed += self.config.block_size
    old(self, request)
    request.num_computed -= self.config.block_size


bug(
    "a_block_goes_back_one_token_early",
    BlockTables,
    "evict_out_of_window",
    during("num_computed", lambda count: count + 1, of=first),
)


def change_spans(tables, change):
    for _, group in tables.others:
        group.span = change(group.span)


@planted(BlockTables, "__init__")
def a_prefix_is_found_that_a_window_lacks(old, self, config):
    old(self, config)
    change_spans(self, lambda span: 0)


@planted(BlockTables, "__init__")
def a_prefix_is_found_one_block_too_early(old, self, config):
    old(self, config)
    change_spans(self, lambda span: span - 1)


@planted(BlockTables, "__init__")
def blocks_of_a_failed_step_stay_known_under_a_window(old, self, config):
    old(self, config)
    for pool in [group.pool for _, group in self.others]:
        pool.forget_since = lambda number, but=(): set()
        pool.forget = lambda blocks, pool=pool, forget=pool.forget: forget(b for b in blocks if b not in pool._holders)


# In recurrent states.


@planted(StateGroup, "grow")
def all_requests_have_one_state(old, self, request, num_tokens):
    request.slot = 1
    request.tables[self._at] = request.tables[self._at] or array("q", [1])


@planted(Scheduler, "commit")
def a_state_moves_after_a_step(old, self, plan, result, dropped_plan=None):
    for request in self._running if self.tables.has_states else ():
        pool = self.tables.groups[-1].pool
        if pool.num_free and [request.slot] == list(request.tables[-1]):
            [place] = pool.allocate(1)
            pool.free([request.slot])
            request.slot = request.tables[-1][0] = place
    return old(self, plan, result, dropped_plan)


@planted(StateGroup, "__init__")
def a_snapshot_is_written_by_the_next_step(old, self, at, size):
    old(self, at, size)
    self.advance = lambda request, keep: request.slot if keep else 0
    self.remember = lambda request, slot, number: self.has(number) or bool(self.pool.remember(number, (), slot))


@planted(StateGroup, "__init__")
def a_prefix_is_found_that_has_no_state(old, self, at, size):
    old(self, at, size)
    self.span, share = 0, self.share
    self.share = lambda request, start, blocks: share(request, start, known) if (known := [*filter(None, blocks)]) else None


@planted(BlockTables, "advance")
def a_snapshot_is_found_in_the_step_that_writes_it(old, self, request, end, *, pending=False):
    slot = old(self, request, end, pending=pending)
    if slot and not pending:
        self.keep(request, slot)
    return slot


@planted(BlockTables, "keep")
def a_snapshot_is_known_one_block_later(old, self, request, slot):
    request.parent += 1
    old(self, request, slot)
    request.parent -= 1


@planted(StateGroup, "__init__")
def a_snapshot_that_is_read_is_given_out(old, self, at, size):
    old(self, at, size)
    self.pool.share = lambda blocks: None
    self._leave = lambda request, slots: None


# In a line each.

bug("a_reader_who_leaves_sends_no_abort", AsyncEngine, "abort", unless(lambda self, name, reason: reason is FinishReason.ABORT))
bug(
    "an_answer_that_is_stopped_by_its_text_runs_on",
    AsyncEngine,
    "abort",
    unless(lambda self, name, reason: reason is FinishReason.STOP),
)
bug("a_call_in_parts_floods_the_queue", _Stream, "_has_room", lambda old, self, tokens: True)
bug(
    "an_output_is_delivered_twice",
    AsyncEngine,
    "_deliver",
    passing(2, lambda outputs: [two for one in outputs for two in [one] * (1 + (not one.finish_reason))]),
)
bug("nobody_is_told_that_the_engine_died", AsyncEngine, "_deliver", passing(3, lambda failure: None))
bug(
    "a_single_output_is_never_handed_over",
    AsyncEngine,
    "_hand_over",
    passing(1, lambda outputs: outputs if len(outputs) != 1 or outputs[0].finish_reason else []),
)
bug("a_deadline_does_not_reach_the_engine", GenerationService, "_expire", lambda old, self, requests: None)
bug("a_deadline_ends_the_first_answer_alone", GenerationService, "_expire", passing(1, lambda requests: requests[:1]))
bug(
    "a_deadline_does_not_count_in_the_queue",
    GenerationService,
    "_expire",
    passing(1, lambda requests: [one for one in requests if one.scheduled_at is not None]),
)
bug("a_deadline_does_not_count_in_preparation", GenerationService, "_prepare", passing(2, lambda deadline: deadline + 1000))
bug("a_call_that_never_began_is_an_empty_answer", generation, "check_begun", lambda old, reason, token="": None)
bug("prompts_cost_a_key_nothing", generation, "_chunk_tokens", lambda old, chunk: len(chunk.token_ids))
bug("prefixes_are_shared_between_salts", Request, "root", lambda old, self: "" if self.adapter is None else self.adapter.digest)
bug("prefixes_are_shared_between_adapters", Request, "root", lambda old, self: self.cache_salt)
bug("all_answers_are_the_first", Preparation, "_request", passing(5, lambda index: 0))
bug(
    "the_end_of_the_text_does_not_end_an_answer",
    Preparation,
    "_ends",
    lambda old, self, command: frozenset(command.stops.stop_token_ids),
)
bug(
    "a_prompt_is_cut_at_its_end",
    Preparation,
    "_truncate",
    lambda old, self, tokens, command: tokens[: command.truncate_prompt_tokens],
)
bug("only_the_first_bad_word_counts", Preparation, "_bad_words", lambda old, self, words: old(self, words)[:2])
bug("the_text_of_a_stop_token_is_shown", Answer, "_texts", lambda old, self, output: output.token_ids)
bug(
    "the_end_of_the_text_is_told_as_a_stop_token",
    Answer,
    "_stop_token",
    lambda old, self, output: output.token_ids[-1] if self._stopped_by_token(output) else None,
)
bug(
    "tokens_after_a_stop_string_count",
    Answer,
    "_chunk",
    lambda old, self, output, parts, count, reason, stop: old(
        self, output, parts, len(output.token_ids) if isinstance(stop, str) else count, reason, stop
    ),
)
bug("what_was_held_back_is_never_shown", Answer, "_end", lambda old, self, reason: ([], None))
bug("stop_strings_are_not_looked_for_in_chats", Answer, "_show", lambda old, self, parts, *, last=False: (parts, None))
bug("what_a_call_did_not_use_is_not_given_back", Lease, "end", lambda old, self: None)
bug("settling_gives_everything_back", _Window, "settle", passing(2, lambda used: 0))
bug("a_caller_who_left_counts_as_an_error", RequestRecord, "_close", told_as("abort", "error"))
bug("a_call_whose_deadline_passed_counts_as_refused", RequestRecord, "_close", told_as("deadline", "rejected"))
bug("refusals_are_counted_under_the_wrong_reason", Metrics, "count_rejection", passing(1, lambda reason: "queue"))
bug("one_block_is_short", BlockTables, "grow", passing(2, lambda num_tokens: num_tokens - 1))
bug("newcomers_go_to_the_head_of_the_queue", Scheduler, "add", afterwards(lambda self, request: self._waiting.rotate(1)))
bug("a_failed_request_has_no_last_output", Scheduler, "commit", without(lambda one: one.finish_reason is FinishReason.ERROR))
bug("steps_stay_as_large_without_memory", Scheduler, "shrink", lambda old, self: None)
bug(
    "the_preempted_go_behind_those_that_came_later",
    Scheduler,
    "_preempt",
    afterwards(lambda self, request: self._waiting.rotate(-1)),
)
bug("a_preempted_answer_begins_anew", Scheduler, "_preempt", afterwards(lambda self, request: request.output.clear()))
bug("prompts_take_all_that_streams_leave", StepCost, "prompt_budget", lambda old, self, streams, prompts, goal_seconds: 1e9)
bug(
    "prompts_beside_streams_get_nothing",
    Scheduler,
    "_share",
    lambda old, self, request, room, least, left, delays: int(min(left, room / 4)),
)
bug("a_part_is_short_though_no_stream_waits", StepCost, "prompt_budget_alone", lambda old, self: self.prompt_budget(1, 1, 0.0))
bug("what_a_step_costs_stays_unknown", StepCost, "learn", lambda old, self, streams, tokens, pairs, seconds: None)
bug("a_single_slow_step_is_believed", StepCost, "learn", lambda old, self, *step: [old(self, *step) for _ in range(60)])
bug("the_oldest_prompt_goes_first_always", Scheduler, "_share_out", going_first(shortest=False))
bug("the_shortest_prompt_goes_first_always", Scheduler, "_share_out", going_first(shortest=True))
bug(
    "a_part_ends_where_the_share_does",
    Scheduler,
    "_part",
    lambda old, self, request, share, first: min(share, request.num_tokens - request.num_computed),
)
bug(
    "a_draft_is_the_answer",
    Scheduler,
    "_take_more",
    lambda old, self, item, output, tokens: old(self, item, output, item.draft),
)
bug(
    "the_tokens_after_right_guesses_are_lost",
    Scheduler,
    "_take_more",
    lambda old, self, item, output, *tokens: old(self, item, output, *tokens) and output,
)
bug("a_draft_is_longer_than_the_budget", Lookups, "guess", passing(2, lambda most_tokens: 1000))
bug("a_block_is_known_by_its_own_tokens_alone", BlockTables, "parent", lambda old, self, request: "")
bug("blocks_out_of_sight_are_kept", BlockTables, "evict_out_of_window", lambda old, self, request: None)
bug("nothing_is_claimed_under_a_window", WindowGroup, "fits", lambda old, self, request, num_tokens: True)
bug("claims_outlive_their_request", WindowGroup, "free", lambda old, self, request: self.restart(request))
bug("what_a_request_went_on_from_stays_held", StateGroup, "_leave", lambda old, self, request, slots: None)
bug("the_state_one_token_later_is_kept", Snapshots, "should_keep", passing(2, lambda end: end - 1))


def dies(seed: int) -> bool:
    """True if a life breaks a law. A planted bug that no longer fits the code would be found by anything: it raises."""
    try:
        Life(seed).run()
    except (TypeError, AttributeError, NameError, KeyError):
        raise
    except Exception:
        return True
    return False


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name):
    with plant(name):
        assert any(dies(seed) for seed in HUNT), f"{len(HUNT)} lives did not show it"


def test_planted_bugs_take_the_arguments_of_what_they_replace():
    """Else every life would end in a TypeError, and the bug be evidence of nothing."""
    for target, attribute, bug in PLANTED.values():
        if callable(old := getattr(target, attribute)):
            given = signature(old).parameters.values()
            positional = [each.name for each in given if each.kind is each.POSITIONAL_OR_KEYWORD]
            signature(bug).bind(old, *positional, **{each.name: None for each in given if each.kind is each.KEYWORD_ONLY})
