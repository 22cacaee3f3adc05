"""A bfloat16 decoder on a CPU, one native call a step: the equations of `transformer.py` without Python between them.

A value is one sum in one order, whatever is computed beside it: a request's tokens have the same bits alone and in any
batch, in one chunk and in many.

Shapes: T tokens · E model width · H query heads · K key/value heads · D head size · V vocabulary.
"""

import ctypes
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attend.model.config import ModelConfig
from attend.model.net.backends import BatchLayout, Paged
from attend.model.net.delta import GatedDelta
from attend.model.net.features import NATIVE, features
from attend.model.net.kv_cache import KVCache
from attend.model.net.native.library import check, native, variant
from attend.model.net.native.packing import NO_ROOM, pack
from attend.model.net.quantised import QuantisedLinear
from attend.model.net.short_conv import ShortConv
from attend.model.net.transformer import Block, Decoder, Embedding, PostNormBlock, final_scores
from attend.model.sublayers import AttentionVariant, ConvSpec, DeltaSpec

MAX_GROUP = 16
MAX_HEAD = 512
MAX_DELTA = 256
BLOCK = 32
"""Tokens: a block of the cache must be whole tiles."""
MAX_KERNEL = 16
"""Tokens that a convolution sees."""
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
"""In the order of `Activation` in matrix.h."""
PLACES = ("parallel", "shared")
"""Places of norms with attention and MLP side by side, in the order of `Place` in decoder.cpp, from 1 on."""
MIXERS = (type(None), DeltaSpec, ConvSpec)
"""What layers have in place of attention, in the order of `Mixer` in decoder.cpp."""
EVERYTHING = 1 << 24
"""A window without a window: float32 holds it, and no context is as long."""


