"""Engines for tests: a runner whose tokens can be computed by hand, tiny real ones, and a clock that is set."""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from zlib import crc32

from attend.model.engine.config import EngineConfig
from attend.model.engine.engine import Engine
from attend.model.engine.loop import AsyncEngine
from attend.model.engine.plan import Plan, StepInput, StepResult, step_input
from attend.model.engine.request import EngineInfo, FinishReason, Output, Request
from attend.model.engine.runner import ModelRunner
from attend.model.engine.scheduler import Scheduler
from attend.model.net.paged_attention import KVCache
from attend.model.net.transformer import Decoder
from attend.model.params import SamplingParams
from attend.model.sampling_plan import Draw, SamplingPlan
from tests.model.attention import BACKENDS
from tests.model.engine.integrity import check_integrity

FAKE_VOCAB = 16
Tables = Sequence[Sequence[int]]
"""A request's blocks in each group of layers."""


class Counted(list):
    """A text that counts how many of its tokens were read."""

    num_read = 0

    def __iter__(self) -> Iterator[int]:
        self.num_read += len(self)
        return super().__iter__()

    def __getitem__(self, where):
        found = super().__getitem__(where)
        self.num_read += len(found) if isinstance(where, slice) else 1
        return found


class Clock:
    """Time that stands still until it is told."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Done:
    """A step that is over already."""

    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome


def fake_token(plan: SamplingPlan, context: list[int], banned: Collection[int] = ()) -> int:
    """The token after `context`: a hash of (seed, answer, context), moved on past banned ones.

    Under every third seed little but the last token of the context counts, so that the answer soon repeats itself, for a while.
    A context that ends with -1 is wrong, and the token after it is too.
    """
    seen = [context[-1] % 8, len(context) // 9] if plan.seed % 3 == 2 and context[-1] >= 0 else context
    token = crc32(f"{plan.seed} {plan.answer_index} {seen}".encode()) % FAKE_VOCAB
    while token in banned:
        token = (token + 1) % FAKE_VOCAB
    return token


def fake_answer(request: Request) -> tuple[list[int], FinishReason]:
    """What a request must come to, computed by hand: no blocks, no batch, no steps."""
    output: list[int] = []
    while len(output) < request.max_tokens:
        banned = request.stop_token_ids if len(output) < request.min_tokens else ()
        output.append(fake_token(request.sampling_plan, [*request.prompt, *output], banned))
        if output[-1] in request.stop_token_ids and len(output) > request.min_tokens:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


def given(plan: Plan) -> StepInput:
    """What the runner gets of a plan."""
    return step_input(plan)


class FakeRunner:
    """Keeps each token in its slot as a real cache does, and reads every context back from the slots."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, int] = {}
        self.broken: set[str] = set()
        """Requests whose rows have no score."""
        self.error: Exception | None = None
        """What each step raises."""
        self.drawn: dict[str, int] = {}
        """What the step before drew."""
        self.plans: list[list[tuple[str, int, int]]] = []

    def submit(self, step: StepInput) -> Done:
        rows = list(zip(step.request_ids, zip(*step.tables, strict=True), step.starts, step.counts, strict=True))
        longer = [count > 1 for count in step.counts]
        assert longer == sorted(longer), "rows of one token come first"
        self.plans.append([(name, start, count - len(step.drafts.get(name, ()))) for name, _, start, count in rows])
        if self.error is not None:
            raise self.error
        tokens = list(step.tokens)
        for name, at in step.pending.items():
            tokens[at] = self.drawn.get(name, 0)
        parts = []
        for name, tables, start, count in rows:
            parts.append((start, tables, tokens[:count], count - len(step.drafts.get(name, ()))))
            tokens = tokens[count:]
        for start, tables, some, kept in sorted(
            parts, key=lambda part: part[0]
        ):  # who shares what this step fills comes after it
            self.write(tables, start, some, kept)
        drawing = dict(zip(reversed(step.draw_ids), reversed(step.draws), strict=True))  # the first of each request's
        good = [row for row in rows if row[0] in drawing and row[0] not in self.broken]
        drawn = {name: self._drawn(step, name, tables, drawing[name]) for name, tables, *_ in good}
        self.drawn = {name: tokens[0] for name, tokens in drawn.items()}
        return Done(
            StepResult(
                tokens={name: tokens[0] for name, tokens in drawn.items()},
                errors={name: "no finite score" for name in drawing if name not in drawn},
                more={name: tokens[1:] for name, tokens in drawn.items()},
            )
        )

    def _drawn(self, step: StepInput, name: str, tables: Tables, draw: Draw) -> list[int]:
        """The next token, and the one after each token of the draft up to the first wrong one."""
        tokens: list[int] = []
        for guess in (*step.drafts.get(name, ()), None):
            context = self.read(tables, draw.position + len(tokens), step.early)
            tokens.append(fake_token(draw.plan, context, draw.banned_tokens))
            if tokens[-1] != guess:
                break
        return tokens

    def write(self, tables: Tables, start: int, tokens: Sequence[int], kept: int) -> None:
        """Put tokens `start`, `start + 1`, .. of a request into their slots; those after the first `kept` are a draft."""
        self.slots.update(zip(self.places(tables[0], start, start + len(tokens)), tokens, strict=True))

    def read(self, tables: Tables, end: int, early: bool) -> list[int]:
        """The tokens before `end`. What a failed step should have written is read only by one that was begun early, before
        it was known to have failed.
        """
        return [self.slots.get(at, 0) if early else self.slots[at] for at in self.places(tables[0], 0, end)]

    def places(self, blocks: Sequence[int], start: int, end: int) -> list[int]:
        size = self.block_size
        return [blocks[position // size] * size + position % size for position in range(start, end)]


class Gate:
    """Lets as many steps through as it was told to."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._steps = math.inf

    def open(self) -> None:
        self.allow(math.inf)

    def shut(self) -> None:
        with self._changed:
            self._steps = 0

    def allow(self, steps: float) -> None:
        with self._changed:
            self._steps += steps
            self._changed.notify_all()

    def pass_through(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._steps > 0, 20), "nobody opened the gate"
            self._steps -= 1


class GatedRunner(FakeRunner):
    """A fake whose steps wait at a gate, which is open at first."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.gate = Gate()

    def submit(self, step: StepInput) -> Done:
        self.gate.pass_through()
        return super().submit(step)


def ask(name: str, prompt: Iterable[int] = (1, 2, 3), max_tokens: int = 4, **fields) -> Request:
    """A greedy request, unless `fields` say otherwise."""
    sampling = fields.pop("sampling", SamplingParams(temperature=0))
    return Request(request_id=name, prompt=list(prompt), max_tokens=max_tokens, sampling=sampling, **fields)


def masked_first(requests: Iterable[Request]) -> list[Request]:
    """The same requests, which draw under their grammars' masks and not before them."""
    requests = list(requests)
    for request in requests:
        object.__setattr__(request.sampling_plan, "can_sample_unmasked", False)
    return requests


def sizes(**changes) -> EngineConfig:
    """Room for everything, and blocks of one's own, unless `changes` say otherwise."""
    values = {"num_blocks": 64, "block_size": 4, "max_batch_requests": 16, "max_batch_tokens": 256, "chunk_size": 1}
    values |= {"prefix_caching": False} | changes
    return EngineConfig(max_model_len=values.pop("max_model_len", values["num_blocks"] * values["block_size"]), **values)


def fake_engine(clock: Callable[[], float] | None = None, *, async_scheduling: bool = False, **changes) -> Engine:
    """An engine over a `FakeRunner`."""
    config, clock = sizes(**changes), clock or Clock()
    return Engine(Scheduler(config, clock), FakeRunner(config.block_size), clock, async_scheduling=async_scheduling)


def tiny_engine(net: Decoder, backend: str = "torch", *, async_scheduling: bool = False, **changes) -> Engine:
    """A real engine round `net`, in the dtype of its weights, on the CPU."""
    config, clock = sizes(**changes), Clock()
    dtype = net.embedding.tokens.weight.dtype
    cache = KVCache.allocate(net.config, config.num_blocks, config.block_size, dtype, "cpu")
    attention = BACKENDS[backend](net.config.attention_variants)
    return Engine(Scheduler(config, clock), ModelRunner(net, attention, cache, "cpu"), clock, async_scheduling=async_scheduling)


def run(engine: Engine, requests: Iterable[Request], steps: int = 1000) -> dict[str, list[Output]]:
    """Everything that came for each request, once the engine is idle."""
    outputs: dict[str, list[Output]] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        steps -= 1
        assert steps > 0, "the engine does not come to an end"
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    check_integrity(engine.scheduler)
    assert engine.scheduler.tables.num_free == engine.scheduler.config.num_blocks, "blocks are lost"
    return outputs


def told(outputs: Iterable[Output]) -> tuple[list[int], FinishReason | None]:
    """The tokens of one request's outputs, and its finish reason; nothing may follow that."""
    outputs = list(outputs)
    assert all(output.finish_reason is None for output in outputs[:-1]), "an output after the last"
    return [token for output in outputs for token in output.token_ids], outputs[-1].finish_reason


def answers(engine: Engine, requests: Iterable[Request]) -> dict[str, tuple[list[int], FinishReason | None]]:
    """Tokens and finish reason of each request."""
    return {name: told(outputs) for name, outputs in run(engine, requests).items()}


def info(config: EngineConfig) -> EngineInfo:
    """What an engine over a fake says of itself."""
    shown = {name: getattr(config, name) for name in ("max_model_len", "max_batch_requests", "block_size", "num_blocks")}
    kind = {"family": "fake", "device": "cpu", "dtype": "float32", "weights": "float32"}
    kind |= {"backend": "fake", "fingerprint": "fp_0"}
    return EngineInfo(
        num_parameters=0,
        max_queued_requests=0,
        vocab_size=FAKE_VOCAB,
        hidden_size=4,
        cache_bytes=0,
        bos_token_id=None,
        eos_token_ids=(),
        **shown,
        **kind,
    )


@contextmanager
def threaded(
    max_queued_requests: int = 64,
    max_queued_tokens: int = 1 << 19,
    clock: Callable[[], float] = time.monotonic,
    dies: bool = False,
    **changes,
) -> Iterator[AsyncEngine]:
    """A started `AsyncEngine` over a `GatedRunner`; at the end it is closed and, unless it `dies`, every block free."""
    config = sizes(**changes)
    inner = Engine(Scheduler(config, clock), GatedRunner(config.block_size), clock)
    most = {"max_queued_requests": max_queued_requests, "max_queued_tokens": max_queued_tokens}
    engine = AsyncEngine(inner, info(config), **most, clock=clock)
    engine.start()
    try:
        yield engine
    finally:
        inner.runner.gate.open()
        engine.close()
    assert dies or not engine._queued_tokens
    assert not engine._thread.is_alive(), "the thread outlives its engine"
    if not dies:
        check_integrity(inner.scheduler)
        assert inner.scheduler.tables.num_free == config.num_blocks, "blocks are lost"


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Let the event loop run until `condition` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.001)
