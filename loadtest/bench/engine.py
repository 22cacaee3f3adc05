"""The engine beside `transformers` generate, in one process, on the same weights: python -m loadtest.bench.engine

W1: one request, 128 -> 128 tokens, decode tokens/s. W2: 16 at once, output tokens/s. W3: a prompt of 1024 tokens,
prompt tokens/s. Greedy, end-of-text ignored. The contestants take turns; the table shows medians and the median of
the ratios of neighbours, with the range of its middle half.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from loadtest.bench.shapes import SHAPES, write_shape
from model.engine.build import EngineOptions, build_engine
from model.engine.loop import AsyncEngine
from model.engine.request import Request
from model.params import SamplingParams

PROMPT, OUTPUT, AT_ONCE, LONG = 128, 128, 16, 1024
Contestant = Callable[[int, int, int], float]
"""(requests, prompt tokens, output tokens) -> seconds."""


def prompts(count: int, length: int) -> list[list[int]]:
    """Different prompts, the same for every contestant."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(100, 8000, (count, length), generator=generator).tolist()


def ours(engine: AsyncEngine, runner: asyncio.Runner) -> Contestant:
    """Attend's engine through its asynchronous face, as the service uses it."""

    async def work(count: int, length: int, output: int) -> None:
        greedy = SamplingParams(temperature=0)
        requests = [Request(f"{i}", prompt, output, greedy) for i, prompt in enumerate(prompts(count, length))]
        made = 0
        async for outputs in engine.generate(requests):
            made += sum(len(each.token_ids) for each in outputs)
        assert made == count * output

    def run(count: int, length: int, output: int) -> float:
        started = time.perf_counter()
        runner.run(work(count, length, output))
        return time.perf_counter() - started

    return run


def theirs(folder: Path) -> Contestant:
    """transformers' generate with its dynamic cache."""
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def run(count: int, length: int, output: int) -> float:
        tokens = torch.tensor(prompts(count, length))
        started = time.perf_counter()
        limits = {"min_new_tokens": output, "max_new_tokens": output, "do_sample": False, "pad_token_id": 0}
        result = net.generate(tokens, attention_mask=torch.ones_like(tokens), **limits)
        assert result.shape == (count, length + output)
        return time.perf_counter() - started

    return run


def w1(run: Contestant) -> float:
    """Decode tokens/s of one stream: the first token's time is taken away."""
    return (OUTPUT - 1) / (run(1, PROMPT, OUTPUT) - run(1, PROMPT, 1))


def w2(run: Contestant) -> float:
    """Output tokens/s of 16 at once."""
    return AT_ONCE * OUTPUT / run(AT_ONCE, PROMPT, OUTPUT)


def w3(run: Contestant) -> float:
    """Prompt tokens/s of a long prompt."""
    return LONG / run(1, LONG, 1)


def compare(shape: str, folder: Path, pairs: int, threads: int) -> list[str]:
    """Rows of the markdown table for one shape."""
    checkpoint = write_shape(shape, folder)
    engine = build_engine(
        checkpoint, EngineOptions(dtype="bfloat16", num_threads=threads, kv_cache_memory=2 << 30, prefix_caching=False)
    )
    engine.start()
    rows = []
    with asyncio.Runner() as runner:
        contestants = (ours(engine, runner), theirs(checkpoint))
        for name, work in (("W1", w1), ("W2", w2), ("W3", w3)):
            for contestant in contestants:
                work(contestant)  # warm-up
            values = [tuple(work(contestant) for contestant in contestants) for _ in range(pairs)]
            rows.append(row(shape, name, values))
    engine.close()
    return rows


def row(shape: str, name: str, values: list[tuple[float, float]]) -> str:
    """Medians, and the ratio with its quartiles."""
    mine, other = (statistics.median(column) for column in zip(*values, strict=True))
    ratios = sorted(a / b for a, b in values)
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return f"| {shape} | {name} | {mine:.0f} | {other:.0f} | {middle:.2f} ({low:.2f} to {high:.2f}) |"


def main() -> None:
    """Read the flags, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: both")
    parser.add_argument("--pairs", type=int, default=5, help="turns of each contestant (default 5)")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "attend-shapes", help="for the checkpoints"
    )
    options = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    print("| shape | work | Attend tok/s | transformers tok/s | ratio (middle half) |\n| --- | --- | --- | --- | --- |")
    for shape in options.shape or SHAPES:
        print("\n".join(compare(shape, options.folder, options.pairs, threads)), flush=True)


if __name__ == "__main__":
    main()
