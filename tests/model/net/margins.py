"""How clearly routers decide: what two exact computations may differ in must not change who is chosen."""

import torch
from torch import Tensor

from attend.model.net.experts import Mixture, merits


def margins(mixture: Mixture, scores_TX: Tensor) -> Tensor:
    """The least change of a router's scores that gives a token another expert, or another group of experts. [T].

    A sigmoid, or a part of a softmax, moves by a quarter of what its score moves by, at most.
    """
    spec, scores_TX = mixture.mixture, scores_TX.float()
    as_they_are = spec.scoring_func == "softmax" and mixture.correction is None  # a softmax changes no order
    softmax = scores_TX if as_they_are else scores_TX.softmax(dim=-1)
    parts_TX = softmax if spec.scoring_func == "softmax" else scores_TX.sigmoid()
    correction_X = None if mixture.correction is None else mixture.correction.float()
    chosen_T = _gap(merits(parts_TX, spec, correction_X), spec.experts_per_token)
    open_TX = parts_TX if correction_X is None else parts_TX + correction_X
    best = min(spec.group_top, open_TX.shape[-1])
    groups_TG = open_TX.unflatten(-1, (spec.expert_groups, -1)).topk(best, dim=-1).values.sum(-1)
    of_groups_T = _gap(groups_TG, spec.groups_per_token)
    return torch.minimum(chosen_T, of_groups_T) if as_they_are else 2 * torch.minimum(2 * chosen_T, of_groups_T)


def _gap(values_TN: Tensor, count: int) -> Tensor:
    """From the last of `count` to the next one."""
    ordered = values_TN.sort(dim=-1, descending=True).values
    if count == ordered.shape[-1]:
        return torch.full(ordered.shape[:-1], torch.inf)
    return ordered[..., count - 1] - ordered[..., count]
