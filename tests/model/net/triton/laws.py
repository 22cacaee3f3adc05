"""The laws of the Triton backend. Not collected by name: `test_triton.py` runs them in a process of their own.

Where TRITON_INTERPRET is 1 they run in Triton's interpreter on the CPU, else on the GPU:

    python -m pytest tests/model/net/triton/laws.py
"""

import pytest
import torch

from attend.model.backends.backend import Placement
from attend.model.backends.triton import Triton
from attend.model.net.paged_attention import BatchLayout, KVCache, ReferenceBackend, Row
from attend.model.net.triton import backend as under_test
from attend.model.net.triton.backend import INTERPRETED, TritonBackend
from attend.model.sublayers import AttentionVariant
from tests.model.checkpoints import tiny_config

DEVICE = "cpu" if INTERPRETED else "cuda"
PLAIN = AttentionVariant()
VARIANTS = [
    PLAIN,
    AttentionVariant(window=1),
    AttentionVariant(window=21),
    AttentionVariant(softcap=3.0),
    AttentionVariant(scale=0.3),
    AttentionVariant(window=40, softcap=5.0, scale=0.2),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of a result, absolute and relative: float32 by the order of sums, the others by the rounding of the result itself."""
SPLIT = 32
SHAPES = [  # query heads, key/value heads, head size, block size, dtype
    (2, 2, 32, 8, torch.float32),
    (4, 2, 80, 16, torch.float32),
    (3, 1, 64, 32, torch.bfloat16),
    (8, 2, 96, 64, torch.float16),
    (14, 2, 64, 32, torch.bfloat16),
    (8, 1, 256, 128, torch.bfloat16),
    (4, 1, 512, 32, torch.bfloat16),
    (24, 1, 128, 16, torch.float32),
]
each_shape = pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda shape: "-".join(str(part).removeprefix("torch.") for part in shape)
)
each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)


@pytest.fixture(autouse=True)
def short_splits(monkeypatch):
    """Borders between splits at lengths that the interpreter bears."""
    monkeypatch.setattr(under_test, "SPLIT", SPLIT)


class Scene:
    """Requests of some lengths, whose tokens lie on scattered pages of a cache that is filled as far as a step begins."""

    def __init__(self, rows, shape=SHAPES[0], seed=0, device=DEVICE):
        """`rows`: (start, count) of each request in the step."""
        heads, kv_heads, size, self.block_size, dtype = shape
        dice = torch.Generator().manual_seed(seed)
        needs = [-(-(start + count) // self.block_size) for start, count in rows]
        ids = (torch.randperm(sum(needs) + 2, generator=dice) + 1).tolist()
        self.rows = [Row([ids.pop() for _ in range(need)], *row) for need, row in zip(needs, rows, strict=True)]
        config = tiny_config(num_heads=heads, num_kv_heads=kv_heads, head_size=size, num_layers=1)
        self.cache = KVCache.allocate(config, sum(needs) + 2, self.block_size, dtype, device)
        for cached in (*self.cache.keys, *self.cache.values):
            cached.copy_(torch.randn(cached.shape, generator=dice))
        widths = (heads, kv_heads, kv_heads)
        self.qkv = [
            [torch.randn(count, width, size, generator=dice).to(device, dtype) for width in widths] for _, count in rows
        ]

    def layout(self, chosen):
        return BatchLayout.build([self.rows[index] for index in chosen], self.block_size, str(self.cache.keys[0].device))

    def copy(self):
        """The cache, to be written to."""
        copied = [[part.clone() for part in parts] for parts in (self.cache.keys, self.cache.values)]
        return KVCache(*copied, self.block_size)

    def attend(self, backend, chosen=None, cache=None, sinks=None):
        """The outputs of the chosen requests (rows of one token first), each [count, H, D]."""
        chosen = range(len(self.rows)) if chosen is None else chosen
        q, k, v = (torch.cat([self.qkv[index][part] for index in chosen]) for part in range(3))
        out = backend.forward(0, q, k, v, cache or self.copy(), self.layout(chosen), sinks)
        assert (out.dtype, out.shape) == (q.dtype, q.shape)
        return out.split([self.rows[index].count for index in chosen])

    def spoil(self, window=None):
        """A cache with NaN everywhere but where the step's queries may look: blocks of others and what came before too."""
        spoilt = self.copy()
        for cached in (*spoilt.keys, *spoilt.values):
            kept = cached.clone()
            cached.fill_(torch.nan)
            for row in self.rows:
                first = 0 if window is None else max(0, row.start + 1 - window)
                for at in range(first, row.start):
                    slot = row.blocks[at // self.block_size] * self.block_size + at % self.block_size
                    cached[slot] = kept[slot]
        return spoilt


def assert_close(ours, oracle):
    for one, other in zip(ours, oracle, strict=True):
        bound = TOLERANCE[one.dtype]
        torch.testing.assert_close(one, other, atol=bound, rtol=bound)


def assert_same(ours, others):
    for one, other in zip(ours, others, strict=True):
        assert torch.equal(one, other)


def decodes(*lengths):
    return [(length - 1, 1) for length in lengths]


@each_shape
def test_decode_is_the_equation_at_the_borders_of_blocks_and_splits(shape):
    at = Scene(decodes(1, 15, 16, 17, SPLIT, SPLIT + 1, 2 * SPLIT - 1, 3 * SPLIT), shape)
    assert_close(at.attend(TritonBackend()), at.attend(ReferenceBackend()))


@each_shape
def test_prefill_is_the_equation_wherever_a_chunk_begins(shape):
    at = Scene([(4, 1), (0, 2), (0, 17), (31, 9), (15, 2)], shape)
    assert_close(at.attend(TritonBackend()), at.attend(ReferenceBackend()))


@each_variant
def test_each_variant_is_the_equation(variant):
    at = Scene([*decodes(1, 20, 22, 70), (0, 23), (38, 5)])
    assert_close(at.attend(TritonBackend([variant])), at.attend(ReferenceBackend([variant])))


@pytest.mark.parametrize(
    ("shape", "variant"),
    [(SHAPES[0], VARIANTS[-1]), (SHAPES[1], PLAIN), (SHAPES[2], AttentionVariant(window=21))],
    ids=["float32 and a variant", "a padded head", "bfloat16 and a window"],
)
def test_beside_sinks_it_is_the_equation(shape, variant):
    """Of rows that fill a split, several, and none; below, among and above the scores."""
    at = Scene([*decodes(1, 33, 70), (0, 17), (31, 9)], shape)
    sinks = torch.linspace(-3, 6, shape[0], device=DEVICE, dtype=shape[-1])
    assert_close(at.attend(TritonBackend([variant]), sinks=sinks), at.attend(ReferenceBackend([variant]), sinks=sinks))


def test_a_sink_without_weight_is_none_to_the_bit():
    at = Scene([*decodes(40), (3, 5)])
    nothing = torch.full((2,), -torch.inf, device=DEVICE)
    assert_same(at.attend(TritonBackend()), at.attend(TritonBackend(), sinks=nothing))


@pytest.mark.parametrize("variant", [PLAIN, AttentionVariant(window=150)], ids=str)
def test_a_row_has_no_more_splits_than_it_may_and_still_is_the_equation(monkeypatch, variant):
    """At the lengths where its splits grow, whatever else is in the batch."""
    monkeypatch.setattr(under_test, "MAX_SPLITS", 2)
    lengths = (1, SPLIT, 2 * SPLIT, 2 * SPLIT + 1, 4 * SPLIT, 4 * SPLIT + 1, 7 * SPLIT - 1)
    at = Scene(decodes(*lengths))
    backend = TritonBackend([variant])
    assert_close(at.attend(backend), at.attend(ReferenceBackend([variant])))
    [shares] = backend._plan.decodes.values()
    assert 2 == shares.first_R.diff().max()
    assert len(shares.rows_I) <= 2 * len(lengths)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("variant", [PLAIN, VARIANTS[-1], AttentionVariant(window=90)], ids=str)
def test_a_chunk_on_a_past_in_splits_is_the_equation_and_the_same_beside_others(monkeypatch, shape, variant):
    """Splits of few keys; with sinks; in as many launches as there is room for parts."""
    monkeypatch.setattr(under_test, "PREFILL_SPLIT", 32)
    monkeypatch.setattr(under_test, "MAX_PARTS", 40)
    at = Scene([(70, 1), (100, 9), (0, 20), (199, 3), (31, 2), (140, 40)], shape)
    sinks = torch.linspace(-1, 1, shape[0], device=DEVICE, dtype=shape[-1])
    backend, reference = TritonBackend([variant]), ReferenceBackend([variant])
    together = at.attend(backend, sinks=sinks)
    groups = next(iter(backend._plan.prefills.values()))
    assert len(groups) > 1 and max(group.splits for group in groups) >= (2 if variant.window else 6)
    assert_close(together, at.attend(reference, sinks=sinks))
    assert_same(together, [at.attend(backend, [index], sinks=sinks)[0] for index in range(6)])
    assert_same(together, at.attend(backend, cache=at.spoil(variant.window), sinks=sinks))


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2]], ids=["float32", "bfloat16"])
def test_chunked_is_whole(shape):
    """One prompt in any chunks, the last of one token among them, fills the cache and gets what it gets at once."""
    whole = Scene([(0, 41)], shape)
    at_once, cache = whole.attend(TritonBackend())[0], whole.copy()
    backend, parts, begin = TritonBackend(), [], 0
    for count in (1, 16, 2, 21, 1):
        q, k, v = (part[begin : begin + count] for part in whole.qkv[0])
        layout = BatchLayout.build([Row(whole.rows[0].blocks, begin, count)], whole.block_size, DEVICE)
        parts.append(backend.forward(0, q, k, v, cache, layout))
        begin += count
    assert_close([torch.cat(parts)], [at_once])


