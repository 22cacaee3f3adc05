"""Experts in Triton: pairs of a token and an expert are grouped by expert, multiplied in tiles, and summed token by token.

Nothing here is read on the host, so a step with experts can be recorded as a CUDA graph. Nothing is added by atomics: a
token's experts are summed in the order of their numbers, in float32, whatever else is in the batch.

In Triton's interpreter these run on the CPU, and they compile for an H200; no GPU has run them yet.

Shapes: T tokens · E model width · X experts · C experts that a token goes to · P = T C pairs, pair p of token p / C · F width
of one expert's MLP. A name that ends in _P is rounded up to a power of two, as tl.arange needs.
"""

import triton
import triton.language as tl

from attend.model.net.triton.fused_kernels import gate_product

NOBODY = tl.constexpr(1 << 30)
"""A number above those of all experts."""


@triton.jit(do_not_specialize=["num_pairs"])
def group_kernel(
    experts_ptr: tl.tensor,  # int64 [P]
    pairs_ptr: tl.tensor,  # int64 [P]: all pairs, by expert and then by token
    begin_ptr: tl.tensor,  # int64 [X]: where an expert's pairs begin there
    last_ptr: tl.tensor,  # int64 [X]: how many they are, less one
    num_pairs: tl.tensor,
    PAIRS: tl.constexpr,
) -> None:
    """Group the pairs by expert; each program finds its own. PAIRS pairs are looked at at once. Grid (X,)."""
    expert = tl.program_id(0).to(tl.int64)
    begin, count = expert * 0, expert * 0
    for tile in range(0, num_pairs, PAIRS):
        pairs = tile + tl.arange(0, PAIRS)
        experts = tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=NOBODY)
        begin += tl.sum((experts < expert).to(tl.int64), 0)
        count += tl.sum((experts == expert).to(tl.int64), 0)
    tl.store(begin_ptr + expert, begin)
    tl.store(last_ptr + expert, count - 1)
    for tile in range(0, num_pairs, PAIRS):
        pairs = tile + tl.arange(0, PAIRS)
        mine = tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=NOBODY) == expert
        tl.store(pairs_ptr + begin + tl.cumsum(mine.to(tl.int64), 0) - 1, pairs, mask=mine)
        begin += tl.sum(mine.to(tl.int64), 0)


