"""Each bug that is planted in the service is found by its simulation, so that the simulation is evidence."""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any
from unittest.mock import patch

import pytest

from attend.model.engine.loop import AsyncEngine, _Stream
from attend.model.engine.request import FinishReason, Request
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
