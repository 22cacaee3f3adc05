"""The checks at each start: kernels are compared with torch on this device, and the deterministic mode is tried.

A small model with random weights, of a layer of each kind that the served one has, takes a few steps in three ways: as it would
be served, by torch in the same dtype, and by torch in float32, which says how much of a difference rounding explains. On a GPU
widths, heads and windows are the served model's own, so that the kernels are those that will serve, compiled. Not yet run on a
GPU: Triton's kernels are tried in its interpreter on the CPU.

Shapes: T tokens · E model width · R rows · V vocabulary.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attend.model.backends.backend import Backend, Form
from attend.model.backends.native import Native
from attend.model.config import ModelConfig
from attend.model.engine.graphs import DecodeGraphs
from attend.model.engine.piecewise_graphs import PiecewiseGraphs
from attend.model.engine.ranks import ShardRunner
from attend.model.engine.runner import DrawTokens, ModelRunner, device_errors, in_words
from attend.model.errors import EngineFailed, OutOfMemory, SettingError
from attend.model.net.checkpoint import draw_weights
from attend.model.net.formats.codes import INT4, Kind
from attend.model.net.kv_cache import KVCache
from attend.model.net.native.drawing import draw_tokens
from attend.model.net.paged_attention import AttentionBackend, BatchLayout, PagedAttention, Row, TorchBackend
from attend.model.net.quantised import QuantisedLinear, quantise_matrices
from attend.model.net.transformer import Decoder
from attend.model.params import SamplingParams
from attend.model.sampling import sample
from attend.model.sampling_plan import Draw, SamplingPlan
from attend.model.sublayers import LayerSpec
from attend.model.transfer import integers

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
DRAWN = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01),
)
NARROW, VOCAB, EXPERTS, WINDOW = 128, 256, 16, 24
"""The most that a small model has on a CPU of a width, and anywhere of tokens and of experts; the widest window on a CPU."""
CHUNKS = (1, 7, 33)
OTHER_REQUESTS = 5
"""Parts of a prompt, and other requests of its batch, that must not change a bit in the deterministic mode."""


class Finding(NamedTuple):
    """What a check has found of a part: its kernels agree with torch, differ, or fail."""

    part: str
    reason: str = ""
    """`kernel_differs` or `kernel_fails`; empty: it agrees."""
    cause: str = ""
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
    """Compare a backend, and the decoder beside it, with torch, which itself is not checked. `kind`: of quantised weights."""
    if not backend.is_checked or backend.config.max_positions < LEAST_POSITIONS:
        return []
    small = type(backend)(reduce_config(backend.config, narrow=device == "cpu"))
    part = "decoder" if kind is None else f"decoder with {kind.name} weights"
    found = [look(part, lambda: _decoder_law(small, dtype, kv_dtype, device, block_size, kind), device)]
    if isinstance(small, Native):  # whose steps draw tokens
        found.append(check_draws(lambda: draw_tokens, torch.float32, small.config.vocab_size, device))
    return found


def check_draws(draw: Callable[[], DrawTokens], dtype: torch.dtype, vocab_size: int, device: str) -> Finding:
    """Compare what draws tokens with torch: greedily, from all tokens, and from limited ones."""

    def law() -> str:
        dice = torch.Generator().manual_seed(0)
        scores_RV = (4 * torch.randn(8, vocab_size, generator=dice)).to(device, dtype)
        drawing = draw()
        for params in DRAWN:
            draws = [Draw(SamplingPlan(params, seed=row), position=row) for row in range(len(scores_RV))]
            ours, theirs = drawing(scores_RV.clone(), draws).tolist(), sample(scores_RV.clone(), draws).tolist()
            for our, their in zip(ours, theirs, strict=True):
                if our != their:
                    return f"with temperature {params.temperature:g} it draws token {our}, and torch {their}"
        return ""

    return look("sampler", law, device)


def check_recorded(
    form: Form, backend: AttentionBackend, cache: KVCache, graphs: DecodeGraphs | None, pieces: PiecewiseGraphs | None
) -> Finding:
    """Compare recorded steps, replayed, with the same steps as they are computed without."""
    device, states = str(cache.keys[0].device), [1] if cache.states else None

    def law() -> str:
        for what, recorded, count in (
            ("a recorded step", graphs, 1),
            ("pieces of a recorded step", pieces, min(20, cache.block_size)),
        ):
            if recorded is None:
                continue
            rows, tokens_T = [Row([1], 0, count)], torch.arange(count, device=device)
            layout = BatchLayout.build(rows, cache.block_size, device, states=states)
            plain_TE = form(tokens_T, layout.positions_T, PagedAttention(backend, cache, layout)).float()
            if isinstance(recorded, DecodeGraphs):
                ours_TE = recorded.run(rows, tokens_T, states=states).hidden_TE.float()
            else:
                ours_TE = recorded.run(rows, tokens_T).float()
            if found := differs(ours_TE, plain_TE, plain_TE, REPLAYED, 0.0):
                return f"{what}: {found.replace('float32', 'the same without recording')}"
        return ""

    return look("recorded steps", law, device)


def _decoder_law(
    small: Backend, dtype: torch.dtype, kv_dtype: torch.dtype, device: str, block_size: int, kind: Kind | None
) -> str:
    config = small.config
    windows = [layer.attention.window or 0 for layer in config.layers]
    # one token looks back behind each window and several splits of the keys; the native backend lays those out in another way
    far = 0 if isinstance(small, Native) else min(max(FAR, max(windows) + PAST_WINDOW), config.max_positions - 1)
    steps, threads = _steps(far, block_size), torch.get_num_threads()
    torch.set_num_threads(1)  # of small matrices a second one only waits
    try:
        net = random_net(config, dtype, device, kind, max(far + 1, LEAST_POSITIONS))
        whole, torchs = copy.deepcopy(net).float(), TorchBackend(config.attention_variants)
        for module in whole.modules():
            if isinstance(module, QuantisedLinear):
                module.dtype = torch.float32
        exact = torch.float32 if kv_dtype == dtype else kv_dtype
        exact_TE = _hidden(whole, torchs, config, steps, exact, block_size, device)
        torch_TE = _hidden(net, torchs, config, steps, kv_dtype, block_size, device)
    finally:
        torch.set_num_threads(threads)
    form = small.decoder(copy.deepcopy(net))
    ours_TE = _hidden(form, small.attention, config, steps, kv_dtype, block_size, device)
    share = 0.0 if config.num_experts is None else OTHER_EXPERTS
    if found := differs(ours_TE, torch_TE, exact_TE, FLOOR[kv_dtype if kv_dtype == torch.int8 else dtype], share):
        return f"hidden states differ: {found}"
    some_TE = exact_TE[:4].to(dtype)
    found = differs(form.logits(some_TE), net.logits(some_TE), whole.logits(some_TE.float()), FLOOR[dtype], 0.0)
    return found and f"scores differ: {found}"


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


# Small models with random weights and a served model's kinds of layers.


def reduce_config(config: ModelConfig, *, narrow: bool) -> ModelConfig:
    """A model of one layer of each kind, with few tokens and experts; `narrow`: with narrow matrices and windows too."""
    most = NARROW if narrow else 1 << 30
    widths = ("hidden_size", "mlp_size", "expert_size", "shared_expert_size", "kv_shared_mlp_size")
    sizes = {"vocab_size": VOCAB, "per_layer_vocab_size": VOCAB, "sliding_window": WINDOW if narrow else most}
    return with_layers(config, [layers[0] for layers in layers_by_kind(config)], dict.fromkeys(widths, most) | sizes)


def with_layers(config: ModelConfig, layer_indices: Sequence[int], sizes: Mapping[str, int]) -> ModelConfig:
    """A model of some layers, with as few experts as routing allows. `sizes` bounds fields."""
    layer_indices = sorted(layer_indices)
    changes: dict[str, Any] = {"num_layers": len(layer_indices), "bos_token_id": None, "eos_token_ids": ()}
    for name in ("window_layers", "rope_layers", "expert_layers", "delta_layers", "conv_layers"):
        layers = getattr(config, name)
        changes[name] = layers and tuple(new for new, old in enumerate(layer_indices) if old in layers)
    changes |= {name: min(size, limit) for name, limit in sizes.items() if (size := getattr(config, name)) is not None}
    changes["rope_thetas"] = config.rope_thetas and tuple(config.rope_thetas[old] for old in layer_indices)
    changes["kv_shared_layers"] = sum(config.layer(old).kv_layer is not None for old in layer_indices)
    if config.num_experts is not None:
        groups = config.expert_groups
        each = max(-(-config.experts_per_token // config.groups_per_token), -(-EXPERTS // groups), config.group_top)
        changes["num_experts"] = min(config.num_experts, each * groups)
    return replace(config, **changes)


def layers_by_kind(config: ModelConfig) -> list[list[int]]:
    """The layers of each kind. Those that read others' keys and values are of a kind by whether they do."""
    found: dict[LayerSpec, list[int]] = {}
    for number, layer in enumerate(config.layers):
        found.setdefault(replace(layer, kv_layer=None if layer.kv_layer is None else 0), []).append(number)
    return list(found.values())


