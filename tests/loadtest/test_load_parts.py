"""The parts of the load test that need no locust: prompts, profiles, loops, clocks, sums, objectives, the search."""

import importlib
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile

import pytest

from loadtest.capacity import highest
from loadtest.lengths import lengths
from loadtest.loops import OpenLoop, TraceLoop
from loadtest.measures import Row, read, since, total
from loadtest.profiles import PROFILES
from loadtest.prompts import MIXES, Workload, draw
from loadtest.report import Sample, phases
from loadtest.server import StartError, ready_server
from loadtest.slo import Objectives
from loadtest.stream import FailedError, RefusedError, Stream
from loadtest.traces import BLOCK, SHIPPED, Call, made_trace, read_trace

SHARES = [each / 200 for each in range(201)]


@dataclass
class Entry:
    """A row of locust's statistics."""

    method: str
    name: str
    num_requests: int = 0
    num_failures: int = 0
    total_content_length: int = 0
    response_times: dict = field(default_factory=dict)


def rows(ttft=100.0, itl=10.0, failures=0, refused=0, transport="HTTP"):
    """What ten answers of equal times add up to."""
    entries = [
        Entry("TOTAL", f"{transport} short", 10, failures, 640, {500.0: 10}),
        Entry("TTFT", f"{transport} short", 10, 0, 0, {ttft: 10}),
        Entry("ITL", f"{transport} short", 630, 0, 0, {itl: 630}),
        Entry("REFUSED", f"{transport} short", refused, 0, 0, {1.0: refused}),
    ]
    return read(entries)


def test_a_short_and_a_long_prompt_begin_as_no_other_does_and_a_shared_one_as_all_others_do():
    dice = random.Random(1)
    drawn = {kind: [draw(dice, kind, 300) for _ in range(50)] for kind in ("short", "long", "shared")}
    assert {kind: {name for name, _ in many} for kind, many in drawn.items()} == {kind: {kind} for kind in drawn}
    beginnings = {kind: len({text[:16] for _, text in many}) for kind, many in drawn.items()}
    assert beginnings == {"short": 50, "long": 50, "shared": 1}
    assert len({text for _, text in drawn["shared"]}) == 50
    assert {len(text) for _, text in drawn["long"] + drawn["shared"]} == {300 + len("# 01234567\n")}


def test_the_mix_has_every_kind_in_its_share():
    dice = random.Random(2)
    counts = Counter(draw(dice, "mixed", 10)[0] for _ in range(5000))
    assert {kind: pytest.approx(share, abs=0.05) for kind, share in MIXES["mixed"].items()} == {
        kind: count / 5000 for kind, count in counts.items()
    }


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_stays_between_nothing_and_everything_and_reaches_it(name):
    values = [PROFILES[name](share) for share in SHARES]
    assert min(values) >= 0
    assert max(values) == 1


