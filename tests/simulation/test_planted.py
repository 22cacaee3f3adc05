"""Each bug that is planted in the service is found by its simulation, so that the simulation is evidence."""

from array import array
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
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
from attend.service.generation.text import StopSearch, TextStream
from attend.service.generation.thread_pools import FairSemaphore, TurnPool
from attend.service.observe.metrics import Metrics, RequestRecord
from tests.simulation.life import Life

HUNT = [221, 30, 68, 75, *range(300)]
"""Seeds within which a planted bug must show: a part of those that the tests run. First those under which the rarest do."""
Make = Callable[[Any], Any]
PLANTED: dict[str, tuple[object, str, Make]] = {}


def planted(target: object, name: str) -> Callable[[Make], Make]:
    """Register a bug: given the function that stands there, it makes the wrong one."""

    def register(make: Make) -> Make:
        PLANTED[make.__name__] = (target, name, make)
        return make

    return register


# In the step thread and its bridge to the event loop.


@planted(AsyncEngine, "abort")
def a_reader_who_leaves_sends_no_abort(old):
    return lambda self, name, reason: None if reason is FinishReason.ABORT else old(self, name, reason)


@planted(AsyncEngine, "abort")
def an_answer_that_is_stopped_by_its_text_runs_on(old):
    return lambda self, name, reason: None if reason is FinishReason.STOP else old(self, name, reason)


@planted(_Stream, "_has_room")
def a_call_in_parts_floods_the_queue(old):
    return lambda self, tokens: True


@planted(AsyncEngine, "_deliver")
def an_output_is_delivered_twice(old):
    return lambda self, loop, outputs, failure: old(
        self, loop, [two for one in outputs for two in ((one,) if one.finish_reason else (one, one))], failure
    )


@planted(AsyncEngine, "_deliver")
def an_output_goes_to_another(old):
    def deliver(self, loop, outputs, failure):
        if len(outputs) > 1 and all(output.finish_reason is None for output in outputs):
            names = [output.request_id for output in outputs]
            outputs = [output._replace(request_id=name) for output, name in zip(outputs, reversed(names), strict=True)]
        old(self, loop, outputs, failure)

    return deliver


@planted(AsyncEngine, "_deliver")
def an_output_is_lost_while_another_waits(old):
    def deliver(self, loop, outputs, failure):
        unread = {name for name, stream in self._streams.items() if stream.outputs}
        old(self, loop, [each for each in outputs if each.request_id not in unread or each.finish_reason], failure)

    return deliver


@planted(AsyncEngine, "_deliver")
def nobody_is_told_that_the_engine_died(old):
    return lambda self, loop, outputs, failure: old(self, loop, outputs, None)


@planted(AsyncEngine, "_deliver")
def streams_are_kept_after_their_end(old):
    def deliver(self, loop, outputs, failure):
        before = dict(self._streams)
        old(self, loop, outputs, failure)
        self._streams |= {name: stream for name, stream in before.items() if name.endswith("-0")}

    return deliver


@planted(AsyncEngine, "_hand_over")
def a_single_output_is_never_handed_over(old):
    return lambda self, outputs, failure: old(self, outputs if len(outputs) != 1 or outputs[0].finish_reason else [], failure)


@planted(AsyncEngine, "_command")
def commands_do_not_wake_the_step_thread(old):
    def command(self, *commands):
        self._commands.extend(commands)
        return not self._over

    return command


@planted(AsyncEngine, "_finish")
def closing_forgets_who_waits(old):
    def finish(self):
        waiting, self._engine.scheduler._waiting = self._engine.scheduler._waiting, type(self._engine.scheduler._waiting)()
        for request in waiting:
            del self._engine.scheduler._by_id[request.request_id]
        return old(self)

    return finish


