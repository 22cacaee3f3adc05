"""Paged attention: both backends equal the dense oracle, and a request touches its own pages only."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.config import ModelConfig
from model.net.attention import attend, causal_mask
from model.net.backends import BACKENDS, AttentionBackend, BatchLayout, KVCache, Paged, Row
from model.net.transformer import Decoder
from model.train.loss import dense_causal
from tests.model.checkpoints import tiny_config, tiny_decoder

Step = list[tuple[int, int, int]]
"""(request, start, count) of each row, rows of one token first."""

each_backend = pytest.mark.parametrize("backend", [make() for make in BACKENDS.values()], ids=list(BACKENDS))

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


@dataclass
class Scene:
    """Requests with the q, k and v of all their tokens, and pages scattered over one cache."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    pages: list[list[int]]
    config: ModelConfig
    block_size: int
    dtype: torch.dtype
    num_blocks: int

    def cache(self) -> KVCache:
        return KVCache.allocate(self.config, self.num_blocks, self.block_size, self.dtype, "cpu")

    def layout(self, step: Step) -> BatchLayout:
        return BatchLayout.build([Row(self.pages[r], start, count) for r, start, count in step], self.block_size, "cpu")

    def dense(self) -> list[Tensor]:
        """The oracle, request by request, in float32."""
        positions = [torch.arange(len(q)) for q in self.q]
        parts = zip(self.q, self.k, self.v, positions, strict=True)
        return [attend(q.float(), k.float(), v.float(), causal_mask(at, len(at))) for q, k, v, at in parts]


