"""How fast a model would be served here: steps of some of its layers with random weights, beside what the device itself does.

So a model of any size is measured in seconds, without its weights. A step's time grows with the bytes that it reads, a prompt's
with its products: from the layers that were measured to all of them by these. On a GPU not yet run.

Shapes: R requests.
"""

import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from attend.model.backends.backend import Backend
from attend.model.config import ModelConfig
from attend.model.engine.cache import step_of
from attend.model.engine.config import EngineConfig
from attend.model.engine.fallback import Fallback
from attend.model.engine.plan import StepInput
from attend.model.engine.runner import ModelRunner
from attend.model.engine.startup import layers_by_kind, on_meta, random_net, with_layers
from attend.model.net.formats.codes import Kind
from attend.model.net.kv_cache import KVCache
from attend.model.net.linear import ExpertLinear, Linear
from attend.model.net.quantised import QuantisedLinear
from attend.model.net.transformer import Decoder

MOST = {"cpu": 120_000_000, "cuda": 1_500_000_000}
"""Parameters of the layers that are measured, about, by device: a CPU draws 90 million in a second."""
TOO_MANY = 1_200_000_000
"""Parameters of one layer of each kind that a CPU does not draw in time."""
VOCAB = 32_768
CONTEXT = 256
STREAMS = {"cpu": (1, 8), "cuda": (1, 32)}
PROMPT = {"cpu": 256, "cuda": 2048}
SECONDS, AT_ONCE = 0.8, 4
"""Seconds for which a kind of step is timed, and how many steps are submitted together."""


class Speed(NamedTuple):
    """Measured speed of one kind of step, and the limit that memory or matrix products set."""

    work: str
    """`R streams` or `prompt of T`."""
    tokens_per_second: float
    limit: float
    """Tokens per second that the measured memory bandwidth, or the measured matrix product, allows."""

    @property
    def share(self) -> float:
        """Measured speed as a share of the limit, 0 to 1."""
        return self.tokens_per_second / self.limit


@dataclass(frozen=True)
class Speeds:
    """Speeds of an engine's steps, and how they were measured."""

    speeds: list[Speed]
    num_layers: int
    """Layers that were measured; the time of the others was calculated from these."""
    graphs: tuple[int, int]
    """Recorded CUDA graphs: of whole steps, and of steps in pieces."""


def measured_layers(config: ModelConfig, device: str) -> ModelConfig | None:
    """The model with as many layers of each kind as are measured, and fewer tokens; None where one of each is too much."""
    sizes = {"vocab_size": VOCAB, "per_layer_vocab_size": VOCAB}
    found = layers_by_kind(config)
    least = with_layers(config, [layers[0] for layers in found], sizes)
    each = (count_parameters(least) - least.vocab_size * least.hidden_size) / least.num_layers
    if device == "cpu" and count_parameters(least) > TOO_MANY:
        return None
    share = min(1.0, MOST[device] / each / config.num_layers)
    return with_layers(config, [at for layers in found for at in layers[: max(1, int(share * len(layers)))]], sizes)


def measure_speed(
    config: ModelConfig,
    backend: Backend,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: str,
    kind: Kind | None,
    fallback: Fallback,
    rates: dict[str, float],
) -> Speeds | None:
    """Time decode steps of some streams and a prompt, after the second token; None for a model that is too large."""
    small = measured_layers(config, device)
    if small is None:
        return None
    context, most = min(CONTEXT, config.max_positions), min(PROMPT[device], config.max_positions)
    net = random_net(small, dtype, device, kind, max(context, most))
    runner, sizes = _runner(net, type(backend)(small), dtype, kv_dtype, device, max(context, most), fallback)
    whole, speeds = on_meta(config, kind, 0), []
    part = on_meta(small, kind, 0)
    for streams in STREAMS[device]:
        needed = read_bytes(whole, dtype, streams)
        seconds = _seconds(runner, _step(small, sizes, [context] * streams, 1)) * needed / read_bytes(part, dtype, streams)
        speeds.append(
            Speed("1 stream" if streams == 1 else f"{streams} streams", streams / seconds, streams * rates["bytes"] / needed)
        )
    seconds = _seconds(runner, _step(small, sizes, [most], most)) * products(whole) / products(part)
    speeds.append(Speed(f"prompt of {most}", most / seconds, rates["flops"] / 2 / products(whole)))
    return Speeds(speeds, small.num_layers, runner.recorded_sizes)


