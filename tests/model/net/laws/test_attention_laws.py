"""However tokens come to a backend, it computes the equation for them, and reads nothing but their own past."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from attend.model.backends.backend import Placement
from attend.model.backends.choice import choose_backend
from attend.model.sublayers import AttentionVariant
from tests.model.attention import BACKENDS
from tests.model.net.laws.ways import (
    DTYPES,
    LAYER,
    SHAPES,
    VARIANTS,
    Shape,
    Steps,
    Text,
    Turn,
    Way,
    cache_of,
    compute,
    compute_step,
    config_of,
    each_exact_way,
    each_variant,
    each_way,
    held_by,
    oracle,
    promised,
    texts_of,
)


def lengths_of(shape: Shape) -> tuple[int, ...]:
    """About the borders of blocks, and beyond every variant's window."""
    block = shape.block_size
    return 2 * block + 41, 1, max(1, block - 1), block, block + 1


def tables(texts: list[Text], block_size: int, dice: random.Random, copies: int = 1) -> list[list[int]]:
    """Blocks for each text, `copies` times over, scattered."""
    needs = [-(-len(text) // block_size) for text in texts] * copies
    free = list(range(1, sum(needs) + 3))
    dice.shuffle(free)
    return [[free.pop() for _ in range(need)] for need in needs]


def chunks(text: int, length: int, size: int, blocks: list[int], start: int = 0) -> Steps:
    """One text from `start` on, so many tokens a step."""
    return [[Turn(text, at, min(size, length - at), blocks)] for at in range(start, length, size)]


def whole(texts: list[Text], block_size: int, shared: int, dice: random.Random) -> Steps:
    """Each text in one step."""
    blocks = tables(texts, block_size, dice)
    return [step for at, text in enumerate(texts) for step in chunks(at, len(text), len(text), blocks[at])]


def token_by_token(texts: list[Text], block_size: int, shared: int, dice: random.Random) -> Steps:
    blocks = tables(texts, block_size, dice)
    return [step for at, text in enumerate(texts) for step in chunks(at, len(text), 1, blocks[at])]


def chunked(texts: list[Text], block_size: int, shared: int, dice: random.Random) -> Steps:
    """In chunks that end before, on and after a block's border."""
    blocks, sizes = tables(texts, block_size, dice), [7, block_size, block_size + 1, max(1, block_size - 1)]
    return [step for at, text in enumerate(texts) for step in chunks(at, len(text), sizes[at % 4], blocks[at])]


def batched(texts: list[Text], block_size: int, shared: int, dice: random.Random) -> Steps:
    """All side by side, a random number of tokens of each in a step."""
    blocks, done, steps = tables(texts, block_size, dice), [0] * len(texts), []
    while any(at < len(text) for at, text in zip(done, texts, strict=True)):
        step = []
        for at, text in enumerate(texts):
            count = min(len(text) - done[at], dice.choice([0, 1, 1, 2, 9, 30]))
            if count:
                step.append(Turn(at, done[at], count, blocks[at]))
                done[at] += count
        steps += [step] if step else []
    return steps


def prefix_hit(texts: list[Text], block_size: int, shared: int, dice: random.Random) -> Steps:
    """All begin with the blocks of the first text, which fills them in the same step: a step writes before it reads."""
    blocks = tables(texts, block_size, dice)
    steps: Steps = [*chunks(0, len(texts[0]), len(texts[0]), blocks[0]), []]
    for at, text in enumerate(texts[1:], start=1):
        found = min(shared, len(text) - 1) // block_size
        table = [*blocks[0][:found], *blocks[at][found:]]
        half = (len(text) - found * block_size + 1) // 2
        for step, half_of_it in zip(steps, chunks(at, len(text), half, table, found * block_size), strict=False):
            step += half_of_it
    return [step for step in steps if step]


def preempted(texts: list[Text], block_size: int, shared: int, dice: random.Random) -> Steps:
    """Each loses its blocks to the next text half way, and comes back in other blocks."""
    blocks = tables(texts, block_size, dice, copies=2)
    firsts, seconds = blocks[: len(texts)], blocks[len(texts) :]
    longest = max(firsts, key=len)
    steps = []
    for at, text in enumerate(texts):
        half = (len(text) + 1) // 2
        steps += [[Turn(at, 0, half, longest)], [Turn(at, half, 1, longest)] if half < len(text) else []]
        steps += [[Turn((at + 1) % len(texts), 0, min(len(texts[(at + 1) % len(texts)]), half), longest)]]
        steps += [[Turn(at, 0, half, seconds[at])], *chunks(at, len(text), 3, seconds[at], half)]
    return [step for step in steps if step]


COMINGS: list[Callable[[list[Text], int, int, random.Random], Steps]]
COMINGS = [whole, token_by_token, chunked, batched, prefix_hit, preempted]
each_coming = pytest.mark.parametrize("coming", COMINGS, ids=lambda coming: coming.__name__)


def scenes(way: Way, variant: AttentionVariant, coming: Callable) -> Iterator[tuple[Shape, list[Text], Steps]]:
    """A third of the shapes, another one for the next variant and for the next coming: so each pair of the three is met."""
    turn = COMINGS.index(coming) + list(VARIANTS.values()).index(variant)
    for shape in SHAPES[-turn % 3 :: 3]:
        if promised(way, shape):
            texts = texts_of(shape, variant, lengths_of(shape), way.dtype, 2 * shape.block_size)
            yield shape, texts, coming(texts, shape.block_size, 2 * shape.block_size, random.Random(7))


def assert_near(way: Way, found: Tensor, text: Text, variant: AttentionVariant, last: int) -> None:
    """The text's last tokens are within the dtype's bound of the equation."""
    expected, bound = oracle(held_by(way, text), variant, last)
    off = (found[-last:].double() - expected).abs()
    assert (off <= bound).all(), f"off by {(off / bound).nan_to_num(0).max():.2f} of the bound"


@each_coming
@each_variant
@each_way
def test_every_way_is_the_equation_however_the_tokens_come(way, variant, coming):
    """Chunked, batched with strangers, after a prefix hit or a preemption: in blocks where others have left NaN."""
    for shape, texts, steps in scenes(way, variant, coming):
        found = compute(way, shape, variant, texts, steps)
        for at, text in enumerate(texts):
            first = min(turn.start for step in steps for turn in step if turn.text == at)
            assert_near(way, found[at], text, variant, len(text) - first)


@each_coming
@each_variant
@each_exact_way
def test_an_exact_way_gives_a_token_the_same_bits_however_it_comes(way, variant, coming):
    for shape, texts, steps in scenes(way, variant, coming):
        alone = compute(way, shape, variant, texts, whole(texts, shape.block_size, 0, random.Random(1)))
        for one, other in zip(alone, compute(way, shape, variant, texts, steps), strict=True):
            assert torch.equal(one[other.any(-1).any(-1)], other[other.any(-1).any(-1)])


@pytest.mark.parametrize("coming", [batched, prefix_hit, preempted], ids=lambda coming: coming.__name__)
@each_variant
@each_way
def test_what_others_left_in_the_cache_has_no_influence(way, variant, coming):
    """Neither NaN nor numbers near the largest, in block 0, in free blocks, and beyond a request's last token."""
    for shape, texts, steps in scenes(way, variant, coming):
        one, other = (compute(way, shape, variant, texts, steps, left) for left in (torch.nan, 3e38))
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("place", ["k", "v"])
@each_way
def test_what_is_not_a_number_in_the_cache_harms_its_own_text_alone(way, place):
    """Also where it is written and read as 8 bits."""
    variant = VARIANTS["plain"]
    for shape, texts, steps in scenes(way, variant, batched):
        bad = replace(texts[0], **{place: getattr(texts[0], place).clone()})
        getattr(bad, place)[5, :, -1] = torch.nan
        one, other = (compute(way, shape, variant, [first, *texts[1:]], steps) for first in (texts[0], bad))
        assert all(map(torch.equal, one[1:], other[1:]))
        assert other[0][5:].isnan().any(-1).all()


@each_variant
@each_way
def test_a_step_writes_into_its_own_blocks_of_its_layer_only(way, variant):
    for shape, texts, _ in scenes(way, variant, whole):
        blocks = tables(texts, shape.block_size, random.Random(3))
        steps = [[Turn(1, 0, 1, blocks[1]), Turn(0, 0, len(texts[0]), blocks[0])]]
        cache = cache_of(way, shape, [[Turn(at, 0, 1, table) for at, table in enumerate(blocks)]], left=7.0)
        backend = way.make(config_of(shape, variant), shape.block_size)
        compute_step(way, backend, cache, texts, steps[0])
        written = {*blocks[0], *blocks[1]}
        for layer, tensor in [*enumerate(cache.keys), *enumerate(cache.values)]:
            touched = (tensor.unflatten(0, (-1, shape.block_size)) != 7).flatten(1).any(-1).nonzero().flatten().tolist()
            assert set(touched) == (written if layer == LAYER else set())


LONG = {
    "4096": (Shape(3, 1, 64, 32), VARIANTS["plain"], 4096),
    "4095 in a window": (Shape(2, 1, 128, 32), AttentionVariant(window=1000), 4095),
    "4097 with everything": (Shape(2, 1, 32, 64), AttentionVariant(window=3000, softcap=6.0, scale=0.3), 4097),
}


@pytest.mark.parametrize(("shape", "variant", "length"), LONG.values(), ids=LONG)
@each_way
def test_every_way_is_the_equation_at_length(way, shape, variant, length):
    """The end of a long text, in a chunk and token by token, beside a short one."""
    texts = texts_of(shape, variant, (length, 70), way.dtype)
    blocks = tables(texts, shape.block_size, random.Random(2))
    begin = length - 40
    steps = [[Turn(0, 0, begin, blocks[0])], [Turn(0, begin, 20, blocks[0]), Turn(1, 0, 50, blocks[1])]]
    steps += [[Turn(0, begin + at, 1, blocks[0]), Turn(1, 30 + at, 1, blocks[1])] for at in range(20, 40)]
    long, short = compute(way, shape, variant, texts, steps)
    assert_near(way, long, texts[0], variant, 40)
    assert_near(way, short, texts[1], variant, 70)


# What is refused.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", [*BACKENDS, "native"])
def test_what_a_backend_promises_is_chosen_and_all_else_is_refused(backend, dtype):
    """In a sentence that names the backend; `Way.make` looks at it."""
    way = Way(backend, dtype)
    for shape, variant in product(SHAPES, VARIANTS.values()):
        made = way.make(config_of(shape, variant), shape.block_size)
        assert (made is not None) == promised(way, shape)
        assert made is None or made.name.startswith(backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_auto_takes_a_backend_that_can_pass(dtype):
    for shape, variant in product(SHAPES, VARIANTS.values()):
        best = "native" if promised(Way("native", dtype), shape) else "torch"
        assert choose_backend("auto", config_of(shape, variant), Placement(dtype, "cpu", shape.block_size)).name == best
