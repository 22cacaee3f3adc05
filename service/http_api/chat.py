"""OpenAI's chat: messages to a prompt, a request to a Command, chunks to chat completion objects."""

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import StrictBool, StrictInt, StrictStr

from model.chat import ChatTemplate
from model.engine.request import TokenLogprob
from model.errors import InvalidRequest, NotSupported
from model.generation_config import NO_DEFAULTS, Defaults
from model.params import describe, integer
from model.tokenizer import Tokenizer
from service.http_api.logprobs import finite
from service.http_api.openai import decoding_of, sampling_of, stops_of, timing_of
from service.http_api.schemas import Generation, StreamOptions, kind_of, validated
from service.http_api.structured import grammar_of
from service.records import ChatPrompt, Chunk, Command, Usage

MAX_MESSAGES = 2048
MAX_TOP_LOGPROBS = 20
MAX_NAME = 256
ROLES = ("system", "developer", "user", "assistant", "tool")
NO_TOOLS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
}
"""Fields of tool calling, and their values, beside null, that ask for none."""
_NULL_ONLY = ("tool_calls", "function_call", "refusal", "audio", "annotations")
"""What a client sends back with an assistant's message, as it got it: only where it says nothing."""


class ChatRequest(Generation):
    """The body of POST /v1/chat/completions. The messages are read by `messages_of`, whose errors name the place."""

    messages: list[Any]
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    chat_template_kwargs: dict[StrictStr, Any] | None = None


def read_chat(fields: dict[str, Any]) -> ChatRequest:
    """A parsed body as a ChatRequest. Raises InvalidRequest with the field named."""
    for name, value in fields.items():
        if not _asks_for_nothing(name, value):
            raise NotSupported(f"{name}: tool calling is not supported; got {describe(value)}", name)
    fields = {name: value for name, value in fields.items() if name not in NO_TOOLS}
    if fields.get("messages") is None:
        raise InvalidRequest("messages is required: a list of objects with a role and a content", "messages")
    return validated(ChatRequest, fields)


def _asks_for_nothing(name: str, value: Any) -> bool:
    off = NO_TOOLS.get(name)
    return off is None or value is None or any(kind_of(value) is kind_of(each) and value == each for each in off)


