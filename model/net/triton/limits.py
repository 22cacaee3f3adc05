"""Top-k, then top-p, then min-p in three launches: how far below the best a row's tokens may be. Nothing is sorted.

A row is searched by a histogram of its scores (`count_kernel`). It tells in which few bins the border lies: for top-k by
counts, for top-p by bounds of each bin's mass. The scores in these bins are collected (`collect_kernel`), and the border is
found among them bit by bit (`limit_kernel`), or in the whole row where they are too many. The first two cut a row into chunks,
so that all processors share it. Only whole numbers are added up, so a border depends neither on the order of the additions nor
on the histogram: it is that of a search of the whole row.

Shapes: R rows · V vocabulary · S chunks of a row · N numbers of a record. S_P is S rounded up to a power of two.
"""

import triton
import triton.language as tl

from attend.model.net.triton.sampling import (
    BINS,
    COLUMNS,
    LISTS,
    MIN_P,
    NO_BORDER,
    NUMBERS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    _bits,
    _of_row,
    _real,
    _scale_scores,
)

PER_UNIT = tl.constexpr(8.0)
"""Bins to a unit of log probability. The last bin holds all that is 31.875 or more below the best: noise spans less, so no such
token is ever drawn, and its mass is 0."""
FOUND = tl.constexpr(256)
"""The columns of `bins` behind the histogram: how many scores were collected. BINS is a row's whole histogram."""
MASS = tl.constexpr(257)
"""The mass of the row's tokens; only without top-k."""
BEFORE = tl.constexpr(258)
"""Mass of the tokens in the bins before the collected ones; only without top-k."""
WHOLE = tl.constexpr(17592186044416.0)
"""2^44: probabilities are summed as whole numbers of this part of the likeliest token's, so in any order. V may be 2^19."""
SLACK = tl.constexpr(1e-3)
"""More than the bounds of masses are wrong by rounding."""
TURNS = tl.constexpr(16)
"""Iterations of the search for the 32 bits of a border: two bits in each."""


@triton.jit
def _is_searched(record_ptr: tl.tensor, highest: tl.tensor) -> tl.tensor:
    """True if a row has a top-k or top-p, and tokens to choose from."""
    return ((tl.load(record_ptr + TOP_K) > 0) | (_real(record_ptr, TOP_P) < 1.0)) & (tl.abs(highest) < float("inf"))


@triton.jit
def _bin(scaled: tl.tensor) -> tl.tensor:
    """The bin of each score: a product by a power of two is exact, so bins are ranges of `_bits`. int32."""
    return tl.minimum(tl.abs(scaled) * PER_UNIT, BINS - 1.0).to(tl.int32)