@planted(AsyncEngine, "drain")
def draining_forgets_the_queue(old):
    async def drain(self, seconds):
        queued = {request.request_id for request in self._engine.scheduler._waiting}
        streams, self._streams = self._streams, {name: one for name, one in self._streams.items() if name not in queued}
        task = old(self, seconds)
        self._streams = streams
        abort, self.abort = self.abort, lambda name, reason: None if name in queued else abort(name, reason)
        await task
        self.abort = abort

    return drain


@planted(AsyncEngine, "_open")
def a_draining_engine_takes_requests(old):
    def open_(self, requests, at_once=None):
        draining, self._draining = self._draining, False
        try:
            return old(self, requests, at_once)
        finally:
            self._draining = draining

    return open_


@planted(AsyncEngine, "_open")
def the_queue_has_one_place_too_many(old):
    def open_(self, requests, at_once=None):
        self._capacity += 1
        try:
            return old(self, requests, at_once)
        finally:
            self._capacity -= 1

    return open_


# In the way from a call to its chunks.


@planted(GenerationService, "_expire")
def a_deadline_does_not_reach_the_engine(old):
    return lambda self, requests: None


@planted(GenerationService, "_expire")
def a_deadline_ends_the_first_answer_alone(old):
    return lambda self, requests: old(self, requests[:1])


@planted(GenerationService, "_expire")
def a_deadline_does_not_count_in_the_queue(old):
    return lambda self, requests: old(self, [request for request in requests if request.scheduled_at is not None])


@planted(GenerationService, "_prepare")
def a_deadline_does_not_count_in_preparation(old):
    return lambda self, command, deadline: old(self, command, deadline + 1000)


@planted(generation, "check_begun")
def a_call_that_never_began_is_an_empty_answer(old):
    return lambda reason, token="": None


@planted(GenerationService, "_last_chunk")
def an_answer_that_ended_goes_on(old):
    def ended(self, chunk, output, request):
        chunk = old(self, chunk, output, request)
        return replace(chunk, finish_reason=FinishReason.LENGTH) if chunk.finish_reason is FinishReason.DEADLINE else chunk

    return ended


@planted(generation, "_chunk_tokens")
def prompts_cost_a_key_nothing(old):
    return lambda chunk: len(chunk.token_ids)


@planted(Request, "root")
def prefixes_are_shared_between_salts(old):
    return property(lambda self: "" if self.adapter is None else self.adapter.digest)


@planted(Request, "root")
def prefixes_are_shared_between_adapters(old):
    return property(lambda self: self.cache_salt)


# In preparation.


@planted(Preparation, "_request")
def all_answers_are_the_first(old):
    return lambda self, name, prompt, command, seed, index: old(self, name, prompt, command, seed, 0)


@planted(Preparation, "_read")
def prompts_are_mixed_up(old):
    def read(self, command, prompts):
        made = old(self, command, prompts)
        made.prompts.reverse()
        return made

    return read


@planted(Preparation, "_ends")
def the_end_of_the_text_does_not_end_an_answer(old):
    return lambda self, command: frozenset(command.stops.stop_token_ids)


@planted(Preparation, "_truncate")
def a_prompt_is_cut_at_its_end(old):
    return lambda self, tokens, command: tokens[: command.truncate_prompt_tokens]


@planted(Preparation, "_bad_words")
def only_the_first_bad_word_counts(old):
    return lambda self, words: old(self, words)[:2]


@planted(prepare, "_start_grammar")
def answers_share_one_grammar(old):
    kept: dict[int, Any] = {}
    return lambda compiled, received: kept.setdefault(id(compiled), old(compiled, received))


@planted(Answer, "resume")
def a_resumed_answer_forgets_its_text(old):
    def resume(self):
        self.num_tokens = len(self.request.output)

    return resume


# In answers and their texts.


@planted(Answer, "_texts")
def the_text_of_a_stop_token_is_shown(old):
    return lambda self, output: output.token_ids


@planted(Answer, "_stop_token")
def the_end_of_the_text_is_told_as_a_stop_token(old):
    return lambda self, output: output.token_ids[-1] if self._stopped_by_token(output) else None


