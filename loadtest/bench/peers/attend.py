"""Attend's engine through its asynchronous face, as the service uses it."""

import asyncio
import os
from importlib.metadata import version
from pathlib import Path


def start(folder, threads):
    """Facts, and (prompts, output tokens) -> tokens made."""
    from model.engine.build import EngineOptions, build_engine
    from model.engine.request import Request
    from model.params import SamplingParams

    form = {"dtype": "bfloat16", "quantize": os.environ.get("ATTEND_BENCH_WEIGHTS", "none")}
    options = EngineOptions(**form, num_threads=threads, kv_cache_memory=2 << 30, prefix_caching=False)
    engine = build_engine(Path(folder), options)
    engine.start()
    runner, greedy = asyncio.Runner(), SamplingParams(temperature=0)

    async def work(prompts, output):
        requests = [Request(f"{at}", prompt, output, greedy) for at, prompt in enumerate(prompts)]
        made = 0
        async for outputs in engine.generate(requests):
            made += sum(len(each.token_ids) for each in outputs)
        return made

    waits = os.environ.get("OMP_WAIT_POLICY")
    facts = {"name": "Attend", "version": version("attend"), "backend": engine.info.backend, "dtype": engine.info.dtype}
    return facts | {"omp_wait_policy": waits}, lambda prompts, output: runner.run(work(prompts, output))
