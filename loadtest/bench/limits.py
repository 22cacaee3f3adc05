"""The roofline of this machine for the shapes of the other benchmarks: attend bench limits

Measures how fast weights can be read and how fast matrices are multiplied: in bfloat16 or in float32, whichever is faster
here; and in int8, which is what weights of 8 and of 4 bits are multiplied in. It computes what no engine can beat: a
decode step reads every weight once and every cached key and value once, and reads and writes every state; a prompt multiplies
every weight but the last layer's head by every token, and every token by the keys and values before it.
"""

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from attend.model.config import ModelConfig
from attend.model.net.checkpoint import read_config
from attend.model.net.packed_linears import multiplies_bfloat16
from attend.model.shapes import SHAPES, write_config
from attend.model.sublayers import ConvSpec, DeltaSpec, LayerSpec, MixtureSpec
from loadtest.bench.figures import Figure, Report, options_of
from loadtest.bench.machine import threads
from loadtest.bench.shapes import AT_ONCE, FOLDER, LONG, OUTPUT, PROMPT, shape

TURNS = 7
CONTEXT = PROMPT + OUTPUT // 2
"""Tokens behind a decode step: the middle of 128 -> 128."""


def seconds_of(work: Callable[[], object]) -> float:
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
    return size / seconds_of(lambda: data.sum())


def multiply_rate(dtype: torch.dtype, rows: int = 1024, width: int = 2048) -> float:
    """Floating point operations a second of matrices."""
    a, b = torch.ones(rows, width, dtype=dtype), torch.ones(width, width, dtype=dtype)
    return 2 * rows * width * width / seconds_of(lambda: a @ b)


def int8_rate(rows: int = 1024, width: int = 2048) -> float:
    """Operations a second of matrices of int8, with sums of int32: 2 for each product, as with floats."""
    a, b = (torch.ones(size, width, dtype=torch.int8) for size in (rows, width))
    return 2 * rows * width * width / seconds_of(lambda: torch._int_mm(a, b))


def distinct_experts(mixture: MixtureSpec, tokens: int) -> float:
    """How many different experts a step of so many tokens is expected to need, where a token goes to any of them alike.

    A token leaves an expert out with probability 1 - C / X, so all tokens do with that to the power of their number.
    """
    left_out = (1 - mixture.experts_per_token / mixture.num_experts) ** tokens
    return mixture.num_experts * (1 - left_out)


def weights(config: ModelConfig, tokens: int = 1) -> float:
    """Parameters of the matrices that a step of so many tokens reads. For one token: those that it is multiplied by."""
    layers = sum(_mixing_weights(config, layer) + _mlp_weights(config, layer, tokens) for layer in config.layers)
    inputs = 3 * config.num_layers * (config.per_layer_input_size or 0)  # what makes them, and in each layer two more
    return layers + config.hidden_size * (config.vocab_size + inputs)


def _mixing_weights(config: ModelConfig, layer: LayerSpec) -> int:
    """Of one layer's attention, or of what it has in place of it."""
    if (recurrence := layer.recurrence) is None:
        gates = config.num_heads if config.head_gate else 0
        return config.hidden_size * ((3 if config.attention_gate else 2) * layer.query_size + sum(layer.kv_projections) + gates)
    if isinstance(recurrence, ConvSpec):
        return 4 * config.hidden_size * recurrence.channels
    return config.hidden_size * (recurrence.channels + 2 * recurrence.value_width + 2 * recurrence.value_heads)


def _mlp_weights(config: ModelConfig, layer: LayerSpec, tokens: int) -> float:
    """Of one layer's MLP, or of its router and of the experts that are needed."""
    if (mixture := layer.experts) is None:
        return (3 if config.gated_mlp else 2) * config.hidden_size * layer.mlp_size
    routed, shared = distinct_experts(mixture, tokens) * mixture.expert_size, mixture.shared_expert_size or 0
    rows = mixture.num_experts + (1 if shared and mixture.shared_expert_gate else 0)
    shared += layer.mlp_size if mixture.experts_beside_mlp else 0
    return config.hidden_size * (3 * (routed + shared) + rows)


def decode_bytes(config: ModelConfig, batch: int) -> float:
    """Bytes that a step of `batch` streams moves."""
    states = sum(layer.state_bytes for layer in config.layers)
    return 2 * weights(config, batch) + batch * (CONTEXT * config.kv_bytes_per_token(2) + 2 * states)


def decode_limit(config: ModelConfig, batch: int, bandwidth: float, rate: float) -> float:
    """Tokens a second of `batch` streams."""
    return batch / max(decode_bytes(config, batch) / bandwidth, 2 * batch * weights(config) / rate)


def prompt_operations(config: ModelConfig, length: int) -> float:
    """Of a token of a prompt: the head is computed for its last one alone; a token sees half the others on average.

    A delta rule multiplies each number of a state four times, and adds three times. Convolutions are not counted.
    """
    matrices = weights(config) - config.hidden_size * config.vocab_size
    rules = sum(
        7 * math.prod(each.recurrence.state_shapes[1]) for each in config.layers if isinstance(each.recurrence, DeltaSpec)
    )
    queries = sum(layer.query_size for layer in config.layers if layer.recurrence is None)
    return 2 * matrices + 4 * queries * length / 2 + rules


def prompt_limit(config: ModelConfig, length: int, rate: float) -> float:
    """Tokens a second of a prompt."""
    return rate / prompt_operations(config, length)


def measure(checkpoint: Path) -> list[Figure]:
    """What a checkpoint's shape can reach on this machine, now: what was measured, and then tokens a second of each work."""
    config = read_config(checkpoint)
    dtypes = [torch.bfloat16, torch.float32] if multiplies_bfloat16() else [torch.float32]
    rate, dtype = max(((multiply_rate(dtype), dtype) for dtype in dtypes), key=lambda each: each[0])
    bandwidth = read_bandwidth(round(2 * weights(config)))
    at_once = 1 / (PROMPT / OUTPUT / prompt_limit(config, PROMPT, rate) + 1 / decode_limit(config, AT_ONCE, bandwidth, rate))
    limits = {"W1": decode_limit(config, 1, bandwidth, rate), "W2": at_once, "W3": prompt_limit(config, LONG, rate)}
    measured = [Figure("weights read", "GB/s", (bandwidth / 1e9,))]
    measured.append(Figure(f"{dtype} matrices".removeprefix("torch."), "TFLOP/s", (rate / 1e12,)))
    measured.append(Figure("int8 matrices", "TOP/s", (int8_rate() / 1e12,)))
    return measured + [Figure(f"roofline {work}", "tokens/s", (limit,)) for work, limit in limits.items()]


def main(words: list[str] | None = None) -> None:
    """Print what was measured and what follows from it."""
    parser = options_of(__doc__)
    parser.add_argument("--shape", type=shape, action="append", help=f"of {', '.join(SHAPES)}; default: S and M")
    options = parser.parse_args(words)
    torch.set_num_threads(threads())
    report = None
    for name in options.shape or ["S", "M"]:
        figures = measure(write_config(name, FOLDER))
        if report is None:
            report = Report(options.json, ["shape", *(f"{each.what}, {each.unit}" for each in figures)], bench="limits")
        report.add(figures, [[name, *(f"{each.median:.4g}" for each in figures)]])


if __name__ == "__main__":
    main()
