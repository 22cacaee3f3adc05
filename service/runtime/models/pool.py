"""The pool of models: loads each at its first call, unloads by memory budget and idle time.

The model that was used longest ago makes room for another. One that answers a call is never unloaded, and a pinned one never
either. Loads wait for room in the order in which they began. Where only busy models could make room, the one that was loaded
first takes no new calls after TURN_SECONDS: they wait, and it goes when the last of its answers has ended.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum

from attend.model.errors import Unavailable
from attend.service.errors import SHUTTING_DOWN, ModelUnavailable
from attend.service.generation.thread_pools import FairSemaphore
from attend.service.runtime.models.entries import Plan, ServedModel, in_words
from attend.service.runtime.models.process import LoadFailed, ModelProcess

log = logging.getLogger("attend.models")

TURN_SECONDS = 10.0
"""How long a model that is busy keeps others waiting for its memory."""
MAX_WAITING = 256
"""Calls that wait for one model to load; of one caller a part of them (`FairSemaphore`)."""
PAUSE_SECONDS, STABLE_SECONDS = 10.0, 60.0
"""How long a model is not tried again whose load failed, or whose process died before it had lived for the second."""


class State(StrEnum):
    """What a model does, as /v1/models says it."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Slot:
    """One model of the pool."""

    model: ServedModel
    memory: int
    """Bytes that it counts for while it is loading or loaded."""
    places: FairSemaphore
    """Those of calls that wait for it."""
    state: State = State.UNLOADED
    process: ModelProcess | None = None
    calls: int = 0
    """Calls that have the model now."""
    holds: bool = False
    """True if its memory counts toward the budget."""
    yields: bool = False
    """True if it takes no new calls, since another model waits for its memory."""
    loaded_at: float = 0.0
    used_at: float = 0.0
    retry_at: float = 0.0
    reason: str = ""
    """Why its last load failed."""
    task: "asyncio.Task[None] | None" = None
    counts: Counter[str] = field(default_factory=Counter)
    """Of load_failures and deaths."""

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.model.name

    @property
    def waiting(self) -> int:
        """Calls that wait for the model to load."""
        return self.places.num_held

    @property
    def is_idle(self) -> bool:
        """True if it is loaded, and nobody has it or waits for it, but those whose calls it does not take."""
        return self.state is State.LOADED and not self.calls and (self.yields or not self.waiting)


