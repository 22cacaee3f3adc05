"""Input and output of the engine: plain records, and the protocol that the service uses."""

from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from attend.model.errors import ContextTooLong, InvalidRequest
from attend.model.params import DEFAULT_PRIORITY, NO_CHANGE, DecodingParams, SamplingParams
from attend.model.pooling import Pooling
from attend.model.sampling_plan import History, SamplingPlan

if TYPE_CHECKING:
    from attend.model.engine.lookup import Lookup
    from attend.model.net.adapters import Adapter
    from attend.model.text.mask import Grammar


class FinishReason(StrEnum):
    """Why a request ended. Every accepted request ends exactly once with one of these."""

    STOP = "stop"
    LENGTH = "length"
    DEADLINE = "deadline"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The model's own log probability of a token, before any parameter changed the scores; natural logarithms."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log probability) of the likeliest tokens, as many as were asked for, then of those asked for by their ids."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds that a request spent waiting, on its prompt, and on its output."""

    queue: float
    prefill: float
    decode: float
    cached_tokens: int = 0
    """Tokens that were not computed, since an earlier request had the same prefix."""


NO_SCORE = "the model's logits are not finite"
NO_HIDDEN = "the model's hidden states are not finite"
NO_TOKEN_LEFT = (
    "the sampling parameters exclude every token (allowed_token_ids, bad_words, logit_bias, min_tokens, structured output, "
    "and suppress_tokens of the model)"
)
"""Errors of a request. The last is the caller's."""


SECONDS_A_LEVEL = 10.0
"""A level of priority counts as much as so many seconds of waiting. So a request is passed only by those that arrive within
90 seconds after it, whatever their priority: none starves."""


@dataclass(slots=True)
class AdmissionShortfall:
    """Why a request could not start when it was tried last."""

    num_free: int
    """Blocks that must be free before it can be admitted. Fewer suffice once others share known blocks that counted as free."""
    num_known: int
    """Blocks, from the first on, that the prefix cache knew; `parent` is the number of the last of them."""
    parent: str | int


