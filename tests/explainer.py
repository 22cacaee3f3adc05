"""An explainer that can be computed by hand: it attends evenly, and expects the byte after each byte.

Each layer expects a byte further on than the one below.
"""

from collections.abc import Callable

import torch

from attend.model.explain.explainer import Explanation, HeadWeights, LayerView, NextTokens, Question

WINDOW, SINK, ENTROPY = 2, 0.25, 1.5


class FakeExplainer:
    """Layer 0 attends to everything alike, layer 1 to two tokens beside a sink, layer 2 keeps a state."""

    num_layers, num_heads = 3, 2

    def __init__(self) -> None:
        self.asked: list[Question] = []
        self.during: Callable[[Callable[[], None]], None] = lambda between: None
        """What happens while it computes."""

    def explain(self, question: Question, between: Callable[[], None]) -> Explanation:
        self.asked.append(question)
        self.during(between)
        tokens_T = torch.tensor(question.tokens)
        lens = None
        if question.lens:
            layers_N = torch.arange(self.num_layers).repeat_interleave(len(tokens_T))
            lens = successors(tokens_T.repeat(self.num_layers) + layers_N, question.lens)
        views = tuple(self._view(layer, len(tokens_T), question) for layer in question.layers)
        return Explanation(views, successors(tokens_T, max(1, question.top)), lens)

    def _view(self, layer: int, length: int, question: Question) -> LayerView:
        if layer == 2:
            return LayerView(layer, "state", None, None)
        window = WINDOW if layer == 1 else None
        seen_TT = torch.ones(length, length).tril()
        if window:
            seen_TT = seen_TT.triu(1 - window)
        left = 1 - SINK if window else 1
        weights_TT = seen_TT / seen_TT.sum(dim=-1, keepdim=True) * left
        heads = len(question.heads)
        sinks_NT = torch.full((heads, length), SINK) if window else None
        scores_NTT = torch.arange(length).float().expand(heads, length, length) if question.scores else None
        return LayerView(
            layer, "attention", window, HeadWeights(weights_TT.expand(heads, -1, -1), sinks_NT, scores_NTT), group=2
        )


def successors(tokens_N: torch.Tensor, count: int) -> NextTokens:
    """The byte after each, then the one after that, each a nat less likely; what comes is less likely from place to place."""
    best_NG = (tokens_N[:, None] + 1 + torch.arange(count)) % 256
    logprobs_NG = -0.5 - torch.arange(count).float().expand(len(tokens_N), count)
    asked_N = -2.5 - torch.arange(len(tokens_N)).float()
    return NextTokens(best_NG, logprobs_NG, asked_N, torch.full((len(tokens_N),), ENTROPY))
