"""Results to protobuf messages, and size checks of lists before they are read: a message may hold four million ids."""

from collections.abc import Sequence
from typing import Any

from attend.model.engine.request import EngineInfo, FinishReason, TokenLogprob
from attend.model.errors import ContextTooLong, InvalidRequest
from attend.model.params import (
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    at_most,
)
from attend.model.text.grammar import MAX_CHOICES, MAX_TEXT_BYTES
from attend.service.chat.messages import MAX_CALLS, check_count
from attend.service.chat.parts import CallArguments, CallStart, Reasoning
from attend.service.generation.cooperative import yield_to_loop
from attend.service.generation.embed import EmbeddingResult, most_inputs
from attend.service.generation.explain import ExplainResult, ExplainService, rows, top_pairs
from attend.service.generation.fitting import check_total
from attend.service.merging import merge_chunks
from attend.service.records import MAX_TOKENS, Chunk, PromptPart
from attend.v1 import generation_pb2 as pb

SCORES = 64
"""Tokens whose log probabilities are written together, up to 21 each: less than a millisecond of work."""

REASONS: dict[FinishReason, Any] = {reason: pb.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason}
MAX_LISTED = 4096
"""Layers or heads that a call may name: no model has more."""
VECTORS = 8
"""That are written before the event loop has its next turn: about a millisecond of work."""
ROWS = 32
"""The same of tokens, or rows of weights."""


Request = pb.GenerateRequest | pb.ChatRequest


def check_sizes(request: Request, info: EngineInfo) -> None:
    """Refuse lists that are too long to be carried out. Raises InvalidRequest with the field named."""
    if isinstance(request, pb.GenerateRequest):
        limit = info.max_model_len
        _check_context("prompt", [len(request.token_ids.ids)], request, limit)
        at_most("resume_token_ids", request.resume_token_ids.ids, limit, "token ids, as many as the context")
    else:
        check_count(request.messages)
        for at, message in enumerate(request.messages):
            at_most(f"messages[{at}].tool_calls", message.tool_calls, MAX_CALLS, "calls")
    if request.sampling.HasField("top_p") and request.sampling.top_p == 0:  # what an unset number is to other messages
        raise InvalidRequest("top_p must be a number above 0 and at most 1; got 0", "top_p")
    decoding, stopping = request.decoding, request.stopping
    at_most("allowed_token_ids", decoding.allowed_token_ids, info.vocab_size, "token ids, as many as the vocabulary has")
    at_most("stop_token_ids", stopping.stop_token_ids, MAX_STOP_TOKENS, "ids")
    at_most("stop", stopping.stop_strings, MAX_STOP_STRINGS, "strings")
    at_most("bad_words", decoding.bad_words, MAX_BAD_WORDS, "strings")
    at_most("logit_bias", decoding.logit_bias, MAX_BIASES, "entries")
    at_most("choice", decoding.choice.choices, MAX_CHOICES, "strings")
    characters = sum(map(len, decoding.choice.choices))
    if characters > MAX_TEXT_BYTES:
        raise InvalidRequest(f"choice must be at most {MAX_TEXT_BYTES} bytes; got at least {characters}", "choice")


def _check_context(name: str, sizes: Sequence[int], request: pb.GenerateRequest | pb.EmbedRequest, limit: int) -> None:
    if (most := max(sizes, default=0)) > limit and not request.HasField("truncate_prompt_tokens"):
        size = f"{limit} tokens, which a prompt of {most} exceeds"
        raise ContextTooLong(f"{name}: this model's maximum context length is {size}", name)


def check_embed_sizes(request: pb.EmbedRequest, info: EngineInfo) -> None:
    """The same of the texts to embed."""
    at_most("input", request.inputs, most_inputs(info), "texts")
    sizes = [len(given.token_ids.ids) for given in request.inputs]
    _check_context("input", sizes, request, info.max_model_len)
    if not request.HasField("truncate_prompt_tokens"):
        check_total("input", sum(sizes))


def check_explain_sizes(request: pb.ExplainRequest) -> None:
    """The same of a text to explain."""
    for name in ("token_ids", "answer_token_ids"):
        count = len(getattr(request, name).ids)
        if count > MAX_TOKENS:
            size = f"at most {MAX_TOKENS} tokens; {name} has {count}"
            raise ContextTooLong(f"prompt: /v1/attention takes {size}", "prompt")
    at_most("layers", request.layers.numbers, MAX_LISTED, "numbers")
    at_most("heads", request.heads.numbers, MAX_LISTED, "numbers")


class Responses:
    """Chunks as the messages of one stream."""

    def __init__(self, options: pb.ResponseOptions, fingerprint: str, request_id: str) -> None:
        self._options = options
        self._fingerprint = fingerprint
        self._request_id = request_id

    async def of(self, chunks: Sequence[Chunk]) -> pb.GenerateResponse:
        """The message of chunks that came together: one output for each answer, so that a client need not look for a second."""
        return await self.full_response(merge_chunks(chunks) if len(chunks) > 1 else chunks)

    async def full_response(self, chunks: Sequence[Chunk]) -> pb.GenerateResponse:
        """One message; that with the first chunk of the first answer has the prompt too. A long one is made in short parts."""
        timing = _timing(chunks) if self._options.timing else None
        response = pb.GenerateResponse(seed=chunks[0].seed, system_fingerprint=self._fingerprint, timing=timing)
        prompt = next((chunk.prompt for chunk in chunks if chunk.index == 0), None)
        if prompt is not None:
            await _tell_prompt(response.prompt_info, prompt, self._options)
        for chunk in chunks:
            output = response.outputs.add()
            await _tell_output(output, chunk, self._options)
            _tell_parts(output, chunk, self._request_id)
        return response


