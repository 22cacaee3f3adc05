"""Records between a transport and the service: Command, Chunk and others, without HTTP or protobuf."""

import re
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from attend.model.engine.request import FinishReason, Times, TokenLogprob
from attend.model.errors import InvalidRequest
from attend.model.params import (
    MAX_CHOICES_TIMES_PROMPTS,
    NO_CHANGE,
    DecodingParams,
    SamplingParams,
    StopRules,
    at_most,
    describe,
)
from attend.model.pooling import EmbeddingRules
from attend.model.text.caller_marks import ChatText, Span
from attend.model.text.grammar import GrammarSpec
from attend.service.access.caller import NOBODY, Caller
from attend.service.chat.forms import AnswerFormat
from attend.service.chat.parts import Part, call_id
from attend.service.chat.tools import NO_CALLS, Calling
from attend.service.remarks import Remarks

REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
"""An id goes into headers and log lines, so it holds neither spaces nor line ends."""
MAX_DEADLINE_MS = 24 * 3600 * 1000
MAX_SALT = 128
MAX_TOKENS = 512
"""Tokens of a text. The cost, and the size of each head's answer, grow with their square."""
MAX_NUMBERS = 1 << 19
"""Weights and scores in an answer: some 6 MB of JSON, 2 MiB of protobuf."""
MAX_LENS = 5
"""Guesses of a layer in a place."""
TOP_LOGPROBS = 5
"""The likeliest tokens that an explanation reports in each place, where it is not asked for another number."""
MAX_INPUTS, MAX_INPUT_TOKENS = 2048, 300_000
"""Texts, and tokens of all of them, in a call that looks at texts: OpenAI's limits for embeddings."""
BYTES_A_TOKEN = 16
"""Of a call, for each token of the model's context: a token id with its comma takes 8 at most."""


def bytes_for(max_model_len: int, least: int) -> int:
    """Bytes that a call may have, so that a whole context can be sent; `least` where that is short."""
    return max(least, BYTES_A_TOKEN * max_model_len)