def messages_of(body: ChatRequest) -> list[dict[str, Any]]:
    """The messages as templates take them: a role, a text or its parts, what else was given. Raises InvalidRequest."""
    if not 1 <= len(body.messages) <= MAX_MESSAGES:
        limits = f"messages must hold 1 to {MAX_MESSAGES} messages"
        raise InvalidRequest(f"{limits}; got {len(body.messages)}", "messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(body.messages)]


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _wrong(place, "must be an object with a role and a content", message)
    role = message.get("role")
    if role not in ROLES:
        raise _wrong(f"{place}.role", f"must be one of {', '.join(ROLES)}", role)
    read = {"role": "system" if role == "developer" else role, "content": _content(message, role, f"{place}.content")}
    for name, value in message.items():
        here = f"{place}.{name[:64]}"
        if name not in ("role", "content", "name", "tool_call_id", *_NULL_ONLY) or (
            name == "tool_call_id" and role != "tool" and value is not None
        ):
            raise InvalidRequest(f"{here} is not a field of a message with this role", here)
        if name in _NULL_ONLY and value not in (None, []):
            raise NotSupported(f"{here} is not supported: a message holds text alone; got {describe(value)}", here)
        if name in ("name", "tool_call_id") and value is not None:
            read[name] = _short(value, here)
    return read


def _content(message: dict[str, Any], role: str, place: str) -> str | list[dict[str, str]]:
    content = message.get("content")
    if content is None and role == "assistant":
        return ""  # an assistant's turn that was a tool call or a refusal alone
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise _wrong(place, "must be a string or a list of at least one text part", content)
    return [{"type": "text", "text": _part(part, f"{place}[{index}]")} for index, part in enumerate(content)]


def _part(part: Any, place: str) -> str:
    if not isinstance(part, dict):
        raise _wrong(place, "must be an object with a type", part)
    kind = part.get("type")
    if kind != "text":
        described = describe(kind)
        raise NotSupported(f"{place}.type must be 'text', as this model takes no other input; got {described}", f"{place}.type")
    for name in (name for name in part if name not in ("type", "text")):
        here = f"{place}.{name[:64]}"
        raise InvalidRequest(f"{here} is not a field of a text part", here)
    if not isinstance(part.get("text"), str):
        raise _wrong(f"{place}.text", "must be a string", part.get("text"))
    text: str = part["text"]
    return text


def _short(value: Any, place: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise _wrong(place, f"must be a string of at most {MAX_NAME} characters", value)
    return value


def _wrong(place: str, wanted: str, value: Any) -> InvalidRequest:
    return InvalidRequest(f"{place} {wanted}; got {describe(value)}", place)


def to_prompt(body: ChatRequest, template: ChatTemplate) -> str:
    """The text that the model is to continue. It holds its special tokens: encode it with add_special_tokens=False."""
    return template.render(messages_of(body), **body.chat_template_kwargs or {})


def to_command(body: ChatRequest, request_id: str, template: ChatTemplate, defaults: Defaults = NO_DEFAULTS) -> Command:
    """What the body asks for. Its messages become a prompt when the call is prepared, and are checked then."""
    prompt = ChatPrompt(partial(to_prompt, body, template))
    return Command(prompts=(prompt,), request_id=request_id, **command_arguments(body, defaults))


def command_arguments(body: ChatRequest, defaults: Defaults) -> dict[str, Any]:
    """All of a Command but its prompt and its id. Raises InvalidRequest with the field named."""
    if body.model == "":
        raise InvalidRequest("model must be the name of a model, or absent; got '' (string)", "model")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is only allowed when stream is true", "stream_options")
    return {
        "sampling": sampling_of(body, defaults),
        "stops": stops_of(body, max_tokens_of(body)),
        "decoding": decoding_of(body, defaults),
        "n": 1 if body.n is None else body.n,
        "model": body.model or "",
        "deadline_ms": body.deadline_ms,
        "skip_special_tokens": body.skip_special_tokens is not False,
        "logprobs": logprobs_of(body),
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
        "cache_salt": body.cache_salt or "",
        "grammar": grammar_of(body.response_format, body.structured_outputs),
    }


def max_tokens_of(body: ChatRequest) -> int | None:
    """The longest answer, under either of its names; None for what the context has left."""
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(body, name) is not None:
            integer(name, getattr(body, name), 1, 2**31 - 1)
    given = {value for value in (body.max_tokens, body.max_completion_tokens) if value is not None}
    if len(given) > 1:
        both = f"max_tokens is {body.max_tokens} and max_completion_tokens is {body.max_completion_tokens}"
        raise InvalidRequest(
            f"max_completion_tokens must equal max_tokens where both are given; {both}", "max_completion_tokens"
        )
    return next(iter(given), None)


def logprobs_of(body: ChatRequest) -> int | None:
    """Alternatives to report with each token; None where log probabilities are not asked for."""
    if body.top_logprobs is not None:
        integer("top_logprobs", body.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if not body.logprobs:
            raise InvalidRequest("top_logprobs is only allowed when logprobs is true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


@dataclass(slots=True)
class ChatWriter:
    """The objects of one /v1/chat/completions call. `usage` follows the chunks that were written."""

    body: ChatRequest
    request_id: str
    model: str
    fingerprint: str
    usage: Usage
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()))
    _begun: set[int] = field(default_factory=set)

    @property
    def stream_options(self) -> StreamOptions | None:
        """What the stream carries beside the text."""
        return self.body.stream_options

    def events(self, chunk: Chunk) -> list[dict[str, Any]]:
        """The streamed objects of a chunk: before an answer's first comes the one that gives the role."""
        begins = chunk.index not in self._begun
        self._begun.add(chunk.index)
        return [self.role_chunk(chunk), self.chunk(chunk)] if begins else [self.chunk(chunk)]

    def role_chunk(self, chunk: Chunk) -> dict[str, Any]:
        """What the stream of the chunk's answer begins with."""
        delta = {"role": "assistant", "content": ""}
        choice: dict[str, Any] = {"index": chunk.index, "delta": delta, "logprobs": None}
        choice |= {"finish_reason": None, "stop_reason": None}
        if self.body.return_token_ids and chunk.prompt is not None:
            choice["prompt_token_ids"] = iter(chunk.prompt.token_ids)
        return self._object("chat.completion.chunk", [choice], chunk.seed)

    def chunk(self, chunk: Chunk) -> dict[str, Any]:
        """One streamed object; its text and token ids are deltas."""
        choice = self._choice(chunk, {"delta": {"content": chunk.text}})
        return self._object("chat.completion.chunk", [choice], chunk.seed) | timing_of(self.body, [chunk])

    def last_chunk(self) -> dict[str, Any]:
        """The object that a stream with include_usage ends with."""
        return self._object("chat.completion.chunk", [], None) | {"usage": self.usage.document()}

    def whole(self, answers: list[Chunk]) -> dict[str, Any]:
        """The object of a call that was not streamed."""
        choices = []
        for answer in answers:
            message = {"role": "assistant", "content": answer.text, "refusal": None}
            choice = self._choice(answer, {"message": message})
            if self.body.return_token_ids and answer.prompt is not None:
                choice["prompt_token_ids"] = iter(answer.prompt.token_ids)
            choices.append(choice)
        return (
            self._object("chat.completion", choices, answers[-1].seed)
            | {"usage": self.usage.document()}
            | timing_of(self.body, answers)
        )

    def _object(self, kind: str, choices: list[dict[str, Any]], seed: int | None) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **({} if seed is None else {"seed": seed}),
        }

    def _choice(self, chunk: Chunk, text: dict[str, Any]) -> dict[str, Any]:
        rows = {"content": map(self._scored, chunk.logprobs), "refusal": None}
        return {
            "index": chunk.index,
            **text,
            "logprobs": rows if self.body.logprobs else None,
            "finish_reason": chunk.finish_reason,
            "stop_reason": chunk.stop,
            **({"token_ids": iter(chunk.token_ids)} if self.body.return_token_ids else {}),
        }

    def _scored(self, scored: TokenLogprob) -> dict[str, Any]:
        top = scored.top[: self.body.top_logprobs or 0]
        return self._token(scored.token_id, scored.logprob) | {"top_logprobs": [self._token(*each) for each in top]}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text, its_bytes = self.tokenizer.text_of(token), self.tokenizer.bytes_of(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(its_bytes)}
