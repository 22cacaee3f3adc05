"""One metrics page for all replicas: families together, a replica label on each sample, and nobody's end blanks it."""

import asyncio
import threading
import warnings
from concurrent.futures import Executor, Future
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import examples

with warnings.catch_warnings():
    # Ray 2.60 declares its own fields in pydantic's old way; nothing of ours does.
    warnings.filterwarnings("ignore", message="Using extra keyword arguments on `Field` is deprecated")
    from attend.service.observe import scrape

from attend.service.observe.cached_page import PAUSE_SECONDS, CachedPage
from tests.fakes import build_server
from tests.virtual_time import run_at_once


def page(fill) -> str:
    registry = CollectorRegistry()
    fill(registry)
    return generate_latest(registry).decode()


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of a page by its name and sorted labels; no sample twice."""
    found = [s for family in text_string_to_metric_families(text) for s in family.samples]
    by_key = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in found}
    assert len(by_key) == len(found)
    return by_key


def gauge(value: float, help_text: str = "help", **labels: str) -> str:
    return page(
        lambda registry: (
            Gauge("g", help_text, list(labels), registry=registry).labels(**labels).set(value)
            if labels
            else Gauge("g", help_text, registry=registry).set(value)
        )
    )


def test_merged_samples_are_those_of_all_pages_with_the_replica_as_a_label():
    pages = []
    for name, calls in (("r1", 1), ("r2", 2)):
        server = build_server()
        for _ in range(calls):
            server.post({"prompt": "a", "max_tokens": 2})
        pages.append((name, server.metrics.text()))
    expected = {
        (name, tuple(sorted([*labels, ("replica", replica)]))): value
        for replica, text in pages
        for (name, labels), value in samples(text).items()
    }
    assert samples(scrape.merge(pages)) == expected


def test_a_family_stands_together_under_one_help_and_one_type():
    text = build_server().metrics.text()
    merged = scrape.merge([("r1", text), ("r2", text), ("r3", text)])
    lines = merged.splitlines()
    for head in ("# HELP ", "# TYPE "):
        names = [line.split()[2] for line in lines if line.startswith(head)]
        assert len(names) == len(set(names)) == text.count(head)
    family = ""
    for line in lines:
        family = line.split()[2] if line.startswith("#") else family
        assert line.startswith(("#", family))
        assert line.startswith("#") or 'replica="r' in line


def test_types_survive_and_histograms_keep_their_buckets():
    def fill(registry):
        Counter("calls", "Calls", registry=registry).inc(3)
        Histogram("seconds", "Time", buckets=(0.5, 1), registry=registry).observe(0.7)

    merged = scrape.merge([("b", page(fill)), ("a", page(fill))])
    types = {family.name: family.type for family in text_string_to_metric_families(merged)}
    assert types == {"calls": "counter", "seconds": "histogram"}
    assert '\ncalls_total{replica="a"} 3.0\ncalls_total{replica="b"} 3.0\n' in merged
    buckets = [value for (name, labels), value in samples(merged).items() if name == "seconds_bucket"]
    assert buckets == [0, 1, 1] * 2


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.text('\\"\nn', max_size=5))
def test_any_label_and_any_replica_name_parse_back(label, replica):
    label = label.replace("\r", "")  # the parser reads lines, and takes a return for an end
    label = "".join(letter for letter in label if letter not in "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029")
    ((_, labels),) = samples(scrape.merge([(replica, gauge(1, model=label))]))
    assert dict(labels) == {"model": label, "replica": replica}


def test_a_family_that_one_replica_lacks_is_there_for_the_other():
    merged = scrape.merge([("old", gauge(1)), ("new", gauge(2) + page(lambda r: Counter("c", "C", registry=r)))])
    assert {name for name, _ in samples(merged)} == {"g", "c_total"}


def test_no_page_at_all_is_an_empty_page_that_says_so():
    assert scrape.merge([]) == ""
    assert samples(scrape.replica_counts(3, 0)) == {
        ("attend_scrape_replicas_expected", ()): 3,
        ("attend_scrape_replicas_answered", ()): 0,
    }


class Call:
    """What Serve gives for each replica: an answer, a failure, or nothing in time."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    async def get_async(self) -> object:
        if isinstance(self.answer, BaseException):
            raise self.answer
        if self.answer is None:
            await asyncio.Event().wait()
        return self.answer


class AtOnce(Executor):
    """Runs in the caller's thread: in virtual time nobody waits for another thread."""

    def submit(self, work, /, *arguments, **named) -> Future:
        future = Future()
        future.set_result(work(*arguments, **named))
        return future


