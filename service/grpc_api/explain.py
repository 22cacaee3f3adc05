"""Explain over gRPC: size checks, and the result to protobuf in parts."""

from typing import Any

from attend.model.errors import ContextTooLong
from attend.model.params import at_most
from attend.service.generation.cooperative import yield_to_loop
from attend.service.generation.explain import ExplainResult, ExplainService, rows, top_pairs
from attend.service.records import MAX_TOKENS
from attend.v1 import generation_pb2 as pb

AT_ONCE = 32
"""Tokens, or rows of weights, that are written before the event loop has its next turn."""
MAX_LISTED = 4096
"""Layers or heads that a call may name: no model has more."""


def check_sizes(request: pb.ExplainRequest) -> None:
    """Refuse lists that are too long to be carried out, while they are still protobuf's: a message may hold millions of ids.

    Raises InvalidRequest with the field named.
    """
    for name in ("token_ids", "answer_token_ids"):
        count = len(getattr(request, name).ids)
        if count > MAX_TOKENS:
            size = f"at most {MAX_TOKENS} tokens; {name} has {count}"
            raise ContextTooLong(f"prompt: /v1/attention takes {size}", "prompt")
    at_most("layers", request.layers.numbers, MAX_LISTED, "numbers")
    at_most("heads", request.heads.numbers, MAX_LISTED, "numbers")


async def to_response(result: ExplainResult, explaining: ExplainService) -> pb.ExplainResponse:
    """The answer. Other work on the event loop runs between two heads."""
    service, explainer, found = explaining.service, explaining.explainer, result.explanation
    response = pb.ExplainResponse(
        num_prompt_tokens=result.num_prompt_tokens,
        num_layers=explainer.num_layers,
        num_heads=explainer.num_heads,
        system_fingerprint=service.engine.info.fingerprint,
        next=_next_token(result, len(result.tokens) - 1),
    )
    for at, token in enumerate(result.tokens):
        if at % AT_ONCE == 0:
            await yield_to_loop()
        place = response.tokens.add(token_id=token, token=service.tokenizer.text_of(token))
        if at:
            place.logprob = float(found.next_tokens.asked_N[at - 1])
            place.expected.CopyFrom(_next_token(result, at - 1))
    for view in found.layers:
        kind = pb.LayerAttention.KIND_STATE if view.head_weights is None else pb.LayerAttention.KIND_ATTENTION
        layer = response.layers.add(layer=view.layer, kind=kind, window=view.window)
        for index, head in enumerate(result.heads if view.head_weights is not None else ()):
            await _fill(layer.heads.add(head=head, key_value_head=head // view.group), view.head_weights, index)
    if found.lens is not None:
        count = len(result.tokens)
        for number in range(explainer.num_layers):
            guesses = response.logit_lens.add(layer=number).guesses
            for at in range(number * count, (number + 1) * count):
                if at % AT_ONCE == 0:
                    await yield_to_loop()
                guesses.append(_top(found.lens, at, found.lens.best_NG.shape[1]))
    return response


async def _fill(head: pb.HeadAttention, seen: Any, index: int) -> None:
    if seen.sinks_NT is not None:
        head.sinks.extend(seen.sinks_NT[index].tolist())
    for numbers, matrix in ((head.weights, seen.weights_NTT), (head.scores, seen.scores_NTT)):
        for at, row in enumerate(() if matrix is None else rows(matrix[index])):
            if at % AT_ONCE == 0:
                await yield_to_loop()
            numbers.extend(row.tolist())


def _next_token(result: ExplainResult, at: int) -> pb.ExpectedToken:
    """The distribution of the token after place `at`."""
    found = result.explanation.next_tokens
    return pb.ExpectedToken(entropy=float(found.entropy_N[at]), top_logprobs=_top(found, at, result.command.top_logprobs))


def _top(found: Any, at: int, count: int) -> pb.TopLogprobs:
    best = top_pairs(found.best_NG[at], found.logprobs_NG[at], count)
    return pb.TopLogprobs(token_ids=[token for token, _ in best], logprobs=[value for _, value in best])
