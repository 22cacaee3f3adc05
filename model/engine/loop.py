"""The engine on a thread of its own, and the bridge from it to an event loop.

The step thread takes commands (add, abort), runs steps while there is work, and hands over the outputs of a step, or of a few
(`output_coalescer.py`), with one `call_soon_threadsafe`. A reader gets all outputs since its last read in one list: a slow
reader gets larger pieces, not longer queues.
"""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

from attend.model.engine.adapters import Adapters
from attend.model.engine.engine import Engine
from attend.model.engine.options import FLUSH_SECONDS
from attend.model.engine.output_coalescer import OutputCoalescer
from attend.model.engine.request import EngineInfo, EngineStats, FinishReason, Output, Request, StepReport, check_fits
from attend.model.errors import EngineFailed, InvalidRequest, QueueFull, Unavailable
from attend.model.explain.explainer import Explainer
from attend.model.net.progress import ProgressCounter

log = logging.getLogger("attend.engine")

OWNER_PART = 3.0
"""An owner's requests, and the tokens of its prompts that wait, are at most so many times what is left free of the queue: three
quarters of all where it is alone, and less the more owners there are, so that there is room for the next one. A queue of three
places has none to spare."""
PART_TOKENS = 1 << 14
"""Prompt tokens that a call which is handed over in parts has in the engine at a time, unless one prompt alone has more."""
IDLE_BEAT_SECONDS = 1.0
"""How often the idle step thread shows that it lives."""
CLOSE_SECONDS = 10.0
"""How long closing waits for the step under way."""
STOPPED = "the engine has stopped; try another replica"


@dataclass(slots=True, eq=False)
class _Stream:
    """The requests of one `generate` call, and their outputs that are not read yet."""

    open_ids: set[str]
    owner: str | None
    loop: asyncio.AbstractEventLoop
    later: deque[Request]
    """Requests of the call that were not handed to the engine yet, in order."""
    at_once: int | None
    """How many requests of the call may be in the engine at a time; None: all."""
    running: dict[str, int] = field(default_factory=dict)
    """Prompt tokens of those that are in the engine, by id."""
    reader: asyncio.Future[None] | None = None
    """Set when there is something to read; None while no reader waits."""
    outputs: list[Output] = field(default_factory=list)
    failure: str | None = None

    def part(self) -> list[Request]:
        """The next requests to hand over, as many as may be in the engine."""
        part: list[Request] = []
        while self.later and self._has_room(len(self.later[0].prompt)):
            part.append(self.later.popleft())
            self.running[part[-1].request_id] = len(part[-1].prompt)
        return part

    def give_up(self, part: Sequence[Request]) -> None:
        """End a part that was not handed over, and all that come later."""
        rest = [request.request_id for request in (*part, *self.later)]
        self.outputs += [Output(request_id, (), FinishReason.ABORT) for request_id in rest]
        self.open_ids.difference_update(rest)
        self.later.clear()
        for request in part:
            del self.running[request.request_id]

    def _has_room(self, tokens: int) -> bool:
        if self.at_once is None or not self.running:
            return True
        return len(self.running) < self.at_once and sum(self.running.values()) + tokens <= PART_TOKENS

    async def next_outputs(self) -> list[Output]:
        """The outputs since the last call; waits for the first one. Raises EngineFailed if the engine has failed."""
        if not self.outputs and self.failure is None:
            self.reader = self.loop.create_future()
            await self.reader
        if self.failure is not None:
            raise EngineFailed(self.failure)
        outputs, self.outputs = self.outputs, []
        return outputs

    def wake(self) -> None:
        """Wake the reader, if one waits."""
        if self.reader is not None and not self.reader.done():
            self.reader.set_result(None)


