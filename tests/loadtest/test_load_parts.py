"""The parts of the load test that need no locust: prompts, clocks, sums, objectives, reports of overload and soak."""

import asyncio
import importlib
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from loadtest.faults.target import running
from loadtest.measures import Objectives, Row, read, total
from loadtest.overload import TOKENS, Call, Callers, verdict
from loadtest.server import StartError
from loadtest.soak import EVERY, GROWTH, Sample, report, slope
from loadtest.stream import FailedError, RefusedError, Stream, draw


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


def test_only_a_shared_prompt_begins_as_all_others_do():
    dice = random.Random(1)
    drawn = {kind: [draw(dice, kind, 300) for _ in range(50)] for kind in ("short", "long", "shared")}
    assert {kind: {name for name, _ in many} for kind, many in drawn.items()} == {kind: {kind} for kind in drawn}
    beginnings = {kind: len({text[:16] for _, text in many}) for kind, many in drawn.items()}
    assert beginnings == {"short": 50, "long": 50, "shared": 1}
    assert len({text for _, text in drawn["shared"]}) == 50


def test_a_stream_is_timed_from_when_it_was_due(monkeypatch):
    clock = type("Clock", (), {"perf_counter": lambda self: self.now})()
    monkeypatch.setattr("loadtest.stream.time", clock)
    stream = Stream(due=-1.0)
    for clock.now in (0.5, 0.6, 0.8):
        stream.message_received()
    stream.tokens, clock.now = 3, 1.0
    measured = {row: [] for row in ("TOTAL", "TTFT", "ITL", "TPOT")}
    for row, seconds in stream.rows(None):
        measured[row].append(pytest.approx(seconds))
    assert {"TOTAL": [2.0], "TTFT": [1.5], "ITL": [0.1, 0.2], "TPOT": [0.15]} == measured
    assert [row for row, _ in stream.rows(FailedError("cut"))] == ["TOTAL"]
    assert [row for row, _ in stream.rows(RefusedError("429"))] == ["REFUSED"]


def test_an_abort_and_an_empty_answer_are_failures():
    for reason in ("abort", "error"):
        with pytest.raises(FailedError, match=reason):
            Stream().finish(reason)
    Stream().finish("length")
    with pytest.raises(FailedError, match="without a token"):
        Stream().check()


def test_kinds_of_prompts_are_summed_and_percentiles_are_of_the_nearest_rank():
    summed = read([Entry("TOTAL", "HTTP short", 2, 1, 5, {1.0: 2}), Entry("TOTAL", "HTTP long", 3, 0, 7, {1.0: 1, 2.0: 2})])
    assert summed == {("TOTAL", "HTTP"): Row(5, 1, 12, Counter({1.0: 3, 2.0: 2}))}
    both = summed | read([Entry("TOTAL", "GRPC short", 1, 0, 1, {3.0: 1})])
    assert total(both, "TOTAL").count == 6
    row = Row(times=Counter({float(each): 1 for each in range(1, 101)}))
    assert [row.percentile(percent) for percent in (50, 95, 99, 100)] == [50.0, 95.0, 99.0, 100.0]
    assert Row().percentile(95) is None


@pytest.mark.parametrize(
    ("found", "sentences"),
    [
        (rows(), []),
        (rows(ttft=301.0), ["HTTP: p95 of TTFT is 301 ms, above 300 ms"]),
        (rows(itl=30.5), ["HTTP: p95 of ITL is 30.5 ms, above 30 ms"]),
        (rows(failures=1), ["0.1000 of the requests failed, more than 0.0"]),
        (rows(refused=10), ["0.5000 of the requests were refused, more than 0.0"]),
        (rows() | rows(ttft=400.0, transport="GRPC"), ["GRPC: p95 of TTFT is 400 ms, above 300 ms"]),
        ({}, ["no request was answered, 0 were refused"]),
    ],
)
def test_each_missed_objective_is_one_sentence(found, sentences):
    assert list(Objectives(ttft_p95_ms=300, itl_p95_ms=30).missed_objectives(found)) == sentences


@pytest.mark.parametrize("name", ["faults.__main__", "load", "overload", "soak"])
def test_every_tool_has_its_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"loadtest.{name}").main(["--help"])
    assert ended.value.code == 0
    assert f"python -m loadtest.{name.partition('.')[0]} " in capsys.readouterr().out


@pytest.mark.ray
def test_a_server_that_cannot_start_is_an_error_with_its_own_sentence():
    with pytest.raises(StartError, match="max_batch_requests"), running(("--max-batch-requests", "0")):
        raise AssertionError("it started")


# overload

CAPACITY = 10.0
GOOD = [*[Call(3.0, "ok")] * 600, *[Call(0.01, "refused")] * 1200]


@pytest.mark.parametrize(
    ("more", "hung", "good", "missed"),
    [
        ([], 0, CAPACITY, set()),
        ([Call(0.06, "refused")] * 24, 0, CAPACITY, {"refused at p99"}),
        ([], 0, 0.85 * CAPACITY, {"capacity lost"}),
        ([Call(1, "HTTP 500")], 1, CAPACITY, {"hung", "other ends"}),
    ],
)
def test_an_overload_that_does_harm_is_found(more, hung, good, missed):
    found = verdict([*GOOD, *more], hung, (1.2 * CAPACITY, 0.8 * CAPACITY), good)
    assert {each.what for each in found if not each.within_limit} == missed


def test_answers_a_second_are_counted_by_their_tokens():
    callers = Callers.__new__(Callers)
    began = time.monotonic()

    async def tokens() -> float:
        return 1e6 + TOKENS * 10 * (time.monotonic() - began)

    callers.tokens = tokens
    assert asyncio.run(callers.pace(0.05, 0.2)) == pytest.approx(10, rel=0.2)


# soak

FLAT = [Sample(at * EVERY, 800.0, 600, 250, 8.0, 0.5) for at in range(100)]
IDLE = [*FLAT, replace(FLAT[-1], seconds=101 * EVERY, blocks=0.0)]
NONE_FAILED = {"failed": 0, "refused": 2}


def test_what_stays_is_good_and_what_rises_at_first_is_left_out():
    lines, good = report(IDLE, NONE_FAILED, 40)
    assert good
    assert len(lines) == len(GROWTH) + 1
    samples = [replace(one, memory_mb=800 + 50 * min(1, at / 15)) for at, one in enumerate(FLAT)]
    assert slope(samples, "memory_mb") == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("name", GROWTH)
def test_whatever_grows_is_found(name):
    """A little more in a minute than it may, with saw teeth on it."""
    each = 1.2 * GROWTH[name] / 60

    def grown(one: Sample) -> Sample:
        return replace(one, **{name: getattr(one, name) + one.seconds * each + one.seconds % 7})

    lines, good = report([*map(grown, IDLE)], NONE_FAILED, 40)
    assert not good
    assert [line for line in lines if "GREW" in line] == [line for line in lines if line.startswith(name)]


def test_blocks_that_are_kept_and_calls_that_fail_are_found():
    assert not report(FLAT, NONE_FAILED, 40)[1]
    assert not report(IDLE, NONE_FAILED | {"failed": 1}, 40)[1]
