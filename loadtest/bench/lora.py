"""What LoRA adapters cost a step: attend bench lora

In-process: the same streams, one token each a step, with no adapter in an engine that has none, with none where there might
be some, with one for all of them, and with as many as are asked for. Steps take turns: a noisy machine is noisy for all.
"""

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path

from loadtest.bench.figures import Figure, file, ratios, show
from loadtest.bench.shapes import AT_ONCE, FOLDER, SHAPES, write_shape

ENDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The modules that an adapter changes: all matrices of the layers."""
PROMPT = 16
"""Tokens before the first step that counts: the longer, the smaller the part of the matrices."""
ROUNDS = 8
"""Steps of each case whose times are summed to one value."""


def write_adapter(model: Path, folder: Path, rank: int, seed: int) -> Path:
    """An adapter of random numbers for every matrix of a checkpoint's layers."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

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

    def __init__(self, model: Path, adapters: list[Path] | None, backend: str, streams: int, threads: int) -> None:
        """`adapters`: the streams have them in turn; None: the engine has no room for any."""
        from attend.model.engine.build import build_engine
        from attend.model.engine.options import EngineOptions
        from attend.model.engine.request import Request
        from attend.model.params import SamplingParams

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
            asked = Request(str(number), prompt, room, SamplingParams(temperature=0), adapter=adapter)
            self.engine.add(asked)
        while any(request.num_tokens == PROMPT for request in self.engine.scheduler._by_id.values()):
            self.engine.step()

    def step(self) -> float:
        """Seconds of one step."""
        started = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - started


def measure(cases: dict[str, Case], turns: int) -> dict[str, tuple[float, ...]]:
    """Milliseconds of a step, by case: one value a turn."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(turns + 1):
        seconds = dict.fromkeys(cases, 0.0)
        for _ in range(ROUNDS):
            for name, case in cases.items():
                seconds[name] += case.step()
        for name, total in seconds.items():
            found[name].append(1000 * total / ROUNDS)
    return {name: tuple(values[1:]) for name, values in found.items()}  # the first turn warms up


def main(words: list[str] | None = None) -> None:
    """Measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--backend", choices=("native", "torch"), default="native")
    parser.add_argument("--streams", type=int, default=AT_ONCE, help=f"at once (default {AT_ONCE})")
    parser.add_argument("--adapters", type=int, default=8, help="different ones among them (default 8)")
    parser.add_argument("--rank", type=int, default=16, help="of every matrix (default 16)")
    parser.add_argument("--turns", type=int, default=11, help=f"of {ROUNDS} steps each (default 11)")
    parser.add_argument("--threads", type=int, default=2, help="of each engine (default 2)")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args(words)
    model = write_shape(options.shape, FOLDER)
    with tempfile.TemporaryDirectory() as room:
        folders = [write_adapter(model, Path(room) / str(n), options.rank, n) for n in range(options.adapters)]
        sides: dict[str, list[Path] | None] = {"no adapters": None, "room for adapters": [], "1 adapter": folders[:1]}
        sides[f"{options.adapters} adapters"] = folders
        cases = {name: Case(model, side, options.backend, options.streams, options.threads) for name, side in sides.items()}
        found = measure(cases, options.turns)
    figures = [Figure(f"a step, {name}", "ms", values) for name, values in found.items()]
    figures += [
        Figure(f"a step, {name} / no adapters", "ratio", ratios(values, found["no adapters"]))
        for name, values in list(found.items())[1:]
    ]
    file(options.json, show(figures), figures, bench="lora", shape=options.shape)


if __name__ == "__main__":
    main()
