"""Turns a plan into tensors, runs the decoder, draws tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model.engine.draws import draws_of, keep_to_grammars
from model.engine.graphs import DecodeGraphs
from model.engine.lookup import num_right
from model.engine.plan import Plan, Scheduled, StepResult
from model.engine.request import NO_SCORE, NO_TOKEN_LEFT, Request, TokenLogprob
from model.errors import DeviceFailed
from model.net.backends import AttentionBackend, BatchLayout, KVCache, Paged, Row
from model.net.native.decoder import NativeDecoder
from model.net.transformer import Decoder
from model.sampling import EXCLUDED, UNSCORED, logprobs, sample
from model.sampling_plan import Draw
from model.transfer import integers

if TYPE_CHECKING:  # triton is not there on every machine
    from model.net.triton.decoder import TritonDecoder

FAULTS = {UNSCORED: NO_SCORE, EXCLUDED: NO_TOKEN_LEFT}
DEVICE_ERRORS = ("CUDA error", "CUDA driver error", "cuDNN error", "Triton Error")
"""How the messages of errors of a device begin: torch has a type for some of them only."""
MEMORY_ERRORS = ("out of memory", "ALLOC_FAILED")
SCORED_AT_ONCE = 256
"""Prompt tokens whose logits live at the same time: a vocabulary of 128k makes that 128 MiB."""


@contextmanager
def device_errors() -> Iterator[None]:
    """Raise DeviceFailed for an error that every later step would meet too; a lack of memory is the step's own."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not any(name in text for name in DEVICE_ERRORS) or any(name in text for name in MEMORY_ERRORS):
            raise
        raise DeviceFailed(f"the device failed: {text}") from error


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that the device may still be busy with."""

    drawing: Sequence[Request] = ()
    tokens_R: Tensor | None = None
    """What they draw, on its way here."""
    ready: torch.cuda.Event | None = None
    """When it has come; None: it has."""
    logits_RV: Tensor | None = None
    prompt_logprobs: Mapping[str, Sequence[TokenLogprob]] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    """Of requests whose grammar failed before anything was drawn."""
    drafts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """A request with a draft draws once more after each of its tokens."""

    @device_errors()
    def result(self) -> StepResult:
        """Wait for the device. A row without a finite score is an error of its own request."""
        if self.ready is not None:
            self.ready.synchronize()  # and not the steps that were handed over since
        tokens = [] if self.tokens_R is None else self.tokens_R.tolist()
        pairs = list(zip((request.request_id for request in self.drawing), tokens, strict=True))
        firsts, more = _kept(pairs, self.drafts) if self.drafts else (pairs, {})
        return StepResult(
            tokens={name: token for name, token in firsts if token >= 0},
            errors={**{name: FAULTS[token] for name, token in firsts if token < 0}, **self.errors},
            logprobs=self._logprobs(tokens),
            prompt_logprobs=self.prompt_logprobs,
            more=more,
        )

    def _logprobs(self, tokens: Sequence[int]) -> dict[str, TokenLogprob]:
        rows = [row for row, request in enumerate(self.drawing) if request.logprobs is not None and tokens[row] >= 0]
        if not rows:
            return {}
        assert self.logits_RV is not None
        scored = _scored(self.logits_RV[rows], [tokens[row] for row in rows], [self.drawing[row].logprobs or 0 for row in rows])
        return {self.drawing[row].request_id: each for row, each in zip(rows, scored, strict=True)}


class ModelRunner:
    """A decoder, its KV cache, and the attention backend between them."""

    def __init__(
        self,
        net: "Decoder | NativeDecoder | TritonDecoder",
        backend: AttentionBackend,
        cache: KVCache,
        device: str,
        graphs: DecodeGraphs | None = None,
        draw: Callable[[Tensor, Sequence[Draw]], Tensor] = sample,
    ) -> None:
        """`graphs` compute the steps that fit them; `draw` is `sample`, or the same row by row."""
        self.net = net
        self.backend = backend
        self.cache = cache
        self.device = device
        self.graphs = graphs
        self.draw = draw
        self._drawn: tuple[list[Request], Tensor] = ([], torch.empty(0))
        """Who drew in the step before, and what: it stays where it was drawn."""

    @device_errors()
    @torch.inference_mode()
    def submit(self, plan: Plan) -> PendingStep:
        """Start a step. On a GPU this returns before the device is done, and it may follow a step that is not done either.

        Then nothing here may wait for the device: numbers go there by `transfer.py`, and none is read before `result`.
        """
        items = sorted(plan.scheduled, key=lambda item: item.num_rows != 1)  # rows of one token first
        rows = [Row(item.request.blocks, item.start, item.num_rows) for item in items]
        tokens_T = self._follow(items) if plan.follows else integers(_tokens_of(items), self.device)
        decoded = self.graphs.run(rows, tokens_T) if self.graphs is not None and self.graphs.fits(rows) else None
        hidden_TE = self.hidden(rows, tokens_T) if decoded is None else decoded.hidden_TE
        prompt_logprobs = self._prompt_logprobs(items, hidden_TE)
        drawing, draws, last, errors = draws_of(items)
        if not drawing:
            return PendingStep(prompt_logprobs=prompt_logprobs, errors=errors)
        last_R = slice(None) if len(last) == len(tokens_T) else integers(last, self.device)
        logits_RV = self.net.logits(hidden_TE[last_R]) if decoded is None else decoded.logits_TV[last_R]
        if decoded is not None and all(draw.takes_the_best for draw in draws):
            tokens_R = decoded.greedy_T[last_R]
        else:
            tokens_R = self.draw(logits_RV, draws)
        tokens_R = keep_to_grammars(tokens_R, logits_RV, drawing, draws, errors, self.draw)
        self._drawn = drawing, tokens_R
        drafts = {item.request.request_id: item.draft for item in items if item.draft}
        return PendingStep(drawing, *_on_its_way(tokens_R), logits_RV, prompt_logprobs, errors, drafts)

    def _follow(self, items: Sequence[Scheduled]) -> Tensor:
        """The tokens that the requests drew in the step before; 0 for one without a score: its request is about to end."""
        drawing, tokens_R = self._drawn
        rows = {request.request_id: row for row, request in enumerate(drawing)}
        return tokens_R[integers([rows[item.request.request_id] for item in items], self.device)].clamp(min=0)

    def hidden(self, rows: Sequence[Row], tokens_T: Tensor) -> Tensor:
        """Hidden states [T, E] of the rows' tokens, those of one token first; the cache holds them afterwards."""
        layout = BatchLayout.build(rows, self.cache.block_size, self.device)
        return self.net(tokens_T, layout.positions_T, Paged(self.backend, self.cache, layout))

    def _prompt_logprobs(self, items: Sequence[Scheduled], hidden_TE: Tensor) -> dict[str, list[TokenLogprob]]:
        """Scores of the prompt tokens that follow a token of this step, but those scored before a preemption."""
        found, begin = {}, 0
        for item in items:
            request, before = item.request, begin - item.start
            begin += item.num_rows
            if request.prompt_logprobs is None:
                continue
            first = max(item.start, len(request.prompt_scores)) + 1
            end = min(item.start + item.count + 1, len(request.prompt))
            if first < end:
                hidden = hidden_TE[before + first - 1 : before + end - 1]
                found[request.request_id] = self._score(hidden, request.prompt[first:end], request.prompt_logprobs)
        return found

    def _score(self, hidden_TE: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
        scored: list[TokenLogprob] = []
        for start in range(0, len(tokens), SCORED_AT_ONCE):
            some = tokens[start : start + SCORED_AT_ONCE]
            scored += _scored(self.net.logits(hidden_TE[start : start + SCORED_AT_ONCE]), some, [top] * len(some))
        return scored


def _tokens_of(items: Sequence[Scheduled]) -> list[int]:
    return [token for item in items for token in (*item.request.tokens(item.start, item.count), *item.draft)]


def _on_its_way(tokens_R: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """The tokens as they come here, and when they have come: a copy, for a graph's next step writes where they lie."""
    if not tokens_R.is_cuda:
        return tokens_R, None
    here_R = tokens_R.to("cpu", non_blocking=True)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch gives its constructor no types
    ready.record()
    return here_R, ready


def _scored(logits_RV: Tensor, tokens: Sequence[int], top: Sequence[int]) -> list[TokenLogprob]:
    tokens_R = torch.tensor(tokens, device=logits_RV.device)
    rows = zip(tokens, logprobs(logits_RV, tokens_R, top), strict=True)
    return [TokenLogprob(token, value, tuple(best)) for token, (value, best) in rows]


def _kept(
    drawn: Sequence[tuple[str, int]], drafts: Mapping[str, Sequence[int]]
) -> tuple[list[tuple[str, int]], dict[str, list[int]]]:
    """The first token that each request has drawn, and those that it drew after right guesses."""
    firsts: list[tuple[str, int]] = []
    more: dict[str, list[int]] = {}
    at = 0
    while at < len(drawn):
        name, token = drawn[at]
        draft = drafts.get(name, ())
        tokens = [token for _, token in drawn[at : at + 1 + len(draft)]]
        firsts.append((name, token))
        if draft:
            more[name] = [token for token in tokens[1 : 1 + num_right(draft, tokens)] if token >= 0]
        at += len(tokens)
    return firsts, more