@triton.jit
def _mass(scaled: tl.tensor) -> tl.tensor:
    """Probabilities in parts of the likeliest one's. int64."""
    return (tl.exp(scaled) * WHOLE).to(tl.int64)


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=LISTS)
def count_kernel(
    scores_ptr: tl.tensor,  # [R, V]
    records_ptr: tl.tensor,  # int64 [R, N]
    highest_ptr: tl.tensor,  # float32 [R, S]
    bins_ptr: tl.tensor,  # int64 [R, COLUMNS], of zeros
    stride: tl.tensor,
    V: tl.constexpr,
    S: tl.constexpr,
    S_P: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """How many tokens each bin has, and their whole mass. Grid (R, S)."""
    row = tl.program_id(0).to(tl.int64)
    record_ptr, highest = records_ptr + row * NUMBERS, _of_row(highest_ptr, row, S, S_P)
    if _is_searched(record_ptr, highest):
        at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(scores_ptr + row * stride + at, mask=at < V, other=float("-inf"))  # outside: in the last bin, without mass
        scaled = _scale_scores(x, highest, _real(record_ptr, TEMPERATURE))
        bins_ptr += row * COLUMNS
        count = tl.histogram(_bin(scaled), BINS)
        tl.atomic_add(bins_ptr + tl.arange(0, BINS), count.to(tl.int64), mask=count > 0, sem="relaxed")
        if tl.load(record_ptr + TOP_K) == 0:
            tl.atomic_add(bins_ptr + MASS, tl.sum(_mass(scaled), 0), sem="relaxed")


@triton.jit
def _bins(bins_ptr: tl.tensor, top_k: tl.tensor, top_p: tl.tensor) -> tl.tensor:
    """The first and the last bin among whose tokens the border is to be found, and how many tokens are in the bins before.

    With both limits all bins up to top-k's are searched. Top-p's bin is the first one up to which the tokens have its part of
    the mass. Each bin's mass lies between those of its count at its ends: bins that have too little even so come before the
    border, and one that has enough even so is behind it, or has it. The last bin has no mass: its border is none.
    """
    at = tl.arange(0, BINS)
    count = tl.load(bins_ptr + at)
    last = tl.sum((tl.cumsum(count, 0) < top_k).to(tl.int32), 0)
    first = tl.where(top_p < 1.0, 0, last)
    if top_k == 0:
        weight = tl.exp(at.to(tl.float32) / -PER_UNIT) * WHOLE
        most = count.to(tl.float64) * (weight * (1 + SLACK)).to(tl.float64)
        least = tl.maximum(weight * tl.exp(-1.0 / PER_UNIT) * (1 - SLACK) - 1, 0)  # a mass is rounded down
        least = tl.where(at < BINS - 1, count.to(tl.float64) * least.to(tl.float64), 0)
        most_before, least_before = tl.cumsum(most, 0), tl.cumsum(least, 0)
        mass = tl.load(bins_ptr + MASS).to(tl.float64)
        target = tl.maximum(mass * top_p.to(tl.float64), 1.0)
        rest = mass - target  # what may be behind the border: the narrower bound where top-p is near 1
        too_few = most_before < target * (1 - SLACK)
        too_few = too_few | (tl.sum(least, 0) - least_before > rest * (1 + SLACK))
        enough = least_before >= target * (1 + SLACK)
        enough = enough | (tl.sum(most, 0) - most_before <= rest * (1 - SLACK))
        first, last = tl.sum(too_few.to(tl.int32), 0), tl.sum(1 - enough.to(tl.int32), 0)
    return first, tl.minimum(last, BINS - 2), tl.sum(tl.where(at < first, count, 0), 0)


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=LISTS)
def collect_kernel(
    scores_ptr: tl.tensor,  # [R, V]
    records_ptr: tl.tensor,  # int64 [R, N]
    highest_ptr: tl.tensor,  # float32 [R, S]
    bins_ptr: tl.tensor,  # int64 [R, COLUMNS]
    candidates_ptr: tl.tensor,  # float32 [R, ROOM]
    stride: tl.tensor,
    V: tl.constexpr,
    S: tl.constexpr,
    S_P: tl.constexpr,
    CHUNK: tl.constexpr,
    ROOM: tl.constexpr,
) -> None:
    """The scores in the border's bins, in any order, as far as there is room; how many; the mass before. Grid (R, S)."""
    row = tl.program_id(0).to(tl.int64)
    record_ptr, highest = records_ptr + row * NUMBERS, _of_row(highest_ptr, row, S, S_P)
    if _is_searched(record_ptr, highest):
        at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(scores_ptr + row * stride + at, mask=at < V, other=float("-inf"))
        scaled = _scale_scores(x, highest, _real(record_ptr, TEMPERATURE))
        bins_ptr += row * COLUMNS
        top_k = tl.load(record_ptr + TOP_K)
        first, last, _ = _bins(bins_ptr, top_k, _real(record_ptr, TOP_P))
        own = _bin(scaled)
        wanted = ((own >= first) & (own <= last)).to(tl.int32)
        count = tl.sum(wanted, 0)
        if count > 0:
            begin = tl.atomic_add(bins_ptr + FOUND, count.to(tl.int64), sem="relaxed")
            place = begin + tl.cumsum(wanted, 0) - 1
            tl.store(candidates_ptr + row * ROOM + place, x.to(tl.float32), mask=(wanted > 0) & (place < ROOM))
        if top_k == 0:
            tl.atomic_add(bins_ptr + BEFORE, tl.sum(tl.where(own < first, _mass(scaled), 0), 0), sem="relaxed")


@triton.jit
def _border(
    scores_ptr: tl.tensor,
    num_scores: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    within: tl.tensor,
    before: tl.tensor,
    target: tl.tensor,
    TILE: tl.constexpr,
    BY_MASS: tl.constexpr,
) -> tl.tensor:
    """The most bits for which the tokens with fewer weigh less than `target`, of those `within` a border: two bits a turn.

    A token weighs 1, or its mass; those that are not among the scores, and have fewer bits than all of these, weigh `before`.
    """
    border, step = tl.full((), 0, tl.uint32), tl.full((), 1 << 30, tl.uint32)
    at = tl.arange(0, TILE)
    first_bits, first_weight = _weigh_scores(scores_ptr, at, num_scores, highest, temperature, within, BY_MASS)
    for _ in range(TURNS):
        one = tl.where(first_bits < border + step, first_weight, 0)
        two = tl.where(first_bits < border + step * 2, first_weight, 0)
        three = tl.where(first_bits < border + step * 3, first_weight, 0)
        for tile in range(TILE, num_scores, TILE):
            bits, weight = _weigh_scores(scores_ptr, tile + at, num_scores, highest, temperature, within, BY_MASS)
            one += tl.where(bits < border + step, weight, 0)
            two += tl.where(bits < border + step * 2, weight, 0)
            three += tl.where(bits < border + step * 3, weight, 0)
        fits = ((tl.sum(one, 0) + before).to(tl.float64) < target).to(tl.uint32)
        fits += ((tl.sum(two, 0) + before).to(tl.float64) < target).to(tl.uint32)
        fits += ((tl.sum(three, 0) + before).to(tl.float64) < target).to(tl.uint32)
        border += step * fits
        step = step >> 2
    return border


