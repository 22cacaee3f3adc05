"""The driver's decisions, without Ray: what fits, what ends a start, who is asked again."""

import asyncio
import os
import shutil
import subprocess
import sys
import threading
import warnings
from functools import partial
from typing import Any

import pytest

from attend.model.config import DEFAULT_MODEL
from attend.model.errors import EngineFailed, SettingError
from attend.service.settings import Settings
from tests.model.checkpoints import edit_config

with warnings.catch_warnings():
    # Ray 2.60 declares its own fields in pydantic's old way; nothing of ours does.
    warnings.filterwarnings("ignore", message="Using extra keyword arguments on `Field` is deprecated")
    import ray

    from attend.service.observe import cluster_state
    from attend.service.runtime import driver, lifecycle

TWO_CORES = {"CPU": 2.0}


@pytest.mark.parametrize(
    ("given", "resources", "words"),
    [
        ({"replicas": 3}, TWO_CORES, "replicas is 3, but 2 fit: each needs 1 CPU, and this machine has 2"),
        ({"replicas": 2, "max_replicas": 4}, TWO_CORES, "max_replicas is 4, but 2 fit"),
        (
            {"replicas": 2},
            {"CPU": 8, "GPU": 1},
            "replicas is 2, but 1 fit: each needs 1 CPU and 1 GPU, and this machine has 8 and 1",
        ),
        ({"device": "cuda"}, TWO_CORES, "device is cuda, but this machine has no GPU"),
    ],
)
def test_replicas_that_can_never_run_together_are_refused_before_any_starts(given, resources, words):
    with pytest.raises(SettingError, match=words):
        driver.check_room(Settings(**given), resources)


@pytest.mark.parametrize(
    ("given", "resources"), [({"replicas": 2}, TWO_CORES), ({"replicas": 2, "device": "cpu"}, {"CPU": 2, "GPU": 1})]
)
def test_replicas_that_fit_are_not_refused(given, resources):
    driver.check_room(Settings(**given), resources)
    with pytest.raises(SettingError, match="replicas is 2, but 1 fit: each needs 1 CPU, and this machine has 1"):
        driver.check_room(Settings(**given), resources | {"CPU": 1})


@pytest.mark.parametrize(
    ("positions", "asked", "size"), [(1024, None, 4 << 20), (1 << 20, None, 16 << 20), (1 << 20, 64, 4 << 20)]
)
def test_a_message_may_hold_the_whole_context(positions, asked, size, tmp_path, monkeypatch):
    """Ray's processes take the limit from the environment that they inherit."""

    def init(**_: Any) -> None:
        raise InterruptedError

    folder = tmp_path / "model"
    shutil.copytree(DEFAULT_MODEL, folder)
    edit_config(folder, max_position_embeddings=positions)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(driver, "without_helpers", lambda: None)
    monkeypatch.setenv("RAY_SERVE_GRPC_MAX_MESSAGE_SIZE", "")
    monkeypatch.delenv("RAY_SERVE_GRPC_MAX_MESSAGE_SIZE")
    with pytest.raises(InterruptedError):
        asyncio.run(driver.main(Settings(model=str(folder), max_model_len=asked), 0))
    assert os.environ["RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"] == str(size)


def test_the_driver_needs_no_torch():
    """It would take a second of a start, and the memory of another interpreter with it."""
    code = "import sys, attend.service.runtime.driver; print(sorted({'torch', 'sympy', 'transformers'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-P", "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize("name", ["start_monitor", "start_log_monitor", "start_api_server"])
def test_this_ray_has_what_starts_the_helpers_that_are_left_out(name):
    assert callable(getattr(ray._private.node.Node, name))


async def test_a_stop_ends_a_start_that_waits_for_ever():
    stop, never = asyncio.Event(), threading.Event()
    asyncio.get_running_loop().call_soon(stop.set)

    async def start() -> None:
        await driver.run_in_daemon_thread(never.wait)

    found = await driver.run_until(stop, start())
    assert found is False


def test_a_start_that_fails_says_why():
    async def main() -> bool:
        async def start() -> None:
            await driver.run_in_daemon_thread(lambda: 1 / 0)

        return await driver.run_until(asyncio.Event(), start())

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())