def check_request_id(request_id: str) -> None:
    """Raise InvalidRequest unless this can be the id of a request."""
    if not REQUEST_ID.fullmatch(request_id):
        wanted = "1 to 128 letters, digits and . _ : / + = @ -"
        raise InvalidRequest(f"request_id must be {wanted}; got {describe(request_id)}", "request_id")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt that a chat template is to write, its special tokens included. `write` may take seconds."""

    write: Callable[..., ChatText]
    """Where the conversation may be shortened: takes how many of its oldest messages are left out."""
    most_dropped: int = 0
    """How many may be, where the prompt is too long."""


@dataclass(frozen=True, slots=True)
class FramedText:
    """A prompt of a text that may be cut, between two that may not."""

    text: str
    most_tokens: int | None = None
    """So many tokens of the text are kept, from the first on; None: all."""
    around: tuple[str, str] = ("", "")  # with their special tokens, where none are added
    add_special_tokens: bool = True
    literals: tuple[Span, ...] = ()
    """Parts of a chat in which no control token is looked for."""

    @property
    def num_characters(self) -> int:
        """Characters of all three."""
        return len(self.text) + (0 if self.around == ("", "") else sum(map(len, self.around)))  # many have nothing around


@dataclass(frozen=True, slots=True)
class ChatRules:
    """How the answers of a chat are read."""

    form: AnswerFormat
    calling: Calling = NO_CALLS
    thinking_token_budget: int | None = None
    """The most tokens of reasoning."""


Prompt = str | tuple[int, ...] | ChatPrompt | FramedText


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a call arrived, from whom, and how large it is."""

    turn: str | None = None
    """In whose turn it is read and prepared; see `Caller.turn`."""
    at: float | None = None
    """When, by the event loop's clock. Its deadline counts from then on; None: from when it is known."""
    size: int = 0
    """Bytes of its body or message: work on it takes about as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One call for text: `n` answers to each prompt. Answer i of prompt p has index p * n + i."""

    prompts: tuple[Prompt, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stops: StopRules = field(default_factory=StopRules)
    n: int = 1
    model: str = ""
    """Empty means the served one. The name of an adapter means it beside the served one."""
    adapter: str = ""
    """The same, for callers who name it by itself."""
    request_id: str
    caller: Caller = NOBODY
    arrival: Arrival = field(default=Arrival(), compare=False)
    deadline_ms: int | None = None
    skip_special_tokens: bool = True
    decoding: DecodingParams = NO_CHANGE
    logprobs: int | None = None
    """Alternatives to report with each token; 0 reports the drawn token alone, None nothing."""
    prompt_logprobs: int | None = None
    echo: bool = False
    """Each answer begins with its prompt."""
    truncate_prompt_tokens: int | None = None
    """Keep only so many tokens from the prompt's end."""
    priority: int | None = None
    """0 to 9. A level counts as much as ten seconds of waiting. None: DEFAULT_PRIORITY, or the key's max_priority if lower."""
    cache_salt: str = ""
    """Within what the caller shares at all (`Caller.salt`), cached prefixes are shared only within one salt."""
    grammar: GrammarSpec | None = None
    """What each answer must look like."""
    chat: ChatRules | None = None
    """How answers are split into reasoning, content and tool calls; None where they are text alone."""
    resume_token_ids: tuple[int, ...] = ()
    """Tokens of the answer that the caller has already: the answer goes on after them."""
    embedding: EmbeddingRules | None = None
    """How prompts become vectors, where the call is for these and for no answer."""
    suffix: str = ""
    """What follows the answer to the one prompt."""
    remarks: Remarks = field(default_factory=Remarks, compare=False)
    """What the answer says of the call. Filled also while the call is prepared."""
    scored_token_ids: tuple[int, ...] = ()
    """Tokens whose log probabilities are all that is wanted of the one token that follows each prompt."""
    names: tuple[str, ...] = ()
    """What the caller calls each prompt, where that is not `field`: `documents[3]`."""

    def __post_init__(self) -> None:
        if self.stops.max_tokens == 0 and not self.computes_prompts:
            raise InvalidRequest("max_tokens must be at least 1 without echo or prompt_logprobs; got 0 (integer)", "max_tokens")
        if self.is_formed and self.stops.min_tokens:
            raise InvalidRequest(
                "min_tokens cannot be combined with structured output, which ends where it is complete", "min_tokens"
            )
        if self.resume_token_ids and (self.n > 1 or len(self.prompts) > 1):
            raise InvalidRequest("resume_token_ids needs a single prompt and n = 1", "resume_token_ids")
        check_request_id(self.request_id)
        if not self.prompts:
            raise InvalidRequest("prompt must hold at least one prompt; got an empty list", "prompt")
        if self.in_parts:
            at_most(self.field, self.prompts, 2 * MAX_INPUTS, "texts")
        elif self.n * len(self.prompts) > MAX_CHOICES_TIMES_PROMPTS:
            limit = f"n times the number of prompts must be at most {MAX_CHOICES_TIMES_PROMPTS}"
            raise InvalidRequest(f"{limit}; got {self.n} x {len(self.prompts)}", "n")

    @property
    def computes_prompts(self) -> bool:
        """True if there is something to report of a prompt alone."""
        return self.echo or self.prompt_logprobs is not None or self.embedding is not None

    @property
    def in_parts(self) -> bool:
        """True if its prompts are handed to the engine a part at a time, and each must be answered: it may have thousands."""
        return self.embedding is not None or bool(self.scored_token_ids)

    @property
    def field(self) -> str:
        """What the caller calls the prompts."""
        return self.field_of(-1) if self.names else "prompt" if self.embedding is None else "input"

    def name_of(self, place: int) -> str:
        """What the caller calls a prompt."""
        return self.names[place] if self.names else self.field

    def field_of(self, place: int) -> str:
        """The field that a prompt stands in."""
        return self.name_of(place).partition("[")[0]

    @property
    def is_formed(self) -> bool:
        """True if answers follow a grammar."""
        return self.grammar is not None or (self.chat is not None and self.chat.calling.is_enforced)

    @property
    def num_answers(self) -> int:
        """How many answers the call asks for: `n` for each prompt."""
        return self.n * len(self.prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainCommand:
    """One text to explain: a prompt and its answer."""

    prompt: str | tuple[int, ...]
    answer: str | tuple[int, ...] = ()
    layers: tuple[int, ...] | None = None
    """Layers whose attention is in the answer; None: all."""
    heads: tuple[int, ...] | None = None
    """Query heads, in each of these layers; None: all."""
    scores: bool = False
    top_logprobs: int = TOP_LOGPROBS
    logit_lens: int = 0
    """Guesses of each layer at each place."""
    model: str = ""
    request_id: str
    caller: Caller = NOBODY
    arrival: Arrival = field(default=Arrival(), compare=False)
    deadline_ms: int | None = None

    def __post_init__(self) -> None:
        check_request_id(self.request_id)


@dataclass(frozen=True, slots=True)
class PromptPart:
    """The facts of a prompt in the first chunk of its answer."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """Of the tokens from the second on; empty where not asked for."""
    text: str
    """To be shown before the answer; empty without echo."""
    num_cached: int = 0
    """Tokens that needed no computing."""
    hidden: "array[float] | None" = None
    """See `Output`."""


@dataclass(slots=True)
class Chunk:
    """A piece of one answer. Text and token ids are deltas; counts are totals so far.

    Treat it as frozen. It is not, since one is made for each token, and a frozen dataclass takes six times as long to make.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    num_tokens: int
    num_prompt_tokens: int
    seed: int
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    """The stop string or stop token that ended the answer; None for the model's own end-of-text token."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token id, where asked for."""
    prompt: PromptPart | None = None
    """With the first chunk of an answer."""
    times: Times | None = None
    """With the last chunk of an answer."""
    parts: tuple[Part, ...] | None = None
    """Of an answer that is split: what the chunk holds, where that is more than content. `text` is the content alone."""
    has_calls: bool = False
    """True if the answer so far has calls of tools, all of them whole."""
    num_reasoning_tokens: int = 0
    """Tokens of reasoning so far."""

    @property
    def ends_in_calls(self) -> bool:
        """True if the answer has ended with calls of tools."""
        return self.finish_reason is FinishReason.STOP and self.has_calls

    def call_id(self, request_id: str, index: int) -> str:
        """The id of the answer's call `index`."""
        return call_id(request_id, self.seed, self.num_prompt_tokens, self.index, index)

    @property
    def is_plain(self) -> bool:
        """True if it is text and tokens alone, somewhere between an answer's beginning and its end."""
        return self.prompt is None and self.finish_reason is None and not self.logprobs and self.parts is None


class TokenUsage(NamedTuple):
    """Token counts of one or more answers."""

    prompt: int = 0
    cached_prompt: int = 0
    """Those of the prompts that were found in the prefix cache."""
    completion: int = 0
    reasoning: int = 0
    """Those of the answers that are reasoning."""

    def plus(self, other: "TokenUsage") -> "TokenUsage":
        """The sum of both."""
        return TokenUsage(*map(sum, zip(self, other, strict=True)))


NO_TOKENS = TokenUsage()


@dataclass(slots=True)
class TokenCounts:
    """Tokens of a whole call. A prompt counts once, however many answers it gets."""

    n: int
    _prompts: dict[int, int] = field(default_factory=dict)
    _cached_tokens: dict[int, int] = field(default_factory=dict)
    _answers: dict[int, int] = field(default_factory=dict)
    _reasoning: dict[int, int] = field(default_factory=dict)

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Take in the totals that the chunks carry."""
        for chunk in chunks:
            place = chunk.index // self.n
            self._prompts[place] = chunk.num_prompt_tokens
            if chunk.prompt is not None:  # of several answers the first pays for the prompt
                self._cached_tokens[place] = min(
                    chunk.prompt.num_cached, self._cached_tokens.get(place, chunk.prompt.num_cached)
                )
            self._answers[chunk.index] = chunk.num_tokens
            self._reasoning[chunk.index] = chunk.num_reasoning_tokens

    @property
    def total(self) -> TokenUsage:
        """Tokens of all answers so far."""
        return TokenUsage(
            *(sum(each.values()) for each in (self._prompts, self._cached_tokens, self._answers, self._reasoning))
        )
