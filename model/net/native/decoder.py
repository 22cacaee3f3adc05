"""A bfloat16 decoder on a CPU, one native call a step: the equations of `transformer.py` without Python between them, and the
draws of `sampling.py` behind them.

A value is one sum in one order, whatever is computed beside it: a request's tokens have the same bits alone and in any
batch, in one chunk and in many.

Shapes: T tokens · E model width · H query heads · K key/value heads · D head size · V vocabulary.
"""

import ctypes
import math
import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attend.model.net.delta import GatedDelta
from attend.model.net.kv_cache import KVCache
from attend.model.net.native.drawing import draw_rows
from attend.model.net.native.library import check_memory, native, variant
from attend.model.net.native.packing import NO_ROOM, pack_decoder
from attend.model.net.native.structures import Caches, LayerSizes, StepCall, attention_numbers, layer_sizes, model_sizes
from attend.model.net.paged_attention import BatchLayout, PagedAttention
from attend.model.net.progress import ProgressCounter
from attend.model.net.quantised import QuantisedLinear
from attend.model.net.short_conv import ShortConv
from attend.model.net.transformer import Block, Decoder, Embedding, PostNormBlock
from attend.model.sampling_plan import Draw
from attend.model.sublayers import AttentionVariant

MAX_GROUP = 16
MAX_HEAD = 512
MAX_DELTA = 256
BLOCK = 32
"""Tokens: a block of the cache must be whole tiles."""
MAX_KERNEL = 16
"""Tokens that a convolution sees."""


