"""Models whose processes are played, in virtual time."""

import asyncio
from contextlib import AsyncExitStack

from attend.service.runtime.models.entries import Entry, ModelsFile, Plan, ServedModel
from attend.service.runtime.models.pool import Pool, State
from attend.service.runtime.models.process import LoadFailed
from attend.service.settings import Settings

LOAD_SECONDS = 3.0


class FakeProcess:
    """A process that ends when it is told to, and not before its calls have."""

    def __init__(self, machine: "Machine", name: str, memory: int) -> None:
        self.machine, self.name, self.memory = machine, name, memory
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def wait_for_exit(self) -> str:
        return await self.over

    async def stop(self, seconds: float = 0.0) -> None:
        assert seconds or not self.machine.pool.slots[self.name].calls, f"{self.name} is told to end amid its calls"
        await asyncio.sleep(0.5)
        self.die("with status 0")

    async def close(self) -> None:
        assert self.over.done()

    def die(self, how: str = "by SIGKILL") -> None:
        if not self.over.done():
            self.over.set_result(how)
            self.machine.alive.discard(self.name)


class Machine:
    """Starts such processes, and checks that they fit: `sizes` in bytes by name. What is in `broken` does not load."""

    def __init__(self, sizes, budget=10, pins=(), **limits) -> None:
        entries = [Entry(name=name, memory=size, pin=name in pins) for name, size in sizes.items()]
        file = ModelsFile(models=entries, memory_budget=budget, **limits)
        self.sizes, self.budget = sizes, budget
        self.alive: set[str] = set()
        self.broken: set[str] = set()
        self.starts: list[str] = []
        self.measured = 0
        """Bytes that a process is found to take; 0: not known."""
        self.pool: Pool = Pool(
            Plan({entry.name: ServedModel(entry, Settings()) for entry in entries}, file, budget), self.start
        )

    async def start(self, model: ServedModel) -> FakeProcess:
        self.starts.append(model.name)
        self.alive.add(model.name)
        assert sum(self.sizes[name] for name in self.alive) <= self.budget
        try:
            await asyncio.sleep(LOAD_SECONDS)
            if model.name in self.broken:
                raise LoadFailed("model.safetensors is missing")
        except BaseException:
            self.alive.discard(model.name)
            raise
        return FakeProcess(self, model.name, self.measured)

    async def call(self, name: str, seconds: float = 1.0) -> None:
        """A call of so many seconds, in which the model stays."""
        async with self.pool.use(self.pool.slots[name]) as process:
            assert process.name == name
            await asyncio.wait({process.over}, timeout=seconds)

    async def watch(self) -> None:
        """What the server does each second."""
        while True:
            await self.pool.look()
            await asyncio.sleep(1)

    def states(self) -> str:
        """The models that are loaded, in order."""
        return " ".join(name for name, slot in self.pool.slots.items() if slot.state is State.LOADED)


async def background(stack: AsyncExitStack, coroutine) -> asyncio.Task[None]:
    """A task that ends with the block."""
    task = asyncio.create_task(coroutine)

    async def end() -> None:
        task.cancel()
        await asyncio.wait({task})

    stack.push_async_callback(end)
    return task
