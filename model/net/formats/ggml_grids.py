"""Blocks of ggml's types of 1 to 3 bits -> codes of 4 bits, or numbers. Source: the package `gguf`, whose grids they are.

A grid has the numbers of 4 or 8 neighbours for each index that a block holds. They are few: with their signs at most 16, so a
table has them all, and the codes are exact. Types with scales for 16 columns become numbers.

Shapes: R rows · N blocks of a row · B bytes of a block · S groups of 32 in a block · H halves of groups.
"""

from functools import cache

import numpy
import torch
from gguf import quants
from torch import Tensor

from attend.model.net.formats.codes import INT4, Kind, values_of

Parts = tuple[Kind, Tensor, Tensor, Tensor | None]
"""Kind, codes [R, N, S, 32], scales [R, N, S], and no minima."""
SIGN = 8
"""The bit of a code that makes its value negative."""


def _with_signs(name: str, *values: int) -> Kind:
    padded = (*values, *(0,) * (SIGN - len(values)))
    return Kind(name, 4, (*padded, *(-value for value in padded)))


IQ3_S = _with_signs("iq3_s", *quants.IQ3_S.grid_map)
IQ3_XXS = _with_signs("iq3_xxs", *quants.IQ3_XXS.grid_map)
IQ2_XXS = _with_signs("iq2_xxs", *quants.IQ2_XXS.grid_map)
IQ1_S = Kind("iq1_s", 4, (-9, -1, 7, -7, 1, 9, *(0,) * 10))
"""Eightfold: -1, 0 or 1, less an eighth, or with the second three more an eighth."""


def half(blocks_RNB: Tensor, at: int) -> Tensor:
    """The float16 at a byte of each block, as float32."""
    return blocks_RNB[..., at : at + 2].contiguous().view(torch.float16)[..., 0].float()


@cache
def _grid(grid: type[quants.IQ3_S]) -> Tensor:
    """For each index the places of its numbers in `grid_map`, uint8."""
    grid.init_grid()
    return torch.from_numpy(numpy.searchsorted(numpy.array(grid.grid_map), grid.grid[0, 0]).astype(numpy.uint8))


@cache
def _signs() -> Tensor:
    """The signs of 8 numbers, of which 7 bits say the first ones; the number of minus signs is even."""
    return torch.from_numpy(numpy.frombuffer(quants.IQ2_XXS.ksigns, numpy.uint8).copy())


def _look_up(table: Tensor, places: Tensor) -> Tensor:
    return table.index_select(0, places.flatten().int()).view(*places.shape, *table.shape[1:])


