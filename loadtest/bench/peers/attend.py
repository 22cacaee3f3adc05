"""Attend's engine through its asynchronous face, as the service uses it."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def start(folder: str, threads: int) -> tuple[dict[str, Any], Callable[..., int]]:
    """Facts, and (prompts, output tokens, do_sample) -> tokens made."""
    import torch

    from attend.model.engine.build import build_engine
    from attend.model.engine.fingerprint import own_version
    from attend.model.engine.options import EngineOptions
    from attend.model.engine.request import Request
    from attend.model.net.checkpoint import read_config
    from attend.model.params import SamplingParams

    form, context = os.environ.get("BENCH_FORM", "bf16"), int(os.environ.get("BENCH_CONTEXT", "0"))
    memory = max(2 << 30, context * read_config(Path(folder)).kv_bytes_per_token(2))
    options = EngineOptions(
        dtype="bfloat16",
        quantize=form if form in ("int8", "int4") else "none",
        load_format=os.environ.get("BENCH_LOAD", "auto"),
        kv_cache_memory=None if torch.cuda.is_available() else memory,
        num_threads=threads,
        prefix_caching=context > 0,
    )
    engine = build_engine(Path(folder), options)
    engine.start()
    runner, greedy, drawn = asyncio.Runner(), SamplingParams(temperature=0), SamplingParams(temperature=0.7, top_p=0.95)

    async def work(prompts: list[list[int]], output: int, sampling: SamplingParams) -> int:
        requests = [Request(f"{at}", prompt, output, sampling, seed=at) for at, prompt in enumerate(prompts)]
        made = 0
        async for outputs in engine.generate(requests):
            made += sum(len(each.token_ids) for each in outputs)
        return made

    info, waits = engine.info, os.environ.get("OMP_WAIT_POLICY")
    facts: dict[str, Any] = {"name": "Attend", "version": own_version(), "backend": info.backend, "weights": info.weights}
    facts |= {
        "fingerprint": info.fingerprint,
        "samples": True,
        "recorded": info.recorded_sizes[0] > 0,
        "omp_wait_policy": waits,
    }

    def generate(prompts: list[list[int]], output: int, do_sample: bool = False) -> int:
        return runner.run(work(prompts, output, drawn if do_sample else greedy))

    return facts, generate
