"""The ways of computing attention, the models they are tried on, and how far a way may be from the equation.

A law is written once and holds for each way. A new way is one line of `WAYS`. What a way cannot compute is decided where it is
decided for a server, in `choose_backend`, and `promised` says what may not be refused.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import pytest
import torch
from torch import Tensor

from attend.model.backends.backend import Backend, Placement
from attend.model.backends.choice import choose_backend
from attend.model.config import ModelConfig
from attend.model.errors import SettingError
from attend.model.net.attention import attention_weights, causal_mask
from attend.model.net.kv_cache import KVCache, decode, encode
from attend.model.net.native.library import load_library as load_native
from attend.model.net.paged_attention import AttentionBackend, BatchLayout, Row
from attend.model.sublayers import AttentionVariant
from tests.model.checkpoints import tiny_config

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Way:
    """One backend in one dtype on one device."""

    backend: str
    dtype: torch.dtype
    device: str = "cpu"
    exact: bool = False
    """True if a token has the same bits however it comes: alone, in a batch, in any chunk."""
    held: torch.dtype | None = None
    """What the cache holds; None: the dtype."""

    def __str__(self) -> str:
        held = "" if self.held is None else f"-{str(self.held).removeprefix('torch.')}"
        return f"{self.backend}-{str(self.dtype).removeprefix('torch.')}{held}-{self.device}"

    @property
    def fine(self) -> bool:
        """True if no rounding is coarser than that of float32, so that a draw is the same however a token comes."""
        return self.dtype == torch.float32 and self.held is None

    def cache(self, config: ModelConfig, num_blocks: int | Sequence[int], block_size: int, left: float = torch.nan) -> KVCache:
        """A cache in which every number reads as `left`, or as one that is as far from all others."""
        cache = KVCache.allocate(config, num_blocks, block_size, self.held or self.dtype, self.device)
        for tensor in (*cache.keys, *cache.values):
            tensor.fill_(leaves(tensor, left))
        return cache

    def make(self, config: ModelConfig, block_size: int) -> AttentionBackend | None:
        """The attention that a server would run; None where it is refused."""
        backend = self.choose(config, block_size)
        return None if backend is None else backend.attention

    def choose(self, config: ModelConfig, block_size: int) -> Backend | None:
        """What a server would run; None where it is refused, which must be in a sentence that names it."""
        try:
            return choose_backend(self.backend, config, Placement(self.dtype, self.device, block_size))
        except SettingError as error:
            refusal = str(error)
        assert refusal.startswith(f"backend is {self.backend}, but ")
        return None


def leaves(tensor: Tensor, left: float) -> float:
    """What fills a tensor of a cache so that its numbers read as `left`: bytes of -1 make scales of NaN, of 127 large ones."""
    if tensor.dtype != torch.int8:
        return left
    return -1 if math.isnan(left) else min(left, 127)


WAYS = [Way(backend, dtype) for backend in ("reference", "torch") for dtype in DTYPES]
WAYS += [Way("native", torch.bfloat16, exact=True)]
WAYS += [Way("torch", torch.float32, held=torch.int8), Way("native", torch.bfloat16, exact=True, held=torch.int8)]
if os.environ.get("TRITON_INTERPRET") == "1":  # slow; tests/model/net/triton has a faster suite of its own
    WAYS += [Way("triton", dtype, exact=True) for dtype in DTYPES]
if torch.cuda.is_available():
    WAYS += [Way("torch", dtype, "cuda") for dtype in DTYPES] + [Way("triton", dtype, "cuda", exact=True) for dtype in DTYPES]

NATIVE = load_native() is not None
_needs_native = pytest.mark.skipif(not NATIVE, reason="no native library was built here")
_params = [pytest.param(way, id=str(way), marks=_needs_native if way.backend == "native" else ()) for way in WAYS]
each_way = pytest.mark.parametrize("way", _params)
each_guessing_way = pytest.mark.parametrize(
    "way", [param for param in _params if param.values[0].fine or param.values[0].exact]
)
"""Those that do not refuse draft_tokens."""
each_exact_way = pytest.mark.parametrize("way", [param for param in _params if param.values[0].exact])


def each_pair(comings: Iterable[str], models: Mapping[str, ModelConfig]) -> pytest.MarkDecorator:
    """Each way with each coming and one model, which is another one for the next way and for the next coming: so each pair of
    the three is met.
    """
    comings, names = list(comings), list(models)
    rows = [
        (param, coming, names[(at + turn) % len(names)])
        for at, param in enumerate(_params)
        for turn, coming in enumerate(comings)
    ]
    assert {(coming, name) for _, coming, name in rows} == {*product(comings, names)}
    assert {(param.id, name) for param, _, name in rows} == {*product([param.id for param in _params], names)}
    cases = [
        pytest.param(*param.values, models[name], coming, id=f"{param.id}-{name}-{coming}", marks=param.marks)
        for param, coming, name in rows
    ]
    return pytest.mark.parametrize(("way", "config", "coming"), cases)


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled or tiled for."""

    group: int
    num_kv_heads: int
    head_size: int
    block_size: int