class AsyncEngine:
    """A `TokenEngine` over an `Engine`. Start it, generate, drain it, close it."""

    def __init__(
        self,
        engine: Engine,
        info: EngineInfo,
        *,
        max_queued_requests: int = 256,
        max_queued_tokens: int = 1 << 19,
        prepare: Callable[[], EngineInfo] | None = None,
        clock: Callable[[], float] = time.monotonic,
        adapters: Adapters | None = None,
        explainer: Explainer | None = None,
        progress: ProgressCounter | None = None,
        kv_cache_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """`adapters` reads those that requests may have; None: they may have none. `explainer` explains the model's texts.

        `progress`: what the layers of the step under way beat. `kv_cache_bytes` tells how many of the cache are in memory.
        """
        self._kv_cache_bytes = kv_cache_bytes
        self._engine = engine
        self.adapters = adapters
        self.explainer = explainer
        self._coalescer = OutputCoalescer()  # the step thread's
        self._info = info
        self._capacity = info.max_batch_requests + max_queued_requests
        self._max_queued_tokens = max_queued_tokens
        self._prompts: dict[str, int] = {}  # tokens, by request id, of the prompts without an output; as _streams
        self._queued_tokens = 0  # their sum
        self._owned = Counter[str | None]()  # requests in flight, by owner
        self._owned_tokens = Counter[str | None]()  # the same of _queued_tokens
        self._prepare = prepare or (lambda: info)  # called first by the step thread; what it says holds from then on
        self._clock = clock
        self._streams: dict[str, _Stream] = {}  # by request id; changed by event loops only, read by any thread
        self._wake = threading.Condition()
        self._commands: list[Callable[[], Output | None]] = []  # guarded by _wake
        self._stopping = False
        self._over = False  # guarded by _wake: the step thread takes no more commands
        self._draining = False
        self._beat = clock()
        self._progress = progress or ProgressCounter()
        self._seen = (self._progress.count, self._beat)  # a count, and when it was first seen
        self._stats = engine.stats()
        self._prepared: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="attend-engine", daemon=True)
        if engine.offload is not None:
            engine.offload.wake = self._wake_up

    @property
    def info(self) -> EngineInfo:
        """See `TokenEngine.info`."""
        return self._info

    @property
    def engine(self) -> Engine:
        """The engine that the step thread runs. Once that thread has started, no other thread may touch it."""
        return self._engine

    @property
    def draining(self) -> bool:
        """True if draining has begun: new requests are refused."""
        return self._draining

    def start(self) -> None:
        """Start the step thread and wait until it is prepared. Raises what preparing raises."""
        self._thread.start()
        self._prepared.result()

    def stats(self) -> EngineStats:
        """Load; the requests that the step thread has not taken yet count as waiting."""
        stats = self._stats
        waiting = max(stats.num_waiting, len(self._streams) - stats.num_running)
        return replace(stats, num_waiting=waiting)

    def cache_resident_bytes(self) -> int:
        """See `TokenEngine.cache_resident_bytes`."""
        return self._kv_cache_bytes()

    def heartbeat_age(self) -> float:
        """See `TokenEngine.heartbeat_age`. The progress is as young as its count was new to the last caller."""
        if self._over or not self._thread.is_alive():
            return float("inf")
        now, count = self._clock(), self._progress.count
        if count != self._seen[0]:
            self._seen = (count, now)
        return now - max(self._beat, self._seen[1])

    def on_step(self, observer: Callable[[StepReport], None]) -> None:
        """See `TokenEngine.on_step`."""
        self._engine.observer = observer

    def check_room(self, count: int, owner: str | None = None) -> None:
        """See `TokenEngine.check_room`."""
        in_flight, most = len(self._streams), self._capacity
        if in_flight + count > most:
            raise QueueFull(f"the queue is full: {in_flight} requests are in flight, {most} is the limit")
        if not _has_share(owner, self._owned, count, most - in_flight):
            raise QueueFull(f"the queue is full for {owner!r}, who has {self._owned[owner]} of {in_flight} requests in flight")

    async def generate(self, requests: Sequence[Request], at_once: int | None = None) -> AsyncGenerator[list[Output], None]:
        """See `TokenEngine.generate`."""
        stream = self._open(requests, at_once)
        try:
            while stream.open_ids or stream.outputs:
                yield await stream.next_outputs()
        finally:
            for request_id in tuple(stream.running):
                self._forget(request_id)
                self.abort(request_id, FinishReason.ABORT)

    def abort(self, request_id: str, reason: FinishReason) -> None:
        """End one request; see `TokenEngine.abort`."""
        self._command(lambda: self._engine.abort(request_id, reason))

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, give running ones so many seconds to end, then abort the rest."""
        self._draining = True
        deadline = self._clock() + seconds
        while self._streams and self._clock() < deadline:  # noqa: ASYNC110 - waits for the step thread too
            await asyncio.sleep(0.05)
        for stream in dict.fromkeys(stream for stream in self._streams.values() if stream.later):
            stream.give_up(())
            stream.wake()
        for request_id in tuple(self._streams):
            self.abort(request_id, FinishReason.ABORT)
        if (offload := self._engine.offload) is not None:
            written = threading.Event()
            self._command(lambda: offload.writer.flush(written))  # behind the aborted requests
            await asyncio.to_thread(written.wait, FLUSH_SECONDS)

    def close(self) -> None:
        """Stop the step thread after the step under way; what is still in flight is aborted."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)
        if self._engine.offload is not None:
            self._engine.offload.close()

    def _open(self, requests: Sequence[Request], at_once: int | None) -> _Stream:
        if self._draining or self._stopping:
            raise Unavailable("the server is shutting down; try another replica")
        if not self._thread.is_alive():
            raise Unavailable(STOPPED)
        for request in requests:
            check_fits(request, self._engine.scheduler.config.max_model_len)
        open_ids = {request.request_id for request in requests}
        owner = requests[0].owner if requests else None
        stream = _Stream(open_ids, owner, asyncio.get_running_loop(), deque(requests), at_once)
        part = stream.part()
        if len(part) > self._capacity:
            limit = f"n times the number of prompts must be at most {self._capacity} on this server"
            raise InvalidRequest(f"{limit}; got {len(part)}", "n")
        self.check_room(len(part), owner)
        tokens, queued, most = sum(stream.running.values()), self._queued_tokens, self._max_queued_tokens
        if self._prompts and queued + tokens > most:
            raise QueueFull(f"the queue is full: its prompts have {queued} of {most} tokens")
        if not _has_share(owner, self._owned_tokens, tokens, most - queued):
            whose = f"prompts of {owner!r}, who has {self._owned_tokens[owner]} of {queued} tokens that wait"
            raise QueueFull(f"the queue has no room for more {whose}")
        if not self._add(stream, part):
            raise Unavailable(STOPPED)
        return stream

    def _add(self, stream: _Stream, part: Sequence[Request]) -> bool:
        """Hand over a part of a call's requests; False, and without a trace, where the step thread has ended."""
        for request in part:
            self._streams[request.request_id] = stream
            self._prompts[request.request_id] = len(request.prompt)
            self._queued_tokens += len(request.prompt)
            self._owned_tokens[stream.owner] += len(request.prompt)
            self._owned[stream.owner] += 1
        if self._command(*(partial(self._engine.add, request) for request in part)):
            return True
        for request in part:
            self._forget(request.request_id)
        return False

    def _end(self, stream: _Stream, request_id: str) -> None:
        """A request has ended. The next of its call takes its place at once: no other comes between, and no drain."""
        stream.open_ids.discard(request_id)
        del stream.running[request_id]
        self._forget(request_id)
        part = stream.part()
        if part and not self._add(stream, part):
            stream.give_up(part)

    def _leave_queue(self, stream: _Stream, request_id: str) -> None:
        if tokens := self._prompts.pop(request_id, 0):
            self._queued_tokens -= tokens
            _lower(self._owned_tokens, stream.owner, tokens)

    def _forget(self, request_id: str) -> None:
        """A request is no longer in flight for callers."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._leave_queue(stream, request_id)
            _lower(self._owned, stream.owner, 1)

    def _command(self, *commands: Callable[[], Output | None]) -> bool:
        """Queue commands for the step thread; False where that thread has ended."""
        with self._wake:
            if not self._over:
                self._commands.extend(commands)
                self._wake.notify()
            return not self._over

    def _wake_up(self) -> None:
        """Have the step thread look for work."""
        with self._wake:
            self._wake.notify()

    def _run(self) -> None:
        """Body of the step thread: build the engine, then compute steps until the loop is closed."""
        try:
            self._info = self._prepare()
            self._beat = self._clock()
            self._stats = self._engine.stats()
            self._prepared.set_result(None)
            while not self._stopping:
                self._iterate()
            self._hand_over([*self._coalescer.all(), *self._finish()], None)
        except BaseException as error:  # every reader must learn that the thread has ended
            log.critical("the engine thread died", exc_info=True)
            with self._wake:
                self._over = True  # requests that arrive after the failure was handed over are refused
            self._hand_over([], f"the engine stopped: {type(error).__name__}")
            if not self._prepared.done():
                self._prepared.set_exception(error)

    def _iterate(self) -> None:
        with self._wake:
            if not self._commands and not self._engine.has_work and not self._stopping:
                self._wake.wait(IDLE_BEAT_SECONDS)
            commands, self._commands = self._commands, []
        if commands:
            self._hand_over(self._coalescer.all(), None)  # a step with a new prompt may be long
        outputs = [output for command in commands if (output := command()) is not None]
        started = self._clock()
        outputs += self._engine.step()
        self._beat = self._clock()
        self._stats = self._engine.stats()
        self._hand_over(self._coalescer.due(outputs, self._beat, self._beat - started), None)

    def _finish(self) -> list[Output]:
        """The last outputs: a request that still waits when the engine is closed must end too."""
        with self._wake:
            self._over = True
            commands, self._commands = self._commands, []
        outputs = [output for command in commands if (output := command()) is not None]
        outputs += self._engine.abort_all(FinishReason.ABORT)
        self._stats = self._engine.stats()
        return outputs

    def _hand_over(self, outputs: list[Output], failure: str | None) -> None:
        """One call into each event loop with open requests: in a service there is one loop."""
        if not outputs and failure is None:
            return
        for loop in {stream.loop for stream in tuple(self._streams.values())}:
            try:
                loop.call_soon_threadsafe(self._deliver, loop, outputs, failure)
            except RuntimeError:  # that loop has closed; its streams are gone with it
                log.warning("an event loop closed with requests in flight")

    def _deliver(self, loop: asyncio.AbstractEventLoop, outputs: list[Output], failure: str | None) -> None:
        if failure is not None:
            for stream in dict.fromkeys(stream for stream in self._streams.values() if stream.loop is loop):  # in order
                stream.failure = failure
                stream.wake()
        for output in outputs:
            owner = self._streams.get(output.request_id)
            if owner is None or owner.loop is not loop:
                continue  # closed by its reader
            self._leave_queue(owner, output.request_id)
            owner.outputs.append(output)
            owner.wake()
            if output.finish_reason is not None:
                self._end(owner, output.request_id)


def _has_share(owner: str | None, held: Counter[str | None], amount: int, free: int) -> bool:
    """True if an owner may have so much more of the queue. Where none is known all callers are one, and may have all."""
    return owner is None or not held[owner] or held[owner] + amount <= OWNER_PART * (free - amount + 1)


def _lower(held: Counter[str | None], owner: str | None, amount: int) -> None:
    held[owner] -= amount
    if not held[owner]:
        del held[owner]
