"""Tokens drawn where each rank has the scores of some of the vocabulary: the ranks exchange the best of their parts alone.

Shapes: R rows · M tokens of this rank's part of the vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attend.model.parallel.group import ProcessGroup
from attend.model.sampling import UNSCORED, add_noise, temperatures_and_keys
from attend.model.sampling_plan import Draw


def draw_over_ranks(scores_RM: Tensor, first: int, draws: Sequence[Draw], group: ProcessGroup) -> Tensor:
    """Token ids int64 [R], the same on every rank as `attend.model.sampling.sample` draws from the whole vocabulary's scores;
    UNSCORED where a row has no finite score. `first` is the first token of this rank's part.
    """
    scores_RM = scores_RM.float()
    temperatures, keys = temperatures_and_keys(draws)
    best_R, tokens_R = _best(scores_RM, first, group)
    if any(temperatures):
        scores_RM = add_noise(scores_RM, temperatures, keys, first, best_R[:, None])
        best_R, tokens_R = _best(scores_RM, first, group)
    return tokens_R.masked_fill(~best_R.isfinite(), UNSCORED)


def _best(scores_RM: Tensor, first: int, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """The largest score of each row over all ranks, float32 [R], and its token: of equal ones the first, of NaN any."""
    best_R, places_R = scores_RM.max(dim=-1)
    pair_2R = torch.stack((best_R.double(), (places_R + first).double()))  # doubles hold both
    pairs_N2R = group.gather(pair_2R)
    best_R, ranks_R = pairs_N2R[:, 0].max(dim=0)
    tokens_R = pairs_N2R[:, 1].gather(0, ranks_R[None])[0]
    return best_R.float(), tokens_R.long()