class NativeBackend:
    """Keys lie in the cache as [block][K][B][D], values as [block][K][B / 2][D][2]: as the matrix units read them.

    In 8 bits both lie as [block][K], and there the codes [B][D], then the scales [B][G].
    """

    def __init__(self, variants: Sequence[AttentionVariant]) -> None:
        self._library = native()
        self._variants = variants
        self.name = f"native-{variant()}"

    def forward(
        self,
        layer: int,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        cache: KVCache,
        layout: BatchLayout,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """One layer's attention by itself, as other backends have it; `NativeDecoder` does not come here."""
        qkv = torch.cat([part.flatten(1) for part in (q_THD, k_TKD, v_TKD)], dim=1)
        out_THD = torch.empty_like(q_THD)
        sizes = (len(qkv), q_THD.shape[1], k_TKD.shape[1], q_THD.shape[2])
        caches = (cache.keys[layer].data_ptr(), cache.values[layer].data_ptr(), cache.block_size, cache.in_8_bits)
        starts_R, counts_R, _ = layout.spans
        table_RB = layout.block_table_RB
        rows = (starts_R.data_ptr(), counts_R.data_ptr(), len(table_RB), _addresses(table_RB.unbind()))
        numbers = (ctypes.c_float * 3)(*attention_numbers(self._variants[layer], q_THD.shape[2]))
        sinks = None if sinks_H is None else sinks_H.float().contiguous()
        outside = (out_THD.data_ptr(), numbers, None if sinks is None else sinks.data_ptr())
        self._library.attend_layer(qkv.data_ptr(), layout.slots_T.data_ptr(), *sizes, *caches, *rows, *outside)
        return out_THD


class StepRows(NamedTuple):
    """The requests of a step, those with one token first: their tokens, and where these stand."""

    tokens: "array[int]"
    """Token ids of the step, [T]."""
    starts: Sequence[int]
    """[R]: positions of their first tokens."""
    counts: Sequence[int]
    """[R]: how many tokens each request brings."""
    snapshot_counts: Sequence[int]
    """[R]: after how many of its tokens a request's state is kept."""
    tables: Sequence[Sequence["array[int]"]]
    """[G][R]: block tables of each group of layers that has keys and values, or [1][R]: they have the same."""
    sources: Sequence[int] | None = None
    places: Sequence[int] | None = None
    """[R]: the slots where states are read, and where they are written."""


class NativeDecoder:
    """`Decoder` for serving: its two calls, the same scores up to rounding, and `step`, a whole step at once.

    It copies the matrices that it is made from.

    With `spend` each of them is freed as soon as it is copied: the weights are never held twice. In the decoder that it came
    from, an UnpackedLinear then stands in the place of each, and reads it from here. Not for two threads at once.
    """

    def __init__(
        self, net: Decoder, *, spend: bool = False, report: Callable[[int, int], None] = lambda num_bytes, total: None
    ) -> None:
        self.config = config = net.config
        self._library = native()
        arrays = self._tensors = _arrays(net)  # the library points into these
        self._net = self._library.attend_new(
            ctypes.byref(model_sizes(config)), _addresses(arrays), (LayerSizes * config.num_layers)(*layer_sizes(net))
        )
        if self._net is None:
            raise MemoryError(NO_ROOM)
        # not at exit: the step thread, a daemon, may be inside a step then
        weakref.finalize(self, self._library.attend_free, self._net).atexit = False
        self.library, self.handle = self._library, self._net
        self._per_layer = net.per_layer
        pack_decoder(self, net, spend=spend, report=report)
        self._viewed: tuple[KVCache | None, Caches] = (None, Caches())
        self._scores_SV = torch.empty(0, config.vocab_size)  # kept from step to step

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, attention: PagedAttention) -> Tensor:
        """Hidden states [T, E]; see `Decoder.forward`. Positions are those of the layout."""
        layout = attention.layout
        hidden_TE = torch.empty(len(tokens_T), self.config.hidden_size, dtype=torch.bfloat16)
        layouts = [layout.of(group) for group in range(attention.cache.num_groups)]
        tables = [table_B.data_ptr() for of in layouts for table_B in of.block_table_RB]
        starts_R, counts_R, kept_R = layout.spans
        assert layout.states_R is not None or not attention.cache.states, "nobody said where the states lie"
        places = [None if slots_R is None else slots_R.data_ptr() for slots_R in (layout.sources_R, layout.states_R)]
        self._run(
            attention.cache,
            tokens_T,
            StepCall(
                *(len(tokens_T), len(layout.rows), len(layouts), 0),
                *(tokens_T.data_ptr(), starts_R.data_ptr(), counts_R.data_ptr(), kept_R.data_ptr()),
                (ctypes.c_void_p * len(tables))(*tables),
                *places,
                hidden=hidden_TE.data_ptr(),
                progress=attention.progress.address,
            ),
        )
        return hidden_TE

    def step(
        self,
        cache: KVCache,
        rows: StepRows,
        logits_indices: Sequence[int],
        draws: Sequence[Draw],
        progress: ProgressCounter,
        hidden_TE: Tensor | None = None,
    ) -> tuple[list[int], Tensor]:
        """The tokens [S] drawn after the tokens at `logits_indices` of T, UNSCORED or EXCLUDED where there is none, and the
        scores [S, V] they were drawn from, which the next step overwrites. `hidden_TE` is filled: bfloat16 [T, E].
        """
        num_rows, num_scored, vocab_size = len(rows.starts), len(logits_indices), self.config.vocab_size
        if len(self._scores_SV) < num_scored:
            self._scores_SV = torch.empty(num_scored, vocab_size)
        of_groups = [*rows.tables] * (cache.num_groups if len(rows.tables) == 1 else 1)
        assert len(of_groups) == cache.num_groups, "each group of layers has its block tables, or all have the same"
        tables = [table for of_group in of_groups for table in of_group]
        ends = [-(-(start + count) // cache.block_size) for start, count in zip(rows.starts, rows.counts, strict=True)]
        assert all(len(table) >= end for table, end in zip(tables, ends * len(of_groups), strict=True)), "a table is too short"
        numbers = [array("q", some) for some in (rows.starts, rows.counts, rows.snapshot_counts)]
        states = [None if slots is None else array("q", slots) for slots in (rows.sources, rows.places)]
        places, drawn = array("q", logits_indices), array("q", [0]) * num_scored
        asked, held = draw_rows(draws, vocab_size)
        self._run(
            cache,
            rows.tokens,
            StepCall(
                *(len(rows.tokens), num_rows, len(of_groups), num_scored),
                *(each.buffer_info()[0] for each in (rows.tokens, *numbers)),
                (ctypes.c_void_p * len(tables))(*[table.buffer_info()[0] for table in tables]),
                *(None if each is None else each.buffer_info()[0] for each in states),
                hidden=None if hidden_TE is None else hidden_TE.data_ptr(),
                scored=places.buffer_info()[0],
                scores=self._scores_SV.data_ptr(),
                draws=ctypes.cast(asked, ctypes.c_void_p) if num_scored else None,
                drawn=drawn.buffer_info()[0],
                progress=progress.address,
            ),
        )
        del held
        return drawn.tolist(), self._scores_SV[:num_scored]

    def _run(self, cache: KVCache, tokens: "Tensor | array[int]", call: StepCall) -> None:
        vectors_TV = self._vectors(tokens)
        if vectors_TV is not None:
            call.vectors = vectors_TV.data_ptr()
        check_memory(self._library.attend_step(self._net, ctypes.byref(self._view(cache)), ctypes.byref(call)))

    def _vectors(self, tokens: "Tensor | array[int]") -> Tensor | None:
        """What each token has by itself for each layer, bfloat16 [T, L P]; None where there is nothing."""
        if self._per_layer is None:
            return None
        tokens_T = tokens if isinstance(tokens, Tensor) else torch.frombuffer(tokens, dtype=torch.int64)
        scale = self._per_layer.scale * math.sqrt(0.5)
        vectors_TV: Tensor = self._per_layer.tokens(tokens_T) * scale
        return vectors_TV.to(torch.bfloat16)

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """Scores of the next token [T, V] in float32: not rounded to the weights' precision."""
        logits_TV = torch.empty(len(hidden_TE), self.config.vocab_size)
        hidden_TE = hidden_TE.contiguous()
        check_memory(self._library.attend_logits(self._net, hidden_TE.data_ptr(), len(hidden_TE), logits_TV.data_ptr()))
        return logits_TV

    def _view(self, cache: KVCache) -> Caches:
        """The cache as the library takes it, made once."""
        if self._viewed[0] is not cache:
            groups = cache.group_of_layer or [0] * self.config.num_layers
            groups = [0 if layer in cache.states else group for layer, group in enumerate(groups)]  # a state has no blocks
            states = [part for layer in range(len(groups)) for part in (*cache.states.get(layer, ()), None, None)[:2]]
            of_layers = (ctypes.c_int64 * len(groups))(*groups)
            view = Caches(
                *(_addresses(cache.keys), _addresses(cache.values)),
                *(cache.block_size, cache.in_8_bits, of_layers, _addresses(states)),
            )
            self._viewed = (cache, view)
        return self._viewed[1]


def _addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array:
    return (ctypes.c_void_p * len(tensors))(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))


def _arrays(net: Decoder) -> list[Tensor | None]:
    """The tensors in the order in which `attend_new` takes them; None where the model has no such tensor."""
    embedding = None  # a tied one is read from the head
    if not net.config.tied_head and not isinstance(net.embedding.tokens, QuantisedLinear):
        embedding = net.embedding.tokens.weight
        assert embedding.dtype == torch.bfloat16
    of_vectors = nn.Identity() if net.per_layer is None else net.per_layer.norm
    arrays: list[Tensor | None] = [embedding, _position_vectors(net.embedding), *_norm(net.norm), *_norm(of_vectors)]
    for block, rope in zip(net.blocks, net.rope_of_layer, strict=True):
        for norm in _norms(block):
            arrays += _norm(norm)
        arrays += (None, None) if rope is None else (table.float().contiguous() for table in net.rope_tables[rope])
        sinks = getattr(block.attention, "sinks", None)
        arrays.append(None if sinks is None else sinks.detach().float())
        arrays += _recurrence(block.attention)
        for name in ("correction", "expert_scale"):
            numbers = getattr(block.mlp, name, None)
            arrays.append(None if numbers is None else numbers.detach().float())
    return arrays


def _recurrence(mixer: nn.Module) -> list[Tensor | None]:
    """What is in place of attention, beside its matrices, float32: the convolution [W, C], its bias, what heads have."""
    parts: list[Tensor | None] = [None] * 5
    if isinstance(mixer, GatedDelta | ShortConv):
        parts[0] = mixer.convolution.detach().flatten(1).T
    if isinstance(mixer, ShortConv):
        parts[1] = mixer.convolution_bias
    if isinstance(mixer, GatedDelta):
        parts[2:] = mixer.log_speed.detach().float().exp(), mixer.step_bias, mixer.gain
    return [None if part is None else part.detach().float().contiguous() for part in parts]


def _position_vectors(embedding: Embedding) -> Tensor | None:
    """The vectors of positions [P, E], float32, where they are added."""
    if embedding.positions is not None:
        return embedding.positions.weight.float()
    return None if embedding.sinusoids is None else embedding.sinusoids.float()


def _norms(block: Block) -> list[nn.Module]:
    """The norms of a layer, `nn.Identity` where there is none: before attention, of its output, of the sum, ..."""
    attention, nothing = block.attention, nn.Identity()
    of_attention = [block.attention_norm, block.attention_post_norm, nothing]
    of_mlp = [getattr(block.mlp, "shared_norm", block.mlp_norm), block.mlp_post_norm, nothing]
    if isinstance(block, PostNormBlock):
        of_attention, of_mlp = of_attention[::-1], of_mlp[::-1]
    of_heads = [getattr(attention, name, nothing) for name in ("q_norm", "k_norm", "v_norm")]
    of_input = nothing if block.per_layer is None else block.per_layer.post_norm
    beside = ("shared_post_norm", "experts_norm", "experts_post_norm", "router_norm")
    return [*of_attention, *of_heads, *of_mlp, of_input, *(getattr(block.mlp, name, nothing) for name in beside)]


def _norm(norm: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """Gain and bias in float32: a gain of 1 + w is kept so, and others lose nothing. One without a gain has ones."""
    if isinstance(norm, nn.RMSNorm) and norm.weight is None:
        return torch.ones(norm.normalized_shape), None
    parts = (getattr(norm, name, None) for name in ("weight", "bias"))
    gain, bias = (None if part is None else part.detach().float().contiguous() for part in parts)
    return gain, bias
