"""Turns a step into tensors, runs the decoder, draws tokens."""

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from attend.model.engine.adapters import Adapters
from attend.model.engine.graphs import DecodeGraphs, GraphOutput
from attend.model.engine.lookup import num_right
from attend.model.engine.piecewise_graphs import PiecewiseGraphs
from attend.model.engine.plan import HiddenSum, PromptScores, StepInput, StepResult
from attend.model.engine.request import NO_HIDDEN, NO_SCORE, NO_TOKEN_LEFT, TokenLogprob
from attend.model.errors import AttendError, DeviceFailed, EngineFailed, OutOfMemory
from attend.model.net.kv_cache import KVCache
from attend.model.net.native.decoder import NativeDecoder
from attend.model.net.paged_attention import AttentionBackend, BatchLayout, PagedAttention, Row
from attend.model.net.progress import ProgressCounter
from attend.model.net.transformer import Decoder
from attend.model.sampling import EXCLUDED, UNSCORED, row_logprobs, sample
from attend.model.sampling_plan import Draw
from attend.model.transfer import HostToDeviceCopy, integers

if TYPE_CHECKING:  # triton is not there on every machine
    from attend.model.net.triton.decoder import TritonDecoder

FAULTS = {UNSCORED: NO_SCORE, EXCLUDED: NO_TOKEN_LEFT}
DEVICE_ERRORS = ("CUDA error", "CUDA driver error", "cuDNN error", "Triton Error")
"""How the messages of errors of a device begin: torch has a type for some of them only."""
MEMORY_ERRORS = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "bad_alloc")
SCORED_AT_ONCE = 256
"""Prompt tokens whose logits live at the same time: a vocabulary of 128k makes that 128 MiB."""


@contextmanager
def device_errors() -> Iterator[None]:
    """Raise OutOfMemory for a lack of memory, and DeviceFailed for an error that would fail every later step too.

    EngineFailed for what Triton raises where a kernel cannot be compiled, or needs more than the GPU has.
    """
    try:
        yield
    except Exception as error:
        text, plain = str(error), isinstance(error, RuntimeError)
        if isinstance(error, MemoryError) or (plain and any(name in text for name in MEMORY_ERRORS)):
            raise OutOfMemory(f"out of memory in a step: {text}") from error
        if plain and any(name in text for name in DEVICE_ERRORS):
            raise DeviceFailed(f"the device failed: {text}") from error
        if type(error).__module__.partition(".")[0] == "triton":  # which may not be there, and whose errors are of its own
            raise EngineFailed(f"a kernel cannot run on this device: {in_words(error)}; use backend = torch") from error
        raise


def in_words(error: BaseException) -> str:
    """The type of an error and its first line; of one of ours those of what it was raised from."""
    if isinstance(error, AttendError) and error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])


DrawTokens = Callable[[Tensor, Sequence[Draw]], Tensor]
"""(scores [R, V], how each row draws) -> tokens [R]: `sample`, the same row by row, or a `Told`."""


Recording = Callable[[], tuple[DecodeGraphs | None, PiecewiseGraphs | None]]
"""What records the steps of a runner."""


LogProbs = Callable[
    [Tensor, Sequence[int], Sequence[int], Sequence[Sequence[int]]], list[tuple[float, list[tuple[int, float]]]]
]
"""`logprobs` of sampling.py, or the same, faster."""


@runtime_checkable
class StagingSampler(Protocol):
    """A DrawTokens on a device whose numbers can go there with the rest of a step."""

    def stage(self, draws: Sequence[Draw], h2d_copy: HostToDeviceCopy) -> None:
        """Put what these draws need into a copy to the device. The next call, with the same list of draws, reads it from
        there."""


