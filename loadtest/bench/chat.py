"""What a turn of a chat waits for, in one process: attend bench chat

A chat of 20 turns, 16 thousand tokens in the end. Each turn sends all of the chat so far and a question, and its answer goes
into the next one. Two models of shape M, with random weights: Qwen3.5's, three layers of four of which keep a recurrent
state, and Llama's. The table shows the milliseconds to the first token of a turn, by quarters of the chat, and the first
over the second; and the tokens of a turn that were not found in the prefix cache.
"""

import asyncio
import json
import random
import tempfile
from pathlib import Path

import torch

from attend.model.engine.build import build_engine
from attend.model.engine.loop import AsyncEngine
from attend.model.engine.options import EngineOptions
from attend.model.engine.request import Request
from loadtest.bench.arrivals import GREEDY
from loadtest.bench.family import SIZES, SWITCHES
from loadtest.bench.figures import Comparison, Figure, file, options_of, show
from loadtest.bench.machine import threads
from loadtest.bench.shapes import FOLDER

MODELS = {"qwen3_5": {"model_type": "qwen3_5_text", **SWITCHES["qwen3_5"]}, "llama": {"model_type": "llama"}}
CONTEXT = 1 << 15
QUARTERS = 4


def write_config(name: str, folder: Path = FOLDER) -> Path:
    """A folder with the config.json of a model, without weights."""
    target = folder / "chat" / name
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(
        json.dumps(SIZES | MODELS[name] | {"max_position_embeddings": CONTEXT}), encoding="utf-8"
    )
    return target


class Chat:
    """One chat with an engine, whose questions are the same for the same seed."""

    def __init__(self, engine: AsyncEngine, name: str, seed: int) -> None:
        self._engine, self._name, self._dice = engine, name, random.Random(seed)
        self._text: list[int] = []
        self._turns = 0
        self.computed: list[int] = []
        """Tokens of each turn's prompt that were not found."""

    async def turn(self, question: int, answer: int) -> float:
        """Milliseconds to the first token after a question of so many tokens; the answer is read to its end."""
        self._text += self._dice.choices(range(100, 8000), k=question)
        request = Request(f"{self._name} {self._turns}", list(self._text), answer, GREEDY)
        self._turns += 1
        loop = asyncio.get_running_loop()
        asked, first = loop.time(), 0.0
        async for outputs in self._engine.generate([request]):
            for output in outputs:
                first = first or loop.time()
                self._text += output.token_ids
        self.computed.append(len(request.prompt) - request.num_cached)
        return (first - asked) * 1e3


async def measure(
    engines: dict[str, AsyncEngine], turns: int, tokens: int, answer: int, chats: int
) -> list[Comparison | Figure]:
    """Chats of all engines at a time, turn by turn."""
    times: dict[str, list[list[float]]] = {name: [[] for _ in range(turns)] for name in engines}
    computed: dict[str, list[float]] = {name: [] for name in engines}
    for seed in range(chats + 1):  # the first warms up
        held = {name: Chat(engine, f"{name} {seed}", seed) for name, engine in engines.items()}
        for at in range(turns):
            for name, chat in held.items():
                taken = await chat.turn(tokens // turns - answer, answer)
                if seed:
                    times[name][at].append(taken)
        for name, chat in held.items():
            computed[name] += chat.computed
    found: list[Comparison | Figure] = []
    for quarter in range(QUARTERS):
        part = slice(turns * quarter // QUARTERS, turns * (quarter + 1) // QUARTERS)
        values = {name: [taken for turn in of[part] for taken in turn] for name, of in times.items()}
        found.append(Comparison(f"first token, turns {part.start + 1} to {part.stop}", "ms", values))
    return [*found, *(Figure(f"computed in a turn, {name}", "tokens", tuple(each)) for name, each in computed.items())]


def main(words: list[str] | None = None) -> None:
    """Read the flags, print the table."""
    parser = options_of(__doc__)
    parser.add_argument("--turns", type=int, default=20, help="of a chat (default 20)")
    parser.add_argument("--tokens", type=int, default=16000, help="of a chat (default 16000)")
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer (default 64)")
    parser.add_argument("--chats", type=int, default=3, help="chats of each model (default 3)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "attend-shapes", help="for config.json")
    options = parser.parse_args(words)
    torch.set_num_threads(threads())
    sizes = EngineOptions(num_threads=threads(), kv_cache_memory=2 << 30, load_format="dummy")
    engines = {name: build_engine(write_config(name, options.folder), sizes) for name in MODELS}
    for engine in engines.values():
        engine.start()
    found = asyncio.run(measure(engines, options.turns, options.tokens, options.answer, options.chats))
    for engine in engines.values():
        engine.close()
    figures = [figure for each in found for figure in (each.figures() if isinstance(each, Comparison) else [each])]
    file(options.json, show(figures), figures, bench="chat")


if __name__ == "__main__":
    main()
