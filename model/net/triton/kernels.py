"""Paged attention in Triton: decode in splits (flash decoding), prefill in tiles (flash attention).

Online softmax in base 2 (Milakov & Gimelshein 2018), keys split among programs and combined by their log-sum-exp
(Dao et al. 2023, flash-decoding). Splits have a fixed number of tokens and tiles a fixed number of queries, counted from
the row's own beginning, so what a row gets does not depend on its neighbours. Positions that a row may not see are never
loaded, for what an earlier owner left there may be NaN.

In Triton's interpreter these run on the CPU, and they compile for an H200; no GPU has run them yet.

Shapes: T tokens · R rows · H query heads · K key/value heads · D head size · I items of work. A name that ends in _P is
rounded up to a power of two, as tl.arange needs.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1.0e30)
"""Initial value of a running maximum: unlike -inf it can be subtracted from itself."""
LOG2_E = tl.constexpr(1.4426950408889634)


PLACES = ["slots_ptr", "positions_ptr", "table_ptr", "starts_ptr", "last_ptr", "tokens_ptr", "first_ptr", "rows_ptr"]
PLACES += ["places_ptr", "sources_ptr"]
"""Numbers of a step, which stand anywhere in a larger tensor: whether they are aligned depends on the step's tokens and rows.
A kernel that was compiled for either case would be compiled anew, and stop a step for seconds, when the other comes first.
"""


@triton.jit(do_not_specialize=["num_rows", "size", "limit", "most"], do_not_specialize_on_alignment=PLACES)
def share_kernel(
    last_ptr: tl.tensor,  # int64 [R]
    first_ptr: tl.tensor,  # int64 [R + 1]
    rows_ptr: tl.tensor,  # int64 [I]
    num_rows: tl.tensor,
    size: tl.tensor,
    limit: tl.tensor,
    most: tl.tensor,
    ROWS: tl.constexpr,
) -> None:
    """Cut each row's `last + 1` units, or `limit` of them if that is not 0 and fewer, into items of `size`. Grid (R,).

    If `most` is not 0, no row gets more items: a long row's are of as many times `size` as that takes.
    Row r gets the items `first[r] .. first[r + 1] - 1`; `rows` says of each item whose it is. ROWS rows are counted at once.
    """
    row = tl.program_id(0).to(tl.int64)
    begin, end = row * 0, row * 0
    for tile in range(0, num_rows, ROWS):
        others = tile + tl.arange(0, ROWS)
        units = tl.load(last_ptr + others, mask=others < num_rows, other=-1) + 1
        units = tl.where(limit > 0, tl.minimum(units, limit), units)
        span = size * tl.where(most > 0, most, tl.maximum(units, 1))
        each = size * tl.maximum((units + span - 1) // span, 1)
        items = (units + each - 1) // each
        begin += tl.sum(tl.where(others < row, items, 0), 0)
        end += tl.sum(tl.where(others <= row, items, 0), 0)
    tl.store(first_ptr + row, begin)
    tl.store(first_ptr + row + 1, end)
    for item in range(begin, end):
        tl.store(rows_ptr + item, row)


@triton.jit
def _slots(table_ptr: tl.tensor, positions: tl.tensor, inside: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The cache slots of a row's positions; slot 0, which is nobody's, where a position is not `inside`."""
    blocks = tl.load(table_ptr + positions // BLOCK, mask=inside, other=0)
    return blocks * BLOCK + tl.where(inside, positions % BLOCK, 0)


@triton.jit
def _scores(
    q: tl.tensor, k: tl.tensor, seen: tl.tensor, scale: tl.tensor, cap: tl.tensor, CAPPED: tl.constexpr, UPCAST: tl.constexpr
) -> tl.tensor:
    """Q Kᵀ in base 2, -inf where not `seen`. With CAPPED they are cap * tanh(scale * Q Kᵀ)."""
    if UPCAST:  # the interpreter multiplies the bits of bfloat16
        q, k = q.to(tl.float32), k.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAPPED:
        small = tl.exp2(tl.abs(scores) * -2.8853900817779268)  # exp(-2 |score|): 2 / ln 2
        scores = cap * tl.where(scores < 0, small - 1.0, 1.0 - small) / (1.0 + small)  # tanh, and no overflow on the way
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _begin(sinks_ptr: tl.tensor, heads: tl.tensor, SINKS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The running maximum and sum of `heads` before any key: nothing, or the weight of their sinks, which have no value."""
    best, total = heads * 0.0 + LOWEST, heads * 0.0
    if SINKS:
        sinks = tl.load(sinks_ptr + heads).to(tl.float32) * LOG2_E
        best = tl.maximum(sinks, LOWEST)
        total = tl.exp2(sinks - best)
    return best, total


@triton.jit
def _accumulate(
    scores: tl.tensor, v: tl.tensor, best: tl.tensor, total: tl.tensor, out: tl.tensor, UPCAST: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One step of the online softmax: the running maximum, sum and weighted values with a tile's scores taken in."""
    higher = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    kept = tl.exp2(best - higher)
    if UPCAST:
        v = v.to(tl.float32)
    out = out * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return higher, total * kept + tl.sum(weights, 1), out


@triton.jit
def _split(keys: tl.tensor, SPLIT: tl.constexpr, MOST: tl.constexpr, WINDOW: tl.constexpr) -> tl.tensor:
    """Keys of an item of a row that sees `keys`: SPLIT, or a multiple where MOST items are too few. So does `share_kernel`."""
    times = 1 if (WINDOW > 0) & (WINDOW <= SPLIT * MOST) else (keys + SPLIT * MOST - 1) // (SPLIT * MOST)
    return times * SPLIT


@triton.jit(do_not_specialize=["num_rows", "table_stride"], do_not_specialize_on_alignment=PLACES)
def decode_kernel(
    q_ptr: tl.tensor,  # [R, H, D]
    keys_ptr: tl.tensor,  # [slots, K, D]
    values_ptr: tl.tensor,
    parts_ptr: tl.tensor,  # float32 [I, H, D]
    weights_ptr: tl.tensor,  # float32 [I, H]: log2 of the sum of exp2(score)
    table_ptr: tl.tensor,  # int64 [R, blocks]
    positions_ptr: tl.tensor,  # int64 [R]
    first_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    num_rows: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_P: tl.constexpr,
    D: tl.constexpr,
    D_P: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    MOST: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """Attention of one key/value head's queries over one split of a row, for each item that falls to this program."""
    head = tl.program_id(1)
    group, size = tl.arange(0, GROUP_P), tl.arange(0, D_P)
    heads = head * GROUP + group
    live = (group < GROUP)[:, None] & (size < D)[None, :]
    for item in range(tl.program_id(0).to(tl.int64), tl.load(first_ptr + num_rows), tl.num_programs(0)):
        row = tl.load(rows_ptr + item)
        length = tl.load(positions_ptr + row) + 1
        first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else length * 0
        split = _split(length - first, SPLIT, MOST, WINDOW)
        begin = first + (item - tl.load(first_ptr + row)) * split
        end = tl.minimum(begin + split, length)
        q = tl.load(q_ptr + row * q_stride + heads[:, None] * D + size[None, :], mask=live, other=0.0)
        best = tl.full([GROUP_P], LOWEST, tl.float32)
        total = tl.zeros([GROUP_P], tl.float32)
        out = tl.zeros([GROUP_P, D_P], tl.float32)
        table = table_ptr + row * table_stride
        at = begin + tl.arange(0, TILE)
        slots = _slots(table, at, at < end, BLOCK)
        for _ in range(begin, end, TILE):
            places = (slots * K + head)[:, None] * D + size[None, :]
            inside = (at < end)[:, None] & (size < D)[None, :]
            k = tl.load(keys_ptr + places, mask=inside, other=0.0)
            v = tl.load(values_ptr + places, mask=inside, other=0.0)
            scores = _scores(q, k, (at < end)[None, :], scale, cap, CAPPED, UPCAST)
            best, total, out = _accumulate(scores, v, best, total, out, UPCAST)
            at += TILE
            slots = _slots(table, at, at < end, BLOCK)  # of the next tile: the loads of keys then wait for none of this turn
        place = item * (K * GROUP) + heads
        tl.store(parts_ptr + place[:, None] * D + size[None, :], out / total[:, None], mask=live)
        tl.store(weights_ptr + place, best + tl.log2(total), mask=group < GROUP)


@triton.jit(do_not_specialize_on_alignment=PLACES)
def combine_kernel(
    parts_ptr: tl.tensor,  # float32 [I, H, D]
    weights_ptr: tl.tensor,  # float32 [I, H]
    out_ptr: tl.tensor,  # [R, H, D]
    sinks_ptr: tl.tensor,  # [H]
    first_ptr: tl.tensor,
    tokens_ptr: tl.tensor,  # int64 [R]: which row of `out` is whose
    H: tl.constexpr,
    D: tl.constexpr,
    D_P: tl.constexpr,
    TILE: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    """The weighted mean of a head's splits, and of its sink if SINKS. Grid (R, H)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size = tl.arange(0, D_P)
    end = tl.load(first_ptr + row + 1)
    best, total = _begin(sinks_ptr, head, SINKS)
    out = tl.zeros([D_P], tl.float32)
    for tile in range(tl.load(first_ptr + row), end, TILE):
        items = tile + tl.arange(0, TILE)
        places = items * H + head
        logs = tl.load(weights_ptr + places, mask=items < end, other=float("-inf"))
        inside = (items < end)[:, None] & (size < D)[None, :]
        parts = tl.load(parts_ptr + places[:, None] * D + size[None, :], mask=inside, other=0.0)
        higher = tl.maximum(best, tl.max(logs, 0))
        weights = tl.exp2(logs - higher)
        kept = tl.exp2(best - higher)
        out = out * kept + tl.sum(weights[:, None] * parts, 0)
        total = total * kept + tl.sum(weights, 0)
        best = higher
    tl.store(out_ptr + (tl.load(tokens_ptr + row) * H + head) * D + size, out / total, mask=size < D)


@triton.jit
def _causal(
    q: tl.tensor,
    own: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    table_ptr: tl.tensor,
    begin: tl.tensor,
    stop: tl.tensor,
    lowest: tl.tensor,
    end: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The online softmax of lanes at the positions `own` over the tiles from `begin` to `stop`."""
    size = tl.arange(0, q.shape[1])
    at = begin + tl.arange(0, TILE)
    slots = _slots(table_ptr, at, (at >= lowest) & (at < end), BLOCK)
    for _ in range(begin, stop, TILE):
        read = (at >= lowest) & (at < end)
        places = (slots * (K * D))[:, None] + size[None, :]
        k = tl.load(keys_ptr + places, mask=read[:, None] & (size < D)[None, :], other=0.0)
        v = tl.load(values_ptr + places, mask=read[:, None] & (size < D)[None, :], other=0.0)
        seen = read[None, :] & (at[None, :] <= own[:, None])
        if WINDOW > 0:
            seen = seen & (at[None, :] > own[:, None] - WINDOW)
        scores = _scores(q, k, seen, scale, cap, CAPPED, UPCAST)
        best, total, out = _accumulate(scores, v, best, total, out, UPCAST)
        at += TILE
        slots = _slots(table_ptr, at, (at >= lowest) & (at < end), BLOCK)  # of the next tile, as in `decode_kernel`
    return best, total, out


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=PLACES)
def prefill_kernel(
    q_ptr: tl.tensor,  # [T, H, D]
    keys_ptr: tl.tensor,  # [slots, K, D]
    values_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [T, H, D]
    parts_ptr: tl.tensor,  # float32 [I, H, D]: of rows in several splits
    weights_ptr: tl.tensor,  # float32 [I, H]
    sinks_ptr: tl.tensor,  # [H]
    table_ptr: tl.tensor,  # int64 [., blocks]
    places_ptr: tl.tensor,  # int64 [R, 7]: see `backend.Longer`
    first_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_P: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    """Causal attention of QUERIES tokens, all heads of a group: a lane each; one split. Grid (tiles, K, splits at most)."""
    item, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    row = tl.load(rows_ptr + item)
    place_ptr = places_ptr + row * 7
    start, count, splits = tl.load(place_ptr), tl.load(place_ptr + 1) + 1, tl.load(place_ptr + 4)
    lanes, size = tl.arange(0, LANES), tl.arange(0, D_P)
    skipped = (item - tl.load(first_ptr + row)) * QUERIES
    query = tl.minimum(skipped + lanes // GROUP, count - 1)  # lanes past the end do the last query again
    token, heads = tl.load(place_ptr + 2) + query, head * GROUP + lanes % GROUP
    q_places = token[:, None] * q_stride + heads[:, None] * D + size[None, :]
    q = tl.load(q_ptr + q_places, mask=(size < D)[None, :], other=0.0)
    lowest = tl.maximum(start + skipped - WINDOW + 1, 0) if WINDOW > 0 else start * 0
    end = start + tl.minimum(skipped + QUERIES, count)
    best, total = _begin(sinks_ptr, heads, SINKS)
    best, total = tl.where(splits > 1, LOWEST, best), tl.where(splits > 1, 0.0, total)  # sinks come in with `combine_kernel`
    out = tl.zeros([LANES, D_P], tl.float32)
    keys, begin = tl.load(place_ptr + 5) * TILE, lowest // TILE * TILE + split * tl.load(place_ptr + 5) * TILE
    best, total, out = _causal(
        *(q, start + query, keys_ptr + head * D, values_ptr + head * D, table_ptr + tl.load(place_ptr + 3) * table_stride),
        *(begin, tl.minimum(begin + keys, end), lowest, end, best, total, out, scale, cap),
        *(K, D, BLOCK, TILE, WINDOW, CAPPED, UPCAST),
    )
    live = (lanes < QUERIES * GROUP) & (skipped + lanes // GROUP < count) & (split < splits)
    none, total = total == 0, tl.where(total == 0, 1.0, total)  # a part may have seen no key, and then weighs nothing
    out /= total[:, None]
    cut, inside = splits > 1, (size < D)[None, :]
    place = (token * (K * GROUP) + heads)[:, None] * D + size[None, :]
    tl.store(out_ptr + place, out, mask=(live & (splits == 1))[:, None] & inside)
    part = (tl.load(place_ptr + 6) + query * splits + split) * (K * GROUP) + heads
    tl.store(parts_ptr + part[:, None] * D + size[None, :], out, mask=(live & cut)[:, None] & inside)
    tl.store(weights_ptr + part, tl.where(none, float("-inf"), best + tl.log2(total)), mask=live & cut)