def on_meta(config: ModelConfig, kind: Kind | None, context: int) -> Decoder:
    """A decoder without numbers, in the form that is served. A kind of 4 bits with a table of its own is int4 here."""
    with torch.device("meta"):
        net = Decoder(config, context)
    if kind is not None:
        quantise_matrices(net, INT4 if kind.values else kind)
    return net


def random_net(config: ModelConfig, dtype: torch.dtype, device: str, kind: Kind | None, context: int) -> Decoder:
    """A decoder with random weights, gains and biases too, the same each time."""
    net = on_meta(config, kind, context)
    draw_weights(net, dtype, device)
    if kind is not None and kind.values:
        for module in net.modules():
            if isinstance(module, QuantisedLinear) and module.kind == INT4:  # its codes stand for about as large values
                module.kind = kind
                module.units.mul_(max(INT4.values) / max(kind.values))
    dice = torch.Generator(device).manual_seed(1)
    for name, parameter in net.named_parameters():
        if parameter.dim() < 2 or not name.endswith("weight"):
            scale = 0.1 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5
            parameter.data += scale * torch.randn(parameter.shape, generator=dice, device=device).to(parameter.dtype)
        if name.endswith("layer_scale"):
            parameter.data.fill_(0.5)
    return net.to(device).eval().requires_grad_(False)