@pytest.mark.parametrize(
    ("shape", "variant"), [(SHAPES[0], VARIANTS[-1]), (SHAPES[2], PLAIN)], ids=["float32 and a window", "bfloat16"]
)
def test_batched_with_strangers_is_alone_bit_for_bit(shape, variant):
    at = Scene([*decodes(70, 3, 33), (9, 12), (40, 2)], shape)
    backend, sinks = TritonBackend([variant]), torch.ones(shape[0], device=DEVICE)
    together = at.attend(backend, sinks=sinks)
    assert_same(together, [at.attend(backend, [index], sinks=sinks)[0] for index in range(5)])
    order = [2, 0, 1, 4, 3]
    assert_same([together[index] for index in order], at.attend(backend, order, sinks=sinks))


@pytest.mark.parametrize("variant", [PLAIN, AttentionVariant(window=5)], ids=str)
def test_what_a_row_may_not_see_is_never_read(variant):
    """NaN in every other slot: of other blocks, after the end, and before the window."""
    at = Scene([*decodes(1, 9, 40), (3, 4), (30, 2)])
    backend = TritonBackend([variant])
    assert_same(at.attend(backend), at.attend(backend, cache=at.spoil(variant.window)))


def test_nan_of_its_own_harms_one_request_only():
    at = Scene([*decodes(20, 30), (8, 3), (20, 4)])
    clean = at.attend(TritonBackend())
    for index in (0, 2):
        at.qkv[index][1][0] = torch.nan
    spoilt = at.attend(TritonBackend())
    assert spoilt[0].isnan().all() and spoilt[2].isnan().all()
    assert_same([spoilt[1], spoilt[3]], [clean[1], clean[3]])