async def _tell_prompt(info: pb.PromptInfo, prompt: PromptPart, options: pb.ResponseOptions) -> None:
    info.num_prompt_tokens, info.num_cached_tokens = len(prompt.token_ids), prompt.num_cached
    if options.prompt_token_ids:
        info.token_ids.extend(prompt.token_ids)
    if options.HasField("prompt_logprobs"):
        info.logprobs.append(0.0)
        info.top_logprobs.add()
        await _tell_scores(info, prompt.logprobs, top=True)


async def _tell_scores(message: pb.PromptInfo | pb.Output, scores: Sequence[TokenLogprob], *, top: bool) -> None:
    for start in range(0, len(scores), SCORES):
        if start:
            await yield_to_loop()
        some = scores[start : start + SCORES]
        message.logprobs.extend(scored.logprob for scored in some)
        if top:
            message.top_logprobs.extend(map(_top, some))


def _top(token_logprob: TokenLogprob) -> pb.TopLogprobs:
    return pb.TopLogprobs(
        token_ids=[token for token, _ in token_logprob.top], logprobs=[value for _, value in token_logprob.top]
    )


def _timing(chunks: Sequence[Chunk]) -> pb.Timing | None:
    """Milliseconds of the slowest answer that ended."""
    times = [chunk.times for chunk in chunks if chunk.times is not None]
    if not times:
        return None
    return pb.Timing(
        **{f"{name}_ms": max(getattr(each, name) for each in times) * 1e3 for name in ("queue", "prefill", "decode")}
    )


async def _tell_output(output: pb.Output, chunk: Chunk, options: pb.ResponseOptions) -> None:
    output.index, output.num_tokens = chunk.index, chunk.num_tokens
    output.text = chunk.text if chunk.prompt is None else chunk.prompt.text + chunk.text
    if options.output_token_ids:
        output.token_ids.extend(chunk.token_ids)
    await _tell_scores(output, chunk.logprobs, top=bool(options.top_logprobs))
    if chunk.finish_reason is not None:
        reason = pb.FINISH_REASON_TOOL_CALLS if chunk.ends_in_calls else REASONS[chunk.finish_reason]
        output.finish_info.finish_reason = reason
        output.finish_info.num_output_tokens = chunk.num_tokens
        if isinstance(chunk.stop, str):
            output.finish_info.stop_string = chunk.stop
        elif chunk.stop is not None:
            output.finish_info.stop_token_id = chunk.stop


def _tell_parts(output: pb.Output, chunk: Chunk, request_id: str) -> None:
    """The reasoning and the calls of a chunk."""
    output.num_reasoning_tokens = chunk.num_reasoning_tokens
    calls: dict[int, pb.ToolCall] = {}

    def call(index: int) -> pb.ToolCall:
        if index not in calls:
            calls[index] = output.tool_calls.add(index=index)
        return calls[index]

    for part in chunk.parts or ():
        match part:
            case Reasoning(text):
                output.reasoning += text
            case CallStart(index, name):
                begun = call(index)
                begun.id, begun.name = chunk.call_id(request_id, index), name
            case CallArguments(index, text):
                call(index).arguments += text


async def embed_response(result: EmbeddingResult, fingerprint: str) -> pb.EmbedResponse:
    """The answer. Other work on the event loop runs between its vectors."""
    response = pb.EmbedResponse(num_prompt_tokens=result.num_tokens, system_fingerprint=fingerprint)
    for at, vector in enumerate(result.vectors):
        if at % VECTORS == VECTORS - 1:
            await yield_to_loop()
        response.embeddings.add(values=vector.tolist())
    return response


async def explain_response(result: ExplainResult, explaining: ExplainService) -> pb.ExplainResponse:
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
        if at % ROWS == 0:
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
                if at % ROWS == 0:
                    await yield_to_loop()
                guesses.append(_top_pairs(found.lens, at, found.lens.best_NG.shape[1]))
    return response


async def _fill(head: pb.HeadAttention, seen: Any, index: int) -> None:
    if seen.sinks_NT is not None:
        head.sinks.extend(seen.sinks_NT[index].tolist())
    for numbers, matrix in ((head.weights, seen.weights_NTT), (head.scores, seen.scores_NTT)):
        for at, row in enumerate(() if matrix is None else rows(matrix[index])):
            if at % ROWS == 0:
                await yield_to_loop()
            numbers.extend(row.tolist())


def _next_token(result: ExplainResult, at: int) -> pb.ExpectedToken:
    """The distribution of the token after place `at`."""
    found = result.explanation.next_tokens
    return pb.ExpectedToken(entropy=float(found.entropy_N[at]), top_logprobs=_top_pairs(found, at, result.command.top_logprobs))


def _top_pairs(found: Any, at: int, count: int) -> pb.TopLogprobs:
    best = top_pairs(found.best_NG[at], found.logprobs_NG[at], count)
    return pb.TopLogprobs(token_ids=[token for token, _ in best], logprobs=[value for _, value in best])