FACTS = {
    "family": "llama",
    "parameters": 1e6,
    "device": "cpu",
    "device_name": "a CPU",
    "dtype": "float32",
    "weights": "float32",
}
FACTS |= {
    "backend": "native-avx2",
    "kv_tokens": 32,
    "kv_bytes": 1e8,
}


def test_a_replica_that_dies_while_it_is_asked_is_asked_again(monkeypatch, capsys):
    asked = []

    async def ask(*_: object, seconds: float) -> list[Any]:
        asked.append(seconds)
        if len(asked) == 1:
            raise ray.exceptions.ActorUnavailableError("gone", None)
        return [FACTS] if len(asked) > 2 else []

    monkeypatch.setattr(driver, "ask_replicas", ask)
    monkeypatch.setattr(driver, "AGAIN_SECONDS", 0)
    asyncio.run(driver.say_ready(Settings()))
    assert len(asked) == 3
    assert capsys.readouterr().err.startswith("Ready: http://localhost:8000")


def test_replicas_that_never_answer_end_the_start_with_a_sentence(monkeypatch):
    async def ask(*_: object, seconds: float) -> list[Any]:
        raise TimeoutError

    monkeypatch.setattr(driver, "ask_replicas", ask)
    monkeypatch.setattr(driver, "AGAIN_SECONDS", 0)
    monkeypatch.setattr(driver, "DESCRIBE_SECONDS", 0.01)
    with pytest.raises(EngineFailed, match="no replica has reported its model"):
        asyncio.run(driver.say_ready(Settings()))


def test_replicas_that_drain_are_asked_again_without_a_cancelled_call(monkeypatch):
    asked, ended = [], []

    async def ask(_: str, allowed: float, seconds: float) -> list[Any]:
        asked.append(allowed)
        await asyncio.sleep(0.2 if allowed else 0.4)
        ended.append(allowed)
        return []

    monkeypatch.setattr(driver, "ask_replicas", ask)

    async def law() -> None:
        stop = lifecycle.Stop()
        asyncio.get_running_loop().call_later(0.05, stop.again.set)
        await lifecycle.drain_until_told_again(stop, 30, partial(driver.drain, Settings()))

    asyncio.run(law())
    assert asked == [30, 0] and ended == [30, 0]


def test_replicas_and_haproxy_are_told_of_the_lingering_which_a_signal_ends_at_once(monkeypatch):
    told = []

    async def ask(method: str, seconds: float) -> list[Any]:
        told.append((method, stop.is_lingering))
        return []

    monkeypatch.setattr(driver, "ask_replicas", ask)
    monkeypatch.setattr(driver.edge, "ask_readiness", lambda host, port, seconds: told.append((host, port)))
    monkeypatch.setattr(driver, "tell_changes", lambda statistics: asyncio.sleep(600))
    stop = lifecycle.Stop()

    async def law(seconds: float) -> None:
        asyncio.get_running_loop().call_soon(stop.enough.set)
        await asyncio.wait_for(driver.linger_with_replicas(Settings(linger_seconds=seconds), None, stop), 60)

    asyncio.run(law(0))
    assert told == [] and not stop.is_lingering
    asyncio.run(law(600))
    assert told == [("leave", True), ("127.0.0.1", 8000)]


def test_deaths_and_missed_routes_are_told_and_a_silent_controller_ends_nothing(monkeypatch, capsys):
    looks = [
        *[cluster_state.ClusterState({"a": "running"})] * 4,
        ray.exceptions.GetTimeoutError("silent"),
        cluster_state.ClusterState({"b": "starting"}, {}, frozenset({"a"})),
    ]

    async def main() -> None:
        over, loop = asyncio.Event(), asyncio.get_running_loop()

        def take(application: str) -> cluster_state.ClusterState:
            if not looks:  # what the last look showed has been told
                loop.call_soon_threadsafe(over.set)
                return cluster_state.ClusterState({"b": "starting"}, {}, frozenset({"a"}))
            look = looks.pop(0)
            if isinstance(look, Exception):
                raise look
            return look

        monkeypatch.setattr(cluster_state, "take", take)
        monkeypatch.setattr(driver, "WATCH_SECONDS", 0)
        assert not await driver.run_until(over, driver.tell_changes(0))

    asyncio.run(asyncio.wait_for(main(), 30))
    missed = "HAProxy does not route to every replica: calls that it cannot route get 503\n"
    assert capsys.readouterr().err == f"{missed}Replica a died\nReplica b: starting\n"