class NativeBackend:
    """Keys lie in the cache as [block][K][B][D], values as [block][K][B / 2][D][2]: as the matrix units read them.

    In 8 bits both lie as [block][K], and there the codes [B][D], then the scales [B][G].
    """

    @staticmethod
    def supports(config: ModelConfig, dtype: torch.dtype, device: str, block_size: int) -> bool:
        """Whether the native decoder computes all that this model asks for. A block must be whole tiles."""
        layers = [layer for layer in config.layers if layer.recurrence is None]
        heads = all(layer.head_size <= MAX_HEAD and layer.num_heads // layer.num_kv_heads <= MAX_GROUP for layer in layers)
        delta = config.delta is None or (
            max(config.delta.key_size, config.delta.value_size) <= MAX_DELTA and config.delta.kernel <= MAX_KERNEL
        )
        conv = config.conv_kernel is None or config.conv_kernel <= MAX_KERNEL
        fits = heads and delta and conv and block_size % BLOCK == 0 and dtype == torch.bfloat16 and device == "cpu"
        return fits and features(config) <= NATIVE

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
        rows, held = _rows(layout)
        numbers = (ctypes.c_float * 3)(*_numbers(self._variants[layer], q_THD.shape[2]))
        sinks = None if sinks_H is None else sinks_H.float().contiguous()
        outside = (out_THD.data_ptr(), numbers, None if sinks is None else sinks.data_ptr())
        self._library.attend_layer(qkv.data_ptr(), layout.slots_T.data_ptr(), *sizes, *caches, *rows, *outside)
        del held
        return out_THD


class NativeDecoder:
    """`Decoder` for serving: the same two calls, the same scores up to rounding. It copies the matrices that it is made from.

    With `spend` each of them is freed as soon as it is copied: the weights are never held twice. In the decoder that it came
    from, an UnpackedLinear then stands in the place of each, and reads it from here. Not for two threads at once.
    """

    def __init__(
        self, net: Decoder, *, spend: bool = False, report: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        self.config = config = net.config
        self._library = native()
        arrays = self._tensors = _arrays(net)  # the library points into these
        self._net = self._library.attend_new(
            ctypes.byref(_model_sizes(config)), _addresses(arrays), (_LayerSizes * config.num_layers)(*_layer_sizes(net))
        )
        if self._net is None:
            raise MemoryError(NO_ROOM)
        # not at exit: the step thread, a daemon, may be inside a step then
        weakref.finalize(self, self._library.attend_free, self._net).atexit = False
        self.library, self.handle = self._library, self._net
        self._per_layer = net.per_layer
        self.reading = pack(self, net, spend=spend, report=report)
        """Seconds in which files were read, of those that packing took."""
        self._caches: tuple[KVCache | None, tuple[ctypes.Array, ...]] = (None, ())  # a cache, and what `_layers_of` says of it

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, attention: Paged) -> Tensor:
        """Hidden states [T, E]; see `Decoder.forward`."""
        layout = attention.layout
        residual_TE = torch.empty(len(tokens_T), self.config.hidden_size, dtype=torch.bfloat16)
        hidden_TE = torch.empty_like(residual_TE)
        keys, values, groups, states = self._layers_of(attention.cache)
        layouts = [layout.of(group) for group in range(max(groups) + 1)]
        slots, tables = (_addresses(parts) for parts in zip(*((of.slots_T, of.block_table_RB) for of in layouts), strict=True))
        tokens = (tokens_T.data_ptr(), positions_T.data_ptr(), slots, len(tokens_T))
        (starts, counts, num_rows, _, width), held = _rows(layout)
        kept_R = layout.spans[2]
        assert layout.states_R is not None or not attention.cache.states, "nobody said where the states lie"
        places = [None if slots_R is None else slots_R.data_ptr() for slots_R in (layout.sources_R, layout.states_R)]
        vectors_TV = self._vectors(tokens_T)
        vectors = None if vectors_TV is None else vectors_TV.data_ptr()
        buffers = (states, *places, kept_R.data_ptr(), residual_TE.data_ptr(), hidden_TE.data_ptr(), vectors)
        caches = (keys, values, attention.cache.block_size, attention.cache.in_8_bits, groups)
        of_rows = (starts, counts, num_rows, tables, width)
        check(self._library.attend_step(self._net, *tokens, *caches, *of_rows, *buffers, attention.pulse.address))
        del held
        return hidden_TE

    def _vectors(self, tokens_T: Tensor) -> Tensor | None:
        """What each token has by itself for each layer, bfloat16 [T, L P]; None where there is nothing."""
        if self._per_layer is None:
            return None
        scale = self._per_layer.scale * math.sqrt(0.5)
        vectors_TV: Tensor = self._per_layer.tokens(tokens_T) * scale
        return vectors_TV.to(torch.bfloat16)

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """Scores of the next token [T, V] in float32: not rounded to the weights' precision."""
        logits_TV = torch.empty(len(hidden_TE), self.config.vocab_size)
        hidden_TE = hidden_TE.contiguous()
        check(self._library.attend_logits(self._net, hidden_TE.data_ptr(), len(hidden_TE), logits_TV.data_ptr()))
        return final_scores(logits_TV, self.config)

    def _layers_of(self, cache: KVCache) -> tuple[ctypes.Array, ...]:
        """Addresses of the layers' keys and values, the groups of the layers, and the addresses of their states."""
        if self._caches[0] is not cache:
            groups = cache.group_of_layer or [0] * self.config.num_layers
            groups = [0 if layer in cache.states else group for layer, group in enumerate(groups)]  # a state has no blocks
            of_layers = (ctypes.c_int64 * len(groups))(*groups)
            states = [part for layer in range(len(groups)) for part in (*cache.states.get(layer, ()), None, None)[:2]]
            self._caches = (cache, (_addresses(cache.keys), _addresses(cache.values), of_layers, _addresses(states)))
        return self._caches[1]


def _addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array:
    return (ctypes.c_void_p * len(tensors))(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))


def _rows(layout: BatchLayout) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
    """A step's requests as the library takes them, and the tensors that must live until it returns."""
    starts_R, counts_R, _ = layout.spans
    table = layout.block_table_RB
    return (starts_R.data_ptr(), counts_R.data_ptr(), len(table), table.data_ptr(), table.shape[1]), (starts_R, counts_R, table)


def _numbers(variant: AttentionVariant, head_size: int) -> tuple[float, ...]:
    return variant.scale or head_size**-0.5, variant.softcap or 0.0, variant.window or EVERYTHING


class _ModelSizes(ctypes.Structure):
    """`ModelSizes` of decoder.cpp."""

    _fields_ = tuple(
        (name, kind)
        for kind, names in (
            (
                ctypes.c_int64,
                "layers E V H P attention_gate norms_all normed_after query_length activation gated centred place",
            ),
            (ctypes.c_int64, "X C F S undivided shared_gate sigmoid groups groups_of_token beside"),
            (ctypes.c_int64, "key_heads value_heads key_size value_size delta_kernel conv_kernel head_gate"),
            (ctypes.c_float, "eps output_eps embedding_scale residual_scale limit slope"),
            (ctypes.c_float, "query_beta routing_eps routing_floor routed_scale delta_eps rate_scale"),
        )
        for name in names.split()
    )