@planted(Answer, "_chunk")
def tokens_after_a_stop_string_count(old):
    def chunk(self, output, parts, count, reason, stop):
        return old(self, output, parts, len(output.token_ids) if isinstance(stop, str) else count, reason, stop)

    return chunk


@planted(Answer, "_chunk")
def an_answer_stopped_by_its_text_is_told_as_cut_off(old):
    def chunk(self, output, parts, count, reason, stop):
        reason = FinishReason.LENGTH if isinstance(stop, str) else reason
        return old(self, output, parts, count, reason, stop)

    return chunk


@planted(TextStream, "show")
def a_stop_string_leaks(old):
    def show(self, piece, *, last=False):
        text, stop = old(self, piece, last=last)
        if stop is None:
            text, self._held = text + self._held, ""
        return text, stop

    return show


@planted(Answer, "_end")
def what_was_held_back_is_never_shown(old):
    return lambda self, reason: ([], None)


@planted(TextStream, "show")
def stop_strings_count_before_min_tokens(old):
    def show(self, piece, *, last=False):
        stops, self._stops = self._stops, replace(self._stops, min_tokens=0)
        try:
            return old(self, piece, last=last)
        finally:
            self._stops = stops

    return show


@planted(Answer, "_show")
def stop_strings_are_not_looked_for_in_chats(old):
    return lambda self, parts, *, last=False: (parts, None)


@planted(StopSearch, "feed")
def a_stop_string_over_two_pieces_is_missed(old):
    def feed(self, piece):
        self.matched = 0
        return old(self, piece)

    return feed


# In what keys pay.


@planted(Lease, "end")
def what_a_call_did_not_use_is_not_given_back(old):
    return lambda self: None


@planted(Lease, "use")
def only_the_last_tokens_are_paid(old):
    def use(self, tokens):
        self.used = tokens

    return use


@planted(Lease, "reserve")
def a_call_reserves_twice(old):
    def reserve(self, tokens):
        old(self, tokens)
        self._key.charge(tokens)

    return reserve


@planted(Key, "admit")
def answers_hold_their_places_where_a_call_fails(old):
    @contextmanager
    def admit(self, answers, tokens=0):
        with old(self, answers, tokens) as lease:
            try:
                yield lease
            except Exception:
                self.usage.running += answers
                raise

    return admit


@planted(Key, "arrive")
def a_refused_request_is_charged(old):
    def arrive(self, answers=1):
        try:
            old(self, answers)
        except Exception:
            self.usage.requests.take(1, self._clock())
            raise

    return arrive


@planted(Key, "_check")
def a_limit_lets_one_through(old):
    def check(self, now, requests=0, answers=0, tokens=0):
        old(self, now, requests, max(0, answers - 1), tokens)

    return check


@planted(_Window, "settle")
def settling_gives_everything_back(old):
    return lambda self, charge, used: old(self, charge, 0)


# In what is counted.


@planted(RequestRecord, "_close")
def a_call_is_counted_twice(old):
    def close(self, outcome, error=None):
        old(self, outcome, error)
        self._closed = False

    return close


@planted(RequestRecord, "_close")
def a_caller_who_left_counts_as_an_error(old):
    return lambda self, outcome, error=None: old(self, "error" if outcome == "abort" and error else outcome, error)


@planted(RequestRecord, "_close")
def a_call_whose_deadline_passed_counts_as_refused(old):
    return lambda self, outcome, error=None: old(self, "rejected" if outcome == "deadline" and error else outcome, error)


@planted(RequestRecord, "_answer_ends")
def the_last_answer_gives_a_call_its_outcome(old):
    def ended(self, chunk, now):
        old(self, chunk, now)
        self._reasons = dict.fromkeys(self._reasons, chunk.finish_reason)

    return ended