def _bits(bytes_: Tensor) -> Tensor:
    """The bits of bytes from the lowest on, side by side, each as 0 or 1."""
    return (bytes_[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _words(bytes_: Tensor, kind: torch.dtype) -> Tensor:
    return bytes_.contiguous().view(kind).int()


def _nibbles(bytes_: Tensor) -> Tensor:
    """The two 4-bit numbers of each byte, the lower one first."""
    return (bytes_[..., None] >> torch.tensor([0, 4], dtype=torch.uint8) & 15).flatten(-2)


def _groups(columns: Tensor, signs: Tensor) -> Tensor:
    """Codes [R, N, S, 32] from the places of 256 numbers, and their signs as bytes."""
    return (columns.flatten(2) | _bits(signs.flatten(2)) * SIGN).unflatten(-1, (-1, 32))


def iq3_s(blocks: Tensor) -> Parts:
    """Four numbers an index of 9 bits; scales of 4 bits."""
    places = blocks[..., 2:66].int() | _bits(blocks[..., 66:74]).int() << 8
    codes = _groups(_look_up(_grid(quants.IQ3_S), places), blocks[..., 74:106])
    return IQ3_S, codes, half(blocks, 0)[..., None] * (1 + 2 * _nibbles(blocks[..., 106:110])), None


def _signs_and_steps(words: Tensor) -> tuple[Tensor, Tensor]:
    """From a group's 32 bits: four bytes with the signs of 8 numbers each, and 1 + 2 * scale."""
    signs = _look_up(_signs(), words[..., None] >> torch.tensor([0, 7, 14, 21], dtype=torch.int32) & 127)
    return signs, 1 + 2 * (words >> 28 & 15)


def iq3_xxs(blocks: Tensor) -> Parts:
    """Four numbers an index of 8 bits."""
    signs, steps = _signs_and_steps(_words(blocks[..., 66:98], torch.int32))
    codes = _groups(_look_up(_grid(quants.IQ3_XXS), blocks[..., 2:66]), signs)
    return IQ3_XXS, codes, half(blocks, 0)[..., None] * steps / 4, None


def iq2_xxs(blocks: Tensor) -> Parts:
    """Eight numbers an index of 8 bits."""
    places, others = blocks[..., 2:66].unflatten(-1, (8, 8)).split(4, dim=-1)
    signs, steps = _signs_and_steps(_words(others.flatten(2), torch.int32))
    codes = _groups(_look_up(_grid(quants.IQ2_XXS), places.flatten(2)), signs)
    return IQ2_XXS, codes, half(blocks, 0)[..., None] * steps / 8, None


def iq1_s(blocks: Tensor) -> Parts:
    """Eight numbers an index of 11 bits; a group's are all an eighth more or less."""
    words = _words(blocks[..., 34:50], torch.int16)
    high = words[..., None] >> torch.tensor([0, 3, 6, 9], dtype=torch.int32) & 7
    places = blocks[..., 2:34].int() | high.flatten(-2) << 8
    less = (words & 0x8000) != 0
    codes = _look_up(_grid(quants.IQ1_S), places).flatten(2).unflatten(-1, (8, 32)) + 3 * (~less[..., None]).byte()
    return IQ1_S, codes, half(blocks, 0)[..., None] * (1 + 2 * (words >> 12 & 7)) / 8, None


def tq2_0(blocks: Tensor) -> Parts:
    """Three values, in two bits each."""
    codes = blocks[..., :64].unflatten(-1, (2, 1, 32)) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3
    return INT4, codes.flatten(-3, -2) + 7, half(blocks, 64)[..., None].expand(*blocks.shape[:2], 8), None


def tq1_0(blocks: Tensor) -> Parts:
    """Three values, five of them in a byte: the first digits of a fraction to the base of 3."""
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)[:, None]
    parts = ((blocks[..., :32], powers), (blocks[..., 32:48], powers), (blocks[..., 48:52], powers[:4]))
    digits = torch.cat([(part[..., None, :] * power).flatten(-2) for part, power in parts], dim=-1)
    codes = ((digits.int() * 3 >> 8) + 7).byte().unflatten(-1, (8, 32))
    return INT4, codes, half(blocks, 52)[..., None].expand(*blocks.shape[:2], 8), None


def _halves(kind: Kind, codes: Tensor, scales_RNH: Tensor) -> Tensor:
    """The numbers [R, I] of codes with a scale for 16 columns."""
    return (values_of(kind, codes).unflatten(-1, (2, 16)).flatten(2, 3) * scales_RNH[..., None]).flatten(1)


def iq2_xs(blocks: Tensor) -> Tensor:
    """Eight numbers an index of 9 bits, beside which their signs lie."""
    words = _words(blocks[..., 2:66], torch.int16)
    codes = _groups(_look_up(_grid(quants.IQ2_XS), words & 511), _look_up(_signs(), words >> 9 & 127))
    return _halves(IQ2_XXS, codes, half(blocks, 0)[..., None] * (1 + 2 * _nibbles(blocks[..., 66:74])) / 8)


def iq2_s(blocks: Tensor) -> Tensor:
    """Eight numbers an index of 10 bits."""
    high = (blocks[..., 66:74, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3).flatten(-2)
    codes = _groups(_look_up(_grid(quants.IQ2_S), blocks[..., 2:34].int() | high.int() << 8), blocks[..., 34:66])
    return _halves(IQ2_XXS, codes, half(blocks, 0)[..., None] * (1 + 2 * _nibbles(blocks[..., 74:82])) / 8)


def iq1_m(blocks: Tensor) -> Tensor:
    """Like IQ1_S, with a scale for 16 numbers and a shift for 8. A block's own scale lies in the highest bits of four words."""
    words, high = _words(blocks[..., 48:56], torch.int16), _nibbles(blocks[..., 32:48])
    bits = (words >> 12 & 15) << torch.tensor([0, 4, 8, 12], dtype=torch.int32)
    scales = bits.sum(-1, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    steps = (words[..., None] >> torch.tensor([0, 3, 6, 9], dtype=torch.int32) & 7).flatten(-2)
    places = blocks[..., :32].int() | (high & 7).int() << 8
    codes = _look_up(_grid(quants.IQ1_M), places) + 3 * (high < 8)[..., None].byte()
    return _halves(IQ1_S, codes.flatten(2).unflatten(-1, (8, 32)), scales[..., None] * (1 + 2 * steps) / 8)
