"""The kernel check at each start: what will compute a model is compared with torch on this device before it serves.

A small model with random weights, whose layers are of each kind that the served one has, takes a few steps in three ways: as it
would be served, by torch in the same dtype, and by torch in float32, which says how much of a difference rounding explains.
On a GPU widths, heads and windows are the served model's own, so that the kernels are those that will serve, compiled.

Not yet run on a GPU: Triton's kernels are tried in its interpreter on the CPU.

Shapes: T tokens · E model width · R rows · V vocabulary.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attend.model.backends.backend import Backend
from attend.model.backends.native import Native
from attend.model.config import ModelConfig
from attend.model.engine.graphs import DecodeGraphs
from attend.model.engine.piecewise_graphs import PiecewiseGraphs
from attend.model.engine.runner import DrawTokens, device_errors, in_words
from attend.model.engine.small_models import random_net, reduce_config
from attend.model.errors import EngineFailed, OutOfMemory
from attend.model.net.formats.codes import Kind
from attend.model.net.kv_cache import KVCache
from attend.model.net.native.drawing import draw_tokens
from attend.model.net.paged_attention import AttentionBackend, BatchLayout, PagedAttention, Row, TorchBackend
from attend.model.net.quantised import QuantisedLinear
from attend.model.net.transformer import Decoder
from attend.model.params import SamplingParams
from attend.model.sampling import sample
from attend.model.sampling_plan import Draw, SamplingPlan

LEAST_POSITIONS = 64
"""Positions of the steps that are compared; no supported model has a shorter context."""
FAR, PAST_WINDOW = 600, 37
"""The least position of the token that looks back far on a GPU, and how far it lies behind the widest window."""
TIMES = 3.0
"""How much farther from float32 than torch's way a token's hidden state may lie. The native decoder's lie 1.5 times as far, at
most, in all families of the tests."""
FLOOR = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2, torch.int8: 5e-2}
"""What is always allowed, in parts of the hidden state, by the dtype of the computation, and of a KV cache of 8 bits."""
REPLAYED = 0.05
"""The same for a recorded step beside one that is not: rows of padding may choose another product, which rounds otherwise."""
OTHER_EXPERTS = 0.2
"""The share of tokens whose router may choose another expert where two are as good but for rounding."""
PLAIN = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=1.0)
LIMITED = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01)


class Form(Protocol):
    """`Decoder`, or what serves in its place."""

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, attention: PagedAttention, /) -> Tensor:
        """The hidden states of the tokens, [T, E]."""
        ...

    def logits(self, hidden_TE: Tensor, /) -> Tensor:
        """Scores of the next token [T, V]."""
        ...


class Finding(NamedTuple):
    """What the law has found of a part: its kernels agree with torch, differ, or fail."""

    part: str
    reason: str = ""
    """`kernel_differs` or `kernel_fails`; empty: it agrees."""
    cause: str = ""
    """What the check has seen, in words; empty: it agrees."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True if the part's kernels agree with torch."""
        return not self.reason


def look(part: str, law: Callable[[], str], device: str = "cpu") -> Finding:
    """What a law says of a part: what differs, or nothing; or the first line of what it raises.

    Raises OutOfMemory, and EngineFailed where the device computes nothing more: then torch cannot stand in.
    """
    began = time.perf_counter()
    try:
        with device_errors(), torch.inference_mode():
            found = law()
        reason = "kernel_differs" if found else ""
    except OutOfMemory:
        raise
    except Exception as error:  # of Triton, its compiler, or the driver
        reason, found = "kernel_fails", in_words(error)
        if not _is_alive(device):
            raise EngineFailed(f"the device failed in the start-up check of the {part}: {found}") from error
    return Finding(part, reason, found, time.perf_counter() - began)


def _is_alive(device: str) -> bool:
    """True if a device still computes. After an illegal access to its memory it does not, after a broken recording it does."""
    try:
        return bool(torch.ones(1, device=device).item() == 1)
    except RuntimeError:
        return False