@dataclass(slots=True, eq=False)
class Request:
    """One answer to one prompt. The caller fills the first part; the rest belongs to the scheduler."""

    request_id: str
    """Unique among the requests in flight."""
    prompt: Sequence[int]
    """Token ids of the prompt, at least one."""
    max_tokens: int
    sampling: SamplingParams
    seed: int = 0
    answer_index: int = 0
    """Number of this answer among the answers of its call, from 0."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the request; the token itself is part of the output."""
    min_tokens: int = 0
    decoding: DecodingParams = NO_CHANGE
    bad_words: Sequence[Sequence[int]] = ()
    """The token ids of each bad word."""
    banned_tokens: tuple[int, ...] = ()
    """Token ids that the model's makers want never drawn."""
    grammar: "Grammar | None" = None
    """What the output must look like; advanced with each token that is committed."""
    logprobs: int | None = None
    """Alternatives to report with each token; 0 reports the drawn token alone, None nothing."""
    scored_token_ids: tuple[int, ...] = ()
    """Tokens to report beside them, whatever they are; only with `logprobs`."""
    prompt_logprobs: int | None = None
    """Alternatives to report with each token of the prompt; None: nothing is reported of the prompt."""
    pooling: Pooling | None = None
    """Which hidden states of the prompt to report; with max_tokens 0."""
    cache_salt: str = ""
    """Requests share cached prefixes only within one salt."""
    priority: int = DEFAULT_PRIORITY
    """0 to 9, the highest first; see `virtual_arrival`."""
    adapter: "Adapter | None" = None
    """The LoRA adapter that is added to the model's matrices. The request holds it until it has ended."""
    owner: str | None = None
    """The name of the caller's API key, or of its tenant; None where neither is known, and all callers are one. Owners take
    turns, and drafts come from texts of the same owner alone.
    """
    weight: float = 1.0
    """The owner's share of the engine beside others'."""
    is_background: bool = False
    """True if nobody waits for it: beside requests of others it advances in one of fair_share.WHOLE_EVERY steps."""

    output: list[int] = field(default_factory=list)
    """The caller may put tokens here that an earlier attempt has drawn: the answer goes on after them."""
    prompt_scores: list[TokenLogprob] = field(default_factory=list)
    """Scores of the prompt's tokens from the second on, of those that are computed."""
    hidden_sum: "array[float]" = field(default_factory=lambda: array("d"))
    """[E]: the sum of those hidden states, so far; empty before the first."""
    num_summed: int = 0
    """Tokens of the prompt, from the first on, whose hidden states are in the sum, or not asked for."""
    num_computed: int = 0
    """Tokens of prompt + output whose keys and values lie in the cache. A step lets it catch up with num_tokens."""
    tables: list["array[int]"] = field(default_factory=list)
    """Its block table in each KV cache group, int64: a step copies it as it lies in memory. An evicted block is 0. That of a
    state has the slots where its last step reads and writes it.
    """
    num_replayed: int = 0
    """Tokens of a right draft that the next step computes once more, since no state is kept behind a draft."""
    slot: int = 0
    """Slot of its recurrent state between snapshots, in a model with recurrent states."""
    snapshot_at: int = 0
    """Tokens before the last snapshot of its text."""
    last_snapshot: int = 0
    """The number of the text up to the last snapshot of its answer; 0: there is none."""
    known_until: int = 0
    """Tokens of its text whose keys and values were known when it was looked up."""
    awaits: bool = False
    """True if a step that is being planned makes a snapshot of its text, from which it goes on in the next one."""
    version: int = 0
    """Of its block tables. It changes unless blocks were only appended at the end or evicted (set to 0) at the start."""
    reserved_tokens: int = 0
    """Tokens that every group has blocks for; 0 while it waits."""
    num_known: int = 0
    """Blocks, from the first on, that the prefix cache knows; `parent` is the number of the last of them."""
    parent: str | int | None = None
    lookup: "Lookup | None" = None
    """Guesses its next tokens; made at the first guess."""
    history: History | None = None
    """The token counts that its penalties use; made at the first draw under them."""
    _plan: SamplingPlan | None = field(default=None, init=False, repr=False)
    lack: AdmissionShortfall | None = None
    num_cached: int = 0
    """Prefix cache hits, in tokens when the request was first scheduled."""
    finish_reason: FinishReason | None = None
    arrived_at: float = 0.0
    virtual_arrival: float = 0.0
    """The smaller, the sooner it is served: the time of its arrival, earlier by SECONDS_A_LEVEL for each level of priority."""
    scheduled_at: float | None = None
    first_token_at: float | None = None
    num_preemptions: int = 0
    num_left_out: int = 0
    """Steps that left it out for the streams of other owners."""
    was_newcomer: bool = False
    """True if it was to get a place at once, since no request of its owner ran."""

    @property
    def num_tokens(self) -> int:
        """Prompt plus output tokens so far."""
        return len(self.prompt) + len(self.output)

    @property
    def is_stream(self) -> bool:
        """True if it lacks one token, and those of a right draft alone."""
        return self.scheduled_at is not None and self.num_tokens - self.num_computed == 1 + self.num_replayed

    @property
    def sampling_plan(self) -> SamplingPlan:
        """How it draws, computed at the first use: the caller's part must not change from then on."""
        if self._plan is None:
            checks = bool(self.bad_words), self.grammar is not None
            facts = (self.decoding, self.logprobs, *checks, self.scored_token_ids, self.banned_tokens)
            self._plan = SamplingPlan(self.sampling, self.seed, self.answer_index, *facts)
        return self._plan

    @property
    def root(self) -> str:
        """The predecessor of its first block in the prefix cache: different for each adapter and each salt."""
        return f"{'' if self.adapter is None else self.adapter.digest}\0{self.cache_salt}"

    @property
    def draws_from_scores(self) -> bool:
        """See `SamplingPlan.draws_from_scores`; here for the next token, which may not be a stop token yet."""
        return self.sampling_plan.draws_from_scores and len(self.output) >= self.min_tokens

    @property
    def pooled_hidden(self) -> "array[float] | None":
        """The hidden state of the prompt's first or last token, or the mean over all; None where none is asked for."""
        if self.pooling is None:
            return None
        count = len(self.prompt) if self.pooling is Pooling.MEAN else 1
        return array("d", (number / count for number in self.hidden_sum))

    @property
    def max_total_tokens(self) -> int:
        """Prompt plus the most output tokens it may grow to."""
        return len(self.prompt) + self.max_tokens

    def tokens(self, start: int, count: int) -> list[int]:
        """Tokens `start .. start + count - 1` of prompt + output."""
        split = len(self.prompt)
        if count == 1:
            return [self.prompt[start] if start < split else self.output[start - split]]
        return [*self.prompt[start : start + count], *self.output[max(0, start - split) : max(0, start + count - split)]]

    def times(self, now: float) -> Times:
        """The request's times so far, up to `now`."""
        scheduled = now if self.scheduled_at is None else self.scheduled_at
        first = now if self.first_token_at is None else self.first_token_at
        return Times(scheduled - self.arrived_at, first - scheduled, now - first, self.num_cached)


def check_fits(request: Request, limit: int, name: str = "prompt") -> None:
    """Refuse a request that can never end well: no prompt (called `name`), an answer that is complete, over `limit` tokens."""
    if not request.prompt:
        raise InvalidRequest("prompt must hold at least one token", "prompt")
    if request.output and len(request.output) >= request.max_tokens:
        text = f"resume_token_ids must hold fewer tokens than max_tokens, which is {request.max_tokens}"
        raise InvalidRequest(f"{text}; got {len(request.output)}", "resume_token_ids")
    if request.max_total_tokens > limit:
        size, most = len(request.prompt), None if len(request.prompt) >= limit else request.max_tokens
        asked = f"the request asks for {request.max_total_tokens}: {size} in the prompt and {most} in max_tokens"
        field_name, got = (name, f"the prompt has {size}") if most is None else ("max_tokens", asked)
        words = f"{field_name}: this model's maximum context length is {limit} tokens, but {got}"
        raise ContextTooLong(words, field_name.partition("[")[0], prompt_tokens=size, max_tokens=most, limit=limit)


