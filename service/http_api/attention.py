"""POST /v1/attention: the result as JSON, made while it is written."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from attend.model.text.tokenizer import Tokenizer
from attend.service.contract.commands import to_explanation
from attend.service.contract.routes import ATTENTION
from attend.service.contract.texts import (
    Alternative,
    Attention,
    AttentionRequest,
    HeadAttention,
    LayerAttention,
    LayerGuesses,
    NextToken,
    Place,
)
from attend.service.generation.explain import ExplainResult, ExplainService, explainable, rows, top_pairs
from attend.service.http_api.answering import compute
from attend.service.http_api.logprobs import finite
from attend.service.http_api.route_deps import RouteDeps, bind, origin_of
from attend.service.observe.metrics import RequestRecord
from attend.service.records import ExplainCommand
from attend.service.remarks import Remarks


def add_attention(router: APIRouter, deps: RouteDeps) -> None:
    """Add /v1/attention."""

    @bind(router, ATTENTION)
    async def explain_attention(request: Request) -> Response:
        """Attention weights of a text, log probabilities of its tokens, and the logit lens of each layer."""

        def read(fields: dict[str, Any], remarks: Remarks) -> tuple[ExplainService, ExplainCommand]:
            explaining = explainable(deps.explaining)
            return explaining, to_explanation(AttentionRequest.read(fields, remarks), **origin_of(request))

        async def work(
            explaining: ExplainService, command: ExplainCommand, record: RequestRecord, resources: ExitStack
        ) -> tuple[Any, int]:
            explained = await explaining.explain(command, record, resources)
            return AttentionWriter(explaining, explained).full_response(), len(explained.tokens)

        return await compute(deps, request, read, work, deps.most_bytes)


class AttentionWriter:
    """The answer to one call. Its lists are iterators: see `json_pieces`."""

    def __init__(self, explaining: ExplainService, result: ExplainResult) -> None:
        self._explaining = explaining
        self._result = result
        self._tokenizer: Tokenizer = explaining.service.tokenizer

    def full_response(self) -> Attention:
        """The answer of POST /v1/attention; its weights are written piece by piece."""
        result, service, explainer = self._result, self._explaining.service, self._explaining.explainer
        count, command = len(result.tokens), result.command
        answer: Attention = {
            "id": f"attn-{command.request_id}",
            "object": "attention",
            "created": int(time.time()),
            "model": command.model or service.model_name,
            "system_fingerprint": service.engine.info.fingerprint,
            "num_layers": explainer.num_layers,
            "num_heads": explainer.num_heads,
            "num_prompt_tokens": result.num_prompt_tokens,
            "tokens": self._places(),
            "next": self._next_token(count - 1),
            "layers": list(self._layers()),
            "logit_lens": [] if result.explanation.lens is None else list(self._lens(explainer.num_layers)),
            "usage": {"prompt_tokens": count, "completion_tokens": 0, "total_tokens": count},
        }
        if result.explanation.lens is None:
            del answer["logit_lens"]
        return answer

    def _places(self) -> Iterator[Place]:
        for at, token in enumerate(self._result.tokens):
            text, scored = self._tokenizer.text_of(token), self._result.explanation.next_tokens.asked_N
            if at:
                logprob = finite(float(scored[at - 1]))
                yield {"id": token, "token": text, "logprob": logprob, **self._next_token(at - 1)}
            else:
                yield {"id": token, "token": text, "logprob": None, "entropy": None, "top_logprobs": None}

    def _next_token(self, at: int) -> NextToken:
        """What is expected behind the token in place `at`."""
        found, top = self._result.explanation.next_tokens, self._result.command.top_logprobs
        best = self._alternatives(found.best_NG[at], found.logprobs_NG[at], top)
        return {"entropy": float(found.entropy_N[at]), "top_logprobs": best}

    def _alternatives(self, tokens: Any, logprobs: Any, count: int) -> list[Alternative]:
        return [
            {"id": token, "token": self._tokenizer.text_of(token), "logprob": finite(value)}
            for token, value in top_pairs(tokens, logprobs, count)
        ]

    def _layers(self) -> Iterator[LayerAttention]:
        for view in self._result.explanation.layers:
            heads = [] if view.head_weights is None else [self._head(view, *each) for each in enumerate(self._result.heads)]
            yield {"layer": view.layer, "kind": view.kind, "window": view.window, "heads": heads}

    def _head(self, view: Any, at: int, head: int) -> HeadAttention:
        seen = view.head_weights
        result: HeadAttention = {"head": head, "key_value_head": head // view.group, "weights": rows(seen.weights_NTT[at])}
        if seen.sinks_NT is not None:
            result["sinks"] = seen.sinks_NT[at].numpy()
        if seen.scores_NTT is not None:
            result["scores"] = rows(seen.scores_NTT[at])
        return result

    def _lens(self, layers: int) -> Iterator[LayerGuesses]:
        found, count = self._result.explanation.lens, len(self._result.tokens)
        assert found is not None
        for layer in range(layers):
            places = zip(found.best_NG[layer * count :], found.logprobs_NG[layer * count :], strict=True)
            guessed = (
                self._alternatives(*place, found.best_NG.shape[1]) for _, place in zip(range(count), places, strict=False)
            )
            yield {"layer": layer, "guesses": guessed}
