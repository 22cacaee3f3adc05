"""Draws tokens from scores in two launches: `attend.model.sampling.sample`. Between them `limits.py` may choose candidates.

The same float32 operations in the same order, each rounded to nearest, so a greedy token is the reference's to the bit. Noise
has the same random bits; its two logarithms are rounded as the device rounds them. A row is cut into
chunks of a fixed size, and only maxima and whole numbers go from chunk to chunk: its token depends on that row alone.

In Triton's interpreter these run on the CPU, and they compile for an H200; no GPU has run them yet.

Shapes: R rows · V vocabulary · S chunks of a row · N numbers of a record. S_P is S rounded up to a power of two.
"""

import triton
import triton.language as tl

KEY = tl.constexpr(0)
"""The 64 bits of a row's noise. The columns of a record, int64; numbers of float32 lie there as their bits."""
NOISY = tl.constexpr(1)
"""1: the token of score / temperature + noise, 0: that of the score."""
TEMPERATURE = tl.constexpr(2)
TOP_K = tl.constexpr(3)
"""Column of top-k; 0: no limit."""
TOP_P = tl.constexpr(4)
"""Column of top-p; 1: no limit."""
MIN_P = tl.constexpr(5)
"""How far below the best a score may be, after the division by the temperature: -log(min_p)."""
MAY_EXCLUDE = tl.constexpr(6)
REPETITION = tl.constexpr(7)
FREQUENCY = tl.constexpr(8)
PRESENCE = tl.constexpr(9)
TEXT = tl.constexpr(10)
"""The row's line of `counts`; -1: none."""
WORDS = tl.constexpr(11)
"""The row's line of `words`; -1: none."""
BIASES = tl.constexpr(12)
"""Start of the row's biases among the entries. From BANS on, where they end, follow its bans, up to END."""
BANS = tl.constexpr(13)
END = tl.constexpr(14)
NUMBERS = tl.constexpr(15)
"""Numbers of a row's record, N."""
LARGEST = tl.constexpr(1e9)
"""`attend.model.sampling.LARGEST`."""
UNSCORED = tl.constexpr(-1)
EXCLUDED = tl.constexpr(-2)
NO_BORDER = tl.constexpr(0xFFFFFFFF)
BINS = tl.constexpr(256)
"""Bins of a row's histogram; see `limits.py`."""
COLUMNS = tl.constexpr(259)
"""Columns of `bins`: the histogram and three sums."""
NOTHING = tl.constexpr(-(2**63))
"""A score below that of any token, as an int64."""
LISTS = ["records_ptr", "entries_ptr", "words_ptr", "logits_ptr", "scores_ptr", "counts_ptr"]
LISTS += ["highest_ptr", "best_ptr", "done_ptr", "borders_ptr", "tokens_ptr", "bins_ptr", "candidates_ptr"]
"""What stands anywhere in a larger tensor: see `kernels.PLACES`."""