def test_a_step_writes_its_own_slots_and_padding_writes_to_block_0():
    at = Scene([*decodes(12), (6, 3)])
    cache, layout = at.copy(), at.layout([0, 1])
    layout.slots_T[0] = 5  # as a row of padding has it
    q, k, v = (torch.cat([each[part] for each in at.qkv]) for part in range(3))
    TritonBackend().forward(0, q, k, v, cache, layout)
    for cached, before, given in ((cache.keys[0], at.cache.keys[0], k), (cache.values[0], at.cache.values[0], v)):
        assert torch.equal(cached[layout.slots_T], given)
        others = torch.ones(len(cached), dtype=torch.bool, device=DEVICE).index_fill(0, layout.slots_T, False)
        assert torch.equal(cached[others], before[others])


def test_room_for_more_than_there_is_changes_no_bit():
    """A recorded step has rows as long as they may become; what they are stands in the tensors."""
    at = Scene(decodes(70, 33))
    layout = at.layout(range(2))
    q, k, v = (torch.cat([each[part] for each in at.qkv]) for part in range(3))
    roomy = BatchLayout(
        [Row((), 4095, 1)] * 2, layout.slots_T, layout.positions_T, layout.block_table_RB, layout.block_size, layout.num_single
    )
    for variant in (PLAIN, AttentionVariant(window=40)):
        outputs = [TritonBackend([variant]).forward(0, q, k, v, at.copy(), each) for each in (layout, roomy)]
        assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("changes", "block_size", "fits"),
    [
        ({}, 8, True),
        ({"num_heads": 33, "num_kv_heads": 1}, 8, False),
        ({"head_size": 1024}, 8, False),
        ({}, 24, False),
    ],
    ids=str,
)
def test_what_the_kernels_cannot_do_is_not_supported(changes, block_size, fits):
    assert fits == (Triton.refusal(tiny_config(**changes), Placement(torch.float32, DEVICE, block_size)) is None)


@pytest.mark.parametrize("kib", [163, 99])
def test_a_prompt_is_the_equation_in_the_tiles_of_every_gpu(monkeypatch, kib):
    monkeypatch.setattr(under_test, "shared_memory", lambda: kib << 10)
    for shape in ((4, 2, 32, 8, torch.bfloat16), (6, 1, 256, 16, torch.bfloat16)):
        at = Scene([(0, 40), (70, 9)], shape)
        assert_close(at.attend(TritonBackend()), at.attend(ReferenceBackend()))
