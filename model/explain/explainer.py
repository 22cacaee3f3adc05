"""What a model does with a text: which tokens each token attends to, the distribution of the next token, and the prediction of
each layer.

Computed by the reference equations in float32 from the served weights, beside the engine and never in its steps.

Shapes: T tokens · E model width · L layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attend.model.config import ModelConfig
from attend.model.errors import EngineFailed
from attend.model.explain.next_tokens import NextTokens, predict_next_tokens
from attend.model.explain.recording_attention import HeadWeights, RecordingAttention
from attend.model.explain.reference import reference
from attend.model.net.transformer import Decoder


@dataclass(frozen=True, slots=True)
class Question:
    """A text, and what is to be computed of it."""

    tokens: tuple[int, ...]
    """Token ids of the text, at least one."""
    layers: tuple[int, ...]
    """Layers whose attention is kept."""
    heads: tuple[int, ...]
    """Query heads whose attention is kept, in each of these layers."""
    scores: bool = False
    """True if the scores before the softmax are kept too."""
    top: int = 1
    """How many of the likeliest next tokens to give at each position; 0 counts as 1."""
    lens: int = 0
    """How many of the likeliest tokens to give of each layer, by the logit lens (nostalgebraist 2020); 0: none."""


@dataclass(frozen=True, slots=True)
class LayerView:
    """The attention of one layer."""

    layer: int
    kind: Literal["attention", "state"]
    """"state" for a recurrent layer, which has no attention probabilities."""
    window: int | None
    head_weights: HeadWeights | None
    group: int = 1
    """Query heads that share a key/value head."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What was computed for a question."""

    layers: tuple[LayerView, ...]
    next_tokens: NextTokens
    """The distribution of the next token after each token; `asked` is that of the token which follows in the text."""
    lens: NextTokens | None
    """The same distributions from each layer's output, by the logit lens: [L * T], layer after layer."""


class Explainer:
    """Answers questions about the served model. Not for two threads at once."""

    def __init__(self, decoder: Decoder) -> None:
        """`decoder`: the decoder whose matrices serve, or stand for those that do."""
        self._between: Callable[[], None] = lambda: None
        self._net = reference(decoder, lambda: self._between())
        self.config: ModelConfig = decoder.config
        self.num_layers, self.num_heads = self.config.num_layers, self.config.num_heads
        attending = (layer for layer, spec in enumerate(self.config.layers) if spec.recurrence is None)
        self.last_attention = max(attending, default=0)
        """The last layer that has weights."""

    @torch.inference_mode()
    def explain(self, question: Question, between: Callable[[], None] = lambda: None) -> Explanation:
        """`between` is called between slices of some milliseconds: what it raises ends the work. One core is used.

        Raises EngineFailed where the model's numbers are not finite.
        """
        torch.set_num_threads(1)  # counts for the thread that calls it
        self._between = between
        watched = RecordingAttention(self.config, question.layers, question.heads, question.scores)
        outputs = self._outputs(torch.tensor(question.tokens), watched, every=bool(question.lens))
        after_T = torch.tensor((*question.tokens[1:], 0))
        next_tokens = predict_next_tokens(self._net, outputs[-1], after_T, max(1, question.top))
        if not next_tokens.entropy_N.isfinite().all():
            raise EngineFailed("the model's logits are not finite")
        lens = None
        if question.lens:
            lens = predict_next_tokens(self._net, torch.cat(outputs), after_T.repeat(len(outputs)), question.lens)
        return Explanation(tuple(self._view(layer, watched) for layer in question.layers), next_tokens, lens)

    def _outputs(self, tokens_T: Tensor, watched: RecordingAttention, *, every: bool) -> Sequence[Tensor]:
        """The final norm of the last layer's output, or of every layer's: [T, E] each. See `Decoder.forward`."""
        net, positions_T, outputs = self._net, torch.arange(len(tokens_T)), []
        for layer, x_TE in enumerate(net.outputs(tokens_T, positions_T, watched)):
            if every or layer == self.num_layers - 1:
                outputs.append(net.norm(x_TE))
        return outputs

    def _view(self, layer: int, watched: RecordingAttention) -> LayerView:
        spec = self.config.layer(layer)
        if spec.recurrence is not None:
            return LayerView(layer, "state", None, None)
        return LayerView(
            layer, "attention", spec.attention.window, watched.weights_by_layer[layer], spec.num_heads // spec.num_kv_heads
        )