SHAPES = [
    Shape(1, 2, 32, 32),
    Shape(2, 1, 64, 16),
    Shape(3, 2, 80, 32),
    Shape(4, 1, 96, 32),
    Shape(8, 1, 128, 32),
    Shape(2, 2, 256, 32),
    Shape(1, 1, 80, 1),
    Shape(3, 1, 64, 64),
    Shape(4, 2, 32, 4),
    Shape(8, 2, 64, 32),
    Shape(1, 2, 96, 64),
    Shape(2, 1, 128, 8),
    Shape(2, 2, 40, 32),
]
VARIANTS = {
    "plain": AttentionVariant(),
    "itself alone": AttentionVariant(window=1),
    "window": AttentionVariant(window=33),
    "softcap": AttentionVariant(softcap=2.5),
    "scale": AttentionVariant(scale=0.21),
    "everything": AttentionVariant(window=20, softcap=6.0, scale=0.3),
}
each_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
LAYER = 1
"""The layer that is computed: the one before it has no window."""


def config_of(shape: Shape, variant: AttentionVariant) -> ModelConfig:
    """Of two layers, the second with the variant's window."""
    return tiny_config(
        num_heads=shape.group * shape.num_kv_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        sliding_window=variant.window,
        window_layers=(LAYER,),
        softcap=variant.softcap,
        attention_scale=variant.scale,
    )


def promised(way: Way, shape: Shape) -> bool:
    """What a way must not refuse, whatever the variant."""
    if way.backend == "native":
        return NATIVE and way.dtype == torch.bfloat16 and shape.block_size % 32 == 0
    return way.backend != "triton" or shape.block_size & (shape.block_size - 1) == 0