@triton.jit
def _weigh_scores(
    scores_ptr: tl.tensor,
    at: tl.tensor,
    num_scores: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    within: tl.tensor,
    BY_MASS: tl.constexpr,
) -> tl.tensor:
    """The bits of some scores, and what each counts."""
    x = tl.load(scores_ptr + at, mask=at < num_scores, other=float("-inf"))
    scaled = _scale_scores(x, highest, temperature)
    bits = _bits(scaled)
    if BY_MASS:
        return bits, tl.where((at < num_scores) & (bits <= within), _mass(scaled), 0)
    return bits, ((at < num_scores) & (bits <= within)).to(tl.int64)


@triton.jit
def _limit(
    scores_ptr: tl.tensor,
    num_scores: tl.tensor,
    highest: tl.tensor,
    record_ptr: tl.tensor,
    mass: tl.tensor,
    count_before: tl.tensor,
    mass_before: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The border of top-k, then top-p, among some of a row's scores; others have so much more, or too little to count."""
    top_k, top_p, temperature = tl.load(record_ptr + TOP_K), _real(record_ptr, TOP_P), _real(record_ptr, TEMPERATURE)
    border = tl.full((), NO_BORDER, tl.uint32)
    if top_k > 0:
        target = top_k.to(tl.float64)
        border = _border(scores_ptr, num_scores, highest, temperature, border, count_before, target, TILE, False)
    if top_p < 1.0:
        if top_k > 0:
            masses = tl.zeros([TILE], tl.int64)
            for tile in range(0, num_scores, TILE):
                at = tile + tl.arange(0, TILE)
                masses += _weigh_scores(scores_ptr, at, num_scores, highest, temperature, border, True)[1]
            mass = tl.sum(masses, 0)
        target = tl.maximum(mass.to(tl.float64) * top_p.to(tl.float64), 1.0)
        lower = _border(scores_ptr, num_scores, highest, temperature, border, mass_before, target, TILE, True)
        border = tl.minimum(border, lower)
    return border


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=LISTS)
def limit_kernel(
    scores_ptr: tl.tensor,  # [R, V]
    records_ptr: tl.tensor,  # int64 [R, N]
    highest_ptr: tl.tensor,  # float32 [R, S]
    bins_ptr: tl.tensor,  # int64 [R, COLUMNS]
    candidates_ptr: tl.tensor,  # float32 [R, ROOM]
    borders_ptr: tl.tensor,  # int64 [R]
    stride: tl.tensor,
    V: tl.constexpr,
    S: tl.constexpr,
    S_P: tl.constexpr,
    TILE: tl.constexpr,
    ROOM: tl.constexpr,
) -> None:
    """How far below the best a token may be. Tokens of the same score stay or go together.

    Top-k keeps a token if fewer than k have a higher score; top-p keeps it if those with a higher score have less than p of
    what top-k left. Grid (R,).
    """
    row = tl.program_id(0).to(tl.int64)
    record_ptr, highest = records_ptr + row * NUMBERS, _of_row(highest_ptr, row, S, S_P)
    border = tl.full((), NO_BORDER, tl.uint32)
    if _is_searched(record_ptr, highest):
        bins_ptr += row * COLUMNS
        mass, none = tl.load(bins_ptr + MASS), tl.zeros((), tl.int64)
        count = tl.load(bins_ptr + FOUND).to(tl.int32)
        if count <= ROOM:
            _, _, before = _bins(bins_ptr, tl.load(record_ptr + TOP_K), _real(record_ptr, TOP_P))
            mass_before = tl.load(bins_ptr + BEFORE)
            border = _limit(candidates_ptr + row * ROOM, count, highest, record_ptr, mass, before, mass_before, TILE)
        else:
            border = _limit(scores_ptr + row * stride, V, highest, record_ptr, mass, none, none, TILE)
    border = tl.minimum(border, tl.load(record_ptr + MIN_P).to(tl.uint32))
    tl.store(borders_ptr + row, border.to(tl.int64))
