"""The roofline of this machine for the shapes of the other benchmarks: python -m loadtest.bench.limits

Measures how fast weights can be read and how fast bfloat16 matrices are multiplied, and computes what no engine can beat:
a decode step reads every weight once and every cached key and value once; a prompt multiplies every weight by every token.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from loadtest.bench.shapes import SHAPES, write_shape
from model.config import ModelConfig
from model.net.checkpoint import read_config

TURNS = 7
CONTEXT = 192
"""Tokens behind a decode step: the middle of 128 -> 128."""


def fastest(work: Callable[[], object]) -> float:
    """Seconds of one call: the median of several, after one to warm up."""
    work()
    times = []
    for _ in range(TURNS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def read_bandwidth(size: int) -> float:
    """Bytes a second of reading so many bytes of weights."""
    data = torch.ones(size // 4)
    return size / fastest(lambda: data.sum())


def multiply_rate(rows: int = 1024, width: int = 2048) -> float:
    """Floating point operations a second of bfloat16 matrices."""
    a, b = torch.ones(rows, width, dtype=torch.bfloat16), torch.ones(width, width, dtype=torch.bfloat16)
    return 2 * rows * width * width / fastest(lambda: a @ b)


def weights(config: ModelConfig) -> int:
    """Parameters that a token is multiplied by."""
    attention = config.hidden_size * (2 * config.query_size + 2 * config.kv_size)
    layer = attention + 3 * config.hidden_size * config.mlp_size
    return config.num_layers * layer + config.hidden_size * config.vocab_size


def decode_limit(config: ModelConfig, batch: int, bandwidth: float, rate: float) -> float:
    """Tokens a second of `batch` streams."""
    moved = 2 * weights(config) + batch * CONTEXT * config.kv_bytes_per_token(2)
    return batch / max(moved / bandwidth, 2 * batch * weights(config) / rate)


def main() -> None:
    """Print what was measured and what follows from it."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rate = multiply_rate()
    print(f"bfloat16 matrices: {rate / 1e12:.2f} TFLOP/s\n")
    print("| shape | weights read | decode, 1 stream | decode, 16 streams | prompt of 1024 |\n| --- | --- | --- | --- | --- |")
    for name in SHAPES:
        config = read_config(write_shape(name, Path(tempfile.gettempdir()) / "attend-shapes"))
        bandwidth = read_bandwidth(2 * weights(config))
        limits = [decode_limit(config, batch, bandwidth, rate) for batch in (1, 16)]
        prompt = rate / (2 * weights(config))
        print(f"| {name} | {bandwidth / 1e9:.0f} GB/s | {limits[0]:.0f} tok/s | {limits[1]:.0f} tok/s | {prompt:.0f} tok/s |")


if __name__ == "__main__":
    main()