class Pool:
    """The models of a plan. `start` starts the process of one, and raises LoadFailed."""

    def __init__(self, plan: Plan, start: Callable[[ServedModel], Awaitable[ModelProcess]]) -> None:
        self.plan = plan
        self.slots: Mapping[str, Slot] = {
            name: Slot(model, model.expected_memory(plan.budget), FairSemaphore(MAX_WAITING, f"calls wait for {name!r}"))
            for name, model in plan.models.items()
        }
        self.is_closing = False
        self._start = start
        self._order = asyncio.Lock()
        self._change = asyncio.Event()
        self._watches: set[asyncio.Task[None]] = set()

    # Calls

    def find(self, name: str) -> Slot | None:
        """The model of this name, or that has an adapter of this name; of no name the default one. None where there is none."""
        if (slot := self.slots.get(name or self.plan.default)) is not None:
            return slot
        return next((slot for slot in self.slots.values() if slot.model.has_adapter(name)), None)

    @asynccontextmanager
    async def use(self, slot: Slot, owner: str | None = None) -> AsyncIterator[ModelProcess]:
        """The process of a model, which is loaded first where it must be, and stays while the block runs.

        `owner` is whose call it is, as `Caller.turn` has it. Raises ModelUnavailable, Overloaded or Unavailable.
        """
        while self.is_closing or slot.state is not State.LOADED or slot.yields:
            await self._wait_for(slot, owner)
        assert slot.process is not None
        slot.calls += 1
        try:
            yield slot.process
        finally:
            slot.calls -= 1
            slot.used_at = _now()
            self._notify()

    async def _wait_for(self, slot: Slot, owner: str | None) -> None:
        """Wait until a model has been loaded, or its state has changed."""
        if self.is_closing:
            raise Unavailable(SHUTTING_DOWN)
        load = None
        with slot.places.hold(owner):
            try:
                if slot.state in (State.LOADED, State.UNLOADING):
                    await self._change.wait()
                else:
                    await asyncio.shield(load := self.load(slot))
            except asyncio.CancelledError:
                asyncio.get_running_loop().call_soon(self._notify)  # a load that waits for room may be for nobody now
                if self.is_closing and load is not None and load.cancelled():
                    raise Unavailable(SHUTTING_DOWN) from None
                raise

    # Loading

    def load(self, slot: Slot) -> "asyncio.Task[None]":
        """The load of a model, begun if need be. Raises ModelUnavailable where it failed a moment ago."""
        if slot.task is None:
            if slot.retry_at > _now():
                raise _unavailable(slot)
            slot.task = asyncio.create_task(self._load(slot))
            slot.task.add_done_callback(lambda task: None if task.cancelled() else task.exception())  # nobody may wait
        return slot.task

    async def _load(self, slot: Slot) -> None:
        slot.state = State.LOADING
        try:
            await self._make_room(slot)
            began = _now()
            log.info("loading %s, which is expected to take %s", slot.name, in_words(slot.memory))
            async with asyncio.timeout(self.plan.file.load_seconds):
                process = await self._start(slot.model)
            self._has_loaded(slot, process, _now() - began)
        except (LoadFailed, TimeoutError) as error:
            slot.reason = str(error) or f"it took longer than {self.plan.file.load_seconds:g} s"
            slot.counts["load_failures"] += 1
            slot.state, slot.holds, slot.retry_at = State.FAILED, False, _now() + PAUSE_SECONDS
            log.error("the model %s cannot be loaded: %s", slot.name, slot.reason)
            raise _unavailable(slot) from error
        except BaseException:  # no room, or the server ends
            slot.state, slot.holds = State.UNLOADED, False
            raise
        finally:
            slot.task = None
            self._notify()

    def _has_loaded(self, slot: Slot, process: ModelProcess, seconds: float) -> None:
        slot.process, slot.state = process, State.LOADED
        slot.loaded_at = slot.used_at = _now()
        if slot.model.entry.memory is None and process.memory:
            slot.memory = process.memory
        log.info("%s was loaded in %.1f s, and takes %s", slot.name, seconds, in_words(slot.memory))
        if (taken := self.memory_held()) > self.plan.budget:
            log.warning("the loaded models take %s: memory_budget is %s", in_words(taken), in_words(self.plan.budget))
        watch = asyncio.create_task(self._watch(slot, process))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    # Room

    def memory_held(self) -> int:
        """Bytes that the models count for that are loading or loaded."""
        return sum(slot.memory for slot in self.slots.values() if slot.holds)

    def _fits(self, slot: Slot) -> bool:
        return self.memory_held() + slot.memory <= self.plan.budget

    async def _make_room(self, slot: Slot) -> None:
        """Unload idle models until this one fits, and count it from then on. Raises ModelUnavailable where it never fits."""
        async with self._order:
            until = _now() + TURN_SECONDS
            try:
                while not self._fits(slot):
                    self._check_possible(slot)
                    if not slot.waiting and not slot.model.entry.pin:
                        raise ModelUnavailable(f"nobody waits for the model {slot.name!r} any more")
                    others = [each for each in self.slots.values() if each.state is State.LOADED and not each.model.entry.pin]
                    if idle := [each for each in others if each.is_idle]:
                        await self._unload(min(idle, key=lambda each: each.used_at), "another model needs its memory")
                    elif _now() < until:
                        with suppress(TimeoutError):
                            async with asyncio.timeout_at(until):
                                await self._change.wait()
                    elif others and not any(each.yields for each in others):
                        min(others, key=lambda each: each.loaded_at).yields = True
                    else:
                        await self._change.wait()
                slot.holds = True
            finally:
                for each in self.slots.values():
                    each.yields = False
                self._notify()

    def _check_possible(self, slot: Slot) -> None:
        """Raise ModelUnavailable where a model has no room beside the pinned ones."""
        pinned = sum(each.memory for each in self.slots.values() if each.model.entry.pin and each is not slot)
        if slot.memory + pinned > self.plan.budget:
            sizes = f"takes {in_words(slot.memory)}, and other pinned ones {in_words(pinned)}"
            raise ModelUnavailable(f"the model {slot.name!r} {sizes}: memory_budget is {in_words(self.plan.budget)}", 60)

    async def _unload(self, slot: Slot, reason: str) -> None:
        assert slot.process is not None
        slot.state = State.UNLOADING
        log.info("unloading %s: %s", slot.name, reason)
        self._notify()
        await slot.process.stop()
        while slot.state is State.UNLOADING:
            await self._change.wait()

    async def _watch(self, slot: Slot, process: ModelProcess) -> None:
        """Notice the end of a process, whoever ended it."""
        how = await process.wait_for_exit()
        if slot.state is not State.UNLOADING and not self.is_closing:
            slot.counts["deaths"] += 1
            slot.retry_at = _now() + (PAUSE_SECONDS if _now() - slot.loaded_at < STABLE_SECONDS else 0.0)
            log.error("the process of the model %s ended: %s", slot.name, how)
        slot.state, slot.holds, slot.process = State.UNLOADED, False, None
        self._notify()
        await process.close()

    # Life

    async def load_pinned(self) -> None:
        """Load the pinned models. Raises ModelUnavailable where one cannot be, or where any model never fits."""
        for slot in self.slots.values():
            self._check_possible(slot)
        await asyncio.gather(*(self.load(slot) for slot in self.slots.values() if slot.model.entry.pin))

    async def look(self) -> None:
        """Unload idle models, and load pinned ones anew whose process died."""
        for slot in self.slots.values():
            if slot.model.entry.pin:
                if slot.state in (State.UNLOADED, State.FAILED) and _now() >= slot.retry_at:
                    self.load(slot)
            elif slot.is_idle and 0 < self.plan.file.idle_seconds <= _now() - slot.used_at:
                await self._unload(slot, "nobody called it")

    async def close(self, seconds: float) -> None:
        """Let running calls end for so long, then end all processes. New calls are refused."""
        self.is_closing = True
        loads = [slot.task for slot in self.slots.values() if slot.task is not None]
        for load in loads:
            load.cancel()
        self._notify()
        await asyncio.gather(*loads, return_exceptions=True)
        processes = [slot.process for slot in self.slots.values() if slot.process is not None]
        await asyncio.gather(*(process.stop(seconds) for process in processes))
        await asyncio.gather(*self._watches)

    def _notify(self) -> None:
        """Wake who waits for a change."""
        self._change.set()
        self._change = asyncio.Event()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _unavailable(slot: Slot) -> ModelUnavailable:
    seconds = max(1, math.ceil(slot.retry_at - _now()))
    why = "the log of the server says why"
    return ModelUnavailable(f"the model {slot.name!r} cannot be loaded: {why}; it is tried again in {seconds} s", seconds)