@dataclass(slots=True)
class PendingStep:
    """A submitted step, whose result may still be on its way from the device."""

    step: StepInput = field(default_factory=StepInput)
    tokens_R: Tensor | None = None
    """The drawn tokens, being copied to the host."""
    ready: torch.cuda.Event | None = None
    """Set when the copy is complete; None: it is."""
    logits_RV: Tensor | None = None
    prompt_logprobs: Mapping[str, Sequence[TokenLogprob]] = field(default_factory=dict)
    draw: DrawTokens = sample
    logprobs: LogProbs = row_logprobs
    hidden: Sequence[Tensor] = ()
    """[tokens, E], float32: the hidden states of each of the step's sums."""
    _tokens: list[int] | None = None

    @device_errors()
    def tokens(self) -> list[int]:
        """The token of each row, once the device is done; UNSCORED or EXCLUDED where there is nothing to draw."""
        if self._tokens is None:
            if self.ready is not None:
                self.ready.synchronize()  # but not for the steps submitted since
            self._tokens = [] if self.tokens_R is None else self.tokens_R.tolist()
        return self._tokens

    @device_errors()
    @torch.inference_mode()
    def redraw(self, draws: Mapping[int, Draw], banned_tokens: Mapping[int, Sequence[int]]) -> list[int]:
        """Draw some rows again, in another way or without some tokens; returns their tokens. Both mappings are by row.

        Not allowed after a later step was submitted: it may overwrite the scores.
        """
        assert self.logits_RV is not None
        tokens, device = self.tokens(), self.logits_RV.device
        some_RV = self.logits_RV.index_select(0, integers(draws, device))
        pairs = [(at, token) for at, row in enumerate(draws) for token in banned_tokens.get(row, ())]
        if pairs:
            some_RV[tuple(integers(side, device) for side in zip(*pairs, strict=True))] = -math.inf
        drawn: list[int] = self.draw(some_RV, list(draws.values())).tolist()
        for row, token in zip(draws, drawn, strict=True):
            tokens[row] = token if token >= 0 else EXCLUDED  # its scores are finite: it has drawn once
        return drawn

    @device_errors()
    def result(self) -> StepResult:
        """Wait for the device. A row without a finite score is an error of its own request."""
        tokens, drafts = self.tokens(), self.step.drafts
        pairs = list(zip(self.step.draw_ids, tokens, strict=True))
        firsts, more = _accepted_drafts(pairs, drafts) if drafts else (pairs, {})
        sums = {
            each.request_id: _add_to_sum(each, hidden) for each, hidden in zip(self.step.hidden_sums, self.hidden, strict=True)
        }
        infinite = {name: NO_HIDDEN for name, sum_E in sums.items() if not np.isfinite(sum_E).all()}
        return StepResult(
            tokens={name: token for name, token in firsts if token >= 0},
            errors={name: FAULTS[token] for name, token in firsts if token < 0} | infinite,
            logprobs=self._logprobs(tokens),
            prompt_logprobs=self.prompt_logprobs,
            more=more,
            hidden_sums=sums,
        )

    def _logprobs(self, tokens: Sequence[int]) -> dict[str, TokenLogprob]:
        tops = [draw.plan.logprobs for draw in self.step.draws]
        rows = [row for row, top in enumerate(tops) if top is not None and tokens[row] >= 0]
        if not rows:
            return {}
        assert self.logits_RV is not None
        some_RV = self.logits_RV.index_select(0, integers(rows, self.logits_RV.device))
        scored = _token_logprobs(
            self.logprobs,
            some_RV,
            [tokens[row] for row in rows],
            [tops[row] or 0 for row in rows],
            [self.step.draws[row].plan.scored_token_ids for row in rows],
        )
        return {self.step.draw_ids[row]: each for row, each in zip(rows, scored, strict=True)}


