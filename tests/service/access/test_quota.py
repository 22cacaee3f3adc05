"""What a caller may take: in no minute more requests or tokens than its limits, and never more answers at once."""

from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attend.model.errors import InvalidRequest, RateLimited
from attend.service.access.quota import LIMITS, Key, Limits
from tests.conftest import examples
from tests.model.engine.machines import Clock

law = settings(max_examples=examples(150), derandomize=True, deadline=None)
MINUTE = 60.0


def key(clock, **limits):
    return Key("ci", Limits(**limits), clock=clock)


@pytest.fixture
def clock():
    return Clock(1000.0)


small = st.none() | st.integers(1, 4)
some_limits = st.builds(Limits, small, st.none() | st.integers(1, 20), small)
arrivals_law = st.lists(
    st.tuples(
        st.integers(0, 30 * 8),  # eighths of a second since the one before
        st.integers(1, 3),  # answers
        st.integers(0, 12),  # tokens
        st.none() | st.integers(0, 15),  # tokens used
        st.booleans(),  # whether it stays
    ),
    min_size=1,
    max_size=40,
)


class Ledger:
    """What was let in, kept the slow way."""

    def __init__(self, limits):
        self.limits = limits
        self.requests = []
        self.tokens = []
        """[when, how many], which a call's end may lower"""
        self.running = 0

    def fits(self, now, requests=0, answers=0, tokens=0):
        taken = {
            "requests_per_minute": requests and requests + sum(when > now - MINUTE for when in self.requests),
            "tokens_per_minute": tokens and tokens + sum(many for when, many in self.tokens if when > now - MINUTE),
            "concurrent": answers and answers + self.running,
        }
        return all(getattr(self.limits, name) is None or taken[name] <= getattr(self.limits, name) for name in LIMITS)


def never_fits(limits, answers, tokens):
    return (limits.concurrent or answers) < answers or (limits.tokens_per_minute or tokens) < tokens


