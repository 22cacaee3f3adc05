"""The laws of a call that takes several tries, for a transport that breaks at every place."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attend.service.client.errors import CallFailed, DeadlinePassed, GaveUp, OtherFingerprint, Refused
from attend.service.client.retry import Call, Delta, Policy, TryFailed, resume
from tests.service.client.tries import CUT, SEED, Try, World

FULL = TryFailed("queue full", again=True, after=3.0)
EVENTS = st.lists(st.integers(0, 3), max_size=4).map(tuple)
ENDS = st.sampled_from([None, CUT, FULL])
TRIES = st.lists(st.builds(Try, EVENTS, ENDS, st.floats(0, 5)), max_size=12)


def run(world: World, call: Call) -> list[Delta]:
    return list(resume(call, world.attempt, world.sleep))


def ended(world: World, call: Call) -> list[Delta] | CallFailed:
    """The deltas, or the error."""
    try:
        return run(world, call)
    except CallFailed as error:
        return error


def is_whole(world: World, deltas: list[Delta], call: Call) -> bool:
    """True if the deltas, joined, are the uncut answer, and the call knows it."""
    tokens = tuple(token for delta in deltas for token in delta.token_ids)
    text = "".join(delta.text for delta in deltas)
    return tokens == world.tokens(call.seed) == call.answer.token_ids and text == world.text(tokens) == call.answer.text


@settings(deadline=None)
@given(st.integers(1, 6), TRIES, st.integers(0, 99))
def test_an_answer_is_the_uncut_one_wherever_its_streams_break(length, tries, chance):
    world = World(length, tries)
    call = Call(world.policy(random.Random(chance), seconds=1e9, tries=20), SEED)
    assert is_whole(world, run(world, call), call)
    assert world.seeds == {SEED}
    assert call.answer.tries == len(world.begun)


@settings(deadline=None)
@given(st.integers(1, 6), TRIES, st.integers(1, 4))
def test_no_more_tries_in_a_row_than_allowed_bring_nothing_new(length, tries, most):
    world = World(length, tries)
    call = Call(world.policy(seconds=1e9, tries=most), SEED)
    end = ended(world, call)
    if isinstance(end, GaveUp):
        assert world.begun.count(call.received_tokens) == most
        assert end.answer.token_ids == world.tokens(SEED)[: len(end.answer.token_ids)]
    else:
        assert is_whole(world, end, call)
    assert max(world.begun.count(after) for after in world.begun) <= most


@settings(deadline=None)
@given(st.integers(1, 6), TRIES, st.floats(0.1, 20))
def test_the_deadline_is_kept_with_all_waits(length, tries, seconds):
    world = World(length, tries)
    call = Call(world.policy(seconds=seconds, tries=99), SEED)
    end = ended(world, call)
    if isinstance(end, DeadlinePassed):
        assert end.answer.token_ids == world.tokens(SEED)[: len(end.answer.token_ids)]
    else:
        assert is_whole(world, end, call)
    assert world.now <= 100.0 + seconds + 1e-6


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(0, 99))
def test_a_wait_is_what_the_server_asks_for_and_up_to_a_bound_that_doubles(failures, chance):
    world = World(1, [Try(end=FULL)] * failures)
    call = Call(world.policy(random.Random(chance), seconds=1e9, tries=99, first_wait=0.5, longest_wait=4.0), SEED)
    run(world, call)
    assert [3.0 <= wait <= 3.0 + bound for wait, bound in zip(world.waits, [0.5, 1, 2, *[4] * 9], strict=False)] == [
        True
    ] * failures


def test_waits_fill_their_range():
    waits = [Policy(first_wait=1.0, draw=random.Random(chance)).wait(1) for chance in range(200)]
    assert min(waits) < 0.1 and max(waits) > 0.9 and 0.4 < sum(waits) / 200 < 0.6


def test_a_try_that_brings_a_token_begins_the_count_anew():
    world = World(5, [Try((), CUT), Try((1,), CUT)] * 4)
    call = Call(world.policy(tries=2), SEED)
    assert is_whole(world, run(world, call), call)


def test_what_may_not_be_tried_again_is_not():
    world = World(5, [Try((2,), TryFailed("bad", again=False, code="invalid_value"))])
    with pytest.raises(Refused, match="bad") as caught:
        run(world, Call(world.policy(), SEED))
    assert (caught.value.code, len(world.begun)) == ("invalid_value", 1)
    assert caught.value.answer.token_ids == world.tokens(SEED)[:2]


def test_an_answer_never_goes_on_with_another_fingerprint():
    world = World(5, [Try((1, 2), CUT), Try((1, 1), None, 0, "fp_other")])
    call = Call(world.policy(), SEED)
    with pytest.raises(OtherFingerprint, match="fp_other") as caught:
        run(world, call)
    assert caught.value.answer.token_ids == world.tokens(SEED)[:3]
    assert caught.value.answer.text == world.text(world.tokens(SEED)[:3])
    assert caught.value.answer.fingerprint == "fp"


def test_a_failure_after_the_last_token_changes_nothing():
    world = World(2, [Try((1, 1, 1), CUT)])
    call = Call(world.policy(), SEED)
    assert is_whole(world, run(world, call), call)
    assert len(world.begun) == 1


@settings(deadline=None)
@given(st.integers(0, 4))
def test_tokens_of_an_earlier_call_are_gone_on_after_and_not_given_again(before):
    world = World(5, [Try((1,), CUT)])
    call = Call(world.policy(), SEED, world.tokens(SEED)[:before])
    run(world, call)
    assert call.answer.token_ids == world.tokens(SEED)[before:]


def test_a_call_without_a_seed_draws_one_and_keeps_it():
    world = World(3, [Try((1,), CUT), Try((), CUT)])
    call = Call(world.policy(random.Random(5)), None)
    assert is_whole(world, run(world, call), call)
    assert world.seeds == {call.seed} == {call.answer.seed}
    assert 0 <= call.seed < 1 << 48
    assert Call(Policy(), None).seed != Call(Policy(), None).seed


def test_a_caller_who_stops_reading_ends_the_try():
    world, ended = World(5), []

    def attempt(call: Call):
        try:
            yield from world.attempt(call)
        finally:
            ended.append(True)

    deltas = resume(Call(world.policy(), SEED), attempt, world.sleep)
    next(deltas)
    deltas.close()
    assert ended == [True]


@pytest.mark.parametrize("wrong", [{"tries": 0}, {"seconds": 0}, {"first_wait": -1}, {"longest_wait": float("nan")}])
def test_a_policy_that_cannot_be_followed_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Policy(**wrong)