class Output(NamedTuple):
    """The result of a step for one request."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    times: Times | None = None
    """Set together with the finish reason only."""
    error: str | None = None
    """Message for the log; only with FinishReason.ERROR."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token, if the request asked for log probabilities."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Log probabilities of the prompt from its second token on; only with the first output, if the request asked for them."""
    hidden: "array[float] | None" = None
    """[E], float64, where asked for: the prompt's first or last hidden state, or the mean over all."""


class SlowerPath(NamedTuple):
    """Why an engine is slower than this machine could be: a word for a metric, and a sentence."""

    reason: str
    cause: str


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties of an engine that do not change while it runs."""

    family: str
    device: str
    dtype: str
    """Dtype of the activations."""
    weights: str
    """How matrices are kept: a dtype, int8 or int4."""
    backend: str
    num_parameters: int
    vocab_size: int
    hidden_size: int
    max_model_len: int
    max_batch_requests: int
    max_queued_requests: int
    block_size: int
    num_blocks: int
    """Blocks of the first group of layers."""
    cache_bytes: int
    """Bytes of the KV cache and of recurrent states, on all ranks. A CPU allocates their pages at their first use."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    weights_digest: str = ""
    """Of every byte of the checkpoint. It says nothing of how it is computed, as the fingerprint does."""
    makes_text: bool = True
    """False where the checkpoint has no head: then there are embeddings alone."""
    slower_path: SlowerPath | None = None
    """Why it is slower than this machine could be; None: it is not, or its backend was chosen by name."""
    device_name: str = ""
    """Name of the GPU, or of the processor with its best instruction set."""
    recorded_sizes: tuple[int, int] = (0, 0)
    """How many batch sizes were recorded as CUDA graphs: of whole steps, and of steps in pieces."""


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """KV offloading to disk: counts since the start, and what is there."""

    num_bytes: int
    """Bytes of the folder's files, those of other processes and models too."""
    read_tokens: int
    """Tokens that were not computed, since their blocks were read back."""
    read_bytes: int
    written_bytes: int
    dropped_texts: int
    """Ended requests of which not all was written."""
    num_slower: int
    """Requests whose prefix was there and was computed, since reading would have taken longer, or did."""
    num_errors: int
    """Files that were no good, and failures of the disk."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The load of an engine; a snapshot after a step."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    """Free blocks of the group of layers with the smallest share of them, counted in blocks of the first group."""
    num_preemptions: int = 0
    """Since the start, as are those below."""
    num_prefix_queries: int = 0
    """Prefix cache queries, in tokens."""
    num_prefix_hits: int = 0
    """Tokens of these queries that were found."""
    num_drafted: int = 0
    """Draft tokens of speculative decoding."""
    num_accepted: int = 0
    """Draft tokens that were accepted."""
    offload: OffloadStats | None = None
    """Counts of KV offloading; None where no folder is set for it."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Duration and sizes of one step, for the metrics."""

    seconds: float
    num_requests: int
    num_tokens: int
    """Computed, of prompts and answers; without guesses."""
    num_drawn: int = 0
    """Tokens that the step sampled for answers."""
    num_ended: int = 0
    """Requests that have ended since the previous step, for any reason."""


class TokenEngine(Protocol):
    """Token ids in, token ids out. The service uses nothing else of the engine."""

    @property
    def info(self) -> EngineInfo:
        """The engine's properties."""

    @property
    def draining(self) -> bool:
        """True if new requests are refused for good."""

    def stats(self) -> EngineStats:
        """The load after the last step."""

    def cache_resident_bytes(self) -> int:
        """Bytes of keys, values and states that are in memory now, on all ranks. It asks the system: not for every step."""

    def heartbeat_age(self) -> float:
        """Seconds since the step thread last showed life: it ends a round once a step, and once a second when idle, and within
        a step each layer counts. To be asked every second or so.
        """

    def on_step(self, observer: Callable[[StepReport], None]) -> None:
        """Have `observer` called after each step, on the step thread."""

    def check_room(self, count: int, owner: str | None = None) -> None:
        """Raise Overloaded where so many more requests of this owner would be refused now, whatever they ask."""

    def generate(self, requests: Sequence[Request], at_once: int | None = None) -> AsyncGenerator[list[Output], None]:
        """The outputs of all `requests`, as they come; ends when each has its finish reason.

        With `at_once` no more of them are queued or running at a time: each that ends makes room for the next, also while the
        engine is draining. So a call of thousands waits by itself, and not in the queue.

        Raises Overloaded, Unavailable or ContextTooLong at once. Closing the iterator aborts what still runs.
        """

    def abort(self, request_id: str, reason: FinishReason) -> None:
        """End one request; its last Output carries `reason`. Unknown and finished ids are ignored."""
