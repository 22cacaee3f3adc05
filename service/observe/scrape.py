"""One metrics page, and the loads, of all replicas.

Behind a proxy a scrape reaches one replica at random, so each replica answers for all. One that is dead or slow
is missing from the page, and counted, but never blanks it; nor does a controller of Serve that does not answer.
"""

import asyncio
from asyncio import Future
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ray import serve

from attend.service.observe import cluster_state
from attend.service.observe.capacity import Load
from attend.service.observe.exposition import merge, replica_counts

SECONDS = 2.0
"""How long a scrape waits for the other replicas."""
_controller = ThreadPoolExecutor(1, "attend-scrape")
_state_thread = ThreadPoolExecutor(1, "attend-serve-state")
_asked: "Future[str] | None" = None
"""The question to the controller that has no answer yet; while there is one, no other is asked."""


async def over_replicas(own: Callable[[], Awaitable[tuple[str, str]]]) -> str:
    """The merged page, 30 ms of plain Python for each replica; called inside a replica, whose own is `own`."""
    cluster = asyncio.create_task(cluster_page())
    expected, pages = await ask_replicas("scrape_local", own)
    page = await asyncio.to_thread(merge, pages)  # ninety replicas take a second
    return page + replica_counts(expected, len(pages)) + await cluster


async def cluster_page() -> str:
    """The metrics of the cluster as a whole; empty where Serve's controller does not answer in time."""
    global _asked
    if (question := _asked) is None or question.done():
        application = serve.get_replica_context().app_name
        question = _asked = asyncio.ensure_future(
            asyncio.get_running_loop().run_in_executor(_state_thread, _application_status, application)
        )
        question.add_done_callback(Future.exception)  # else asyncio warns of an exception that was never retrieved
    await asyncio.wait([question], timeout=SECONDS)
    if not question.done() or question.exception():
        return ""
    return question.result()


def _application_status(application: str) -> str:
    return cluster_state.cluster_page(cluster_state.take(application))


async def loads(own: Callable[[], Awaitable[Load]]) -> tuple[int, list[Load]]:
    """How many replicas there are, and the loads of those that answer; called inside a replica, whose own is `own`."""
    return await ask_replicas("load_local", own)


async def ask_replicas(method: str, own: Callable[[], Awaitable[Any]]) -> tuple[int, list[Any]]:
    """How many replicas were asked, and what `method` gives on those that answer in time; else (0, what `own` gives)."""
    try:
        async with asyncio.timeout(SECONDS):
            calls = await _calls(method)
    except TimeoutError:
        return 0, [await own()]
    tasks = [asyncio.ensure_future(call.get_async()) for call in calls]
    done, late = await asyncio.wait(tasks, timeout=SECONDS)
    for task in late:
        task.cancel()
    return len(calls), [task.result() for task in done if not task.cancelled() and task.exception() is None]


async def _calls(method: str) -> list[Any]:
    """A call to each replica. The first handle of a process asks Serve's controller, and blocks until it answers."""
    context = serve.get_replica_context()
    names = context.deployment, context.app_name
    handle = await asyncio.get_running_loop().run_in_executor(_controller, serve.get_deployment_handle, *names)
    # The public results_async() fails as a whole when one replica is slow; the per-replica results do not.
    # Alpha API of Ray 2.60 (pinned), covered by tests/service/test_end_to_end.py.
    calls: list[Any] = await handle.broadcast(method)._fetch_replica_results_async()
    return calls