def _runner(
    net: Decoder, backend: Backend, dtype: torch.dtype, kv_dtype: torch.dtype, device: str, length: int, fallback: Fallback
) -> tuple[ModelRunner, EngineConfig]:
    streams = max(STREAMS[device])
    sizes = EngineConfig(length, streams * (-(-length // 32)), 32, streams, length)
    config = net.config
    form = backend.decoder(net)
    cache = KVCache.allocate(config, sizes.num_blocks, sizes.block_size, kv_dtype, device)
    attention, draw = backend.attention, fallback.draw(backend, dtype, device)
    graphs, pieces = fallback.record_steps(partial(backend.record, form, cache, sizes), form, attention, cache)
    return backend.runner()(form, attention, cache, device, graphs, draw, None, pieces, backend.logprobs()), sizes


def _step(config: ModelConfig, sizes: EngineConfig, ends: list[int], tokens: int) -> StepInput:
    """A step of so many tokens of each request at its end, whose blocks are its own."""
    step = step_of(config, sizes, [tokens] * len(ends), end=ends[0])
    each = -(-ends[0] // sizes.block_size)
    blocks = [array("q", range(1 + row * each, 1 + (row + 1) * each)) for row in range(len(ends))]
    states = [array("q", [1 + row]) for row in range(len(ends))]
    return replace(step, tables=[states if group.has_state else blocks for group in config.memory_groups])


def _seconds(runner: ModelRunner, step: StepInput) -> float:
    """The shortest time of a step: others may have the cores meanwhile."""
    at_once = AT_ONCE if runner.device == "cuda" else 1

    def turn() -> float:
        began = time.perf_counter()
        pending = [runner.submit(step) for _ in range(at_once)]
        pending[-1].result()
        return (time.perf_counter() - began) / at_once

    turn()
    found, end = [turn()], time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        found.append(turn())
    return min(found)


def count_parameters(config: ModelConfig) -> int:
    """Number of a model's parameters."""
    return on_meta(config, None, 0).num_parameters


def read_bytes(net: Decoder, dtype: torch.dtype, streams: int) -> float:
    """Bytes of the weights that a decode step of so many streams reads: of experts those that are chosen by one of them."""
    return sum(_bytes(module, dtype) * _chosen(net.config, module, streams) for module in _iter_linears(net))


def products(net: Decoder) -> float:
    """Multiplications of a token with weights."""
    return sum(_product(module) * _chosen(net.config, module, 1) for module in _iter_linears(net))


def _iter_linears(net: Decoder) -> Iterator[Linear]:
    for name, module in net.named_modules():
        if isinstance(module, Linear) and not name.startswith(("embedding", "per_layer")):
            yield module


def _bytes(module: Linear, dtype: torch.dtype) -> int:
    if isinstance(module, QuantisedLinear):
        return sum(part.nbytes for part in module.buffers(recurse=False))
    return module.weight.numel() * dtype.itemsize


def _product(module: Linear) -> int:
    several = module.whole[0] if isinstance(module, ExpertLinear) else 1
    return several * module.in_features * module.out_features


def _chosen(config: ModelConfig, module: nn.Module, streams: int) -> float:
    """The share of a matrix of experts that so many tokens read, if each chooses at random."""
    if not isinstance(module, ExpertLinear) or config.num_experts is None:
        return 1.0
    return 1.0 - (1.0 - config.experts_per_token / config.num_experts) ** streams
