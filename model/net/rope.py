"""Rotary positions: tables of cos and sin, and the rotation of queries and keys (Su et al. 2021).

Tables are made on the CPU by name: a decoder is built on the `meta` device before its weights are read.

Shapes: P positions · T tokens · H heads · D head size · R rotated columns of a head.
"""

import math
from functools import singledispatch
from typing import NamedTuple

import torch
from torch import Tensor

from attend.model.config import ModelConfig
from attend.model.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)


class Rotation(NamedTuple):
    """How the tokens of a step are rotated."""

    cos: Tensor
    """Cosines of each token's angles, [T, 1, R]."""
    sin: Tensor
    query_scale: Tensor | None = None
    """A factor of rotated queries, [T, 1, 1]; None: 1."""


def rotary_table(rope: Rope, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin for the first positions, float32 [P, R], each angle twice (once for each half of the rotated columns)."""
    frequencies, factor = frequencies_of(rope, num_positions)
    positions = torch.arange(num_positions, dtype=torch.float32, device="cpu")
    angles_PR = torch.outer(positions, frequencies).repeat(1, 2)
    return angles_PR.cos() * factor, angles_PR.sin() * factor


def frequencies_of(rope: Rope, context: int) -> tuple[Tensor, float]:
    """Radians per position for each pair of columns, float32 [R/2], and what cos and sin are multiplied by.

    `context` is the number of positions that are served: some kinds of scaling depend on it.
    """
    if rope.scaling is None:
        return _plain(rope.theta, rope.size), 1.0
    return _scale_frequencies(rope.scaling, rope, context)


def _plain(theta: float, size: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size)


@singledispatch
def _scale_frequencies(scaling: RopeScaling, rope: Rope, context: int) -> tuple[Tensor, float]:
    raise TypeError(f"no way to compute {scaling}")


@_scale_frequencies.register
def _linear(scaling: LinearScaling, rope: Rope, context: int) -> tuple[Tensor, float]:
    return _plain(rope.theta, rope.size) / scaling.factor, 1.0


@_scale_frequencies.register
def _dynamic(scaling: DynamicScaling, rope: Rope, context: int) -> tuple[Tensor, float]:
    stretch = scaling.factor * max(context, scaling.original_positions) / scaling.original_positions - (scaling.factor - 1)
    return _plain(rope.theta * stretch ** (rope.size / (rope.size - 2)), rope.size), 1.0


@_scale_frequencies.register
def _llama3(scaling: Llama3Scaling, rope: Rope, context: int) -> tuple[Tensor, float]:
    frequencies = _plain(rope.theta, rope.size)
    turns = scaling.original_positions * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)  # 1: short wavelengths stay; 0: long ones stretch by the factor; between: a blend
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor, 1.0


@_scale_frequencies.register
def _proportional(scaling: ProportionalScaling, rope: Rope, context: int) -> tuple[Tensor, float]:
    turning = torch.arange(rope.size // 2, device="cpu") < int(scaling.share * rope.size // 2)
    return _plain(rope.theta, rope.size) / scaling.factor * turning, 1.0


@_scale_frequencies.register
def _yarn(scaling: YarnScaling, rope: Rope, context: int) -> tuple[Tensor, float]:
    def pair_that_turns(times: float) -> float:
        """The pair of columns, as a fraction too, that turns so many times within the original context."""
        return rope.size * math.log(scaling.original_positions / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.size - 1)
    width = last - first or 0.001
    stretch = ((torch.arange(rope.size // 2, dtype=torch.float32, device="cpu") - first) / width).clamp(0.0, 1.0)
    frequencies = _plain(rope.theta, rope.size)
    return frequencies * (1 - stretch) + frequencies / scaling.factor * stretch, scaling.attention_factor


@_scale_frequencies.register
def _long(scaling: LongScaling, rope: Rope, context: int) -> tuple[Tensor, float]:
    factors = scaling.long_factors if context > scaling.original_positions else scaling.short_factors
    return _plain(rope.theta, rope.size) / torch.tensor(factors, dtype=torch.float32, device="cpu"), scaling.attention_factor


def query_scale(config: ModelConfig, positions_T: Tensor, dtype: torch.dtype) -> Tensor | None:
    """See `ModelConfig.query_scale_beta`, worked out in float32: [T, 1, 1], or None."""
    if config.query_scale_beta is None:
        return None
    periods_T = (positions_T // config.query_scale_length).float()
    return (1 + config.query_scale_beta * torch.log(1 + periods_T)).to(dtype)[:, None, None]


def apply_rotary(x_THD: Tensor, rotation: Rotation | None) -> Tensor:
    """Rotate each pair (x_i, x_{i + R/2}) of the first R columns by its position's angle; None rotates nothing."""
    if rotation is None:
        return x_THD
    cos, sin = rotation.cos.to(x_THD.dtype), rotation.sin.to(x_THD.dtype)
    size = cos.shape[-1]
    turned, kept = x_THD.split([size, x_THD.shape[-1] - size], dim=-1)
    a, b = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-b, a), dim=-1) * sin
    return turned if size == x_THD.shape[-1] else torch.cat((turned, kept), dim=-1)
