"""True if the engine on this device gives the tokens of the equation: answers.py FOLDER DEVICE LOAD_FORMAT. A line of JSON.

The engine answers three prompts, greedily, in bfloat16, together, as it serves: on a GPU by Triton and recorded steps. Then
torch computes the same model in float32 on the CPU, one text after the other, and says for each token how far its score lies
below the best one. Another token than the best is no fault where the two are so close that rounding to bfloat16 may decide: by
twice the largest error of a score that torch makes in bfloat16 on the CPU, which is measured beside.
"""

import asyncio
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attend.model.engine.build import build_engine
from attend.model.engine.options import EngineOptions
from attend.model.engine.request import Request
from attend.model.net.attention import attend, causal_mask
from attend.model.net.checkpoint import load_decoder
from attend.model.net.transformer import Decoder
from attend.model.params import SamplingParams

PROMPTS, OUTPUT = (7, 64, 333), 24
"""Tokens: of less than a block, of whole blocks, and of a part of one after many."""
OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 512, "kv_cache_memory": 1 << 28}


@dataclass(frozen=True)
class Answer:
    """A prompt, and what followed it."""

    prompt: list[int]
    output: list[int]


def prompts(vocab_size: int) -> list[list[int]]:
    """Random tokens, the same each time."""
    dice = random.Random(0)
    return [[dice.randrange(vocab_size) for _ in range(length)] for length in PROMPTS]


def compute_answers(folder: Path, device: str, load_format: str) -> tuple[list[Answer], dict[str, Any]]:
    """What the engine answers, and what it is."""
    engine = build_engine(folder, EngineOptions(device=device, load_format=load_format, **OPTIONS))
    info = engine.info
    facts = {"backend": info.backend, "dtype": info.dtype, "recorded": info.recorded_sizes[0] > 0}
    requests = [
        Request(f"{at}", prompt, OUTPUT, SamplingParams(temperature=0.0))
        for at, prompt in enumerate(prompts(engine.info.vocab_size))
    ]
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}

    async def read() -> None:
        async for outputs in engine.generate(requests):
            for output in outputs:
                found[output.request_id] += output.token_ids

    engine.start()
    try:
        asyncio.run(read())
    finally:
        engine.close()
    return [Answer(list(request.prompt), found[request.request_id]) for request in requests], facts


class Dense:
    """The equation, over all tokens of one text."""

    def __init__(self, net: Decoder, length: int) -> None:
        self.variants, self.positions = net.config.attention_variants, torch.arange(length)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        variant = self.variants[layer]
        return attend(q, k, v, causal_mask(self.positions, len(self.positions), variant.window), variant, *sinks)


@torch.inference_mode()
def scores(net: Decoder, answer: Answer) -> Tensor:
    """What the equation gives for each token of the output, after the prompt and the output before it: [T, V], float32."""
    tokens = torch.tensor([*answer.prompt, *answer.output[:-1]])
    net.reach(len(tokens))
    hidden = net(tokens, torch.arange(len(tokens)), Dense(net, len(tokens)))
    return net.logits(hidden[len(answer.prompt) - 1 :]).float()


def verdict(answers: Sequence[Answer], exact_scores: Sequence[Tensor], rounded_scores: Sequence[Tensor]) -> dict[str, Any]:
    """`exact_scores` and `rounded_scores` are scores [T, V] of each answer in float32 and in bfloat16."""
    allowed = 2 * max(float((a - b).abs().max()) for a, b in zip(exact_scores, rounded_scores, strict=True))
    found: dict[str, Any] = {"tokens": 0, "other": 0, "margin": 0.0, "allowed": allowed, "wrong": []}
    for number, (answer, each) in enumerate(zip(answers, exact_scores, strict=True)):
        if len(answer.output) != OUTPUT:
            found["wrong"].append(f"prompt {number}: {len(answer.output)} tokens in place of {OUTPUT}")
            continue
        for at, (token, best, margin) in enumerate(margins(answer.output, each)):
            found["tokens"] += 1
            found["other"] += token != best
            found["margin"] = max(found["margin"], margin)
            if not margin <= allowed:
                found["wrong"].append(f"prompt {number}, token {at}: {token}, not {best}, whose score is {margin:.3g} higher")
    return found


def margins(output: Sequence[int], exact: Tensor) -> list[tuple[int, int, float]]:
    """Of each token: itself, the best one, and how much higher the score of that is."""
    best = exact.max(dim=-1)
    own = exact.gather(1, torch.tensor(output)[:, None])[:, 0]
    return list(zip(output, best.indices.tolist(), (best.values - own).tolist(), strict=True))


def main() -> None:
    """Compare, and print. The weights are drawn anew for the CPU, on the device, so that they are the same."""
    folder, device, load_format = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    net = load_decoder(folder, torch.bfloat16, device, 0, dummy=load_format == "dummy").to("cpu")
    answers, facts = compute_answers(folder, device, load_format)
    rounded = [scores(net, answer) for answer in answers]
    net = net.float()
    exact = [scores(net, answer) for answer in answers]
    print(json.dumps(facts | verdict(answers, exact, rounded)))


if __name__ == "__main__":
    main()