# The deterministic mode: a request's tokens have the same bits whatever its neighbours, chunks, preemptions or replica.


@torch.inference_mode()
def check_batch_invariance(runner: ModelRunner, num_blocks: int, max_model_len: int) -> None:
    """Compute one text whole, in chunks and beside other requests, in the blocks of an idle engine, of which each group has
    `num_blocks`; the scores must be equal to the bit. Raises SettingError.

    The text covers three blocks and a token, if there is room for that and another request.
    """
    size = runner.cache.block_size
    length = min(3 * size + 1, max_model_len, max(1, num_blocks - 1) * size)
    text = torch.randint(runner.net.config.vocab_size, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    blocks = range(1, num_blocks + 1)

    def scores(chunk: int, others: Sequence[Row] = ()) -> Tensor:
        parts = _chunks_hidden(runner, text, blocks, chunk, others)
        return torch.cat([runner.net.logits(hidden_TE) for hidden_TE in parts])

    room = num_blocks - -(-length // size)
    others = [Row([blocks[-1 - at]], 0, min(1 + at, length, size)) for at in range(min(OTHER_REQUESTS, room))]
    wanted = scores(length)
    ways: list[tuple[str, int, Sequence[Row]]] = [(f"a prompt in chunks of {chunk}", chunk, ()) for chunk in CHUNKS]
    for what, chunk, beside in [*ways, ("a request in a batch", 16, others)]:
        if not torch.equal(wanted, scores(chunk, beside)):
            needs = "it needs the native one" + (", without tensor_parallel" if isinstance(runner, ShardRunner) else "")
            why = f"{what} gives other logits than alone"
            raise SettingError(f"deterministic is set, but with the {runner.backend.name} backend {why}: {needs}")


def _chunks_hidden(
    runner: ModelRunner, text: Sequence[int], blocks: Sequence[int], chunk: int, others: Sequence[Row]
) -> Iterator[Tensor]:
    """Hidden states of the text's tokens, a chunk at a time, with other requests in each step."""
    for start in range(0, len(text), chunk):
        mine = Row(blocks, start, min(chunk, len(text) - start))
        rows = sorted([*others, mine], key=lambda row: row.count != 1)
        before = sum(row.count for row in rows[: rows.index(mine)])
        tokens = [token for row in rows for token in text[row.start : row.start + row.count]]
        states = [row.blocks[0] for row in rows] if runner.has_states else None
        yield runner.hidden(rows, integers(tokens, runner.device), states=states)[before : before + mine.count]