@triton.jit
def _share(
    item: tl.tensor,
    pairs_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    last_ptr: tl.tensor,
    first_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    PAIRS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """An item's expert, its PAIRS pairs, and which of them there are."""
    expert = tl.load(experts_ptr + item)
    lanes = (item - tl.load(first_ptr + expert)) * PAIRS + tl.arange(0, PAIRS)
    live = lanes <= tl.load(last_ptr + expert)
    return expert, tl.load(pairs_ptr + tl.load(begin_ptr + expert) + lanes, mask=live, other=0), live


@triton.jit
def _product(
    x_ptr: tl.tensor,
    places: tl.tensor,
    live: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    rows: tl.tensor,
    inside: tl.tensor,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    BIASED: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tl.tensor:
    """x Wᵀ + b in float32, [places, rows], of some rows of x [., SIZE] and of W [., SIZE], INNER columns at once."""
    total = tl.zeros([places.shape[0], rows.shape[0]], tl.float32)
    for begin in range(0, SIZE, INNER):
        column = begin + tl.arange(0, INNER)
        x = tl.load(x_ptr + places[:, None] * SIZE + column[None, :], mask=live[:, None] & (column < SIZE)[None, :], other=0.0)
        w_mask = inside[:, None] & (column < SIZE)[None, :]
        w = tl.load(weight_ptr + rows[:, None] * SIZE + column[None, :], mask=w_mask, other=0.0)
        if UPCAST:  # the interpreter multiplies the bits of bfloat16
            x, w = x.to(tl.float32), w.to(tl.float32)
        total += tl.dot(x, tl.trans(w), input_precision="ieee")
    if BIASED:
        total += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def up_kernel(
    x_ptr: tl.tensor,  # [T, E]
    weight_ptr: tl.tensor,  # [X, 2 F, E], gates before ups
    bias_ptr: tl.tensor,  # [X, 2 F]
    out_ptr: tl.tensor,  # [P, F]
    pairs_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    last_ptr: tl.tensor,
    first_ptr: tl.tensor,  # int64 [X + 1]
    experts_ptr: tl.tensor,  # int64 [items]
    E: tl.constexpr,
    F: tl.constexpr,
    X: tl.constexpr,
    C: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    SLOPE: tl.constexpr,
    BIASED: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """act(gate(x)) * up(x) of each pair, see `gate_product`. Grid (items at most, F / COLUMNS rounded up)."""
    item = tl.program_id(0).to(tl.int64)
    if item >= tl.load(first_ptr + X):
        return
    expert, pairs, live = _share(item, pairs_ptr, begin_ptr, last_ptr, first_ptr, experts_ptr, PAIRS)
    lanes = tl.arange(0, 2 * COLUMNS)  # each gate beside its up
    column = tl.program_id(1) * COLUMNS + lanes // 2
    rows, inside = lanes % 2 * F + column, column < F
    weight_ptr += expert * (2 * F * E)
    bias_ptr += expert * (2 * F)
    both = _product(x_ptr, pairs // C, live, weight_ptr, bias_ptr, rows, inside, E, INNER, BIASED, UPCAST)
    gate, up = tl.split(tl.reshape(both, [PAIRS, COLUMNS, 2]))
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    places = out_ptr + pairs[:, None] * F + column[None, :]
    tl.store(places, gate_product(gate, up, ACTIVATION, LIMIT, SLOPE), mask=live[:, None] & (column < F)[None, :])


@triton.jit
def down_kernel(
    x_ptr: tl.tensor,  # [P, F]
    weight_ptr: tl.tensor,  # [X, E, F]
    bias_ptr: tl.tensor,  # [X, E]
    shares_ptr: tl.tensor,  # float32 [P]: what a pair weighs
    out_ptr: tl.tensor,  # float32 [P, E]
    pairs_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    last_ptr: tl.tensor,
    first_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    E: tl.constexpr,
    F: tl.constexpr,
    X: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    BIASED: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """down(x) of each pair, times its weight. Grid (items at most, E / COLUMNS rounded up)."""
    item = tl.program_id(0).to(tl.int64)
    if item >= tl.load(first_ptr + X):
        return
    expert, pairs, live = _share(item, pairs_ptr, begin_ptr, last_ptr, first_ptr, experts_ptr, PAIRS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    weight_ptr += expert * (E * F)
    bias_ptr += expert * E
    out = _product(x_ptr, pairs, live, weight_ptr, bias_ptr, column, column < E, F, INNER, BIASED, UPCAST)
    out *= tl.load(shares_ptr + pairs, mask=live, other=0.0)[:, None]
    tl.store(out_ptr + pairs[:, None] * E + column[None, :], out, mask=live[:, None] & (column < E)[None, :])


@triton.jit
def sum_kernel(
    parts_ptr: tl.tensor,  # float32 [P, E]
    experts_ptr: tl.tensor,  # int64 [P]
    shared_ptr: tl.tensor,  # [T, E]
    gate_ptr: tl.tensor,  # [T]
    out_ptr: tl.tensor,  # [T, E]
    E: tl.constexpr,
    C: tl.constexpr,
    C_P: tl.constexpr,
    SIZE: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
) -> None:
    """A token's pairs, added in the order of their experts; then shared if SHARED, times sigmoid(gate) if GATED.

    Grid (T, E / SIZE up).
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    choice = tl.arange(0, C_P)
    experts = tl.load(experts_ptr + token * C + choice, mask=choice < C, other=NOBODY)
    rank = tl.sum((experts[None, :] < experts[:, None]).to(tl.int32), 1)
    total = tl.zeros([SIZE], tl.float32)
    for turn in range(C):
        pair = token * C + tl.sum(tl.where(rank == turn, choice, 0), 0)
        total += tl.load(parts_ptr + pair * E + at, mask=at < E, other=0.0)
    if SHARED:
        shared = tl.load(shared_ptr + token * E + at, mask=at < E, other=0.0).to(tl.float32)
        if GATED:
            shared /= 1.0 + tl.exp(-tl.load(gate_ptr + token).to(tl.float32))
        total += shared
    tl.store(out_ptr + token * E + at, total, mask=at < E)
