"""What LoRA adapters cost a step: attend bench lora

In-process, shape S: 16 streams, one token each a step, in an engine without adapters, in one that might have some, with one
adapter for all streams, and with 8 different ones. The engines take turns, a step each.
"""

import asyncio
import itertools
import json
import tempfile
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from attend.model.engine.build import build_engine
from attend.model.engine.options import EngineOptions
from attend.model.engine.request import Request
from attend.model.params import SamplingParams
from loadtest.bench.figures import Figure, file, options_of, ratios, show, take_turns
from loadtest.bench.machine import threads
from loadtest.bench.shapes import AT_ONCE, write_shape

ENDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The modules that an adapter changes: all matrices of the layers."""
PROMPT = 16
"""Tokens before the first step that counts: the longer, the smaller the part of the matrices."""
ADAPTERS, RANK = 8, 16


def write_adapter(model: Path, folder: Path, rank: int, seed: int) -> Path:
    """An adapter of random numbers for every matrix of a checkpoint's layers."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    with safe_open(str(model / "model.safetensors"), framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - not a dict
            module = name.removesuffix(".weight")
            if module.endswith(ENDS):
                rows, columns = weights.get_slice(name).get_shape()
                for factor, size in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
                    key = f"base_model.model.{module}.{factor}.weight"
                    tensors[key] = (torch.randn(size, generator=generator) * 0.02).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(ENDS)}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


class Case:
    """One engine with its streams, of which each step draws a token."""

    def __init__(self, model: Path, adapters: list[Path] | None, streams: int, threads: int, backend: str = "native") -> None:
        """`adapters`: the streams have them in turn; None: the engine has no room for any."""
        options = EngineOptions(
            device="cpu",
            dtype="bfloat16",
            backend=backend,
            num_threads=threads,
            kv_cache_memory=1 << 29,
            prefix_caching=False,
            adapters=adapters is not None,
        )
        built = build_engine(model, options)
        self.engine, reader = built._engine, built.adapters
        loaded = [] if reader is None else [reader.read(folder) for folder in adapters or ()]
        for number, adapter in zip(range(streams), itertools.cycle(loaded or [None]), strict=False):
            prompt = [(7 * at + number) % built.info.vocab_size for at in range(PROMPT)]
            room = built.info.max_model_len - PROMPT
            self.engine.add(Request(str(number), prompt, room, SamplingParams(temperature=0), adapter=adapter))
        while any(request.num_tokens == PROMPT for request in self.engine.scheduler._by_id.values()):
            self.engine.step()

    async def step(self) -> float:
        """Milliseconds of one step."""
        started = time.perf_counter()
        self.engine.step()
        return (time.perf_counter() - started) * 1e3


def measure(cases: dict[str, Case], turns: int) -> list[Figure]:
    """Milliseconds of a step of each case, and each over the first."""
    found = asyncio.run(take_turns({name: case.step for name, case in cases.items()}, turns))
    first, *others = cases
    figures = [Figure(f"a step, {name}", "ms", tuple(values)) for name, values in found.items()]
    return figures + [Figure(f"a step, {name} / {first}", "ratio", ratios(found[name], found[first])) for name in others]


def main(words: list[str] | None = None) -> None:
    """Measure, print the table."""
    parser = options_of(__doc__, turns=88)
    parser.add_argument("--threads", type=int, default=threads(), help="of each engine; default: all cores")
    options = parser.parse_args(words)
    model = write_shape("S")
    with tempfile.TemporaryDirectory() as room:
        folders = [write_adapter(model, Path(room) / str(number), RANK, number) for number in range(ADAPTERS)]
        sides = {"no adapters": None, "room for adapters": [], "1 adapter": folders[:1], f"{ADAPTERS} adapters": folders}
        found = measure({name: Case(model, side, AT_ONCE, options.threads) for name, side in sides.items()}, options.turns)
    file(options.json, show(found), found, bench="lora")


if __name__ == "__main__":
    main()
