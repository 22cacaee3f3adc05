"""A mixture of experts in place of an MLP: a router sends each token to a few of many gated MLPs (Shazeer et al. 2017).

    y = sum over the chosen experts e of weight_e * expert_e(x)  [+ sigmoid(x · g) * shared(x), or + shared(x)]

The sum runs in the order of the experts' numbers, in float32. So a token's result does not depend on what else is in the
batch, and a path that computes expert after expert adds in place.

Shapes: T tokens · E model width · X experts · C experts that a token goes to · G groups of experts · F width of one expert's
MLP.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from attend.model.config import ModelConfig
from attend.model.net.layers import GatedMLP, make_gated, make_norm
from attend.model.net.linear import ExpertLinear, FloatLinear, Linear
from attend.model.sublayers import MixtureSpec


def route(scores_TX: Tensor, mixture: MixtureSpec, correction_X: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Numbers of a token's experts, int64 [T, C], and what each of them weighs, float32 [T, C]."""
    scores_TX = scores_TX.float()
    if mixture.softmax_of_chosen:
        best_TC, experts_TC = scores_TX.topk(mixture.experts_per_token, dim=-1)
        weights_TC = best_TC.softmax(dim=-1)
    else:
        parts_TX = scores_TX.softmax(dim=-1) if mixture.scoring_func == "softmax" else scores_TX.sigmoid()
        experts_TC = merits(parts_TX, mixture, correction_X).topk(mixture.experts_per_token, dim=-1).indices
        weights_TC = _normalise_weights(parts_TX.gather(-1, experts_TC), mixture)
    factor = mixture.routed_scaling_factor
    return experts_TC, weights_TC if factor == 1.0 else weights_TC * factor


def _normalise_weights(weights_TC: Tensor, mixture: MixtureSpec) -> Tensor:
    """The weights, or their shares of their sum."""
    if mixture.routing == "all":
        return weights_TC
    total_T1 = weights_TC.sum(dim=-1, keepdim=True)
    if mixture.routing_eps is not None:
        total_T1 = total_T1 + mixture.routing_eps
    return weights_TC / (total_T1 if mixture.routing_floor is None else total_T1.clamp(min=mixture.routing_floor))


def merits(parts_TX: Tensor, mixture: MixtureSpec, correction_X: Tensor | None) -> Tensor:
    """What experts are chosen by: what `Scoring` makes of their scores, with the correction; -inf outside the best groups."""
    merits_TX = parts_TX if correction_X is None else parts_TX + correction_X
    if mixture.expert_groups == 1:
        return merits_TX
    merits_TGX = merits_TX.unflatten(-1, (mixture.expert_groups, -1))
    groups_TG = merits_TGX.topk(mixture.group_top, dim=-1).values.sum(dim=-1)
    chosen = groups_TG.topk(mixture.groups_per_token, dim=-1).indices
    lost_TG = torch.ones_like(groups_TG, dtype=torch.bool).scatter(-1, chosen, False)
    return merits_TGX.masked_fill(lost_TG[..., None], -math.inf).flatten(-2)


class Experts(nn.Module):
    """The gated MLPs of all experts of a layer."""

    def __init__(self, config: ModelConfig, mixture: MixtureSpec) -> None:
        super().__init__()
        experts, size = mixture.num_experts, mixture.expert_size
        self.gate_up = ExpertLinear(experts, config.hidden_size, 2 * size, bias=config.mlp_bias)
        self.down = ExpertLinear(experts, size, config.hidden_size, bias=config.mlp_bias)
        self.gated = make_gated(config)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        gate, up = self.gate_up(x, expert).chunk(2, dim=-1)
        return self.down(self.gated(gate, up), expert)


class Mixture(nn.Module):
    """Router and experts. Tokens are grouped by expert: the host waits for the device once, however many experts there are."""

    def __init__(self, config: ModelConfig, mixture: MixtureSpec) -> None:
        super().__init__()
        self.mixture = mixture
        exact = mixture.scoring_func == "sigmoid" or mixture.score_correction  # a small difference decides between experts
        router = FloatLinear if exact else Linear
        self.router = router(config.hidden_size, [mixture.num_experts], bias=config.mlp_bias)
        self.correction = nn.Parameter(torch.zeros(mixture.num_experts)) if mixture.score_correction else None
        self.experts = Experts(config, mixture)
        self.mine = range(mixture.num_experts)
        """Numbers of the experts whose weights are on this rank."""
        self.summed: Callable[[Tensor], Tensor] = lambda x: x
        """Adds what experts elsewhere make."""
        self.shared, self.shared_gate = None, None
        if mixture.shared_expert_size is not None:
            self.shared = GatedMLP(config, mixture.shared_expert_size)
            self.shared_gate = Linear(config.hidden_size, [1], bias=False) if mixture.shared_expert_gate else None

    def forward(self, x_TE: Tensor) -> Tensor:
        out_TE = self.chosen(x_TE, *route(self.router(x_TE), self.mixture, self.correction))
        if self.shared is not None:
            shared_TE = self.shared(x_TE)
            out_TE = out_TE + (shared_TE if self.shared_gate is None else self.shared_gate(x_TE).sigmoid() * shared_TE)
        return out_TE.to(x_TE.dtype)

    def chosen(self, x_TE: Tensor, experts_TC: Tensor, weights_TC: Tensor) -> Tensor:
        """The weighted sum of each token's experts, float32 [T, E]."""
        order = experts_TC.flatten().argsort(stable=True)  # pairs of a token and an expert, by expert and then by token
        counts = experts_TC.flatten().bincount(minlength=self.mixture.num_experts).tolist()
        tokens, weights = order // experts_TC.shape[1], weights_TC.flatten()[order, None]
        out_TE = torch.zeros_like(x_TE, dtype=torch.float32)
        begin = 0
        for expert, count in enumerate(counts):
            if count and expert in self.mine:
                mine = tokens[begin : begin + count]
                update = self.experts(x_TE.index_select(0, mine), expert) * weights[begin : begin + count]
                out_TE.index_add_(0, mine, update)  # no token is twice among them: the order is that of the experts
            begin += count
        return self.summed(out_TE)


class ExpertsBesideMLP(Mixture):
    """norm(mlp(norm(x))) + norm(experts(norm(x))), where the router reads a norm of x of its own (Gemma 4)."""

    def __init__(self, config: ModelConfig, mixture: MixtureSpec, size: int) -> None:
        """`size`: width of the MLP beside the experts."""
        super().__init__(config, mixture)
        self.shared = GatedMLP(config, size)
        self.shared_norm, self.shared_post_norm = (make_norm(config, config.hidden_size) for _ in range(2))
        self.experts_norm, self.experts_post_norm = (make_norm(config, config.hidden_size) for _ in range(2))
        self.router_norm = make_norm(config, config.hidden_size)
        self.expert_scale = nn.Parameter(torch.ones(mixture.num_experts))
        """A factor of each expert's weight, [X]."""

    def forward(self, x_TE: Tensor) -> Tensor:
        out_TE = self.chosen(self.experts_norm(x_TE), *self.route(x_TE)).to(x_TE.dtype)
        return self.shared_post_norm(self.shared(self.shared_norm(x_TE))) + self.experts_post_norm(out_TE)

    def route(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """See `route`; weights are multiplied by the experts' scales."""
        experts_TC, weights_TC = route(self.router(self.router_norm(x_TE)), self.mixture, self.correction)
        return experts_TC, weights_TC * self.expert_scale[experts_TC]
