"""One thread in place of all: an event loop in virtual time, and what stands in for threads, locks and randomness."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

from attend.model.engine import loop as engine_loop
from attend.service.generation import prepare, thread_pools
from tests.simulation.model import compiled
from tests.virtual_time import VirtualLoop

POOLS = (thread_pools._quick, thread_pools._alone, thread_pools._short, thread_pools._patient, prepare._compiling)


class Broken(AssertionError):
    """A law does not hold."""


class World(VirtualLoop):
    """The event loop of a life. It runs only while the step thread waits or computes: the two take turns in one thread."""

    def __init__(self, seed: int, limit: float) -> None:
        """Whatever still runs at second `limit` never ends."""
        super().__init__()
        self.dice = random.Random(f"world {seed}")
        self.broken: BaseException | None = None
        """The first law that did not hold. What raises it may be inside code that survives errors."""
        self.set_exception_handler(lambda _, context: self.note(context.get("exception") or Broken(context["message"])))
        self.call_at(limit, self._too_late)

    def note(self, error: BaseException) -> None:
        """A law did not hold."""
        self.broken = self.broken or error
        self.stop()

    def lawful(self, check: Callable[..., None], *given: object) -> None:
        """Check a law where the step thread is: it would survive the error."""
        try:
            check(*given)
        except AssertionError as error:
            self.note(error)
            raise

    def elapse(self, seconds: float) -> None:
        """Let the event loop run for so long. For the step thread."""
        timer = self.call_later(seconds, self.stop)
        self.run_forever()
        timer.cancel()
        if self.broken is not None:
            raise self.broken

    def _too_late(self) -> None:
        self.note(Broken("somebody waits for ever"))

    def _write_to_self(self) -> None:
        """Nobody else can wake it."""


class Bell:
    """A threading.Condition of a single thread: who waits lets the event loop run until it rings."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waits = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def notify(self) -> None:
        if self._waits:
            self._world.stop()

    def wait(self, timeout: float) -> None:
        self._waits = True
        try:
            self._world.elapse(timeout)
        finally:
            self._waits = False


class StepThread:
    """A threading.Thread that its creator runs, in its own thread."""

    def __init__(self, target: Callable[[], None], name: str, daemon: bool) -> None:
        self._target = target
        self._alive = True

    def is_alive(self) -> bool:
        return self._alive

    def join(self, timeout: float) -> None:
        """Whoever waits for it is in the same thread: it ends when they have gone on."""

    def run(self) -> None:
        self._target()
        self._alive = False


class LateThreads:
    """In place of the threads of a pool: each piece of work is done at once, or a while later."""

    def __init__(self, world: World, longest: float) -> None:
        self._world = world
        self._longest = longest

    def submit(self, work: Callable[[], None]) -> None:
        dice = self._world.dice
        self._world.call_later(dice.choice([0.0, dice.uniform(0, self._longest)]), work)


class Secrets:
    """What the service draws by itself."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(f"secrets {seed}")

    def randbits(self, count: int) -> int:
        return self._dice.getrandbits(count)

    def token_hex(self, count: int) -> str:
        return f"{self._dice.getrandbits(8 * count):0{2 * count}x}"


class Forms:
    """In place of a `GrammarCompiler`: nothing is compiled in a child process, or twice."""

    def __init__(self, *facts: object, **more: object) -> None:
        self.compile = compiled


@contextmanager
def one_thread(world: World, seed: int, *, inline: int, large: int, most_large: int) -> Iterator[None]:
    """While this lasts, all that is made for the service runs in `world`, and nothing depends on the machine."""
    threads = SimpleNamespace(Condition=lambda: Bell(world), Thread=StepThread)
    longest = world.dice.choice([0.01, 0.3, 0.6])
    with ExitStack() as stack:
        for pool in POOLS:
            stack.enter_context(patch.object(pool, "_threads", LateThreads(world, longest)))
            stack.enter_context(patch.object(pool, "_rests", False))
        stack.enter_context(patch.object(thread_pools, "time", SimpleNamespace(monotonic=world.time, thread_time=world.time)))
        stack.enter_context(patch.object(engine_loop, "threading", threads))
        stack.enter_context(patch.object(prepare, "secrets", Secrets(seed)))
        stack.enter_context(patch.object(prepare, "INLINE_CHARACTERS", inline))
        stack.enter_context(patch.object(prepare, "GrammarCompiler", Forms))
        stack.enter_context(patch.object(thread_pools, "LARGE", large))
        stack.enter_context(
            patch.object(thread_pools, "_large", thread_pools.FairSemaphore(most_large, "long texts are waiting"))
        )
        yield


def work_waits() -> bool:
    """True if a pool has work that nobody will do."""
    return any(pool._waiting for pool in POOLS)