class ModelRunner:
    """A decoder, its KV cache, and the attention backend between them."""

    def __init__(
        self,
        net: "Decoder | NativeDecoder | TritonDecoder",
        backend: AttentionBackend,
        cache: KVCache,
        device: str,
        graphs: DecodeGraphs | None = None,
        draw: DrawTokens = sample,
        adapters: Adapters | None = None,
        pieces: PiecewiseGraphs | None = None,
        logprobs: LogProbs = row_logprobs,
        record: Recording | None = None,
    ) -> None:
        """`graphs`, else `pieces`, compute the steps that fit them; `adapters` are those that requests may have. `record` makes
        both, when the runner is prepared.
        """
        self.net = net
        self.backend = backend
        self.cache = cache
        self.device = device
        self.graphs = graphs
        self.pieces = pieces
        self.draw = draw
        self.logprobs = logprobs
        self.adapters = adapters
        self.record = record
        self.progress = ProgressCounter()
        self.has_states = any(group.has_state for group in net.config.memory_groups)
        self._drawn: tuple[list[str], Tensor] = ([], torch.empty(0))
        """Request ids and tokens of the previous step's draws; the tokens stay on the device."""

    def prepare(self) -> None:
        """Of the thread that will submit steps, before the first one: it records what it will replay. Libraries may keep memory
        that a recording refers to for each thread, and give it back when that thread ends.
        """
        if self.record is not None:
            record, self.record = self.record, None
            self.graphs, self.pieces = record()

    @property
    def recorded_sizes(self) -> tuple[int, int]:
        """How many sizes of steps are recorded: as a whole, and in pieces."""
        return 0 if self.graphs is None else len(self.graphs), 0 if self.pieces is None else len(self.pieces)

    @device_errors()
    @torch.inference_mode()
    def submit(self, step: StepInput) -> PendingStep:
        """Start a step. On a GPU this returns before the device is done, and the previous step may not be done either.

        So nothing here may wait for the device: numbers are copied to it by `transfer.py`, and none is read before `result`.
        """
        rows, h2d_copy = list(map(Row, step.tables[0], step.starts, step.counts)), HostToDeviceCopy(self.device)
        for row, name in zip(rows, step.request_ids, strict=True) if self.has_states and step.drafts else ():
            row.draft = len(step.drafts.get(name, ()))
        part = None if len(step.draws) in (0, step.num_tokens) else h2d_copy.add(step.draw_rows)
        if isinstance(self.draw, StagingSampler) and self._draws_from_scores(step.draws, rows):
            self.draw.stage(step.draws, h2d_copy)
        hidden_TE, decoded = self._compute_hidden(step, rows, h2d_copy)
        prompt_logprobs, sums = self._asked_of_hidden(step, hidden_TE)
        draws = step.draws
        if not draws:
            return PendingStep(step, prompt_logprobs=prompt_logprobs, hidden=sums)
        last_R = slice(None) if part is None else h2d_copy[part]
        if decoded is None:
            tokens_R, logits_RV = self._draw_after(hidden_TE[last_R], draws)
        else:
            best = all(draw.takes_the_best for draw in draws)
            logits_RV = decoded.logits_TV[last_R]
            tokens_R = decoded.greedy_T[last_R] if best else self._draw_from(logits_RV, draws)
        self._drawn = step.draw_ids, tokens_R
        return PendingStep(step, *_on_its_way(tokens_R), logits_RV, prompt_logprobs, self.draw, self.logprobs, sums)

    def _asked_of_hidden(self, step: StepInput, hidden_TE: Tensor) -> tuple[dict[str, list[TokenLogprob]], list[Tensor]]:
        """What requests ask of hidden states beside draws: log probabilities of prompts, and sums for pooling."""
        prompt_logprobs = {each.request_id: self._score(each, hidden_TE) for each in step.prompt_scores}
        sums = [hidden_TE[each.row : each.row + each.num_rows].to(torch.float32, copy=True) for each in step.hidden_sums]
        return prompt_logprobs, sums

    def _draws_from_scores(self, draws: Sequence[Draw], rows: Sequence[Row]) -> bool:
        """True if `self.draw` will be called: a graph has drawn the best tokens."""
        graph = self.graphs is not None and self.graphs.has_scores and self.graphs.fits(rows)
        return bool(draws) and not (graph and all(draw.takes_the_best for draw in draws))

    def _compute_hidden(
        self, step: StepInput, rows: Sequence[Row], h2d_copy: HostToDeviceCopy
    ) -> tuple[Tensor, GraphOutput | None]:
        """The hidden states [T, E] of a step, and what else a graph has computed, where one fits. Sends the copy."""
        others, states, sources = other_groups(step.tables, self.has_states)
        given = self._step_tokens(step)
        if self.graphs is not None and self.graphs.fits(rows):
            decoded = self.graphs.run(rows, given, others, states, step.versions, h2d_copy, sources)
            return decoded.hidden_TE, decoded if self.graphs.has_scores else None
        if self.pieces is not None and self.pieces.fits(rows):
            return self.pieces.run(rows, given, others, h2d_copy, self.progress), None
        part = given if isinstance(given, Tensor) else h2d_copy.add(given)
        layout = BatchLayout.build(rows, self.cache.block_size, h2d_copy, others, states, sources)
        tokens_T = part if isinstance(part, Tensor) else h2d_copy[part]
        with nullcontext() if self.adapters is None else self.adapters.active(step):
            return self._hidden(tokens_T, layout), None

    def _draw_after(self, hidden_RE: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor | None]:
        """The tokens [R] drawn after these hidden states, and the scores [R, V] that they were drawn from, if all are here."""
        logits_RV = self.net.logits(hidden_RE)
        return self._draw_from(logits_RV, draws), logits_RV

    def _draw_from(self, logits_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
        """The tokens [R] drawn from these scores."""
        return self.draw(logits_RV, draws)

    def _step_tokens(self, step: StepInput) -> "Tensor | array[int]":
        """The step's tokens [T]; on the device, if some of them are only there: those that their requests drew in the step
        before, 0 for one without a score, whose request is about to end.
        """
        if not step.pending:
            return step.tokens
        names, tokens_R = self._drawn
        wanted, rows = list(step.pending), dict(zip(names, range(len(names)), strict=True))
        sources = [rows[name] for name in wanted]
        if len(wanted) == step.num_tokens:
            return (tokens_R if names == wanted else tokens_R[integers(sources, self.device)]).clamp(min=0)
        numbers = integers([*step.tokens, *step.pending.values(), *sources], self.device)
        places, sources_ = numbers[step.num_tokens : -len(wanted)], numbers[-len(wanted) :]
        return numbers[: step.num_tokens].index_copy(0, places, tokens_R[sources_].clamp(min=0))

    def hidden(
        self,
        rows: Sequence[Row],
        tokens_T: Tensor,
        others: Sequence[Sequence[Sequence[int]]] = (),
        states: Sequence[int] | None = None,
    ) -> Tensor:
        """Hidden states [T, E] of the rows' tokens, those of one token first; the cache holds them afterwards.

        `others` and `states`: see `BatchLayout.build`. Without `others` the rows have the same blocks in all groups.
        """
        return self._hidden(tokens_T, BatchLayout.build(rows, self.cache.block_size, self.device, others, states))

    def _hidden(self, tokens_T: Tensor, layout: BatchLayout) -> Tensor:
        return self.net(tokens_T, layout.positions_T, PagedAttention(self.backend, self.cache, layout, progress=self.progress))

    def _score(self, asked: PromptScores, hidden_TE: Tensor) -> list[TokenLogprob]:
        scored: list[TokenLogprob] = []
        for start in range(0, len(asked.tokens), SCORED_AT_ONCE):
            some = asked.tokens[start : start + SCORED_AT_ONCE]
            begin = asked.row + start
            self.progress.beat()
            scored += _token_logprobs(
                self.logprobs, self.net.logits(hidden_TE[begin : begin + len(some)]), some, [asked.top] * len(some), ()
            )
        return scored


def other_groups(
    tables: Sequence[Sequence["array[int]"]], has_states: bool
) -> tuple[Sequence[Sequence["array[int]"]], Sequence[int] | None, Sequence[int] | None]:
    """The block tables of all groups but the first, and the slots where states are written and read: the last group."""
    if not has_states:
        return tables[1:], None, None
    return tables[1:-1], [slots[-1] for slots in tables[-1]], [slots[0] for slots in tables[-1]]


def _on_its_way(tokens_R: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """The tokens on their way to the host, and an event for their arrival: a copy, as a graph's next step overwrites them."""
    if not tokens_R.is_cuda:
        return tokens_R, None
    here_R = tokens_R.to("cpu", non_blocking=True)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch gives its constructor no types
    ready.record()
    return here_R, ready


def _add_to_sum(asked: HiddenSum, hidden_TE: Tensor) -> "array[float]":
    """The sum so far and these rows, one row after the other: its bits do not depend on how a prompt is cut."""
    rows_TE = hidden_TE.cpu().numpy()
    sum_E = np.array(asked.before) if asked.before else np.zeros(rows_TE.shape[1])
    for row_E in rows_TE:
        sum_E += row_E
    return array("d", sum_E.tobytes())


def _token_logprobs(
    logprobs: LogProbs,
    logits_RV: Tensor,
    tokens: Sequence[int],
    top: Sequence[int],
    others: Sequence[Sequence[int]],
) -> list[TokenLogprob]:
    rows = zip(tokens, logprobs(logits_RV, tokens, top, others), strict=True)
    return [TokenLogprob(token, value, tuple(best)) for token, (value, best) in rows]


def _accepted_drafts(
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