class Clock:
    """Time that a test moves."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


def test_the_open_loop_is_a_poisson_process_that_waits_for_no_answer(monkeypatch):
    """Mean and variance of the arrivals in a second are both the rate, and each is begun at the moment when it was due."""
    clock, due = Clock(), []
    monkeypatch.setattr("loadtest.loops.time", clock)
    loop = OpenLoop(None, rate=20.0, drain_seconds=0.0, dice=random.Random(1))
    loop.open = type("Group", (), {"spawn": staticmethod(lambda request, due: arrivals.append(due))})
    arrivals = due
    loop.user = type("User", (), {"request": None})
    while clock.now < 500:
        loop.turn()
        clock.now += loop.pause()
    counts = [Counter(int(each) for each in due)[second] for second in range(500)]
    mean = sum(counts) / 500
    variance = sum((count - mean) ** 2 for count in counts) / 500
    assert mean == pytest.approx(20.0, rel=0.06)
    assert variance == pytest.approx(20.0, rel=0.35)


def test_a_generator_that_comes_late_begins_all_that_was_due_with_their_own_times(monkeypatch):
    clock, due = Clock(), []
    monkeypatch.setattr("loadtest.loops.time", clock)
    loop = OpenLoop(type("User", (), {"request": None}), rate=10.0, drain_seconds=0.0, dice=random.Random(1))
    loop.open = type("Group", (), {"spawn": staticmethod(lambda request, due: arrivals.append(due))})
    arrivals = due
    clock.now = 10.0
    loop.turn()
    assert len(due) > 50
    assert due == sorted(due)
    assert due[0] < 1.5 and due[-1] <= 10.0


def test_a_stream_is_timed_from_when_it_was_due(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("loadtest.stream.time", clock)
    stream = Stream(due=-1.0)
    for clock.now in (0.5, 0.6, 0.8):
        stream.message_received()
    stream.tokens, clock.now = 3, 1.0
    measured = {row: [] for row in ("TOTAL", "TTFT", "ITL", "TPOT")}
    for row, seconds in stream.rows(None):
        measured[row].append(pytest.approx(seconds))
    assert {"TOTAL": [2.0], "TTFT": [1.5], "ITL": [0.1, 0.2], "TPOT": [0.15]} == measured


def test_a_failed_and_a_refused_answer_are_one_row_each_and_no_latency():
    assert [row for row, _ in Stream().rows(FailedError("cut"))] == ["TOTAL"]
    assert [row for row, _ in Stream().rows(RefusedError("429"))] == ["REFUSED"]


def test_an_abort_and_an_empty_answer_are_failures():
    for reason in ("abort", "error"):
        with pytest.raises(FailedError, match=reason):
            Stream().finish(reason)
    Stream().finish("length")
    with pytest.raises(FailedError, match="without a token"):
        Stream().check()


def test_percentiles_are_of_the_nearest_rank():
    row = Row(times=Counter({float(each): 1 for each in range(1, 101)}))
    assert [row.percentile(percent) for percent in (50, 95, 99, 100)] == [50.0, 95.0, 99.0, 100.0]
    assert Row().percentile(95) is None


def test_kinds_of_prompts_are_summed_and_transports_are_not():
    summed = read([Entry("TOTAL", "HTTP short", 2, 1, 5, {1.0: 2}), Entry("TOTAL", "HTTP long", 3, 0, 7, {1.0: 1, 2.0: 2})])
    assert summed == {("TOTAL", "HTTP"): Row(5, 1, 12, Counter({1.0: 3, 2.0: 2}))}
    both = summed | read([Entry("TOTAL", "GRPC short", 1, 0, 1, {3.0: 1})])
    assert total(both, "TOTAL").count == 6
    assert since(both, summed)["TOTAL", "HTTP"] == Row()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, None),
        ({"ttft": 301.0}, "HTTP: p95 of TTFT is 301 ms, above 300 ms"),
        ({"itl": 30.5}, "HTTP: p95 of ITL is 30.5 ms, above 30 ms"),
        ({"failures": 1}, "0.1000 of the requests failed, more than 0.0"),
        ({"refused": 10}, "0.5000 of the requests were refused, more than 0.0"),
    ],
)
def test_each_missed_objective_is_one_sentence(changes, sentence):
    missed = list(Objectives(ttft_p95_ms=300, itl_p95_ms=30).missed_objectives(rows(**changes)))
    assert missed == ([sentence] if sentence else [])


def test_each_transport_is_judged_by_itself():
    slow, fast = rows(ttft=400.0, transport="GRPC"), rows()
    assert [each.partition(":")[0] for each in Objectives(ttft_p95_ms=300).missed_objectives(slow | fast)] == ["GRPC"]


def test_no_answer_keeps_no_objective():
    assert list(Objectives().missed_objectives({})) == ["no request was answered, 0 were refused"]


def test_a_phase_is_what_came_while_its_users_ran():
    """The first three seconds of a phase belong to the users before it."""
    samples = [Sample(float(at), 5 if at < 10 else 9, read([Entry("TOTAL", "HTTP short", at * 2)])) for at in range(20)]
    found = phases(samples)
    assert [(each.users, each.seconds, each.rows["TOTAL", "HTTP"].count) for each in found] == [(5, 6.0, 12), (9, 6.0, 12)]


@pytest.mark.parametrize(
    ("limit", "most", "answer"), [(37, 512, (36, 37)), (0, 512, (0, 1)), (512, 512, (512, None)), (1, 8, (1, 2))]
)
def test_the_search_ends_at_the_highest_rate_that_keeps(limit, most, answer):
    tried = []

    def keeps(rate):
        tried.append(rate)
        return rate <= limit

    low, high = highest(keeps, first=4, most=most, precision=0.05)
    assert low <= limit
    assert (low, high) == answer or (high - low <= 0.05 * high and low <= limit < high)
    assert len(tried) == len(set(tried)) < 16


@pytest.mark.parametrize("name", ["capacity", "faults.__main__", "load", "overload", "soak"])
def test_every_tool_has_its_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"loadtest.{name}").main(["--help"])
    assert ended.value.code == 0
    assert f"python -m loadtest.{name.partition('.')[0]} " in capsys.readouterr().out


@pytest.mark.ray
def test_a_server_that_cannot_start_is_an_error_with_its_own_sentence(tmp_path):
    with pytest.raises(StartError, match="max_batch_requests"), ready_server(tmp_path / "log", ("--max-batch-requests", "0")):
        raise AssertionError("it started")


# Workloads: lengths, prefixes, traces.


@pytest.mark.parametrize(
    ("text", "mean", "low", "high"),
    [
        ("256", 256, 256, 256),
        ("uniform:64:512", 288, 64, 512),
        ("normal:256:64", 256, 1, 600),
        ("lognormal:200:0.5", 226, 10, 3000),
    ],
)
def test_lengths_have_the_distribution_that_was_asked_for(text, mean, low, high):
    dice = random.Random(3)
    drawn = [lengths(text).draw(dice) for _ in range(4000)]
    assert sum(drawn) / 4000 == pytest.approx(mean, rel=0.04)
    assert low <= min(drawn) <= max(drawn) <= high
    assert all(type(one) is int and one >= 1 for one in drawn)


def test_prompts_of_a_length_in_tokens_have_it_and_share_their_prefix():
    ids, dice = range(100, 400), random.Random(4)
    work = Workload(mix="shared", prompt_tokens=lengths("64"), output_tokens=lengths("uniform:1:9"), prefixes=3, token_ids=ids)
    asks = [work.draw(dice) for _ in range(600)]
    assert {len(ask.prompt) for ask in asks} == {64} and {ask.max_tokens for ask in asks} == set(range(1, 10))
    prefixes = Counter(tuple(ask.prompt[:56]) for ask in asks)
    shares = [count / 600 for _, count in prefixes.most_common()]
    assert shares == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.06), "the n-th is n times rarer"
    assert len({tuple(ask.prompt) for ask in asks}) == 600


def test_models_and_tools_are_drawn_in_their_shares():
    dice = random.Random(5)
    asks = [Workload(models=("a", "b"), tools=0.3).draw(dice) for _ in range(2000)]
    assert Counter(ask.model for ask in asks)["a"] / 2000 == pytest.approx(0.5, abs=0.05)
    assert sum(ask.tools for ask in asks) / 2000 == pytest.approx(0.3, abs=0.04)


def test_calls_of_a_trace_that_share_blocks_share_tokens_and_have_their_lengths():
    calls = read_trace(SHIPPED)
    ids = range(1000)
    assert len(calls) > 100 and calls[0].seconds == 0 and calls == sorted(calls, key=lambda call: call.seconds)
    for one in calls:
        prompt = one.prompt(ids, BLOCK)
        assert len(prompt) == one.prompt_tokens
        for other in calls[:20]:
            pairs = zip(one.blocks, other.blocks, strict=False)
            same = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
            count = min(same * BLOCK, one.prompt_tokens, other.prompt_tokens)
            assert prompt[:count] == other.prompt(ids, BLOCK)[:count]
    assert sum(len(set(call.blocks)) > 1 for call in calls) > 20


def test_the_shipped_trace_is_what_its_maker_makes():
    lines = [json.loads(line) for line in SHIPPED.read_text().splitlines()]
    assert lines == made_trace(seed=1, seconds=300.0, rate=0.25)


def test_a_scaled_trace_has_shorter_prompts_and_answers():
    whole, tenth = read_trace(SHIPPED), read_trace(SHIPPED, scale=0.1)
    assert [call.prompt_tokens for call in tenth] == [max(1, round(call.prompt_tokens / 10)) for call in whole]


def test_the_trace_loop_begins_each_call_at_its_time(monkeypatch):
    clock, begun = Clock(), []
    monkeypatch.setattr("loadtest.loops.time", clock)
    calls = [Call(seconds, 1, 1, ()) for seconds in (0.0, 1.0, 1.5, 4.0)]
    loop = TraceLoop(type("User", (), {"request": None}), calls, speed=2.0, drain_seconds=0.0)
    loop.open = type("Group", (), {"spawn": staticmethod(lambda request, due, call: begun.append((clock.now, due, call)))})
    for _ in range(40):
        loop.turn()
        clock.now += min(0.25, loop.pause())
    assert [(due, call) for _, due, call in begun] == list(zip((0.0, 0.5, 0.75, 2.0), calls, strict=True))
    assert all(due <= now <= due + 0.25 for now, due, _ in begun)