@triton.jit
def _real(record_ptr: tl.tensor, column: tl.constexpr) -> tl.tensor:
    """A column of a record that holds a float32."""
    return tl.load(record_ptr + column).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _change_scores(
    x: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    record_ptr: tl.tensor,
    entries_ptr: tl.tensor,
    words_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    V: tl.constexpr,
) -> tl.tensor:
    """Scores of the tokens `at` under a row's bias, penalties, bans and mask, in this order."""
    for entry in range(tl.load(record_ptr + BIASES), tl.load(record_ptr + BANS)):
        bits = tl.load(entries_ptr + entry)
        bias = (bits >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        x = tl.where(at == (bits & 0xFFFFFFFF), x + bias, x)
    text = tl.load(record_ptr + TEXT)
    if text >= 0:
        count = tl.load(counts_ptr + text * V + at, mask=inside, other=0)
        repetition = _real(record_ptr, REPETITION)
        if repetition != 1.0:
            penalized = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
            penalized = tl.minimum(tl.maximum(penalized, -LARGEST), LARGEST)
            x = tl.where((count > 0) & (tl.abs(x) < float("inf")), penalized, x)
        taken = _real(record_ptr, FREQUENCY) * (count - 1).to(tl.float32) + _real(record_ptr, PRESENCE)
        x = tl.where(count > 1, x - taken, x)
    for entry in range(tl.load(record_ptr + BANS), tl.load(record_ptr + END)):
        x = tl.where(at == tl.load(entries_ptr + entry), float("-inf"), x)
    line = tl.load(record_ptr + WORDS)
    if line >= 0:
        word = tl.load(words_ptr + line * ((V + 31) // 32) + at // 32, mask=inside, other=0)
        x = tl.where(((word >> (at % 32)) & 1) != 0, x, float("-inf"))
    return x


@triton.jit
def _highest(x: tl.tensor) -> tl.tensor:
    """The largest; infinite where one of them is not a number."""
    return tl.max(tl.where(x == x, x, float("inf")), 0)


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=LISTS)
def highest_kernel(
    logits_ptr: tl.tensor,  # [R, V]
    records_ptr: tl.tensor,  # int64 [R, N]
    entries_ptr: tl.tensor,  # int64: a token, and for a bias its float32 in the upper half
    words_ptr: tl.tensor,  # int32 [., V / 32 rounded up]: a bit for each token, 1 where it is allowed
    counts_ptr: tl.tensor,  # int32 [., V]: 0 for a token that is not in the text, else 1 and how often it is in the output
    scores_ptr: tl.tensor,  # float32 [R, V]
    highest_ptr: tl.tensor,  # float32 [2, R, S]
    best_ptr: tl.tensor,  # int64 [R]
    done_ptr: tl.tensor,  # int32 [R]
    borders_ptr: tl.tensor,  # int64 [R]
    bins_ptr: tl.tensor,  # int64 [R, COLUMNS]: see `limits.py`
    stride: tl.tensor,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    CHANGES: tl.constexpr,
    LIMITED: tl.constexpr,
) -> None:
    """The best score of each chunk, as the model gave it and as its row's parameters make it: `scores` then, if CHANGES.

    Sets the other outputs to what the next kernels begin with, `bins` if LIMITED. Grid (R, S).
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = at < V
    x = tl.load(logits_ptr + row * stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    highest_ptr += row * tl.num_programs(1) + chunk
    tl.store(highest_ptr, _highest(x))
    if CHANGES:
        x = _change_scores(x, at, inside, records_ptr + row * NUMBERS, entries_ptr, words_ptr, counts_ptr, V)
        tl.store(scores_ptr + row * V + at, x, mask=inside)
        tl.store(highest_ptr + tl.num_programs(0) * tl.num_programs(1), _highest(x))
    if chunk == 0:
        tl.store(best_ptr + row, NOTHING)
        tl.store(done_ptr + row, 0)
        tl.store(borders_ptr + row, NO_BORDER)
        if LIMITED:
            column = tl.arange(0, 2 * BINS)
            tl.store(bins_ptr + row * COLUMNS + column, tl.zeros([2 * BINS], tl.int64), mask=column < COLUMNS)


@triton.jit
def _of_row(highest_ptr: tl.tensor, row: tl.tensor, S: tl.constexpr, S_P: tl.constexpr) -> tl.tensor:
    """The best of a row's chunks."""
    chunk = tl.arange(0, S_P)
    return tl.max(tl.load(highest_ptr + row * S + chunk, mask=chunk < S, other=float("-inf")), 0)


@triton.jit
def _scale_scores(x: tl.tensor, highest: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """(score - best) / temperature: 0 or less."""
    return tl.div_rn(x.to(tl.float32) - highest, temperature)


@triton.jit
def _bits(scaled: tl.tensor) -> tl.tensor:
    """Bits of how far a score is below the best: as whole numbers they have the same order, uint32."""
    return tl.abs(scaled).to(tl.uint32, bitcast=True)


@triton.jit
def _noise(key: tl.tensor, at: tl.tensor) -> tl.tensor:
    """See `attend.model.sampling.gumbel_noise`."""
    bits = key.to(tl.uint64) ^ (at.to(tl.uint64) * 0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    uniform = (((bits ^ (bits >> 31)) >> 41).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23
    return -tl.log(-tl.log(uniform))


@triton.jit
def _rank_key(value: tl.tensor, at: tl.tensor) -> tl.tensor:
    """A number that is larger for a larger value, and of equal values for the lower token. int64."""
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - at).to(tl.int64)


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=LISTS)
def draw_kernel(
    scores_ptr: tl.tensor,  # [R, V]
    records_ptr: tl.tensor,  # int64 [R, N]
    highest_ptr: tl.tensor,  # float32 [2, R, S]: the model's, and those of `scores`
    borders_ptr: tl.tensor,  # int64 [R]
    best_ptr: tl.tensor,  # int64 [R]
    done_ptr: tl.tensor,  # int32 [R]: how many chunks are in `best`
    tokens_ptr: tl.tensor,  # int64 [R]
    stride: tl.tensor,
    V: tl.constexpr,
    S: tl.constexpr,
    S_P: tl.constexpr,
    CHUNK: tl.constexpr,
    CHANGES: tl.constexpr,
) -> None:
    """The token of the best score, with noise where the row wants it. The last of a row's programs writes it. Grid (R, S)."""
    row = tl.program_id(0).to(tl.int64)
    record_ptr = records_ptr + row * NUMBERS
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    model = _of_row(highest_ptr, row, S, S_P)
    highest = _of_row(highest_ptr + tl.num_programs(0) * S, row, S, S_P) if CHANGES else model
    x = tl.load(scores_ptr + row * stride + at, mask=at < V, other=float("-inf"))
    noisy = tl.load(record_ptr + NOISY) != 0
    value = _scale_scores(x, highest, tl.where(noisy, _real(record_ptr, TEMPERATURE), 1.0))
    kept = (at < V) & (_bits(value).to(tl.int64) <= tl.load(borders_ptr + row))
    if noisy:
        value += _noise(tl.load(record_ptr + KEY), at)
    value = tl.where(kept & (value == value), value + 0.0, float("-inf"))
    tl.atomic_max(best_ptr + row, tl.max(_rank_key(value, at), 0))
    if tl.atomic_add(done_ptr + row, 1) == S - 1:
        best = tl.atomic_max(best_ptr + row, NOTHING)
        token = 0x7FFFFFFF - (best & 0xFFFFFFFF)
        excluded = (tl.load(record_ptr + MAY_EXCLUDE) != 0) & (tl.abs(model) < float("inf"))
        none = tl.where(excluded, EXCLUDED, UNSCORED)
        tl.store(tokens_ptr + row, tl.where(tl.abs(highest) < float("inf"), token, none))
