"""An int8 KV cache beside a bfloat16 one: attend bench kv_cache --shape M

Decode steps of the native decoder with random weights: 1 and 16 requests, each with so many tokens before its own and with
blocks of its own. One decoder, two caches, which take turns, a step each; a ratio is the median of the quotients of neighbours.
"""

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from attend.model.config import ModelConfig
from attend.model.net.families.table import FAMILIES
from attend.model.net.kv_cache import KVCache
from attend.model.net.native.decoder import NativeBackend
from attend.model.net.paged_attention import BatchLayout, PagedAttention, Row
from attend.model.shapes import SHAPES
from loadtest.bench.family import BLOCK, SIZES, random_decoder
from loadtest.bench.figures import Comparison, file, options_of, table, take_turns
from loadtest.bench.machine import threads
from loadtest.bench.shapes import AT_ONCE

CONTEXTS = (128, 8192)
HELD = {"int8": torch.int8, "bfloat16": torch.bfloat16}


def config_of(shape: str, positions: int) -> ModelConfig:
    """Llama of a shape's sizes, for so many positions."""
    return FAMILIES["llama"].read(SIZES | SHAPES[shape] | {"model_type": "llama", "max_position_embeddings": positions})


class Steps:
    """A decoder, and a cache of each kind."""

    def __init__(self, config: ModelConfig) -> None:
        self.net, self.backend = random_decoder(config), NativeBackend(config.attention_variants)
        self.blocks = config.max_positions // BLOCK
        counts = AT_ONCE * self.blocks
        self.caches = {name: KVCache.allocate(config, counts, BLOCK, held, "cpu") for name, held in HELD.items()}

    @torch.inference_mode()
    async def step(self, cache: KVCache, requests: int, context: int) -> float:
        """Tokens/s of one step, with the scores of each token."""
        rows = [Row(range(1 + at * self.blocks, 1 + (at + 1) * self.blocks), context - 1, 1) for at in range(requests)]
        layout = BatchLayout.build(rows, BLOCK, "cpu")
        started = time.perf_counter()
        self.net.logits(self.net(torch.arange(requests), layout.positions_T, PagedAttention(self.backend, cache, layout)))
        return requests / (time.perf_counter() - started)


def measure(steps: Steps, turns: int) -> Iterator[Comparison]:
    """Each number of requests with each context."""
    for requests, context in product((1, AT_ONCE), CONTEXTS):
        contestants = {name: partial(steps.step, cache, requests, context) for name, cache in steps.caches.items()}
        found = asyncio.run(take_turns(contestants, turns))
        yield Comparison(f"{requests} at once, context {context}", "tokens/s", found)


def main(words: list[str] | None = None) -> None:
    """Measure, print the table."""
    parser = options_of(__doc__, turns=15)
    parser.add_argument("--shape", choices=SHAPES, default="M", help="sizes of the decoder (default M)")
    options = parser.parse_args(words)
    torch.set_num_threads(threads())
    found = list(measure(Steps(config_of(options.shape, max(CONTEXTS))), options.turns))
    shown = table(["tokens/s", *HELD, "ratio"], ((each.what, *each.cells()) for each in found))
    file(options.json, shown, [figure for each in found for figure in each.figures()], bench="kv_cache", shape=options.shape)


if __name__ == "__main__":
    main()
