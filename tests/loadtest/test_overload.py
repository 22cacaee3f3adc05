"""What an overload finds: late refusals, lost answers, calls that hang, and streams that leave something behind."""

import asyncio
import math
import time
from dataclasses import replace

import pytest

from loadtest import overload
from loadtest.overload import TOKENS, Call, Callers, CpuSeconds, costs, until, verdict

CAPACITY = 10.0
ANSWERED, REFUSED = [Call(3.0, "ok")] * 600, [Call(0.01, "refused")] * 1200


def missed(calls, hung=0, good=CAPACITY):
    return {each.what for each in verdict(calls, hung, (1.2 * CAPACITY, 0.8 * CAPACITY), good) if not each.within_limit}


def test_prompt_refusals_beside_all_answers_are_good():
    assert not missed([*ANSWERED, *REFUSED])


def test_late_refusals_are_found():
    late = [replace(call, seconds=0.06) for call in REFUSED[::50]]
    assert missed([*ANSWERED, *REFUSED, *late]) == {"refused at p99"}


def test_answers_that_come_too_rarely_are_found():
    assert missed([*ANSWERED, *REFUSED], good=0.85 * CAPACITY) == {"capacity lost"}
    assert not missed([*ANSWERED, *REFUSED], good=0.95 * CAPACITY)


def test_answers_a_second_are_counted_by_their_tokens():
    callers = Callers.__new__(Callers)
    began = time.monotonic()

    async def tokens() -> float:
        return 1e6 + TOKENS * 10 * (time.monotonic() - began)

    callers.tokens = tokens
    assert asyncio.run(callers.pace(0.05, 0.2)) == pytest.approx(10, rel=0.2)


def test_hung_calls_and_other_ends_are_found():
    assert missed([*ANSWERED, Call(1, "HTTP 500")], hung=1) == {"hung", "other ends"}


def test_what_a_refusal_costs_is_what_answers_do_not():
    """500 answers at 0.1 s each at capacity; then 600, and 1200 refusals that took 12 s of the server's CPU."""
    found = costs(CpuSeconds(50.0, 5.0), 500, CpuSeconds(72.0, 9.0), [*ANSWERED, *REFUSED])
    assert [round(each.value, 6) for each in found] == [100.0, 10.0, 10.0, 5.0]


@pytest.mark.parametrize("frees", [True, False])
def test_what_is_never_free_is_infinite(monkeypatch, frees):
    monkeypatch.setattr(overload, "HUNG_SECONDS", 0.1)

    async def asked() -> bool:
        return frees

    assert math.isinf(asyncio.run(until(asked, overload.time.monotonic()))) is not frees
