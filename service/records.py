"""What passes between a transport and the service: no word of HTTP or of protobuf."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from model.engine.request import FinishReason, Times, TokenLogprob
from model.errors import InvalidRequest
from model.grammar import GrammarSpec
from model.params import (
    MAX_CHOICES,
    MAX_CHOICES_TIMES_PROMPTS,
    MAX_LOGPROBS,
    NO_CHANGE,
    DecodingParams,
    SamplingParams,
    StopRules,
    describe,
    integer,
)
from service.quota import Key, name_of

REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
"""An id goes into headers and log lines, so it holds neither spaces nor line ends."""
MAX_DEADLINE_MS = 24 * 3600 * 1000
MAX_SALT = 128


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt that a chat template is to write, its special tokens included. `write` may take seconds."""

    write: Callable[[], str]


Prompt = str | tuple[int, ...] | ChatPrompt


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
    key: Key | None = None
    """The caller's API key, whose limits count; None where no keys are set."""
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
    cache_salt: str = ""
    """Callers share cached prefixes only within one salt."""
    grammar: GrammarSpec | None = None
    """What each answer must look like."""
    resume_token_ids: tuple[int, ...] = ()
    """Tokens of the answer that the caller has already: the answer goes on after them."""

    def __post_init__(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                integer(name, value, 0, MAX_LOGPROBS)
        if self.truncate_prompt_tokens is not None:
            integer("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, 2**31 - 1)
        if len(self.cache_salt) > MAX_SALT:
            raise InvalidRequest(f"cache_salt may hold at most {MAX_SALT} characters; got {len(self.cache_salt)}", "cache_salt")
        if self.stops.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise InvalidRequest("max_tokens must be at least 1 without echo or prompt_logprobs; got 0 (integer)", "max_tokens")
        if self.grammar is not None and self.stops.min_tokens:
            raise InvalidRequest(
                "min_tokens cannot be combined with structured output, which ends where it is complete", "min_tokens"
            )
        if self.resume_token_ids and (self.n > 1 or len(self.prompts) > 1):
            raise InvalidRequest("resume_token_ids needs a single prompt and n = 1", "resume_token_ids")
        if not REQUEST_ID.fullmatch(self.request_id):
            wanted = "1 to 128 letters, digits and . _ : / + = @ -"
            raise InvalidRequest(f"request_id must be {wanted}; got {describe(self.request_id)}", "request_id")
        integer("n", self.n, 1, MAX_CHOICES)
        if self.deadline_ms is not None:
            integer("deadline_ms", self.deadline_ms, 1, MAX_DEADLINE_MS)
        if not self.prompts:
            raise InvalidRequest("prompt must hold at least one prompt; got an empty list", "prompt")
        if self.n * len(self.prompts) > MAX_CHOICES_TIMES_PROMPTS:
            limit = f"n times the number of prompts must be at most {MAX_CHOICES_TIMES_PROMPTS}"
            raise InvalidRequest(f"{limit}; got {self.n} x {len(self.prompts)}", "n")

    @property
    def num_answers(self) -> int:
        """Answers to make."""
        return self.n * len(self.prompts)

    @property
    def owner(self) -> str | None:
        """The name of the caller's key, by which callers take turns."""
        return name_of(self.key)


@dataclass(frozen=True, slots=True)
class PromptPart:
    """What the first chunk of an answer tells of its prompt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """Of the tokens from the second on; empty where not asked for."""
    text: str
    """To be shown before the answer; empty without echo."""
    num_cached: int = 0
    """Tokens that needed no computing."""


@dataclass(slots=True)
class Chunk:
    """A piece of one answer. Text and token ids are deltas; counts are totals so far.

    Nobody changes one, but one is made for each token, and a frozen dataclass takes six times as long to make.
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

    @property
    def is_plain(self) -> bool:
        """Whether it is text and tokens alone, somewhere between an answer's beginning and its end."""
        return self.prompt is None and self.finish_reason is None and not self.logprobs


def whole(chunks: Iterable[Chunk]) -> list[Chunk]:
    """One chunk for each answer, with its pieces put together."""
    gathered = Gathered()
    gathered.add(chunks)
    return gathered.answers()


class Gathered:
    """The answers of a call, put together while their chunks come, so that little is left to do at the end."""

    def __init__(self) -> None:
        self._answers: dict[int, _Pieces] = {}

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Take in chunks, in the order in which they were made."""
        for chunk in chunks:
            pieces = self._answers.get(chunk.index)
            if pieces is None:
                pieces = self._answers[chunk.index] = _Pieces(chunk, chunk)
            pieces.last = chunk
            pieces.texts.append(chunk.text)
            pieces.token_ids += chunk.token_ids
            pieces.logprobs += chunk.logprobs

    def answers(self) -> list[Chunk]:
        """One chunk for each answer, by index."""
        return [pieces.joined() for _, pieces in sorted(self._answers.items())]


@dataclass(slots=True)
class _Pieces:
    """What has come of one answer."""

    first: Chunk
    last: Chunk
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def joined(self) -> Chunk:
        """All of it as one chunk."""
        text, token_ids, logprobs = "".join(self.texts), tuple(self.token_ids), tuple(self.logprobs)
        return replace(self.last, text=text, token_ids=token_ids, logprobs=logprobs, prompt=self.first.prompt)


@dataclass(slots=True)
class Usage:
    """Tokens of a whole call. A prompt counts once, however many answers it gets."""

    n: int
    _prompts: dict[int, int] = field(default_factory=dict)
    _cached: dict[int, int] = field(default_factory=dict)
    _answers: dict[int, int] = field(default_factory=dict)

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Take in the totals that the chunks carry."""
        for chunk in chunks:
            place = chunk.index // self.n
            self._prompts[place] = chunk.num_prompt_tokens
            if chunk.prompt is not None:  # of several answers the first pays for the prompt
                self._cached[place] = min(chunk.prompt.num_cached, self._cached.get(place, chunk.prompt.num_cached))
            self._answers[chunk.index] = chunk.num_tokens

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts that have been answered so far."""
        return sum(self._prompts.values())

    def document(self) -> dict[str, Any]:
        """The counts in OpenAI's words."""
        prompt, completion = self.prompt_tokens, self.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }

    @property
    def completion_tokens(self) -> int:
        """Tokens of all answers so far."""
        return sum(self._answers.values())
