"""POST /v1/attention: a body to an ExplainCommand, and what was found to JSON that is made while it is written."""

import time
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from attend.model.text.tokenizer import Tokenizer
from attend.service.contract.answers import Count, Made, ObjectKind, PromptUsage
from attend.service.contract.shapes import MAYBE, Shape
from attend.service.generation.explain import (
    Explained,
    Explaining,
    pairs,
    rows,
)
from attend.service.http_api.logprobs import finite


class Alternative(Shape):
    """A token that may stand in a place."""

    id: int = Field(examples=[7])
    """Its token id."""
    token: str = Field(examples=[" there"])
    """As it is written; a part of a character as `bytes:` and its bytes."""
    logprob: float = Field(examples=[-0.5])
    """Natural log probability."""


class NextToken(Shape):
    """What is expected behind the last token."""

    entropy: float = Field(examples=[1.5])
    """In nats."""
    top_logprobs: list[Alternative]
    """The likeliest tokens."""


class Place(Shape):
    """A token of the text, and what the model expected in its place."""

    id: int
    """Its token id."""
    token: str
    """As it is written."""
    logprob: float | None
    """Natural log probability, given what stands before; null for the first token."""
    entropy: float | None
    """Of what was expected, in nats; null for the first token."""
    top_logprobs: list[Alternative] | None
    """The likeliest tokens; null for the first token."""


class HeadAttention(Shape):
    """What a query head of a layer attends to."""

    head: Count
    """Its number, from 0."""
    key_value_head: Count
    """The number of the key and value head that it shares."""
    weights: list[list[float]] = Field(examples=[[[1.0], [0.25, 0.75]]])
    """Of each token for itself and for those before it. A row sums to 1, less the sink's share."""
    sinks: list[float] = MAYBE
    """The share of each token's attention that goes to the head's sink, where the model has sinks."""
    scores: list[list[float]] = MAYBE
    """Before mask and softmax, where the request has `scores`."""


class LayerAttention(Shape):
    """A layer's attention."""

    layer: Count
    """Its number, from 0."""
    kind: Literal["attention", "state"]
    """A layer that keeps a state in place of keys and values has no weights."""
    window: int | None
    """Tokens that a token sees at most, itself included; null: all before it."""
    heads: list[HeadAttention]
    """The chosen query heads."""


class LayerGuesses(Shape):
    """What a layer would say, were it the last."""

    layer: Count
    """Its number, from 0."""
    guesses: list[list[Alternative]]
    """Of each token: what comes after it, the likeliest first."""


class TextUsage(PromptUsage):
    """Tokens of the call."""

    completion_tokens: Literal[0]
    """None are made."""


_FIRST = {"id": 5, "token": "Hi", "logprob": None, "entropy": None, "top_logprobs": None}
_SECOND = {"id": 7, "token": " there", "logprob": -0.5}
_TOKENS = [_FIRST, _SECOND | {"entropy": 1.5, "top_logprobs": [_SECOND]}]


class Attention(Made):
    """What the model does with a text."""

    id: str = Field(examples=["attn-8d3f"])
    """The call's id after `attn-`."""
    object: ObjectKind[Literal["attention"]]
    num_layers: int = Field(examples=[6])
    """Layers of the model."""
    num_heads: int = Field(examples=[6])
    """Query heads of a layer."""
    num_prompt_tokens: int = Field(examples=[2])
    """Tokens before the answer."""
    tokens: list[Place] = Field(examples=[_TOKENS])
    """Those of the prompt, then those of the answer."""
    next: NextToken
    """What would come after the text."""
    layers: list[LayerAttention]
    """The chosen layers."""
    logit_lens: list[LayerGuesses] = MAYBE
    """Where the request has `logit_lens`."""
    usage: TextUsage
    """Token counts."""


class AttentionWriter:
    """The answer to one call. Its lists are iterators: see `pieces`."""

    def __init__(self, explaining: Explaining, explained: Explained) -> None:
        self._explaining = explaining
        self._explained = explained
        self._tokenizer: Tokenizer = explaining.service.tokenizer

    def whole(self) -> dict[str, Any]:
        """The answer, as class Attention describes it."""
        told, service, explainer = self._explained, self._explaining.service, self._explaining.explainer
        count, command = len(told.tokens), told.command
        lens = {} if told.explanation.lens is None else {"logit_lens": list(self._lens(explainer.num_layers))}
        return {
            "id": f"attn-{command.request_id}",
            "object": "attention",
            "created": int(time.time()),
            "model": command.model or service.model_name,
            "system_fingerprint": service.engine.info.fingerprint,
            "num_layers": explainer.num_layers,
            "num_heads": explainer.num_heads,
            "num_prompt_tokens": told.num_prompt_tokens,
            "tokens": self._places(),
            "next": self._expected(count - 1),
            "layers": list(self._layers()),
            **lens,
            "usage": {"prompt_tokens": count, "completion_tokens": 0, "total_tokens": count},
        }

    def _places(self) -> Iterator[dict[str, Any]]:
        nothing = {"logprob": None, "entropy": None, "top_logprobs": None}
        for at, token in enumerate(self._explained.tokens):
            name = {"id": token, "token": self._tokenizer.text_of(token)}
            if at == 0:
                yield name | nothing
            else:
                logprob = finite(float(self._explained.explanation.next_tokens.asked_N[at - 1]))
                yield name | {"logprob": logprob} | self._expected(at - 1)

    def _expected(self, at: int) -> dict[str, Any]:
        """What is expected behind the token in place `at`."""
        found, top = self._explained.explanation.next_tokens, self._explained.command.top_logprobs
        best = self._alternatives(found.best_NG[at], found.logprobs_NG[at], top)
        return {"entropy": float(found.entropy_N[at]), "top_logprobs": best}

    def _alternatives(self, tokens: Any, logprobs: Any, count: int) -> list[dict[str, Any]]:
        return [
            {"id": token, "token": self._tokenizer.text_of(token), "logprob": finite(value)}
            for token, value in pairs(tokens, logprobs, count)
        ]

    def _layers(self) -> Iterator[dict[str, Any]]:
        for view in self._explained.explanation.layers:
            heads = [] if view.seen is None else [self._head(view.seen, *each) for each in enumerate(self._explained.heads)]
            yield {"layer": view.layer, "kind": view.kind, "window": view.window, "heads": heads}

    def _head(self, seen: Any, at: int, head: int) -> dict[str, Any]:
        told = {"head": head, "key_value_head": head // self._explaining.explainer.group, "weights": rows(seen.weights_NTT[at])}
        if seen.sinks_NT is not None:
            told["sinks"] = seen.sinks_NT[at].numpy()
        if seen.scores_NTT is not None:
            told["scores"] = rows(seen.scores_NTT[at])
        return told

    def _lens(self, layers: int) -> Iterator[dict[str, Any]]:
        found, count = self._explained.explanation.lens, len(self._explained.tokens)
        assert found is not None
        for layer in range(layers):
            places = zip(found.best_NG[layer * count :], found.logprobs_NG[layer * count :], strict=True)
            guessed = (
                self._alternatives(*place, found.best_NG.shape[1]) for _, place in zip(range(count), places, strict=False)
            )
            yield {"layer": layer, "guesses": guessed}
