"""A decoder whose small parts are Triton kernels: on a GPU a launch costs more than most of them compute.

The same equations as `transformer.py`, in some ten launches a layer, or some twenty where it has experts. Not yet run on a GPU.

Shapes: T tokens · E model width · H query heads · K key/value heads · D head size.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from triton import cdiv, next_power_of_2

from attend.model.net.attention import MultiHeadAttention
from attend.model.net.delta import GatedDelta
from attend.model.net.linear import replace_linears
from attend.model.net.paged_attention import PagedAttention
from attend.model.net.short_conv import ShortConv
from attend.model.net.transformer import Decoder
from attend.model.net.triton import delta, fused_kernels
from attend.model.net.triton.codes import multiply_codes
from attend.model.net.triton.mlp import AT_ONCE, feed_forward

WIDE = 4096
"""Numbers of a token's queries that four warps keep in registers."""


class Joint(NamedTuple):
    """What happens to the residual stream between two sublayers; `nn.Identity` where there is no norm."""

    after: nn.Module
    """The norm of the previous sublayer's output."""
    before: nn.Module
    """The norm of the next sublayer's input; with norms after the sums, that of the sum."""
    end: Tensor | None
    """A factor of the sum, [1]; None: 1."""


class TritonDecoder:
    """`Decoder` for serving: the same call, the same scores up to rounding. Keeps the decoder that it was made from.

    The residual stream is joined before each sublayer, and at the end: the update of the sublayer before is added, under the
    norm that comes after it, and the sum is normed for the one that comes next.
    """

    def __init__(self, net: Decoder) -> None:
        replace_linears(net, multiply_codes)
        self.net = net
        self.config = net.config
        self.logits = net.logits
        self._side_by_side = net.config.norm_place in ("parallel", "shared")
        self._layers = net.config.layers
        self._joints, self._last = _joints(net)

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, attention: PagedAttention) -> Tensor:
        """Hidden states [T, E]; see `Decoder.forward`."""
        residual_TE, update_TE = self.net.embedding(tokens_T, positions_T), None
        of_layers = None if self.net.per_layer is None else self.net.per_layer(tokens_T, residual_TE).unbind(1)
        for layer, (block, joints) in enumerate(zip(self.net.blocks, self._joints, strict=True)):
            normed_TE = self._join(joints[0], update_TE, residual_TE)
            update_TE = self._attend(block.attention, normed_TE, layer, attention)
            if self._side_by_side:
                if self.config.norm_place == "parallel":
                    normed_TE = self._join(joints[1], None, residual_TE)
                update_TE = update_TE + feed_forward(block.mlp, normed_TE, self.config)
            else:
                normed_TE = self._join(joints[1], update_TE, residual_TE)
                update_TE = feed_forward(block.mlp, normed_TE, self.config)
            if of_layers is not None:
                update_TE = block.per_layer.product(self._join(joints[2], update_TE, residual_TE), of_layers[layer])
        return self._join(self._last, update_TE, residual_TE)

    def _join(self, joint: Joint, update_TE: Tensor | None, residual_TE: Tensor) -> Tensor:
        """residual = (residual + scale * after(update)) * end; returns before(residual), which is the residual itself without a
        norm.

        With norms of sums, as first published, the residual becomes what is returned.
        """
        before, after, end = joint.before, joint.after, joint.end
        none, replaces = isinstance(before, nn.Identity), self.config.norm_place == "post"
        normed_TE = residual_TE if none or replaces else torch.empty_like(residual_TE)
        if none and update_TE is None:
            return normed_TE
        num_tokens, width = residual_TE.shape
        fused_kernels.join_kernel[(num_tokens,)](
            residual_TE if update_TE is None else update_TE,
            residual_TE,
            normed_TE,
            *_parameters(after, residual_TE),
            *_parameters(before, residual_TE),
            self.config.norm_eps,
            self.config.post_norm_eps or self.config.norm_eps,
            self.config.residual_scale,
            residual_TE if end is None else end,
            E=width,
            E_P=next_power_of_2(width),
            UPDATES=update_TE is not None,
            AFTER=not isinstance(after, nn.Identity),
            ENDS=end is not None,
            KEPT=none or not replaces,
            NORM=not none,
            **self._norm_kind,
        )
        return normed_TE

    def _attend(
        self, module: MultiHeadAttention | GatedDelta | ShortConv, normed_TE: Tensor, layer: int, attention: PagedAttention
    ) -> Tensor:
        """Attention's output [T, E], or of what is in its place; the step's keys and values are in the cache then."""
        if isinstance(module, ShortConv):
            return delta.convolve(module, normed_TE, layer, attention)
        if isinstance(module, GatedDelta):
            return delta.recur(module, normed_TE, layer, attention, self.config.activation)
        qkv = module.qkv(normed_TE)
        q_THD = self._turn(module, qkv, layer, attention)
        sinks = () if module.sinks is None else (module.sinks,)
        heads_TQ = attention.attend(layer, q_THD, *sinks).flatten(1)
        if self.config.attention_gate:
            self._gate(heads_TQ, qkv, begin=heads_TQ.shape[1], shared=1)
        if module.gates is not None:
            self._gate(heads_TQ, module.gates(normed_TE), begin=0, shared=self.config.head_size)
        return module.out(heads_TQ)

    def _gate(self, heads_TQ: Tensor, gate_TP: Tensor, *, begin: int, shared: int) -> None:
        """Multiply columns of heads, `shared` of them at a time, by the sigmoids of columns of the gate from `begin` on."""
        num_tokens, width = heads_TQ.shape
        size = min(AT_ONCE, next_power_of_2(width))
        sizes = {"Q": width, "P": gate_TP.shape[1], "BEGIN": begin, "SHARED": shared, "SIZE": size}
        fused_kernels.gate_kernel[(num_tokens, cdiv(width, size))](heads_TQ, gate_TP, **sizes)

    def _turn(self, module: MultiHeadAttention, qkv: Tensor, layer: int, attention: PagedAttention) -> Tensor:
        """The step's queries, normed and rotated, [T, H, D]; its keys and values go to the cache."""
        config, cache, layout, spec = self.config, attention.cache, attention.layout_of(layer), self._layers[layer]
        heads, kv_heads, size, rope = spec.num_heads, spec.num_kv_heads, spec.head_size, self.net.rope_of_layer[layer]
        q_THD = qkv.new_empty(len(qkv), heads, size)
        cos, sin = (qkv, qkv) if rope is None else self.net.rope_tables[rope]
        heads_p, size_p = next_power_of_2(heads), next_power_of_2(size)
        fused_kernels.turn_kernel[(len(qkv),)](
            *(qkv, q_THD, cache.keys[layer], cache.values[layer], layout.slots_T, layout.positions_T, cos, sin),
            *_parameters(module.q_norm, qkv),
            *_parameters(module.k_norm, qkv),
            config.norm_eps,
            H=heads,
            H_P=heads_p,
            K=kv_heads,
            K_P=next_power_of_2(kv_heads),
            D=size,
            D_P=size_p,
            R=0 if rope is None else cos.shape[1],
            BEGIN=sum(module.qkv.parts[: module.num_queries]),
            WIDTH=qkv.shape[1],
            NORM=config.qk_norm,
            AFTER=config.qk_norm_after_rope,
            BETA=config.query_scale_beta,
            LENGTH=config.query_scale_length,
            NORMED_VALUES=config.value_norm,
            **self._norm_kind,
            num_warps=min(16, max(4, 4 * cdiv(heads_p * size_p, WIDE))),
        )
        return q_THD

    @property
    def _norm_kind(self) -> dict[str, bool]:
        return {"CENTRED": self.config.norm != "rmsnorm", "BIASED": self.config.norm == "layernorm"}


def _joints(net: Decoder) -> tuple[list[list[Joint]], Joint]:
    """The joints before the sublayers of each layer, and the last one of the model."""
    nothing, sums = nn.Identity(), net.config.norm_place == "post"
    after: nn.Module = nothing
    norm_of_sum: nn.Module = nothing
    end: Tensor | None = None
    layers = []
    for block in net.blocks:
        joints = [Joint(after, norm_of_sum if sums else block.attention_norm, end)]
        joints.append(Joint(block.attention_post_norm, block.attention_norm if sums else block.mlp_norm, None))
        after, norm_of_sum, end = block.mlp_post_norm, block.mlp_norm, block.layer_scale
        if block.per_layer is not None:
            joints.append(Joint(after, norm_of_sum if sums else nothing, None))
            after, norm_of_sum = block.per_layer.post_norm, nothing
        layers.append(joints)
    return layers, Joint(after, norm_of_sum if sums else net.norm, end)


def _parameters(norm: nn.Module, stand_in: Tensor) -> tuple[Tensor, Tensor]:
    """A norm's gain and bias; the stand-in, which is not read, for those that there are not."""
    gain, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    return stand_in if gain is None else gain, stand_in if bias is None else bias