def call(caller, ledger, clock, answers, tokens):
    """Take one call in, in its three steps, each of which must go as the ledger says. What ends it; None if it was refused."""
    if not ledger.fits(clock.now, requests=1, answers=1):
        with pytest.raises(RateLimited):
            caller.arrive()
        return None
    caller.arrive()
    ledger.requests.append(clock.now)
    held = caller.admit(answers, tokens // 2)
    if never_fits(ledger.limits, answers, tokens // 2) or not ledger.fits(clock.now, answers=answers, tokens=tokens // 2):
        with pytest.raises(InvalidRequest if never_fits(ledger.limits, answers, tokens // 2) else RateLimited):
            held.__enter__()
        return None
    lease, row = held.__enter__(), [clock.now, 0]
    ledger.running += answers
    if never_fits(ledger.limits, answers, tokens) or not ledger.fits(clock.now, tokens=tokens):
        with pytest.raises(InvalidRequest if never_fits(ledger.limits, answers, tokens) else RateLimited):
            lease.reserve(tokens)
    else:
        lease.reserve(tokens)
        row[1] = tokens
        ledger.tokens.append(row)

    def end(used):
        lease.use(used or 0)
        row[1] = min(used or 0, row[1])
        ledger.running -= answers
        held.__exit__(None, None, None)

    return end


@law
@given(some_limits, arrivals_law)
def test_a_call_is_let_in_if_and_only_if_every_limit_holds_in_every_minute(limits, arrivals):
    """No pattern of arrivals exceeds a limit, and none is refused that would not; so refusals take nothing more."""
    clock, ledger = Clock(1000.0), Ledger(limits)
    caller, running = Key("ci", limits, clock=clock), []
    for eighths, answers, tokens, used, stays in arrivals:
        clock.now += eighths / 8
        end = call(caller, ledger, clock, answers, tokens)
        if end is not None:
            running.append((end, used))
        if running and not stays:
            end, used = running.pop(0)
            end(used)
        assert ledger.fits(clock.now, 0, 0, 0)
        assert caller.usage.running == ledger.running
    for end, used in running:
        end(used)
    assert caller.usage.running == 0


@law
@given(st.builds(Limits, small, st.none() | st.integers(12, 20), st.none()), arrivals_law)
def test_who_waits_as_long_as_the_refusal_says_is_let_in(limits, arrivals):
    clock = Clock(1000.0)
    caller = Key("ci", limits, clock=clock)
    for eighths, _, tokens, used, _ in arrivals:
        clock.now += eighths / 8
        for ask in (caller.arrive, lambda: caller.charge(tokens)):  # noqa: B023 - called at once
            wait = refused_for(ask)
            clock.now += wait
            assert not wait or not refused_for(ask)
        caller.usage.tokens.settle(caller.usage.tokens.charges[-1], tokens if used is None else used)


def refused_for(ask):
    """Seconds to wait, or 0 where it is let in."""
    try:
        ask()
    except RateLimited as refusal:
        return refusal.retry_after
    return 0


@law
@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([None, ValueError, KeyboardInterrupt, GeneratorExit])), max_size=20)
)
def test_every_way_out_of_a_call_frees_its_places(ways):
    caller = key(Clock(1000.0), concurrent=2, tokens_per_minute=1000)
    for tokens, way in ways:
        with pytest.raises(way) if way else ExitStack(), caller.admit(2) as lease:
            lease.reserve(tokens)
            lease.use(tokens // 2)
            if way:
                raise way
    assert caller.usage.running == 0
    assert caller.usage.tokens.spent == sum(tokens // 2 for tokens, _ in ways)


def whole(caller, running=None):
    """One call of one answer and one token, up to its last step; it ends with `running`."""
    caller.arrive()
    lease = (running or ExitStack()).enter_context(caller.admit(1, 1))
    lease.reserve(1)


@pytest.mark.parametrize(("name", "wait"), [("requests_per_minute", 60), ("tokens_per_minute", 60), ("concurrent", 1)])
def test_a_refusal_names_the_limit_and_the_key_and_the_wait(clock, name, wait):
    caller = key(clock, **{name: 5})
    with ExitStack() as running:
        for _ in range(5):
            whole(caller, running)
        with pytest.raises(RateLimited, match=f"'ci' has reached its limit {name} = 5; try again in {wait} s") as refusal:
            whole(caller, running)
    assert refusal.value.retry_after == wait


def test_of_several_limits_the_longest_wait_is_told(clock):
    caller = key(clock, requests_per_minute=1, concurrent=1)
    caller.arrive()
    with caller.admit(1), pytest.raises(RateLimited, match="requests_per_minute"):
        caller.arrive()


def test_a_call_for_more_answers_than_its_key_may_ever_have_at_once_is_refused_for_good(clock):
    caller = key(clock, concurrent=7)
    with pytest.raises(InvalidRequest, match="at most 7, the limit concurrent of API key 'ci'; got 8") as refusal:
        caller.admit(8).__enter__()
    assert refusal.value.field == "n"
    with caller.admit(7):
        pass


@pytest.mark.parametrize("ask", [lambda caller: caller.admit(1, 11).__enter__(), lambda caller: caller.charge(11)])
def test_a_call_larger_than_a_whole_minute_is_refused_for_good(clock, ask):
    caller = key(clock, tokens_per_minute=10)
    with pytest.raises(InvalidRequest, match=r"at most 10, the tokens_per_minute of API key 'ci'; got 11") as refusal:
        ask(caller)
    assert refusal.value.field == "max_tokens"
    with caller.admit(1, 10) as lease:
        lease.reserve(10)


def test_a_key_without_limits_keeps_no_more_than_a_minute(clock):
    caller = key(clock)
    for _ in range(1000):
        clock.now += 1
        caller.arrive()
        with caller.admit(5, 5) as lease:
            lease.reserve(5)
    assert len(caller.usage.requests.charges) == len(caller.usage.tokens.charges) == 60