def over(monkeypatch, *answers: object) -> str:
    async def calls() -> list[Call]:
        return [Call(answer) for answer in answers]

    fanned_out = SimpleNamespace(_fetch_replica_results_async=calls)
    handle = SimpleNamespace(broadcast=lambda method: fanned_out)
    monkeypatch.setattr(scrape.serve, "get_replica_context", lambda: SimpleNamespace(deployment="d", app_name="a"))
    monkeypatch.setattr(scrape.serve, "get_deployment_handle", lambda deployment, app: handle)
    monkeypatch.setattr(scrape, "_controller", AtOnce())
    return run_at_once(scrape.over_replicas(own_page))


async def own_page() -> tuple[str, str]:
    return "own", gauge(7)


@pytest.mark.parametrize(
    "lost", [None, RuntimeError("the actor died"), asyncio.CancelledError()], ids=["slow", "dead", "cancelled"]
)
def test_a_lost_replica_is_missing_and_counted_but_the_others_are_there(monkeypatch, lost):
    found = samples(over(monkeypatch, ("r1", gauge(1)), lost, ("r3", gauge(3))))
    assert found == {
        ("g", (("replica", "r1"),)): 1,
        ("g", (("replica", "r3"),)): 3,
        ("attend_scrape_replicas_expected", ()): 3,
        ("attend_scrape_replicas_answered", ()): 2,
    }


def test_a_controller_that_does_not_answer_leaves_the_loop_free_and_this_replicas_own_page(monkeypatch):
    freed, waited = threading.Event(), []
    monkeypatch.setattr(scrape.serve, "get_replica_context", lambda: SimpleNamespace(deployment="d", app_name="a"))
    monkeypatch.setattr(scrape.serve, "get_deployment_handle", lambda deployment, app: waited.append(freed.wait(20)))
    page = run_at_once(scrape.over_replicas(own_page))
    freed.set()
    assert samples(page) == {
        ("g", (("replica", "own"),)): 7,
        ("attend_scrape_replicas_expected", ()): 0,
        ("attend_scrape_replicas_answered", ()): 1,
    }
    assert False not in waited, "the event loop waited for the controller"


async def no_cluster() -> str:
    """The cluster's part of the page, where nobody counts."""
    return ""


def test_pages_of_metrics_are_merged_beside_the_event_loop(monkeypatch):
    async def asked(method: str, own: object) -> tuple[int, list[tuple[str, str]]]:
        return 1, [("a", "x 1.0\n")]

    threads = []
    monkeypatch.setattr(scrape, "ask_replicas", asked)
    monkeypatch.setattr(scrape, "cluster_page", no_cluster)
    monkeypatch.setattr(scrape, "merge", lambda pages: threads.append(threading.current_thread()) or "page\n")
    assert asyncio.run(scrape.over_replicas(None)).startswith("page\n")
    assert threading.main_thread() not in threads


def test_all_who_ask_for_the_page_while_it_is_made_get_the_same_one_and_one_who_leaves_takes_it_from_nobody():
    made = []

    async def make() -> str:
        made.append(1)
        await asyncio.sleep(1)
        return f"page {len(made)}"

    async def run() -> list[str]:
        page = CachedPage(make)
        calls = [asyncio.create_task(page()) for _ in range(100)]
        await asyncio.sleep(0.5)
        calls[0].cancel()
        pages = await asyncio.gather(*calls[1:])
        return [*pages, await page()]

    assert run_at_once(run()) == ["page 1"] * 99 + ["page 2"]
    assert len(made) == 2


def test_callers_who_never_stop_asking_get_a_few_pages_a_second():
    made = []

    async def make() -> str:
        made.append(1)
        return "page"

    async def run() -> None:
        page = CachedPage(make)

        async def ask() -> None:
            while True:
                await page()

        async with asyncio.timeout(10):
            await asyncio.gather(*(ask() for _ in range(32)))

    with pytest.raises(TimeoutError):
        run_at_once(run())
    assert len(made) <= 10 / PAUSE_SECONDS + 1


def test_a_page_that_cannot_be_made_is_made_anew_for_the_next_who_asks():
    made = []

    async def make() -> str:
        made.append(1)
        if len(made) == 1:
            raise OSError
        return "page"

    async def run() -> str:
        page = CachedPage(make)
        with pytest.raises(OSError):
            await page()
        return await page()

    assert run_at_once(run()) == "page"