class _LayerSizes(ctypes.Structure):
    """`LayerSizes` of decoder.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("mixed", "mixer", "K", "D", "R", "M", "shares", "same", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap", "after")),
    )


def _model_sizes(config: ModelConfig) -> _ModelSizes:
    return _ModelSizes(
        layers=config.num_layers,
        E=config.hidden_size,
        V=config.vocab_size,
        H=config.num_heads,
        P=config.per_layer_input_size or 0,
        attention_gate=config.attention_gate,
        head_gate=config.head_gate,
        norms_all=config.qk_norm == "all",
        normed_after=config.qk_norm_after_rope,
        query_length=config.query_scale_length,
        activation=ACTIVATIONS.index(config.activation),
        gated=config.gated_mlp,
        centred=config.norm != "rmsnorm",
        place=PLACES.index(config.norm_place) + 1 if config.norm_place in PLACES else 0,
        eps=config.norm_eps,
        output_eps=config.post_norm_eps or config.norm_eps,
        embedding_scale=config.embedding_scale,
        residual_scale=config.residual_scale,
        limit=config.swiglu_limit or 0.0,
        slope=config.swiglu_slope,
        query_beta=config.query_scale_beta or 0.0,
        conv_kernel=(config.conv_kernel or 0) if config.conv_layers else 0,
        **_mixture(config),
        **_delta(config),
    )


def _mixture(config: ModelConfig) -> dict[str, Any]:
    """Sizes of the experts, which are alike in all layers that have some."""
    spec = next((layer.experts for layer in config.layers if layer.experts is not None), None)
    if spec is None:
        return {}
    return {
        "X": spec.num_experts,
        "C": spec.experts_per_token,
        "F": spec.expert_size,
        "S": spec.shared_expert_size or 0,
        "undivided": spec.routing == "all",
        "shared_gate": spec.shared_expert_size is not None and spec.shared_expert_gate,
        "sigmoid": spec.scoring_func == "sigmoid",
        "groups": spec.expert_groups,
        "groups_of_token": spec.groups_per_token,
        "routing_eps": spec.routing_eps or 0.0,
        "routing_floor": spec.routing_floor or 0.0,
        "routed_scale": spec.routed_scaling_factor,
        "beside": spec.experts_beside_mlp,
    }


def _delta(config: ModelConfig) -> dict[str, Any]:
    """Sizes of the delta rules, the eps of their norms, and what their rates are multiplied by."""
    spec = config.delta if config.delta_layers else None
    if spec is None:
        return {}
    return {
        "key_heads": spec.key_heads,
        "value_heads": spec.value_heads,
        "key_size": spec.key_size,
        "value_size": spec.value_size,
        "delta_kernel": spec.kernel,
        "delta_eps": config.norm_eps if spec.norm_eps is None else spec.norm_eps,
        "rate_scale": 2.0 if spec.negative_eigenvalues else 1.0,
    }


def _layer_sizes(net: Decoder) -> Iterator[tuple[float, ...]]:
    for block, layer in zip(net.blocks, net.config.layers, strict=True):
        scale, softcap, window = _numbers(layer.attention, layer.head_size)
        kinds = (layer.experts is not None, MIXERS.index(type(layer.recurrence)))
        heads = (layer.num_kv_heads, layer.head_size, 0 if layer.rope is None else layer.rope.size)
        kept = (layer.kv_layer is not None, layer.keys_are_values)
        after = 1.0 if block.layer_scale is None else block.layer_scale.item()
        yield *kinds, *heads, layer.mlp_size, *kept, int(window), scale, softcap, after


def _arrays(net: Decoder) -> list[Tensor | None]:
    """In the order that `attend_new` names; None where there is nothing."""
    embedding = None  # a tied one is read from the head
    if not net.config.tied_head and not isinstance(net.embedding.tokens, QuantisedLinear):
        embedding = net.embedding.tokens.weight
        assert embedding.dtype == torch.bfloat16
    of_vectors = nn.Identity() if net.per_layer is None else net.per_layer.norm
    arrays: list[Tensor | None] = [embedding, _added(net.embedding), *_norm(net.norm), *_norm(of_vectors)]
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


def _added(embedding: Embedding) -> Tensor | None:
    """The vectors of positions [P, E], float32, where they are added."""
    if embedding.positions is not None:
        return embedding.positions.weight.float()
    return embedding.sinusoids.float() if hasattr(embedding, "sinusoids") else None


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