def check_decoder(
    backend: Backend, dtype: torch.dtype, kv_dtype: torch.dtype, device: str, block_size: int, kind: Kind | None = None
) -> list[Finding]:
    """The laws of a backend and of the decoder beside it, for its model. `kv_dtype`: the dtype of the KV cache; `kind`: of
    quantised weights. The torch and the reference backend are the law themselves: nothing is found of them.
    """
    if not backend.is_checked or backend.config.max_positions < LEAST_POSITIONS:
        return []
    small = type(backend)(reduce_config(backend.config, narrow=device == "cpu"))
    part = "decoder" if kind is None else f"decoder with {kind.name} weights"
    found = [look(part, lambda: _decoder_law(small, dtype, kv_dtype, device, block_size, kind), device)]
    if isinstance(small, Native):  # whose steps draw tokens
        found.append(check_draws(lambda: draw_tokens, torch.float32, small.config.vocab_size, device))
    return found


def check_draws(draw: Callable[[], DrawTokens], dtype: torch.dtype, vocab_size: int, device: str) -> Finding:
    """The law of what draws tokens: the same ones as torch, greedily, from all tokens, and from limited ones."""

    def law() -> str:
        dice = torch.Generator().manual_seed(0)
        scores_RV = (4 * torch.randn(8, vocab_size, generator=dice)).to(device, dtype)
        drawing = draw()
        for params in (PLAIN, DRAWN, LIMITED):
            draws = [Draw(SamplingPlan(params, seed=row), position=row) for row in range(len(scores_RV))]
            ours, theirs = drawing(scores_RV.clone(), draws).tolist(), sample(scores_RV.clone(), draws).tolist()
            if ours != theirs:
                row = next(at for at, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
                return f"with temperature {params.temperature:g} it draws token {ours[row]}, and torch {theirs[row]}"
        return ""

    return look("sampler", law, device)


def check_recorded(
    form: Form, backend: AttentionBackend, cache: KVCache, graphs: DecodeGraphs | None, pieces: PiecewiseGraphs | None
) -> Finding:
    """The law of recorded steps: replayed, they give the hidden states of the same steps as they are computed without."""

    def law() -> str:
        device, states = str(cache.keys[0].device), [1] if cache.states else None
        for what, recorded, count in (
            ("a recorded step", graphs, 1),
            ("pieces of a recorded step", pieces, min(20, cache.block_size)),
        ):
            if recorded is None:
                continue
            rows, tokens_T = [Row([1], 0, count)], torch.arange(count, device=device)
            layout = BatchLayout.build(rows, cache.block_size, device, states=states)
            plain_TE = form(tokens_T, layout.positions_T, PagedAttention(backend, cache, layout)).float()
            ours = (
                recorded.run(rows, tokens_T, states=states)
                if isinstance(recorded, DecodeGraphs)
                else recorded.run(rows, tokens_T)
            )
            ours_TE = (ours if isinstance(ours, Tensor) else ours.hidden_TE).float()
            if found := differs(ours_TE, plain_TE, plain_TE, REPLAYED, 0.0):
                return f"{what}: {found.replace('float32', 'the same without recording')}"
        return ""

    return look("recorded steps", law, str(cache.keys[0].device))


def _in_float32(net: Decoder) -> Decoder:
    whole = copy.deepcopy(net).float()
    for module in whole.modules():
        if isinstance(module, QuantisedLinear):
            module.dtype = torch.float32
    return whole


def _decoder_law(
    small: Backend,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: str,
    block_size: int,
    kind: Kind | None,
) -> str:
    config = small.config
    far = 0 if isinstance(small, Native) else _far(config)  # which lays out keys and values in another way
    steps, context = _steps(far, block_size), max(far + 1, LEAST_POSITIONS)
    exactly = torch.float32 if kv_dtype == dtype else kv_dtype
    with _one_thread():  # of small matrices a second one only waits
        net = random_net(config, dtype, device, kind, context)
        whole, torchs = _in_float32(net), TorchBackend(config.attention_variants)
        exact_TE = _hidden(whole, torchs, config, steps, exactly, block_size, device)
        torch_TE = _hidden(net, torchs, config, steps, kv_dtype, block_size, device)
    form = small.decoder(copy.deepcopy(net))
    ours_TE = _hidden(form, small.attention, config, steps, kv_dtype, block_size, device)
    share = 0.0 if config.num_experts is None else OTHER_EXPERTS
    hidden = differs(ours_TE, torch_TE, exact_TE, FLOOR[kv_dtype if kv_dtype == torch.int8 else dtype], share)
    some_TE = exact_TE[:4].to(dtype)
    scores = differs(form.logits(some_TE), net.logits(some_TE), whole.logits(some_TE.float()), FLOOR[dtype], 0.0)
    return (hidden and f"hidden states differ: {hidden}") or (scores and f"scores differ: {scores}")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Within it, torch computes with one thread of the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def differs(ours_TE: Tensor, torch_TE: Tensor, exact_TE: Tensor, floor: float, share: float) -> str:
    """How far tokens lie from float32, where that is more than rounding explains, or nothing: the median, and the farthest
    beside `share` of them.
    """
    exact_TE = exact_TE.double()
    ours_T, torch_T = (
        ((each.double() - exact_TE).norm(dim=-1) / exact_TE.norm(dim=-1)).nan_to_num(torch.inf).sort().values
        for each in (ours_TE, torch_TE)
    )
    for part, name in ((0.5, "median"), (1 - share, "farthest")):
        place = round(part * (len(ours_T) - 1))
        ours, allowed = float(ours_T[place]), max(TIMES * float(torch_T[place]), floor)
        if ours > allowed:
            return f"the {name} token differs from float32 by {ours:.1%}, of which rounding explains {allowed:.1%}"
    return ""


def _far(config: ModelConfig) -> int:
    """A position that lies behind each window, and behind several splits of the keys."""
    windows = [layer.attention.window or 0 for layer in config.layers]
    return min(max(FAR, max(windows) + PAST_WINDOW), config.max_positions - 1)


def _steps(far: int, block_size: int) -> list[list[Row]]:
    """A prompt; its next token beside another prompt; tokens of all of them, and of one far from its beginning; a later part of
    a prompt. Blocks are not in order.
    """
    near = -(-64 // block_size)
    first, second, third = ([3 * at + turn for at in range(near, 0, -1)] for turn in (0, 1, 2))
    begin = 3 * near + 3
    steps = [
        [Row(first, 0, 40)],
        [Row(first, 40, 1), Row(second, 0, 37)],
        [Row(first, 41, 1), Row(second, 37, 1), Row(third, 0, 1)],
        [Row(third, 1, 1), Row(second, 38, 5)],
    ]
    if far:
        steps[2].append(Row(list(range(begin, begin + far // block_size + 1)), far, 1))
    return steps


def _hidden(
    form: Form,
    backend: AttentionBackend,
    config: ModelConfig,
    steps: Sequence[Sequence[Row]],
    kv_dtype: torch.dtype,
    block_size: int,
    device: str,
) -> Tensor:
    """Hidden states [T, E] of all steps, float32. What nobody has computed of the past is random."""
    most = max(block for step in steps for row in step for block in row.blocks)
    cache = KVCache.allocate(config, most, block_size, kv_dtype, device)
    if any(row.start > 64 for step in steps for row in step):
        dice = torch.Generator(device).manual_seed(2)
        for part in {part.data_ptr(): part for part in (*cache.keys, *cache.values)}.values():
            part.copy_(torch.randn(part.shape, generator=dice, device=device).to(torch.bfloat16))
    slots: dict[int, int] = {}
    found, tokens = [], 0
    for rows in steps:
        states = [slots.setdefault(row.blocks[0], 1 + len(slots)) for row in rows] if cache.states else None
        layout = BatchLayout.build(rows, block_size, device, states=states)
        tokens_T = (torch.arange(tokens, tokens + len(layout.positions_T), device=device) * 7 + 3) % config.vocab_size
        found.append(form(tokens_T, layout.positions_T, PagedAttention(backend, cache, layout)).float())
        tokens += len(tokens_T)
    return torch.cat(found)
