"""Cross-entropy of next-token prediction, without ever holding the logits of all tokens at once.

Shapes: T tokens · E model width · V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import FunctionCtx

from attend.model.net.attention import PLAIN, causal_mask
from attend.model.net.paged_attention import fused_attention, variant_of
from attend.model.net.states import Recurrence
from attend.model.net.transformer import Decoder
from attend.model.quality import overlapping_windows
from attend.model.sublayers import AttentionVariant

CHUNK = 2048
"""Tokens whose logits live at the same time: 2048 x 8192 floats are 64 MiB."""


IGNORED = -1
"""The target of a position that has no loss."""
LEAST = 1e-6
"""1 - p is taken for no less where a token is unlearned: float32 knows it no better."""


def unlikelihood_targets(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Targets that make these tokens less likely: -log(1 - p) takes the place of -log p (Welleck et al. 2020)."""
    return IGNORED - 1 - tokens


class _SummedLoss(torch.autograd.Function):
    """-sum log softmax(logits)[target], with d/d logits = softmax - one_hot computed on the way forward.

    Of -log(1 - p) the derivative is that of -log p times -p / (1 - p).
    """

    @staticmethod
    def forward(ctx: FunctionCtx, logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        softmax_TV = logits_TV.softmax(dim=-1, dtype=torch.float32)
        tokens_T = targets_T.where(targets_T >= 0, IGNORED - 1 - targets_T).clamp(min=0)
        at_target = (torch.arange(len(targets_T)), tokens_T)
        nats_T = logits_TV.float().logsumexp(dim=-1) - logits_TV[at_target].float()
        if (targets_T < 0).any():
            other_T = (1 - softmax_TV[at_target]).clamp(min=LEAST)
            factor_T = (-(1 - other_T) / other_T).where(targets_T < IGNORED, 0.0).where(targets_T < 0, 1.0)
            nats_T = (-other_T.log()).where(targets_T < IGNORED, 0.0).where(targets_T < 0, nats_T)
            softmax_TV[at_target] -= 1.0
            softmax_TV *= factor_T[:, None]
        else:
            softmax_TV[at_target] -= 1.0
        ctx.save_for_backward(softmax_TV.to(logits_TV.dtype))
        return nats_T.sum()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        (difference_TV,) = ctx.saved_tensors
        return difference_TV * grad, None


def summed_loss(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Sum over tokens of -log p(target), in nats; float32 whatever the logits' dtype. See `IGNORED` and `unlearned`."""
    return _SummedLoss.apply(logits_TV, targets_T)


@dataclass(frozen=True, slots=True)
class DenseCausal:
    """Attention over independent sequences of one length, lying side by side in T: the training batch."""

    sequence_length: int
    variants: Sequence[AttentionVariant] | None = None
    """Variant of each layer's attention; None: all layers have the plain one."""

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, sinks_H: Tensor | None = None) -> Tensor:
        variant, length = variant_of(self.variants, layer), self.sequence_length
        q, k, v = (x.to(v_TKD.dtype).unflatten(0, (-1, length)).transpose(1, 2) for x in (q_THD, k_TKD, v_TKD))
        if variant == PLAIN and sinks_H is None:  # without a mask torch's kernel skips what a query does not see
            heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        else:
            positions_L = torch.arange(length, device=q.device)
            heads = fused_attention(q, k, v, causal_mask(positions_L, length, variant.window), variant, sinks_H)
        return heads.transpose(1, 2).flatten(0, 1)

    def recur(self, layer: int, recurrence: Recurrence, *inputs_T: Tensor) -> Tensor:
        """See Attention."""
        inputs = [x.unflatten(0, (-1, self.sequence_length)) for x in inputs_T]
        outputs, _ = recurrence.advance(inputs, recurrence.start(len(inputs[0])))
        return outputs.flatten(0, 1)


def hidden_states(net: Decoder, tokens_BL: Tensor) -> Tensor:
    """Hidden states [B * L, E] of a batch of equally long sequences."""
    batch, length = tokens_BL.shape
    positions_T = torch.arange(length).repeat(batch)
    return net(tokens_BL.flatten(), positions_T, DenseCausal(length, net.config.attention_variants))


def backward(net: Decoder, tokens_BL: Tensor, targets_BL: Tensor) -> float:
    """Add the gradient of the mean cross-entropy to `net` and return the loss, in nats per target that is not ignored.

    The head runs chunk by chunk on a detached copy of the hidden states; its gradient then flows through the
    blocks in one go. d loss / d logits = softmax - one_hot, so a chunk's logits are never needed again.
    """
    hidden_TE = hidden_states(net, tokens_BL)
    leaf_TE = hidden_TE.detach().requires_grad_()
    total, counted = 0.0, int((targets_BL != IGNORED).sum())
    for chunk_TE, targets_T in zip(leaf_TE.split(CHUNK), targets_BL.flatten().split(CHUNK), strict=True):
        loss = summed_loss(net.logits(chunk_TE), targets_T) / counted
        loss.backward()
        total += loss.item()
    hidden_TE.backward(leaf_TE.grad)
    return total


@torch.inference_mode()
def bits_per_byte(net: Decoder, tokens: Tensor, num_bytes: int, context: int) -> float:
    """Bits that the model needs for each byte of a held-out text of `num_bytes` bytes, read in overlapping windows."""
    nats = 0.0
    for start, scored, stop in overlapping_windows(len(tokens), context):
        window = tokens[start:stop].long()
        hidden_TE = hidden_states(net, window[None, :-1])[scored - 1 - start :]
        targets_T = window[scored - start :]
        for chunk_TE, chunk_T in zip(hidden_TE.split(CHUNK), targets_T.split(CHUNK), strict=True):
            nats += F.cross_entropy(net.logits(chunk_TE).float(), chunk_T, reduction="sum").item()
    return nats / math.log(2) / num_bytes
