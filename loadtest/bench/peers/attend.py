"""Attend's engine through its asynchronous face, as the service uses it."""

import asyncio
import os
from pathlib import Path


def start(folder, threads):
    """Facts, and (prompts, output tokens, sampled) -> tokens made."""
    import torch

    from attend.model.engine.build import build_engine
    from attend.model.engine.fingerprint import own_version
    from attend.model.engine.options import EngineOptions
    from attend.model.engine.request import Request
    from attend.model.params import SamplingParams

    form = os.environ.get("BENCH_FORM", "bf16")
    weights = {"dtype": "bfloat16", "quantize": "none" if form == "bf16" else form}
    weights |= {"load_format": os.environ.get("BENCH_LOAD", "auto")}
    sizes = {} if torch.cuda.is_available() else {"kv_cache_memory": 2 << 30}
    options = EngineOptions(**weights, **sizes, num_threads=threads, prefix_caching=False)
    engine = build_engine(Path(folder), options)
    engine.start()
    runner, greedy, drawn = asyncio.Runner(), SamplingParams(temperature=0), SamplingParams(temperature=0.7, top_p=0.95)

    async def work(prompts, output, sampling):
        requests = [Request(f"{at}", prompt, output, sampling, seed=at) for at, prompt in enumerate(prompts)]
        made = 0
        async for outputs in engine.generate(requests):
            made += sum(len(each.token_ids) for each in outputs)
        return made

    waits = os.environ.get("OMP_WAIT_POLICY")
    facts = {"name": "Attend", "version": own_version(), "backend": engine.info.backend, "weights": engine.info.weights}
    facts |= {"fingerprint": engine.info.fingerprint, "samples": True}
    facts["recorded"] = engine.engine.runner.graphs is not None

    def generate(prompts, output, sampled=False):
        return runner.run(work(prompts, output, drawn if sampled else greedy))

    return facts | {"omp_wait_policy": waits}, generate
