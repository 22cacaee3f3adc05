"""One life of the whole service under one seed: scheduler, engine, step thread, service and callers, in one thread."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from attend.model.engine.engine import Engine
from attend.model.engine.loop import AsyncEngine
from attend.model.engine.plan import StepInput, StepResult
from attend.model.engine.request import Request
from attend.model.errors import OutOfMemory
from attend.service.access.quota import WINDOW_SECONDS, Key
from attend.service.generation import thread_pools
from attend.service.generation.generation import GenerationService
from attend.service.observe.metrics import Metrics
from tests.model.engine.integrity import check_integrity
from tests.model.engine.machines import info
from tests.simulation.answered import CLOSE
from tests.simulation.callers import Caller
from tests.simulation.events import Call, Fault, events_of, setting_of
from tests.simulation.laws import LawfulScheduler
from tests.simulation.model import END, LONGEST_STEP, VOCAB, WIDTH, Machine, Pending, SlotRunner, tokenizer
from tests.simulation.world import World, one_thread, work_waits

MODEL = "simulated"
REST = 2.0
"""Seconds after the last call in which the engine comes to rest."""


class TimedRunner(SlotRunner):
    """Steps take time, in which callers come, read and go."""

    def __init__(self, life: "Life", machine: Machine) -> None:
        super().__init__(life.setting.config, machine)
        self._life = life

    def submit(self, step: StepInput) -> "TimedStep":
        life = self._life
        life.num_steps += 1
        life.world.lawful(life.check_submitted, step)
        try:
            return TimedStep(super().submit(step), life, life.machine.seconds(step))
        except (RuntimeError, OutOfMemory):
            life.num_failed += 1
            life.world.elapse(LONGEST_STEP / 10)
            raise
        finally:
            life.note_failed()


class TimedStep:
    """A step under way, which ends some seconds after somebody waits for it."""

    def __init__(self, step: Pending, life: "Life", seconds: float) -> None:
        self._step, self._life, self._seconds = step, life, seconds

    def __getattr__(self, name: str) -> object:
        return getattr(self._step, name)

    def result(self) -> StepResult:
        seconds, self._seconds = self._seconds, 0.0
        self._life.world.elapse(seconds)
        return self._step.result()


class SteppedEngine(AsyncEngine):
    """Tells the life what reaches it, and has every law checked after each round."""

    life: "Life"

    def _open(self, requests: Sequence[Request], at_once: int | None) -> object:
        stream = super()._open(requests, at_once)
        self.life.accepted(requests)
        return stream

    def _iterate(self) -> None:
        self.life.round += 1
        try:
            super()._iterate()
        except BaseException as error:
            self.life.died = self.life.machine.device_fails
            if not self.life.died:
                self.life.world.note(error)
            raise
        self.life.world.lawful(self.life.check_step)


class Life:
    """`run` lives it. Raises an AssertionError where a law does not hold."""

    def __init__(self, seed: int) -> None:
        self.seed, self.setting = seed, setting_of(seed)
        self.events = events_of(seed)
        calls = [event for event in self.events if isinstance(event, Call)]
        last = max((event.at for event in self.events), default=0.0)
        self.world = World(seed, last + 400.0)
        dice = random.Random(f"machine {seed}")
        broken = {(call.command.sampling.seed, call.broken[0]): call for call in calls if call.broken is not None}
        self.machine = Machine(
            {who: call.broken[1] for who, call in broken.items() if not call.breaks_step},
            {who: call.broken[1] for who, call in broken.items() if call.breaks_step},
            most_tokens=self.setting.most_tokens,
            dice=dice,
            per_stream=0.001 * dice.choice([0.5, 1, 4]),
            fixed=0.001 * dice.choice([0.5, 2, 6]),
        )
        self.trace: list[object] = []
        """What callers saw, in order."""
        self.callers: list[Caller] = []
        self.owners: dict[str, Caller] = {}
        """Of the engine's requests."""
        self.kinds: dict[int, tuple[str, str | None]] = {}
        """Salt and adapter of the text in each block."""
        self.outcomes: Counter[tuple[str, str, str]] = Counter()
        self.closing = self.died = False
        self.drained_at = float("inf")
        self.num_failed = 0
        """Steps that failed as a whole; each may be computed again in two parts."""
        self.num_steps = self.open_calls = self.most_steps = self.round = 0

    @property
    def now(self) -> float:
        return self.world.time()

    def run(self) -> "Life":
        """All of it."""
        chosen = {"inline": self.setting.inline, "large": self.setting.large, "most_large": self.setting.most_large}
        with quiet(), one_thread(self.world, self.seed, **chosen):
            try:
                self._live()
            except AssertionError as error:
                self.world.note(error)
            finally:
                self._end()
        if self.world.broken is not None:
            raise self.world.broken
        return self

    def _live(self) -> None:
        """The step thread's life, in which the event loop runs; then what is left of the callers'."""
        self._build()
        driver = self.world.create_task(self._drive())
        self.engine._thread.run()
        driver.add_done_callback(lambda _: self.world.stop())
        while self.world.broken is None and not driver.done():
            self.world.run_forever()
        if self.world.broken is None:
            self._check_rest()

    def _end(self) -> None:
        """Close the loop, with all that still waits where a law did not hold."""
        self.world.set_exception_handler(lambda *_: None)
        for _ in range(3):
            for task in asyncio.all_tasks(self.world):
                task.cancel()
            self.world.call_soon(self.world.stop)
            self.world.run_forever()
        self.world.close()

    def _build(self) -> None:
        setting, config, clock = self.setting, self.setting.config, self.world.time
        scheduler = LawfulScheduler(config, clock, self.machine, self.world.lawful)
        if (snapshots := scheduler.tables.snapshots) is not None:
            snapshots.least, snapshots.spacing = (
                config.block_size * (1 + self.seed % 3),
                config.block_size * (1 + self.seed % 4),
            )
        inner = Engine(scheduler, TimedRunner(self, self.machine), clock, async_scheduling=setting.asynchronous)
        facts = {"vocab_size": VOCAB, "hidden_size": WIDTH, "eos_token_ids": (END,), "max_queued_requests": setting.queued}
        self.engine = SteppedEngine(inner, replace(info(config), **facts), max_queued_requests=setting.queued, clock=clock)
        self.engine.life, self.scheduler = self, inner.scheduler
        self.service = GenerationService(
            self.engine,
            tokenizer(),
            model_name=MODEL,
            request_timeout=setting.timeout,
            embedding=setting.embedding,
            clock=clock,
        )
        self.metrics = Metrics(self.engine, MODEL, clock=clock, preparing=lambda: self.service.num_preparing)
        self.keys = [Key(f"key-{at}", limits, clock=clock) for at, limits in enumerate(setting.keys)]

    async def _drive(self) -> None:
        """Let the events happen, wait for the calls, and end the server."""
        tasks = []
        for event in self.events:
            await asyncio.sleep(event.at - self.now)
            if isinstance(event, Fault):
                tasks += self._fault(event)
                continue
            caller = Caller(self, event)
            self.callers.append(caller)
            task = caller.task = self.world.create_task(caller.live())
            tasks.append(task)
            if event.leaves is not None:
                self.world.call_later(event.leaves, task.cancel)
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(REST)
        self.closing = True
        self.engine.close()

    def _fault(self, fault: Fault) -> list[asyncio.Task]:
        if fault.kind == "step":
            self.machine.step_fails = True
        elif fault.kind == "device":
            self.machine.device_fails = True
        elif fault.kind == "drain":
            return [self.world.create_task(self._drain(fault.seconds))]
        else:
            self.closing = True
            self.engine.close()
        return []

    async def _drain(self, seconds: float) -> None:
        self.closing = True
        await self.engine.drain(seconds)
        self.drained_at = min(self.drained_at, self.now)

    # What the life is told.

    def accepted(self, requests: Sequence[Request]) -> None:
        """The service hands requests to the engine."""
        assert not self.closing, "a call is accepted after the end has begun"
        task = asyncio.current_task(self.world)
        caller = next(each for each in self.callers if each.task is task)
        for index, request in enumerate(requests):
            assert request.request_id not in self.owners, "an id that was given before"
            self.owners[request.request_id] = caller
            caller.places[request.request_id] = index
            self.most_steps += 4 * (len(request.prompt) + request.max_tokens) + 8

    def check_submitted(self, step: StepInput) -> None:
        """Before a step is computed: its size, and that a prefix from the cache is of the same salt and adapter."""
        config = self.setting.config
        assert step.num_tokens <= config.max_batch_tokens, "a step over its budget"
        known: list[tuple[int, object]] = []
        for request in self.scheduler._running:
            kind = request.cache_salt, request.adapter and request.adapter.digest
            first = -(-request.num_computed // config.block_size)
            known += [(block, kind) for block in request.tables[0][:first] if block]
            self.kinds |= dict.fromkeys(request.tables[0][first:], kind)
        assert all(self.kinds[block] == kind for block, kind in known), "a prefix of another salt, or another adapter"

    def note_failed(self) -> None:
        """Requests of a step that failed may end with an error."""
        for name in self.engine.engine.runner.failed:
            self.owners[name].failed = True

    def ended(self, caller: Caller) -> None:
        """A call has come to its end: it is counted, once."""
        transport, route = caller.call.route
        self.outcomes[transport, route, caller.outcome] += 1
        self.trace.append((self.now, caller.call.number, caller.outcome))
        caller.last_round = self.round
        slow = 2 * (1 + self.num_failed) * LONGEST_STEP + 8 * caller.call.pause
        due = min(caller.deadline, self.drained_at) + slow if caller.places else caller.deadline + CLOSE
        late = self.now - max(due, caller.call.at)
        assert late <= 0 or caller.left, f"call {caller.call.number} ends {late} s too late"
        patient = self.setting.timeout >= 60 and caller.call.command.deadline_ms is None
        assert caller.outcome != "deadline" or not patient, f"call {caller.call.number} takes for ever"

    @property
    def num_answers_open(self) -> int:
        """Answers of the calls that are not at their end."""
        return sum(caller.command.num_answers for caller in self.callers if caller.is_open)

    def is_at_limit(self, key: Key, but: Caller) -> bool:
        """True if a limit of the key may be reached, at the most that its other calls may hold of it."""
        limits, mine = key.limits, [caller for caller in self.callers if caller.key is key and caller is not but]
        running = sum(caller.command.num_answers for caller in mine if caller.is_open)
        arrived = sum(caller.arrived for caller in mine)
        full = limits.concurrent is not None and running + but.command.num_answers > limits.concurrent
        often = limits.requests_per_minute is not None and arrived + 1 > limits.requests_per_minute
        tokens = sum(caller.asked if caller.is_open else caller.taken()[1] for caller in mine) + but.asked
        return full or often or (limits.tokens_per_minute is not None and tokens > limits.tokens_per_minute)

    # The laws.

    def check_step(self) -> None:
        """After each round of the step thread."""
        scheduler, config = self.scheduler, self.setting.config
        scheduler.check_state()
        assert self.num_steps <= self.most_steps, "somebody starves"
        most = config.max_batch_requests + self.setting.queued
        assert len(self.engine._streams) <= most, "more requests than the queue holds"
        for name in scheduler._by_id:
            self._check_wanted(self.owners[name], self.owners[name].places[name])
        in_engine = Counter(self.owners[name].call.number for name in tuple(self.engine._streams))
        for caller in self.callers:
            at_once = self.service._at_once(caller.command)
            assert at_once is None or in_engine[caller.call.number] <= at_once, "more of a call in the engine than its share"
        assert self.service._preparing.num_held <= self.open_calls, "places of calls that have gone"
        for key in self.keys:
            mine = sum(caller.command.num_answers for caller in self.callers if caller.key is key and caller.is_open)
            assert 0 <= key.usage.running <= mine, "a key holds answers that nobody makes"
            limits, usage = key.limits, key.usage
            assert limits.concurrent is None or usage.running <= limits.concurrent, "more answers than a key may have"
            most = limits.tokens_per_minute
            assert most is None or usage.tokens.spent <= most, "more tokens than a key may take"

    def _check_wanted(self, caller: Caller, index: int) -> None:
        """A request runs for somebody who still reads its answer, or whose end has not reached the step thread yet."""
        answer = caller.answers.get(index)
        ends = caller.last_round if answer is None else min(caller.last_round, answer.last_round)
        assert ends + 1 >= self.round, f"answer {index} of call {caller.call.number} runs for nobody"

    def _check_rest(self) -> None:
        """When every call has ended, and the server too."""
        assert all(not caller.is_open for caller in self.callers)
        self._check_counted()
        for places in (self.service._preparing, self.service._scores, self.service._vectors, thread_pools._large):
            assert not places.num_held and not places._held, f"places are held for ever: {places._what}"
        assert not work_waits(), "work waits that nobody will do"
        for key in self.keys:
            self._check_key(key)
        if self.died:
            return
        check_integrity(self.scheduler)
        self.scheduler.tables.check_all_free()
        assert not self.engine._streams, "streams of calls that have gone"
        assert not self.engine._coalescer.all(), "outputs that nobody got"
        assert not self.scheduler.num_running + self.scheduler.num_waiting, "work without calls"

    def _check_counted(self) -> None:
        """Each call is counted once, as it ended, and so are its tokens."""
        metrics, callers = self.metrics, self.callers
        samples = [sample for family in metrics._requests.collect() for sample in family.samples if sample.value]
        counted = Counter(
            {tuple(sample.labels[name] for name in ("transport", "route", "outcome")): int(sample.value) for sample in samples}
        )
        assert counted == self.outcomes, f"counted {counted - self.outcomes}, and not {self.outcomes - counted}"
        refused = Counter(caller.rejection for caller in callers if caller.rejection is not None)
        samples = [sample for family in metrics._rejected.collect() for sample in family.samples if sample.value]
        told = Counter({sample.labels["reason"]: int(sample.value) for sample in samples})
        assert told == refused, f"refusals are counted as {told}, and were {refused}"
        prompts, tokens = (sum(each) for each in zip((0, 0), *(caller.counted() for caller in callers), strict=True))
        assert metrics.tokens == {"prompt": prompts, "generation": tokens}, "tokens are miscounted"
        assert sum(metrics.duration._counts) == len(callers), "durations are miscounted"
        begun = sum(caller.num_delivered > 0 for caller in callers)
        assert sum(metrics.first_token._counts) == begun, "first tokens are miscounted"
        ended = sum(answer.reason is not None for caller in callers for answer in caller.answers.values())
        assert sum(metrics.answer_length._counts) >= ended, "answers are not counted"

    def _check_key(self, key: Key) -> None:
        """What a key has paid is what its calls took."""
        mine = [caller for caller in self.callers if caller.key is key]
        assert key.usage.running == 0, "a key still holds answers"
        spans = [caller.taken() for caller in mine]
        least, most = sum(low for low, _ in spans), sum(high for _, high in spans)
        charges = key.usage.tokens.charges
        if self.now < WINDOW_SECONDS:
            assert least <= key.usage.tokens.spent <= most, f"{key.name} paid {key.usage.tokens.spent} tokens, and took {least}"
            assert key.usage.requests.spent == sum(caller.arrived for caller in mine), "requests are charged wrongly"
        assert sum(charge.amount for charge in charges) == key.usage.tokens.spent, "charges do not add up"
        assert key.usage.tokens.wait(1, 1, self.now + 2 * WINDOW_SECONDS) == 0, "a charge never leaves"


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing is logged: lives are full of errors that are meant."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