@dataclass(frozen=True, eq=False)
class Text:
    """Queries, keys and values of one request, [T, H or K, D], all its tokens. Tests share it: nobody writes to it."""

    q: Tensor
    k: Tensor
    v: Tensor

    def __len__(self) -> int:
        return len(self.q)

    def part(self, start: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.q[start : start + count], self.k[start : start + count], self.v[start : start + count]


@lru_cache(maxsize=16)  # the ways of one variant are tried one after the other, on the same texts
def texts_of(
    shape: Shape, variant: AttentionVariant, lengths: tuple[int, ...], dtype: torch.dtype, shared: int = 0
) -> list[Text]:
    """Random texts whose first `shared` tokens are the same, as far as they have them.

    Half of the queries look for one key: the first or last that they see, the one before or after that, a block's border, or
    any. So a key too many or too few shows in bfloat16 too.
    """
    dice = torch.Generator().manual_seed(sum(lengths) + shape.head_size)
    scale = variant.scale or shape.head_size**-0.5
    heads = torch.arange(shape.group * shape.num_kv_heads)
    stem: list[Tensor] = []
    texts = []
    for length in lengths:
        k, v = (torch.randn(length, shape.num_kv_heads, shape.head_size, generator=dice) for _ in range(2))
        q = torch.randn(length, len(heads), shape.head_size, generator=dice)
        at, block = torch.arange(length), shape.block_size
        border = at // block * block
        first = at - (variant.window or length)
        targets = torch.stack(
            [at, at + 1, first, first + 1, border, border - 1, torch.randint(length, (length,), generator=dice)]
        )
        chosen = torch.randint(2 * len(targets), (length, len(heads)), generator=dice)
        key = targets.T.gather(1, chosen % len(targets)).clamp(0, length - 1)
        wanted = k[key, heads // shape.group]
        needles = wanted * (8 / scale / wanted.square().sum(-1, keepdim=True))
        q = torch.where((chosen < len(targets))[..., None], needles, q)
        stem = stem or [q, k, v]
        for mine, theirs in zip((q, k, v), stem, strict=True):
            mine[:shared] = theirs[: min(shared, length)]
        texts.append(Text(*(part.to(dtype) for part in (q, k, v))))
    return texts


@lru_cache(maxsize=64)
def held_by(way: Way, text: Text) -> Text:
    """The text with the keys and values that the cache gives back: the equation is computed for these."""
    if way.held is None:
        return text
    rounded = way.dtype if way.backend == "torch" else torch.float32
    return Text(text.q, *(decode(encode(part)).to(rounded) for part in (text.k, text.v)))


@lru_cache(maxsize=64)
def oracle(text: Text, variant: AttentionVariant, last: int | None = None) -> tuple[Tensor, Tensor]:
    """The equation in float64 for the text's last tokens, and how far from it a way may be, both [T, H, D].

    An output is a mean of values, so its error is measured in the mean of their sizes. Its weights are rounded to the dtype,
    and so is it: two roundings. Scores are summed over D and outputs over S in float32, with errors that grow with the root
    of the number of terms; what a score is off is its weight's relative error. A few more roundings make the exponential.
    """
    length, size = len(text), text.q.shape[-1]
    positions = torch.arange(length)[-(last or length) :]
    q, k, v = text.q.double()[positions], text.k.double(), text.v.double()
    weights = attention_weights(q, k, causal_mask(positions, length, variant.window), variant)
    group = q.shape[1] // k.shape[1]
    out, spread = (torch.einsum("hts,shd->thd", weights, part.repeat_interleave(group, dim=1)) for part in (v, v.abs()))
    largest_TH = q.norm(dim=-1) * k.norm(dim=-1).amax(0).repeat_interleave(group) * (variant.scale or size**-0.5)
    single = torch.finfo(torch.float32).eps / 2
    relative_TH = torch.finfo(text.q.dtype).eps + single * (size**0.5 * largest_TH + length**0.5 + 8)
    return out, relative_TH[..., None] * spread


@dataclass(frozen=True)
class Turn:
    """Tokens `start .. start + count - 1` of a text, computed in these blocks."""

    text: int
    start: int
    count: int
    blocks: list[int]


Steps = list[list[Turn]]


def cache_of(way: Way, shape: Shape, steps: Steps, left: float) -> KVCache:
    """With room for the blocks of the steps; every slot holds `left`."""
    num_blocks = max(block for step in steps for turn in step for block in turn.blocks)
    config = config_of(shape, AttentionVariant())
    return way.cache(config, num_blocks, shape.block_size, left)


def compute_step(way: Way, backend: AttentionBackend, cache: KVCache, texts: list[Text], step: list[Turn]) -> list[Tensor]:
    """The outputs [T, H, D] of each turn."""
    order = sorted(range(len(step)), key=lambda at: step[at].count != 1)
    turns = [step[at] for at in order]
    layout = BatchLayout.build([Row(turn.blocks, turn.start, turn.count) for turn in turns], cache.block_size, way.device)
    parts = zip(*(texts[turn.text].part(turn.start, turn.count) for turn in turns), strict=True)
    q, k, v = (torch.cat(part).to(way.device) for part in parts)
    out = backend.forward(LAYER, q, k, v, cache, layout).cpu()
    assert out.dtype == way.dtype
    found = dict(zip(order, out.split([turn.count for turn in turns]), strict=True))
    return [found[at] for at in range(len(step))]


def compute(
    way: Way, shape: Shape, variant: AttentionVariant, texts: list[Text], steps: Steps, left: float = torch.nan
) -> list[Tensor]:
    """The outputs [T, H, D] of each text, those computed last, zero where none were; `left` lies in the cache before."""
    backend = way.make(config_of(shape, variant), shape.block_size)
    assert backend is not None
    cache = cache_of(way, shape, steps, left)
    outputs = [torch.zeros_like(text.q) for text in texts]
    for step in steps:
        for turn, part in zip(step, compute_step(way, backend, cache, texts, step), strict=True):
            outputs[turn.text][turn.start : turn.start + turn.count] = part
    return outputs