def scene(lengths, heads=4, group=2, size=16, block_size=8, dtype=torch.float32, seed=0, layers=1) -> Scene:
    dice = torch.Generator().manual_seed(seed)
    needs = [-(-length // block_size) for length in lengths]
    num_blocks = sum(needs) + 3
    ids = (torch.randperm(num_blocks, generator=dice) + 1).tolist()
    pages = [[ids.pop() for _ in range(need)] for need in needs]
    config = tiny_config(num_heads=heads, num_kv_heads=heads // group, head_size=size, num_layers=layers)
    widths = (heads, heads // group, heads // group)
    q, k, v = ([torch.randn(n, width, size, generator=dice).to(dtype) for n in lengths] for width in widths)
    return Scene(q, k, v, pages, config, block_size, dtype, num_blocks)


def step_through(backend: AttentionBackend, at: Scene, steps: list[Step], cache: KVCache | None = None) -> list[Tensor]:
    """Run the steps over one cache; returns the outputs of each request, its tokens in order."""
    cache = cache or at.cache()
    outputs: list[list[Tensor]] = [[] for _ in at.q]
    for step in steps:
        q, k, v = (torch.cat([of[r][start : start + count] for r, start, count in step]) for of in (at.q, at.k, at.v))
        out = backend.forward(0, q, k, v, cache, at.layout(step))
        assert out.dtype == q.dtype
        for (request, _, _), part in zip(step, out.split([count for _, _, count in step]), strict=True):
            outputs[request].append(part)
    return [torch.cat(parts) for parts in outputs]


def whole(lengths: list[int]) -> list[Step]:
    return [sorted(((r, 0, n) for r, n in enumerate(lengths)), key=lambda row: row[2] > 1)]


def schedule(cuts: list[list[int]]) -> list[Step]:
    """Step i takes the i-th chunk of every request that still has one."""
    steps = []
    for i in range(max(map(len, cuts))):
        rows = [(r, sum(chunks[:i]), chunks[i]) for r, chunks in enumerate(cuts) if i < len(chunks)]
        steps.append(sorted(rows, key=lambda row: row[2] > 1))
    return steps


def assert_equal_to_dense(at: Scene, steps: list[Step]) -> None:
    for name, backend in BACKENDS.items():
        for ours, oracle in zip(step_through(backend(), at, steps), at.dense(), strict=True):
            worst = (ours.float() - oracle).abs().max().item()
            assert worst <= TOLERANCE[at.dtype], f"{name}: off by {worst}"


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    cuts=st.lists(st.lists(st.just(1) | st.integers(2, 21), min_size=1, max_size=4), min_size=1, max_size=4),
    group=st.sampled_from([1, 2, 3, 4, 8]),
    kv_heads=st.sampled_from([1, 2]),
    size=st.sampled_from([16, 32, 80, 128]),
    block_size=st.sampled_from([8, 16, 32]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_paged_attention_is_dense_attention(cuts, group, kv_heads, size, block_size, dtype, seed):
    """Mixed batches of any chunks, on scattered pages, give what the equation gives for each whole request."""
    at = scene([sum(chunks) for chunks in cuts], group * kv_heads, group, size, block_size, dtype, seed)
    assert_equal_to_dense(at, schedule(cuts))


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("past", [-1, 0, 1])
def test_the_borders_of_blocks_are_seamless(block_size, past):
    """A request that ends just before, on, or just after a block's border, prefilled at once or in two parts."""
    length = 2 * block_size + past
    at = scene([length, block_size + past], block_size=block_size)
    assert_equal_to_dense(at, whole([length, block_size + past]))
    for cut in (block_size - 1, block_size, block_size + 1):
        assert_equal_to_dense(at, schedule([[cut, length - cut], [block_size + past]]))


@each_backend
@pytest.mark.parametrize("cuts", [[1] * 19, [7, 1, 11], [16, 3], [1, 18]], ids=str)
def test_how_a_prompt_is_chunked_does_not_matter(backend, cuts):
    at = scene([19])
    at_once = step_through(backend, at, whole([19]))[0]
    torch.testing.assert_close(step_through(backend, at, schedule([cuts]))[0], at_once, atol=1e-5, rtol=1e-5)


@each_backend
def test_a_request_does_not_feel_its_neighbours(backend):
    """In a batch or alone, a request's outputs are the same: rows of one token and longer chunks alike."""
    cuts = [[9, 1, 1, 1], [30, 1, 1], [3, 4, 5], [1, 1, 17]]
    at = scene([sum(chunks) for chunks in cuts])
    together = step_through(backend, at, schedule(cuts))
    for request, chunks in enumerate(cuts):
        alone = scene([sum(chunks)])
        alone.q, alone.k, alone.v = ([of[request]] for of in (at.q, at.k, at.v))
        outputs = step_through(backend, alone, schedule([chunks]))[0]
        torch.testing.assert_close(together[request], outputs, atol=1e-5, rtol=1e-5)


POISON = [1e4, -1e4, pytest.param(float("nan"), id="nan")]


@pytest.mark.parametrize("poison", POISON)
@each_backend
def test_only_a_requests_own_tokens_are_read(backend, poison):
    """Whatever lies in block 0, in free blocks and beyond a request's last token has no influence at all."""
    cuts = [[9, 1, 1], [30, 1, 1], [5, 6], [1]]
    at = scene([sum(chunks) for chunks in cuts])
    clean = step_through(backend, at, schedule(cuts))
    dirty = at.cache()
    for part in (*dirty.keys, *dirty.values):
        part.fill_(poison)  # every slot that counts is written before it is read
    for expected, got in zip(clean, step_through(backend, at, schedule(cuts), dirty), strict=True):
        assert torch.equal(expected, got)


@each_backend
def test_a_step_writes_its_own_slots_only(backend):
    """Token p of a request lands in blocks[p // size] * size + p % size of its layer, and nothing else changes."""
    at = scene([11, 20, 6], layers=2)
    cache = at.cache()
    for part in (*cache.keys, *cache.values):
        part.copy_(torch.randn(part.shape))
    step = [(2, 5, 1), (0, 7, 4), (1, 0, 20)]
    q, k, v = (torch.cat([of[r][start : start + count] for r, start, count in step]) for of in (at.q, at.k, at.v))
    slots = [at.pages[r][p // 8] * 8 + p % 8 for r, start, count in step for p in range(start, start + count)]
    expected = [[part.clone() for part in parts] for parts in (cache.keys, cache.values)]
    expected[0][1][slots], expected[1][1][slots] = k, v
    backend.forward(1, q, k, v, cache, at.layout(step))
    for wanted, got in zip(expected, (cache.keys, cache.values), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


def test_the_cache_has_the_promised_blocks_and_the_reserved_one():
    config = tiny_config(num_layers=3)
    cache = KVCache.allocate(config, num_blocks=5, block_size=16, dtype=torch.bfloat16, device="cpu")
    tensors = (*cache.keys, *cache.values)
    assert [(6 * 16, config.num_kv_heads, config.head_size)] * 6 == [tuple(part.shape) for part in tensors]
    assert 6 * 16 * config.kv_bytes_per_token(2) == sum(part.nbytes for part in tensors)


def test_rows_of_one_token_must_come_first():
    with pytest.raises(AssertionError, match="rows of one token come first"):
        BatchLayout.build([Row([1], 0, 3), Row([2], 4, 1)], 8, "cpu")


@pytest.fixture(scope="module")
def net() -> Decoder:
    return tiny_decoder(tiny_config(qk_norm=True))


@torch.no_grad()
def run_paged(net: Decoder, backend: AttentionBackend, texts: list[Tensor], cuts: list[list[int]]) -> list[Tensor]:
    """Logits of each text, its chunks taken in mixed batches over one cache."""
    blocks = [[3 + 5 * r, 1 + 5 * r, 4 + 5 * r, 2 + 5 * r, 5 + 5 * r] for r in range(len(texts))]
    cache = KVCache.allocate(net.config, 5 * len(texts), 8, torch.float32, "cpu")
    outputs: list[list[Tensor]] = [[] for _ in texts]
    for step in schedule(cuts):
        layout = BatchLayout.build([Row(blocks[r], start, count) for r, start, count in step], 8, "cpu")
        tokens = torch.cat([texts[r][start : start + count] for r, start, count in step])
        logits = net.logits(net(tokens, layout.positions_T, Paged(backend, cache, layout)))
        for (request, _, _), part in zip(step, logits.split([count for _, _, count in step]), strict=True):
            outputs[request].append(part)
    return [torch.cat(parts) for parts in outputs]


@each_backend
def test_a_decoder_over_pages_is_the_decoder_over_whole_texts(net, backend):
    """All layers through: chunked, batched, paged logits equal those of one dense pass over each text alone."""
    cuts = [[9, 1, 1, 1], [1, 1, 30], [8, 8, 8, 1], [1]]
    texts = [torch.randint(90, (sum(c),), generator=torch.Generator().manual_seed(i)) for i, c in enumerate(cuts)]
    for text, ours in zip(texts, run_paged(net, backend, texts, cuts), strict=True):
        dense = net.logits(net(text, torch.arange(len(text)), dense_causal(len(text))))
        torch.testing.assert_close(ours, dense, atol=1e-4, rtol=1e-4)