@planted(RequestRecord, "_answer_begins")
def a_prompt_counts_for_each_of_its_answers(old):
    def begun(self, chunk, n):
        self._prompts.discard(chunk.index // n)
        old(self, chunk, n)

    return begun


@planted(RequestRecord, "count_delivered")
def tokens_that_nobody_got_are_counted(old):
    def delivered(self, chunks, n):
        old(self, chunks, n)
        self._count_tokens()

    return delivered


@planted(Metrics, "count_rejection")
def refusals_are_counted_under_the_wrong_reason(old):
    return lambda self, reason: old(self, "queue")


# In work beside the event loop.


@planted(FairSemaphore, "hold")
def places_are_kept_where_work_fails(old):
    @contextmanager
    def hold(self, owner, amount=1):
        with old(self, owner, amount):
            try:
                yield
            except Exception:
                self._change(owner, amount)
                raise

    return hold


@planted(FairSemaphore, "hold")
def places_are_kept_where_a_caller_leaves(old):
    @contextmanager
    def hold(self, owner, amount=1):
        with old(self, owner, amount):
            try:
                yield
            except BaseException as error:
                if not isinstance(error, Exception):
                    self._change(owner, amount)
                raise

    return hold


@planted(TurnPool, "submit")
def work_behind_other_work_is_never_begun(old):
    def submit(self, owner, work, size=0):
        threads, busy = self._threads, bool(self._waiting)
        if busy:
            self._threads = type("Nobody", (), {"submit": lambda self, work: None})()
        try:
            return old(self, owner, work, size)
        finally:
            self._threads = threads

    return submit


# In the scheduler.


@planted(Scheduler, "abort")
def blocks_of_an_aborted_request_are_not_freed(old):
    def abort(self, name, reason):
        with patch.object(self.tables.groups[0].pool, "free", lambda blocks: None):
            return old(self, name, reason)

    return abort


@planted(BlockTables, "grow")
def one_block_is_short(old):
    return lambda self, request, num_tokens: old(self, request, num_tokens - 1)


@planted(Scheduler, "add")
def newcomers_go_to_the_head_of_the_queue(old):
    return lambda self, request: (old(self, request), self._waiting.rotate(1))[0]


def with_priority(old, change):
    def add(self, request):
        priority, request.priority = request.priority, change(request.priority)
        old(self, request)
        request.priority = priority

    return add


@planted(Scheduler, "add")
def requests_go_by_age_alone(old):
    return with_priority(old, lambda priority: 5)


@planted(Scheduler, "add")
def requests_go_by_priority_alone(old):
    return with_priority(old, lambda priority: 1000 * priority)


@planted(Scheduler, "_preempt")
def a_preempted_request_goes_on_where_it_stood(old):
    def preempt(self, request):
        stood, skip = request.num_computed, self.tables.skip_known

        def skip_known(other):
            skip(other)
            other.num_computed = max(other.num_computed, stood if other is request else 0)

        old(self, request)
        self.tables.skip_known = skip_known

    return preempt


@planted(Scheduler, "_take")
def a_stop_token_does_not_end_the_request(old):
    def take(self, request, token, scores):
        stops, request.stop_token_ids = request.stop_token_ids, frozenset()
        output = old(self, request, token, scores)
        request.stop_token_ids = stops
        return output

    return take


@planted(Scheduler, "_take")
def max_tokens_is_overrun_by_one(old):
    def take(self, request, token, scores):
        request.max_tokens += 1
        output = old(self, request, token, scores)
        request.max_tokens -= 1
        return output

    return take


@planted(Scheduler, "commit")
def the_token_of_an_aborted_request_is_handed_out(old):
    def commit(self, plan, result, dropped_plan=None):
        gone = [item.request.request_id for item in plan.scheduled_tokens if item.request.finish_reason is not None]
        late = [Output(name, (result.tokens[name],)) for name in gone if name in result.tokens]
        return old(self, plan, result, dropped_plan) + late

    return commit


@planted(Scheduler, "commit")
def the_last_output_comes_twice(old):
    def commit(self, plan, result, dropped_plan=None):
        outputs = old(self, plan, result, dropped_plan)
        return outputs + [output for output in outputs if output.finish_reason is not None]

    return commit


@planted(Scheduler, "commit")
def a_failed_request_has_no_last_output(old):
    def commit(self, plan, result, dropped_plan=None):
        return [one for one in old(self, plan, result, dropped_plan) if one.finish_reason is not FinishReason.ERROR]

    return commit


@planted(Scheduler, "commit")
def a_request_that_was_put_off_counts_as_computed(old):
    return lambda self, plan, result, dropped_plan=None: old(
        self, plan, replace(result, put_off={}, tokens={**dict.fromkeys(result.put_off, 0), **result.tokens}), dropped_plan
    )


@planted(Scheduler, "commit")
def blocks_of_a_failed_step_stay_known(old):
    def commit(self, plan, result, dropped_plan=None):
        with patch.object(self.tables.groups[0].pool, "forget", lambda blocks: None):
            return old(self, plan, result, dropped_plan)

    return commit


@planted(Scheduler, "shrink")
def steps_stay_as_large_without_memory(old):
    return lambda self: None


@planted(Scheduler, "schedule")
def the_budget_is_one_token_larger(old):
    def schedule(self):
        self.budget += 1
        try:
            return old(self)
        finally:
            self.budget -= 1

    return schedule


@planted(Scheduler, "_admit")
def a_batch_has_one_request_too_many(old):
    def admit(self):
        config, self.config = self.config, replace(self.config, max_batch_requests=self.config.max_batch_requests + 1)
        try:
            return old(self)
        finally:
            self.config = config

    return admit


@planted(Scheduler, "_make_room")
def blocks_are_taken_from_the_oldest(old):
    def make_room(self, request, num_tokens):
        while request.room and not self.tables.grow(request, num_tokens):
            self._preempt(self._running[0])

    return make_room


@planted(Scheduler, "_preempt")
def the_preempted_go_behind_those_that_came_later(old):
    return lambda self, request: (old(self, request), self._waiting.rotate(-1))[0]


@planted(Scheduler, "_preempt")
def a_preempted_answer_begins_anew(old):
    return lambda self, request: (old(self, request), request.output.clear())[0]


@planted(Scheduler, "_streams")
def prompts_take_the_budget(old):
    def streams(self):
        plan, prompts = old(self)
        return ([], prompts) if prompts else (plan, prompts)

    return streams


@planted(StepCost, "room")
def prompts_take_all_that_streams_leave(old):
    return lambda self, streams, prompts, goal_seconds: 1e9


@planted(Scheduler, "_share")
def prompts_beside_streams_get_nothing(old):
    return lambda self, request, room, least, left, delays: int(min(left, room / 4))


@planted(StepCost, "room_alone")
def a_part_is_short_though_no_stream_waits(old):
    return lambda self: self.room(1, 1, 0.0)


@planted(StepCost, "learn")
def what_a_step_costs_stays_unknown(old):
    return lambda self, streams, tokens, pairs, seconds: None


@planted(StepCost, "learn")
def a_single_slow_step_is_believed(old):
    return lambda self, *step: [old(self, *step) for _ in range(60)]


def first_is(shortest):
    def make(old):
        def share_out(self, prompts, room, left):
            for account in self._shares._accounts.values():
                account.shortest_next = shortest
            return old(self, prompts, room, left)

        return share_out

    return make


@planted(Scheduler, "_share_out")
def the_oldest_prompt_goes_first_always(old):
    return first_is(shortest=False)(old)


@planted(Scheduler, "_share_out")
def the_shortest_prompt_goes_first_always(old):
    return first_is(shortest=True)(old)


@planted(Scheduler, "_part")
def a_part_ends_where_the_share_does(old):
    return lambda self, request, share, first: min(share, request.num_tokens - request.num_computed)


@planted(Scheduler, "_part")
def what_fits_is_cut(old):
    def part(self, request, share, first):
        missing = request.num_tokens - request.num_computed
        return old(self, request, share - (missing == share > 1), first)

    return part


@planted(Scheduler, "_begin")
def lookups_are_not_counted(old):
    def begin(self, request):
        queries = self.num_prefix_queries
        old(self, request)
        self.num_prefix_queries = queries

    return begin


@planted(Scheduler, "_admit")
def hits_after_a_preemption_count_again(old):
    def admit(self):
        admitted = old(self)
        for request in admitted:
            again = request.num_computed if request.num_preemptions else 0
            request.num_cached += again
            self.num_prefix_hits += again
        return admitted

    return admit


# In guesses.


@planted(Scheduler, "_take_more")
def a_draft_is_the_answer(old):
    return lambda self, item, output, tokens: old(self, item, output, item.draft)


@planted(Scheduler, "_take_more")
def the_tokens_after_right_guesses_are_lost(old):
    return lambda self, item, output, tokens: (old(self, item, output, tokens), output)[1]


@planted(Scheduler, "_take_more")
def a_right_guess_outlives_the_end(old):
    def take_more(self, item, output, tokens):
        stops, item.request.stop_token_ids = item.request.stop_token_ids, frozenset()
        output = old(self, item, output, tokens)
        item.request.stop_token_ids = stops
        return output

    return take_more


@planted(Scheduler, "_take_more")
def a_right_draft_moves_the_state_on(old):
    def take_more(self, item, output, tokens):
        output = old(self, item, output, tokens)
        item.request.num_computed += item.request.num_replayed
        item.request.num_replayed = 0
        return output

    return take_more


@planted(Lookups, "guess")
def a_draft_is_longer_than_the_budget(old):
    return lambda self, streams, most_tokens, tables: old(self, streams, 1000, tables)


@planted(Lookups, "guess")
def a_guess_has_no_blocks(old):
    def guess(self, streams, most_tokens, tables):
        with patch.object(tables, "grow", lambda request, num_tokens: True):
            return old(self, streams, most_tokens, tables)

    return guess


# In steps that begin early.


@planted(Scheduler, "schedule_async")
def a_step_begins_early_without_blocks(old):
    def schedule_async(self, plan):
        with patch.object(self.tables, "grow", lambda request, num_tokens: True):
            return old(self, plan)

    return schedule_async


@planted(Scheduler, "schedule_async")
def somebody_gives_way_for_a_step_that_begins_early(old):
    def schedule_async(self, plan):
        for request in tuple(self._running):
            if request.room:
                self._make_room(request, request.num_tokens + 1)
        return old(self, plan)

    return schedule_async


@planted(Scheduler, "schedule_async")
def who_waits_is_passed_over(old):
    def schedule_async(self, plan):
        with patch.object(self, "_waiting", deque()):
            return old(self, plan)

    return schedule_async


@planted(Scheduler, "schedule_async")
def prompts_are_passed_over(old):
    def schedule_async(self, plan):
        drawing = [item.request for item in plan.scheduled_tokens if item.draws]
        with patch.object(self, "_running", [request for request in self._running if request in drawing]):
            return old(self, plan)

    return schedule_async


@planted(Scheduler, "schedule_async")
def blocks_of_a_failed_early_step_stay_known(old):
    def schedule_async(self, plan):
        following = old(self, plan)
        self.tables.known_next = None
        return following

    return schedule_async


@planted(Scheduler, "_followers")
def a_part_that_is_under_way_is_computed_twice(old):
    def followers(self, drawing):
        found = old(self, drawing)
        for request in found[1]:
            request.num_computed = max(0, request.num_computed - self.config.block_size)
        return found

    return followers


@planted(Scheduler, "schedule_async")
def who_draws_the_last_token_is_followed(old):
    def schedule_async(self, plan):
        for request in self._running:
            request.max_tokens += 1
        try:
            return old(self, plan)
        finally:
            for request in self._running:
                request.max_tokens -= 1

    return schedule_async


@planted(Scheduler, "schedule_async")
def a_block_is_known_before_its_last_token(old):
    def schedule_async(self, plan):
        following, size = old(self, plan), self.config.block_size
        for item in following.scheduled_tokens if following is not None else ():
            at = item.start // size
            if (item.start + 1) % size == 0 and item.request.num_known == at and self.config.prefix_caching:
                tokens = [*item.request.tokens(at * size, size - 1), 0]
                parent = self.tables.parent(item.request)
                self.tables.groups[0].pool.remember(parent, tokens, item.request.tables[0][at])
        return following

    return schedule_async


# In blocks and the prefix cache.


@planted(BlockPool, "free")
def a_freed_block_is_free_twice(old):
    def free(self, blocks):
        blocks = list(blocks)
        old(self, blocks)
        self._free.update(dict.fromkeys(blocks[:1]))

    return free


@planted(BlockPool, "share")
def a_shared_block_stays_free(old):
    def share(self, blocks):
        free = self._free.copy()
        old(self, blocks)
        self._free = free

    return share


@planted(BlockTables, "skip_known")
def a_known_prompt_leaves_no_token_to_compute(old):
    def skip_known(self, request):
        old(self, request)
        size, pool = self.config.block_size, self.groups[0].pool
        found = pool.find(self.parent(request), request.tokens(request.num_computed, size))
        if found is not None and request.num_computed + size == request.num_tokens:
            pool.share(found[:1])
            request.tables[0].append(found[0])
            request.num_computed += size

    return skip_known


@planted(BlockTables, "parent")
def a_block_is_known_by_its_own_tokens_alone(old):
    return lambda self, request: ""


@planted(Scheduler, "_plan_chunk")
def a_block_is_known_from_its_first_token_on(old):
    def plan_chunk(self, request, count):
        item = old(self, request, count)
        at, size = request.num_known, self.config.block_size
        if self.config.prefix_caching and (item.start + count) % size:
            padded = [*request.tokens(at * size, size), *[0] * size][:size]
            self.tables.groups[0].pool.remember(self.tables.parent(request), padded, request.tables[0][at])
        return item

    return plan_chunk


# In windows.


@planted(BlockTables, "evict_out_of_window")
def a_block_goes_back_one_block_early(old):
    def evict(self, request):
        request.num_computed += self.config.block_size
        old(self, request)
        request.num_computed -= self.config.block_size

    return evict


@planted(BlockTables, "evict_out_of_window")
def a_block_goes_back_one_token_early(old):
    def evict(self, request):
        request.num_computed += 1
        old(self, request)
        request.num_computed -= 1

    return evict


@planted(BlockTables, "evict_out_of_window")
def blocks_out_of_sight_are_kept(old):
    return lambda self, request: None


def with_spans(old, change):
    def init(self, config):
        old(self, config)
        for _, group in self.others:
            group.span = change(group.span)

    return init


@planted(BlockTables, "__init__")
def a_prefix_is_found_that_a_window_lacks(old):
    return with_spans(old, lambda span: 0)


@planted(BlockTables, "__init__")
def a_prefix_is_found_one_block_too_early(old):
    return with_spans(old, lambda span: span - 1)


@planted(BlockTables, "__init__")
def blocks_of_a_failed_step_stay_known_under_a_window(old):
    def init(self, config):
        old(self, config)
        for pool in [group.pool for _, group in self.others]:
            pool.forget_since = lambda number, but=(): set()
            pool.forget = lambda blocks, pool=pool, forget=pool.forget: forget(b for b in blocks if b not in pool._holders)

    return init


@planted(WindowGroup, "fits")
def nothing_is_claimed_under_a_window(old):
    return lambda self, request, num_tokens: True


@planted(WindowGroup, "free")
def claims_outlive_their_request(old):
    return lambda self, request: self.restart(request)


# In recurrent states.


@planted(StateGroup, "grow")
def all_requests_have_one_state(old):
    def grow(self, request, num_tokens):
        request.slot = 1
        request.tables[self._at] = request.tables[self._at] or array("q", [1])

    return grow


@planted(Scheduler, "commit")
def a_state_moves_after_a_step(old):
    def commit(self, plan, result, dropped_plan=None):
        for request in self._running if self.tables.has_states else ():
            pool = self.tables.groups[-1].pool
            if pool.num_free and [request.slot] == list(request.tables[-1]):
                [place] = pool.allocate(1)
                pool.free([request.slot])
                request.slot = request.tables[-1][0] = place
        return old(self, plan, result, dropped_plan)

    return commit


@planted(StateGroup, "__init__")
def a_snapshot_is_written_by_the_next_step(old):
    def init(self, at, size):
        old(self, at, size)
        self.advance = lambda request, keep: request.slot if keep else 0
        self.remember = lambda request, slot, number: self.has(number) or bool(self.pool.remember(number, (), slot))

    return init


@planted(StateGroup, "__init__")
def a_prefix_is_found_that_has_no_state(old):
    def init(self, at, size):
        old(self, at, size)
        self.span, share = 0, self.share
        self.share = lambda request, start, blocks: share(request, start, known) if (known := [*filter(None, blocks)]) else None

    return init


@planted(BlockTables, "advance")
def a_snapshot_is_found_in_the_step_that_writes_it(old):
    def advance(self, request, end, *, pending=False):
        slot = old(self, request, end, pending=pending)
        if slot and not pending:
            self.keep(request, slot)
        return slot

    return advance


@planted(StateGroup, "_leave")
def what_a_request_went_on_from_stays_held(old):
    return lambda self, request, slots: None


@planted(BlockTables, "keep")
def a_snapshot_is_known_one_block_later(old):
    def keep(self, request, slot):
        request.parent += 1
        old(self, request, slot)
        request.parent -= 1

    return keep


@planted(Snapshots, "should_keep")
def the_state_one_token_later_is_kept(old):
    return lambda self, request, end, *, pending: old(self, request, end - 1, pending=pending)


@planted(Scheduler, "commit")
def the_state_of_a_failed_step_is_known(old):
    def commit(self, plan, result, dropped_plan=None):
        tables = self.tables
        for item in plan.scheduled_tokens:
            if item.snapshot and item.request.request_id in result.errors:
                tables.keep(item.request, item.snapshot)
        if not tables.has_states:
            return old(self, plan, result, dropped_plan)
        with patch.multiple(tables, forget=lambda request: None, forget_step=lambda: [set() for _ in tables.groups]):
            return old(self, plan, result, dropped_plan)

    return commit


@planted(StateGroup, "__init__")
def a_snapshot_that_is_read_is_given_out(old):
    def init(self, at, size):
        old(self, at, size)
        self.pool.share = lambda blocks: None
        self._leave = lambda request, slots: None

    return init


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
    target, attribute, make = PLANTED[name]
    with ExitStack() as stack:
        stack.enter_context(patch.object(target, attribute, make(getattr(target, attribute))))
        assert any(dies(seed) for seed in HUNT), f"{len(HUNT)} lives did not show it"


def test_planted_bugs_take_the_arguments_of_what_they_replace():
    """Else every life would end in a TypeError, and the bug be evidence of nothing."""
    for target, attribute, make in PLANTED.values():
        if callable(old := getattr(target, attribute)):
            given = signature(old).parameters.values()
            positional = [each.name for each in given if each.kind is each.POSITIONAL_OR_KEYWORD]
            signature(make(old)).bind(*positional, **{each.name: None for each in given if each.kind is each.KEYWORD_ONLY})
